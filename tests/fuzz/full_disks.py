"""``python -m tests.fuzz.full_disks``: every command that writes, on disks that are full after so many bytes.

The disk is a small ``tmpfs`` (mounting needs root). On it a command ends with status 2 and one line that says so, as
does one for which there is room with 0, and no file is left half written: with room at last the same command works.
Exit status 1 where something was found, 77 where nothing can be mounted. ``--loaded``: commands are forks of a process
that has their libraries.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.killed_commands import COMMANDS, CONFIGURATION
from tests.fuzz.loaded_programs import LoadedPrograms
from tests.fuzz.option_inputs import write_arrays, write_networks
from tests.fuzz.seeds import TABLES, onnx_models

ROOT = Path(__file__).resolve().parents[2]
KIBIBYTES = (4, 16, 64, 256, 1024)
ENOUGH = 256 << 10  # KiB
SAID = "o space left"  # "No space left on device" in the system's words, "no space left on" in ours


@dataclass(frozen=True)
class WritingCommand:
    """``words``: what Python is given; inputs lie in the first folder, ``prepare`` makes them, outputs on the disk.

    ``furnish``: puts on the disk what is there before, which takes nothing of its room.
    """

    name: str
    words: Callable[[Path, Path], Sequence[object]]
    prepare: Callable[[Path], object]
    needs: tuple[str, ...] = ()
    furnish: Callable[[Path], object] = lambda disk: None


def _long(name: str, *needs: str) -> WritingCommand:
    """One of those that are killed too, whose output ``out`` in its place is the disk here."""
    command = COMMANDS[name]

    def words(place: Path, disk: Path) -> list[str]:
        return [str(disk / "out") if word == str(place / "out") else word for word in command.words(place)]

    return WritingCommand(name, words, command.prepare, command.needs)


def _configuration(place: Path) -> None:
    (place / "config.json").write_text(json.dumps(CONFIGURATION))


def _model(place: Path) -> None:
    (place / "model.onnx").write_bytes(onnx_models()[0].SerializeToString())


def _tables(place: Path) -> None:
    (place / "tables.yaml").write_text(json.dumps(TABLES[0]))


def _networks(place: Path) -> None:
    write_networks(place)
    write_arrays(place)


@functools.cache
def _build() -> Path:
    """A build, made once; it goes with the system's temporary files."""
    place = Path(tempfile.mkdtemp(prefix="full-disk-build-"))
    write_networks(place)
    asked = ["tune", place / "m.onnx", "-o", place / "build", "--trials", 1, "--threads", 1]
    subprocess.run([sys.executable, "-m", "fusion", *map(str, asked)], cwd=ROOT, check=True, capture_output=True)
    return place / "build"


def _furnish_build(disk: Path) -> None:
    shutil.copytree(_build(), disk / "build")
    (disk / "build" / "report.html").unlink(missing_ok=True)


def _predict(*option: str) -> Callable[[Path, Path], Sequence[object]]:
    def words(place: Path, disk: Path) -> Sequence[object]:
        asked = ["--model-config", place / "config.json", "--gpu", "t4", "--sequence-length", 64]
        return ["-m", "e2e", "predict", *asked, option[0], disk / option[1]]

    return words


def _sweep(*option: str) -> Callable[[Path, Path], Sequence[object]]:
    def words(place: Path, disk: Path) -> Sequence[object]:
        asked = ["--model", place / "config.json", "--gpu", "h100-sxm", "--gpus", 2, "--parallel", "dp=2"]
        kept = ["--sequence-length", 64, "-o", place / "sweep", "--workers", 1]
        return ["-m", "e2e", "sweep", *asked, *kept, option[0], disk / option[1]]

    return words


