"""Our own modules of a build directory: ``tuned``, and ``tvm-unfused``, the same kernels with fusion off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.base.say import Say
from fusion.artifact.build_folder import MODEL, UNFUSED_MODULE, read_artifact
from fusion.artifact.executable import CompiledModel, load_compiled
from fusion.comparing.engines.base import Arrays, EngineCall, EngineWorkload, LayerTime, Unavailable, typical
from fusion.model.layer_names import result_index
from fusion.model.precision import FLOAT32
from schedules.contract.lean_import import import_tvm_alone

# Suffix that makes a kernel symbol unique among object files (``fusion/relax/kernel_objects.py``).
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
