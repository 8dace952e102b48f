"""Dense part of a DLRM captured from PyTorch, in pieces that a sharded step places between its exchanges.

Imports ``torch``. Bottom MLP, interaction and top MLP are captured separately, so that each kernel's piece is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from costmodel.embedding.embedding_tables import EmbeddingTable
from e2e.capture.models.dlrm import mlp
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.sharding.problem.dense_costs import DenseModel
from e2e.sharding.problem.option_costs import BUCKET_BYTES
from e2e.sharding.sharded_rank import ShardedRank
from e2e.step.execution_graph import Action, HostWork, Launch, RankGraph
from e2e.step.memory import ACCUMULATE_GRAD, MemoryUsage, peak_memory
from e2e.step.operator_trace import OperatorTrace
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
    """Captured pieces of the dense part."""

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
    return CapturedDense(pieces, _memory(traces, [*bottom.parameters(), *top.parameters()]))


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


def _memory(traces: dict[str, OperatorTrace], parameters: Sequence[nn.Parameter]) -> MemoryUsage:
    """Memory of parameters, gradients, kept activations, and the largest temporary memory of a piece."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    usages = [peak_memory(traces[name]) for name in ("bottom", "interaction", "top")]
    kept = sum(usage.breakdown["activations"] for usage in usages)
    working = max(usage.breakdown["temporary"] for usage in usages)
    breakdown: dict[Any, int] = dict.fromkeys(usages[0].breakdown, 0)
    breakdown |= {"parameters": weights, "gradients": weights, "activations": kept, "temporary": working}
    return MemoryUsage(2 * weights + kept + working, breakdown, -1, "dense part")
