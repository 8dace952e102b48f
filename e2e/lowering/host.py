"""Host actions of one rank: overheads around each top-level operator, launches, waits, and the two threads.

Overheads belong to *units*: the outermost calls that are operators. Ranges that a person or a library marked
(``ProfilerStep#3``, ``Optimizer.step#AdamW.step``) are no units; what is inside them is. The autograd engine's
``evaluate_function`` is one, as in the traces from which overheads are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from e2e.graph import Action, Await, HostWork, Launch, RecordEvent, Signal, StreamWait, Synchronize
from e2e.lowering.generated import is_generated
from e2e.operators import OperatorCall

MAIN, AUTOGRAD = 0, 1
THREAD_NAMES = {MAIN: "main", AUTOGRAD: "autograd"}


def thread_name(thread: int) -> str:
    return THREAD_NAMES.get(thread, f"thread {thread}")


def is_annotation(call: OperatorCall) -> bool:
    """A marked range, not an operator: operators have a namespace, kernels of a compiler a backend."""
    named = "::" in call.name or call.name.startswith(("cuda", "hip", "nccl:"))
    return not named and not is_generated(call)


@dataclass
class HostProgram:
    """Builds the actions of all threads of one rank."""

    threads: dict[str, list[Action]] = field(default_factory=lambda: {"main": []})
    _flags: int = 0
    _events: int = 0
    _thread: int = MAIN
    _return_flag: int | None = None
    _unit: int | None = None
    _launched: bool = False

    def begin_unit(self, call: OperatorCall) -> None:
        """A new top-level operator; ends the one before."""
        self.end_unit()
        self._enter(call.thread)
        self._unit, self._launched = call.id, False
        self._append(HostWork("T1", call.id))

    def launch(self, task: int) -> None:
        """The unit's next launch."""
        self._append(HostWork("T5" if self._launched else "T2", self._unit))
        self._append(Launch(task))
        self._launched = True

    def synchronize(self, stream: int | None, call: int) -> None:
        """The host waits for ``stream`` (for all streams if ``None``)."""
        self._append(Synchronize(stream=stream, call=call))

    def synchronize_event(self, event: int, call: int) -> None:
        """The host waits for ``event``."""
        self._append(Synchronize(event=event, call=call))

    def switch(self, thread: int) -> None:
        """What follows happens on ``thread``, in the open unit if that is its own."""
        if thread != self._thread:
            self.end_unit()
            self._enter(thread)

    def record_event(self, stream: int) -> int:
        """Marks ``stream``; returns the event."""
        self._events += 1
        self._append(RecordEvent(self._events, stream))
        return self._events

    def wait_event(self, event: int, stream: int) -> None:
        """Later work on ``stream`` waits for ``event``."""
        self._append(StreamWait(event, stream))

    def end_unit(self) -> None:
        """Closes the open unit, if any."""
        if self._unit is not None:
            self._append(HostWork("T3" if self._launched else "T5", self._unit))
        self._unit = None

    def finish(self) -> dict[str, tuple[Action, ...]]:
        """All threads; the main one has waited for autograd."""
        self.end_unit()
        self._enter(MAIN)
        return {name: tuple(actions) for name, actions in self.threads.items()}

    def _append(self, action: Action) -> None:
        self.threads.setdefault(thread_name(self._thread), []).append(action)

    def _enter(self, thread: int) -> None:
        """``backward()`` hands over to the autograd thread and waits for it; other threads run on their own."""
        before, self._thread = self._thread, thread
        if (before, thread) == (MAIN, AUTOGRAD):
            self._hand_over()
        elif (before, thread) == (AUTOGRAD, MAIN) and self._return_flag is not None:
            self.threads[thread_name(AUTOGRAD)].append(Signal(self._return_flag))
            self._return_flag = None

    def _hand_over(self) -> None:
        go, back = self._flags, self._flags + 1
        self._flags += 2
        self.threads["main"] += [Signal(go), Await(back)]
        self.threads.setdefault(thread_name(AUTOGRAD), []).append(Await(go))
        self._return_flag = back
