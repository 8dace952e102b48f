"""Which calls are units of host work, and on which thread they are.

Ranges that a person or a library marked (``ProfilerStep#3``, ``Optimizer.step#AdamW.step``) are no units; what is
inside them is. The autograd engine's ``evaluate_function`` is one, as in the traces from which overheads are fitted.
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

# Of a profiler's record: an operator's begin, or its end.
_HALF = 0.5
THREAD_NAMES = {0: MAIN, 1: AUTOGRAD}


def thread_of(call: OperatorCall) -> str:
    """The name of the thread on which ``call`` was made."""
    return THREAD_NAMES.get(call.thread, f"thread {call.thread}")


def is_annotation(call: OperatorCall) -> bool:
    """A marked range, not an operator: operators have a namespace, kernels of a compiler a backend."""
    named = "::" in call.name or call.name.startswith(("cuda", "hip", ANNOTATION))
    return not named and not is_generated(call)


@dataclass
class OpenCalls:
    """Operators that have begun inside the open unit of ``writer``, which is told of each begin and end: the host's
    work around launches grows with them. A call ends where the next one is not inside it.
    """

    writer: RankWriter
    _open: list[int] = field(default_factory=list)

    def begin_unit(self, call: OperatorCall) -> None:
        """``call`` is the unit itself, whose own begin is before its first piece."""
        self._open = [call.id]
        self.writer.nested(0.0)

    def begin(self, call: OperatorCall) -> None:
        """``call`` begins inside the unit, and those that it is not inside of have ended."""
        while len(self._open) > 1 and self._open[-1] != call.parent:
            self._open.pop()
            self.writer.nested(_HALF)
        self._open.append(call.id)
        self.writer.nested(_HALF)

    def end_unit(self) -> None:
        """The unit ends, and everything in it."""
        if self._open:
            self.writer.nested(_HALF * len(self._open))
        self._open = []


@dataclass
class UnitGaps:
    """What the gaps before units of the main thread are made of. ``recorded``: the trace tells marked ranges; a capture
    tells the phases of ``infos`` only, of which the optimizer's begins with a marked range in every step.
    """

    infos: Mapping[int, CallInfo]
    recorded: bool
    _around: Sequence[str] | None = None
    _optimizing: bool = False

    def before(self, call: OperatorCall) -> tuple[str, ...]:
        """Names of the parts of the gap before the unit ``call``; none: the gap is the unit's own."""
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
            # The profiler's own border, around a whole step, is no part of one.
            now = [name for name in now if not name.startswith(f"{PROFILER_STEP}#")]
        return gap_names(*crossed(before or (), now))
