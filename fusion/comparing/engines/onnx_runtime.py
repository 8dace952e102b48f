"""ONNX Runtime with all optimisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.base.say import Say
from fusion.comparing.engines.base import Arrays, EngineCall, EngineWorkload
from fusion.comparing.engines.best import fastest


@dataclass
class OnnxRuntimeSession:
    """``mode`` tells, once inputs are bound, whether plain calls or bound buffers were faster."""

    session: Any
    mode: str

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All outputs by name."""
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(inputs)), strict=True))

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Plain ``run`` or IO binding, whichever is faster here."""
        feeds = dict(inputs)
        calls: dict[str, EngineCall] = {
            "run": lambda: self.session.run(None, feeds),
            "IO binding": self._bound(feeds),
        }
        name = fastest(calls)
        self.mode = f"{self.mode}, {name}"
        return calls[name]

    def _bound(self, feeds: Arrays) -> EngineCall:
        from onnxruntime import OrtValue

        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
        for name, array in self.run(feeds).items():
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(np.zeros_like(array)))
        return lambda: self.session.run_with_iobinding(binding)


class OnnxRuntimeEngine:
    """CPU execution provider, ``threads`` intra-op threads, symbolic dimensions replaced by the shapes in use."""

    def prepare(self, workload: EngineWorkload, progress: Say) -> OnnxRuntimeSession:
        """Load and optimise the model."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = workload.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = self._open(workload, options)
        symbols = _symbols(session, workload)
        if symbols:
            for symbol, extent in symbols.items():
                options.add_free_dimension_override_by_name(symbol, extent)
            session = self._open(workload, options)
        return OnnxRuntimeSession(session, f"{onnxruntime.__version__}, all optimisations")

    @staticmethod
    def _open(workload: EngineWorkload, options: Any) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(str(workload.model), options, providers=["CPUExecutionProvider"])


def _symbols(session: Any, workload: EngineWorkload) -> dict[str, int]:
    """Named dimensions of inputs and outputs -> their extent in this workload.

    Some exporters give every open dimension one name (``?``): a name that stands for different extents fixes none.
    """
    shapes = {info.name: info.shape for info in (*workload.inputs, *workload.outputs)}
    found: dict[str, set[int]] = {}
    for declared in (*session.get_inputs(), *session.get_outputs()):
        for dimension, extent in zip(declared.shape, shapes.get(declared.name, ()), strict=False):
            if isinstance(dimension, str):
                found.setdefault(dimension, set()).add(extent)
    return {name: next(iter(sizes)) for name, sizes in found.items() if len(sizes) == 1 and name != "?"}


ENGINE = OnnxRuntimeEngine()
