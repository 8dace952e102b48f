"""Captured step as the predicted graph: its operators lowered, compiled on request, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from e2e.lowering.lower_trace import lower, unknown_operators
from e2e.lowering.torch_compile import between_collectives, compile_rank
from e2e.step.allocation_replay import workspace_bytes
from e2e.step.execution_graph import ExecutionGraph, RankGraph
from e2e.step.memory import MemoryUsage, peak_memory
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions
from e2e.step.replayed_memory import replayed_memory, tells_frees

_EAGER = "the script compiles its model (torch.compile), which runs eagerly here; add --compile"


@dataclass(frozen=True)
class LoweredStep:
    """Lowered step. ``graph``: without prices; ``memory``: rank of the graph -> its peak."""

    graph: ExecutionGraph
    memory: Mapping[int, MemoryUsage]
    warnings: tuple[str, ...]


def lower_step(trace: OperatorTrace, options: StepOptions, architecture: str = "ampere") -> LoweredStep:
    """Lower the step of one GPU of ``architecture``. Warnings name operations that are not predicted exactly."""
    rank = lower(trace, options)
    warnings = lowering_warnings(rank)
    if options.compile:
        rank = compile_rank(rank, trace)
    elif trace.compiled:
        warnings.append(_EAGER)
    graph = ExecutionGraph((rank,), source=trace.source)
    return LoweredStep(graph, {rank.rank: memory_of(trace, architecture)}, tuple(warnings))


def lower_ranks(
    traces: Sequence[OperatorTrace],
    multiplicity: Mapping[int, int],
    source: str,
    options: StepOptions,
    architecture: str = "ampere",
) -> LoweredStep:
    """Lower several ranks of a job, each representing as many ranks as ``multiplicity`` says.

    Compiled ranks are compiled between collectives. Repeated warnings are given once.
    """
    ranks = tuple(lower(trace, options) for trace in traces)
    warnings = dict.fromkeys(line for rank in ranks for line in lowering_warnings(rank))
    if options.compile:
        both = zip(ranks, traces, strict=True)
        ranks = tuple(compile_rank(rank, trace, between_collectives(trace)) for rank, trace in both)
    elif any(trace.compiled for trace in traces):
        warnings[_EAGER] = None
    graph = ExecutionGraph(ranks, multiplicity, source)
    memory = {trace.rank: memory_of(trace, architecture) for trace in traces}
    return LoweredStep(graph, memory, tuple(warnings))


def memory_of(trace: OperatorTrace, architecture: str) -> MemoryUsage:
    """Return the memory of a captured step in PyTorch's allocator on a GPU of ``architecture``; for a recorded step,
    which does not record frees, the memory of its live tensors.
    """
    return replayed_memory(trace, workspace_bytes(architecture)) if tells_frees(trace) else peak_memory(trace)


def lowering_warnings(rank: RankGraph) -> list[str]:
    """Return the warning that names the operators without a model."""
    unknown = unknown_operators(rank)
    if not unknown:
        return []
    names = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(5))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    return [
        f"{sum(unknown.values())} launches of operators without a model, priced by the bytes they move: {names}{more}"
    ]
