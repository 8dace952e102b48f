"""Our own modules of a build directory: ``tuned``, and ``tvm-unfused``, the same kernels with fusion off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.base.say import Say
from fusion.artifact.build_folder import MODEL, UNFUSED_MODULE, read_artifact
from fusion.artifact.executable import CompiledModel, load_compiled
from fusion.comparing.engines.base import Arrays, EngineCall, EngineWorkload, Unavailable
from fusion.model.precision import FLOAT32
from schedules.contract.lean_import import import_tvm_alone


@dataclass(frozen=True)
class CompiledSession:
    """A module in the Relax virtual machine."""

    mode: str
    model: CompiledModel

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All outputs by name."""
        return self.model(inputs)

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """A saved closure of the virtual machine: no conversion of arguments at each call."""
        return self.model.bind(inputs)


@dataclass(frozen=True)
class BuildEngine:
    """Runs the module ``file`` of the build directory."""

    file: str
    mode: str

    def prepare(self, workload: EngineWorkload, progress: Say) -> CompiledSession:
        """Load the module; its mode names a precision other than float32. ``Unavailable`` if the build has none."""
        artifact = read_artifact(workload.build)
        if artifact.library(self.file) is None:
            raise Unavailable(f"{workload.build} holds no {self.file}")
        import_tvm_alone()
        stored = artifact.manifest.precision
        mode = self.mode if stored == FLOAT32 else f"{self.mode}, {stored}"
        return CompiledSession(mode, load_compiled(artifact, self.file, workload.threads))


TUNED = BuildEngine(MODEL, "fused where measured faster")
UNFUSED = BuildEngine(UNFUSED_MODULE, "our kernels, fusion off")
