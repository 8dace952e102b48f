"""``python -m tests.mutants``: how many small faults in the modules that decide most are seen by their tests.

A sample of each module's faults, always the same for ``--seed``. Each line of a survivor says where it is; what nobody
can see goes to equivalent.yaml with the reason. Exit status 1 below 85 % of any group that was asked for. mutmut and
libcst must be installed (``make mutants`` does that).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tests.mutants.forking import TestBed, TestsFailError
from tests.mutants.targets import (
    ELSEWHERE,
    GROUPS,
    ROOT,
    EquivalentMutant,
    all_targets,
    equivalent_mutants,
    first_tests,
)

if TYPE_CHECKING:
    from tests.mutants.mutating import Faults

ENOUGH = 0.85


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: ``killed``, ``survived`` or ``equivalent`` (it survived, and nobody can see it)."""

    module: str
    number: int
    line: int
    verdict: str
    killer: str
    diff: str


@dataclass
class ModuleScore:
    """Counts of a module, or of a group of them. ``faults``: how many there are to draw from."""

    faults: int = 0
    killed: int = 0
    survived: int = 0
    equivalent: int = 0

    @property
    def share(self) -> float:
        """Killed, of those that anybody could see."""
        return self.killed / max(self.killed + self.survived, 1)

    def add(self, other: ModuleScore) -> None:
        """Adds the counts of ``other``."""
        self.faults += other.faults
        self.killed += other.killed
        self.survived += other.survived
        self.equivalent += other.equivalent


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--group", choices=sorted(GROUPS), action="append", help="these alone; repeatable")
    parser.add_argument("--module", action="append", help="these files alone, such as e2e/price/pricing.py; repeatable")
    parser.add_argument("--sample", type=int, default=40, help="faults of each module (default 40; 0: all)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument(
        "--number", type=int, action="append", help="these faults of one --module, with pytest's output"
    )
    parser.add_argument(
        "--again", type=Path, help="those that survived in this file of --write, the others as they were"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--write", type=Path, help="a line of JSON for every fault goes there")
    asked = parser.parse_args()
    targets = [
        (group, module, tests)
        for group, module, tests in all_targets()
        if (not asked.group or group in asked.group) and (not asked.module or module in asked.module)
    ]
    if not targets or (asked.number and len(targets) != 1):
        parser.error(
            "no such module; tests/mutants/targets.py has them" if not targets else "--number: of one --module"
        )
    scores: dict[str, ModuleScore] = {}
    for group, module, tests in targets:
        with tempfile.TemporaryFile("w+") as results:
            # What one module's runs load must not be there for the next.
            pid = os.fork()
            if pid == 0:
                os._exit(_measured(module, tests, asked, results))
            if os.waitpid(pid, 0)[1]:
                return 2
            results.seek(0)
            faults, *verdicts = results.read().splitlines()
        scores[module] = _score(int(faults), [json.loads(line)["verdict"] for line in verdicts])
        scores.setdefault(group, ModuleScore()).add(scores[module])
        if asked.write:
            with asked.write.open("a") as file:
                file.writelines(line + "\n" for line in verdicts)
    for name, score in scores.items():
        _print(name, score)
    return 0 if all(scores[group].share >= ENOUGH for group in {group for group, *_ in targets}) else 1


def _measured(module: str, tests: tuple[str, ...], asked: argparse.Namespace, results: TextIO) -> int:
    """Writes the number of all faults, then a line of JSON for each that was tried."""
    from tests.mutants.mutating import Faults

    bed = TestBed.of(ROOT, module, tests, [f"--deselect={test}" for test in ELSEWHERE])
    began = time.monotonic()
    try:
        whole = bed.warm_up()
    except TestsFailError as error:
        print(f"{module}: {error}", file=sys.stderr)
        return 2
    faults = Faults((ROOT / module).read_text(encoding="utf-8"))
    print(f"{module}: {len(faults)} faults; its tests take {whole.seconds:.1f} s", flush=True)
    print(len(faults), file=results)
    for verdict in _verdicts(bed, faults, asked, [each for each in equivalent_mutants() if each.module == module]):
        print(json.dumps(asdict(verdict)), file=results)
        if verdict.verdict == "survived":
            print(f"  {module}:{verdict.line} --number {verdict.number} survives\n{verdict.diff}", flush=True)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    results.flush()
    return 0


def _verdicts(
    bed: TestBed, faults: Faults, asked: argparse.Namespace, equivalent: list[EquivalentMutant]
) -> Iterator[Verdict]:
    if asked.again:
        before = [Verdict(**json.loads(line)) for line in asked.again.read_text(encoding="utf-8").splitlines()]
        here = [each for each in before if each.module == bed.file]
        yield from (each for each in here if each.verdict == "killed")
        numbers = [each.number for each in here if each.verdict != "killed"]
        chosen = [mutant for number in numbers if (mutant := faults.mutant(number)) is not None]
    elif asked.number:
        chosen = [mutant for number in asked.number if (mutant := faults.mutant(number)) is not None]
        bed.log = sys.stdout
    else:
        chosen = faults.sample(asked.sample or None, f"{asked.seed} {bed.file}")
    known = {(each.before, each.after) for each in equivalent}
    first = first_tests(bed.file, tuple(bed.tests))
    runs = bed.run_in_turn(first, [mutant.source for mutant in chosen], asked.jobs)
    for mutant, run in zip(chosen, runs, strict=True):
        alike = (mutant.before, mutant.after) in known
        verdict = "killed" if run.died else "equivalent" if alike else "survived"
        yield Verdict(bed.file, mutant.number, mutant.line, verdict, run.killer, mutant.diff())


def _score(faults: int, verdicts: list[str]) -> ModuleScore:
    return ModuleScore(faults, *(verdicts.count(each) for each in ("killed", "survived", "equivalent")))


def _print(name: str, score: ModuleScore) -> None:
    tried = score.killed + score.survived + score.equivalent
    print(
        f"{name:36} {score.faults:5} faults, {tried:4} tried: {score.killed:4} killed, {score.survived:3} survived, "
        f"{score.equivalent:3} equivalent: {score.share:6.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
