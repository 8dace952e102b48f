"""The runner of mutants: its tables, its processes on a toy module, and (where mutmut is there) its faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.targets import ELSEWHERE, GROUPS, ROOT, all_targets, equivalent_mutants, first_tests

SOURCE = '''"""A toy."""

def double(value):
    return value + value
'''
TESTS = """
from toy_subject import double

def test_nothing():
    pass

def test_double():
    assert double(3) == 6
"""
DRIVER = """
import json, sys
from pathlib import Path
from tests.mutants.forking import TestBed, TestsFailError

root, source = Path(sys.argv[1]), Path(sys.argv[1], "toy_subject.py").read_text()
bed = TestBed(root, "toy_subject", "toy_subject.py", ["test_toy.py"])
modules = dict(bed.warm_up().modules)
bed.run_seconds, bed.test_seconds = 20.0, 2.0
endless = "[1 for _ in iter(int, 1)]"
changes = ["value + value", "2 * value", "value * value", "missing", "[0] * 2**31", endless]
runs = list(bed.run((source.replace("value + value", each) for each in changes), jobs=2))
untouched = Path(root, "toy_subject.py").read_text() == source and "toy_subject" not in sys.modules
try:
    TestBed(root, "toy_subject", "toy_subject.py", ["test_other.py"]).warm_up()
    refused = ""
except TestsFailError as error:
    refused = str(error)
in_turn = bed.run_in_turn(["test_first.py"], [source.replace("value + value", each) for each in changes[:3]])
seen = [(run.died, run.killer) for run in (*runs, *in_turn)]
print(json.dumps([seen, untouched, modules["toy_subject"], modules["pytest"], refused]))
"""


def test_every_target_and_its_tests_are_there():
    for _, module, tests in all_targets():
        assert (ROOT / module).is_file() and tests
        assert set(first_tests(module, tests)) <= set(tests)
        assert all((ROOT / test).is_file() for test in tests)
    assert all(f"def {name}(" in (ROOT / file).read_text() for file, name in (test.split("::") for test in ELSEWHERE))
    modules = [module for _, module, _ in all_targets()]
    assert len(set(modules)) == len(modules) and set(GROUPS) == {"simulator", "pricing", "selection", "analyzer"}


def test_what_was_found_to_be_equivalent_still_stands_there():
    modules = {module for _, module, _ in all_targets()}
    for each in equivalent_mutants():
        lines = {line.strip() for line in (ROOT / each.module).read_text(encoding="utf-8").splitlines()}
        assert each.module in modules and each.why
        assert set(each.before.splitlines()) <= lines, f"{each.module}: gone: {each.before}"


def test_each_text_of_a_module_meets_the_tests_in_a_process_of_its_own(tmp_path: Path):
    """The same, another right one, a wrong one, one that fails, one that fills the memory, one that never ends."""
    (tmp_path / "toy_subject.py").write_text(SOURCE)
    (tmp_path / "test_toy.py").write_text(TESTS)
    (tmp_path / "test_first.py").write_text(TESTS.replace("double(3) == 6", "double(0) == 0"))
    (tmp_path / "test_other.py").write_text("def test():\n    pass\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs, untouched, ours, theirs, refused = json.loads(done.stdout)
    seen = [True, "test_toy.py::test_double"]
    assert runs == [[False, ""], [False, ""], seen, seen, seen, seen, [False, ""], [False, ""], seen]
    assert untouched and ours and not theirs
    assert refused == "no test loads toy_subject.py"


def faults(source: str) -> set[tuple[str, str]]:
    pytest.importorskip("mutmut", reason="mutmut comes with `make mutants`")
    from tests.mutants.mutating import Faults

    return {(mutant.before, mutant.after) for mutant in Faults(source).sample(None, "")}


def test_what_computes_something_is_damaged_wherever_it_stands():
    source = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Area:
    """Width times height."""
    width: float = 1.0

    @property
    def size(self) -> float:
        return self.width * 2

LIMIT = 3
'''
    found = faults(source)
    assert ("return self.width * 2", "return self.width / 2") in found
    assert ("return self.width * 2", "return self.width * 3") in found
    assert ("width: float = 1.0", "width: float = 2.0") in found
    assert ("LIMIT = 3", "LIMIT = 4") in found
    assert not any("frozen" in before or "Width" in before for before, _ in found)


def test_names_of_types_protocols_and_own_checks_are_left_alone():
    source = """
from typing import TYPE_CHECKING, Protocol
if TYPE_CHECKING:
    import this
Table = dict[str, int]
Number = int | float
class Sized(Protocol):
    size: int = 3
def pairs(one: list[int], other: Table):
    assert len(one) == 2, "two"
    if not one:
        raise AssertionError("none")
    return zip(one, other, strict=True)
"""
    assert {before for before, _ in faults(source)} == {"if not one:", "return zip(one, other, strict=True)"}
    assert all("strict=True" in after or "if" in after for _, after in faults(source))


def test_a_sample_is_the_same_for_a_seed_and_grows_with_the_number():
    pytest.importorskip("mutmut", reason="mutmut comes with `make mutants`")
    from tests.mutants.mutating import Faults

    whole = Faults("def f(a, b):\n    return a + b * 2 - 3 if a > b else a / 4\n")
    numbers = [{mutant.number for mutant in whole.sample(count, "seed")} for count in (2, 4, None)]
    assert [len(each) for each in numbers[:2]] == [2, 4] and numbers[0] < numbers[1] < numbers[2]
    assert numbers[1] == {mutant.number for mutant in whole.sample(4, "seed")}
