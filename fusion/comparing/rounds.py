"""The measurement protocol: every engine alone on the cores, in turns, many times over.

Round by round each engine runs one block of back-to-back calls while the others sleep; the order reverses every round.
Machines drift and have neighbours, so times are compared within a round: the ratio to the baseline is the median over
the rounds of the ratio of block medians. The first calls of a block warm caches and threads and are not counted.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from costmodel.base.say import Say
from fusion.comparing.engines.engine_worker import EngineFailed

# Fewer say too little, however little time there is.
LEAST_ROUNDS = 5
FLUSH_LIMIT_BYTES = 512 * 2**20


class TimedEngine(Protocol):
    """What the protocol needs of an engine; :class:`fusion.comparing.engines.engine_worker.Worker` is one."""

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        """Durations in seconds of back-to-back calls: at least ``calls``, for at least ``seconds``."""


@dataclass(frozen=True)
class Sampling:
    """How much to measure. ``seconds``: length of one warm block, of at least ``calls`` calls after ``warmup``
    untimed ones. ``cold_calls``: calls per round with caches flushed before each; 0 leaves that column out.
    """

    rounds: int = 15
    seconds: float = 0.15
    calls: int = 5
    warmup: int = 5
    cold_calls: int = 0


@dataclass(frozen=True)
class EngineTiming:
    """One engine's latency in seconds: median of all round medians, quartiles of those, least single call.

    ``ratio``: median over rounds of (this engine / baseline) within the round, above 1 where it is slower. ``rounds``:
    the median of each.
    """

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    ratio: float
    calls: int
    rounds: tuple[float, ...] = ()
    cold_median: float | None = None
    cold_ratio: float | None = None


@dataclass(frozen=True)
class MeasuredEngines:
    """Timings by engine, and why others have none."""

    timings: Mapping[str, EngineTiming]
    failures: Mapping[str, str]


def measure(
    engines: Mapping[str, TimedEngine],
    baseline: str,
    sampling: Sampling,
    progress: Say = lambda _: None,
    end: float = math.inf,
) -> MeasuredEngines:
    """Time the engines in turns. An engine that fails is left out of later rounds; the baseline's failure is raised.

    After ``LEAST_ROUNDS`` no round begins that would end behind ``end``, on the clock of ``time.monotonic``. Raises
    ``EngineFailed`` for the baseline.
    """
    started = time.monotonic()
    warm: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    cold: dict[str, list[float]] = {name: [] for name in engines}
    failures: dict[str, str] = {}
    flush = CacheFlush() if sampling.cold_calls else None
    for index in range(sampling.rounds):
        now = time.monotonic()
        if index >= LEAST_ROUNDS and now + (now - started) / index > end:
            break
        progress(f"round {index + 1}/{sampling.rounds}")
        names = [name for name in engines if name not in failures]
        for name in names if index % 2 == 0 else reversed(names):
            try:
                warm[name].append(engines[name].block(sampling.warmup, sampling.calls, sampling.seconds))
                if flush is not None:
                    cold[name].append(_cold_block(engines[name], flush, sampling.cold_calls))
            except EngineFailed as error:
                if name == baseline:
                    raise
                failures[name] = str(error)
    return MeasuredEngines(
        {name: _timing(name, baseline, warm, cold) for name in engines if name not in failures},
        failures,
    )


class CacheFlush:
    """Evicts all data caches: every core overwrites its share of a buffer twice the size of the last level.

    The buffer is limited to 512 MiB; on machines with a larger cache (shared ones report the whole socket's) the
    private levels are evicted, and as much of the shared one as that displaces.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        size = size_bytes or min(2 * last_level_cache_bytes(), FLUSH_LIMIT_BYTES)
        self._cpus = sorted(os.sched_getaffinity(0))
        self._shares = np.array_split(np.zeros(max(size // 8, len(self._cpus))), len(self._cpus))

    def __call__(self) -> None:
        with ThreadPoolExecutor(len(self._cpus)) as pool:
            list(pool.map(_overwrite, self._cpus, self._shares))


def last_level_cache_bytes(default: int = 64 * 2**20) -> int:
    """Size of the largest cache of CPU 0 according to the kernel."""
    sizes = [default]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
        except (OSError, ValueError):
            continue
    return max(sizes)


def _overwrite(cpu: int, share: np.ndarray) -> None:
    os.sched_setaffinity(0, {cpu})  # of this thread alone
    share += 1.0


def _cold_block(engine: TimedEngine, flush: CacheFlush, calls: int) -> float:
    durations = []
    for _ in range(calls):
        flush()
        durations.append(float(engine.block(0, 1, 0.0)[0]))
    return float(np.median(durations))


def _timing(
    name: str, baseline: str, warm: Mapping[str, list[np.ndarray]], cold: Mapping[str, list[float]]
) -> EngineTiming:
    medians = np.array([np.median(block) for block in warm[name]])
    reference = np.array([np.median(block) for block in warm[baseline]])
    return EngineTiming(
        median=float(np.median(medians)),
        minimum=float(min(block.min() for block in warm[name])),
        lower_quartile=float(np.quantile(medians, 0.25)),
        upper_quartile=float(np.quantile(medians, 0.75)),
        ratio=float(np.median(medians / reference)),
        calls=sum(len(block) for block in warm[name]),
        rounds=tuple(medians.tolist()),
        cold_median=float(np.median(cold[name])) if cold[name] else None,
        cold_ratio=float(np.median(np.array(cold[name]) / np.array(cold[baseline]))) if cold[name] else None,
    )
