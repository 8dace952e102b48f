"""``python -m tests.fuzz.kills --times 20 tune sweep fit``: commands that are ended at random moments, again and again.

A command lives in a folder until it is killed (SIGKILL), asked to end (SIGTERM) or stopped as by Ctrl-C (SIGINT, which
the whole group gets), and goes on there in its next life; one that came to its end is followed by another in a fresh
folder. After each life

- what was finished before is there as it was, and at least as much as the messages had told;
- nothing was done twice;
- the project's own readers read the folder, or refuse a build whose manifest does not fit yet;
- no process of it is left within seconds; after SIGTERM and Ctrl-C no temporary file or folder either, and the exit
  status is 143 or 130 with one line of why, and after a life to its end the result is that of a run that nobody ended.

``--twice``: two at the same time in one folder instead; one works, the other one is refused in a line that names it.
Exit status 1 where something was found.

``--loaded``: lives are forks of a process that has their libraries, which is most of the processor's time of a short
life. Processes that a command itself starts load theirs as ever.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.killed_commands import COMMANDS, KilledCommand
from tests.fuzz.loaded_programs import LOOK_SECONDS, ForkedCommand, LoadedPrograms, look

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
MARK = "FUZZ_KILLS_LIFE"  # in the environment of a life and of all that it starts
EARLIEST = 0.25  # seconds: before, it is Python that starts, which nobody can tell what to print
# Waits are counted in looks, not in seconds: a machine that stands still for a while finds nothing.
LOOKS_FOR_THE_END, LOOKS_FOR_PROCESSES = 4_000, 100
Process = subprocess.Popen[bytes] | ForkedCommand
# What a process that was killed may leave for its next life to take away.
TEMPORARY = (".checking-", ".staging-", ".quantising-")
# What libraries keep in the system's temporary folder for the next process: PyTorch's compiler, ONNX Runtime.
CACHES = ("torchinductor_", ".ses")


@dataclass
class KillReport:
    """``lives`` by how they ended; ``slowest``: seconds from a signal to the end, and until no process was left."""

    command: str
    lives: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_end: float = 0.0
    slowest_process: float = 0.0

    def line(self) -> str:
        """As it is printed."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.lives.items()))
        return (
            f"{self.command:8} {counts}; at most {self.slowest_end:.1f} s from a signal to the end, processes gone "
            f"after {self.slowest_process:.1f} s; {len(self.findings)} findings"
        )


@dataclass(frozen=True)
class Life:
    """One process from its start to its end; ``status`` as of ``subprocess``, ``left``: processes that outlived it."""

    seconds: float
    status: int | None
    signalled: bool
    output: str
    end_seconds: float
    process_seconds: float
    left: tuple[str, ...]


class Place:
    """A folder with the inputs, the results and the temporary folder of lives of one command; ``programs``: what they
    are forked from.
    """

    def __init__(self, command: KilledCommand, folder: Path, programs: LoadedPrograms | None = None) -> None:
        self.command, self.folder, self.programs = command, folder, programs
        (folder / "tmp").mkdir(parents=True)
        command.prepare(folder)

    def start(self) -> tuple[Process, str, Path]:
        """A life that begins: its process, its mark, and where its messages go."""
        mark = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        own = {"TMPDIR": str(self.folder / "tmp"), MARK: mark, "XDG_CACHE_HOME": str(self.folder / "cache")}
        environment = {**os.environ, "PYTHONPATH": path, **own}
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what runs in the background: lives would not hear
            signal.signal(signal.SIGINT, signal.default_int_handler)
        log = self.folder / f"messages-{mark}.txt"
        if self.programs is not None:
            return self.programs.start(self.command.words(self.folder), ROOT, log, own), mark, log
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *self.command.words(self.folder)],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip
        return process, mark, log

    def live(self, moment: float | None = None, number: signal.Signals | None = None) -> Life:
        """One life, which gets the signal ``number`` after ``moment`` seconds."""
        process, mark, log = self.start()
        lived, signalled = 0.0, False
        if moment is not None and number is not None:
            while process.poll() is None and lived < moment:
                lived += look(min(LOOK_SECONDS, moment - lived))
            if process.poll() is None:
                signalled = True
                if number == signal.SIGINT:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
        status, ending = _awaited(process)
        left, going = _left_behind(mark, process.pid)
        output = log.read_text(errors="replace")
        log.unlink()
        return Life(lived + ending, status, signalled, output, ending, going, left)

    def temporary(self) -> list[str]:
        """Temporary files and folders that are there."""
        found = [path.name for path in (self.folder / "tmp").iterdir() if not path.name.startswith(CACHES)]
        for path in (self.folder / "out").rglob("*"):
            if path.name.startswith(TEMPORARY) or path.suffix in (".partial", ".lock") or path.name == ".lock":
                found.append(path.relative_to(self.folder).as_posix())
        return sorted(found)


