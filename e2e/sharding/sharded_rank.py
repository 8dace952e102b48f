"""Rank of a sharded step: kernels on the compute stream, collectives on a stream of their own, waits between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from e2e.step.collective_names import EAGER_CALLS
from e2e.step.execution_graph import Action, CallInfo, Collective, Duration, HostWork, Launch, RankGraph, Task
from e2e.step.operator_trace import Phase
from e2e.step.rank_writer import RankWriter

COMPUTE, COMMUNICATION = 0, 1
GROUP = "world"
NOTHING = Duration(0.0, 0.0, 0.0, "", "analytic")


@dataclass
class ShardedRank:
    """Rank ``rank`` of ``ranks``. ``host``: whether operators cost host time (priced later).

    All collectives are of one group: TorchRec and DDP share it, so that they keep their order.
    """

    rank: int
    ranks: int
    host: bool = False
    _writer: RankWriter = field(init=False)

    def __post_init__(self) -> None:
        self._writer = RankWriter(self.rank)

    def kernel(
        self,
        name: str,
        seconds: float | None = None,
        operators: tuple[Any, ...] = (),
        phase: Phase = "other",
        launches: int = 1,
        operator: str = "",
    ) -> None:
        """Add one kernel that takes ``seconds``, or that is priced by its ``operators``.

        ``launches``: number of launches by the host (a pass of several kernels that are priced as one); ``operator``:
        name of the host's call if it differs.
        """
        call = self._writer.call(operator or name, phase)
        place, duration = self._writer.next_task, _exactly(seconds)
        self._launch(Task(place, name, "kernel", COMPUTE, operators, duration, None, call), launches)

    def collective(
        self,
        name: str,
        kind: str,
        sent: float,
        seconds: float | None = None,
        received: float | None = None,
        behind: bool = True,
        phase: Phase = "other",
    ) -> int:
        """Add a collective of all ranks; return the event of its end.

        ``behind``: True if it waits for all work submitted to the compute stream so far.
        """
        writer = self._writer
        taken = None if received is None else round(received)
        collective = Collective(kind, GROUP, tuple(range(self.ranks)), writer.next_in(GROUP), round(sent), taken)
        call = writer.call(EAGER_CALLS[kind], phase)
        if behind:
            writer.after(COMMUNICATION, COMPUTE)
        place, duration = writer.next_task, _exactly(seconds)
        self._launch(Task(place, name, "collective", COMMUNICATION, (), duration, collective, call))
        return writer.record_event(COMMUNICATION)

    def wait(self, event: int) -> None:
        """Make later work on the compute stream wait for ``event``."""
        self._writer.wait_event(event, COMPUTE)

    def paste(self, actions: tuple[Action, ...], source: RankGraph) -> None:
        """Append launches and host work of another program; their tasks and calls are renumbered."""
        renumbered = _Renumbered(self._writer, source.calls)
        for action in actions:
            if isinstance(action, Launch):
                task = source.tasks[action.task]
                call = renumbered.call(task.call)
                task = replace(task, id=self._writer.next_task, stream=COMPUTE, call=call)
                self._writer.enqueue(task, action.duration)
            elif isinstance(action, HostWork):
                self._writer.append(replace(action, call=renumbered.call(action.call)))

    def graph(self) -> RankGraph:
        """Return the finished rank."""
        return self._writer.finish()

    def _launch(self, task: Task, launches: int = 1) -> None:
        if self.host:
            self._writer.unit(task, launches)
        else:
            self._writer.enqueue(task, NOTHING)


@dataclass
class _Renumbered:
    """Map of another program's calls to new numbers, assigned at their first use."""

    writer: RankWriter
    calls: Mapping[int, CallInfo]
    numbers: dict[int, int] = field(default_factory=dict)

    def call(self, number: int | None) -> int | None:
        if number is None or number not in self.calls:
            return None
        if number not in self.numbers:
            info = self.calls[number]
            self.numbers[number] = self.writer.call(info.name, info.phase)
        return self.numbers[number]


def _exactly(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds, seconds, seconds, "", "analytic")
