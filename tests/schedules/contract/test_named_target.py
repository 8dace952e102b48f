"""CPUs by name: of LLVM, of a machine file, of records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError, MachineError
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Host
from schedules.contract.cpu_target import CpuTarget, machine_target, parse_target, required_flags, target_with
from schedules.tuning import tuning_records as records
from schedules.tuning.tuning_records import recorded_cpus

pytest.importorskip("tvm")

XEON = load_machine("xeon-amx-2c")


@pytest.mark.parametrize(
    ("text", "lanes", "features"),
    [
        ("llvm -mcpu=znver4 -num-cores 8", 16, {"avx512f", "avx512_bf16", "avx512_vnni", "avx2", "fma"}),
        ("llvm -mcpu znver3 -num-cores=8", 8, {"avx2", "fma"}),
    ],
)
def test_a_name_of_llvm_says_vectors_and_features(text: str, lanes: int, features: set[str]):
    cpu = parse_target(text, None, XEON, [])
    assert (cpu.lanes, cpu.threads, set(cpu.features)) == (lanes, 8, features)
    assert cpu.mcpu == text.replace("=", " ").split()[2]
    # Caches are the machine file's.
    assert (cpu.l1_bytes, cpu.l2_bytes) == (48 * 1024, 2 * 1024 * 1024)
    assert {"bmi2", "avx2", "movbe"} <= set(required_flags(cpu.mcpu))
    assert ("avx512bw" in required_flags(cpu.mcpu)) == (lanes == 16)
    assert parse_target(text, 3, XEON, []).threads == 3


def test_records_of_the_same_cpu_say_its_caches():
    measured = target_with(frozenset(("avx2", "fma", "avx512f")), 8, 32768, 1048576, "znver4")
    others = [replace(measured, threads=4), replace(measured, mcpu="znver5")]
    assert parse_target("llvm -mcpu=znver4 -num-cores 8", None, XEON, [*others, measured]) is measured


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llvm -mcpu=znver99 -num-cores 8", "LLVM knows no such"),
        ("llvm -mcpu=znver4", "say for how many cores, such as -num-cores 8"),
        ("llvm -mcpu=znver4 -num-cores 0", "-num-cores 8"),
        ("llvm -num-cores 8", 'expected "llvm -mcpu=NAME'),
        ("cuda -mcpu=znver4", 'expected "llvm -mcpu=NAME'),
        ("llvm -mcpu=znver4 -mattr=+avx2", 'expected "llvm -mcpu=NAME'),
    ],
)
def test_what_is_no_target_is_one_line(text: str, words: str):
    with pytest.raises(InputError, match=words):
        parse_target(text, None, XEON, [])


def test_a_machine_file_is_a_target():
    cpu = machine_target(XEON, None)
    assert (cpu.mcpu, cpu.lanes, cpu.threads, cpu.l2_bytes) == ("sapphirerapids", 16, 2, 2 * 1024 * 1024)
    assert cpu.dot_products == ("bfloat16", "int8") and cpu.lacks("int8") is None
    narrow = replace(XEON, host=Host("x86_64", ("avx", "avx2", "f16c", "fma", "sse4_2"), 4))
    assert (machine_target(narrow, None).mcpu, machine_target(narrow, 3).threads) == ("haswell", 3)
    with pytest.raises(MachineError, match="aarch64"):
        machine_target(replace(XEON, host=replace(XEON.host, architecture="aarch64")), None)
    with pytest.raises(MachineError, match="no `host`"):
        machine_target(replace(XEON, host=None), None)


def test_the_key_of_a_record_says_its_cpu(tmp_path: Path, monkeypatch):
    cpus = [
        target_with(frozenset(("sse4_2", "avx2", "fma", "f16c", "bmi1", "bmi2", "avx512f")), 2, 32768, 1048576),
        target_with(frozenset(("avx2", "fma", "avx512f")), 8, 32768, 524288, "znver4"),
    ]
    assert [cpu.lanes for cpu in cpus] == [8, 16]  # Haswell's vectors, whatever else a flag says
    lines = {"one": cpus[0].key, "two": cpus[1].key, "again": cpus[0].key, "older": "of another form"}

    def parsed(line: str) -> tuple[None, dict[str, str]] | None:
        return None if line == "not ours" else (None, {"cpu": lines[line]})

    monkeypatch.setattr(records, "parse_line", parsed)
    (tmp_path / records.RECORDS).write_text("\n".join([*lines, "not ours"]))
    found: list[CpuTarget] = recorded_cpus(tmp_path)
    assert found == cpus
    assert recorded_cpus(tmp_path / "nothing") == []
