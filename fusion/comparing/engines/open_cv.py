"""OpenCV's DNN module with its own CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engines.engine import Arrays, EngineCall, EngineWorkload, Unavailable, fastest


@dataclass
class OpenCvSession:
    """One network per graph engine of OpenCV that loads the model; after ``bind``, ``chosen`` is the faster one."""

    networks: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    version: str
    chosen: str

    @property
    def mode(self) -> str:
        """Version and graph engine."""
        return f"{self.version}, {self.chosen} graph engine"

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name."""
        return dict(zip(self.outputs, self._call(self.chosen, inputs)(), strict=True))

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Bind ``setInput`` and ``forward`` of the graph engine that is faster here."""
        calls = {name: self._call(name, inputs) for name in self.networks}
        self.chosen = fastest(calls)
        return calls[self.chosen]

    def _call(self, name: str, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        network = self.networks[name]

        def call() -> Any:
            for each in self.inputs:
                network.setInput(inputs[each], each)
            return network.forward(self.outputs)

        return call


class OpenCvEngine:
    """``cv2.dnn`` with ``threads`` threads: OpenCV 5's new graph engine and the classic one."""

    def prepare(self, workload: EngineWorkload, progress: Say) -> OpenCvSession:
        """Load the model and run it once. Raises ``Unavailable`` if none of OpenCV's graph engines can."""
        import cv2

        cv2.setNumThreads(workload.threads)
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        inputs = tuple(info.name for info in workload.inputs)
        outputs = tuple(info.name for info in workload.outputs)
        zeros = {info.name: np.zeros(info.shape, info.dtype) for info in workload.inputs}
        networks: dict[str, Any] = {}
        reasons: list[str] = []
        for name, engine in (("new", cv2.dnn.ENGINE_NEW), ("classic", cv2.dnn.ENGINE_CLASSIC)):
            try:
                network = cv2.dnn.readNetFromONNX(str(workload.model), engine)
                network.setPreferableBackend(cv2.dnn.DNN_BACKEND_OPENCV)
                network.setPreferableTarget(cv2.dnn.DNN_TARGET_CPU)  # FP32
                session = OpenCvSession({name: network}, inputs, outputs, cv2.__version__, name)
                shapes = {output: array.shape for output, array in session.run(zeros).items()}
                wrong = [info.name for info in workload.outputs if shapes[info.name] != info.shape]
                if wrong:
                    raise Unavailable(f"output {wrong[0]} has shape {shapes[wrong[0]]}")
            except (cv2.error, Unavailable) as reason:
                reasons.append(f"{name}: {str(reason).strip().splitlines()[-1]}")
            else:
                networks[name] = network
        if not networks:
            raise Unavailable(f"OpenCV {cv2.__version__} cannot run this model ({'; '.join(reasons)})")
        return OpenCvSession(networks, inputs, outputs, cv2.__version__, next(iter(networks)))


ENGINE = OpenCvEngine()
