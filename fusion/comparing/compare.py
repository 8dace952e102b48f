"""Commands that time a build: ``python -m fusion compare`` times the tuned model and other engines by one protocol,
and compares outputs; ``python -m fusion benchmark`` measures latency and throughput of the tuned network alone.

Each stream of ``benchmark`` is a process with a copy of the network that answers one request after the other, like a
server. All streams run concurrently; TVM's thread pinning is off, or all streams would use the same cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError, Say
from costmodel.base.input_files import find_refusal
from costmodel.base.process import threads_to_use
from fusion.comparing.engine import (
    DEFAULT,
    ENGINES,
    INT8,
    REFERENCE,
    TUNED,
    UNFUSED_ENGINE,
    EngineSpec,
    EngineWorkload,
    Unavailable,
    peers_of,
    select_engines,
)
from fusion.comparing.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.layer_table import LayerTable, lost_layers
from fusion.comparing.output_errors import error_inputs, errors_json
from fusion.comparing.timing import (
    Crew,
    EngineTiming,
    Hired,
    MeasuredEngines,
    NotMeasured,
    Sampling,
    measure_engines,
    quantized_file,
    quantized_from,
)
from fusion.model.build_folder import (
    MODEL,
    UNFUSED_MODULE,
    Artifact,
    check_runnable,
    file_digest,
    model_file,
    read_artifact,
)
from fusion.model.named_arrays import Arrays, DeclaredInput, TensorInfo, random_arrays, read_calibration

# Maximum number of user samples for measuring errors.
MOST_SAMPLES = 200


@dataclass(frozen=True)
class EngineRow:
    """Measurements of one engine.

    Errors are against ONNX Runtime on the model in the precision of its file, over all outputs and ``compared_inputs``
    inputs, random ones and pictures; :class:`fusion.comparing.output_errors.OutputErrors` defines them.
    """

    engine: str
    mode: str
    median_seconds: float
    min_seconds: float
    lower_quartile_seconds: float
    upper_quartile_seconds: float
    # Above 1 if the engine is slower than ours.
    ratio_to_tuned: float
    max_abs_error: float | None
    max_relative_error: float | None
    calls: int
    # Peak memory of the process minus its memory after loading the model
    # (:func:`fusion.comparing.engine_worker.peak_growth`).
    growth_bytes: int | None = None
    mean_relative_error: float | None = None
    cosine: float | None = None
    top1_agreement: float | None = None
    compared_inputs: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``."""

    model: str
    threads: int
    sampling: Sampling
    # The row of ``tuned`` is first.
    rows: tuple[EngineRow, ...]
    not_measured: tuple[NotMeasured, ...]
    inputs: tuple[TensorInfo, ...] = ()
    # Layer times of ours and of the best peer, if a peer is faster or they were requested.
    layers: LayerTable | None = None
    # Reasons for missing layer times of faster peers.
    layers_missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, as documented for ``--json``."""
        return asdict(self)

    def seconds(self, engine: str) -> float | None:
        """Median latency of an engine, or None if it was not measured."""
        return next((row.median_seconds for row in self.rows if row.engine == engine), None)


def compare_command(
    build_dir: Path,
    against: Sequence[str] = DEFAULT,
    *,
    model: Path | None = None,
    quantized: Path | None = None,
    data: Path | None = None,
    beside: Mapping[str, Path] | None = None,
    threads: int | None = None,
    sampling: Sampling | None = None,
    trials_per_task: int = 64,
    layers: bool = False,
    progress: Say = lambda _: None,
    each_round: Say = lambda _: None,
) -> Comparison:
    """Measure the tuned model of ``build_dir`` and the engines named in ``against``.

    - ``model``: ONNX file, if it moved; for a build that was quantised during tuning it may be the float model, which
      is run by engines of other precisions
    - ``quantized``: file run by INT8 engines, which are added if none is named (default: the model itself if quantised,
      the quantised file of one of the builds, or the output of ``fusion quantize`` beside the model)
    - ``data``: samples for measuring errors, as for ``quantize`` (default: generated inputs)
    - ``beside``: row name -> further build of the network, in another precision or with other fusions; with
      ``tvm-unfused`` named, they are timed with fusion off as well
    - ``threads``: default is the number it was tuned for, limited by the cores
    - ``trials_per_task``: effort of ``tvm-metaschedule``
    - ``layers``: report layer times even if no peer is faster
    - ``progress``: callback for stages; ``each_round``: callback for measurement rounds

    Raises ``InputError``, ``MissingDependencyError``.
    """
    artifact = read_artifact(build_dir)
    check_runnable(artifact)
    specs = select_engines(_with_integers(against, quantized))
    unfused = ENGINES[UNFUSED_ENGINE] in specs
    others = _further_builds(beside or {}, artifact, unfused)
    order = [TUNED, *others, *(spec.name for spec in specs[1:])]
    workload = _workload(artifact, model, threads, trials_per_task)
    inputs = error_inputs(workload.inputs) if data is None else _samples(data, workload.inputs)
    has_twin = unfused and _nothing_fused(artifact)
    if has_twin:
        specs.remove(ENGINES[UNFUSED_ENGINE])

    built = [each for each in map(model_file, (artifact, *(build for _, build in others.values()))) if each is not None]

    def file_of_integers() -> Path:
        return quantized_file(workload.model, workload.inputs, workload.outputs, quantized, workload.cache, built)

    if quantized is not None:
        file_of_integers()  # reject a wrong file before engines are loaded
    with ExitStack() as stack:
        crew = Crew(stack, workload, inputs, progress, file_of_integers)
        crew.hire(ENGINES[REFERENCE])  # required as the reference of errors
        crew.hire(ENGINES[TUNED])
        for name, (spec, build) in others.items():
            crew.hire(spec, build, name)
        for spec in specs:
            crew.hire(spec)
        _require_tuned(crew)
        try:
            measured = measure_engines(crew.workers(order), TUNED, sampling or Sampling(), each_round)
        except EngineFailed as error:
            raise InputError(
                f"{build_dir}: the tuned model failed while it was timed: {error}; tune the model again on this machine"
            ) from error
        seconds = {name: timing.median for name, timing in measured.timings.items()}
        peers = {
            spec.name: (crew.hired[spec.name].worker, seconds[spec.name]) for spec in specs if _is_rival(spec, seconds)
        }
        tuned = crew.hired[TUNED].worker, seconds[TUNED]
        lost = lost_layers(workload.model, next(iter(inputs.values())), tuned, peers, layers, progress)
    found = _comparison(workload, sampling or Sampling(), crew, measured, order)
    found = replace(found, layers=lost.table, layers_missing=lost.missing)
    return _with_identical(found, order) if has_twin else found


def _samples(data: Path, inputs: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """First :data:`MOST_SAMPLES` samples in ``data``. Raises ``InputError`` for arrays of wrong shapes or types."""
    found = read_calibration(data, [DeclaredInput(info.name, info.shape, info.dtype) for info in inputs])
    return {f"sample-{index}": found.call(index) for index in range(min(found.calls, MOST_SAMPLES))}


def _further_builds(
    folders: Mapping[str, Path], other: Artifact, unfused: bool
) -> dict[str, tuple[EngineSpec, Artifact]]:
    """Engine and build of each further row; with ``unfused`` also builds with fusion off, if they differ.

    Raises ``InputError`` if inputs and outputs differ from those of ``other``. Model files may differ, as a quantised
    one does.
    """
    found: dict[str, tuple[EngineSpec, Artifact]] = {}
    for name, folder in folders.items():
        build = read_artifact(folder)
        check_runnable(build)
        if (build.manifest.inputs, build.manifest.outputs) != (other.manifest.inputs, other.manifest.outputs):
            raise InputError(
                f"{folder}: is of another network, or of other shapes, than {other.directory}; name builds of one model"
            )
        found[name] = ENGINES[TUNED], build
        if unfused and not _nothing_fused(build):
            found[f"{name}, fusion off"] = ENGINES[UNFUSED_ENGINE], build
    return found


def _with_integers(against: Sequence[str], quantized: Path | None) -> list[str]:
    """``against``, plus the INT8 engines if a quantised file is given and none of them is named."""
    integers = peers_of(INT8)
    return [*against, *(integers if quantized is not None and not set(integers) & set(against) else ())]


def _nothing_fused(artifact: Artifact) -> bool:
    """True if the build's two modules are identical."""
    files = artifact.manifest.files
    return UNFUSED_MODULE in files and files[UNFUSED_MODULE] == files[MODEL]


