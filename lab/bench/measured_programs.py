"""Training programs of other people as they are, timed on the GPU at hand, and what ``python -m e2e predict`` says.

    python -m lab.bench.measured_programs fetch --to FOLDER
    python -m lab.bench.measured_programs run FOLDER -o OUT [--minutes 5] [--resume] [--device cpu]
    python -m lab.bench.measured_programs compare OUT/programs.csv FOLDER --gpu h200-sxm
    python -m lab.bench.measured_programs fetch --list lab/bench/public_programs.yaml --to FOLDER
    python -m lab.bench.measured_programs table FOLDER

``programs.yaml`` lists them, the most telling first. ``fetch`` needs the Python package index; its folder (14 MB) is
carried to the GPU, where ``run`` makes up the data and needs no network. A program runs as ``__main__`` in a process of
its own, which has imported the libraries before its turn (several do so at a time, to spare device time); a hook of
its optimizer times steady steps, then traces a few with shapes and a few without (Kineto), and ends the program from
inside.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError, Say
from costmodel.base.input_files import read_text
from costmodel.measure.device import open_device, provenance, synchronize
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget
from lab.command_line import run

LIST, TRIED = (Path(__file__).with_name(f"{name}.yaml") for name in ("programs", "public_programs"))
PACKAGES, DATA, OUT = "packages", "data", "out"  # beside the folders of the programs


@dataclass(frozen=True)
class Program:
    """Entry of ``programs.yaml``, which says what the fields are; the program comes from ``source``, ``module`` or
    ``text``.
    """

    name: str
    about: str
    licence: str = ""
    source: str = ""
    members: Sequence[str] = ()
    edits: Sequence[tuple[str, str]] = ()
    module: str = ""
    text: str = ""
    arguments: str = ""
    more: str = ""
    launcher: str = "python"
    gpu: str = ""
    gpus: int = 0
    compiled: bool = False
    predicted: Mapping[str, Any] | None = None

    @property
    def launched(self) -> list[str]:
        """Words of the launcher."""
        return shlex.split(self.launcher)

    def command(self, device: str) -> list[str]:
        """Return what stands after ``python``, or after the launcher."""
        start = ["-m", self.module] if self.module else [Path(each).name for each in self.members[:1]]
        start = start or ["program.py"] * bool(self.text)
        return start + [device if each == "cuda" else each for each in shlex.split(f"{self.arguments} {self.more}")]


@dataclass(frozen=True)
class ProgramList:
    """Content of ``programs.yaml``: ``packages`` to carry, ``helpers`` (modules of ours: name to text), programs."""

    packages: Sequence[str]
    helpers: Mapping[str, str]
    programs: Sequence[Program]


def read_list(path: Path = LIST) -> ProgramList:
    """Read a list of programs."""
    content = yaml.safe_load(read_text(path, "settings"))
    programs = [Program(**each) for each in content["programs"]]
    return ProgramList(content.get("packages", ()), content.get("helpers", {}), programs)


# --- fetch -----------------------------------------------------------------------------------------------------------


def fetch(listed: ProgramList, folder: Path, report: Say) -> None:
    """Write the programs and the packages that they need into ``folder``; ``InputError`` if an edit does not apply."""
    packages = folder / PACKAGES
    packages.mkdir(parents=True, exist_ok=True)
    if listed.packages:
        _pip("install", "--no-compile", "--upgrade", "--target", str(packages), *listed.packages)
    for name, text in listed.helpers.items():
        (packages / name).write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="programs-") as scratch:
        for source in sorted({each.source for each in listed.programs if each.source}):
            report(f"{source}: source distribution")
            _pip("download", "--no-binary", ":all:", "--dest", f"{scratch}/{source}", source)
        for program in listed.programs:
            place = folder / program.name
            place.mkdir(exist_ok=True)
            for name, text in source_of(program, Path(scratch) / program.source).items():
                (place / name).write_text(text, encoding="utf-8")
    report(f"{len(listed.programs)} programs in {folder}")


def _pip(command: str, *arguments: str) -> None:
    line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"pip {command} {arguments[-1]}: {_last_line(done.stderr)}; is an index within reach?")


def source_of(program: Program, downloads: Path) -> dict[str, str]:
    """Return the files of a program, edited: name to text. ``downloads``: folder of its source distribution."""
    if not program.source:
        return {"program.py": program.text} if program.text else {}
    with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
        root = archive.getnames()[0].split("/")[0]
        found = {each: archive.extractfile(f"{root}/{each}") for each in program.members}
        files = {Path(name).name: file.read().decode() for name, file in found.items() if file is not None}
    for old, new in program.edits:
        holders = [name for name, text in files.items() if text.count(old) == 1]
        if len(holders) != 1:
            raise InputError(f"{program.name}: {old!r} is not in one place of {program.source}; mend {LIST.name}")
        files[holders[0]] = files[holders[0]].replace(old, new)
    return files


# --- data that is made up --------------------------------------------------------------------------------------------


def make_data(folder: Path) -> None:
    """Write the data of the programs to ``folder/data``, some 450 MB in ten seconds, unless it is there."""
    if (folder / DATA).exists():
        return
    import numpy
    import tokenizers
    from PIL import Image

    random, place = numpy.random.default_rng(0), folder / f"{DATA}.part"
    shutil.rmtree(place, ignore_errors=True)

    def pixels(*shape: int) -> Any:
        return random.integers(0, 256, shape, dtype=numpy.uint8)

    def pickled(path: Path, content: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(content))

    for name, labels, classes, parts in (
        ("cifar-10-batches-py", "label", 10, {f"data_batch_{n}": 5000 for n in range(1, 6)} | {"test_batch": 1000}),
        ("cifar-100-python", "fine_label", 100, {"train": 25600, "test": 1000}),
    ):
        for part, count in parts.items():
            known = {"data": pixels(count, 3072), f"{labels}s": [each % classes for each in range(count)]}
            pickled(place / "cifar" / name / part, known)
        meta = "batches.meta" if classes == 10 else "meta"
        pickled(place / "cifar" / name / meta, {f"{labels}_names": [*map(str, range(classes))]})
    for part in ("images", "names"):
        (place / part).mkdir()
    for number in range(4096):
        Image.fromarray(pixels(64, 64, 3)).save(place / "images" / f"{number}.jpg")
    (place / "words").mkdir()
    words = {**{f"{number:04}": number for number in range(2_000)}, "<unk>": 2_000, "<s>": 2_001, "</s>": 2_002}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    split.add_special_tokens(["<s>", "</s>"])
    split.save(str(place / "words" / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    (place / "words" / "tokenizer_config.json").write_text(json.dumps(marks), encoding="utf-8")
    letters = numpy.array([*"abcdefghijklmnopqrstuvwxyz"])
    for language in range(18):
        names = ["".join(random.choice(letters, random.integers(8, 15))) + "\n" for _ in range(1000)]
        (place / "names" / f"language{language}.txt").write_text("".join(names), encoding="utf-8")
    with gzip.open(place / "enwik8.gz", "wb", compresslevel=0) as file:
        file.write(96 * bytes(random.integers(32, 127, 1_000_000, dtype=numpy.uint8)))
    sizes = {"train": 12800, "test": 64}
    spheres = {part: random.random((count, 60, 60), dtype=numpy.float32) for part, count in sizes.items()}
    labelled = {part: {"images": each, "labels": random.integers(0, 10, len(each))} for part, each in spheres.items()}
    with gzip.open(place / "s2_mnist.gz", "wb", compresslevel=0) as file:
        pickle.dump(labelled, file)
    place.rename(folder / DATA)


# --- run -------------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("name", "median_s", "minimum_s", "segments", "steps", "peak_memory_bytes", "reserved_memory_bytes"),
    *("trace", "error"),
)
SEGMENTS, _SEGMENT_SECONDS, _SEGMENT_STEPS, _TRACED_STEPS = 3, 0.7, 3, 2
_AT_A_TIME = 7
_WARM = ((6, 1.2), (4, 6.0))  # steps and seconds since the first one: either is enough
_MOST_SECONDS = {False: 28.0, True: 75.0}  # of a program; compiled
_LIBRARIES = ("torchvision", "transformers", "timm", "accelerate", "lightning", "torch_geometric", "peft", "pandas")


def run_programs(
    listed: ProgramList, folder: Path, output: Path, minutes: float, resume: bool, report: Say, device: str = "cuda"
) -> Path:
    """Write ``output/programs.csv``, ``.json``, traces and a log for each program; return the path of the table.

    A program that fails, or is not timed within its seconds, is a row with an ``error``.
    """
    budget = TimeBudget(minutes)
    make_data(folder)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:  # so that no context lasts here
        origin = pool.submit(_provenance, device).result()
    with Table(output, "programs", COLUMNS, origin, resume) as table:
        done = {row["name"] for row in table.rows}
        progress = SuiteProgress(budget, report, len(listed.programs))
        left = [each for each in listed.programs if each.name not in done]
        for start in range(0, len(left), _AT_A_TIME):
            runs = [_Run(each, folder.resolve(), output.resolve(), device) for each in left[start : start + _AT_A_TIME]]
            try:
                for run in runs:  # imports would disturb what is timed
                    run.wait_until_ready()
                for run in runs:
                    if budget.left(run.most_seconds / 2):
                        table.add(name=run.program.name, **run.measure())
                    progress.step(run.program.name)
            finally:
                for run in runs:
                    run.end()
        report(f"programs measured in {budget.elapsed:.0f} s; {table.path}")
    return table.path


def _provenance(device: str) -> dict[str, Any]:
    return provenance(open_device(device))


class _Run:
    """Process in which one of the listed programs is timed: it imports the libraries, waits until it is told to run,
    and is killed at the end with all processes that it has started.

    It is no fork of a process with the libraries: some ask the driver for GPUs on import, after which a fork cannot
    use CUDA.
    """

    def __init__(self, program: Program, folder: Path, output: Path, device: str) -> None:
        self.program, self.folder = program, folder
        self.most_seconds = _MOST_SECONDS[program.compiled]
        self.log = output / f"{program.name}.log"
        reading, writing = os.pipe()
        self._told = os.fdopen(reading, "rb")
        line = [sys.executable, "-m", "lab.bench.measured_programs", "child", str(folder), "-o", str(output)]
        paths = [*sys.path, str(folder / PACKAGES)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*line, "--device", device, "--writing", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(writing,),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.close(writing)

    def wait_until_ready(self) -> None:
        """Return when the libraries are imported, or the process has ended."""
        self._told.readline()

    def measure(self) -> dict[str, Any]:
        """Return the row of the program."""
        _empty(self.folder / OUT)
        end = time.monotonic() + self.most_seconds
        with suppress(BrokenPipeError), self._stdin:
            self._stdin.write(json.dumps(asdict(self.program)).encode())
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        ended = self._process.returncode is not None
        self.end()
        row = self._told.read()
        if row:
            return dict(json.loads(row))
        said = _last_line(self.log.read_text(errors="replace"))
        return {"error": said if ended else "no steps timed within its seconds"}

    def end(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _last_line(text: str, most: int = 160) -> str:
    return (text.strip().splitlines() or ["ended without a word"])[-1][:most]


def _run_as_main(folder: Path, output: Path, device: str, writing: int) -> None:
    from torch.optim import optimizer

    for name in _LIBRARIES:
        with suppress(Exception):  # the programs that need it say so
            importlib.import_module(name)
    os.write(writing, b"ready\n")
    program = Program(**json.loads(sys.stdin.read()))
    watching = _watch(program.name, output, open_device(device), writing)
    first: list[int] = []

    def stepped(of: Any, *_: Any) -> None:
        first.append(id(of))
        if id(of) == first[0]:  # of several optimizers the one that steps first
            next(watching)

    optimizer.register_optimizer_step_post_hook(stepped)
    os.chdir(folder / program.name)
    command = program.command(device)
    sys.path.insert(0, os.getcwd())
    sys.argv = command[1:] if program.module else command
    if program.module:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
    print(f"ended after {len(first)} steps of its optimizers")


def _watch(name: str, output: Path, device: Any, writing: int) -> Iterator[None]:
    """Time and trace the steps; resumed after each step of the optimizer. Ends the process."""
    import torch
    from torch.profiler import ProfilerActivity

    begin = time.perf_counter()
    for step in itertools.count(1):
        if any(step >= steps and time.perf_counter() - begin > seconds for steps, seconds in _WARM):
            break
        yield
    segments: list[float] = []
    total = 0
    for _ in range(SEGMENTS):
        synchronize(device)
        begin, steps = time.perf_counter(), 0
        while steps < _SEGMENT_STEPS or time.perf_counter() - begin < _SEGMENT_SECONDS:
            yield
            steps += 1
        synchronize(device)
        segments.append((time.perf_counter() - begin) / steps)
        total += steps
    row: dict[str, Any] = {"segments": " ".join(f"{each:.5e}" for each in segments), "steps": total}
    row |= {"median_s": f"{statistics.median(segments):.5e}", "minimum_s": f"{min(segments):.5e}"}
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_memory_bytes"] = torch.cuda.max_memory_reserved()
    os.write(writing, json.dumps(row | {"trace": f"trace-{name}.json.gz"}).encode())
    for kind, shapes in (("shapes", True), ("trace", False)):
        path = str(output / f"{kind}-{name}.json.gz")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=_TRACED_STEPS, repeat=1)
        with torch.profiler.profile(activities=activities, record_shapes=shapes, schedule=schedule) as profiler:
            for _ in range(_TRACED_STEPS + 1):
                yield
                profiler.step()
        profiler.export_chrome_trace(path)
    os._exit(0)


# --- compare ---------------------------------------------------------------------------------------------------------

HEADER = (
    *("program", "measured ms", "predicted ms (80 %)", "error", "inside"),
    *("GiB in use: measured", "predicted", "ms before measuring", "its error", "inside"),
)


def compare(table: Path, listed: ProgramList, folder: Path, gpu: str) -> Iterator[str]:
    """Yield a Markdown table of what ``table`` measured against the prediction of each program as it is."""
    make_data(folder)
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(read_text(table, "table")))}
    errors: list[tuple[float, bool]] = []
    for program in (each for each in listed.programs if each.name in rows):
        row = rows[program.name]
        if row["error"]:
            yield f"| {program.name} | {row['error']} |{' |' * (len(HEADER) - 2)}"
            continue
        measured = 1e3 * float(row["median_s"])
        peak = f"{int(row['peak_memory_bytes']) / 2**30:.2f}" if row["peak_memory_bytes"] else ""
        cells = [program.name, f"{measured:.2f}", *_judged(predict(program, folder, gpu), measured, errors)]
        cells[5:5] = [peak]
        if program.predicted:
            cells += _judged(program.predicted, measured, [])[:3]
        yield f"| {' | '.join(cells + [''] * (len(HEADER) - len(cells)))} |"
    if errors:
        mean = statistics.fmean(error for error, _ in errors)
        yield f"{len(errors)} programs: {mean:.1%} mean error, {sum(inside for _, inside in errors)} inside"


def _judged(said: Mapping[str, Any] | str, measured: float, errors: list[tuple[float, bool]]) -> list[str]:
    """Return cells of a prediction, or of the line that is in its place; its error is added to ``errors``."""
    if isinstance(said, str):
        return [said, "", "", ""]
    error, inside = said["ms"] / measured - 1, said["low"] <= measured <= said["high"]
    errors.append((abs(error), inside))
    times = f"{said['ms']:.2f} ({said['low']:.2f} to {said['high']:.2f})"
    return [times, f"{error:+.1%}", "yes" if inside else "no", f"{said['gib']:.2f}"]


def predict(program: Program, folder: Path, gpu: str) -> dict[str, float] | str:
    """Return the prediction of a program as it is, or the line that there is instead."""
    answer = ask(program, folder, gpu)
    if isinstance(answer, str):
        return answer
    low, high = answer["interval_seconds"]
    times = {"ms": 1e3 * answer["iteration_seconds"], "low": 1e3 * low, "high": 1e3 * high}
    reserve = answer["memory_breakdown"].get("reserve", 0)  # which `max_memory_allocated` does not count
    return times | {"gib": (answer["peak_memory_bytes"] - reserve) / 2**30}


def ask(program: Program, folder: Path, gpu: str) -> dict[str, Any] | str:
    """Return the JSON answer of ``python -m e2e predict`` for a program, or the line that there is instead."""
    _empty(folder / OUT)
    count = ["--gpus", str(program.gpus)] if program.gpus else []
    options = ["-m", "e2e", "predict", "--gpu", gpu, *count, "--json", "--data", "synthetic", "--"]
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{(folder / PACKAGES).resolve()}"
    inherited = os.environ.get("PYTHONPATH", "")
    commands = f"{(folder / PACKAGES / 'bin').resolve()}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": f"{paths}{os.pathsep}{inherited}", "PATH": commands}
    line = [sys.executable, *options, *program.launched, *program.command("cuda")]
    done = subprocess.run(line, cwd=folder / program.name, env=environment, capture_output=True, text=True, check=False)
    return _last_line(done.stderr, 400) if done.returncode else dict(json.loads(done.stdout))


def tried(listed: ProgramList, folder: Path, only: str) -> Iterator[str]:
    """Yield a Markdown table of what each program whose name contains ``only`` is answered: its step or a line, the
    seconds of the whole command, and what was made up.
    """
    make_data(folder)
    yield "| program | command | GPUs | answer | seconds | notes |"
    yield "|---|---|---|---|---|---|"
    answered = 0
    asked = [each for each in listed.programs if only in each.name]
    for program in asked:
        begin = time.monotonic()
        answer = ask(program, folder, program.gpu)
        seconds = f"{time.monotonic() - begin:.0f}"
        command = " ".join([*program.launched, *map(shlex.quote, program.command("cuda"))])
        if isinstance(answer, str):
            gpus, told, notes = program.gpu, answer, ""
        else:
            low, high = (1e3 * each for each in answer["interval_seconds"])
            gpus = f"{answer['gpus']} {program.gpu}"
            told = f"{1e3 * answer['iteration_seconds']:.4g} ms ({low:.4g} to {high:.4g})"
            notes = "; ".join(answer["notes"])
            answered += 1
        cells = (each.replace("|", "/") for each in (program.name, command, gpus, told, seconds, notes))
        yield f"| {' | '.join(cells)} |"
    yield f"{len(asked)} programs: {answered} answered, {len(asked) - answered} with a line instead"


# --- command line ----------------------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_Folder = Annotated[Path, typer.Argument(help="Folder that `fetch` wrote.")]
_List = Annotated[Path, typer.Option("--list", help="Another list of programs.")]


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command("fetch")
@guarded()
def fetch_command(to: Annotated[Path, typer.Option(help="Folder to write.")], listing: _List = LIST) -> None:
    """Bring the programs, and the packages that they need, from the Python package index."""
    fetch(read_list(listing), to, _report)


@app.command("run")
@guarded("stopped; what was measured is kept, --resume continues it")
def run_command(
    folder: _Folder,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the table, the traces and logs.")],
    minutes: Annotated[float, typer.Option(help="Time budget; what is measured by then is kept.")] = 5.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the code.")] = "cuda",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the table that -o holds.")] = False,
    listing: _List = LIST,
) -> None:
    """Time the steps of the programs on the GPU at hand."""
    run_programs(read_list(listing), folder, output, minutes, resume, _report, device)


@app.command("child", hidden=True)
def child_command(
    folder: _Folder,
    output: Annotated[Path, typer.Option("-o")],
    device: Annotated[str, typer.Option()],
    writing: Annotated[int, typer.Option()],
) -> None:
    """Wait for a program on the standard input, then run it; its row goes to the descriptor ``writing``."""
    try:
        _run_as_main(folder, output, device, writing)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@app.command("compare")
@guarded()
def compare_command(
    table: Annotated[Path, typer.Argument(help="programs.csv of a run.")],
    folder: _Folder,
    gpu: Annotated[str, typer.Option(help="GPU that was measured: a name or a file.")],
    listing: _List = LIST,
) -> None:
    """Predict each measured program as it is, and print both."""
    for line in compare(table, read_list(listing), folder, gpu):
        print(line, flush=True)


@app.command("table")
@guarded()
def table_command(
    folder: _Folder,
    only: Annotated[str, typer.Option(help="Programs whose names contain this.")] = "",
    listing: _List = TRIED,
) -> None:
    """Predict each program as it is, and print answers, lines, seconds and what was made up."""
    for line in tried(read_list(listing), folder, only):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(run(app, "lab.bench.measured_programs"))
