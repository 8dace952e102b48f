"""Sharding plan: the placement of every table and its predicted cost; its file; its export to TorchRec.

``plan.json`` has a strict schema. TorchRec's ``ShardingPlan`` is exported as its serialised document and as the object.
TorchRec makes one exchange per kind of placement. If a plan cuts tables by columns, whole tables are exported as
``column_wise`` with one block, so that both share one exchange, as the plan was priced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from costmodel.base.errors import InputError, MissingDependencyError, OutputError
from costmodel.base.input_files import decoded, read_text
from costmodel.base.output_files import write_whole
from costmodel.gpu.embedding_tables import EmbeddingTable
from e2e.sharding.placement import PLACED, PlacementKind, TablePlacement
from e2e.sharding.planner import Planning
from e2e.sharding.step_graph import options_of_rank
from e2e.sharding.step_model import State
from e2e.sharding.task import INDICES, OUTPUT

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan


@dataclass(frozen=True)
class RankLoad:
    """Load of one rank: number of ``tables`` (or parts of them), lookup seconds, bytes per step, bytes of memory."""

    rank: int
    tables: int
    forward_seconds: float
    backward_seconds: float
    received_index_bytes: int
    sent_output_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class PlannedTable:
    """Placement of a table, with its properties for validation. ``dtype`` and ``optimizer`` as in ``tables.yaml``."""

    placement: TablePlacement
    rows: int
    dim: int
    dtype: str = "float32"
    optimizer: str = "sgd"


@dataclass(frozen=True)
class TablePlan:
    """Plan with its predicted step times."""

    machine: str
    gpus: int
    nodes: int
    # Samples per GPU.
    batch_size: int
    tables: tuple[PlannedTable, ...]
    ranks: tuple[RankLoad, ...]
    # Name of the generator that made the plan.
    generator: str
    # Simulated step of lookups, exchanges and the dense part.
    step_seconds: float
    dense_seconds: float
    # Lower bound of the step of any plan; 0: unknown.
    bound_seconds: float
    # Memory for tables and buffers on a rank.
    memory_limit_bytes: int
    # Step of each greedy plan; `None`: does not fit.
    greedy_seconds: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def placements(self) -> tuple[TablePlacement, ...]:
        """Placements of all tables, in order."""
        return tuple(table.placement for table in self.tables)

    def check(self, tables: Sequence[EmbeddingTable]) -> None:
        """Raise :class:`InputError` unless the plan is for exactly these tables, in any order."""
        planned = {table.placement.table: table for table in self.tables}
        for table in tables:
            found = planned.get(table.name)
            if found is None:
                raise InputError(f"the plan has no table {table.name!r}; make a new plan with `python -m e2e shard`")
            if (found.rows, found.dim) != (table.rows, table.dim):
                raise InputError(
                    f"table {table.name!r} has {table.rows} x {table.dim} values, the plan was made for "
                    f"{found.rows} x {found.dim}; make a new plan with `python -m e2e shard`"
                )
            for key, now, then in (
                ("dtype", table.dtype, found.dtype),
                ("optimizer", table.optimizer, found.optimizer),
            ):
                if now != then:
                    raise InputError(
                        f"table {table.name!r} has the {key} {now}, the plan was made for {then}; make a new plan with "
                        "`python -m e2e shard`"
                    )
        extra = sorted(set(planned) - {table.name for table in tables})
        if extra:
            raise InputError(f"the plan has a table {extra[0]!r} that is not among the tables; make a new plan")


def plan_of(planning: Planning) -> TablePlan:
    """Return the record of the best plan."""
    task, best = planning.problem.task, planning.best
    planned = tuple(
        PlannedTable(placement, table.rows, table.dim, table.dtype, table.optimizer)
        for placement, table in zip(best.state.placements(), task.tables, strict=True)
    )
    return TablePlan(
        machine=task.cluster.machine.name,
        gpus=task.ranks,
        nodes=task.cluster.nodes,
        batch_size=task.batch_size,
        tables=planned,
        ranks=rank_loads(best.state),
        generator=best.generator,
        step_seconds=best.simulated,
        dense_seconds=task.dense.seconds,
        bound_seconds=planning.bound,
        memory_limit_bytes=task.memory_bytes,
        greedy_seconds={
            name: None if candidate is None else candidate.simulated for name, candidate in planning.greedy.items()
        },
    )


def rank_loads(state: State) -> tuple[RankLoad, ...]:
    """Loads of every rank, over all kinds of placements."""
    costs, memory = state.problem.costs, state.memory()
    loads = []
    for rank in range(state.problem.ranks):
        groups = options_of_rank(state, rank)
        kernels = [costs.kernel(numbers) for numbers in groups.values() if numbers]
        moved = costs.shard[groups["placed"] + groups["rows"]]
        loads.append(
            RankLoad(
                rank=rank,
                tables=sum(map(len, groups.values())),
                forward_seconds=sum(forward for forward, _ in kernels),
                backward_seconds=sum(backward for _, backward in kernels),
                received_index_bytes=round(float(moved[:, INDICES].sum())),
                sent_output_bytes=round(float(moved[:, OUTPUT].sum())),
                memory_bytes=round(float(memory[rank])),
            )
        )
    return tuple(loads)


FORMAT = 1
_Count = Annotated[int, Field(ge=1, strict=True)]
_Size = Annotated[int, Field(ge=0, strict=True)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def save_plan(plan: TablePlan, path: Path) -> None:
    """Write ``plan``; raises ``OutputError`` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plan_record(plan), indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None


