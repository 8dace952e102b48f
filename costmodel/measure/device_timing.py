"""Timing of a call: CUDA events over launches queued behind a spinning kernel, or wall-clock on a CPU.

The spinning kernel keeps the GPU busy while the host queues the launches, so that the two events enclose kernels back
to back: without it, kernels shorter than a launch would be measured at the host's pace.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TORCH = True
_SPIN_HERTZ = 2e9  # upper bound of cycles per second: too long a spin costs little, too short a one spoils the row
_MOST_LAUNCHES = 100  # a full launch queue (about 1,000 entries) would block the host; a call may launch several


@dataclass(frozen=True)
class TimingEffort:
    """Effort of a timing: ``repeats`` samples, each of calls for ``sample_seconds``, but at most ``call_seconds`` in
    all.
    """

    repeats: int = 7
    sample_seconds: float = 1e-3
    call_seconds: float = 0.15


@dataclass(frozen=True)
class KernelTiming:
    """Seconds of one call: ``median`` and ``minimum`` over ``repeats`` samples of ``calls`` each."""

    median: float
    minimum: float
    repeats: int
    calls: int


@dataclass(frozen=True)
class Profile:
    """Profile of one call: ``kernel_seconds`` on the device and ``launches`` of kernels, copies and memsets; 0 on a
    CPU.
    """

    kernel_seconds: float
    launches: int


def synchronize(device: Any) -> None:
    """Wait for all work of ``device``."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(call: Callable[[], Any], device: Any, effort: TimingEffort) -> KernelTiming:
    """Time ``call`` after two warm-up calls; the second determines the number of calls per sample."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(min(effort.repeats, int(effort.call_seconds / once)), 3)
    calls = max(min(int(effort.sample_seconds / once), _MOST_LAUNCHES), 1)
    sample = _event_sample if device.type == "cuda" else _clock_sample
    samples = [sample(call, calls, host) / calls for _ in range(repeats)]
    return KernelTiming(statistics.median(samples), min(samples), repeats, calls)


def _clock_sample(call: Callable[[], Any], calls: int, host: float) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _event_sample(call: Callable[[], Any], calls: int, host: float) -> float:
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int((1.5 * host * calls + 2e-5) * _SPIN_HERTZ))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def profile_call(call: Callable[[], Any], device: Any, calls: int = 3) -> Profile:
    """Device time and launches of ``call`` by the torch profiler. A profiler session takes tens of milliseconds; on a
    CPU, where it gives no device times, it is skipped.
    """
    if device.type != "cuda":
        return Profile(0.0, 0)
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        synchronize(device)
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    seconds = sum(event.time_range.elapsed_us() for event in on_device) * 1e-6
    return Profile(seconds / calls, round(len(on_device) / calls))