def _awaited(process: Process) -> tuple[int | None, float]:
    """Exit status, ``None`` of one that had to be killed, and the seconds until then."""
    seconds = 0.0
    for _ in range(LOOKS_FOR_THE_END):
        if process.poll() is not None:
            return process.returncode, seconds
        seconds += look()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return None, seconds


def _left_behind(mark: str, session: int) -> tuple[tuple[str, ...], float]:
    """Processes with ``mark``, or of ``session``, that do not end by themselves; they are killed. And the seconds until
    none was left.
    """
    found: dict[int, str] = {}
    seconds = 0.0
    for _ in range(LOOKS_FOR_PROCESSES):
        found = dict(_marked(mark, session))
        if not found:
            return (), seconds
        seconds += look()
    for number in found:
        os.kill(number, signal.SIGKILL)
    return tuple(found.values()), seconds


def _marked(mark: str, session: int) -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            number = int(folder.name)
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes() or os.getsid(number) == session:
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words:  # else it is dead, and its parent has not asked
                        found.append((number, words))
            except OSError:
                continue
    return found


def kill(
    command: KilledCommand, times: int, signals: Sequence[str], seed: int, folder: Path,
    programs: LoadedPrograms | None = None,
) -> KillReport:  # fmt: skip
    """Ends lives of ``command`` until each of ``signals`` has ended ``times`` of them; the last one is left alone.

    ``programs``: what lives are forked from, when it has learnt what they load.
    """
    report, rng = KillReport(command.name), random.Random(f"{command.name} {seed}")
    sources = _sources()  # keys of results cover them
    if programs is not None:
        place = Place(command, folder / "learnt")
        programs.learn(command.words(place.folder), ROOT)
    place = Place(command, folder / "undisturbed", programs)
    life = place.live()
    lasts = life.seconds
    _check_end(report, place, life, None, (), "undisturbed")
    if report.findings:
        print(report.findings[0], flush=True)
        return report
    expected = command.result(place.folder)
    left = Counter(dict.fromkeys(signals, times))
    count, place = 0, Place(command, folder / "0", programs)
    while True:
        name = rng.choice(sorted(left.elements())) if left.total() else "KILL"
        moment = rng.uniform(EARLIEST, max(lasts, 2 * EARLIEST)) if left.total() else None
        before, litter = dict(command.kept(place.folder)), place.temporary()
        life = place.live(moment, SIGNALS[name])
        count += 1
        where = f"{command.name} {count}: {name} after {moment:.2f} s" if life.signalled else f"{command.name} {count}"
        found = len(report.findings)
        _check_work(report, place, life, before, where)
        _check_end(report, place, life, name if life.signalled else None, litter, where, expected)
        if life.signalled:
            left[name] -= 1
        elif not before:
            lasts = min(lasts, life.seconds)  # the first one of all read its libraries from a disk
        if not life.signalled or life.status == 0 or command.over(place.folder):
            if life.status == 0 and expected is not None and (result := command.result(place.folder)) != expected:
                told = _difference(repr(expected), repr(result))
                told += " (somebody changed the program meanwhile: begin again)" if _sources() != sources else ""
                report.findings.append(f"{where}: another result than that of a run that nobody ended: {told}")
            shutil.rmtree(place.folder, ignore_errors=True)
            place = Place(command, folder / str(count), programs)
        for each in report.findings[found:]:
            print(each, flush=True)
        print(report.line(), file=sys.stderr, flush=True)
        if moment is None:
            break
    return report


def _sources() -> dict[Path, float]:
    """When each file of the program was changed."""
    packages = ("costmodel", "e2e", "fusion", "schedules")
    files = (
        path for package in packages for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".json", ".yaml")
    )
    return {path: path.stat().st_mtime for path in files}


