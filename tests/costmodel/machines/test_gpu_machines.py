from __future__ import annotations

import json

import pytest
import yaml

from costmodel.base.errors import MachineError
from costmodel.commands.cli import main
from costmodel.machines.machine_file import (
    PACKAGED_DIRECTORY,
    load_machine,
    machine_files,
    machine_record,
    write_machine,
)

V100 = ("v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb")
A100 = ("a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb")
HOPPER = ("h100-pcie", "h100-sxm", "h100-sxm-96gb", "h200-sxm", "h20", "gh200", "gh200-144gb")
BLACKWELL = ("b200-sxm", "b200-sxm-simumax", "b300-sxm", "gb200", "gb300", "rtx-pro-6000", "rtx-pro-6000-max-q")
GEFORCE = ("rtx-2080-ti", "rtx-3090", "rtx-4090", "rtx-5090")
GA102 = ("a10", "a40", "a6000")
NAMES = ("p100-pcie-16gb", "p4", *V100, "t4", *A100, *GA102, "l4", "l40s", *HOPPER, *BLACKWELL, *GEFORCE)


@pytest.fixture
def document():
    return machine_record(load_machine("v100-pcie-32gb"))


def load_document(tmp_path, document):
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_machine(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_gpu_is_complete_and_consistent(name):
    machine = load_machine(name)
    assert machine.name == name and machine.kind == "gpu" and machine.gpu is not None
    for rate in machine.compute.values():
        assert rate.datasheet is not None and rate.sustained.at(1) / rate.datasheet >= 0.3
        follows = rate.burst is not None or "the rest from" in rate.origin
        assert "datasheet" in rate.origin and ("sustained" in rate.origin or follows)
    l2, dram = machine.memory
    assert 0.7 <= dram.bandwidth.at(1) / dram.datasheet <= 0.97
    assert l2.bandwidth.at(1) > dram.bandwidth.at(1) and l2.capacity_bytes < dram.capacity_bytes
    assert machine.link("pcie").bandwidth < machine.link("pcie").datasheet
    assert (machine.link("nvlink") is not None) >= ("sxm" in name)


def test_only_the_named_gpus_are_packaged():
    assert {path.stem for path in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml")} == set(NAMES)
    assert set(NAMES) <= machine_files().keys()


def test_power_limited_cards_are_those_without_a_power_connector():
    assert {name for name in NAMES if load_machine(name).chip().power_limited} == {"p4", "t4", "l4"}


def test_a_written_gpu_reads_back_equal(tmp_path):
    machine = load_machine("h100-sxm")
    write_machine(machine, tmp_path / "m.yaml")
    assert load_machine(tmp_path / "m.yaml") == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("gpu"), "gpu: missing; add it"),
        (lambda d: d["gpu"].pop("origin"), r"gpu\.origin: missing"),
        (lambda d: d["gpu"].update(clock="1380"), r"gpu\.clock: '1380' is not a quantity"),
        (lambda d: d["gpu"].update(power="250 B"), "'250 B' is not in W"),
        (lambda d: d["gpu"].update(tdp="250 W"), r"gpu\.tdp: unknown key"),
        (lambda d: d["memory"].reverse(), "a GPU has the levels L2, DRAM, in this order"),
        (lambda d: d["links"].append(d["links"][0]), "links: two of the same kind"),
        (lambda d: d["links"][0].update(bandwidth="0 GB/s"), "must be above zero"),
        (lambda d: d.update(kind="cpu"), "gpu, links: only for kind gpu"),
        (lambda d: d["links"][0].update(kind="network"), r"links\.0\.kind: a network has a file of its own"),
        (lambda d: d.update(links="pcie"), "links: must be a list"),
        (lambda d: d.update(gpu="volta"), "gpu: must be a mapping"),
        (lambda d: d["gpu"].update(sm_count="80"), r"gpu\.sm_count: .*integer"),
        (lambda d: d["gpu"].update(lanes=0), r"gpu\.lanes: .*greater than or equal to 1"),
        (lambda d: d["gpu"].update(clock_hz="1 GHz"), r"gpu\.clock_hz: unknown key"),
        (lambda d: d.update(source="elsewhere"), "source: unknown key"),
        (lambda d: d.update(description=3), "description: .*string"),
    ],
)
def test_a_malformed_gpu_file_names_file_and_key(document, tmp_path, change, message):
    change(document)
    with pytest.raises(MachineError, match=message) as error:
        load_document(tmp_path, document)
    assert str(error.value).startswith(str(tmp_path / "gpu.yaml")) and "\n" not in str(error.value)


def test_a_cpu_is_no_gpu_and_says_what_to_do(toy):
    with pytest.raises(MachineError, match="toy.yaml: is no GPU .*choose one"):
        toy.chip()
    assert toy.link("pcie") is None


def test_the_command_line_shows_what_only_gpus_have(capsys):
    assert main(["machines", "t4"]) == 0
    text = capsys.readouterr().out
    assert all(
        each in text for each in ("gpu sm_count", "40", "pcie, one direction", "DRAM read, datasheet", "320 GB/s")
    )
    assert main(["machines", "t4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["power"] == "70 W"
