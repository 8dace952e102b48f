"""Damaged inputs for every reader, the same ones in the same order, up to 500 or as many as two seconds of a processor
allow: each gives a result or is refused in a line with the file.

``python -m tests.fuzz --minutes 60`` goes on with others. The harness itself is tried on a reader that hangs, dies,
fills the memory and raises what it should not.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.harness import ROOT, Bench
from tests.fuzz.mutations import json_text, mutated_arrays, mutated_bytes, mutated_lines, mutated_tree, yaml_text
from tests.fuzz.readers import READERS, Reader

CASES = 500
# Of one reader: what is left then is not read here, but by ``python -m tests.fuzz --cases 500``.
SECONDS = 1.0
# Each input of these imports a graph or builds a model.
LONG = ("onnx", "configuration", "analyze", "predict")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(READERS) as bench:
        yield bench


@pytest.fixture(scope="module")
def toys() -> Iterator[Bench]:
    with Bench(["toy-raise"]) as bench:
        yield bench


def present(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _marked(name: str):
    return pytest.param(name, marks=pytest.mark.slow) if name in LONG else name


@pytest.mark.parametrize("name", [_marked(name) for name in READERS])
def test_damaged_inputs_are_read_or_refused(name: str, bench: Bench):
    missing = [module for module in READERS[name].needs if not present(module)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    report = bench.fuzz(name, CASES, SECONDS)
    assert not report.findings, "\n".join(f"--case {each.case}: {each.what} {each.detail}" for each in report.findings)
    assert report.outcomes["result"] and report.outcomes["refused"]


@pytest.mark.parametrize(
    ("word", "what"), [("raise", "traceback"), ("die", "ends the process (-6)"), ("fill", "takes 2 GiB")]
)
def test_what_must_not_happen_is_found(word: str, what: str, toys: Bench):
    report = toys.fuzz(f"toy-{word}", 6, 60.0)
    assert {each.what for each in report.findings} == {what} and report.outcomes["result"]
    assert report.cases == 7  # and one seed: what follows a dead process is read by another


def test_an_endless_reader_is_found(toys: Bench):
    report = toys.fuzz("toy-hang", 1, 60.0)
    assert {each.what.partition(" ")[0] for each in report.findings} <= {"hangs", "takes"} and report.findings


def test_a_case_is_told_by_its_number(tmp_path: Path):
    reader: Reader = READERS["tables"]
    seeds = reader.seeds(tmp_path)
    contents = [reader.case(tmp_path, seeds, 7, random.Random("tables 7")).read_bytes() for _ in range(2)]
    assert contents[0] == contents[1] != reader.case(tmp_path, seeds, 8, random.Random("tables 8")).read_bytes()


def test_damage_is_different_every_time_and_leaves_the_seed_alone():
    tree = {"a": [1, {"b": "text"}], "c": None}
    arrays = {"x": np.ones((2, 3))}
    texts = {
        "json": lambda rng: json_text(mutated_tree(tree, rng), rng),
        "yaml": lambda rng: yaml_text(mutated_tree(tree, rng), rng),
        "bytes": lambda rng: mutated_bytes(b"0123456789" * 20, rng),
        "lines": lambda rng: mutated_lines("one 1\ntwo 2\nthree 3", rng),
        "arrays": lambda rng: mutated_arrays(arrays, rng),
    }
    for damage in texts.values():
        assert len({damage(random.Random(seed)) for seed in range(40)}) > 20
    assert tree == {"a": [1, {"b": "text"}], "c": None} and list(arrays) == ["x"]


def test_the_command_counts_and_ends_with_1_where_something_is_found():
    words = [sys.executable, "-m", "tests.fuzz", "--cases", "4", "--reader"]
    good, bad = (
        subprocess.run([*words, name], cwd=ROOT, capture_output=True, text=True, check=False)
        for name in ("tables", "toy-raise")
    )
    assert good.returncode == 0 and "0 findings" in good.stdout, good.stdout + good.stderr
    assert bad.returncode == 1 and "--case" in bad.stdout and "invalid literal" in bad.stdout
