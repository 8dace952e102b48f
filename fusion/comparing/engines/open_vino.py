"""OpenVINO's CPU plug-in with the latency hint, in FP32 and in BF16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.base.say import Say
from fusion.comparing.engines.base import Arrays, EngineCall, EngineWorkload, Unavailable


@dataclass(frozen=True)
class OpenVinoSession:
    """One infer request."""

    mode: str
    compiled: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All outputs by name."""
        request = self._request(inputs)
        request.infer()
        return {name: request.get_output_tensor(index).data.copy() for index, name in enumerate(self.outputs)}

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Inference on shared memory: neither inputs nor outputs are copied."""
        request = self._request(inputs)
        return lambda: request.infer(share_outputs=True)

    def _request(self, inputs: Mapping[str, np.ndarray]) -> Any:
        from openvino import Tensor

        request = self.compiled.create_infer_request()
        for index, name in enumerate(self.inputs):
            request.set_input_tensor(index, Tensor(np.asarray(inputs[name], order="C"), shared_memory=True))
        return request


@dataclass(frozen=True)
class OpenVinoEngine:
    """``precision``: OpenVINO's inference precision hint, ``f32`` or ``bf16``."""

    precision: str

    def prepare(self, workload: EngineWorkload, progress: Say) -> OpenVinoSession:
        """Read, reshape and compile. Raises ``Unavailable`` where the CPU lacks the precision."""
        import openvino

        core = openvino.Core()
        model = core.read_model(str(workload.model))
        shapes = {info.name: list(info.shape) for info in workload.inputs}
        names = tuple(_name(port, shapes) for port in model.inputs)
        if model.is_dynamic():
            model.reshape({port: shapes[name] for port, name in zip(model.inputs, names, strict=True)})
        wanted = {info.name: None for info in workload.outputs}
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": workload.threads,
            "INFERENCE_PRECISION_HINT": self.precision,
        }
        compiled = core.compile_model(model, "CPU", settings)
        actual = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        if actual not in (self.precision, {"f32": "float32", "bf16": "bfloat16"}[self.precision]):
            raise Unavailable(f"OpenVINO runs {actual}, not {self.precision}, on this CPU")
        outputs = tuple(_name(port, wanted) for port in model.outputs)
        version = openvino.__version__.split("-")[0]
        return OpenVinoSession(f"{version}, {self.precision}, latency hint", compiled, names, outputs)


def _name(port: Any, known: Mapping[str, Any]) -> str:
    """A port may carry several names; the model's own is the one the interface knows."""
    return next(name for name in port.get_names() if name in known)


FP32 = OpenVinoEngine("f32")
BF16 = OpenVinoEngine("bf16")
