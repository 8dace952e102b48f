"""ONNX Runtime with all optimisations, on float or quantised files."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engine import Arrays, EngineCall, EngineWorkload, LayerTime, fastest, require_precision, typical

_KERNEL_TIME = "_kernel_time"  # suffix of an event's name
# Suffixes that ONNX Runtime adds to nodes in a blocked layout, and to make names unique.
_APPENDED = re.compile(r"(_nchwc|_token_\d+)+$")
_WARMUP_RUNS = 3
# By default a product of floats with dequantised weights also rounds the floats to bytes, an error of 4e-3.
_PRODUCTS_OF_FLOATS = "session.qdq_matmulnbits_accuracy_level", "1"


@dataclass
class OnnxRuntimeSession:
    """Loaded model; ``workload`` is used to create a second session for profiling.

    After ``bind``, ``mode`` says whether plain calls or bound buffers were faster.
    """

    session: Any
    mode: str
    workload: EngineWorkload

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name."""
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(inputs)), strict=True))

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Bind by plain ``run`` or IO binding, whichever is faster here."""
        feeds = dict(inputs)
        calls: dict[str, EngineCall] = {
            "run": lambda: self.session.run(None, feeds),
            "IO binding": self._bound(feeds),
        }
        name = fastest(calls)
        self.mode = f"{self.mode}, {name}"
        return calls[name]

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        """Times of every node of the optimised graph, by ONNX Runtime's profiler, which counts whole microseconds."""
        feeds, clock = dict(inputs), time.perf_counter
        with tempfile.TemporaryDirectory(prefix="profile-") as folder:
            options = _options(self.workload)
            options.optimized_model_filepath = str(Path(folder) / "model.onnx")
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = _opened(self.workload, options)
            end, runs = clock() + seconds, 0
            while runs < 2 * _WARMUP_RUNS or clock() < end:
                session.run(None, feeds)
                runs += 1
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
            outputs = _outputs(Path(folder) / "model.onnx")
        return node_times(events, runs, outputs)

    def _bound(self, feeds: Arrays) -> EngineCall:
        from onnxruntime import OrtValue

        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array))
        for name, array in self.run(feeds).items():
            binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(np.zeros_like(array)))
        return lambda: self.session.run_with_iobinding(binding)


def node_times(
    events: Sequence[Mapping[str, Any]], runs: int, outputs: Mapping[str, tuple[str, ...]]
) -> list[LayerTime]:
    """Node times from a profile of ``runs`` runs without the warm-up runs.

    ``outputs`` maps nodes of the optimised graph to the tensors they write. A node has the same name in the profile; an
    unnamed one is named by its operator and its number in the model's file. Fused and blocked nodes have their former
    name with a suffix, and write tensors of new names.
    """
    found: dict[str, list[float]] = {}
    operators: dict[str, str] = {}
    for event in events:
        name = event["name"]
        if event["cat"] == "Node" and name.endswith(_KERNEL_TIME):
            name = name.removesuffix(_KERNEL_TIME)
            found.setdefault(name, []).append(event["dur"] * 1e-6)
            operators[name] = event["args"]["op_name"]
    layers = []
    for name, durations in found.items():
        times, left = divmod(len(durations), runs)
        if left or not times:  # inside an If: executed in some runs only
            seconds = sum(durations) / runs
        else:
            each = np.reshape(durations, (runs, times)).sum(axis=1)
            seconds = typical(each[_WARMUP_RUNS:].tolist())
        known = (_APPENDED.sub("", name), *outputs.get(name, ()))
        layers.append(LayerTime(known, seconds, operators[name]))
    return layers


def _outputs(optimised: Path) -> dict[str, tuple[str, ...]]:
    """Tensors written by each named node of a graph."""
    import onnx

    nodes = onnx.load(str(optimised), load_external_data=False).graph.node
    return {node.name: tuple(filter(None, node.output)) for node in nodes if node.name}


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    """CPU execution provider, ``threads`` intra-op threads, symbolic dimensions replaced by the shapes in use.

    ``in_integers``: raise ``Unavailable`` unless the optimised graph has integer layers.
    """

    in_integers: bool = False

    def prepare(self, workload: EngineWorkload, progress: Say) -> OnnxRuntimeSession:
        """Load and optimise the model."""
        import onnxruntime

        options = _options(workload)
        mode = f"{onnxruntime.__version__}, all optimisations"
        if not self.in_integers:
            return OnnxRuntimeSession(_opened(workload, options), mode, workload)
        with tempfile.TemporaryDirectory(prefix="optimised-") as folder:
            options.optimized_model_filepath = str(Path(folder) / "model.onnx")
            session = _opened(workload, options)
            share = _integer_share(Path(folder) / "model.onnx")
        mode = f"{mode}, {require_precision('ONNX Runtime', 'int8', *share)}"
        return OnnxRuntimeSession(session, mode, workload)


def _options(workload: EngineWorkload) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = workload.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if workload.exact:
        options.add_session_config_entry(*_PRODUCTS_OF_FLOATS)
    return options


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
    """(Number of integer layers, number of layers) of the graph that ONNX Runtime runs."""
    import onnx

    from fusion.relax.onnx.model_file import all_nodes
    from fusion.relax.onnx.quantised_model import integer_share

    return integer_share(all_nodes(onnx.load(str(optimised), load_external_data=False).graph))


def _symbols(session: Any, workload: EngineWorkload) -> dict[str, int]:
    """Sizes of named dimensions of inputs and outputs in this workload.

    Some exporters give every open dimension the same name (``?``): names with several sizes are left out.
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
