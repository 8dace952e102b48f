"""``python -m tests.fuzz.options fusion``: hundreds of command lines with option values that they are not.

Each gives a result, or is refused: one line on standard error, exit status 2, at most 20 s of processor time. Never a
traceback, the end of the process, or nothing at all. The program is loaded once, each command line runs in a fork of
it (``tests/fuzz/loaded_programs.py``). Exit status 1 where something was found; ``--results`` lists what gave a result,
for somebody to see that no value was passed over in silence.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.loaded_programs import LoadedPrograms, look
from tests.fuzz.option_cases import CASES, OptionCase
from tests.fuzz.option_inputs import harmless_home, write_inputs, write_networks

REFUSED_SECONDS = 20.0  # of a processor, before a line says why not
MOST_SECONDS = 100  # of a result
_DEAF_SECONDS = 300.0  # of waiting: nothing is computed, and nothing comes
_SHOWN = 90  # signs of a word


@dataclass(frozen=True)
class OptionEnd:
    """How a command line ended; ``seconds`` of a processor. ``status``: ``None`` where it had to be killed."""

    case: OptionCase
    status: int | None
    output: str
    errors: str
    seconds: float

    def findings(self) -> list[str]:
        """What must not be."""
        lines = [line for line in self.errors.splitlines() if line.startswith("error: ")]
        found = []
        if self.status is None:
            found.append("hangs")
        elif self.status not in (0, 2):
            found.append(f"status {self.status}")
        if "Traceback" in self.errors + self.output or "Exception ignored" in self.errors:
            found.append("a traceback")
        if self.status == 2 and len(lines) != 1 and not self.output.lstrip().startswith("Usage:"):
            found.append(f"{len(lines)} lines that say why")
        if self.status == 2 and self.seconds > REFUSED_SECONDS:
            found.append(f"refused after {self.seconds:.0f} s")
        if self.status == 0 and not (self.output + self.errors).strip():
            found.append("says nothing")
        return found

    def line(self) -> str:
        """The command line and the end of what it said."""
        words = " ".join(each if len(each) < _SHOWN else f"{each[:_SHOWN]}..." for each in self.case.words)
        said = (self.errors.strip() or self.output.strip()).splitlines()
        return f"{words}\n    {self.status}, {self.seconds:.1f} s: {said[-1][:400] if said else ''}"


def run_case(
    programs: LoadedPrograms, program: str, case: OptionCase, place: Path, environment: Mapping[str, str]
) -> OptionEnd:
    """One command line of ``program``, in ``place``."""
    streams = [place / "messages" / name for name in ("output.txt", "errors.txt")]
    for stream in streams:
        stream.unlink(missing_ok=True)
    limits: dict[str, object] = {"seconds": MOST_SECONDS, "errors": str(streams[1])}
    if case.user is not None:
        limits["user"] = case.user
    process = programs.start(["-m", program, *case.words], place / "work", streams[0], environment, **limits)
    waited = 0.0
    while process.poll() is None and waited < _DEAF_SECONDS:
        waited += look(0.02)
    killed = process.returncode is None
    if killed:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output, errors = (stream.read_text(errors="replace") if stream.is_file() else "" for stream in streams)
    return OptionEnd(case, None if killed else process.returncode, output, errors, process.used)


_PREDICT = ("predict", "--gpu", "t4", "--model-config")
# What a program is loaded for: command lines whose modules are learnt.
LEARNT: Mapping[str, Callable[[Path], Sequence[Sequence[object]]]] = {
    "fusion": lambda place: [
        ["tune", place / "m.onnx", "-o", place / "build", "--trials", 1, "--minutes", 0.05, "--threads", 1],
        ["quantize", place / "m.onnx", "--random", "-o", place / "learnt.onnx"],
        ["analyze", place / "m.onnx", "--machine", "xeon-amx-2c", "--picture", place / "learnt.svg"],
    ],
    "e2e": lambda place: [
        [*_PREDICT, place / "tiny.json", "--report", place / "learnt.html"],
        [*_PREDICT, place / "mixture.json", "--gpus", 2, "--parallel", "dp=2"],
        ["shard", "--tables", place / "tables.yaml", "--gpu", "t4", "--gpus", 2, "-o", place / "learnt.json"],
    ],
}


def prepare(place: Path, program: str) -> dict[str, str]:
    """Inputs in ``place``, and the environment of all command lines there."""
    write_inputs(place)
    if program == "fusion":
        write_networks(place)
    for name in ("work", "messages"):
        (place / name).mkdir()
        (place / name).chmod(0o777)
    return harmless_home(place)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.options", description=__doc__)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--every", type=int, default=1, help="each so manieth of them alone")
    parser.add_argument("--cases", type=int, help="so many of them")
    parser.add_argument("--only", default="", help="those alone in which this text is")
    parser.add_argument("--results", action="store_true", help="tell what gave a result, too")
    parser.add_argument("--log", type=Path, help="file for a line of JSON for each")
    asked = parser.parse_args()
    bad = 0
    for program in asked.programs or CASES:
        with tempfile.TemporaryDirectory(prefix="options-") as folder, LoadedPrograms() as programs:
            place = Path(folder)
            environment = prepare(place, program)
            for words in LEARNT[program](place):
                programs.learn(["-m", program, *words], place / "work")
            cases = [case for case in CASES[program](place) if asked.only in " ".join(case.words)]
            last = None if asked.cases is None else asked.first + asked.cases * asked.every
            bad += _run_all(
                programs, program, list(enumerate(cases))[asked.first : last : asked.every], asked, place, environment
            )
    return 1 if bad else 0


def _run_all(
    programs: LoadedPrograms, program: str, cases: Sequence[tuple[int, OptionCase]], asked: argparse.Namespace,
    place: Path, environment: Mapping[str, str],
) -> int:  # fmt: skip
    """How many command lines did what they must not."""
    counts: Counter[str] = Counter()
    seconds, slowest = 0.0, 0.0
    for number, case in cases:
        end = run_case(programs, program, case, place, environment)
        found = end.findings()
        counts["found" if found else "results" if end.status == 0 else "refused"] += 1
        seconds += end.seconds
        slowest = max(slowest, end.seconds if end.status == 2 else 0.0)
        if found or (asked.results and end.status == 0):
            print(f"{program} {number}: {', '.join(found) or 'a result'}: {end.line()}", flush=True)
        if asked.log is not None:
            with asked.log.open("a", encoding="utf-8") as file:
                told = {"number": number, "words": case.words, "status": end.status, "seconds": end.seconds}
                file.write(json.dumps({**told, "output": end.output[-1500:], "errors": end.errors[-3000:]}) + "\n")
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(
        f"{program}: {len(cases)} command lines, {told}; {seconds:.0f} s of a processor, at most {slowest:.1f} s of one"
        " that was refused",
        flush=True,
    )  # fmt: skip
    return counts["found"]


if __name__ == "__main__":
    sys.exit(main())
