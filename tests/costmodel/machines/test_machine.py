from __future__ import annotations

import dataclasses

import pytest
import yaml

from costmodel.base.errors import MachineError, OutputError
from costmodel.machines.machine_file import (
    host_identity,
    host_machine,
    load_machine,
    machine_files,
    machine_record,
    write_machine,
)
from costmodel.machines.machine_records import Host, PerThreads


def changed(toy, change):
    """The toy machine's document after ``change`` edited it."""
    document = machine_record(toy)
    change(document)
    return document


def load_document(tmp_path, document):
    path = tmp_path / "machine.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_machine(path)


def test_written_machines_read_back_equal(toy, vector_toy, tmp_path):
    for machine in (toy, vector_toy):
        write_machine(machine, tmp_path / "new" / "m.yaml", comment="two\nlines")
        assert load_machine(tmp_path / "new" / "m.yaml") == machine
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.yaml"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(clock="3 GHz"), "clock: unknown key; remove it"),
        (lambda d: d["memory"][1].pop("capacity"), r"memory\.1\.capacity: missing; add it"),
        (lambda d: d["memory"][0].update(bandwith="1 B/s"), r"memory\.0\.bandwith: unknown key"),
        (lambda d: d["compute"]["float32"].update(sustained={1: 100}), r"compute\.float32\.sustained: 100 has no unit"),
        (lambda d: d["compute"]["float32"].update(sustained={1: "100 B/s"}), "'100 B/s' is not in FLOP/s"),
        (lambda d: d["compute"]["float32"].update(sustained={2: "1 FLOP/s"}), "must ascend from 1"),
        (lambda d: d["compute"]["float32"].update(sustained={"one": "1 FLOP/s"}), "must be thread counts"),
        (lambda d: d["compute"]["float32"].update(sustained={1: "0 FLOP/s"}), "must be above zero"),
        (lambda d: d["compute"]["float32"].update(origin=""), r"compute\.float32\.origin: "),
        (lambda d: d["compute"].update(float31=d["compute"]["float32"]), "unknown dtype 'float31'"),
        (lambda d: d["memory"][0].update(shared="no"), r"memory\.0\.shared: .*boolean"),
        (lambda d: d["memory"].clear(), "memory: "),
        (lambda d: d["memory"][1].update(name="L1"), "two levels have the same name"),
        (lambda d: d.update(kind="tpu"), "kind: .*'cpu' or 'gpu'"),
        (lambda d: d.update(vector={"bits": 100, "registers": 4, "features": [], "origin": "x"}), r"vector\.bits: "),
    ],
)
def test_a_malformed_file_names_file_and_key(toy, tmp_path, change, message):
    with pytest.raises(MachineError, match=message) as error:
        load_document(tmp_path, changed(toy, change))
    assert str(error.value).startswith(str(tmp_path / "machine.yaml")) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", "", "name: a\nname: b\n", "name: \x00"])
def test_a_file_that_is_no_machine_is_one_line(tmp_path, text):
    with pytest.raises(MachineError, match="machine.yaml") as error:
        load_document(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_gpu_like_machine_has_rates_without_thread_counts(toy, tmp_path):
    """What part 2 builds on: one sustained quantity, and the vendor's figure beside it."""

    def change(document):
        document["kind"] = "gpu"
        rate = {"sustained": "60 TFLOP/s", "datasheet": "67 TFLOP/s", "origin": "measured"}
        document["compute"] = {"float32": rate}
        document["memory"] = [level for level in document["memory"] if level["name"] != "L1"]
        sizes = {"registers": "256 KiB", "shared_memory": "96 KiB", "clock": "1 GHz", "power": "250 W"}
        document["gpu"] = {"architecture": "volta", "sm_count": 80, "lanes": 64, "max_threads": 2048, **sizes}
        document["gpu"]["origin"] = "datasheet"

    machine = load_document(tmp_path, changed(toy, change))
    assert machine.peak_flops("float32", 1) == 60e12
    assert machine.compute["float32"].datasheet == 67e12


def test_missing_file_and_missing_directory(tmp_path):
    with pytest.raises(MachineError, match="nothing.yaml: cannot be read"):
        load_machine(tmp_path / "nothing.yaml")


def test_unknown_names_offer_the_nearest():
    with pytest.raises(MachineError, match="unknown machine 'tyo'; did you mean toy"):
        load_machine("tyo")
    with pytest.raises(MachineError, match="run `python -m costmodel calibrate`"):
        load_machine("host")


def test_the_beginning_of_a_name_is_enough_where_one_machine_alone_has_it():
    assert load_machine("h200").name == "h200-sxm" and load_machine("b200").name == "b200-sxm"
    with pytest.raises(MachineError, match="machine 'h100' may be h100-pcie, h100-sxm; name one of them"):
        load_machine("h100")
    with pytest.raises(MachineError, match="may be a100-sxm-40gb, a100-sxm-80gb"):
        load_machine("a100-sxm")


def test_user_files_are_found_by_name_and_hide_packaged_ones(toy, user_machines):
    write_machine(dataclasses.replace(toy, description="mine"), user_machines / "toy.yaml")
    write_machine(toy, user_machines / "other.yaml")
    assert load_machine("toy").description == "mine"
    assert {"toy", "other"} <= machine_files().keys()


def test_unwritable_place_is_an_output_error(toy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another place"):
        write_machine(toy, tmp_path / "file" / "m.yaml")


def test_numbers_between_thread_counts_are_interpolated_and_none_beyond():
    rate = PerThreads(((1, 10.0), (2, 20.0), (6, 40.0)))
    assert [rate.at(threads) for threads in (1, 2, 4, 6)] == [10, 20, 30, 40]
    with pytest.raises(ValueError, match="1 to 6 threads"):
        rate.at(7)


def test_more_threads_than_measured_is_an_error_that_says_what_to_do(toy):
    with pytest.raises(MachineError, match="1 to 2 threads, 3 asked; run .*--threads 3"):
        toy.peak_flops("float32", 3)


def test_a_dtype_without_rate_is_named(toy):
    with pytest.raises(MachineError, match=r"toy.yaml: no compute rate for int8 .*choose one of these"):
        toy.peak_flops("int8", 1)


def test_levels_hold_half_of_a_threads_share(toy):
    assert [toy.level_holding(size, 1).name for size in (500, 501, 5000, 5001)] == ["L1", "L2", "L2", "DRAM"]
    assert toy.level_holding(1e18, 1).name == "DRAM"
    shared = dataclasses.replace(toy.memory[1], shared=True)
    assert (shared.share_bytes(1), shared.share_bytes(2)) == (5000, 2500)


def test_host_machine_is_none_without_a_file():
    assert host_machine() is None


def test_host_machine_is_the_calibrated_one(toy, user_machines):
    host = dataclasses.replace(toy, host=host_identity())
    write_machine(host, user_machines / "host.yaml")
    assert host_machine(threads=2) == host


@pytest.mark.parametrize(
    ("host", "threads", "reason"),
    [
        (None, 1, "does not say on which CPU"),
        (Host("another", ("sse9",), 2), 1, "measured on another CPU"),
        ("this", 3, "measured on 2 threads only, 3 wanted"),
    ],
)
def test_a_stale_host_file_is_not_used_and_says_why(toy, user_machines, host, threads, reason):
    host = host_identity() if host == "this" else host
    write_machine(dataclasses.replace(toy, host=host), user_machines / "host.yaml")
    with pytest.warns(UserWarning, match=reason):
        assert host_machine(threads) is None
