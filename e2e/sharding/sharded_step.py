"""Graph of a sharded DLRM, host included, for ``predict --model dlrm --config tables.yaml --sharding plan.json``.

The dense part is captured from PyTorch, in pieces that the step places between its exchanges: bottom MLP, interaction
and top MLP separately, so that each kernel's piece is known. Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from costmodel.gpu.embedding_tables import OPTIMIZER_STATE, EmbeddingTable, read_table_file
from costmodel.machines.cluster import Cluster
from costmodel.operators.device_work import MemoryCopy, OptimizerStep
from costmodel.operators.lookups import EmbeddingLookup, TableLookup
from e2e.capture.models.dlrm import mlp
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.sharding.placement import Rules
from e2e.sharding.plan import TablePlan, load_plan
from e2e.sharding.planner import make_problem
from e2e.sharding.step_graph import ShardedRank, emit_step, options_of_rank
from e2e.sharding.step_model import State, state_of
from e2e.sharding.task import BUCKET_BYTES, MEMORY, DenseModel, ShardingTask, piece_of, read_dense_model
from e2e.step.execution_graph import Action, ExecutionGraph, HostWork, Launch, RankGraph
from e2e.step.memory import ACCUMULATE_GRAD, MemoryUsage, peak_memory
from e2e.step.operator_trace import OperatorTrace, Phase
from e2e.step.options import StepOptions

# Size of DDP's first bucket, small so that communication starts early (`kDefaultFirstBucketBytes`).
FIRST_BUCKET_BYTES = 2**20
TORCH_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class DensePiece:
    """Host actions of a captured piece, in order; ``reduce``: bytes of the bucket that is all-reduced after it."""

    actions: tuple[Action, ...]
    source: RankGraph
    reduce: int = 0


@dataclass(frozen=True, eq=False)
class CapturedDense:
    """Captured passes of the part of DLRM without tables (MLPs, interaction), alike on every rank."""

    # Pieces by name: `bottom forward`, `top forward`, `top backward`, `interaction backward`, `bottom backward`,
    # `optimizer`.
    pieces: dict[str, tuple[DensePiece, ...]]
    # Peak memory of the dense part, without tables.
    memory: MemoryUsage

    def bottom_forward(self, rank: ShardedRank) -> None:
        self._put(rank, "bottom forward")

    def top_forward(self, rank: ShardedRank) -> None:
        self._put(rank, "top forward")

    def top_backward(self, rank: ShardedRank) -> list[int]:
        return self._put(rank, "top backward")

    def interaction_backward(self, rank: ShardedRank) -> None:
        self._put(rank, "interaction backward")

    def bottom_backward(self, rank: ShardedRank) -> list[int]:
        return self._put(rank, "bottom backward")

    def optimizer(self, rank: ShardedRank) -> None:
        self._put(rank, "optimizer")

    def _put(self, rank: ShardedRank, name: str) -> list[int]:
        events = []
        for piece in self.pieces[name]:
            rank.paste(piece.actions, piece.source)
            if piece.reduce and rank.ranks > 1:
                events.append(rank.collective("all_reduce of gradients", "all_reduce", piece.reduce, phase="backward"))
        return events


def capture_dense(
    model: DenseModel, tables: Sequence[EmbeddingTable], batch_size: int, options: StepOptions | None = None
) -> CapturedDense:
    """Capture one training step with SGD of ``batch_size`` samples."""
    options = options or StepOptions()
    dtype = TORCH_DTYPES[options.dtype]
    widths = model.top_widths(tables)
    with torch.device("meta"):
        bottom, top = mlp(model.bottom, last_sigmoid=False).to(dtype), mlp(widths, last_sigmoid=True).to(dtype)
        interaction = Interaction(model, tables)
        dense = torch.empty((batch_size, model.bottom[0]), dtype=dtype)
        first = torch.empty((batch_size, model.bottom[-1]), dtype=dtype, requires_grad=True)
        looked_up = torch.empty((batch_size, sum(table.dim for table in tables)), dtype=dtype, requires_grad=True)
        joined = torch.empty((batch_size, widths[0]), dtype=dtype, requires_grad=True)
        clicks = torch.empty((batch_size, widths[-1]), dtype=dtype)
    criterion = nn.BCELoss()

    def loss() -> torch.Tensor:
        result: torch.Tensor = criterion(top(joined), clicks)
        return result

    traces = {
        "bottom": _captured("bottom", bottom, lambda: _inner(bottom(dense)), options),
        "interaction": _captured("interaction", interaction, lambda: _inner(interaction(first, looked_up)), options),
        "top": _captured("top", top, loss, options),
        "optimizer": _optimizer([*bottom.parameters(), *top.parameters()], options),
    }
    graphs = {name: lower(trace, options) for name, trace in traces.items()}
    buckets = _buckets([_sizes(top), _sizes(bottom)])
    pieces = {
        "bottom forward": (_piece(graphs["bottom"], "forward"),),
        "top forward": (_piece(graphs["interaction"], "forward"), _piece(graphs["top"], "forward")),
        "top backward": tuple(_with_buckets(traces["top"], graphs["top"], buckets[0])),
        "interaction backward": (_piece(graphs["interaction"], "backward"),),
        "bottom backward": tuple(_with_buckets(traces["bottom"], graphs["bottom"], buckets[1])),
        "optimizer": (_piece(graphs["optimizer"], "optimizer"),),
    }
    return CapturedDense(pieces, _dense_memory(traces, [*bottom.parameters(), *top.parameters()]))


class Interaction(nn.Module):
    """Interaction: dense features (N, D) and pooled lookups (N, sum of widths) to the top MLP's input."""

    def __init__(self, model: DenseModel, tables: Sequence[EmbeddingTable]) -> None:
        super().__init__()
        self.dot, self.vectors, self.width = model.interacts(tables), len(tables) + 1, model.bottom[-1]
        places = torch.tril_indices(self.vectors, self.vectors, offset=-1)
        self.register_buffer("rows", places[0].clone())
        self.register_buffer("columns", places[1].clone())

    def forward(self, first: torch.Tensor, looked_up: torch.Tensor) -> torch.Tensor:
        if not self.dot:
            return torch.cat([first, looked_up], dim=1)
        stacked = torch.cat([first.unsqueeze(1), looked_up.view(len(first), self.vectors - 1, self.width)], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        return torch.cat([first, products[:, self.rows, self.columns]], dim=1)


def _inner(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an inner result of the model with its incoming gradient."""
    return output, torch.empty_like(output)


def _captured(
    name: str,
    module: nn.Module,
    forward: Callable[[], torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    options: StepOptions,
) -> OperatorTrace:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        result = forward()
        if isinstance(result, torch.Tensor):
            result.backward()
        else:
            result[0].backward(result[1])

    return capture(CapturedWorkload(name, module, step), options)


def _optimizer(parameters: list[nn.Parameter], options: StepOptions) -> OperatorTrace:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return capture(CapturedWorkload("optimizer", nn.ParameterList(parameters), optimizer.step), options)


# --- cutting ---------------------------------------------------------------------------------------


def _actions(graph: RankGraph, phase: str) -> Iterator[Action]:
    """Yield the launches and host work of a phase, in order; work outside the phases is left out."""
    for thread in graph.threads.values():
        for action in thread:
            if not isinstance(action, Launch | HostWork):
                continue
            call = graph.tasks[action.task].call if isinstance(action, Launch) else action.call
            if call is not None and graph.calls[call].phase == phase:
                yield action


def _piece(graph: RankGraph, phase: str) -> DensePiece:
    return DensePiece(tuple(_actions(graph, phase)), graph)


def _with_buckets(trace: OperatorTrace, graph: RankGraph, buckets: dict[int, int]) -> Iterator[DensePiece]:
    """Yield the backward pass, split after each gradient that fills a bucket.

    ``buckets``: number of gradients -> bytes.
    """
    done = _accumulating(trace)
    actions: list[Action] = []
    ready, current = 0, None
    for action in _actions(graph, "backward"):
        call = action.call if isinstance(action, HostWork) else current
        if call != current and current in done:
            ready += 1
            if ready in buckets:
                yield DensePiece(tuple(actions), graph, buckets[ready])
                actions = []
        current = call
        actions.append(action)
    if actions or current in done:
        yield DensePiece(tuple(actions), graph, buckets.get(ready + (current in done), 0))


def _accumulating(trace: OperatorTrace) -> set[int]:
    """Return the outermost calls that complete a parameter's gradient."""
    parents = {call.id: call.parent for call in trace.calls}
    found = set()
    for call in trace.calls:
        if call.name == ACCUMULATE_GRAD:
            top = call.id
            while (parent := parents[top]) is not None:
                top = parent
            found.add(top)
    return found


def _sizes(module: nn.Module) -> list[int]:
    """Bytes of the gradients, in the order in which they become ready."""
    return [parameter.numel() * parameter.element_size() for parameter in reversed(list(module.parameters()))]


def _buckets(parts: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """Map, for each part, the number of gradients after which a bucket is full to its bytes.

    Follows DDP's `compute_bucket_assignment_by_size`; the last bucket is sent when all gradients are ready.
    """
    found: list[dict[int, int]] = [{} for _ in parts]
    size, limit = 0, FIRST_BUCKET_BYTES
    for place, sizes in enumerate(parts):
        for count, gradient in enumerate(sizes, start=1):
            size += gradient
            last = place == len(parts) - 1 and count == len(sizes)
            if size >= limit or last:
                found[place][count] = size
                size, limit = 0, BUCKET_BYTES
    return found


def _dense_memory(traces: dict[str, OperatorTrace], parameters: Sequence[nn.Parameter]) -> MemoryUsage:
    """Memory of parameters, gradients, kept activations, and the largest temporary memory of a piece."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    usages = [peak_memory(traces[name]) for name in ("bottom", "interaction", "top")]
    kept = sum(usage.breakdown["activations"] for usage in usages)
    working = max(usage.breakdown["temporary"] for usage in usages)
    breakdown: dict[Any, int] = dict.fromkeys(usages[0].breakdown, 0)
    breakdown |= {"parameters": weights, "gradients": weights, "activations": kept, "temporary": working}
    return MemoryUsage(2 * weights + kept + working, breakdown, -1, "dense part")


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
