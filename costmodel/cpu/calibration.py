"""Calibration: measures the CPU this process runs on and describes it as a :class:`Machine`.

Rates and bandwidths are the best of many repetitions, since other tenants only slow a machine down and a ceiling is
wanted. Parallel regions are medians: a kernel pays the usual cost, not the luckiest. The other statistic (median or
best) is part of each number's origin. ``microbenchmarks.c`` is built and run with the system's C compiler; sizes of
caches are those that the operating system reports.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from costmodel.base.errors import InputError, MachineError, MissingDependencyError, Say
from costmodel.base.process import available_memory_bytes
from costmodel.base.units import format_quantity
from costmodel.machines.machine_file import host_identity, usable_threads
from costmodel.machines.machine_records import (
    USABLE_SHARE,
    ComputeRate,
    Host,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
    VectorUnit,
)

SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cache:
    """One cache level. ``shared``: by several cores (hardware threads of one core do not count)."""

    level: int
    capacity_bytes: int
    shared: bool
    origin: str

    @property
    def name(self) -> str:
        """The level's name, such as ``L2``."""
        return f"L{self.level}"


def find_caches(sysfs: Path = SYSFS) -> tuple[Cache, ...]:
    """Data and unified caches from the core outwards; empty if none are reported.

    With ``sysfs`` other than this machine's, only its files are read.
    """
    caches = _from_sysfs(sysfs)
    if sysfs != SYSFS:
        return tuple(sorted(caches, key=lambda cache: cache.level))
    if not caches:
        caches = _from_getconf()
    return tuple(sorted(caches, key=lambda cache: cache.level))


