"""A captured step as the graph that is predicted: its operators lowered, compiled if asked, and what they hold."""

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
    """``graph``: not priced; ``memory``: rank of the graph -> its fullest moment."""

    graph: ExecutionGraph
    memory: Mapping[int, MemoryUsage]
    warnings: tuple[str, ...]


def lower_step(trace: OperatorTrace, options: StepOptions, architecture: str = "ampere") -> LoweredStep:
    """The step of one GPU of ``architecture``. Warnings name what is not predicted as it is."""
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
    """Several ranks of a job, each standing for as many as ``multiplicity`` says; compiled ones are so between
    collectives. What they warn of is said once.
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
    """What a captured step makes PyTorch's allocator take on a GPU of ``architecture``; of a recorded one, which does
    not say when memory is freed, the tensors that live.
    """
    return replayed_memory(trace, workspace_bytes(architecture)) if tells_frees(trace) else peak_memory(trace)


def lowering_warnings(rank: RankGraph) -> list[str]:
    """Names the operators that no table knows."""
    unknown = unknown_operators(rank)
    if not unknown:
        return []
    names = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(5))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    return [
        f"{sum(unknown.values())} launches of operators without a model, priced by the bytes they move: {names}{more}"
    ]
