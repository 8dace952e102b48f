"""Networks that TVM compiled: modules of a build directory (``tuned``, and ``tvm-unfused``, the same kernels with
fusion off), and stock TVM: MetaSchedule's own schedules and search, without our code, tuned once, then cached.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engine import Arrays, EngineCall, EngineWorkload, LayerTime, Unavailable, typical
from fusion.model.build_folder import MODEL, UNFUSED_MODULE, read_artifact
from fusion.model.conv_graph import FLOAT32, INT8, result_index
from fusion.model.tuned_model import CompiledModel, load_compiled, load_library
from schedules.contract.tvm_import import import_tvm_alone

# Suffix that makes a kernel symbol unique among object files (``fusion/relax/machine_code.py``).
_DIGEST = re.compile(r"_[0-9a-f]{16}_\d+$")


@dataclass(frozen=True)
class CompiledSession:
    """A module in the Relax virtual machine. ``kernel_layers``: names as in the manifest; ``outputs``: output names."""

    mode: str
    model: CompiledModel
    kernel_layers: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name."""
        return self.model(inputs)

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Bind by a saved closure of the virtual machine: no conversion of arguments at each call."""
        return self.model.bind(inputs)

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        """Times of every kernel of a run, measured inside the virtual machine."""
        if not self.kernel_layers:
            raise Unavailable("its kernels have no names of layers; tune the model again if an older version did")
        found = self.model.kernel_durations(inputs, seconds)
        if len(found) != len(self.kernel_layers) or not all(durations for _, durations in found):
            raise Unavailable("which kernels a run of this network calls depends on its data")
        return [
            LayerTime((self._name(name),), typical(durations), _DIGEST.sub("", symbol))
            for name, (symbol, durations) in zip(self.kernel_layers, found, strict=True)
        ]

    def _name(self, name: str) -> str:
        index = result_index(name)
        return name if index is None else self.outputs[index]


@dataclass(frozen=True)
class BuildEngine:
    """Engine of the module ``file`` of the build directory."""

    file: str
    mode: str

    def prepare(self, workload: EngineWorkload, progress: Say) -> CompiledSession:
        """Load the module; ``mode`` names precisions other than float32. Raises ``Unavailable`` if the build lacks
        the file.
        """
        artifact = read_artifact(workload.build)
        if artifact.library(self.file) is None:
            raise Unavailable(f"{workload.build} holds no {self.file}")
        import_tvm_alone()
        stored = artifact.manifest.precision
        mode = self.mode if stored == FLOAT32 else f"{self.mode}, {stored}"
        model = load_compiled(artifact, self.file, workload.threads)
        outputs = tuple(info.name for info in artifact.manifest.outputs)
        return CompiledSession(mode, model, artifact.manifest.layers.get(self.file, ()), outputs)


TUNED = BuildEngine(MODEL, "fused where measured faster")
UNFUSED = BuildEngine(UNFUSED_MODULE, "our kernels, fusion off")


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
