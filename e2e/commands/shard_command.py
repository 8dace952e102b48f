"""``python -m e2e shard``: placement of embedding tables on GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.base.errors import InputError
from costmodel.base.output_files import check_outputs
from e2e.commands.predict_command import JsonOption, shared
from e2e.sharding.placement import KINDS, MINIMUM_COLUMNS, MOST_GPUS

if TYPE_CHECKING:
    from costmodel.gpu.embedding_tables import EmbeddingTable
    from e2e.sharding.planner import Planning
    from e2e.sharding.task import ShardingTask


def shard_command(
    tables: Annotated[
        Path, typer.Option(help="File of the tables and the dense part (docs/tutorials/shard-tables.md).")
    ],
    gpu: Annotated[str, typer.Option(help="GPU or cluster: a name (`python -m costmodel machines`) or a YAML file.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="GPUs of the job.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write the plan to (.json).")],
    batch_size: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Samples per GPU.")] = 4096,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    network: Annotated[str | None, shared("network")] = None,
    indices: Annotated[
        Path | None,
        typer.Option(help="Batches of real indices by table (.npz)."),
    ] = None,
    reserve: Annotated[float, typer.Option(min=0, max=0.99, help="Share of the memory left free.")] = 0.15,
    kinds: Annotated[str, typer.Option(help="Placements to try, separated by commas.")] = ",".join(KINDS),
    minimum_columns: Annotated[int, typer.Option(min=4, help="Fewest columns of a part of a table.")] = MINIMUM_COLUMNS,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of the search.")] = 15.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 2, help="Seed of the search.")] = 0,
    torchrec: Annotated[Path | None, typer.Option(help="Also write TorchRec's ShardingPlan as JSON.")] = None,
    torchrec_module: Annotated[
        str, typer.Option(help="Path of the EmbeddingBagCollection in the model.")
    ] = "sparse_arch.embedding_bag_collection",
    as_json: JsonOption = False,
) -> None:
    """Place embedding tables on GPUs so that a training step is short and everything fits."""
    from e2e.sharding.plan import plan_of, plan_record, save_plan, save_torchrec
    from e2e.sharding.plan_report import render_plan
    from e2e.sharding.planner import SearchEffort, find_plan, make_problem

    request = ShardingRequest(tables, gpu, gpus, batch_size, nodes, network, indices, reserve, kinds, minimum_columns)
    check_outputs({"-o": output, "--torchrec": torchrec}, {"--tables": tables, "--indices": indices}, makes_folder=True)
    planning = find_plan(make_problem(request.task()), SearchEffort(seconds, seed=seed))
    plan = plan_of(planning)
    save_plan(plan, output)
    if torchrec is not None:
        save_torchrec(plan, torchrec, torchrec_module)
    if as_json:
        print(json.dumps({"plan": plan_record(plan), "explanation": _explanation(planning)}, indent=2))
    else:
        render_plan(planning, plan, output)


@dataclass(frozen=True)
class ShardingRequest:
    """Options of the command."""

    tables: Path
    gpu: str
    gpus: int
    batch_size: int
    nodes: int = 1
    network: str | None = None
    indices: Path | None = None
    reserve: float = 0.15
    kinds: str = ",".join(KINDS)
    minimum_columns: int = MINIMUM_COLUMNS

    def task(self) -> ShardingTask:
        """Make the task with the dense part of ``tables.yaml``.

        Raises ``InputError`` or ``MachineError`` for invalid options.
        """
        from costmodel.collectives import collective_cost_model
        from costmodel.gpu.embedding_tables import read_table_file
        from costmodel.gpu.factory import gpu_cost_model
        from costmodel.machines.cluster import load_cluster
        from e2e.sharding.placement import Rules
        from e2e.sharding.task import ShardingTask, TransferTimes, dense_part, read_dense_model

        wanted = tuple(kind for kind in KINDS if kind in self._kinds())
        file = read_table_file(self.tables)
        tables = with_statistics(file.tables, self.indices)
        cluster = load_cluster(self.gpu, self.gpus, self.nodes, self.network)
        task = ShardingTask(
            tables, cluster, self.batch_size, reserve=self.reserve, rules=Rules(self.minimum_columns, wanted)
        )
        try:
            model = read_dense_model(file.model)
        except InputError as error:
            raise InputError(f"{self.tables}: {error}") from None
        if model is None:
            return task
        times = TransferTimes(collective_cost_model(cluster), cluster.gpus, cluster.nodes)
        return replace(task, dense=dense_part(model, tables, self.batch_size, gpu_cost_model(cluster.machine), times))

    def _kinds(self) -> list[str]:
        names = [name.strip() for name in self.kinds.split(",") if name.strip()]
        unknown = [name for name in names if name not in KINDS]
        if unknown or not names:
            raise InputError(f"--kinds {self.kinds}: expected some of {', '.join(KINDS)}, with commas")
        return names


def with_statistics(tables: Sequence[EmbeddingTable], path: Path | None) -> tuple[EmbeddingTable, ...]:
    """Return ``tables`` with the row popularity of the batches in ``path`` for the tables that it names.

    Raises ``InputError`` if it names none, or has an index beyond a table's rows.
    """
    if path is None:
        return tuple(tables)
    from costmodel.gpu.embedding_tables import load_statistics, on_rows

    known = load_statistics(path)
    if not any(table.name in known for table in tables):
        raise InputError(
            f"{path}: has indices of {', '.join(list(known)[:3])} ..., but of none of the tables; "
            "give tables the names of their indices"
        )
    try:
        return tuple(
            replace(table, statistics=on_rows(known[table.name], table.rows, table.name))
            if table.name in known
            else table
            for table in tables
        )
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _explanation(planning: Planning) -> dict[str, Any]:
    from e2e.sharding.plan_report import explain_plan

    record = asdict(explain_plan(planning))
    record["candidates"] = [
        {
            "generator": each.generator,
            "closed_form_seconds": each.seconds,
            "simulated_seconds": each.simulated,
            "expected_seconds": each.expected,
        }
        for each in (planning.best, *planning.others)
    ]
    return record | {
        "bound_seconds": planning.bound,
        "gap": planning.gap,
        "faster_than_greedy_in_share_of_scenarios": planning.confidence,
        "search_seconds": planning.search_seconds,
    }