def _difference(expected: str, found: str) -> str:
    """Where two texts part."""
    place = next((each for each, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(expected))
    around = slice(max(place - 150, 0), place + 150)
    return f"...{found[around]}... instead of ...{expected[around]}..."


def _check_work(report: KillReport, place: Place, life: Life, before: dict[str, object], where: str) -> None:
    """What is kept, what was done again, and whether it can be read."""
    command = place.command
    try:
        now = command.kept(place.folder)
        lost = [key for key, value in before.items() if now.get(key) != value]
        if lost:
            report.findings.append(f"{where}: {len(lost)} finished before are lost or done again, such as {lost[0]}")
        if (told := command.told(life.output)) > len(now.keys() - before.keys()):
            report.findings.append(f"{where}: {told} told as finished, {len(now.keys() - before.keys())} are there")
        twice = [what for what, count in Counter(command.work(place.folder)).items() if count > 1]
        if twice:
            report.findings.append(f"{where}: done twice: {twice[0]}")
        command.read(place.folder)
    except Exception as error:
        report.findings.append(f"{where}: the folder cannot be read: {type(error).__name__}: {error}")


def _check_end(
    report: KillReport, place: Place, life: Life, name: str | None, litter: Sequence[str], where: str,
    expected: object = None,
) -> None:  # fmt: skip
    """How it ended, and what is left of it; ``litter`` was there before, of lives that were killed. ``expected``: the
    result of a life to the end.
    """
    report.lives["to the end" if name is None else name] += 1
    if name is not None:
        report.slowest_end = max(report.slowest_end, life.end_seconds)
    report.slowest_process = max(report.slowest_process, life.process_seconds)
    # Or ended before it held anything (-15), or when all was done. Where Ctrl-C met code that Python's C part runs from
    # text, Python in the end sends itself the signal (-2), which shells show as 130 too.
    allowed = {None: (0,), "KILL": (-9, 0), "TERM": (143, -15, 0), "INT": (130, -2, 0)}[name]
    said = name not in ("TERM", "INT") or life.status in (-15, 0) or "stopped" in life.output
    said = said or (life.status == -2 and _is_done(place, expected))
    if life.status not in allowed or not said:
        report.findings.append(f"{where}: status {life.status}: {life.output[-1500:]}")
    if (told := re.search("Traceback|Exception ignored", life.output)) is not None:
        report.findings.append(f"{where}: a traceback: {life.output[max(0, told.start() - 200) :][:2500]}")
    if life.left:
        report.findings.append(f"{where}: still there: {'; '.join(each[:150] for each in life.left)}")
    temporary = [each for each in place.temporary() if name is None or each not in litter]
    if name != "KILL" and temporary:
        report.findings.append(f"{where}: temporary files are left: {', '.join(temporary)}")
    shutil.rmtree(place.folder / "tmp")
    (place.folder / "tmp").mkdir()


def _is_done(place: Place, expected: object) -> bool:
    """Whether all of the work is there: then Ctrl-C may have met what is left of Python in the end."""
    try:
        return expected is not None and place.command.result(place.folder) == expected
    except Exception:
        return False


def twice(command: KilledCommand, folder: Path, pause: float = 0.0) -> KillReport:
    """Two lives at the same time in one folder, the second one ``pause`` seconds later."""
    report, place = KillReport(command.name), Place(command, folder)
    first = place.start()
    time.sleep(pause)
    second = place.start()
    ends = [(_awaited(each)[0], log.read_text(errors="replace"), each.pid) for each, _, log in (first, second)]
    report.lives.update(f"status {status}" for status, _, _ in ends)
    for each, mark, _ in (first, second):
        if left := _left_behind(mark, each.pid)[0]:
            report.findings.append(f"still there: {left[0]}")
    refused = [(text, ends[1 - index][2]) for index, (status, text, _) in enumerate(ends) if status == 2]
    for text, other in refused:
        line = text.strip().splitlines()[-1]
        if not line.startswith("error: ") or f"process {other}" not in line:
            report.findings.append(f"refused without naming the other one: {text[-500:]}")
    if sorted(status for status, _, _ in ends if status is not None) not in ([0, 2], [0, 0]):
        said = " / ".join(f"{status}: {text[-800:]}" for status, text, _ in ends)
        report.findings.append(f"ended with {said}")
    done = [what for what, count in Counter(command.work(folder)).items() if count > 1]
    if done:
        report.findings.append(f"done twice: {done[0]}")
    command.read(folder)
    if temporary := place.temporary():
        report.findings.append(f"temporary files are left: {', '.join(temporary)}")
    for line in report.findings:
        print(f"{command.name}: {line}", flush=True)
    return report


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--times", type=int, default=20, help="lives that each signal ends, of each command")
    parser.add_argument("--signals", default="KILL,TERM,INT", help="which, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="another one for other moments")
    parser.add_argument("--twice", action="store_true", help="two at the same time in one folder instead")
    parser.add_argument("--loaded", action="store_true", help="lives are forks of a process that has their libraries")
    parser.add_argument("--pause", type=float, default=0.0, help="with --twice: seconds between the two")
    asked = parser.parse_args()
    reports = []
    for name in asked.commands or COMMANDS:
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            if asked.twice:
                reports.append(twice(COMMANDS[name], Path(folder) / "both", asked.pause))
            else:
                with LoadedPrograms() if asked.loaded else nullcontext() as programs:
                    signals = asked.signals.split(",")
                    reports.append(kill(COMMANDS[name], asked.times, signals, asked.seed, Path(folder), programs))
        print(reports[-1].line(), flush=True)
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
