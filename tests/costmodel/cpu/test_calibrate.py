from __future__ import annotations

import os
import re
import stat
import subprocess

import pytest

from costmodel.base.errors import InputError, MachineError, MissingDependencyError
from costmodel.cpu.calibration import (
    QUICK,
    SOURCE,
    Cache,
    CalibrationEffort,
    KernelSample,
    Microbenchmarks,
    Microkernel,
    buffer_bytes,
    calibrate,
    calibrate_with,
    compile_microbenchmarks,
    dram_bytes,
    find_compiler,
    read_cpu_facts,
    thread_counts,
)
from costmodel.machines.machine_file import load_machine, write_machine

L1, L2, L3 = (
    Cache(level, size, shared, "test")
    for level, size, shared in ((1, 2**15, False), (2, 2**20, False), (3, 2**25, True))
)


def test_thread_counts_are_powers_of_two_and_the_last():
    assert [thread_counts(threads) for threads in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_buffers_fill_half_a_share_and_exceed_the_level_inside():
    assert buffer_bytes(L1, None, 2) == 2**14
    assert buffer_bytes(L2, L1, 2) == 8 * 2**15
    assert buffer_bytes(L3, L2, 2) == 8 * 2**20
    assert buffer_bytes(L3, L2, 4) == 2**25 // 4 // 2


def test_memory_buffers_exceed_all_caches_or_as_much_as_there_is():
    assert dram_bytes([L1, L2, L3], 1, 2**34, 2**30) == 2**28
    big = Cache(3, 2**28, True, "test")
    assert dram_bytes([big], 2, 2**34, 2**30) == 2**28
    assert dram_bytes([big], 1, 2**28, 2**30) == 2**26
    assert dram_bytes([], 1, None, 2**20) == 2**20


class Scripted(Microbenchmarks):
    """A fake of the compiled program: every figure scales with the threads; ``broken`` kernels do not run."""

    broken: tuple[str, ...] = ()

    def rate(self, kernel, threads, repetitions):
        rates = {"fma_float32": 100.0, "slow": 10.0, "fast": 400.0}
        return None if kernel in self.broken else KernelSample(threads * rates[kernel], threads * rates[kernel] / 2)

    def bandwidth(self, mode, bytes_per_thread, threads, repetitions):
        return KernelSample(threads * (20.0 if mode == "read" else 10.0), threads * 5.0)

    def region(self, threads, repetitions):
        return KernelSample(1e-6 * threads, 2e-6 * threads)


def scripted_machine(broken=(), lines=None):
    kernels = (Microkernel("float32", "fma_float32"), Microkernel("int8", "slow"), Microkernel("int8", "fast"))
    program = Scripted("nowhere", "cc 1.0 -O3", 256, 16, kernels)
    object.__setattr__(program, "broken", broken)
    return calibrate_with(
        program, 2, CalibrationEffort(), (lines if lines is not None else []).append, read_cpu_facts()
    )


def test_every_number_and_its_origin():
    lines = []
    machine = scripted_machine(lines=lines)
    assert machine.peak_flops("float32", 2) == 200
    assert machine.region_seconds(2) == 4e-6  # the median
    assert machine.memory[-1].name == "DRAM" and machine.memory[-1].bandwidth.at(2) == 40
    assert machine.memory[-1].write_bandwidth.at(1) == 10
    assert (machine.vector.bits, machine.vector.registers) == (256, 16)
    for origin in (machine.compute["float32"].origin, machine.memory[-1].origin, machine.parallel_region.origin):
        assert "python -m costmodel calibrate --threads 2" in origin and "median" in origin
    assert any("float32" in line and "200 FLOP/s on 2" in line for line in lines)


def test_the_fastest_instruction_of_a_dtype_counts_and_the_other_is_named():
    rate = scripted_machine().compute["int8"]
    assert rate.sustained.at(1) == 400
    assert "fast, best of" in rate.origin and "slow reaches 10 FLOP/s on 1" in rate.origin


def test_what_this_cpu_does_not_run_is_left_out():
    lines = []
    machine = scripted_machine(broken=("slow", "fast"), lines=lines)
    assert set(machine.compute) == {"float32"}
    assert any("fast: not available here" in line for line in lines)


def test_a_slow_spell_in_one_round_does_not_count():
    class Spell(Scripted):
        calls = 0

        def rate(self, kernel, threads, repetitions):
            Spell.calls += 1
            sample = super().rate(kernel, threads, repetitions)
            return KernelSample(sample.best / 10, sample.median / 10) if Spell.calls <= 6 else sample

    program = Spell("nowhere", "cc", 256, 16, (Microkernel("float32", "fma_float32"), Microkernel("int8", "slow")))
    machine = calibrate_with(program, 2, CalibrationEffort(rounds=3), lambda line: None, read_cpu_facts())
    assert machine.peak_flops("float32", 1) == 100
    assert "best of 90" in machine.compute["float32"].origin


def test_a_machine_without_float32_cannot_be_calibrated():
    with pytest.raises(MachineError, match="'fma_float32' does not run"):
        scripted_machine(broken=("fma_float32",))


@pytest.mark.parametrize("threads", [100000, 0, -1])
def test_more_threads_than_cores_are_refused_and_fewer_than_one(threads):
    with pytest.raises(InputError, match=f"--threads {threads}: this process may use 1 to"):
        calibrate(threads)


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="needs a C compiler and found none .* install one"):
        find_compiler()
    monkeypatch.setenv("CC", "nosuchcc -m64")
    with pytest.raises(MissingDependencyError, match="'nosuchcc' of \\$CC is not installed"):
        find_compiler()


