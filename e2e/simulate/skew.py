"""Heterogeneous ranks: late starts, GPUs of different speed, varying durations.

``--skew spread=0.02,jitter=0.05,seed=1,start=3:2.5``: the speed of every rank varies by 2 % (one factor for all its
kernels), every duration by 5 %, rank 3 starts 2.5 ms late. Factors are log-normal with mean 1 and the given relative
standard deviation; the same seed gives the same factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from costmodel.base.errors import InputError

if TYPE_CHECKING:  # command lines start without NumPy
    import numpy as np

    from e2e.step.execution_graph import Action, ExecutionGraph, HostWork, Launch, RankGraph, Task

    Timed = TypeVar("Timed", Task, HostWork, Launch)
# Upper limits of plausible values: larger ones are rejected as input errors.
MOST_DEVIATION, MOST_LATE_SECONDS = 1.0, 3600.0


@dataclass(frozen=True)
class Skew:
    """Parameters of ``--skew``. ``spread`` and ``jitter`` are relative standard deviations."""

    # Rank -> seconds by which it begins late.
    starts: Mapping[int, float] = field(default_factory=dict)
    # Deviation of the speed of GPUs; `None`: not given, no spread.
    spread: float | None = None
    # Deviation of every duration of a rank.
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, deviation in (("spread", self.spread or 0.0), ("jitter", self.jitter)):
            if not 0 <= deviation <= MOST_DEVIATION:
                raise InputError(f"--skew {name}={deviation:g}: a relative deviation must be 0 to {MOST_DEVIATION:g}")
        for rank, seconds in self.starts.items():
            if not 0 <= seconds <= MOST_LATE_SECONDS:
                raise InputError(
                    f"--skew start={rank}:{seconds * 1e3:g}: must be 0 to {MOST_LATE_SECONDS * 1e3:,.0f} ms"
                )


def skewed(graph: ExecutionGraph, skew: Skew) -> ExecutionGraph:
    """Return the priced ``graph`` with durations changed by ``skew``; transfers keep theirs.

    A rank that represents several gets the speed of the slowest of them, for which the rest wait in collectives.

    Raises ``InputError`` for starts of ranks that are not in the graph, and for jitter of ranks that represent several:
    how much of it remains depends on when they meet.
    """
    known = {rank.rank for rank in graph.ranks}
    for rank, seconds in skew.starts.items():
        if rank not in known:
            raise InputError(f"--skew start={rank}:{seconds * 1e3:g}: give ranks of {sorted(known)[:8]}")
    folded = [rank.rank for rank in graph.ranks if graph.multiplicity.get(rank.rank, 1) > 1]
    if skew.jitter and folded:
        raise InputError(
            f"--skew jitter={skew.jitter:g}: rank {folded[0]} stands for {graph.multiplicity[folded[0]]} ranks, which "
            "would vary apart; use spread, or capture every rank (--ranks)"
        )
    if not skew.spread and not skew.jitter:
        return graph
    return replace(
        graph, ranks=tuple(_skewed(rank, graph.multiplicity.get(rank.rank, 1), skew) for rank in graph.ranks)
    )


def _skewed(rank: RankGraph, alike: int, skew: Skew) -> RankGraph:
    import numpy as np

    source = np.random.default_rng((skew.seed, rank.rank))
    speed = float(_factors(source, skew.spread or 0.0, alike).max())
    count = len(rank.tasks) + sum(1 for _ in rank.actions())
    factors = iter(_factors(source, skew.jitter, count).tolist())
    tasks = tuple(task if task.collective else _times(task, speed * next(factors)) for task in rank.tasks)
    threads = {name: tuple(_varied(each, next(factors)) for each in actions) for name, actions in rank.threads.items()}
    return replace(rank, threads=threads, tasks=tasks)


def _factors(source: np.random.Generator, deviation: float, count: int) -> np.ndarray:
    """Log-normal random factors with mean 1 and standard deviation ``deviation``, shape (count,)."""
    variance = math.log1p(deviation**2)
    return source.lognormal(-variance / 2, math.sqrt(variance), count)


def _varied(action: Action, factor: float) -> Action:
    from e2e.step.execution_graph import HostWork, Launch

    if isinstance(action, HostWork):
        return _times(action, factor)
    return _times(action, factor) if isinstance(action, Launch) else action


def _times(item: Timed, factor: float) -> Timed:
    duration = item.duration
    if duration is None or factor == 1.0:
        return item
    changed = replace(
        duration, seconds=duration.seconds * factor, lower=duration.lower * factor, upper=duration.upper * factor
    )
    return replace(item, duration=changed)


def skew_text(skew: Skew) -> str:
    """Return the ``--skew`` text of a skew; the inverse of :func:`parse_skew`."""
    told = [] if skew.spread is None else [f"spread={skew.spread:g}"]
    told += [f"jitter={skew.jitter:g}"] if skew.jitter else []
    told += [f"seed={skew.seed}"] if skew.seed else []
    return ",".join([*told, *(f"start={rank}:{seconds * 1e3:g}" for rank, seconds in skew.starts.items())])


def parse_skew(text: str) -> Skew:
    """Parse the text of ``--skew``; raises ``InputError`` for invalid text."""
    values: dict[str, float] = {}
    starts: dict[int, float] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        try:
            if name == "start":
                rank, _, milliseconds = value.partition(":")
                if int(rank) in starts:
                    raise InputError(f"--skew {text}: start of rank {int(rank)} is given twice; leave one out")
                starts[int(rank)] = float(milliseconds) / 1e3
            elif name in values:
                raise InputError(f"--skew {text}: {name} is given twice; leave one out")
            else:
                values[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            raise InputError(f"--skew {entry}: expected spread=0.02, jitter=0.05, seed=1 or start=RANK:MS") from None
        if name not in ("start", "spread", "jitter", "seed") or not 0 <= values.get(name, 0) < math.inf:
            raise InputError(f"--skew {entry}: expected spread=0.02, jitter=0.05, seed=1 or start=RANK:MS, from 0 up")
    return Skew(starts, values.get("spread"), values.get("jitter", 0.0), int(values.get("seed", 0)))
