"""Sharding plan: the placement of every table and its predicted cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.base.errors import InputError
from costmodel.embedding.embedding_tables import EmbeddingTable
from e2e.sharding.planner import Planning
from e2e.sharding.problem.option_costs import INDICES, OUTPUT
from e2e.sharding.problem.placement import TablePlacement
from e2e.sharding.problem.state import State
from e2e.sharding.step_graph import options_of_rank


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
