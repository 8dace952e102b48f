"""Durations for a graph without prices: device work from a cost model, host work from a table of overheads.

Tasks of operators (one or several in a kernel) and host work get their durations here, except the host work of layers
that are folded first (:class:`e2e.parallelism.rewrites.Condenser`, which asks the same table of host overheads,
:mod:`e2e.price.host_overheads`). Collectives are priced by :mod:`e2e.price.collective_pricing`.

The host time of foreach and fused operators grows with the lengths of their tensor lists. Samples by name say little
about it: the gap before the first call of an optimizer step contains the optimizer's Python, once per step, and is not
the call's own (four samples of ``_foreach_mul_``: 784 us); the time before a launch is that of lists as long as those
of the recorded model. Both figures are from ``traces/resnet50_V100`` (PyTorch of 2023; SGD with momentum over 161
parameters, foreach): 784 us before the first call of a step, and 72 to 78 us before the first launch of
``_foreach_add_`` and ``_foreach_mul_``, of which the profiler's share (161 records) is known to within a half only.
A list that is not changed in place is allocated tensor by tensor before the launch (``_foreach_sqrt``: 3 us each on an
H200), and lists on the host, such as Adam's step counters, are worked through one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from costmodel.cost_model import CostModel, Estimate, PriceSource
from costmodel.gpu.power import drawn_power
from costmodel.operators.any_operator import AnyOperator
from e2e.step.execution_graph import (
    UNKNOWN_PRODUCT,
    Action,
    CallInfo,
    Duration,
    ExecutionGraph,
    HostWork,
    Kernel,
    Launch,
    RankGraph,
    Synchronize,
    Task,
    TaskKind,
)
from e2e.step.operator_trace import OPTIMIZER_STEP

# Seconds per tensor before the first call of an optimizer step, in which the optimizer collects parameters, gradients
# and state, and groups them by device and type. The gap before an optimizer step in the tables includes the tensors of
# the recorded model, and for each of them GATHERING_SHARE of it: PyTorch 2.13 took 30 us with 4 tensors and 210 us with
# 161 of SGD with momentum, on a core of an EPYC.
RECORDED_TENSORS = 161
GATHERING_SHARE = 0.88
GATHERING_SECONDS = GATHERING_SHARE * 784e-6 / RECORDED_TENSORS
# Seconds per tensor of the first list before the first launch: arguments, checks, metadata of the kernel.
TENSOR_SECONDS = 0.5 * 75e-6 / RECORDED_TENSORS
# Seconds per number of a list that a tensor is made of (``recursive_store`` in tensor_new.cpp), before the operator:
# an estimate. PyTorch 2.13 took 0.14 to 0.15 us, whatever the type, on a busy core of a Xeon with AVX-512.
NUMBER_SECONDS = 0.1e-6
# Seconds per Python function called between two operators (one of PyTorch counts as nine,
# :mod:`e2e.capture.python_calls`), on the hosts of the shared overhead table: a gap lasts at least as long as all its
# functions. A core of an EPYC of today takes 0.1 us. Fitted to published steps that they limit: litgpt's LoRA by FSDP1
# on two A100 (phi-1.5 0.29, StableLM 3B 0.32), mmpose's ResNet-50 on 8 V100 and mosaicml/diffusion on 8 A100 (0.1).
FUNCTION_SECONDS = 0.25e-6


def extra_seconds(kind: str, call: CallInfo, included: int) -> float:
    """Return the seconds that a piece of ``kind`` takes in addition to its operator's, for the tensors in the lists of
    ``call`` and those gathered before it beyond those ``included`` in the gap before the optimizer, and the numbers of
    a list.
    """
    before = max(call.gathered - included, 0) * GATHERING_SECONDS + call.numbers * NUMBER_SECONDS
    return {"T1": before, "T2": call.tensors * TENSOR_SECONDS}.get(kind, 0.0)


# How much longer than its bytes a kernel in Triton may take that multiplies matrices of unknown extents: steps of
# flash-linear-attention on H100 took 2.4 times as long as predicted, with a quarter of the time in such kernels.
UNKNOWN_TIMES = 6.0
# Kind of task -> runtime call that launches it, as named in tables of overheads.
LAUNCH_CALLS: Mapping[TaskKind, str] = {
    "kernel": "cudaLaunchKernel",
    "collective": "cudaLaunchKernel",
    "copy": "cudaMemcpyAsync",
    "memset": "cudaMemsetAsync",
    "graph": "cudaGraphLaunch",
}
SYNCHRONISING_CALL = "cudaStreamSynchronize"
_LEAST_KNOWN_FIRST: tuple[PriceSource, ...] = ("analytic", "fitted", "measured")
Prices = Mapping[AnyOperator, Estimate]


class HostOverheads(Protocol):
    """Part of the interface of :class:`e2e.price.host_overheads.OverheadTable` that predictions use."""

    @property
    def level(self) -> float:
        """Ratio of the host's times to those of the hosts of the shared table."""
        ...

    @property
    def factor(self) -> float:
        """Factor by which the host's times may be shorter or longer; 1 for a measured host."""
        ...

    def seconds(self, kind: Any, name: str, records: float | None = None) -> float:
        """Return the seconds of one piece of host work of ``kind`` for the operator or call ``name``.

        ``records``: number of operators inside the piece, if known.
        """
        ...