def parse_size(text: str) -> int:
    """Parse a sysfs size such as ``48K`` or ``2M`` into bytes; ``ValueError`` for anything else."""
    text = text.strip()
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * scale


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a sysfs list such as ``0-3,8`` into CPU numbers."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _from_sysfs(sysfs: Path) -> list[Cache]:
    cpu = min(os.sched_getaffinity(0)) if sysfs == SYSFS else 0
    root = sysfs / f"cpu{cpu}"
    caches = []
    for index in sorted((root / "cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() not in ("Data", "Unified"):
                continue
            level = int((index / "level").read_text())
            size = parse_size((index / "size").read_text())
            sharers = parse_cpu_list((index / "shared_cpu_list").read_text())
        except (OSError, ValueError):
            continue
        if size:
            # The last level belongs to the package even where this machine sees only one of its cores.
            shared = level >= 3 or not sharers <= _siblings(root, cpu)
            caches.append(Cache(level, size, shared, f"capacity from {root / 'cache' / index.name}"))
    return caches


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    try:
        return parse_cpu_list((root / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        return frozenset({cpu})


def _from_getconf() -> list[Cache]:
    names = {1: "LEVEL1_DCACHE_SIZE", 2: "LEVEL2_CACHE_SIZE", 3: "LEVEL3_CACHE_SIZE"}
    caches = []
    for level, name in names.items():
        size = _command_number(["getconf", name])
        if size:
            caches.append(Cache(level, size, level >= 3, f"capacity from getconf {name}"))
    return caches


def _command_number(command: list[str]) -> int:
    """Number printed by ``command``, or 0 on failure."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return int(result.stdout.strip()) if result.returncode == 0 else 0
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


SOURCE = Path(__file__).with_name("microbenchmarks.c")
# Without this flag the write benchmark may become a call of memset.
_FLAGS = ("-std=gnu11", "-O3", "-pthread", "-fno-tree-loop-distribute-patterns")
# Flags for the native CPU, as spelled by different compilers and architectures; the last one always works.
_NATIVE = (("-march=native",), ("-mcpu=native",), ())


@dataclass(frozen=True)
class KernelSample:
    """Best and median of the repetitions of one measurement, in SI units."""

    best: float
    median: float


@dataclass(frozen=True)
class Microkernel:
    """An arithmetic benchmark: the dtype it multiplies and the name of its instruction or loop."""

    dtype: str
    name: str


@dataclass(frozen=True)
class Microbenchmarks:
    """The compiled program. ``compiler``: command line that built it, part of each number's origin."""

    program: Path
    compiler: str
    vector_bits: int
    registers: int
    kernels: tuple[Microkernel, ...]

    def rate(self, kernel: str, threads: int, repetitions: int) -> KernelSample | None:
        """Operations/s of an arithmetic kernel; ``None`` if this CPU or its operating system does not support it."""
        return self._sample("rate", kernel, str(threads), str(repetitions))

    def bandwidth(self, mode: str, bytes_per_thread: int, threads: int, repetitions: int) -> KernelSample | None:
        """Bytes/s of all threads together; ``mode`` is ``read`` or ``write``."""
        return self._sample(mode, str(bytes_per_thread), str(threads), str(repetitions))

    def region(self, threads: int, repetitions: int) -> KernelSample | None:
        """Seconds of one empty parallel region."""
        return self._sample("region", str(threads), str(repetitions))

    def _sample(self, *arguments: str) -> KernelSample | None:
        try:
            best, median = self.printed(*arguments).split()
            return KernelSample(float(best), float(median))
        except (subprocess.TimeoutExpired, ValueError):
            return None

    def printed(self, *arguments: str) -> str:
        """Output of the program; empty on failure."""
        result = _run([str(self.program), *arguments], timeout=60)
        return result.stdout if result.returncode == 0 else ""


def compile_microbenchmarks(directory: Path) -> Microbenchmarks:
    """Compile into ``directory``; :class:`MissingDependencyError` without a working C compiler."""
    program, compiler = build_program(directory, _NATIVE)
    result = _run([str(program), "list"], timeout=20)
    return read_listing(program, compiler, result.stdout if result.returncode == 0 else "")


def build_program(directory: Path, machine_flags: Sequence[Sequence[str]]) -> tuple[Path, str]:
    """Path of the program built in ``directory`` and the command that built it, with the first of ``machine_flags``
    that the compiler accepts. :class:`MissingDependencyError` without a working C compiler.
    """
    compiler = find_compiler()
    program = directory / "microbenchmarks"
    reason = "no message"
    for native in machine_flags:
        command = [*compiler, *_FLAGS, "-o", str(program), str(SOURCE), *native]
        result = _run(command, timeout=120)
        if result.returncode == 0:
            return program, " ".join([_version(compiler), "-O3", *native])
        reason = (result.stderr.strip().splitlines() or [reason])[0]
    raise MissingDependencyError(
        f"the C compiler {compiler[0]!r} cannot build the microbenchmarks: {reason}; install another one, or set CC"
    )


def find_compiler() -> list[str]:
    """Command of the C compiler: ``$CC``, else cc, gcc or clang on the path."""
    if os.environ.get("CC", "").strip():
        command = shlex.split(os.environ["CC"])
        if shutil.which(command[0]):
            return command
        raise MissingDependencyError(f"the C compiler {command[0]!r} of $CC is not installed; install it or unset CC")
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise MissingDependencyError(
        "calibrate needs a C compiler and found none (cc, gcc, clang); install one, such as the package gcc, or set CC"
    )


def _version(compiler: list[str]) -> str:
    """First line of ``--version``, which identifies the compiler better than its command."""
    lines = _run([*compiler, "--version"], timeout=20).stdout.splitlines()
    return lines[0].strip() if lines else Path(compiler[0]).name


def read_listing(program: Path, compiler: str, listing: str) -> Microbenchmarks:
    """The compiled program described by its own output (``listing``); ``MachineError`` if that is incomplete."""
    lines = [line.split() for line in listing.splitlines()]
    if len(lines) < 3:
        raise MachineError("the compiled microbenchmarks do not run on this CPU; set CC to a compiler for it")
    numbers = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    kernels = tuple(Microkernel(words[1], words[2]) for words in lines if words[0] == "kernel")
    return Microbenchmarks(program, compiler, numbers["vector_bits"], numbers["registers"], kernels)


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except OSError as error:
        raise MissingDependencyError(f"{command[0]}: cannot be run ({error.strerror}); install it, or set CC") from None


@dataclass(frozen=True)
class CalibrationEffort:
    """Effort of a calibration: rounds of the whole sweep, repetitions (of about 3 ms or one pass, whichever is longer),
    and the largest buffer.
    """

    rounds: int = 2
    repetitions: int = 30
    memory_repetitions: int = 5
    largest_buffer_bytes: int = 2**30


QUICK = CalibrationEffort(rounds=1, repetitions=3, memory_repetitions=1, largest_buffer_bytes=2**26)


def calibrate(
    threads: int | None = None, effort: CalibrationEffort | None = None, progress: Say = lambda line: None
) -> Machine:
    """Measure this CPU on 1 to ``threads`` threads (default: the cores this process may use).

    ``progress`` receives one line per finished step. Raises :class:`InputError` for more threads than cores,
    :class:`MissingDependencyError` without a C compiler.
    """
    threads = usable_threads() if threads is None else threads
    if not 1 <= threads <= usable_threads():
        raise InputError(f"--threads {threads}: this process may use 1 to {usable_threads()} cores")
    with tempfile.TemporaryDirectory(prefix="costmodel-") as directory:
        progress("compiling the microbenchmarks")
        benchmarks = compile_microbenchmarks(Path(directory))
        return calibrate_with(benchmarks, threads, effort or CalibrationEffort(), progress, read_cpu_facts())


@dataclass(frozen=True)
class CpuFacts:
    """Properties of the measured CPU as reported by the operating system. ``memory_bytes``: available memory, ``None``
    if unknown.
    """

    name: str
    host: Host
    caches: Sequence[Cache]
    memory_bytes: int | None


def read_cpu_facts() -> CpuFacts:
    """Facts about the CPU that this process runs on."""
    return CpuFacts(_cpu_name(), host_identity(), find_caches(), available_memory_bytes())


def calibrate_with(
    benchmarks: Microbenchmarks, threads: int, effort: CalibrationEffort, progress: Say, facts: CpuFacts
) -> Machine:
    """Measure the CPU on which ``benchmarks`` run, this one or another, on 1 to ``threads`` threads."""
    return _Calibration(benchmarks, thread_counts(threads), effort, progress, facts).machine()


def thread_counts(threads: int) -> tuple[int, ...]:
    """Thread counts to measure: 1, 2, 4, ... and ``threads``; a machine interpolates between them."""
    powers = [2**exponent for exponent in range(threads.bit_length()) if 2**exponent <= threads]
    return tuple(sorted({*powers, threads}))


def buffer_bytes(cache: Cache, inner: Cache | None, threads: int) -> int:
    """Working set per thread that resides in ``cache``: its usable share, clearly larger than the next inner cache."""
    share = int(USABLE_SHARE * (cache.capacity_bytes / threads if cache.shared else cache.capacity_bytes))
    if inner is None:
        return _whole_lines(share)
    # A large shared cache is not swept whole: other tenants use it too, and kernels mostly use its near part.
    return _whole_lines(min(share, 8 * inner.capacity_bytes))


def dram_bytes(caches: Sequence[Cache], threads: int, available: int | None, largest: int) -> int:
    """Working set per thread that exceeds the caches: twice all caches together, at most a quarter of the memory."""
    cached = sum(cache.capacity_bytes * (1 if cache.shared else threads) for cache in caches)
    total = min(max(2 * cached, 2**28), largest, (available or 2**31) // 4)
    return _whole_lines(total // threads)


@dataclass(frozen=True)
class _Step:
    """One quantity to sweep over the thread counts. ``measure(threads)`` returns ``None`` if this CPU does not support
    it.
    """

    label: str
    unit: str
    measure: Callable[[int], KernelSample | None]


@dataclass(frozen=True)
class _Level:
    """A cache or the memory, with the working set per thread used to measure it."""

    name: str
    capacity: int
    shared: bool
    sizes: Mapping[int, int]
    repetitions: int
    note: str


ThreadSamples = dict[int, KernelSample]  # by thread count


class _Calibration:
    """One calibration run: the compiled benchmarks, thread counts, effort and progress callback."""

    def __init__(
        self,
        benchmarks: Microbenchmarks,
        counts: tuple[int, ...],
        effort: CalibrationEffort,
        progress: Say,
        facts: CpuFacts,
    ):
        self.benchmarks = benchmarks
        self.facts = facts
        self.counts = counts
        self.effort = effort
        self.progress = progress
        self.command = f"python -m costmodel calibrate{' --quick' if effort == QUICK else ''} --threads {counts[-1]}"
        self.when = f"{date.today().isoformat()}, {benchmarks.compiler}"

    def machine(self) -> Machine:
        caches = self.facts.caches
        if not caches:
            self.progress("the operating system reports no cache sizes: only DRAM is measured")
        levels = (*self.cache_levels(caches), self.dram_level(caches))
        results = self.measure(self.plan(levels))
        host = self.facts.host
        return Machine(
            name=f"host-{host.architecture}-{self.counts[-1]}t",
            kind="cpu",
            description=f"{self.facts.name}, {self.counts[-1]} threads, measured {self.when}",
            compute=self.compute(results),
            memory=tuple(self.memory_level(level, results) for level in levels if _read(level) in results),
            parallel_region=self.region(results["region"]),
            vector=self.vector(host.features),
            host=host,
        )

    def cache_levels(self, caches: Sequence[Cache]) -> list[_Level]:
        """Cache levels that can be isolated by a working set."""
        levels = []
        for inner, cache in zip([None, *caches], caches, strict=False):
            sizes = {threads: buffer_bytes(cache, inner, threads) for threads in self.counts}
            if inner is not None and min(sizes.values()) < 1.5 * inner.capacity_bytes:
                self.progress(f"{cache.name}: its share is too close to {inner.name} to be told apart, left out")
                continue
            repetitions = self.effort.repetitions
            levels.append(_Level(cache.name, cache.capacity_bytes, cache.shared, sizes, repetitions, cache.origin))
        return levels

    def dram_level(self, caches: Sequence[Cache]) -> _Level:
        available = self.facts.memory_bytes
        largest = self.effort.largest_buffer_bytes
        sizes = {threads: dram_bytes(caches, threads, available, largest) for threads in self.counts}
        outer = max((cache.capacity_bytes for cache in caches), default=0)
        small = f", not twice the outermost cache ({format_quantity(outer, 'B')}): includes hits"
        note = "capacity is the memory available" + ("" if sizes[1] >= 2 * outer else small)
        capacity = (available or sizes[1]) // 2**20 * 2**20
        return _Level("DRAM", capacity, True, sizes, self.effort.memory_repetitions, note)

    def plan(self, levels: Sequence[_Level]) -> dict[str, _Step]:
        steps = {
            kernel.name: _Step(f"{kernel.dtype} {kernel.name}", "FLOP/s", partial(self.rate, kernel.name))
            for kernel in self.benchmarks.kernels
        }
        for level in levels:
            for mode, key in (("read", _read(level)), ("write", _write(level))):
                steps[key] = _Step(f"{level.name} {mode}", "B/s", partial(self.bandwidth, mode, level))
        return {**steps, "region": _Step("parallel region", "s", self.region_sample)}

    def rate(self, kernel: str, threads: int) -> KernelSample | None:
        return self.benchmarks.rate(kernel, threads, self.effort.repetitions)

    def bandwidth(self, mode: str, level: _Level, threads: int) -> KernelSample | None:
        return self.benchmarks.bandwidth(mode, level.sizes[threads], threads, level.repetitions)

    def region_sample(self, threads: int) -> KernelSample | None:
        return self.benchmarks.region(threads, 5 * self.effort.repetitions)

    def measure(self, plan: Mapping[str, _Step]) -> dict[str, ThreadSamples]:
        """Samples of every step that this CPU supports. Each round runs all steps, so that a slow phase of the machine
        (clock, other tenants) does not affect the same quantity in every round.
        """
        results: dict[str, ThreadSamples] = {}
        missing: set[str] = set()
        for index in range(self.effort.rounds):
            self.progress(f"round {index + 1} of {self.effort.rounds}")
            for key, step in plan.items():
                if key in missing:
                    continue
                samples = self.sweep(step.measure)
                if samples is None:
                    missing.add(key)
                    results.pop(key, None)
                    self.progress(f"{step.label}: not available here")
                    continue
                results[key] = _merged(results.get(key), samples, smallest=step.unit == "s")
                self.progress(f"{step.label}: {_shown(results[key], step.unit)}")
        for key in ("fma_float32", "DRAM read", "region"):
            if key not in results:
                raise MachineError(
                    f"the microbenchmark {key!r} does not run on this machine; it cannot be calibrated; "
                    "write a machine file by hand"
                )
        return results

    def sweep(self, measure: Callable[[int], KernelSample | None]) -> ThreadSamples | None:
        """One sample per thread count, or ``None`` as soon as one of them fails."""
        samples: ThreadSamples = {}
        for threads in self.counts:
            sample = measure(threads)
            if sample is None:
                return None
            samples[threads] = sample
        return samples

    def compute(self, results: Mapping[str, ThreadSamples]) -> dict[str, ComputeRate]:
        """The fastest kernel of each dtype; slower ones are named in its origin."""
        kernels = [kernel for kernel in self.benchmarks.kernels if kernel.name in results]
        rates = {}
        for dtype in dict.fromkeys(kernel.dtype for kernel in kernels):
            names = [kernel.name for kernel in kernels if kernel.dtype == dtype]
            best, *slower = sorted(names, key=lambda name: results[name][self.counts[-1]].best, reverse=True)
            others = "".join(f"; {name} reaches {_shown(results[name], 'FLOP/s')}" for name in slower)
            origin = f"{self.origin(best, self.effort.repetitions)}; {_medians(results[best], 'FLOP/s')}{others}"
            rates[dtype] = ComputeRate(_best(results[best]), origin)
        return rates

    def memory_level(self, level: _Level, results: Mapping[str, ThreadSamples]) -> MemoryLevel:
        read, write = results[_read(level)], results.get(_write(level))
        what = f"{format_quantity(level.sizes[self.counts[-1]], 'B')} per thread"
        writes = "" if write is None else f"; write {_medians(write, 'B/s')}"
        return MemoryLevel(
            name=level.name,
            capacity_bytes=level.capacity,
            shared=level.shared,
            bandwidth=_best(read),
            write_bandwidth=None if write is None else _best(write),
            origin=f"{self.origin(what, level.repetitions)}; read {_medians(read, 'B/s')}{writes}; {level.note}",
        )

    def region(self, samples: ThreadSamples) -> ParallelRegion:
        medians = PerThreads(tuple((threads, sample.median) for threads, sample in samples.items()))
        best = _shown(samples, "s")
        return ParallelRegion(medians, f"{self.command}: median of empty regions of spinning threads; best {best}")

    def vector(self, features: tuple[str, ...]) -> VectorUnit | None:
        if self.benchmarks.registers == 0:
            return None
        origin = f"predefined macros of {self.benchmarks.compiler}; features from /proc/cpuinfo"
        return VectorUnit(self.benchmarks.vector_bits, self.benchmarks.registers, features, origin)

    def origin(self, what: str, repetitions: int) -> str:
        return f"{self.command}: {what}, best of {self.effort.rounds * repetitions}"


def _read(level: _Level) -> str:
    return f"{level.name} read"


def _write(level: _Level) -> str:
    return f"{level.name} write"


def _merged(before: ThreadSamples | None, now: ThreadSamples, smallest: bool) -> ThreadSamples:
    """The better result of two rounds, and the mean of their medians."""
    if before is None:
        return now
    better = min if smallest else max
    return {
        threads: KernelSample(better(before[threads].best, each.best), (before[threads].median + each.median) / 2)
        for threads, each in now.items()
    }


def _best(samples: dict[int, KernelSample]) -> PerThreads:
    return PerThreads(tuple((threads, sample.best) for threads, sample in samples.items()))


def _shown(samples: dict[int, KernelSample], unit: str) -> str:
    return ", ".join(f"{format_quantity(sample.best, unit)} on {threads}" for threads, sample in samples.items())


def _medians(samples: dict[int, KernelSample], unit: str) -> str:
    return "median " + ", ".join(
        f"{format_quantity(sample.median, unit)} on {threads}" for threads, sample in samples.items()
    )


def _whole_lines(size: int) -> int:
    return max(size // 4096 * 4096, 4096)


def _cpu_name() -> str:
    try:
        name = model_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        name = ""
    return name or platform.processor() or f"{platform.machine()} CPU ({os.name})"


def model_name(cpuinfo: str) -> str:
    """CPU model name in /proc/cpuinfo; empty if absent."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next((line.partition(":")[2].strip() for line in lines), "")
