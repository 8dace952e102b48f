"""Timing of engines in turns: each in its own process, loaded, its outputs compared with the reference, then run
alternately, alone on the cores, in many rounds. Engines of INT8 all run one quantised file of the model.

In each round each engine runs one block of back-to-back calls while the others sleep; the order reverses every round.
Machines drift and are shared, so times are compared within a round: the ratio to the baseline is the median over the
rounds of the ratio of block medians. The first calls of a block warm caches and threads and are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from costmodel.base.errors import InputError, ProjectError, Say
from costmodel.base.output_files import write_whole
from fusion.comparing.engine import REFERENCE, EngineSpec, EngineWorkload, Unavailable
from fusion.comparing.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.output_errors import ErrorTally, OutputErrors
from fusion.model.build_folder import Artifact, file_digest
from fusion.model.conv_graph import INT8
from fusion.model.named_arrays import Arrays, TensorInfo
from fusion.relax.onnx.model_file import load_model
from fusion.relax.onnx.preparation import dimensions, real_inputs, static_model
from fusion.relax.onnx.quantised_model import is_quantised, origin_of, quantized_path

if TYPE_CHECKING:
    from onnx import ModelProto


# Minimum number of rounds for meaningful results, whatever the time limit.
LEAST_ROUNDS = 5


class TimedEngine(Protocol):
    """Engine interface of the protocol, e.g. :class:`fusion.comparing.engine_worker.Worker`."""

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        """Return durations in seconds of back-to-back calls: at least ``calls``, for at least ``seconds``."""


@dataclass(frozen=True)
class Sampling:
    """Amount of measurement."""

    rounds: int = 15
    # Minimum duration of one block.
    seconds: float = 0.15
    # Minimum number of calls of a block.
    calls: int = 5
    # Untimed calls before each block.
    warmup: int = 5


@dataclass(frozen=True)
class EngineTiming:
    """Latency of one engine in seconds."""

    # Median of the round medians; quartiles of the round medians follow.
    median: float
    # Shortest single call.
    minimum: float
    lower_quartile: float
    upper_quartile: float
    # Median over rounds of this engine's time divided by the baseline's in the same round; above 1 if slower.
    ratio: float
    calls: int
    # Median of each round.
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredEngines:
    """Timings by engine, and reasons of failed engines."""

    timings: Mapping[str, EngineTiming]
    failures: Mapping[str, str]


def measure_engines(
    engines: Mapping[str, TimedEngine],
    baseline: str,
    sampling: Sampling,
    progress: Say = lambda _: None,
    end: float = math.inf,
) -> MeasuredEngines:
    """Time the engines alternately. An engine that fails is left out of later rounds.

    After ``LEAST_ROUNDS``, no round starts that would end after ``end`` (``time.monotonic``). Raises ``EngineFailed``
    if the baseline fails.
    """
    started = time.monotonic()
    warm: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    failures: dict[str, str] = {}
    for index in range(sampling.rounds):
        now = time.monotonic()
        if index >= LEAST_ROUNDS and now + (now - started) / index > end:
            break
        progress(f"round {index + 1}/{sampling.rounds}")
        names = [name for name in engines if name not in failures]
        for name in names if index % 2 == 0 else reversed(names):
            try:
                warm[name].append(engines[name].block(sampling.warmup, sampling.calls, sampling.seconds))
            except EngineFailed as error:
                if name == baseline:
                    raise
                failures[name] = str(error)
    return MeasuredEngines(
        {name: _timing(name, baseline, warm) for name in engines if name not in failures},
        failures,
    )


def _timing(name: str, baseline: str, warm: Mapping[str, list[np.ndarray]]) -> EngineTiming:
    medians = np.array([np.median(block) for block in warm[name]])
    reference = np.array([np.median(block) for block in warm[baseline]])
    return EngineTiming(
        median=float(np.median(medians)),
        minimum=float(min(block.min() for block in warm[name])),
        lower_quartile=float(np.quantile(medians, 0.25)),
        upper_quartile=float(np.quantile(medians, 0.75)),
        ratio=float(np.median(medians / reference)),
        calls=sum(len(block) for block in warm[name]),
        rounds=tuple(medians.tolist()),
    )


NO_LIMIT = ("tvm-metaschedule",)  # tunes a whole model during preparation
# Time limit in seconds of the reference's outputs on inputs after the first one; it bounds the number of inputs.
REFERENCE_SECONDS = 10.0


@dataclass(frozen=True)
class NotMeasured:
    """An engine without a row. ``status``: ``skipped`` (cannot run here) or ``failed`` (raised, crashed, hung)."""

    engine: str
    status: str
    reason: str


@dataclass(frozen=True)
class Hired:
    """An engine that is ready."""

    worker: Worker
    # Execution mode of the model.
    mode: str
    # Output errors against the reference, None without one.
    errors: OutputErrors | None
    # Memory growth of its process in bytes at its first run, None if unknown.
    growth: int | None


class Crew:
    """Starts the engines one after the other: compilation must not disturb an engine's choice of mode.

    ``inputs``: the first is timed; errors are computed on all. ``quantized``: returns the file for INT8 engines, or
    raises ``Unavailable``; called for the first of these engines.
    """

    def __init__(
        self,
        stack: ExitStack,
        workload: EngineWorkload,
        inputs: Mapping[str, Arrays],
        progress: Say,
        quantized: Callable[[], Path],
    ) -> None:
        self._stack = stack
        self._workload = workload
        self._inputs = dict(inputs)
        self._progress = progress
        self._quantized = quantized
        self._quantized_file: Path | None = None
        self._reference: dict[str, Arrays] | None = None
        self.hired: dict[str, Hired] = {}
        self.absent: dict[str, NotMeasured] = {}

    def hire(self, spec: EngineSpec, build: Artifact | None = None, name: str | None = None) -> None:
        """Start, prepare and bind an engine; errors are recorded, not raised. The reference must be first.

        ``build``: another build than that of the workload, with the row name ``name``.
        """
        name = name or spec.name
        if name in self.hired or name in self.absent:
            return
        missing = spec.missing()
        if missing is not None:
            self.absent[name] = NotMeasured(name, "skipped", missing)
            return
        self._progress(f"preparing {name}")
        worker: Worker | None = None
        try:
            workload = self._workload_of(spec)
            if build is not None:
                workload = replace(workload, build=build.directory)
            worker = self._stack.enter_context(Worker(spec, workload.threads))
            timeout = None if spec.name in NO_LIMIT else PREPARE_TIMEOUT_SECONDS
            worker.prepare(workload, timeout, lambda message: self._progress(f"{name}: {message}"))
            mode, outputs = worker.bind(next(iter(self._inputs.values())))
            growth = worker.growth()
            if spec.name == REFERENCE:
                self._reference = self._references(worker, outputs)
            self.hired[name] = Hired(worker, mode, self._errors(worker, outputs), growth)
        except (Unavailable, EngineFailed, ProjectError) as error:
            status = "failed" if isinstance(error, EngineFailed) else "skipped"
            self.absent[name] = NotMeasured(name, status, str(error))
            if worker is not None:
                worker.close()  # an idle process would disturb the measurement

    def workers(self, names: Sequence[str]) -> dict[str, Worker]:
        """Workers of the engines ``names`` that are ready, in that order."""
        return {name: self.hired[name].worker for name in names if name in self.hired}

    def _workload_of(self, spec: EngineSpec) -> EngineWorkload:
        if spec.precision != INT8:
            return self._workload
        if self._quantized_file is None:
            self._quantized_file = self._quantized()
        return replace(self._workload, model=self._quantized_file)

    def _references(self, worker: Worker, first: Arrays) -> dict[str, Arrays]:
        """Finite reference outputs on as many inputs as the time limit allows."""
        timed, *others = self._inputs
        found = {timed: first}
        end = time.monotonic() + REFERENCE_SECONDS
        for other in others:
            if time.monotonic() > end:
                break
            outputs = worker.run(self._inputs[other])
            if all(np.isfinite(array).all() for array in outputs.values() if array.dtype.kind not in "iub"):
                found[other] = outputs
        return found

    def _errors(self, worker: Worker, outputs: Arrays) -> OutputErrors | None:
        """Errors over all inputs with reference outputs; raises ``EngineFailed`` if values or shapes are missing."""
        if self._reference is None:
            return None
        tally = ErrorTally()
        for index, (name, reference) in enumerate(self._reference.items()):
            tally.add(outputs if index == 0 else worker.run(self._inputs[name]), reference)
            if not tally.errors().comparable:
                raise EngineFailed(f"its outputs lack values or shapes that ONNX Runtime's have (on the {name} input)")
        return tally.errors()


def quantized_file(
    model: Path,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    given: Path | None,
    cache: Path,
    built: Sequence[Path] = (),
) -> Path:
    """Return the quantised file of ``model``.

    It is ``given``; or ``model`` if quantised itself; or the first file in ``built`` that was quantised from it, which
    our builds run; or the file that ``python -m fusion quantize`` wrote beside it. A file for another batch is
    rewritten for that of ``inputs``, into ``cache``. Raises ``Unavailable`` if there is none, or if it was made from
    another file, ``InputError`` for a file that is not quantised or not of the model.
    """
    path = given or _found(model, built)
    loaded = load_model(path)
    if not is_quantised(loaded.graph):
        raise InputError(f"{path}: is not quantised; `python -m fusion quantize {model} --calibration DATA.npz` does")
    _require_names(path, loaded, inputs, outputs)
    wanted = {info.name: info.shape for info in inputs}
    if all(_fits(dimensions(value), wanted[value.name]) for value in real_inputs(loaded.graph)):
        return path
    return _for_batch(path, loaded, wanted, cache)


def quantized_from(path: Path) -> str | None:
    """SHA-256 of the float file that ``path`` was quantised from, or None if unknown."""
    import onnx

    return origin_of(onnx.load(str(path), load_external_data=False)) if path.is_file() else None


def _found(model: Path, built: Sequence[Path]) -> Path:
    import onnx

    if is_quantised(onnx.load(str(model), load_external_data=False).graph):
        return model
    own = file_digest(model)
    made = next((each for each in built if quantized_from(each) == own), None)
    if made is not None:
        return made
    beside = quantized_path(model)
    way = f"`python -m fusion quantize {model} --calibration DATA.npz` makes one, --quantized FILE names another"
    if not beside.is_file():
        raise Unavailable(f"{model} has no quantised file: {way}")
    if quantized_from(beside) != own:
        raise Unavailable(f"{beside} was not quantised from {model} as it is now: {way}")
    return beside


def _require_names(path: Path, loaded: ModelProto, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
    pairs = ((real_inputs(loaded.graph), inputs, "inputs"), (loaded.graph.output, outputs, "outputs"))
    for values, infos, kind in pairs:
        found, wanted = [value.name for value in values], [info.name for info in infos]
        if sorted(found) != sorted(wanted):
            listed = f"{', '.join(found)}, the model's are {', '.join(wanted)}"
            raise InputError(f"{path}: is of another model: its {kind} are {listed}; quantise this model again")


def _fits(declared: tuple[int | str, ...] | None, shape: tuple[int, ...]) -> bool:
    if declared is None:
        return True
    same = (isinstance(size, str) or size == extent for size, extent in zip(declared, shape, strict=False))
    return len(declared) == len(shape) and all(same)


def _for_batch(path: Path, loaded: ModelProto, wanted: Mapping[str, tuple[int, ...]], cache: Path) -> Path:
    for value in real_inputs(loaded.graph):
        declared, shape = dimensions(value), wanted[value.name]
        if not declared or not _fits(declared[1:], shape[1:]):
            raise InputError(
                f"{path}: input {value.name!r} has shape {declared}, the model takes {shape}; "
                "quantise the model in that shape"
            )
    batch = next(iter(wanted.values()))[0]
    copy = cache / f"{path.stem}-batch{batch}.onnx"
    cache.mkdir(parents=True, exist_ok=True)
    write_whole(copy, static_model(path, {}, batch).SerializeToString())
    return copy
