"""Networks never seen, tuned for no time and for a minute, beside the same networks tuned fully, in turns.

    python -m lab.bench.zero_trials build/models/*/

Each folder is a build that `tune` made of one network. Its records, and all kernels that other networks share with it,
are left out of the records that are shipped for this CPU (or of those in ``--records``), the ranking is learned anew
from the rest, and `tune` builds the network from that with ``--minutes 0`` and ``--minutes 1``. A row says how many
times as long as the full build each takes (median over rounds in which all take turns), and what making it took: wall
time, and processor time of all its processes.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import typer

from costmodel.base.errors import InputError, ProjectError, Say
from costmodel.base.process import threads_to_use
from fusion.comparing.compare import build_workload
from fusion.comparing.engine import ENGINES, TUNED, Unavailable
from fusion.comparing.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.timing import EngineTiming, Sampling
from fusion.comparing.timing import measure_engines as measure_in_turns
from fusion.model.build_folder import SUMMARY, Artifact, check_runnable, read_artifact
from fusion.model.named_arrays import random_arrays
from lab.bench.models import tune
from lab.command_line import program, run
from lab.records import network_name, train_records
from schedules.tuning.shipped_records import DIRECTORY_VARIABLE

FULL = "full"
# Goals: largest latency relative to the full build, by minutes of tuning.
GOALS = {0.0: 1.10, 1.0: 1.03}


@dataclass(frozen=True)
class ShortBuild:
    """Build without its own records: ``ratio`` to the full one, and the cost of making it in seconds."""

    minutes: float
    ratio: float
    wall_seconds: float
    processor_seconds: float


def open_shapes(artifact: Artifact) -> list[str]:
    """Options of `tune` for the inputs whose shape the ONNX file leaves open."""
    import onnx

    model = onnx.load(artifact.manifest.model_path, load_external_data=False)
    static = {
        value.name
        for value in model.graph.input
        if all(dimension.dim_value > 0 for dimension in value.type.tensor_type.shape.dim)
    }
    asked = [info for info in artifact.manifest.inputs if info.name not in static]
    return [word for info in asked for word in ("--shape", f"{info.name}={','.join(map(str, info.shape))}")]


def tune_build(artifact: Artifact, minutes: float, output: Path, records: Path) -> tuple[float, float]:
    """Build the network of ``artifact`` into ``output`` from ``records`` only; returns wall and processor seconds."""
    options = ["--minutes", f"{minutes:g}", "--threads", str(artifact.manifest.threads), *open_shapes(artifact)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    tune(Path(artifact.manifest.model_path), output, *options, environment={DIRECTORY_VARIABLE: str(records)})
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, minutes: Sequence[float], records: Path | None, scratch: Path) -> list[ShortBuild]:
    """Measure the network of one folder for each of ``minutes``."""
    artifact = read_artifact(folder)
    own = scratch / "records"
    train_records(records, [network_name(folder)], own)
    costs = {each: tune_build(artifact, each, scratch / f"{each:g}", own) for each in minutes}
    builds = {FULL: folder, **{f"{each:g}": scratch / f"{each:g}" for each in minutes}}
    timings = compare_builds(builds, say=lambda line: print(line, file=sys.stderr))
    return [ShortBuild(each, timings[f"{each:g}"].ratio, *costs[each]) for each in minutes]


def table(found: dict[str, list[ShortBuild]], minutes: Sequence[float]) -> str:
    """Markdown table: a line per network, the geometric means, and the number of networks that reached the goal."""
    heads = "".join(f" {each:g} min: times as long | wall s | processor s |" for each in minutes)
    lines = [f"| network |{heads}", "|---|" + "---|---|---|" * len(minutes)]
    for network, builds in found.items():
        cells = (f" {each.ratio:.3f} | {each.wall_seconds:.0f} | {each.processor_seconds:.0f} |" for each in builds)
        lines.append(f"| {network} |{''.join(cells)}")
    sums = []
    for index, each in enumerate(minutes):
        ratios = [builds[index].ratio for builds in found.values()]
        goal = GOALS[each]
        reached = f"{sum(ratio <= goal for ratio in ratios)} within {goal - 1:.0%}"
        sums.append(f" {geometric_mean(ratios):.3f} (worst {max(ratios):.3f}, {reached}) | | |")
    return "\n".join([*lines, f"| geometric mean of {len(found)} |{''.join(sums)}"])


def compare_builds(
    folders: Mapping[str, Path],
    threads: int | None = None,
    sampling: Sampling | None = None,
    say: Say = lambda _: None,
) -> dict[str, EngineTiming]:
    """Time the builds in ``folders`` in turns, each in its own process; the ratios are to the first of them.

    ``threads`` defaults to those that the first was tuned for. ``InputError`` for a folder that is not a complete
    build, builds of different models, and one that fails.
    """
    artifacts = {name: read_artifact(folder) for name, folder in folders.items()}
    baseline, first = next(iter(artifacts.items()))
    used = threads_to_use(threads, first.manifest.threads)
    inputs = random_arrays(first.manifest.inputs)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, artifact in artifacts.items():
            check_runnable(artifact)
            _require_same_model(artifact, first)
            say(f"loading {artifact.directory}")
            worker = stack.enter_context(Worker(ENGINES[TUNED], used))
            try:
                worker.prepare(build_workload(artifact, used), PREPARE_TIMEOUT_SECONDS)
                worker.bind(inputs)
            except (EngineFailed, Unavailable) as error:
                raise InputError(
                    f"{artifact.directory}: the network cannot be run: {error}; tune the model again on this machine"
                ) from error
            workers[name] = worker
        try:
            measured = measure_in_turns(workers, baseline, sampling or Sampling(), say)
        except EngineFailed as error:
            raise InputError(
                f"{first.directory}: the network failed while it was timed: {error}; "
                "tune the model again on this machine"
            ) from error
    for name, reason in measured.failures.items():
        raise InputError(
            f"{artifacts[name].directory}: the network failed while it was timed: {reason}; "
            "tune the model again on this machine"
        )
    return dict(measured.timings)


def _require_same_model(artifact: Artifact, first: Artifact) -> None:
    own, other = artifact.manifest, first.manifest
    if (own.model_sha256, own.inputs) != (other.model_sha256, other.inputs):
        raise InputError(
            f"{artifact.directory}: is of another model, or of other shapes, than {first.directory}; "
            "name builds of one model"
        )


def zero_trials_command(
    builds: Annotated[list[Path], typer.Argument(help="Folders that `fusion tune` wrote, fully tuned.")],
    records: Annotated[Path | None, typer.Option(help="Folder of all CPUs' records; default: what is shipped.")] = None,
) -> None:
    """Build networks from the records of others and compare them with the full builds."""
    found: dict[str, list[ShortBuild]] = {}
    for folder in builds:
        if not (folder / SUMMARY).is_file():
            print(f"{folder}: no build, left out", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="zero-trials-") as scratch:
            try:
                found[network_name(folder)] = measure(folder, list(GOALS), records, Path(scratch))
            except ProjectError as error:  # the others are measured all the same
                print(error, file=sys.stderr)
                continue
        print(table(found, list(GOALS)).splitlines()[-2], flush=True)
    if not found:
        raise InputError("none of these builds could be compared; tune networks first")
    print(table(found, list(GOALS)))


if __name__ == "__main__":
    sys.exit(run(program(zero_trials_command), "lab.bench.zero_trials"))