def _with_identical(comparison: Comparison, order: Sequence[str]) -> Comparison:
    """Copy the row of the tuned model for its identical module: separate timing would show noise as a difference."""
    tuned = next(row for row in comparison.rows if row.engine == TUNED)
    twin = replace(tuned, engine=UNFUSED_ENGINE, mode=f"identical to {TUNED}: nothing fused")
    rows = sorted((*comparison.rows, twin), key=lambda row: order.index(row.engine))
    return replace(comparison, rows=tuple(rows))


def _workload(artifact: Artifact, model: Path | None, threads: int | None, trials: int) -> EngineWorkload:
    manifest, own = artifact.manifest, model_file(artifact)
    path = model or own or Path(manifest.model_path)
    refusal = find_refusal(path, "model", f"the model of {artifact.directory} is not there")
    if refusal is not None:
        raise InputError(f"{path}: {refusal}; name it with --model")
    found = file_digest(path)
    if found != manifest.model_sha256 and (own is None or quantized_from(own) != found):
        raise InputError(f"{path}: is not the model that {artifact.directory} was built from; tune it again")
    workload = build_workload(artifact, threads_to_use(threads, manifest.threads))
    return replace(workload, model=path, model_sha256=found, trials_per_task=trials)


def _is_rival(spec: EngineSpec, seconds: Mapping[str, float]) -> bool:
    """True for an engine other than ours that was timed."""
    return spec.name in seconds and spec.name not in (TUNED, UNFUSED_ENGINE)


