"""CPUs unlike this one, by the flags that their kernel reports."""

from __future__ import annotations

import pytest

from costmodel.base.errors import MachineError
from schedules.contract import cpu_target as target
from schedules.contract.cpu_target import host_target

AVX2 = {"sse4_2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("flags", "mcpu", "lanes", "registers"),
    [
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "cooperlake", 16, 32),
        (AVX512, "skylake-avx512", 16, 32),
        (AVX2 | {"avx512f"}, "haswell", 8, 16),  # without 32 registers for shorter vectors
        (AVX2, "haswell", 8, 16),
        ({"sse4_2", "avx"}, "nehalem", 4, 16),
        (set(), "x86-64", 4, 16),
    ],
)
def test_vectors_follow_from_the_flags(monkeypatch, flags, mcpu, lanes, registers):
    monkeypatch.setattr(target, "cpu_flags", lambda: frozenset(flags))
    cpu = host_target(3)
    assert (cpu.mcpu, cpu.lanes, cpu.registers, cpu.threads) == (mcpu, lanes, registers, 3)
    assert set(target.required_flags(mcpu)) <= flags


def test_another_architecture_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(MachineError, match="x86-64 CPUs, this is aarch64"):
        host_target()
