"""What stands around neighbours on a thread or a stream: calls around others, ranges that a script named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from e2e.step.execution_graph import Action, Await, HostWork, Launch, RankGraph, Signal, Synchronize
from e2e.step.marked_ranges import MARKED
from e2e.step.named_ranges import around, around_forward


@dataclass(frozen=True, slots=True)
class Around:
    """An entry of a named range (``entry``), or a call around others (``call``), that stands around something.
    ``of_forward``: it stands around the forward operator of what is inside.
    """

    name: str
    entry: int | None = None
    call: int | None = None
    of_forward: bool = False


Chain = tuple[Around, ...]


@dataclass(frozen=True, slots=True)
class Enclosed:
    """``around`` from ``begin`` to ``end``; ``depth``: how many stand around it."""

    around: Around
    begin: float
    end: float
    depth: int


def enclosed(chains: Sequence[Chain], times: Sequence[tuple[float, float]]) -> list[Enclosed]:
    """Spans of what neighbours have in common, the outer one first where two begin together.

    ``chains``: what stands around each neighbour, the outermost first; ``times``: its begin and end.
    """
    found: list[Enclosed] = []
    opened: list[tuple[Around, float]] = []
    end = 0.0
    for place, chain in enumerate((*chains, ())):
        same = 0
        while same < min(len(chain), len(opened)) and chain[same] == opened[same][0]:
            same += 1
        while len(opened) > same:
            each, begin = opened.pop()
            found.append(Enclosed(each, begin, end, len(opened)))
        if place < len(chains):
            opened += [(each, times[place][0]) for each in chain[same:]]
            end = times[place][1]
    return sorted(found, key=lambda each: (each.begin, -each.end, each.depth))


def ranges_around(rank: RankGraph, call: int | None) -> Chain:
    """The named ranges around ``call``, then those around its forward call that it is not in itself."""
    own = around(rank.ranges, rank.calls, call)
    before = [each for each in around_forward(rank.ranges, rank.calls, call) if each not in own]
    return (
        *(Around(each.name, each.id) for each in own),
        *(Around(f"{each.name} (backward)", each.id, of_forward=True) for each in before),
    )


def ranges_of_threads(rank: RankGraph) -> dict[str, list[Chain]]:
    """Thread -> the named ranges around each of its actions.

    What belongs to no call (events, gaps that are no operator's) is where its neighbours are. The main thread that
    waits for autograd is where ``backward()`` was called.
    """
    if not rank.ranges:
        return {name: [()] * len(actions) for name, actions in rank.threads.items()}
    signalled = dict(_signalled(rank))
    found: dict[str, list[Chain]] = {}
    for name, actions in rank.threads.items():
        told: list[Chain | None] = []
        for action in actions:
            call = call_of(action, rank)
            if isinstance(action, Await):
                told.append(signalled.get(action.flag))
            elif call is None or call not in rank.calls or rank.calls[call].name in MARKED:
                told.append(None)
            else:
                told.append(ranges_around(rank, call))
        found[name] = _filled(told)
    return found


def call_of(action: Action, rank: RankGraph) -> int | None:
    """Number of the operator call behind ``action``."""
    if isinstance(action, Launch):
        return rank.tasks[action.task].call
    return action.call if isinstance(action, HostWork | Synchronize) else None


def calls_around(rank: RankGraph, call: int | None) -> Chain:
    """Calls around ``call``, the outermost first."""
    found: list[Around] = []
    info = None if call is None else rank.calls.get(call)
    while info is not None and info.parent is not None and info.parent in rank.calls:
        info = rank.calls[info.parent]
        found.append(Around(info.name, call=info.id))
    return tuple(reversed(found))


def _signalled(rank: RankGraph) -> Iterator[tuple[int, Chain]]:
    """Flag -> the ranges in which another thread was at work before it signalled, without those of forward calls."""
    for actions in rank.threads.values():
        last: Chain = ()
        for action in actions:
            call = call_of(action, rank)
            if call is not None:
                last = tuple(each for each in ranges_around(rank, call) if not each.of_forward)
            if isinstance(action, Signal):
                yield action.flag, last


def _filled(told: Sequence[Chain | None]) -> list[Chain]:
    """``told``, and what the neighbours of those that tell nothing have in common."""
    following: list[Chain] = []
    after: Chain = ()
    for chain in reversed(told):
        after = after if chain is None else chain
        following.append(after)
    found: list[Chain] = []
    before: Chain = ()
    for chain, after in zip(told, reversed(following), strict=True):
        before = _common(before, after) if chain is None else chain
        found.append(before)
    return found


def _common(one: Chain, other: Chain) -> Chain:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[:same]
