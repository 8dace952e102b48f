"""Units of host work, and their threads.

Ranges marked by a person or a library (``ProfilerStep#3``, ``Optimizer.step#AdamW.step``) are not units, but the calls
in them are. The autograd engine's ``evaluate_function`` is one, as in the traces to which overheads are fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from e2e.lowering.generated_kernels import is_generated
from e2e.step.collective_names import ANNOTATION
from e2e.step.execution_graph import CallInfo
from e2e.step.marked_ranges import OPTIMIZER_STEP, PROFILER_STEP, crossed, gap_names
from e2e.step.operator_trace import OperatorCall
from e2e.step.rank_writer import AUTOGRAD, MAIN, RankWriter

# Profiler records per begin or end of an operator.
_HALF = 0.5
THREAD_NAMES = {0: MAIN, 1: AUTOGRAD}


def thread_of(call: OperatorCall) -> str:
    """Return the name of the thread of ``call``."""
    return THREAD_NAMES.get(call.thread, f"thread {call.thread}")


def is_annotation(call: OperatorCall) -> bool:
    """True for a marked range instead of an operator: operators have a namespace, kernels of a compiler a backend."""
    named = "::" in call.name or call.name.startswith(("cuda", "hip", ANNOTATION))
    return not named and not is_generated(call)


@dataclass
class OpenCalls:
    """Open operators inside the open unit of ``writer``, which counts each begin and end: host work around launches
    grows with them.

    A call ends when the next call is not inside it.
    """

    writer: RankWriter
    _open: list[int] = field(default_factory=list)

    def begin_unit(self, call: OperatorCall) -> None:
        """Begin the unit ``call``, whose own begin is before its first piece."""
        self._open = [call.id]
        self.writer.nested(0.0)

    def begin(self, call: OperatorCall) -> None:
        """Begin ``call`` inside the unit, and end the open calls that do not contain it."""
        while len(self._open) > 1 and self._open[-1] != call.parent:
            self._open.pop()
            self.writer.nested(_HALF)
        self._open.append(call.id)
        self.writer.nested(_HALF)

    def end_unit(self) -> None:
        """End the unit and all open calls in it."""
        if self._open:
            self.writer.nested(_HALF * len(self._open))
        self._open = []


@dataclass
class UnitGaps:
    """Names of the gaps before units of the main thread."""

    # Calls with their phases.
    infos: Mapping[int, CallInfo]
    # True if the trace has marked ranges; a capture has only phases, of which the optimizer's begins with a marked
    # range.
    recorded: bool
    _around: Sequence[str] | None = None
    _optimizing: bool = False

    def before(self, call: OperatorCall) -> tuple[str, ...]:
        """Return the names of the parts of the gap before the unit ``call``; empty if the gap is the unit's own."""
        if thread_of(call) != MAIN:
            return ()
        if not self.recorded:
            begins = self.infos[call.id].phase == "optimizer" and not self._optimizing
            self._optimizing |= begins
            return (OPTIMIZER_STEP,) if begins else ()
        told = call.attributes.get("annotations")
        now = [str(name) for name in told] if isinstance(told, tuple) else []
        before, self._around = self._around, now
        if before is None:
            # The profiler's range around a whole step does not count.
            now = [name for name in now if not name.startswith(f"{PROFILER_STEP}#")]
        return gap_names(*crossed(before or (), now))