def load_plan(path: Path) -> TablePlan:
    """Read the output of :func:`save_plan`; raises ``InputError`` naming the file and the problem."""
    try:
        document = decoded(read_text(path, "record"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make a plan with `python -m e2e shard`") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); make a plan with `python -m e2e shard`") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a plan (a JSON object); make one with `python -m e2e shard`")
    try:
        return _plan(_File.model_validate(document))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        raise InputError(f"{path}: {f'{key}: ' if key else ''}{text}; correct it or make a new plan") from None


def plan_record(plan: TablePlan) -> dict[str, Any]:
    """Return the JSON document."""
    record = asdict(plan)
    record["tables"] = [_table_record(table) for table in plan.tables]
    record["ranks"] = list(record["ranks"])
    return {"format": FORMAT, **record}


def _table_record(table: PlannedTable) -> dict[str, Any]:
    where = table.placement
    return {
        "table": where.table,
        "kind": where.kind,
        "ranks": list(where.ranks),
        "rows": table.rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer,
    }


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Table(_Strict):
    table: str
    kind: PlacementKind
    ranks: list[_Size]
    rows: _Count
    dim: _Count
    dtype: str
    optimizer: str

    @model_validator(mode="after")
    def _one_place_each(self) -> _Table:
        if not self.ranks:
            raise ValueError(f"table {self.table}: no ranks; name at least one")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"table {self.table}: a rank twice; name each once")
        if self.kind == "table-wise" and len(self.ranks) != 1:
            raise ValueError(
                f"table {self.table}: table-wise is on one rank, not on {len(self.ranks)}; name one, or cut the table"
            )
        if self.kind == "column-wise" and len(self.ranks) < 2:
            raise ValueError(f"table {self.table}: column-wise needs at least two ranks; on one it is table-wise")
        if self.kind == "column-wise" and self.dim % len(self.ranks):
            raise ValueError(
                f"table {self.table}: {self.dim} columns do not divide into {len(self.ranks)} blocks; "
                "name a number of ranks that divides them"
            )
        return self


class _Rank(_Strict):
    rank: _Size
    tables: _Size
    forward_seconds: _Seconds
    backward_seconds: _Seconds
    received_index_bytes: _Size
    sent_output_bytes: _Size
    memory_bytes: _Size


