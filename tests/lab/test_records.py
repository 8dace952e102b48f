"""Records without some networks, for tuning those as if they had never been seen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costmodel.machines.machine_file import load_machine, write_machine
from costmodel.operators.layers import Conv2d
from lab.records import app
from schedules.contract.cpu_target import host_target
from schedules.kernels.template_table import template_for
from schedules.tuning.shipped_records import (
    MACHINE_FILE,
    RANKING_FILE,
    RECORDS_FILE,
    CpuRecords,
    KernelRecords,
    identity_of,
    read_records,
    write_records,
)
from schedules.tuning.tuning_records import Record, RecordStore, environment

CPU = host_target(1)
SHARED, OWN, OTHER = (Conv2d(1, channels, 14, 14, 64, (1, 1)) for channels in (32, 64, 96))


def kernel(operator, *networks: str) -> KernelRecords:
    template = template_for(operator, CPU)
    configs = random.Random(0).sample(list(template.space(operator, CPU)), 12)
    records = tuple(Record(operator, each, 1e-9 * template.cost(operator, each, CPU)) for each in configs)
    return KernelRecords(operator, 1, networks, "2026-01-01", records)


@pytest.fixture
def directory(tmp_path) -> Path:
    own = environment(CPU)
    kernels = (kernel(SHARED, "a", "b"), kernel(OWN, "a"), kernel(OTHER, "b"))
    write_records(
        tmp_path / "all" / "cpu" / RECORDS_FILE,
        CpuRecords(identity_of(CPU), own["tvm"], own["templates"], "", kernels),
    )
    write_machine(load_machine("toy"), tmp_path / "all" / "cpu" / MACHINE_FILE)
    return tmp_path / "all"


def records(*options: str):
    return CliRunner().invoke(app, list(options))


def test_a_network_is_left_out_with_all_its_kernels(directory, tmp_path):
    arguments = ("train", "--directory", str(directory), "--leave-out", "a", "--output", str(tmp_path / "rest"))
    result = records(*arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "rest" / "cpu"
    assert [each.operator for each in read_records(folder / RECORDS_FILE).kernels] == [OTHER]
    assert {path.name for path in folder.iterdir()} == {RECORDS_FILE, MACHINE_FILE, RANKING_FILE}
    assert len(read_records(directory / "cpu" / RECORDS_FILE).kernels) == 3  # what is shipped stays
    assert not (directory / "cpu" / RANKING_FILE).exists()


def test_records_are_collected_beside_those_that_are_there(tmp_path):
    for name, operator in (("one", OWN), ("two", OTHER)):
        config = next(iter(template_for(operator, CPU).space(operator, CPU)))
        with RecordStore(tmp_path / name / "records", CPU) as store:
            store.add(operator, config, 1e-3)
    folder = ("--directory", str(tmp_path / "all"), "--machine", "toy")
    assert records("collect", str(tmp_path / "one"), *folder, "--note", "first").exit_code == 0
    assert records("collect", str(tmp_path / "two"), *folder, "--add").exit_code == 0
    (path,) = (tmp_path / "all").glob(f"*/{RECORDS_FILE}")
    content = read_records(path)
    assert {each.operator for each in content.kernels} == {OWN, OTHER} and content.note == "first"
    write_records(path, replace(content, templates="of old"))
    refused = records("collect", str(tmp_path / "one"), *folder, "--add")
    assert refused.exit_code == 2 and "made by another version" in refused.stderr
    path.unlink()
    assert records("collect", str(tmp_path / "one"), *folder, "--add").exit_code == 2
