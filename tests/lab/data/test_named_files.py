"""Fits use the files that the shipped models name: one more file beside the checkout changes nothing."""

from __future__ import annotations

import csv
import gzip
import json
import shutil

import pytest

from lab.data import selection as fitting
from lab.data.data_folder import data_folder
from lab.data.selection import named_in, named_tables, select, selection_of
from lab.fit.__main__ import main as fit_main
from lab.fit.collectives import fit_collectives
from lab.validate.__main__ import main as validate_main

FOLDER = "vtrain/all_reduce/a100"


def sweep(data, ranks, slower=1.0, folder=FOLDER):
    """An all-reduce of 1 MiB to 64 MiB in the columns of vTrain."""
    path = data / folder / f"AR_GPU{ranks}_1M_64M_LUT"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["size(B)", "count", "type", "time(ns)", "busbw", "time(ns)", "busbw"])
        for power in range(20, 27):
            nanoseconds = slower * (20_000 + 2**power / 100) * (1 + ranks / 20)
            writer.writerow([2**power, 2**power // 4, "float", nanoseconds, 1, nanoseconds, 1])
    return path


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """A data folder with two sweeps and models fitted to them, as if they were shipped."""
    data = tmp_path / "data"
    for ranks in (2, 8):
        sweep(data, ranks)
    files = fit_collectives(data, tmp_path / "shipped", lambda line: None)
    monkeypatch.setattr(fitting, "CONSTANTS", files[0])
    return data, files


def fit(data, output, *options):
    return fit_main(["collectives", "--data", str(data), "-o", str(output), *options])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def test_one_more_file_changes_nothing_until_it_is_asked_for(fitted, tmp_path, capsys):
    data, files = fitted
    shutil.copytree(data, tmp_path / "grown")
    new = sweep(tmp_path / "grown", 4, slower=3.0)
    assert fit(tmp_path / "grown", tmp_path / "same") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"1 new, not used (use them with --all): {FOLDER}/{new.name}" in told
    assert contents(tmp_path / "same" / "collectives") == contents(files[0].parent)
    assert fit(tmp_path / "grown", tmp_path / "other", "--all") == 0
    other = contents(tmp_path / "other" / "collectives")
    assert other != contents(files[0].parent)
    assert len(named_in(tmp_path / "other" / "collectives" / "collectives.json")) == 3


@pytest.mark.parametrize("change", ["missing", "different"])
def test_a_file_that_is_not_as_it_was_named_stops_the_fit(fitted, tmp_path, capsys, change):
    data, _ = fitted
    if change == "missing":
        (data / FOLDER / "AR_GPU8_1M_64M_LUT").unlink()
    else:
        sweep(data, 8, slower=2.0)
    assert fit(data, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "AR_GPU8_1M_64M_LUT: " in error and "data fetch` brings what" in error and "--all" in error
    assert not list((tmp_path / "out").glob("*"))
    assert fit(data, tmp_path / "out", "--all") == 0


def test_validation_uses_what_is_there_of_the_named_and_says_the_rest(fitted, tmp_path, capsys):
    data, _ = fitted
    (data / FOLDER / "AR_GPU8_1M_64M_LUT").unlink()
    sweep(data, 4, folder="vtrain/all_reduce/v100")
    assert validate_main(["collectives", "--data", str(data), "--json"]) == 0
    told = capsys.readouterr()
    machines = {each["machine"] for each in json.loads(told.out)["collectives"]["results"]}
    assert "a100-sxm-80gb" in machines and "v100-sxm2-32gb" not in machines
    assert "1 missing" in told.err and "1 new, not used" in told.err
    assert validate_main(["collectives", "--all", "--data", str(data), "--json"]) == 0
    assert "v100-sxm2-32gb" in capsys.readouterr().out


def test_compressors_may_differ(tmp_path):
    one, other = tmp_path / "one" / "a.csv.gz", tmp_path / "other" / "a.csv.gz"
    for path, level in ((one, 1), (other, 9)):
        path.parent.mkdir()
        path.write_bytes(gzip.compress(b"1,2\n" * 999, level))
    assert one.read_bytes() != other.read_bytes()
    named = named_tables({one: 1}, one.parent)
    (tmp_path / "fitted.json").write_text(json.dumps({"provenance": named}))
    chosen = select(other.parent, [other], tmp_path / "fitted.json")
    assert chosen.used == ["a.csv.gz"] and chosen.wants(other) and not chosen.wants(one) and not chosen.remarks()


def test_the_shipped_models_name_files_of_the_manifest():
    from lab.data.manifest import MANIFEST, read_sources

    known = {each.path: each.sha256 for source in read_sources(MANIFEST) for each in source.files}
    for part in fitting.PARTS:
        chosen = selection_of(part, data_folder())
        for name in (*chosen.used, *chosen.missing, *chosen.different):
            assert name in known
    for name, content in {**named_in(fitting.CONSTANTS), **named_in(fitting.DIRECTORY / "transfer.json")}.items():
        assert known[name] == content, name
