"""Target CPUs of kernels: vector width, registers, caches, threads, and whether AMX may be used.

Of this machine they come from the CPU's feature flags, because the model name is wrong on virtual machines; other CPUs
are named by LLVM's name for them or by a machine file.

Linux saves the 8 KiB of AMX's tile registers only for processes that request it. Libraries with kernels that use tiles
request it when loaded (:data:`LIBRARY_REQUEST`), from Python, a server of TVM's RPC, or a C++ program.
:func:`tiles_refused` requests it for kernels that run where they are compiled, and tells whether it is granted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from costmodel.base.errors import InputError, MachineError
from costmodel.base.process import usable_cores
from costmodel.base.units import whole_number
from costmodel.machines.machine_records import Machine

# Linux on x86-64: system call, request code, and component of the thread state.
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
_WRITE = 1
_MESSAGE = "this library needs the tile registers of AMX, which the CPU or the operating system refuses"
_REASONS = {
    errno.EINVAL: "the CPU or the kernel (Linux 5.16 and later) does not know them",
    errno.EOPNOTSUPP: "the CPU or the kernel (Linux 5.16 and later) does not know them",
    errno.ENOSPC: "a thread has an alternate signal stack that is too small for them",
    errno.EPERM: "not permitted",
    errno.ENOSYS: "a sandbox refuses the system call",
}
_LIBRARY_SYMBOL = "fusion_request_tiles"


@lru_cache(maxsize=1)
def tiles_refused() -> str | None:
    """Request the tile registers for this process and its later forks; return the reason of a refusal, or None.

    Harmless on CPUs without tiles, where the request is refused.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return "the tile registers of AMX are asked for on Linux on x86-64 alone"
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if libc.syscall(*(ctypes.c_long(each) for each in arguments)) == 0:
        return None
    code = ctypes.get_errno()
    return f"the operating system refuses the tile registers of AMX: {_REASONS.get(code, os.strerror(code))}"


def _assembly() -> str:
    """Assembly of a function that requests the tiles when a library is loaded, once per library.

    On refusal it prints a message to standard error (the first tile instruction would end the process with SIGILL).
    """
    group = f"{_LIBRARY_SYMBOL},comdat"
    lines = (
        f".ifndef {_LIBRARY_SYMBOL}",
        f'.pushsection .text.{_LIBRARY_SYMBOL},"axG",@progbits,{group}',
        f".weak {_LIBRARY_SYMBOL}",
        f".hidden {_LIBRARY_SYMBOL}",
        f".type {_LIBRARY_SYMBOL},@function",
        f"{_LIBRARY_SYMBOL}:",
        f"movl ${_ARCH_PRCTL}, %eax",
        f"movl ${_REQUEST_PERMISSION}, %edi",
        f"movl ${_TILE_DATA}, %esi",
        "syscall",
        "testq %rax, %rax",
        "jz 1f",
        f"movl ${_WRITE}, %eax",
        "movl $2, %edi",
        "leaq 2f(%rip), %rsi",
        f"movl ${len(_MESSAGE) + 1}, %edx",
        "syscall",
        "1: ret",
        f'2: .ascii "{_MESSAGE}\\n"',
        ".popsection",
        f'.pushsection .init_array,"awG",@init_array,{group}',
        ".p2align 3",
        f".quad {_LIBRARY_SYMBOL}",
        ".popsection",
        ".endif",
    )
    return "\n".join(f'module asm "{_escaped(line)}"' for line in lines)


def _escaped(line: str) -> str:
    """Escape quotes and backslashes for LLVM IR."""
    return line.replace("\\", "\\5C").replace('"', "\\22")


# LLVM IR that a library with tile instructions needs, linked into the module of each of its kernels.
LIBRARY_REQUEST = _assembly()


# LLVM feature -> kernel flags, for features that code generation uses without request. Others (clzero, rdpru, shstk
# ...) are for instructions that our kernels do not contain.
_FLAGS: dict[str, tuple[str, ...]] = {
    "sse4.1": ("sse4_1",), "sse4.2": ("sse4_2",), "popcnt": ("popcnt",), "lzcnt": ("abm",), "movbe": ("movbe",),
    "adx": ("adx",), "bmi": ("bmi1",), "bmi2": ("bmi2",), "avx": ("avx",), "avx2": ("avx2",), "fma": ("fma",),
    "f16c": ("f16c",), "avxvnni": ("avx_vnni",), "gfni": ("gfni",), "avx512f": ("avx512f",),
    "avx512cd": ("avx512cd",), "avx512bw": ("avx512bw",), "avx512dq": ("avx512dq",), "avx512vl": ("avx512vl",),
    "avx512ifma": ("avx512ifma",), "avx512vbmi": ("avx512vbmi",), "avx512vbmi2": ("avx512_vbmi2",),
    "avx512bitalg": ("avx512_bitalg",), "avx512vpopcntdq": ("avx512_vpopcntdq",), "avx512vnni": ("avx512_vnni",),
    "avx512bf16": ("avx512_bf16",), "avx512fp16": ("avx512_fp16",), "amx-tile": ("amx_tile",),
    "amx-bf16": ("amx_bf16",), "amx-int8": ("amx_int8",),
}  # fmt: skip


