"""Link between an execution trace and a profile of the same process: the profiled operator of each call; names and
ranges of the operators.

Three methods, the most reliable first: record-function ids; the profiler's external ids, which count the same calls and
differ by a constant; the order of names on each thread. Names alone never link: each method must explain whole threads.

Host and device work is named by the execution trace if linked, else by the profile (:class:`CallNames`). Named ranges
are annotations made by the script, with the operators inside them by time (:func:`profiled_ranges`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal

from costmodel.base.errors import InputError
from e2e.step.execution_graph import CallInfo
from e2e.step.operator_trace import (
    MarkedCall,
    NamedRange,
    NamedRanges,
    OperatorCall,
    OperatorTrace,
    Phase,
    Tensor,
    is_named_by_script,
    of_forward_calls,
    settled_phases,
)
from e2e.traces.host_time import Nesting, launches_by_correlation, nest
from e2e.traces.kineto import HostSpan, KinetoTrace

Method = Literal["function id", "external id", "order on each thread"]

_ENOUGH = 0.95  # least share of the calls that a method must explain
_SAMPLE = 64
# Consecutive iterations may differ in a few data-dependent shapes; another batch or model differs nearly everywhere.
_SHAPES_MAY_DIFFER = 0.25
# Limit of alignments, whose time is proportional to the product of both lengths.
_LONGEST_ALIGNMENT = 6000


@dataclass(frozen=True)
class LinkedTrace:
    """Execution trace linked with a profile."""

    trace: OperatorTrace
    kineto: KinetoTrace
    # Call id -> profiled operator.
    spans: Mapping[int, int]
    # Call id -> device work launched by the call itself, not by its children.
    device: Mapping[int, tuple[int, ...]]
    method: Method
    # Number of device spans that belong to linked operators, of the `total_device` launched while these ran.
    linked_device: int
    total_device: int

    @property
    def linked_operators(self) -> int:
        """Number of operators found in the profile."""
        return len(self.spans)

    @property
    def total_operators(self) -> int:
        """Number of operators of the trace."""
        return len(self.trace.calls)

    def part(self, trace: OperatorTrace) -> LinkedTrace:
        """Return the link restricted to the calls of ``trace`` and the device work that they launched."""
        kept = {call.id for call in trace.calls}
        spans = {call: span for call, span in self.spans.items() if call in kept}
        device = {call: work for call, work in self.device.items() if call in kept}
        count = sum(map(len, device.values()))
        return replace(self, trace=trace, spans=spans, device=device, linked_device=count, total_device=count)

    def describe(self) -> str:
        """Return a one-line summary."""
        return (
            f"{self.linked_operators} of {self.total_operators} operators and {self.linked_device} of "
            f"{self.total_device} device events linked by {self.method}"
        )


def link(trace: OperatorTrace, kineto: KinetoTrace) -> LinkedTrace:
    """Link the calls of ``trace`` with the operators of ``kineto``.

    Raises :class:`InputError` with the reason if the files do not belong together: other processes, devices, sequences
    of operators, or shapes.
    """
    _check_origin(trace, kineto)
    method, matched = _match(trace, kineto)
    _check_shapes(trace, kineto, matched)
    device, inside, total = _device_work(kineto, {span.id: call for call, span in matched.items()})
    spans = {call: span.id for call, span in matched.items()}
    return LinkedTrace(trace, kineto, spans, device, method, inside, total)


def _pair(trace: OperatorTrace, kineto: KinetoTrace) -> str:
    return f"{trace.source} and {kineto.source} do not belong together"


def _check_origin(trace: OperatorTrace, kineto: KinetoTrace) -> None:
    if trace.pid and kineto.pid and trace.pid != kineto.pid:
        raise InputError(
            f"{_pair(trace, kineto)}: process {trace.pid} and process {kineto.pid}; give two files of one process"
        )
    ours = {t.device for call in trace.calls for t in call.inputs if isinstance(t, Tensor) and t.device[:5] == "cuda:"}
    theirs = {f"cuda:{span.device}" for span in kineto.device}
    if ours and theirs and not ours & theirs:
        raise InputError(f"{_pair(trace, kineto)}: {_list(ours)} and {_list(theirs)}; give two files of one rank")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _match(trace: OperatorTrace, kineto: KinetoTrace) -> tuple[Method, dict[int, HostSpan]]:
    ways: tuple[tuple[Method, str], ...] = (("function id", "function"), ("external id", "external"))
    for method, field in ways:
        matched = _by_number(trace.calls, kineto.operators, field)
        if matched is not None:
            return method, matched
    matched = _by_order(trace, kineto)
    if len(matched) < _ENOUGH * len(trace.calls):
        raise InputError(f"{_pair(trace, kineto)}: {_difference(trace, kineto, matched)}")
    return "order on each thread", matched


def _by_number(calls: Sequence[OperatorCall], spans: Sequence[HostSpan], field: str) -> dict[int, HostSpan] | None:
    """Match calls and spans whose numbers differ by one constant and whose names agree; ``None``: no such constant."""
    numbered = {getattr(span, field): span for span in spans if getattr(span, field)}
    if not numbered or not calls:
        return None
    counts = Counter(span.name for span in numbered.values())
    anchor = min(calls, key=lambda call: counts.get(call.name) or len(spans) + 1)
    step = max(1, len(calls) // _SAMPLE)
    shifts = [number - _function(anchor) for number, span in numbered.items() if span.name == anchor.name]
    # Identical iterations fit with several shifts; counters that started together differ by little.
    for shift in sorted(shifts, key=abs):
        if len(_agreeing(calls[::step], numbered, shift)) >= _ENOUGH * len(calls[::step]):
            matched = _agreeing(calls, numbered, shift)
            if len(matched) >= _ENOUGH * len(calls):
                return matched
    return None


def _function(call: OperatorCall) -> int:
    number = call.attributes.get("rf_id")
    return number if isinstance(number, int) else -1


def _agreeing(calls: Iterable[OperatorCall], numbered: Mapping[int, HostSpan], shift: int) -> dict[int, HostSpan]:
    found = ((call, numbered.get(_function(call) + shift)) for call in calls)
    return {call.id: span for call, span in found if span is not None and span.name == call.name}


def _by_order(trace: OperatorTrace, kineto: KinetoTrace) -> dict[int, HostSpan]:
    """Match each thread's sequence of names in that of a profiled thread.

    The last place is used that begins with thread 0.
    """
    codes: dict[str, str] = {}
    threads = {
        thread: [span for span in spans if span.kind == "operator"] for thread, spans in nest(kineto).threads.items()
    }
    texts = {thread: _text(spans, codes) for thread, spans in threads.items()}
    matched: dict[int, HostSpan] = {}
    since = 0.0
    for number in sorted({call.thread for call in trace.calls}):
        calls = [call for call in trace.calls if call.thread == number]
        best: list[tuple[OperatorCall, HostSpan]] = []
        for thread, spans in threads.items():
            pairs = _align(calls, _text(calls, codes), spans, texts[thread], since)
            if len(pairs) > len(best):
                best = pairs
        if best and not matched:
            since = best[0][1].start
        matched.update((call.id, span) for call, span in best)
    return matched


def _text(items: Sequence[OperatorCall | HostSpan], codes: dict[str, str]) -> str:
    """Encode names as a text with one character each, above the surrogates, so that text search finds sequences."""
    return "".join(codes.setdefault(item.name, chr(0x10000 + len(codes))) for item in items)


def _align(
    calls: list[OperatorCall], text: str, spans: list[HostSpan], profiled: str, since: float
) -> list[tuple[OperatorCall, HostSpan]]:
    if since == 0.0:
        place = profiled.rfind(text)
    else:
        first = next((i for i, span in enumerate(spans) if span.start >= since), len(spans))
        place = profiled.find(text, first)
    if place >= 0:
        return list(zip(calls, spans[place : place + len(calls)], strict=True))
    if max(len(text), len(profiled)) > _LONGEST_ALIGNMENT:
        return []
    blocks = SequenceMatcher(None, text, profiled, autojunk=False).get_matching_blocks()
    return [
        pair
        for block in blocks
        for pair in zip(calls[block.a : block.a + block.size], spans[block.b : block.b + block.size], strict=True)
    ]


def _difference(trace: OperatorTrace, kineto: KinetoTrace, matched: Mapping[int, HostSpan]) -> str:
    found = f"only {len(matched)} of {len(trace.calls)} operators follow in the same order on a thread"
    missing = Counter(call.name for call in trace.calls)
    missing.subtract(Counter(span.name for span in kineto.operators))
    lacking = [f"{name} ({count} more)" for name, count in missing.most_common(3) if count > 0]
    hint = f"; the profile lacks {', '.join(lacking)}" if lacking else ""
    return f"{found}{hint}; record both around the same iteration"


def _check_shapes(trace: OperatorTrace, kineto: KinetoTrace, matched: Mapping[int, HostSpan]) -> None:
    compared, different, example = 0, 0, ""
    for call in trace.calls:
        span = matched.get(call.id)
        if span is None or not span.shapes:
            continue
        for value, shape in zip(call.inputs, span.shapes, strict=False):
            if isinstance(value, Tensor) and value.shape and isinstance(shape, list):
                compared += 1
                if list(value.shape) != shape:
                    different += 1
                    example = example or f"{call.name} has {list(value.shape)} in the one and {shape} in the other"
    if compared and different > _SHAPES_MAY_DIFFER * compared:
        raise InputError(
            f"{_pair(trace, kineto)}: {different} of {compared} shapes differ ({example}); give two files of one run"
        )


def _device_work(kineto: KinetoTrace, calls: Mapping[int, int]) -> tuple[dict[int, tuple[int, ...]], int, int]:
    """Return the device spans of each call, their number, and the total.

    A span belongs to the innermost linked operator around its launch.
    """
    parent = nest(kineto).parent
    launches = launches_by_correlation(kineto)
    linked = [span for span in kineto.operators if span.id in calls]
    first, last = min(span.start for span in linked), max(span.end for span in linked)
    work: dict[int, list[int]] = {}
    inside = total = 0
    for span in kineto.device:
        launch = launches.get(span.correlation)
        if launch is None or not first <= launch.start <= last:
            continue
        total += 1
        around = parent[launch.id]
        while around is not None and around not in calls:
            around = parent[around]
        if around is not None:
            inside += 1
            work.setdefault(calls[around], []).append(span.id)
    return {call: tuple(spans) for call, spans in work.items()}, inside, total


class CallNames:
    """Call ids: those of the execution trace for linked operators, larger numbers for others."""

    def __init__(self, kineto: KinetoTrace, nesting: Nesting, linked: LinkedTrace | None) -> None:
        self._nesting = nesting
        self._main = kineto.main_thread
        self._spans = {span.id: span for span in kineto.operators}
        self._linked = {span: call for call, span in linked.spans.items()} if linked else {}
        self._traced = {call.id: call for call in linked.trace.calls} if linked else {}
        self._offset = max(self._traced, default=-1) + 1
        self._phases = [(span, _phase_of(span)) for span in kineto.annotations if _phase_of(span) is not None]

    def around(self, call: HostSpan) -> list[HostSpan]:
        """Return the operators around a runtime call, the innermost first."""
        found = []
        span = self._nesting.parent.get(call.id)
        while span is not None:
            found.append(self._spans[span])
            span = self._nesting.parent[span]
        return found

    def innermost(self, call: HostSpan) -> int | None:
        """Return the call id of the operator directly around a runtime call, ``None`` at the top level."""
        span = self._nesting.parent.get(call.id)
        return None if span is None else self.id_of_span(span)

    def id_of(self, operator: HostSpan) -> int:
        """Return the call id of ``operator`` of the profile."""
        return self.id_of_span(operator.id)

    def id_of_span(self, span: int) -> int:
        return self._linked.get(span, self._offset + span)

    def spans(self) -> dict[int, HostSpan]:
        """Map call ids to operators of the profile."""
        return {self.id_of_span(span): operator for span, operator in self._spans.items()}

    def infos(self, calls: Iterable[int]) -> dict[int, CallInfo]:
        """Return the records of ``calls`` and of the operators around them."""
        spans = {call: span.id for call, span in self.spans().items()}
        found: dict[int, CallInfo] = {}
        for call in calls:
            current: int | None = call
            while current is not None and current not in found:
                span = spans[current]
                above = self._nesting.parent[span]
                parent = None if above is None else self.id_of_span(above)
                found[current] = self._info(current, self._spans[span], parent)
                current = parent
        return self._settled(found, spans)

    def _settled(self, found: Mapping[int, CallInfo], spans: Mapping[int, int]) -> dict[int, CallInfo]:
        """Return ``found``, the calls of one step, each with the phase that it belongs to."""
        begun = sorted(found, key=lambda call: (self._spans[spans[call]].start, -self._spans[spans[call]].end))
        marked = (MarkedCall(call, found[call].phase, self._spans[spans[call]].sequence) for call in begun)
        phases = settled_phases(marked)
        return {call: replace(info, phase=phases[call]) for call, info in found.items()}

    def _info(self, call: int, span: HostSpan, parent: int | None) -> CallInfo:
        traced = self._traced.get(call)
        if traced is not None:
            return CallInfo(call, traced.name, traced.phase, parent, traced.module)
        return CallInfo(call, span.name, self._phase(span), parent)

    def _phase(self, span: HostSpan) -> Phase:
        for around, phase in self._phases:
            if around.thread == span.thread and around.start <= span.start < around.end and phase is not None:
                return phase
        backward = span.forward_thread > 0 or span.thread != self._main or span.name.startswith("autograd::engine::")
        return "backward" if backward else "forward"


def _phase_of(annotation: HostSpan) -> Phase | None:
    """Phase of an annotation made by PyTorch itself, ``None`` for others."""
    if annotation.name.startswith("Optimizer."):
        return "optimizer"
    return "data" if annotation.name.startswith("enumerate(DataLoader)") else None


def profiled_ranges(kineto: KinetoTrace, calls: Mapping[int, HostSpan], backward: Collection[int]) -> NamedRanges:
    """Return the named ranges. ``calls``: number -> operator of the profile; ``backward``: calls of a backward pass.

    An operator of another thread that is in no range there belongs to the ranges of the main thread at that time, which
    waits for autograd. A backward call belongs to the ranges of the last forward call with its sequence number, which
    made its autograd node.
    """
    named = [span for span in kineto.annotations if is_named_by_script(span.name)]
    if not named:
        return NamedRanges()
    threads = {span.thread for span in named}
    entries = {thread: _nested([span for span in named if span.thread == thread]) for thread in threads}
    main = entries.get(kineto.main_thread, {})
    spans = {span.id: span for span in named}
    of_call: dict[int, int] = {}
    for thread in {span.thread for span in calls.values()}:
        inside = [(call, span) for call, span in calls.items() if span.thread == thread]
        own = _innermost(inside, [spans[entry] for entry in entries.get(thread, {})])
        rest = [] if thread == kineto.main_thread else [each for each in inside if each[0] not in own]
        of_call |= own | _innermost(rest, [spans[entry] for entry in main])
    ordered = sorted(calls.items(), key=lambda item: item[1].start)
    of_forward = of_forward_calls(((call, span.sequence, call in backward) for call, span in ordered), of_call)
    ranges = {entry: each for nested in entries.values() for entry, each in nested.items()}
    return NamedRanges(dict(sorted(ranges.items())), of_call, of_forward)


def _nested(spans: Iterable[HostSpan]) -> dict[int, NamedRange]:
    """Nest the annotations of one thread: each in the innermost one that is open when it begins."""
    found: dict[int, NamedRange] = {}
    opened: list[HostSpan] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        opened = [each for each in opened if each.end > span.start]
        found[span.id] = NamedRange(span.id, span.name, opened[-1].id if opened else None)
        opened.append(span)
    return found


@dataclass(frozen=True, order=True)
class _Moment:
    """Begin of an annotation (``order`` 0) or of a call (1): annotations come first."""

    time: float
    order: int
    place: int


def _innermost(calls: Collection[tuple[int, HostSpan]], annotations: Collection[HostSpan]) -> dict[int, int]:
    """Map calls to the innermost of ``annotations`` that is open when they begin."""
    listed, spans = list(calls), list(annotations)
    moments = [_Moment(span.start, 0, place) for place, span in enumerate(spans)]
    moments += [_Moment(span.start, 1, place) for place, (_, span) in enumerate(listed)]
    found: dict[int, int] = {}
    opened: list[HostSpan] = []
    for moment in sorted(moments):
        opened = [each for each in opened if each.end > moment.time]
        if moment.order == 0:
            opened.append(spans[moment.place])
        elif opened:
            # The shorter of two that began together is the inner one.
            found[listed[moment.place][0]] = max(opened, key=lambda each: (each.start, -each.end)).id
    return found