class _File(_Strict):
    format: Literal[1]
    machine: str
    gpus: _Count
    nodes: _Count
    batch_size: _Count
    tables: list[_Table]
    ranks: list[_Rank]
    generator: str
    step_seconds: _Seconds
    dense_seconds: _Seconds
    bound_seconds: _Seconds
    memory_limit_bytes: _Size
    greedy_seconds: dict[str, _Seconds | None]

    @model_validator(mode="after")
    def _known_ranks(self) -> _File:
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))) or len(self.ranks) != self.gpus:
            raise ValueError(f"ranks are not those of {self.gpus} GPUs, in order; list them from 0 on")
        names = [table.table for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError("a table is placed twice; leave one out")
        for table in self.tables:
            if max(table.ranks) >= self.gpus:
                raise ValueError(
                    f"table {table.table}: rank {max(table.ranks)} of {self.gpus} GPUs; "
                    "ranks count from 0, name smaller ones"
                )
            if table.kind not in PLACED and sorted(table.ranks) != list(range(self.gpus)):
                raise ValueError(f"table {table.table}: {table.kind} needs all {self.gpus} ranks")
        return self


def _plan(file: _File) -> TablePlan:
    tables = tuple(
        PlannedTable(
            TablePlacement(each.table, each.kind, tuple(each.ranks)), each.rows, each.dim, each.dtype, each.optimizer
        )
        for each in file.tables
    )
    ranks = tuple(RankLoad(**each.model_dump()) for each in file.ranks)
    rest = file.model_dump(exclude={"format", "tables", "ranks"})
    return TablePlan(tables=tables, ranks=ranks, **rest)


# Path of the EmbeddingBagCollection in a model (default: that of torchrec.models.dlrm.DLRM).
MODULE = "sparse_arch.embedding_bag_collection"
DENSE, FUSED = "dense", "fused"
_TYPES = {
    "table-wise": "table_wise",
    "column-wise": "column_wise",
    "row-wise": "row_wise",
    "data-parallel": "data_parallel",
}


def torchrec_record(plan: TablePlan, module: str = MODULE, device: str = "cuda") -> dict[str, Any]:
    """Return the output of ``ShardingPlan._serialize``: module -> table -> sharding type, kernel, ranks, shards.

    ``device``: ``cuda``, or ``cpu`` to try a plan without GPUs.
    """
    columns = any(table.placement.kind == "column-wise" for table in plan.tables)
    tables = {table.placement.table: _table(table, plan, columns, device) for table in plan.tables}
    return {"plan": {module: tables}}


def save_torchrec(plan: TablePlan, path: Path, module: str = MODULE) -> None:
    """Write :func:`torchrec_record`; raises ``OutputError`` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(torchrec_record(plan, module), indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def torchrec_plan(plan: TablePlan, module: str = MODULE, device: str = "cuda") -> ShardingPlan:
    """Return the object for ``DistributedModelParallel(plan=...)``.

    Raises ``MissingDependencyError`` without TorchRec.
    """
    try:
        from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
    except ImportError as error:
        raise MissingDependencyError(
            f"TorchRec cannot be imported ({error}); pip install '.[torchrec]', or use --torchrec FILE"
        ) from None
    record = torchrec_record(plan, module, device)
    modules = {}
    for name, tables in record["plan"].items():
        found = EmbeddingModuleShardingPlan()
        for table, entry in tables.items():
            shards = [ShardMetadata(**shard) for shard in entry.get("shards", [])]
            found[table] = ParameterSharding(
                sharding_type=entry["sharding_type"],
                compute_kernel=entry["compute_kernel"],
                ranks=entry["ranks"],
                sharding_spec=EnumerableShardingSpec(shards) if shards else None,
            )
        modules[name] = found
    return ShardingPlan(modules)


def _table(table: PlannedTable, plan: TablePlan, columns: bool, device: str) -> dict[str, Any]:
    kind = table.placement.kind
    copies = kind == "data-parallel"
    name = _TYPES["column-wise"] if columns and kind == "table-wise" else _TYPES[kind]
    entry: dict[str, Any] = {
        "sharding_type": name,
        "compute_kernel": DENSE if copies else FUSED,
        "ranks": list(table.placement.ranks),
    }
    if not copies:
        entry["shards"] = list(_shards(table, plan, device))
    return entry


def _shards(table: PlannedTable, plan: TablePlan, device: str) -> Iterator[dict[str, Any]]:
    """Yield the shards; blocks of rows are ceil(rows / ranks) long, as in TorchRec; the last may be short or empty."""
    ranks = table.placement.ranks
    rows, columns = table.rows, table.dim
    if table.placement.kind == "row-wise":
        rows = -(-table.rows // len(ranks))
    if table.placement.kind == "column-wise":
        columns = table.dim // len(ranks)
    for place, rank in enumerate(ranks):
        row = min(place * rows, table.rows) if table.placement.kind == "row-wise" else 0
        local = rank % (plan.gpus // plan.nodes)
        column = place * columns if table.placement.kind == "column-wise" else 0
        yield {
            "shard_offsets": [row, column],
            "shard_sizes": [min(rows, table.rows - row), columns],
            "placement": f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/cuda:{local}",
        }