@lru_cache(maxsize=16)
def flags_of_mcpu(mcpu: str) -> frozenset[str]:
    """Flags of /proc/cpuinfo that code for the x86-64 CPU ``mcpu`` may need; raises ``InputError`` for an unknown
    name.
    """
    import tvm
    from tvm.target import codegen

    generic = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    if mcpu not in {str(name) for name in codegen.llvm_get_cpu_archlist(generic)}:
        raise InputError(f"-mcpu={mcpu}: LLVM knows no such x86-64 CPU (`llc -march=x86-64 -mcpu=help` lists them)")
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    features = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    return frozenset(flag for feature in features for flag in _FLAGS.get(feature, ()))


# (LLVM CPU name, required flags of /proc/cpuinfo), best first.
_MICROARCHITECTURES = (
    (
        "sapphirerapids",
        ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile"),
    ),
    ("cooperlake", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")),
    ("cascadelake", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")),
    ("skylake-avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    ("haswell", ("avx2", "fma", "f16c", "bmi1", "bmi2")),
    ("nehalem", ("sse4_2",)),
)
BASELINE = "x86-64"
# Vector widths of CPU names narrower than single flags suggest, e.g. AVX-512F without AVX-512VL and its 32 registers.
_NARROW = {"haswell": 8, "nehalem": 4, BASELINE: 4}
_ARCHITECTURES = ("x86_64", "AMD64")
_KEYED_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")
# Narrower dtypes than float32 and the CPU feature required by their kernels.
_DOT_PRODUCTS = {"bfloat16": "avx512_bf16", "int8": "avx512_vnni"}
# Feature required by products in tile registers, in addition to the tiles.
_TILE_PRODUCTS = {"bfloat16": "amx_bf16", "int8": "amx_int8"}
TILE_FLAG = "amx_tile"


@dataclass(frozen=True)
class CpuTarget:
    """CPU description used by templates. ``lanes``: FP32 values per vector register."""

    lanes: int
    registers: int
    mcpu: str
    features: tuple[str, ...]
    threads: int
    l1_bytes: int
    l2_bytes: int

    @property
    def dot_products(self) -> tuple[str, ...]:
        """Dtypes narrower than float32 with a vector instruction for products accumulated in 32 bits.

        These have kernels, besides float32.
        """
        known = dict(_MICROARCHITECTURES).get(self.mcpu)
        return tuple(
            dtype
            for dtype, feature in _DOT_PRODUCTS.items()
            # LLVM generates no instruction that the CPU of this name lacks, whatever the flags say.
            if self.lanes == 16 and feature in self.features and (known is None or feature in known)
        )

    @property
    def tile_products(self) -> tuple[str, ...]:
        """Dtypes of :attr:`dot_products` that are also multiplied in tiles (AMX)."""
        known = dict(_MICROARCHITECTURES).get(self.mcpu)
        return tuple(
            dtype
            for dtype in self.dot_products
            if _TILE_PRODUCTS[dtype] in self.features and (known is None or TILE_FLAG in known)
        )

    def lacks(self, dtype: str) -> str | None:
        """Reason for the lack of kernels for ``dtype`` on this CPU, or None."""
        if dtype == "float32" or dtype in self.dot_products:
            return None
        if dtype not in _DOT_PRODUCTS:
            return f"there are kernels for float32 and {', '.join(_DOT_PRODUCTS)}, not for {dtype}"
        return f"{dtype} needs a CPU with {_DOT_PRODUCTS[dtype]}, which {self.mcpu} here does not have"

    @property
    def key(self) -> str:
        """Key of tuning records: microarchitecture, features, caches and threads."""
        return f"{self.mcpu}/{'+'.join(self.features)}/l1={self.l1_bytes}/l2={self.l2_bytes}/threads={self.threads}"

    def tvm_target(self):
        """``tvm.target.Target`` of this CPU."""
        import tvm

        return tvm.target.Target({"kind": "llvm", "mcpu": self.mcpu, "num-cores": self.threads})


def host_target(threads: int | None = None) -> CpuTarget:
    """CPU of this process; ``threads`` defaults to the usable cores.

    AMX is left out, with a warning, if the operating system refuses it. Raises ``MachineError`` on architectures other
    than x86-64.
    """
    architecture = platform.machine()
    if architecture not in _ARCHITECTURES:
        raise MachineError(f"kernels are generated for x86-64 CPUs, this is {architecture}: run on an x86-64 machine")
    l1_bytes, l2_bytes = _cache_bytes(1, 32 * 1024), _cache_bytes(2, 1024 * 1024)
    return target_with(_permitted(cpu_flags()), threads or usable_cores(), l1_bytes, l2_bytes)


def _permitted(flags: frozenset[str]) -> frozenset[str]:
    """``flags`` of this CPU without those that this process may not use."""
    if TILE_FLAG not in flags or (refused := tiles_refused()) is None:
        return flags
    warnings.warn(f"kernels are made without AMX: {refused}", stacklevel=3)
    return without_tiles(flags)


def without_tiles(flags: frozenset[str]) -> frozenset[str]:
    """``flags`` without those of AMX, so that the derived LLVM name has no AMX either."""
    return frozenset(flag for flag in flags if not flag.startswith("amx"))


def target_with(
    flags: Collection[str], threads: int, l1_bytes: int, l2_bytes: int, mcpu: str | None = None
) -> CpuTarget:
    """x86-64 CPU with these flags of /proc/cpuinfo; ``mcpu``: its LLVM name (default: derived from the flags)."""
    name = mcpu or next((name for name, needs in _MICROARCHITECTURES if all(flag in flags for flag in needs)), BASELINE)
    lanes = _NARROW.get(name, 16 if "avx512f" in flags else 8 if {"avx2", "fma"} <= set(flags) else 4)
    return CpuTarget(
        lanes=lanes,
        registers=32 if lanes == 16 else 16,
        mcpu=name,
        features=tuple(feature for feature in _KEYED_FEATURES if feature in flags),
        threads=threads,
        l1_bytes=l1_bytes,
        l2_bytes=l2_bytes,
    )


def required_flags(mcpu: str) -> tuple[str, ...]:
    """Flags of /proc/cpuinfo that code generated for ``mcpu`` requires; empty for the baseline."""
    known = dict(_MICROARCHITECTURES).get(mcpu)
    if known is not None or mcpu == BASELINE:
        return known or ()

    return tuple(sorted(flags_of_mcpu(mcpu)))


def cpu_flags() -> frozenset[str]:
    """Feature flags of this machine's CPU; empty if the kernel does not report them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    return flags_of(text)


def flags_of(cpuinfo: str) -> frozenset[str]:
    """Feature flags in the text of an x86 CPU's /proc/cpuinfo."""
    match = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def _cache_bytes(level: int, default: int) -> int:
    """Data-cache size of CPU 0 from sysfs, or ``default`` if the kernel does not report it."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            if kind in ("Data", "Unified") and int((index / "level").read_text()) == level:
                size = (index / "size").read_text().strip()
                return int(size.rstrip("KM")) * (1024 * 1024 if size.endswith("M") else 1024)
        except (OSError, ValueError):
            continue
    return default


# Default cache sizes without a machine file: the smallest of current x86-64 CPUs.
_L1_BYTES, _L2_BYTES = 32 * 1024, 512 * 1024


def parse_target(text: str, threads: int | None, machine: Machine, recorded: Sequence[CpuTarget]) -> CpuTarget:
    """Parse a target such as ``llvm -mcpu=znver4 -num-cores 8``; ``threads`` override ``-num-cores``.

    Caches are taken from a CPU with records (``recorded``) of the same name and threads, otherwise from ``machine``.
    Raises ``InputError`` for other options.
    """
    options = _options(text)
    mcpu = options["mcpu"]
    count = threads if threads is not None else _count(text, options.get("num-cores"))
    flags = flags_of_mcpu(mcpu)
    like = [cpu for cpu in recorded if cpu.mcpu == mcpu and cpu.threads == count]
    if len(like) == 1:
        return like[0]
    return target_with(flags, count, *_caches(machine), mcpu)


def machine_target(machine: Machine, threads: int | None) -> CpuTarget:
    """CPU described by a machine file; raises ``MachineError`` if its features are missing."""
    host = machine.host
    if host is None:
        raise MachineError(f"{machine.source}: has no `host`, so that kernels cannot be built for it; add its features")
    if host.architecture not in ("x86_64", "AMD64"):
        raise MachineError(
            f"{machine.source}: is {host.architecture}; kernels are generated for x86-64 CPUs; "
            "name a machine that has one"
        )
    return target_with(_with_unlisted(host.features), threads or host.threads, *_caches(machine))


def _with_unlisted(features: Collection[str]) -> frozenset[str]:
    """Add features that machine files do not list: bit manipulation, introduced with AVX2."""
    return frozenset(features) | (frozenset(("bmi1", "bmi2")) if "avx2" in features else frozenset())


def _caches(machine: Machine) -> tuple[int, int]:
    sizes = {level.name: int(level.capacity_bytes) for level in machine.memory}
    return sizes.get("L1", _L1_BYTES), sizes.get("L2", _L2_BYTES)


def _options(text: str) -> dict[str, str]:
    wanted = f'--target {text}: expected "llvm -mcpu=NAME -num-cores N" or the name of a machine file'
    try:
        words = shlex.split(text.replace("=", " "))
    except ValueError:  # unterminated quotation
        raise InputError(wanted) from None
    if len(words) % 2 == 0 or words[0] != "llvm":
        raise InputError(wanted)
    options = {name.lstrip("-"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    if "mcpu" not in options or options.keys() - {"mcpu", "num-cores"}:
        raise InputError(wanted)
    return options


def _count(text: str, value: str | None) -> int:
    cores = whole_number(value or "")
    if not cores:
        raise InputError(f"--target {text}: say for how many cores, such as -num-cores 8")
    return cores