COMMON = ["--machine", "xeon-amx-2c", "--threads", "1"]
WRITING = {
    each.name: each
    for each in (
        *map(_long, ("tune", "records", "sweep", "fit", "measure")),
        WritingCommand("predict-report", _predict("--report", "r.html"), _configuration, ("torch", "transformers")),
        WritingCommand("predict-timeline", _predict("--timeline", "t.json"), _configuration, ("torch", "transformers")),
        WritingCommand("sweep-report", _sweep("--report", "r.html"), _configuration, ("torch", "transformers")),
        WritingCommand("sweep-plot", _sweep("--plot", "p.png"), _configuration, ("torch", "matplotlib")),
        WritingCommand(
            "shard",
            lambda place, disk: [
                *("-m", "e2e", "shard", "--tables", place / "tables.yaml", "--gpu", "a100-sxm-80gb", "--gpus", 8),
                *("--batch-size", 4096, "-o", disk / "plan.json"),
            ],
            _tables,
        ),
        WritingCommand(
            "quantize",
            lambda place, disk: ["-m", "fusion", "quantize", place / "model.onnx", "--random", "-o", disk / "q.onnx"],
            _model, ("onnxruntime", "tvm"),
        ),
        WritingCommand(
            "analyze-picture",
            lambda place, disk: [
                "-m", "fusion", "analyze", place / "model.onnx", *COMMON, "--picture", disk / "roofline.svg",
            ],
            _model, ("matplotlib", "tvm"),
        ),
        WritingCommand(
            "report", lambda place, disk: ["-m", "fusion", "report", disk / "build"], lambda place: None,
            ("tvm", "onnxruntime"), _furnish_build,
        ),
        WritingCommand(
            "run",
            lambda place, disk: [
                "-m", "fusion", "run", _build(), "--input", place / "x.npz", "--output", disk / "y.npz",
            ],
            _networks, ("tvm", "onnxruntime"),
        ),
        WritingCommand(
            "collect",
            lambda place, disk: ["-m", "fusion", "records", "collect", _build(), "--directory", disk / "records"],
            lambda place: None, ("tvm", "onnxruntime"),
        ),
        WritingCommand(
            "measure-models",
            lambda place, disk: [
                "-m", "e2e", "measure", "--device", "cpu", "--minutes", 0.02, "--resume", "-o", disk / "out",
            ],
            lambda place: None, ("torch", "transformers"),
        ),
        WritingCommand(
            "calibrate",
            lambda place, disk: ["-m", "costmodel", "calibrate", "--quick", "--threads", 1, "-o", disk / "host.yaml"],
            lambda place: None,
        ),
    )
}  # fmt: skip


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Callable[[int], None]]:
    """A disk of so many KiB at ``folder``; what is given makes it larger. ``PermissionError`` where none can be."""

    def mount(*words: str) -> None:
        done = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PermissionError(done.stderr.strip())

    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={kibibytes}k", "none")
    try:
        yield lambda larger: mount("-o", f"remount,size={larger}k")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_on_full_disk(
    command: WritingCommand, kibibytes: int, place: Path, programs: LoadedPrograms | None = None
) -> tuple[str, list[str]]:
    """What became of ``command`` on a disk of so many KiB, and what is wrong with that; ``place``: for its inputs,
    ``programs``: what it is forked from.
    """
    command.prepare(place)
    disk, where = place / "disk", f"{command.name} with {kibibytes} KiB"
    findings: list[str] = []
    with small_disk(disk, ENOUGH) as resize:
        command.furnish(disk)
        resize(_used_kibibytes(disk) + kibibytes)
        status, output = _run(command, place, disk, programs)
        refused = status == 2
        if refused:
            *_, line = output.strip().splitlines()
            if not line.startswith("error: ") or SAID not in line:
                findings.append(f"{where}: does not say that the disk is full: {output[-600:]}")
        elif status:
            findings.append(f"{where}: status {status}: {output[-1500:]}")
        if "Traceback" in output:
            findings.append(f"{where}: a traceback: {output[-1500:]}")
        left = [path.name for path in disk.rglob("*") if path.name.startswith((".checking", ".staging", ".quantising"))]
        left += [path.name for path in disk.rglob("*.partial")]
        if left:
            findings.append(f"{where}: half of {left[0]} is left")
        if refused:
            resize(ENOUGH)
            status, output = _run(command, place, disk, programs)
            if status:
                findings.append(f"{where}: with room again status {status}: {output[-1500:]}")
    return "refused" if refused else "found room", findings


def _used_kibibytes(disk: Path) -> int:
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize >> 10


def _run(command: WritingCommand, place: Path, disk: Path, programs: LoadedPrograms | None) -> tuple[int, str]:
    words = [*map(str, command.words(place, disk))]
    if programs is not None:
        messages = place / "messages.txt"
        messages.unlink(missing_ok=True)
        status = programs.start(words, ROOT, messages).wait()
        return status, messages.read_text(errors="replace")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _learn(programs: LoadedPrograms, command: WritingCommand, place: Path) -> None:
    """Loads what ``command`` needs, from one that has all the room."""
    disk = place / "disk"
    disk.mkdir()
    command.prepare(place)
    command.furnish(disk)
    programs.learn([*command.words(place, disk)], ROOT)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.full_disks", description=__doc__)
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(WRITING)}; default: all")
    parser.add_argument("--kib", default=",".join(map(str, KIBIBYTES)), help="sizes of the disk, separated by commas")
    parser.add_argument("--loaded", action="store_true", help="commands are forks of a process with their libraries")
    asked = parser.parse_args()
    found = False
    for name in asked.commands or WRITING:
        ends: Counter[str] = Counter()
        with LoadedPrograms() if asked.loaded else nullcontext() as programs:
            if programs is not None:
                with tempfile.TemporaryDirectory(prefix="full-disk-") as place:
                    _learn(programs, WRITING[name], Path(place))
            for size in map(int, asked.kib.split(",")):
                with tempfile.TemporaryDirectory(prefix="full-disk-") as place:
                    try:
                        end, findings = run_on_full_disk(WRITING[name], size, Path(place), programs)
                    except PermissionError as error:
                        print(f"no disk can be mounted: {error}", file=sys.stderr)
                        return 77
                ends[end] += 1
                found = found or bool(findings)
                for each in findings:
                    print(each, flush=True)
        print(f"{name:16} {', '.join(f'{count} {end}' for end, count in ends.items())}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
