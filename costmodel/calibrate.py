"""Measures the CPU this process runs on and describes it as a :class:`Machine`.

Rates and bandwidths are the best of many repetitions: other tenants of the machine only ever slow one down, and a
ceiling is asked for. Parallel regions are medians: a kernel pays the usual cost, not the luckiest. Medians (or the
best) stand beside them in each number's origin.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from costmodel.caches import Cache, find_caches, memory_bytes
from costmodel.errors import InputError, MachineError
from costmodel.machine_catalog import host_identity, usable_threads
from costmodel.machine_records import (
    USABLE_SHARE,
    ComputeRate,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
    VectorUnit,
)
from costmodel.microbenchmark import Microbenchmarks, Sample, compile_microbenchmarks
from costmodel.units import format_quantity

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """Repetitions (of about 3 ms or one pass, whichever is longer) and the largest buffer of a measurement."""

    repetitions: int = 40
    memory_repetitions: int = 8
    largest_buffer_bytes: int = 2**30


QUICK = Effort(repetitions=3, memory_repetitions=1, largest_buffer_bytes=2**26)


def calibrate(
    threads: int | None = None, effort: Effort | None = None, progress: Progress = lambda line: None
) -> Machine:
    """Measures this CPU on 1 to ``threads`` threads (default: the cores this process may use).

    ``progress`` receives one line per finished step. Raises :class:`InputError` for more threads than cores,
    :class:`MissingDependencyError` without a C compiler.
    """
    threads = threads or usable_threads()
    if not 1 <= threads <= usable_threads():
        raise InputError(f"--threads {threads}: this process may use 1 to {usable_threads()} cores")
    with tempfile.TemporaryDirectory(prefix="costmodel-") as directory:
        progress("compiling the microbenchmarks")
        benchmarks = compile_microbenchmarks(Path(directory))
        return _Calibration(benchmarks, thread_counts(threads), effort or Effort(), progress).machine()


def thread_counts(threads: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``threads``; between them a machine interpolates."""
    powers = [2**exponent for exponent in range(threads.bit_length()) if 2**exponent <= threads]
    return tuple(sorted({*powers, threads}))


def buffer_bytes(cache: Cache, inner: Cache | None, threads: int) -> int:
    """Working set per thread that lives in ``cache``: its usable share, and clearly beyond the cache inside it."""
    share = int(USABLE_SHARE * (cache.capacity_bytes / threads if cache.shared else cache.capacity_bytes))
    if inner is None:
        return _whole_lines(share)
    # A large shared cache is not swept whole: other tenants use it too, and its near part is what kernels meet.
    return _whole_lines(min(share, 8 * inner.capacity_bytes))


