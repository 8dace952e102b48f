"""Builds what one rank does: kernels on the compute stream, collectives on a stream of their own, waits between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e.graph import (
    Action,
    CallInfo,
    Collective,
    Duration,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    StreamWait,
    Task,
)
from e2e.operators import Phase

COMPUTE, COMMUNICATION = 0, 1
GROUP = "world"
# The operators that start collectives, as tables of host overheads know them.
CALLS = {
    "all_to_all": "c10d::alltoall_base_",
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}
NOTHING = Duration(0.0, 0.0, 0.0, "", "analytic")


@dataclass
class RankProgram:
    """Rank ``rank`` of ``ranks``. ``host``: whether operators cost the host time (priced later), or none at all.

    ``sequence`` counts collectives: TorchRec and DDP share a process group, so that they keep their order.
    """

    rank: int
    ranks: int
    host: bool = False
    actions: list[Action] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    calls: dict[int, CallInfo] = field(default_factory=dict)
    sequence: int = 0
    events: int = 0

    def call(self, name: str, phase: Phase = "other") -> int:
        """A new operator call of that name."""
        number = max(self.calls, default=-1) + 1
        self.calls[number] = CallInfo(number, name, phase)
        return number

    def kernel(
        self,
        name: str,
        seconds: float | None = None,
        operators: tuple[Any, ...] = (),
        phase: Phase = "other",
        launches: int = 1,
        operator: str = "",
    ) -> None:
        """One kernel of ``seconds``, or one that its ``operators`` price. ``launches``: how many the host makes for it
        (a pass of several kernels that are priced as one); ``operator``: the host's call, if that has another name.
        """
        duration = None if seconds is None else _exactly(seconds)
        call = self.call(operator or name, phase)
        self._launch(Task(len(self.tasks), name, "kernel", COMPUTE, operators, duration, None, call), call, launches)

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
        """A collective of all ranks; returns the event of its end. ``behind``: after what the compute stream has been
        given so far.
        """
        call = self.call(CALLS.get(kind, name), phase)
        meeting = Collective(
            kind,
            GROUP,
            tuple(range(self.ranks)),
            self.sequence,
            round(sent),
            None if received is None else round(received),
        )
        self.sequence += 1
        if behind:
            self.actions += [RecordEvent(self.event(), COMPUTE), StreamWait(self.events, COMMUNICATION)]
        duration = None if seconds is None else _exactly(seconds)
        task = Task(len(self.tasks), name, "collective", COMMUNICATION, (), duration, meeting, call)
        self._launch(task, call)
        self.actions.append(RecordEvent(self.event(), COMMUNICATION))
        return self.events

    def wait(self, event: int) -> None:
        """What follows on the compute stream waits for ``event``."""
        self.actions.append(StreamWait(event, COMPUTE))

    def event(self) -> int:
        """A new event."""
        self.events += 1
        return self.events

    def graph(self) -> RankGraph:
        """The finished rank."""
        return RankGraph(self.rank, {"main": tuple(self.actions)}, tuple(self.tasks), self.calls)

    def paste(self, actions: tuple[Action, ...], tasks: Mapping[int, Task], calls: Mapping[int, CallInfo]) -> None:
        """Appends host ``actions`` of another program; ``tasks`` and ``calls`` that they name get new numbers."""
        numbers: dict[int, int] = {}

        def renumbered(call: int | None) -> int | None:
            if call is None or call not in calls:
                return None
            if call not in numbers:
                numbers[call] = self.call(calls[call].name, calls[call].phase)
            return numbers[call]

        for action in actions:
            if isinstance(action, Launch):
                task = tasks[action.task]
                new = Task(
                    len(self.tasks),
                    task.name,
                    task.kind,
                    COMPUTE,
                    task.operators,
                    task.duration,
                    None,
                    renumbered(task.call),
                )
                self.tasks.append(new)
                self.actions.append(Launch(new.id, action.duration))
            elif isinstance(action, HostWork):
                self.actions.append(HostWork(action.kind, renumbered(action.call), action.duration))

    def _launch(self, task: Task, call: int, launches: int = 1) -> None:
        self.tasks.append(task)
        if self.host:
            others = [HostWork("T5", call)] * (launches - 1)
            self.actions += [HostWork("T1", call), HostWork("T2", call), Launch(task.id), *others, HostWork("T3", call)]
        else:
            self.actions.append(Launch(task.id, NOTHING))


def _exactly(seconds: float) -> Duration:
    return Duration(seconds, seconds, seconds, "", "analytic")
