"""Engines of a comparison: each in its own process, loaded, and its outputs compared with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.base.errors import ProjectError
from costmodel.base.say import Say
from fusion.artifact.build_folder import Artifact
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import REFERENCE, EngineSpec
from fusion.comparing.engines.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.output_errors import ErrorTally, OutputErrors
from fusion.model.named_arrays import Arrays
from fusion.model.precision import INT8

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