def dram_bytes(caches: Sequence[Cache], threads: int, available: int | None, largest: int) -> int:
    """Working set per thread for the memory itself: twice all caches together, at most a quarter of the memory."""
    cached = sum(cache.capacity_bytes * (1 if cache.shared else threads) for cache in caches)
    total = min(max(2 * cached, 2**28), largest, (available or 2**31) // 4)
    return _whole_lines(total // threads)


class _Calibration:
    """One run: the compiled program, what to sweep, where to report."""

    def __init__(self, benchmarks: Microbenchmarks, counts: tuple[int, ...], effort: Effort, progress: Progress):
        self.benchmarks = benchmarks
        self.counts = counts
        self.effort = effort
        self.progress = progress
        self.command = f"python -m costmodel calibrate --threads {counts[-1]}"
        self.when = f"{date.today().isoformat()}, {benchmarks.compiler}"

    def machine(self) -> Machine:
        caches = find_caches()
        if not caches:
            self.progress("the operating system reports no cache sizes: only DRAM is measured")
        compute = self.compute()
        memory = (*self.cache_levels(caches), self.dram(caches))
        region = self.region()
        host = host_identity()
        return Machine(
            name=f"host-{host.architecture}-{self.counts[-1]}t",
            kind="cpu",
            description=f"{_cpu_name()}, {self.counts[-1]} threads, measured {self.when}",
            compute=compute,
            memory=memory,
            parallel_region=region,
            vector=self.vector(host.features),
            host=host,
        )

    def compute(self) -> dict[str, ComputeRate]:
        """The fastest kernel of each dtype; slower ones are named in its origin."""
        found: dict[str, list[tuple[str, dict[int, Sample]]]] = {}
        for kernel in self.benchmarks.kernels:
            samples = self.sweep(partial(self.rate, kernel.name))
            if samples is None:
                self.progress(f"{kernel.dtype:9} {kernel.name}: not available here")
                continue
            self.progress(f"{kernel.dtype:9} {kernel.name}: {_shown(samples, 'FLOP/s')}")
            found.setdefault(kernel.dtype, []).append((kernel.name, samples))
        if "float32" not in found:
            raise MachineError("the float32 microbenchmark does not run on this machine; nothing can be calibrated")
        return {dtype: self.fastest(kernels) for dtype, kernels in found.items()}

    def rate(self, kernel: str, threads: int) -> Sample | None:
        return self.benchmarks.rate(kernel, threads, self.effort.repetitions)

    def fastest(self, kernels: list[tuple[str, dict[int, Sample]]]) -> ComputeRate:
        ranked = sorted(kernels, key=lambda item: item[1][self.counts[-1]].best, reverse=True)
        name, samples = ranked[0]
        others = "".join(f"; {other} reaches {_shown(slower, 'FLOP/s')}" for other, slower in ranked[1:])
        return ComputeRate(_best(samples), f"{self.origin(name)}; {_medians(samples, 'FLOP/s')}{others}")

    def cache_levels(self, caches: Sequence[Cache]) -> list[MemoryLevel]:
        levels = []
        for inner, cache in zip([None, *caches], caches, strict=False):
            sizes = {threads: buffer_bytes(cache, inner, threads) for threads in self.counts}
            if inner is not None and min(sizes.values()) < 1.5 * inner.capacity_bytes:
                self.progress(f"{cache.name}: its share is too close to {inner.name} to be told apart, left out")
                continue
            level = self.level(cache.name, cache.capacity_bytes, cache.shared, sizes, cache.origin)
            levels += [level] if level else []
        return levels

    def dram(self, caches: Sequence[Cache]) -> MemoryLevel:
        available = memory_bytes()
        largest = self.effort.largest_buffer_bytes
        sizes = {threads: dram_bytes(caches, threads, available, largest) for threads in self.counts}
        outer = max((cache.capacity_bytes for cache in caches), default=0)
        total = sizes[1]
        small = f", not twice the outermost cache ({format_quantity(outer, 'B')}): includes hits"
        note = "" if total >= 2 * outer else small
        level = self.level(
            "DRAM", (available or total) // 2**20 * 2**20, True, sizes, f"capacity is the memory available{note}"
        )
        if level is None:
            raise MachineError("the memory microbenchmark does not run on this machine; nothing can be calibrated")
        return level

    def level(self, name: str, capacity: int, shared: bool, sizes: dict[int, int], note: str) -> MemoryLevel | None:
        repetitions = self.effort.memory_repetitions if name == "DRAM" else self.effort.repetitions

        def bandwidth(mode: str, threads: int) -> Sample | None:
            return self.benchmarks.bandwidth(mode, sizes[threads], threads, repetitions)

        read, write = self.sweep(partial(bandwidth, "read")), self.sweep(partial(bandwidth, "write"))
        if read is None:
            return None
        self.progress(f"{name:9} read: {_shown(read, 'B/s')}")
        writes = "" if write is None else f"; write {_medians(write, 'B/s')}"
        if write is not None:
            self.progress(f"{name:9} write: {_shown(write, 'B/s')}")
        working_set = format_quantity(sizes[self.counts[-1]], "B")
        return MemoryLevel(
            name=name,
            capacity_bytes=capacity,
            shared=shared,
            bandwidth=_best(read),
            write_bandwidth=None if write is None else _best(write),
            origin=f"{self.origin(f'{working_set} per thread', repetitions)}; "
            f"read {_medians(read, 'B/s')}{writes}; {note}",
        )

    def region(self) -> ParallelRegion:
        samples = self.sweep(lambda threads: self.benchmarks.region(threads, 5 * self.effort.repetitions))
        if samples is None:
            raise MachineError("the parallel-region microbenchmark does not run on this machine")
        medians = PerThreads(tuple((threads, sample.median) for threads, sample in samples.items()))
        best = ", ".join(f"{format_quantity(sample.best, 's')} on {threads}" for threads, sample in samples.items())
        self.progress(
            "parallel  region: "
            + ", ".join(f"{format_quantity(sample.median, 's')} on {threads}" for threads, sample in samples.items())
        )
        return ParallelRegion(medians, f"{self.command}: median of empty regions of spinning threads; best {best}")

    def vector(self, features: tuple[str, ...]) -> VectorUnit | None:
        if self.benchmarks.registers == 0:
            return None
        origin = f"predefined macros of {self.benchmarks.compiler}; features from /proc/cpuinfo"
        return VectorUnit(self.benchmarks.vector_bits, self.benchmarks.registers, features, origin)

    def sweep(self, measure: Callable[[int], Sample | None]) -> dict[int, Sample] | None:
        """One sample per thread count, or ``None`` as soon as one of them fails."""
        samples: dict[int, Sample] = {}
        for threads in self.counts:
            sample = measure(threads)
            if sample is None:
                return None
            samples[threads] = sample
        return samples

    def origin(self, what: str, repetitions: int | None = None) -> str:
        return f"{self.command}: {what}, best of {repetitions or self.effort.repetitions}"


def _best(samples: dict[int, Sample]) -> PerThreads:
    return PerThreads(tuple((threads, sample.best) for threads, sample in samples.items()))


def _shown(samples: dict[int, Sample], unit: str) -> str:
    return ", ".join(f"{format_quantity(sample.best, unit)} on {threads}" for threads, sample in samples.items())


def _medians(samples: dict[int, Sample], unit: str) -> str:
    return "median " + ", ".join(
        f"{format_quantity(sample.median, unit)} on {threads}" for threads, sample in samples.items()
    )


def _whole_lines(size: int) -> int:
    return max(size // 4096 * 4096, 4096)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or f"{platform.machine()} CPU ({os.name})"
