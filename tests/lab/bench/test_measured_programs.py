"""The programs suite on small programs of the tests, on the CPU; no network."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from costmodel.base.errors import InputError
from lab.bench import measured_programs
from lab.bench.measured_programs import (
    COLUMNS,
    LIST,
    SEGMENTS,
    TRIED,
    Program,
    compare,
    fetch,
    read_list,
    source_of,
    tried,
)

TRAINS = """
import sys

import torch

assert sys.argv == ["program.py", "--device", "cpu"] and __name__ == "__main__"
model = torch.nn.Linear(4, 4)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
while True:
    model(torch.ones(2, 4)).sum().backward()
    for each in optimizers:
        each.step()
"""
TIMED = {
    "programs": [
        {"name": "stops", "about": "", "text": "raise SystemError('no such dataset')\n"},
        {"name": "trains", "about": "", "text": TRAINS, "arguments": "--device cuda"},
    ]
}


def test_programs_are_timed_on_the_cpu_and_resumed(tmp_path: Path) -> None:
    listing, folder, output = tmp_path / "list.yaml", tmp_path / "programs", tmp_path / "out"
    listing.write_text(yaml.safe_dump(TIMED), encoding="utf-8")
    fetch(read_list(listing), folder, lambda line: None)
    (folder / "data").mkdir()  # none is made up
    command = [*("-m", "lab.bench.measured_programs", "run"), str(folder), "-o", str(output), "--device", "cpu"]
    for more in ((), ("--resume",)):
        line = [sys.executable, *command, "--list", str(listing), *more]
        subprocess.run(line, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with (output / "programs.csv").open(newline="", encoding="utf-8") as file:
        failed, timed = csv.DictReader(file)
    assert failed["name"] == "stops" and failed["error"] == "SystemError: no such dataset" and not failed["median_s"]
    assert timed["name"] == "trains" and not timed["error"]
    segments = [float(each) for each in timed["segments"].split()]
    assert len(segments) == SEGMENTS and sorted(segments)[1] == float(timed["median_s"])
    # Two optimizers step, one of them is counted: all steps take the time of the segments.
    assert min(segments) == float(timed["minimum_s"]) and int(timed["steps"]) * min(segments) < SEGMENTS
    assert len(json.loads((output / "programs.json").read_text())["runs"]) == 2
    for kind in ("trace", "shapes"):
        assert (output / f"{kind}-trains.json.gz").stat().st_size > 1000


def test_edits_apply_in_one_place_or_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "some-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("some-1.0/examples/train.py", "SIZE = 64\n"), ("some-1.0/utils.py", "SIDE = 64\n")):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    asked = {"name": "some", "about": "", "source": "some==1.0", "members": ["examples/train.py", "utils.py"]}
    program = Program(**asked, edits=[("SIZE = 64", "SIZE = 8")])
    assert source_of(program, tmp_path) == {"train.py": "SIZE = 8\n", "utils.py": "SIDE = 64\n"}
    assert program.command("cpu") == ["train.py"]
    for old in ("64", "SIZE = 32"):
        with pytest.raises(InputError, match="some: .* is not in one place"):
            source_of(Program(**asked, edits=[(old, "")]), tmp_path)


def test_measured_against_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "list.yaml"
    before = {"ms": 5.0, "low": 4.0, "high": 8.0, "gib": 1.0, "commit": "abc"}
    named = [{"name": name, "about": "", "text": ""} for name in ("right", "wrong", "failed", "unpriced", "absent")]
    listing.write_text(yaml.safe_dump({"programs": [named[0] | {"predicted": before}, *named[1:]]}), encoding="utf-8")
    table = tmp_path / "programs.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow({"name": "right", "median_s": 0.010, "peak_memory_bytes": 2**30})
        writer.writerow({"name": "wrong", "median_s": 0.020})
        writer.writerow({"name": "failed", "error": "no GPU"})
        writer.writerow({"name": "unpriced", "median_s": 0.020})
    answers = {
        "right": {"ms": 11.0, "low": 9.0, "high": 13.0, "gib": 1.5},
        "wrong": {"ms": 10.0, "low": 9.0, "high": 13.0, "gib": 1.5},
        "unpriced": "error: it takes no step",
    }
    monkeypatch.setattr(measured_programs, "make_data", lambda folder: None)
    monkeypatch.setattr(measured_programs, "predict", lambda program, folder, gpu: answers[program.name])
    header, _, *rows, summary = compare(table, read_list(listing), tmp_path, "h200-sxm")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == [
        *("right", "10.00", "11.00 (9.00 to 13.00)", "+10.0%", "yes", "1.00", "1.50"),
        *("5.00 (4.00 to 8.00)", "-50.0%", "no"),
    ]
    assert cells[1][:5] == ["wrong", "20.00", "10.00 (9.00 to 13.00)", "-50.0%", "no"]
    assert cells[2][:2] == ["failed", "no GPU"] and cells[3][2] == "error: it takes no step"
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert summary == "2 programs: 30.0% mean error, 1 inside"


SHARED = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[int(os.environ["LOCAL_RANK"])])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 4).cuda()).sum().backward()
    optimizer.step()
"""


def test_programs_are_tried_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "list.yaml"
    named = [
        {"name": "shares", "text": SHARED, "launcher": "torchrun --nproc-per-node 2", "gpu": "l40s"},
        {"name": "asks", "text": "open('words|more.txt')\n", "gpu": "l40s"},
        {"name": "other", "text": "raise SystemError\n", "gpu": "l40s"},
    ]
    listing.write_text(yaml.safe_dump({"programs": [{"about": "", **each} for each in named]}), encoding="utf-8")
    fetch(read_list(listing), tmp_path, lambda line: None)
    monkeypatch.setattr(measured_programs, "make_data", lambda folder: None)
    header, _, *rows, summary = tried(read_list(listing), tmp_path, "s")
    shares, asks = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert shares[1:3] == ["torchrun --nproc-per-node 2 program.py", "2 l40s"] and " ms (" in shares[3]
    assert "of SGD, " in shares[5]
    assert asks[3].startswith("error: program.py:1: opens words/more.txt, which is not here")
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert summary == "2 programs: 1 answered, 1 with a line instead"


@pytest.mark.parametrize("listing", [LIST, TRIED], ids=lambda path: path.stem)
def test_the_lists_name_what_can_be_fetched(listing: Path) -> None:
    listed = read_list(listing)
    names = [each.name for each in listed.programs]
    assert len(names) >= 15 and len(set(names)) == len(names)
    for each in listed.programs:
        assert bool(each.members) + bool(each.module) + bool(each.text) + (each.launcher[:5] in ("tune ", "yolo ")) == 1
        assert bool(each.gpu) == (listing == TRIED)
        assert each.predicted is None or each.predicted["low"] <= each.predicted["ms"] <= each.predicted["high"]
        assert len(each.text.splitlines()) < 32 and each.launched
