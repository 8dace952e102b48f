"""ONNX Runtime with all optimisations, and the same of a quantised file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.say import Say
from fusion.comparing.engines.base import Arrays, EngineCall, EngineWorkload
from fusion.comparing.engines.best import fastest
from fusion.comparing.engines.layer_precisions import require_precision


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


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    """CPU execution provider, ``threads`` intra-op threads, symbolic dimensions replaced by the shapes in use.

    ``in_integers``: unavailable unless some layer is computed in integers once the graph is optimised.
    """

    in_integers: bool = False

    def prepare(self, workload: EngineWorkload, progress: Say) -> OnnxRuntimeSession:
        """Load and optimise the model."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = workload.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        mode = f"{onnxruntime.__version__}, all optimisations"
        if not self.in_integers:
            return OnnxRuntimeSession(_opened(workload, options), mode)
        with tempfile.TemporaryDirectory(prefix="optimised-") as folder:
            options.optimized_model_filepath = str(Path(folder) / "model.onnx")
            session = _opened(workload, options)
            share = _integer_share(Path(folder) / "model.onnx")
        return OnnxRuntimeSession(session, f"{mode}, {require_precision('ONNX Runtime', 'int8', *share)}")


def _opened(workload: EngineWorkload, options: Any) -> Any:
    session = _open(workload, options)
    symbols = _symbols(session, workload)
    if not symbols:
        return session
    for symbol, extent in symbols.items():
        options.add_free_dimension_override_by_name(symbol, extent)
    return _open(workload, options)


def _open(workload: EngineWorkload, options: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(workload.model), options, providers=["CPUExecutionProvider"])


def _integer_share(optimised: Path) -> tuple[int, int]:
    """Layers computed in integers and all layers of the graph that ONNX Runtime runs."""
    import onnx

    from fusion.relax.onnx.onnx_quantised import integer_share
    from fusion.relax.onnx.onnx_unsupported import all_nodes

    return integer_share(all_nodes(onnx.load(str(optimised), load_external_data=False).graph))


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
INT8 = OnnxRuntimeEngine(in_integers=True)