def price(graph: ExecutionGraph, cost_model: CostModel, overheads: HostOverheads) -> ExecutionGraph:
    """Return ``graph`` with all missing durations set; existing ones stay.

    A task of several operators takes the sum of their prices, a task of several kernels the sum over its kernels. A
    task without operators stays unpriced (the simulator names it).
    """
    prices = operator_prices([_counts(rank.tasks) for rank in graph.ranks], cost_model)
    host = HostPrices(overheads)
    ranks = (_price_rank(rank, of_rank, host) for rank, of_rank in zip(graph.ranks, prices, strict=True))
    return replace(graph, ranks=tuple(ranks))


def operator_prices(ranks: Sequence[Mapping[AnyOperator, int]], cost_model: CostModel) -> list[Prices]:
    """Return the prices on each rank; ``ranks``: for each rank, how often every operator runs there.

    Each distinct operator is estimated once, since a model repeats few shapes many times. The estimates are then
    settled for each rank's own mixture, since every GPU has its own clock.
    """
    operators = list(dict.fromkeys(operator for counts in ranks for operator in counts))
    estimates = dict(zip(operators, cost_model.estimate(operators), strict=True))
    return [
        dict(zip(counts, cost_model.settle([estimates[each] for each in counts], list(counts.values())), strict=True))
        for counts in ranks
    ]


def sum_durations(parts: Sequence[Estimate | Duration]) -> Duration:
    """Sum durations of ``parts`` (one or more) in sequence: bound of the longest part, source of the least certain
    part.
    """
    longest = max(parts, key=lambda part: part.seconds)
    return Duration(
        seconds=sum(part.seconds for part in parts),
        lower=sum(part.lower for part in parts),
        upper=sum(part.upper for part in parts),
        bound=longest.bound,
        source=min((part.source for part in parts), key=_LEAST_KNOWN_FIRST.index),
        power=_mean_power(parts),
    )


def _mean_power(parts: Sequence[Estimate | Duration]) -> float | None:
    """Return the mean power over the seconds of ``parts``; None if it is not known for all."""
    drawn = [part.power if isinstance(part, Duration) else drawn_power(part) for part in parts]
    known = [each for each in drawn if each is not None]
    seconds = sum(part.seconds for part in parts)
    if len(known) < len(drawn) or not seconds:
        return None
    return sum(each * part.seconds for each, part in zip(known, parts, strict=True)) / seconds


def _counts(tasks: Iterable[Task]) -> Counter[AnyOperator]:
    """Count how often each operator without a price runs. Repeated tasks share their tuples, each of which is read
    once.
    """
    repeated: dict[int, tuple[tuple[Kernel, ...] | tuple[AnyOperator, ...], int]] = {}
    for task in tasks:
        if task.duration is None:
            content = task.kernels or task.operators
            repeated[id(content)] = (content, repeated.get(id(content), (content, 0))[1] + 1)
    counts: Counter[AnyOperator] = Counter()
    for content, times in repeated.values():
        for part in content:
            for operator in part.operators if isinstance(part, Kernel) else (part,):
                counts[operator] += times
    return counts


@dataclass
class HostPrices:
    """Prices of host work by a table, cached by kind and name."""

    overheads: HostOverheads
    _known: dict[tuple[str, str, float | None], Duration] = field(default_factory=dict)

    def work(self, item: HostWork, calls: Mapping[int, CallInfo], launching: set[int | None]) -> Duration:
        """Price host work for one of ``calls``; T5 of a call that is not in ``launching`` is the whole operator."""
        whole = item.kind == "T5" and item.call not in launching
        info = None if item.call is None else calls.get(item.call)
        known = self._of("whole" if whole else item.kind, "" if info is None else info.name, item.records)
        begins = info is not None and item.kind == "T1" and info.name == OPTIMIZER_STEP
        if info is None or not (begins or info.tensors or info.gathered or info.numbers or info.functions):
            return known
        of_others = item.kind == "T1" and self.overheads.factor > 1  # a measured host has its own gaps and tensors
        if begins and of_others:
            return fitted((1.0 - GATHERING_SHARE) * known.seconds)
        more = extra_seconds(item.kind, info, 0 if of_others else RECORDED_TENSORS)
        seconds = known.seconds + more * self.overheads.level
        if info.tensors and (whole or (item.kind == "T2" and not info.name.endswith("_"))):
            each = "aten::add_" if whole else "aten::empty_strided"
            seconds += info.tensors * self._of("whole", each).seconds
        if of_others:
            seconds = max(seconds, info.functions * FUNCTION_SECONDS * self.overheads.level)
        return fitted(seconds) if seconds > known.seconds else known

    def launch(self, kind: TaskKind) -> Duration:
        """Price the call that launches a task of ``kind``."""
        return self._of("T4", LAUNCH_CALLS[kind])

    def synchronize(self) -> Duration:
        """Price a call that waits for the device, without the waiting."""
        return self._of("T4", SYNCHRONISING_CALL)

    def _of(self, kind: str, name: str, records: float | None = None) -> Duration:
        key = (kind, name, records)
        if key not in self._known:
            self._known[key] = fitted(self.overheads.seconds(kind, name, records))
        return self._known[key]


