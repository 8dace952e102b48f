"""Measurement protocol: engines run alternately, each alone on the cores, in many rounds.

In each round each engine runs one block of back-to-back calls while the others sleep; the order reverses every round.
Machines drift and are shared, so times are compared within a round: the ratio to the baseline is the median over the
rounds of the ratio of block medians. The first calls of a block warm caches and threads and are not counted.
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

# Minimum number of rounds for meaningful results, whatever the time limit.
LEAST_ROUNDS = 5
FLUSH_LIMIT_BYTES = 512 * 2**20


class TimedEngine(Protocol):
    """Engine interface of the protocol, e.g. :class:`fusion.comparing.engines.engine_worker.Worker`."""

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        """Return durations in seconds of back-to-back calls: at least ``calls``, for at least ``seconds``."""


@dataclass(frozen=True)
class Sampling:
    """Amount of measurement."""

    rounds: int = 15
    # Minimum duration of one warm block.
    seconds: float = 0.15
    # Minimum number of calls of a block.
    calls: int = 5
    # Untimed calls before each block.
    warmup: int = 5
    # Calls per round with caches flushed before each; 0 disables them.
    cold_calls: int = 0


@dataclass(frozen=True)
class EngineTiming:
    """Latency of one engine in seconds."""

    # Median of the round medians; quartiles of the round medians follow.
    median: float
    # Shortest single call.
    minimum: float
    lower_quartile: float
    upper_quartile: float
    # Median over rounds of this engine's time divided by the baseline's in the same round; above 1 if slower.
    ratio: float
    calls: int
    # Median of each round.
    rounds: tuple[float, ...] = ()
    cold_median: float | None = None
    cold_ratio: float | None = None


@dataclass(frozen=True)
class MeasuredEngines:
    """Timings by engine, and reasons of failed engines."""

    timings: Mapping[str, EngineTiming]
    failures: Mapping[str, str]


def measure(
    engines: Mapping[str, TimedEngine],
    baseline: str,
    sampling: Sampling,
    progress: Say = lambda _: None,
    end: float = math.inf,
) -> MeasuredEngines:
    """Time the engines alternately. An engine that fails is left out of later rounds.

    After ``LEAST_ROUNDS``, no round starts that would end after ``end`` (``time.monotonic``). Raises ``EngineFailed``
    if the baseline fails.
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
    private levels are evicted, and the shared one in part.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        size = size_bytes or min(2 * last_level_cache_bytes(), FLUSH_LIMIT_BYTES)
        self._cpus = sorted(os.sched_getaffinity(0))
        self._shares = np.array_split(np.zeros(max(size // 8, len(self._cpus))), len(self._cpus))

    def __call__(self) -> None:
        with ThreadPoolExecutor(len(self._cpus)) as pool:
            list(pool.map(_overwrite, self._cpus, self._shares))


def last_level_cache_bytes(default: int = 64 * 2**20) -> int:
    """Size of the largest cache of CPU 0 as reported by the kernel."""
    sizes = [default]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
        except (OSError, ValueError):
            continue
    return max(sizes)


def _overwrite(cpu: int, share: np.ndarray) -> None:
    os.sched_setaffinity(0, {cpu})  # this thread only
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
