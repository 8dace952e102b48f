"""Target CPU of kernels: vector width, registers, caches, threads.

Derived from the CPU's feature flags, because the reported model name is wrong on virtual machines.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.cores import usable_cores
from costmodel.base.errors import MachineError
from schedules.contract.tile_permission import tiles_refused

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
    from schedules.contract.llvm_features import flags_of_mcpu

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
