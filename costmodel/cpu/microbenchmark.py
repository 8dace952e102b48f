"""Build and run ``microbenchmarks.c`` with the system's C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import MachineError, MissingDependencyError

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
    return described(program, compiler, result.stdout if result.returncode == 0 else "")


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


def described(program: Path, compiler: str, listing: str) -> Microbenchmarks:
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
