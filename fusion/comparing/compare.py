"""``python -m fusion compare``: the tuned model beside other engines, one protocol, outputs compared too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.base.cores import threads_to_use
from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.base.say import Say
from fusion.artifact.build_folder import MODEL, UNFUSED_MODULE, Artifact, check_runnable, digest, read_artifact
from fusion.comparing.engines.base import Arrays, EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import (
    DEFAULT,
    ENGINES,
    REFERENCE,
    TUNED,
    UNFUSED_ENGINE,
    EngineSpec,
    select_engines,
)
from fusion.comparing.engines.engine_worker import EngineFailed, Worker
from fusion.comparing.output_errors import errors_json, output_errors
from fusion.comparing.rounds import EngineTiming, MeasuredEngines, Sampling, measure
from fusion.model.named_arrays import random_arrays
from fusion.model.tensor_info import TensorInfo

PREPARE_TIMEOUT_SECONDS = 1200.0
NO_LIMIT = ("tvm-metaschedule",)  # tunes a whole model in there


@dataclass(frozen=True)
class EngineRow:
    """One engine under the protocol. Seconds; ``ratio_to_tuned`` above 1 where the engine is slower than ours.

    Errors are against ONNX Runtime on the same random inputs, over all outputs: largest absolute difference, and that
    difference relative to the largest absolute value of its output; of integers (classes, masks) the share of elements
    that differ. ``cold_*``: caches flushed before each call. ``growth_bytes``: by how much the peak of its process's
    memory exceeds what it had when the model was loaded (:mod:`fusion.comparing.engines.resident_memory`).
    """

    engine: str
    mode: str
    median_seconds: float
    min_seconds: float
    lower_quartile_seconds: float
    upper_quartile_seconds: float
    ratio_to_tuned: float
    max_abs_error: float | None
    max_relative_error: float | None
    calls: int
    cold_median_seconds: float | None
    cold_ratio_to_tuned: float | None
    growth_bytes: int | None = None


@dataclass(frozen=True)
class NotMeasured:
    """An engine without a row. ``status``: ``skipped`` (cannot run here) or ``failed`` (raised, crashed, hung)."""

    engine: str
    status: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Everything ``compare`` found; ``rows`` holds ``tuned`` first."""

    model: str
    threads: int
    sampling: Sampling
    rows: tuple[EngineRow, ...]
    not_measured: tuple[NotMeasured, ...]
    inputs: tuple[TensorInfo, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-able, as documented for ``--json``."""
        return asdict(self)

    def seconds(self, engine: str) -> float | None:
        """Median latency of an engine, ``None`` if it was not measured."""
        return next((row.median_seconds for row in self.rows if row.engine == engine), None)


def compare_command(
    build_dir: Path,
    against: Sequence[str] = DEFAULT,
    *,
    model: Path | None = None,
    threads: int | None = None,
    sampling: Sampling | None = None,
    trials_per_task: int = 64,
    progress: Say = lambda _: None,
    each_round: Say = lambda _: None,
) -> Comparison:
    """Measure the tuned model of ``build_dir`` and the engines named in ``against``.

    ``model``: where the ONNX file is now, if it moved; ``threads`` defaults to those it was tuned for, if there
    are cores for them;
    ``trials_per_task``: effort of ``tvm-metaschedule``; ``progress`` hears the stages, ``each_round`` the rounds of
    the measurement. Raises ``InputError``, ``MissingDependencyError``.
    """
    artifact = read_artifact(build_dir)
    check_runnable(artifact)
    specs = select_engines(against)
    workload = _workload(artifact, model, threads, trials_per_task)
    inputs = random_arrays(workload.inputs)
    identical = _nothing_fused(artifact)
    asked = specs
    if identical:
        specs = [spec for spec in asked if spec.name != UNFUSED_ENGINE]
    with ExitStack() as stack:
        crew = _Crew(stack, workload, inputs, progress)
        for spec in (ENGINES[REFERENCE], *specs):  # the reference runs whether or not it is compared
            crew.hire(spec)
        _require_tuned(crew)
        try:
            measured = measure(crew.hired(specs), TUNED, sampling or Sampling(), each_round)
        except EngineFailed as error:
            raise InputError(f"{build_dir}: the tuned model failed while it was timed: {error}") from error
    found = _comparison(workload, sampling or Sampling(), crew, measured, {spec.name for spec in asked})
    return found if len(specs) == len(asked) else _with_identical(found, asked)


def _nothing_fused(artifact: Artifact) -> bool:
    """Whether the build's two modules are the same bytes."""
    files = artifact.manifest.files
    return UNFUSED_MODULE in files and files[UNFUSED_MODULE] == files[MODEL]


def _with_identical(comparison: Comparison, asked: Sequence[EngineSpec]) -> Comparison:
    """The row of the same module is the tuned one's: timing it apart would show noise as a difference."""
    tuned = next(row for row in comparison.rows if row.engine == TUNED)
    twin = replace(tuned, engine=UNFUSED_ENGINE, mode=f"identical to {TUNED}: nothing fused")
    order = [spec.name for spec in asked]
    rows = sorted((*comparison.rows, twin), key=lambda row: order.index(row.engine))
    return replace(comparison, rows=tuple(rows))


class _Crew:
    """The engines' processes: started one after the other, so that none chooses its mode beside a compiling one."""

    def __init__(self, stack: ExitStack, workload: EngineWorkload, inputs: Arrays, progress: Say) -> None:
        self._stack = stack
        self._workload = workload
        self._inputs = inputs
        self._progress = progress
        self._workers: dict[str, Worker] = {}
        self.bound: dict[str, tuple[str, Arrays]] = {}
        self.growth: dict[str, int | None] = {}
        self.absent: dict[str, NotMeasured] = {}

    def hire(self, spec: EngineSpec) -> None:
        """Start, prepare and bind an engine; what goes wrong is noted, not raised."""
        if spec.name in self.bound or spec.name in self.absent:
            return
        missing = spec.missing()
        if missing is not None:
            self.absent[spec.name] = NotMeasured(spec.name, "skipped", missing)
            return
        self._progress(f"preparing {spec.name}")
        worker = self._stack.enter_context(Worker(spec, self._workload.threads))
        try:
            timeout = None if spec.name in NO_LIMIT else PREPARE_TIMEOUT_SECONDS
            worker.prepare(self._workload, timeout, lambda message: self._progress(f"{spec.name}: {message}"))
            mode, outputs = worker.bind(self._inputs)
            self._check(outputs)
            self.growth[spec.name] = worker.growth()
            self.bound[spec.name] = (mode, outputs)
            self._workers[spec.name] = worker
        except (Unavailable, EngineFailed) as error:
            status = "skipped" if isinstance(error, Unavailable) else "failed"
            self.absent[spec.name] = NotMeasured(spec.name, status, str(error))
            worker.close()  # it would idle beside the measurement

    def reference(self) -> Arrays | None:
        """ONNX Runtime's outputs, ``None`` where it cannot run or was not hired yet."""
        return self.bound[REFERENCE][1] if REFERENCE in self.bound else None

    def _check(self, outputs: Arrays) -> None:
        reference = self.reference()
        if reference is not None and not output_errors(outputs, reference).comparable:
            raise EngineFailed("its outputs lack values or shapes that ONNX Runtime's have")

    def hired(self, specs: Sequence[EngineSpec]) -> dict[str, Worker]:
        """The engines of ``specs`` that are ready, in that order."""
        return {spec.name: self._workers[spec.name] for spec in specs if spec.name in self._workers}


def _workload(artifact: Artifact, model: Path | None, threads: int | None, trials: int) -> EngineWorkload:
    manifest = artifact.manifest
    path = model or Path(manifest.model_path)
    if not path.is_file():
        raise InputError(f"{path}: the model of {artifact.directory} is not there; name it with --model")
    if digest(path) != manifest.model_sha256:
        raise InputError(f"{path}: is not the model that {artifact.directory} was built from; tune it again")
    return EngineWorkload(
        model=path,
        model_sha256=manifest.model_sha256,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        threads=threads_to_use(threads, manifest.threads),
        build=artifact.directory,
        cache=artifact.cache,
        trials_per_task=trials,
    )


def _require_tuned(crew: _Crew) -> None:
    absent = crew.absent.get(TUNED)
    if absent is not None:
        error = MissingDependencyError if "not installed" in absent.reason else InputError
        raise error(f"the tuned model cannot run: {absent.reason}")


def _comparison(
    workload: EngineWorkload, sampling: Sampling, crew: _Crew, measured: MeasuredEngines, asked: set[str]
) -> Comparison:
    reference = crew.reference()
    rows = tuple(
        _row(name, timing, *crew.bound[name], reference, crew.growth[name]) for name, timing in measured.timings.items()
    )
    late = [NotMeasured(name, "failed", reason) for name, reason in measured.failures.items()]
    absent = [entry for entry in crew.absent.values() if entry.engine in asked]
    return Comparison(str(workload.model), workload.threads, sampling, rows, (*absent, *late), workload.inputs)


def _row(
    engine: str, timing: EngineTiming, mode: str, outputs: Arrays, reference: Arrays | None, growth: int | None
) -> EngineRow:
    errors = errors_json(None if reference is None else output_errors(outputs, reference))
    return EngineRow(
        engine=engine,
        mode=mode,
        median_seconds=timing.median,
        min_seconds=timing.minimum,
        lower_quartile_seconds=timing.lower_quartile,
        upper_quartile_seconds=timing.upper_quartile,
        ratio_to_tuned=timing.ratio,
        max_abs_error=errors["max_abs_error"],
        max_relative_error=errors["max_relative_error"],
        calls=timing.calls,
        cold_median_seconds=timing.cold_median,
        cold_ratio_to_tuned=timing.cold_ratio,
        growth_bytes=growth,
    )
