"""Records of a CPU in one small file: collected from build folders, found by the CPU they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.layers import Conv2d
from lab.records import collect_builds as collect
from lab.records import merged, thinned
from schedules.contract.cpu_target import CpuTarget
from schedules.tuning.shipped_records import (
    RECORDS_FILE,
    CpuRecords,
    KernelRecords,
    chip_name,
    find_records,
    identity_of,
    read_records,
    write_records,
)
from schedules.tuning.tuning_records import RECORDS, Record, RecordStore, environment

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
CONV = Conv2d(1, 32, 14, 14, 64, (1, 1))
OTHER = Conv2d(1, 32, 7, 7, 64, (1, 1))


def built(folder: Path, times: dict, model: str = "net.onnx", cpu: CpuTarget = CPU, confirmed=()) -> Path:
    """A build folder with these times of CONV by the knob ``x``."""
    with RecordStore(folder / "records", cpu) as store:
        for x, seconds in times.items():
            store.add(CONV, {"x": x}, seconds)
        if confirmed:
            store.confirm(CONV, [({"x": x}, seconds) for x, seconds in confirmed])
    (folder / "summary.json").write_text(json.dumps({"model": f"/somewhere/{model}"}))
    return folder


def times_of(kernel: KernelRecords) -> dict[int, float]:
    return {record.config["x"]: pytest.approx(record.seconds) for record in kernel.records}


def shipped(directory: Path, cpu=None, **changes) -> Path:
    identity = cpu or identity_of(CPU)
    record = Record(CONV, {"x": 1}, 2e-6)
    own = environment(CPU)
    content = CpuRecords(identity, own["tvm"], own["templates"], "", (KernelRecords(CONV, 2, ("a",), "", (record,)),))
    write_records(directory / RECORDS_FILE, replace(content, **changes))
    return directory


def test_collected_records_hold_losers_networks_and_winners(tmp_path):
    one = built(tmp_path / "one", {1: 5e-6, 2: 9e-6, 3: 4e-6}, "first.onnx", confirmed=[(1, 4.5e-6), (3, 4.6e-6)])
    two = built(tmp_path / "two", {1: 3e-6, 4: 8e-6}, "second.onnx")
    (kernel,) = collect([one, two], CPU).content.kernels
    assert times_of(kernel) == {1: 4.5e-6, 2: 9e-6, 3: 4.6e-6, 4: 8e-6}
    assert kernel.networks == ("first", "second") and kernel.threads == 2
    assert kernel.best.config == {"x": 1}  # it won the comparison; 3e-6 was a single measurement
    assert kernel.near_best(1.05, 3) == [{"x": 1}, {"x": 3}]


def test_what_was_measured_under_other_conditions_is_left_out_and_counted(tmp_path):
    ours = built(tmp_path / "ours", {1: 5e-6})
    built(tmp_path / "ours", {2: 5e-6}, cpu=replace(CPU, l2_bytes=1 << 21))
    older = built(tmp_path / "older", {3: 5e-6}) / "records" / RECORDS
    own = environment(CPU)["templates"]
    older.write_text(older.read_text().replace(f'\\"templates\\": \\"{own}\\"', '\\"templates\\": \\"0\\"'))
    found = collect([ours, tmp_path / "older"], CPU)
    assert times_of(found.content.kernels[0]) == {1: 5e-6}
    assert found.left_out == {"of another CPU": 1, f"of revision 0 of the templates, not {own}": 1}


def test_kernels_of_narrow_dtypes_have_a_revision_of_their_own(tmp_path, monkeypatch):
    """Where only those are made otherwise, times of float32 still hold."""
    narrow = replace(CONV, dtype="bfloat16")
    with RecordStore(tmp_path / "one" / "records", CPU) as store:
        store.add(CONV, {"x": 1}, 5e-6)
        store.add(narrow, {"x": 2}, 3e-6)
    content = collect([tmp_path / "one"], CPU).content
    write_records(tmp_path / "file", content)
    assert {kernel.operator for kernel in read_records(tmp_path / "file").kernels} == {CONV, narrow}
    monkeypatch.setattr("schedules.contract.template.NARROW_REVISION", 99)
    assert [kernel.operator for kernel in read_records(tmp_path / "file").kernels] == [CONV]
    assert RecordStore(tmp_path / "one" / "records", CPU).operators() == [CONV]
    found = collect([tmp_path / "one"], CPU)
    assert [kernel.operator for kernel in found.content.kernels] == [CONV]
    ((reason, count),) = found.left_out.items()
    assert reason.startswith("of revision ") and count == 1


def test_any_number_of_threads_of_the_cpu_is_taken(tmp_path):
    folder = built(tmp_path / "one", {1: 5e-6})
    built(folder, {1: 9e-6}, cpu=replace(CPU, threads=1))
    content = collect([folder], CPU).content
    assert {kernel.threads: kernel.best.seconds for kernel in content.kernels} == {1: 9e-6, 2: 5e-6}
    assert set(content.of(2)) == {CONV} and content.of(2)[CONV].threads == 2


def test_a_network_can_be_left_out(tmp_path):
    folders = [built(tmp_path / name, {1: 5e-6}, f"{name}.onnx") for name in ("a", "b")]
    assert collect(folders, CPU, keep=lambda network: network != "b").content.networks == ("a",)
    with pytest.raises(InputError, match="no records of this CPU"):
        collect(folders, CPU, keep=lambda network: False)
    with pytest.raises(InputError, match="holds no tuning records"):
        collect([tmp_path], CPU)


def test_the_file_gives_back_what_was_written_and_is_the_same_again(tmp_path):
    folder = built(tmp_path / "one", {1: 5e-6, 2: 1.2345e-3}, confirmed=[(1, 5.1e-6)])
    content = collect([folder], CPU, "quiet").content
    write_records(tmp_path / "a", content)
    again = read_records(tmp_path / "a")
    assert again.cpu == content.cpu and (again.note, again.networks) == ("quiet", ("net",))
    (kernel,) = again.kernels
    assert kernel.operator == CONV and times_of(kernel) == {1: 5.1e-6, 2: 1.2345e-3}
    assert [record.confirmed for record in kernel.records] == [True, False]
    write_records(tmp_path / "b", read_records(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_records_are_found_by_the_code_that_runs_on_the_cpu(tmp_path, monkeypatch):
    here = replace(identity_of(CPU), chip="Us 1/2/3")
    monkeypatch.setattr("schedules.tuning.shipped_records.identity_of", lambda cpu: here)
    assert find_records(CPU, tmp_path) is None
    shipped(tmp_path / "wider", replace(here, l1_bytes=49152))
    shipped(tmp_path / "older", here, templates="0")
    find_records.cache_clear()
    assert find_records(CPU, tmp_path) is None
    shipped(tmp_path / "other", replace(here, chip="Them 1/2/3"))
    find_records.cache_clear()
    assert not find_records(CPU, tmp_path).same_chip  # only a guess
    shipped(tmp_path / "zown", here)
    find_records.cache_clear()
    found = find_records(CPU, tmp_path)
    assert found.same_chip and found.directory.name == "zown"
    find_records.cache_clear()


def test_without_records_of_this_cpu_the_nearest_with_such_vectors_is_taken(tmp_path, monkeypatch):
    here = replace(identity_of(CPU), chip="Us 1/2/3", features=("avx512f",))
    monkeypatch.setattr("schedules.tuning.shipped_records.identity_of", lambda cpu: here)
    shipped(tmp_path / "narrow", replace(here, lanes=8, registers=16))
    find_records.cache_clear()
    assert find_records(CPU, tmp_path, nearest=True) is None
    shipped(tmp_path / "far", replace(here, chip="Far 1/2/3", features=("avx512f", "amx_bf16", "amx_int8")))
    shipped(tmp_path / "near", replace(here, chip="Near 1/2/3", l2_bytes=2 * here.l2_bytes))
    find_records.cache_clear()
    found = find_records(CPU, tmp_path, nearest=True)
    assert found.directory.name == "near" and not found.same_chip and not found.same_code
    assert find_records(CPU, tmp_path) is None
    shipped(tmp_path / "other", replace(here, chip="Them 1/2/3"))
    find_records.cache_clear()
    found = find_records(CPU, tmp_path, nearest=True)
    assert found.directory.name == "other" and found.same_code and not found.same_chip
    find_records.cache_clear()


def test_damage_is_named(tmp_path):
    path = shipped(tmp_path / "cpu") / RECORDS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=f"{path}: kernel records are damaged"):
        read_records(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InputError, match="damaged"):
        read_records(path)


def test_thinning_keeps_winners_the_fastest_and_some_of_the_others():
    records = [Record(CONV, {"x": x}, (1 + x) * 1e-6, confirmed=x == 90) for x in range(100)]
    kept = [record.config["x"] for record in thinned(records, 10)]
    assert kept[:5] == [90, 0, 1, 2, 3] and len(kept) == 10 and max(kept[5:]) > 70
    assert thinned(records[:7], 10) != [] and len(thinned(records[:7], 10)) == 7


def test_merging_keeps_operators_and_threads_apart():
    rows = [(CONV, 1), (CONV, 2), (OTHER, 2), (CONV, 2)]
    kernels = [KernelRecords(op, n, ("a",), "2026-01-01", (Record(op, {"x": 1}, 1e-6),)) for op, n in rows]
    assert sorted((k.operator.height, k.threads) for k in merged(kernels, 9)) == [(7, 2), (14, 1), (14, 2)]


def test_the_chip_is_named_by_its_numbers():
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nstepping\t: 2\nmodel\t: 9\n"
    assert chip_name(text) == "GenuineIntel 6/207/2"
    assert chip_name("processor : 0\n") == ""
