"""Stock TVM: MetaSchedule's own schedules and search, without our code; tuned once, then cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.say import Say
from fusion.artifact.executable import load_library
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.tuned import CompiledSession
from fusion.model.precision import INT8


@dataclass(frozen=True)
class MetaScheduleEngine:
    """MetaSchedule with ``workload.trials_per_task`` trials for each task of the model."""

    def prepare(self, workload: EngineWorkload, progress: Say) -> CompiledSession:
        """Load the cached module, or tune it first, which may take half an hour.

        Records are kept beside it: an interrupted run continues, and a larger number of trials extends them.
        """
        library = workload.cache / "metaschedule" / _key(workload) / f"model-{workload.trials_per_task}.so"
        if not library.is_file():
            _tune(workload, library, progress)
        mode = f"MetaSchedule, {workload.trials_per_task} trials a task"
        return CompiledSession(mode, load_library(library, workload.inputs, workload.outputs))


def _tune(workload: EngineWorkload, library: Path, progress: Say) -> None:
    from fusion.relax.onnx.importer import import_onnx
    from schedules.contract.cpu_target import host_target
    from schedules.tuning.stock_meta_schedule import tune_stock

    if workload.trials_per_task < 1:
        raise Unavailable("MetaSchedule needs at least one trial for each task")
    shapes = {info.name: info.shape for info in workload.inputs}
    cpu = host_target(workload.threads)
    imported = import_onnx(workload.model, shapes, whole_numbers=cpu.lacks(INT8) is None)
    executable = tune_stock(imported.mod, cpu, workload.trials_per_task, library.parent, progress)
    library.parent.mkdir(parents=True, exist_ok=True)
    staged = library.with_name("partial.so")  # TVM derives the format from the suffix
    executable.export_library(str(staged))
    staged.replace(library)


def _key(workload: EngineWorkload) -> str:
    """Name of the record folder, a hash of everything that affects the records."""
    import tvm

    from schedules.contract.cpu_target import host_target

    shapes = {info.name: info.shape for info in workload.inputs}
    facts = [workload.model_sha256, shapes, host_target(workload.threads).key]
    return hashlib.sha256(json.dumps([*facts, tvm.__version__]).encode()).hexdigest()[:16]


METASCHEDULE = MetaScheduleEngine()
