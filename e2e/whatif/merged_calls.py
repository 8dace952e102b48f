"""Replaces several calls of a rank by a single one; their launches and the host work around them are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.operators.any_operator import AnyOperator
from e2e.lowering.families.work import DeviceWork
from e2e.step.execution_graph import Action, CallInfo, Duration, HostWork, Launch, RankGraph, Task

# Function: (operators before, operators after) -> ratio of their times with its lower and upper bound.
Ratio = Callable[[Sequence[AnyOperator], Sequence[AnyOperator]], tuple[float, float, float]]


@dataclass(frozen=True)
class MergedCalls:
    """Calls, in program order, replaced by one call ``name`` with ``work`` at the place of ``anchor``, one of them."""

    name: str
    calls: tuple[int, ...]
    anchor: int
    work: tuple[DeviceWork, ...]


def merge(
    rank: RankGraph,
    merged: Iterable[MergedCalls],
    homes: Mapping[int, int],
    operators: Mapping[int, Sequence[AnyOperator]],
    ratio: Ratio,
) -> RankGraph:
    """Return ``rank`` with the ``merged`` calls. ``homes``: task -> its call; ``operators``: call -> its operators.

    If all replaced tasks were measured, the replacement takes their time multiplied by ``ratio``; otherwise it has no
    price. Host pieces of operators that launch nothing any more are removed; so are launches within operators that keep
    others, each with the piece before it.
    """
    tasks_of: dict[int, list[Task]] = {}
    for task in rank.tasks:
        if task.id in homes:
            tasks_of.setdefault(homes[task.id], []).append(task)
    calls = dict(rank.calls)
    replaced: dict[int, tuple[Task, ...]] = {}
    for group in merged:
        members = [task for call in group.calls for task in tasks_of.get(call, ())]
        place = next((task for task in tasks_of.get(group.anchor, ())), None)
        if place is None or len(members) < 2:
            continue
        number = max(calls, default=-1) + 1
        anchor = calls.get(group.anchor) or CallInfo(group.anchor, group.name)
        calls[number] = CallInfo(number, group.name, anchor.phase, group.anchor, anchor.module)
        before = [record for call in group.calls for record in operators.get(call, ())]
        durations = _durations(members, before, group.work, ratio)
        replaced |= {task.id: () for task in members}
        replaced[place.id] = tuple(
            Task(-1, piece.name, piece.kind, place.stream, piece.operators, duration, call=number)
            for piece, duration in zip(group.work, durations, strict=True)
        )
    return with_replaced(replace(rank, calls=calls), replaced)


def with_replaced(rank: RankGraph, replaced: Mapping[int, tuple[Task, ...]]) -> RankGraph:
    """Return ``rank`` with the tasks ``replaced`` by others or by none, without the host work of removed ones."""
    return _Rewriter(rank, replaced).rewrite()


def _durations(
    members: Sequence[Task], before: Sequence[AnyOperator], work: Sequence[DeviceWork], ratio: Ratio
) -> list[Duration | None]:
    known = [task.duration for task in members]
    after = [record for piece in work for record in piece.operators]
    if not before or any(duration is None for duration in known):
        return [None] * len(work)
    seconds = sum(duration.seconds for duration in known if duration is not None)
    likely, lower, upper = (seconds * each for each in ratio(before, after))
    parts = [ratio(after, piece.operators)[0] for piece in work]
    return [Duration(likely * part, lower * part, upper * part, "scaled by its operator", "fitted") for part in parts]


class _Rewriter:
    """Rewriter of a rank. ``replaced``: task -> tasks launched in its place."""

    def __init__(self, rank: RankGraph, replaced: Mapping[int, tuple[Task, ...]]) -> None:
        self._rank = rank
        self._replaced = replaced
        self._tasks: list[Task] = []
        self._places: list[tuple[int, int]] = []

    def rewrite(self) -> RankGraph:
        threads = {name: self._thread(actions) for name, actions in self._rank.threads.items()}
        # Tasks keep their order, which differs from that of the threads.
        order = sorted(range(len(self._tasks)), key=self._places.__getitem__)
        number = {before: now for now, before in enumerate(order)}
        tasks = tuple(replace(self._tasks[before], id=now) for now, before in enumerate(order))
        numbered = {
            name: tuple(
                replace(action, task=number[action.task]) if isinstance(action, Launch) else action
                for action in actions
            )
            for name, actions in threads.items()
        }
        return replace(self._rank, threads=numbered, tasks=tasks)

    def _thread(self, actions: Sequence[Action]) -> list[Action]:
        gone = self._host_work_gone(actions)
        found: list[Action] = []
        for place, action in enumerate(actions):
            if place in gone:
                continue
            if not isinstance(action, Launch):
                found.append(action)
                continue
            instead = self._replaced.get(action.task)
            if instead is None:
                found.append(self._launched(self._rank.tasks[action.task], action.duration, action.task))
                continue
            for number, task in enumerate(instead):
                if number:
                    found.append(HostWork("T5", _unit(actions, place)))
                found.append(self._launched(task, action.duration, action.task, number))
        return found

    def _launched(self, task: Task, duration: Duration | None, before: int, number: int = 0) -> Launch:
        self._tasks.append(task)
        self._places.append((before, number))
        return Launch(len(self._tasks) - 1, duration)

    def _host_work_gone(self, actions: Sequence[Action]) -> set[int]:
        """Return the places of host work that belongs to removed launches."""
        gone: set[int] = set()
        for place, action in enumerate(actions):
            if not (isinstance(action, Launch) and self._replaced.get(action.task) == ()):
                continue
            unit = _unit(actions, place)
            around = _around(actions, place, unit)
            left = [each for each in around if isinstance(actions[each], Launch) and self._stays(actions[each])]
            host = [each for each in around if isinstance(actions[each], HostWork)]
            if not left:
                gone.update(host)
                continue
            before = max((each for each in host if each < place), default=None)
            first = before is not None and actions[before].kind != "T5"  # type: ignore[union-attr]
            after = min((each for each in host if each > place), default=None)
            piece = after if first else before
            if piece is not None:
                gone.add(piece)
        return gone

    def _stays(self, action: Action) -> bool:
        assert isinstance(action, Launch)
        return self._replaced.get(action.task) != ()


def _unit(actions: Sequence[Action], place: int) -> int | None:
    """Return the operator call that makes the launch at ``place``."""
    for each in range(place - 1, -1, -1):
        action = actions[each]
        if isinstance(action, HostWork):
            return action.call
    return None


def _around(actions: Sequence[Action], place: int, unit: int | None) -> range:
    """Return the places of the actions of ``unit`` around ``place``."""
    first = last = place
    while first > 0 and not _foreign(actions[first - 1], unit):
        first -= 1
    while last + 1 < len(actions) and not _foreign(actions[last + 1], unit):
        last += 1
    return range(first, last + 1)


def _foreign(action: Action, unit: int | None) -> bool:
    return isinstance(action, HostWork) and action.call != unit
