"""Memory layout of convolutions under ``torch.compile``: Inductor converts whole graphs to NHWC if that is faster.

The rules are those of ``GraphLowering.decide_layout_opt`` (torch/_inductor/graph.py), which considers all convolutions
of a graph together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import ConvolutionBackward, Normalization, Pooling
from costmodel.operators.layers import Conv2d
from e2e.step.execution_graph import RankGraph, Task

# A graph with at least this many nodes per convolution is not converted.
_MOST_NODES = 300
_SMALL_CHANNELS = 64
# Ratio of the time in NHWC to that in NCHW by kind of convolution, as used by Inductor for inference.
_NHWC_OVER_NCHW = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}


def compiled_layout(rank: RankGraph) -> RankGraph:
    """Return ``rank`` with convolutions, batch norms and pooling in NHWC if Inductor would convert the graph."""
    if not turns_to_channels_last([task for task in rank.tasks if _is_compiled(rank, task)]):
        return rank
    tasks = tuple(
        replace(task, operators=tuple(_channels_last(each) for each in task.operators))
        if _is_compiled(rank, task)
        else task
        for task in rank.tasks
    )
    return replace(rank, tasks=tasks)


def turns_to_channels_last(tasks: list[Task]) -> bool:
    """True if Inductor converts the graph of the convolutions in ``tasks``."""
    forward = [each for task in tasks for each in task.operators if isinstance(each, Conv2d)]
    if not forward or len(tasks) >= _MOST_NODES * len(forward):
        return False
    if any(isinstance(each, ConvolutionBackward) for task in tasks for each in task.operators):
        hurt = any(_is_grouped(conv) or _is_narrowing(conv) for conv in forward)
        return not hurt and not all(_is_small(conv) for conv in forward)
    flops: dict[str, int] = defaultdict(int)
    for conv in forward:
        flops[_kind(conv)] += conv.flops
    return sum(_NHWC_OVER_NCHW[kind] * count for kind, count in flops.items()) <= sum(flops.values())


def _is_compiled(rank: RankGraph, task: Task) -> bool:
    return task.call is not None and rank.calls[task.call].phase in ("forward", "backward")


def _kind(conv: Conv2d) -> str:
    if _is_grouped(conv):
        return "grouped"
    if _is_small(conv):
        return "small"
    return "narrowing" if _is_narrowing(conv) else "other"


def _is_grouped(conv: Conv2d) -> bool:
    return conv.groups > 1 and conv.in_channels > conv.groups


def _is_small(conv: Conv2d) -> bool:
    return conv.out_channels <= _SMALL_CHANNELS and conv.in_channels // conv.groups <= _SMALL_CHANNELS


def _is_narrowing(conv: Conv2d) -> bool:
    return conv.out_channels * 2 <= conv.in_channels // conv.groups and conv.kernel[0] > 1


def _channels_last(operator: AnyOperator) -> AnyOperator:
    if isinstance(operator, ConvolutionBackward):
        return replace(operator, forward=replace(operator.forward, channels_last=True))
    if isinstance(operator, (Conv2d, Pooling)) or (
        isinstance(operator, Normalization) and operator.kind == "batch_norm"
    ):
        return replace(operator, channels_last=True)
    return operator
