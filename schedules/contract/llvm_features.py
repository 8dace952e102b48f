"""Flags of /proc/cpuinfo implied by LLVM's CPU names."""

from __future__ import annotations

from functools import lru_cache

from costmodel.base.errors import InputError

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