def test_a_compiler_that_fails_is_named_with_its_reason(monkeypatch, tmp_path):
    broken = tmp_path / "brokencc"
    broken.write_text("#!/bin/sh\necho 'no header files' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(MissingDependencyError, match="brokencc.*no header files"):
        compile_microbenchmarks(tmp_path)


def test_a_measurement_that_dies_is_missing_not_fatal(tmp_path):
    benchmarks = compile_microbenchmarks(tmp_path)
    assert benchmarks.rate("nosuchkernel", 1, 1) is None
    assert benchmarks.bandwidth("read", 1, 1, 1) is None


@pytest.mark.parametrize("flags", ["-march=x86-64 -mno-avx", "-march=haswell"])
def test_the_source_compiles_for_cpus_without_wide_vectors(flags, tmp_path, monkeypatch):
    if os.uname().machine != "x86_64":
        pytest.skip("flags of x86")
    from costmodel.cpu import calibration

    monkeypatch.setattr(calibration, "_NATIVE", (tuple(flags.split()),))
    benchmarks = compile_microbenchmarks(tmp_path)
    assert benchmarks.registers == 16
    assert {kernel.dtype for kernel in benchmarks.kernels} == {"float32", "float64"}


@pytest.mark.parametrize(
    ("instruction", "flags"), [("vdpbf16ps", "-march=cooperlake"), ("vpdpbusd", "-march=cooperlake")]
)
def test_accumulators_of_dot_products_do_not_become_one(instruction, flags, tmp_path):
    """All begin with zero and add the same product: a compiler that knows it keeps a single chain of additions, whose
    latency would be reported as the rate (GCC 12 did).
    """
    if os.uname().machine != "x86_64":
        pytest.skip("instructions of x86")
    text = tmp_path / "microbenchmarks.s"
    command = [*find_compiler(), "-std=gnu11", "-O3", "-S", flags, "-o", str(text), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"this compiler does not know {flags}")
    accumulators = re.findall(rf"{instruction}\s+.*(%zmm\d+)$", text.read_text(), re.MULTILINE)
    assert len(set(accumulators)) >= 12, accumulators


def test_calibrating_this_machine_quickly(tmp_path):
    lines = []
    machine = calibrate(1, QUICK, lines.append)
    path = tmp_path / "host.yaml"
    write_machine(machine, path)
    again = load_machine(path)
    assert 1e9 < again.peak_flops("float32", 1) < 1e13
    assert again.memory[-1].name == "DRAM"
    rates = [level.bandwidth.at(1) for level in again.memory]
    assert rates[0] > rates[-1] > 1e8
    assert 0 < again.region_seconds(1) < 1e-5
    assert len(lines) >= 5
