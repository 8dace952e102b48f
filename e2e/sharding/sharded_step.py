"""Graph of a sharded DLRM, host included, for ``predict --model dlrm --config tables.yaml --sharding plan.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from costmodel.embedding.embedding_tables import OPTIMIZER_STATE, EmbeddingTable, read_table_file
from costmodel.machines.cluster import Cluster
from costmodel.operators.device_work import MemoryCopy, OptimizerStep
from costmodel.operators.lookups import EmbeddingLookup, TableLookup
from e2e.sharding.plan import TablePlan
from e2e.sharding.plan_file import load_plan
from e2e.sharding.planner import make_problem
from e2e.sharding.problem.dense_costs import read_dense_model
from e2e.sharding.problem.option_costs import MEMORY, piece_of
from e2e.sharding.problem.placement import Rules
from e2e.sharding.problem.state import State, state_of
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.sharded_rank import ShardedRank
from e2e.sharding.step_graph import emit_step, options_of_rank
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage
from e2e.step.operator_trace import Phase
from e2e.step.options import StepOptions

if TYPE_CHECKING:
    from e2e.sharding.dense_model import CapturedDense

# Kernels of one backward pass of FBGEMM's table-batched operator (the recorded step of facebookresearch/param has
# linearise, sort, reduce by key, scan, find long segments, per block, per warp, and their initialisations).
BACKWARD_LAUNCHES = 12
_KERNEL = "table-batched embedding"
# Host calls as recorded for copies and for tables with a fused optimizer (recorded with Adagrad; used for all of them,
# since they share a C++ template).
_BACKWARD = "autograd::engine::evaluate_function: torch::autograd::CppNode<SplitLookupFunction_{}_Op>"
_CALLS = {
    (False, False): "fbgemm::split_embedding_codegen_lookup_adagrad_function",
    (True, False): "fbgemm::dense_embedding_codegen_lookup_function",
    (False, True): _BACKWARD.format("adagrad"),
    (True, True): _BACKWARD.format("Dense"),
}


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """Graph of a sharded model with its memory."""

    graph: ExecutionGraph
    # Rank -> peak memory.
    memory: Mapping[int, MemoryUsage]
    # Differences between the plan's setting and this one.
    warnings: tuple[str, ...] = ()
    # Samples of all GPUs in a step.
    samples: int = 0


def sharded_dlrm(
    plan: Path, tables: Path, cluster: Cluster, batch_size: int | None = None, options: StepOptions | None = None
) -> ShardedModel:
    """Read and check the files, capture the dense part, build the graph; errors name the invalid file.

    ``batch_size``: samples per GPU (``None``: that of the plan).
    """
    from e2e.sharding.dense_model import capture_dense

    file = read_table_file(tables)
    found = load_plan(plan)
    try:
        found.check(file.tables)
        model = read_dense_model(file.model)
    except InputError as error:
        raise InputError(f"{plan} for {tables}: {error}") from None
    if model is None:
        raise InputError(f"{tables}: has no model (bottom and top widths); add it to predict a whole step")
    if cluster.gpus != found.gpus:
        raise InputError(f"{plan}: is for {found.gpus} GPUs, --gpus says {cluster.gpus}; make a plan for as many")
    samples = found.batch_size if batch_size is None else batch_size
    dense = capture_dense(model, file.tables, samples, options)
    try:
        built = build_graph(found, file.tables, dense, cluster, samples)
    except InputError as error:
        raise InputError(f"{plan} for {tables}: {error}") from None
    warnings = tuple(_differences(found, plan, cluster, samples))
    return replace(built, warnings=warnings, samples=samples * cluster.gpus)


def _differences(plan: TablePlan, path: Path, cluster: Cluster, batch_size: int) -> Iterator[str]:
    """Yield a warning for each difference between the plan's setting and the predicted one.

    Another plan may be better there.
    """
    for what, planned, now in (
        ("machine", plan.machine, cluster.machine.name),
        ("nodes", plan.nodes, cluster.nodes),
        ("samples per GPU", plan.batch_size, batch_size),
    ):
        if planned != now:
            yield f"{path}: the plan was made for {what} {planned}, this is {now}; another plan may be faster"


def build_graph(
    plan: TablePlan, tables: Sequence[EmbeddingTable], dense: CapturedDense, cluster: Cluster, batch_size: int
) -> ShardedModel:
    """Return the unpriced graph of every rank, and its memory. Ranks are not folded: each has its own tables."""
    placements = {table.placement.table: table.placement for table in plan.tables}
    task = ShardingTask(tuple(tables), cluster, batch_size, rules=Rules(minimum_columns=4))
    try:
        state = state_of(make_problem(task), tuple(placements[table.name] for table in tables))
    except KeyError as error:
        raise InputError(
            f"the plan cuts table {tables[error.args[0][0]].name!r} in a way that kernels do not allow; "
            "make a new plan with `python -m e2e shard`"
        ) from None
    ranks = []
    for rank in range(cluster.gpus):
        program = ShardedRank(rank, cluster.gpus, host=True)
        emit_step(program, state, KernelLookups(state), dense)
        ranks.append(program.graph())
    graph = ExecutionGraph(tuple(ranks), source=f"dlrm, {len(tables)} tables sharded over {cluster.gpus} GPUs")
    return ShardedModel(graph, {rank: _memory(state, rank, dense.memory) for rank in range(cluster.gpus)})


@dataclass(frozen=True, eq=False)
class KernelLookups:
    """Table-batched kernels of a rank, one per group of tables and optimizer, priced by the kernel models."""

    state: State

    def put(self, rank: ShardedRank, group: str, backward: bool) -> None:
        """Add the lookups of ``group`` to ``rank``, or their backward pass."""
        by_optimizer: dict[str, list[int]] = {}
        for number in options_of_rank(self.state, rank.rank)[group]:
            by_optimizer.setdefault(self._table(number).optimizer, []).append(number)
        for optimizer, numbers in by_optimizer.items():
            self._kernel(rank, group, numbers, "sgd" if group == "copies" else optimizer, backward)
            if backward and group == "copies":
                for number in numbers:
                    self._update(rank, self._table(number))

    def _kernel(self, rank: ShardedRank, group: str, numbers: list[int], optimizer: str, backward: bool) -> None:
        lookups = [self._lookup(number) for number in numbers]
        if backward:
            record = EmbeddingLookup.of(lookups, "backward", optimizer, whole_pass=True)
            launches = BACKWARD_LAUNCHES
        else:
            record, launches = EmbeddingLookup.of(lookups), 1
        phase: Phase = "backward" if backward else "forward"
        name = f"{_KERNEL}, {group}, {phase}"
        rank.kernel(name, None, (record,), phase, launches, _CALLS[group == "copies", backward])

    def _lookup(self, number: int) -> TableLookup:
        option, task = self.state.problem.costs.options[number], self.state.problem.task
        piece = piece_of(self._table(number), option)
        batch = task.batch_size if option.kind == "data-parallel" else task.samples
        return TableLookup(piece.rows, piece.dim, piece.indices(batch), batch, piece.dtype, piece.statistics)

    def _update(self, rank: ShardedRank, table: EmbeddingTable) -> None:
        """Add the clearing of the dense gradient and the update of the whole table."""
        elements, states = table.rows * table.dim, OPTIMIZER_STATE[table.optimizer][1]
        record = OptimizerStep("sgd", elements, 1, 2 + states, 1 + states, table.dtype)
        rank.kernel("aten::zero_", None, (MemoryCopy(elements * 4, "memset"),), "backward")
        rank.kernel("aten::_foreach_add_", None, (record,), "backward")

    def _table(self, number: int) -> EmbeddingTable:
        problem = self.state.problem
        return problem.task.tables[problem.costs.options[number].table]


def _memory(state: State, rank: int, dense: MemoryUsage) -> MemoryUsage:
    """Memory of tables, their state and buffers, plus the dense part."""
    costs, tables = state.problem.costs, state.problem.task.tables
    weights = states = 0
    for numbers in options_of_rank(state, rank).values():
        for number in numbers:
            piece = piece_of(tables[costs.options[number].table], costs.options[number])
            weights, states = weights + piece.weight_bytes, states + piece.optimizer_bytes
    buffers = round(float(state.loads[rank, MEMORY] + state.common_memory)) - weights - states
    breakdown = dict(dense.breakdown)
    breakdown["parameters"] += weights
    breakdown["optimizer_state"] += states
    breakdown["activations"] += max(buffers, 0)
    return MemoryUsage(sum(breakdown.values()), breakdown, -1, "sharded step")
