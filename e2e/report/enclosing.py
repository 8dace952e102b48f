"""Enclosing spans of neighbours on a thread or a stream: outer calls, and ranges named by the script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from e2e.step.execution_graph import Action, Await, HostWork, Launch, RankGraph, Signal, Synchronize
from e2e.step.operator_trace import MARKED_GAPS, around, around_forward


@dataclass(frozen=True, slots=True)
class Around:
    """Entry of a named range, or an outer call, that encloses something."""

    name: str
    # Entry of the named range.
    entry: int | None = None
    # Number of the outer call.
    call: int | None = None
    # It encloses the forward operator of a backward call.
    of_forward: bool = False


Chain = tuple[Around, ...]


@dataclass(frozen=True, slots=True)
class Enclosed:
    """``around`` from ``begin`` to ``end``; ``depth``: number of spans that enclose it."""

    around: Around
    begin: float
    end: float
    depth: int


def enclosed(chains: Sequence[Chain], times: Sequence[tuple[float, float]]) -> list[Enclosed]:
    """Return spans shared by neighbours, the outer one first if two begin together.

    ``chains``: enclosing spans of each neighbour, the outermost first; ``times``: its begin and end.
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
    """Return the named ranges around ``call``, then those only around its forward call."""
    own = around(rank.ranges, rank.calls, call)
    before = [each for each in around_forward(rank.ranges, rank.calls, call) if each not in own]
    return (
        *(Around(each.name, each.id) for each in own),
        *(Around(f"{each.name} (backward)", each.id, of_forward=True) for each in before),
    )


def ranges_of_threads(rank: RankGraph) -> dict[str, list[Chain]]:
    """Map threads to the named ranges around each of their actions.

    Actions without a call (events, gaps outside operators) belong where their neighbours are. The main thread waiting
    for autograd belongs where ``backward()`` was called.
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
            elif call is None or call not in rank.calls or rank.calls[call].name in MARKED_GAPS:
                told.append(None)
            else:
                told.append(ranges_around(rank, call))
        found[name] = _filled(told)
    return found


def call_of(action: Action, rank: RankGraph) -> int | None:
    """Return the number of the operator call of ``action``, or ``None``."""
    if isinstance(action, Launch):
        return rank.tasks[action.task].call
    return action.call if isinstance(action, HostWork | Synchronize) else None


def calls_around(rank: RankGraph, call: int | None) -> Chain:
    """Return the calls around ``call``, the outermost first."""
    found: list[Around] = []
    info = None if call is None else rank.calls.get(call)
    while info is not None and info.parent is not None and info.parent in rank.calls:
        info = rank.calls[info.parent]
        found.append(Around(info.name, call=info.id))
    return tuple(reversed(found))


def _signalled(rank: RankGraph) -> Iterator[tuple[int, Chain]]:
    """Yield each flag with the ranges in which another thread worked before signalling it.

    Ranges of forward calls are left out.
    """
    for actions in rank.threads.values():
        last: Chain = ()
        for action in actions:
            call = call_of(action, rank)
            if call is not None:
                last = tuple(each for each in ranges_around(rank, call) if not each.of_forward)
            if isinstance(action, Signal):
                yield action.flag, last


def _filled(told: Sequence[Chain | None]) -> list[Chain]:
    """Fill ``None`` entries of ``told`` with what the chains before and after them have in common."""
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
