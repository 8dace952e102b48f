"""Give an engine its best: time its modes against each other, keep the fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from fusion.comparing.engines.base import EngineCall

ROUNDS = 7
SECONDS_PER_BLOCK = 0.05
# A call that takes so many times as long as another in the first round is not tried again: slow modes of large models
# would take minutes.
HOPELESS = 4.0


def fastest(calls: Mapping[str, EngineCall]) -> str:
    """Name of the call with the least median, measured in alternating blocks of back-to-back calls."""
    if len(calls) == 1:
        return next(iter(calls))
    first = {name: _block(call) for name, call in calls.items()}
    least = min(first.values())
    samples = {name: [seconds] for name, seconds in first.items() if seconds <= HOPELESS * least}
    for _ in range(ROUNDS - 1 if len(samples) > 1 else 0):
        for name in samples:
            samples[name].append(_block(calls[name]))
    return min(samples, key=lambda name: statistics.median(samples[name]))


def _block(call: EngineCall) -> float:
    """Median seconds of one block; its first call only warms up."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS_PER_BLOCK
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
