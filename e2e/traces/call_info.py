"""Names of the operators of host and device work: from the execution trace if linked, else from the profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from e2e.step.call_phases import MarkedCall, settled_phases
from e2e.step.execution_graph import CallInfo
from e2e.step.operator_trace import Phase
from e2e.traces.formats.profile import HostSpan, KinetoTrace
from e2e.traces.linking.link import LinkedTrace
from e2e.traces.linking.nesting import Nesting


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