def launching_calls(actions: Iterable[object]) -> set[int | None]:
    """Return the operator calls in ``actions`` that launch something: those with a time before their first launch."""
    return {action.call for action in actions if isinstance(action, HostWork) and action.kind == "T2"}


def _price_rank(rank: RankGraph, prices: Prices, host: HostPrices) -> RankGraph:
    tasks = tuple(_priced_tasks(rank.tasks, prices))
    launching = launching_calls(rank.actions())

    def priced(action: Action) -> Action:
        if isinstance(action, HostWork) and action.duration is None:
            return replace(action, duration=host.work(action, rank.calls, launching))
        if isinstance(action, Launch) and action.duration is None:
            return replace(action, duration=host.launch(tasks[action.task].kind))
        if isinstance(action, Synchronize) and action.duration is None:
            return replace(action, duration=host.synchronize())
        return action

    threads = {name: tuple(priced(action) for action in actions) for name, actions in rank.threads.items()}
    return replace(rank, threads=threads, tasks=tasks)


def _priced_tasks(tasks: Iterable[Task], prices: Prices) -> Iterator[Task]:
    runs: dict[int, tuple[tuple[Kernel, ...], Duration]] = {}
    for task in tasks:
        if task.duration is not None or not all(each.operators or each.duration for each in task.kernels or (task,)):
            yield task
        elif task.kernels:
            if id(task.kernels) not in runs:
                durations = [each.duration or duration_of(each, prices) for each in task.kernels]
                kernels = tuple(replace(each, duration=d) for each, d in zip(task.kernels, durations, strict=True))
                runs[id(task.kernels)] = kernels, sum_durations(durations)
            kernels, duration = runs[id(task.kernels)]
            yield replace(task, kernels=kernels, duration=duration)
        else:
            yield replace(task, duration=duration_of(task, prices))


class Priceable(Protocol):
    """Kernel of any type."""

    @property
    def operators(self) -> tuple[AnyOperator, ...]:
        """Operators that the kernel computes; empty if no model prices them."""
        ...


def duration_of(kernel: Priceable, prices: Prices) -> Duration:
    """Return the price of a kernel of one or more operators; it may be :data:`UNKNOWN_TIMES` too low for a product of
    which only the bytes are known.
    """
    duration = sum_durations([prices[operator] for operator in kernel.operators])
    if any(getattr(operator, "kind", "") == UNKNOWN_PRODUCT for operator in kernel.operators):
        return replace(duration, upper=max(duration.upper, UNKNOWN_TIMES * duration.seconds))
    return duration


def fitted(seconds: float) -> Duration:
    """Return a duration of host time from a table."""
    return Duration(seconds, seconds, seconds, "host", "fitted")


def as_cuda_graph(graph: ExecutionGraph, launch_seconds: float, whole: bool = True) -> ExecutionGraph:
    """Return the ``whole`` of ``graph``, or the calls that its ranks say, replayed as CUDA graphs: one host launch of
    ``launch_seconds`` for each; tasks follow without the host.

    The host cannot wait inside a captured region; such waits are left out.
    """
    return replace(graph, ranks=tuple(_captured(rank, launch_seconds, whole) for rank in graph.ranks))


def _captured(rank: RankGraph, launch_seconds: float, whole: bool) -> RankGraph:
    begun: set[int] = set()
    launch = HostWork("T4", None, fitted(launch_seconds))

    def numbered(actions: Sequence[Action]) -> list[tuple[Action, int | None]]:
        """Return actions with their graphs; a gap is in that of the call behind it."""
        found: list[tuple[Action, int | None]] = []
        behind: int | None = None
        for action in reversed(actions):
            call = rank.tasks[action.task].call if isinstance(action, Launch) else getattr(action, "call", None)
            if not isinstance(action, HostWork | Synchronize | Launch):
                found.append((action, None))
                continue
            if not isinstance(action, HostWork) or action.kind != "T1":
                behind = None if call is None else rank.graphs.get(call)
            found.append((action, 0 if whole else behind))
        return found[::-1]

    def replayed(actions: Sequence[Action]) -> Iterator[Action]:
        for action, number in numbered(actions):
            if number is None:
                yield action
                continue
            if number not in begun:
                begun.add(number)
                if not whole and isinstance(action, HostWork) and action.kind == "T1":
                    yield action  # the way to the launch
                yield launch
            if isinstance(action, Launch):
                yield replace(action, duration=fitted(0.0))

    return replace(rank, threads={name: tuple(replayed(actions)) for name, actions in rank.threads.items()})