def _require_tuned(crew: Crew) -> None:
    absent = crew.absent.get(TUNED)
    if absent is not None:
        error = MissingDependencyError if "not installed" in absent.reason else InputError
        raise error(f"the tuned model cannot run: {absent.reason}")


def _comparison(
    workload: EngineWorkload, sampling: Sampling, crew: Crew, measured: MeasuredEngines, asked: Sequence[str]
) -> Comparison:
    rows = tuple(_row(name, timing, crew.hired[name]) for name, timing in measured.timings.items())
    late = [NotMeasured(name, "failed", reason) for name, reason in measured.failures.items()]
    absent = [entry for entry in crew.absent.values() if entry.engine in asked]
    return Comparison(str(workload.model), workload.threads, sampling, rows, (*absent, *late), workload.inputs)


def _row(engine: str, timing: EngineTiming, hired: Hired) -> EngineRow:
    return EngineRow(
        engine=engine,
        mode=hired.mode,
        median_seconds=timing.median,
        min_seconds=timing.minimum,
        lower_quartile_seconds=timing.lower_quartile,
        upper_quartile_seconds=timing.upper_quartile,
        ratio_to_tuned=timing.ratio,
        calls=timing.calls,
        growth_bytes=hired.growth,
        **errors_json(hired.errors),  # type: ignore[arg-type]
    )


WARMUP_CALLS, LEAST_CALLS = 10, 20
LONGEST_SECONDS = 60.0  # must be below the time limit of a worker's call


@dataclass(frozen=True)
class BuildTimes:
    """Measured latencies in seconds. ``samples_per_second``: throughput in images, ``batch`` per call."""

    build: str
    threads: int
    batch: int
    calls: int
    minimum: float
    mean: float
    median: float
    percentile_90: float
    percentile_99: float
    maximum: float
    samples_per_second: float


def benchmark_build(
    folder: Path, threads: int | None = None, seconds: float = 5.0, say: Say = lambda _: None
) -> BuildTimes:
    """Run the network in ``folder`` on random inputs for ``seconds``.

    ``threads`` defaults to the number of the build. Raises ``InputError`` for an incomplete build, more threads than
    cores, or an engine that fails.
    """
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InputError(f"--seconds {seconds:g}: must be more than 0, and {LONGEST_SECONDS:g} at most")
    artifact = read_artifact(folder)
    check_runnable(artifact)
    inputs = artifact.manifest.inputs
    used = threads_to_use(threads, artifact.manifest.threads)
    with Worker(ENGINES[TUNED], used) as worker:
        try:
            worker.prepare(build_workload(artifact, used), PREPARE_TIMEOUT_SECONDS)
            worker.bind(random_arrays(inputs))
            say(f"running for {seconds:g} s")
            durations = worker.block(WARMUP_CALLS, LEAST_CALLS, seconds)
        except (EngineFailed, Unavailable) as error:
            raise InputError(
                f"{artifact.directory}: the network cannot be run: {error}; tune the model again on this machine"
            ) from error
    batch = next((info.shape[0] for info in inputs if info.shape), 1)
    return summarize_calls(str(folder), used, batch, durations)


def summarize_calls(build: str, threads: int, batch: int, durations: np.ndarray) -> BuildTimes:
    """Statistics of the durations of calls in seconds."""
    return BuildTimes(
        build=build,
        threads=threads,
        batch=batch,
        calls=len(durations),
        minimum=float(durations.min()),
        mean=float(durations.mean()),
        median=float(np.median(durations)),
        percentile_90=float(np.quantile(durations, 0.9)),
        percentile_99=float(np.quantile(durations, 0.99)),
        maximum=float(durations.max()),
        samples_per_second=float(batch * len(durations) / durations.sum()),
    )


def build_workload(artifact: Artifact, threads: int) -> EngineWorkload:
    """Engine workload of a build with ``threads`` threads."""
    manifest = artifact.manifest
    return EngineWorkload(
        model=Path(manifest.model_path),
        model_sha256=manifest.model_sha256,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        threads=threads,
        build=artifact.directory,
        cache=artifact.cache,
    )


def render_times(times: BuildTimes) -> str:
    """Format the times as a few lines of text."""
    latencies = (
        ("minimum", times.minimum), ("median", times.median), ("mean", times.mean), ("90 %", times.percentile_90),
        ("99 %", times.percentile_99), ("maximum", times.maximum),
    )  # fmt: skip
    listed = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in latencies)
    return (
        f"{times.build}: {times.calls} calls of batch {times.batch}, {times.threads} threads\n"
        f"latency in ms: {listed}\nthroughput: {times.samples_per_second:.1f} samples/s"
    )
