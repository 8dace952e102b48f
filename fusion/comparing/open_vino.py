"""OpenVINO's CPU plug-in with the latency hint: FP32, BF16, and INT8 on a quantised file.

The precision hint is not binding: a CPU without the instructions computes in FP32, and single layers may. The precision
of every layer is therefore read back from the compiled model; an engine without any layer in its precision is
unavailable.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engine import (
    Arrays,
    EngineCall,
    EngineWorkload,
    LayerTime,
    Unavailable,
    count_of,
    fastest,
    precision_text,
    require_precision,
)

# Layer types with the arithmetic of a network, and OpenVINO's names of precisions.
_LAYERS = frozenset({"Convolution", "GroupConvolution", "Deconvolution", "FullyConnected", "MatMul"})
_WARMUP_RUNS = 3
_INTEGERS, _BFLOAT16 = ("i8", "u8"), ("bf16",)
_FULL_NAMES = {"f32": "float32", "bf16": "bfloat16"}


@dataclass
class OpenVinoSession:
    """One infer request."""

    version: str
    # Variant name -> compiled model.
    compiled: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # Variant in use; after ``bind`` the fastest one.
    chosen: str
    # Compiles a variant again with performance counters.
    profiled: Callable[[str], Any]

    @property
    def mode(self) -> str:
        """Version, precision and hint."""
        return f"{self.version}, {self.chosen}, latency hint"

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name."""
        request = self._request(self.compiled[self.chosen], inputs)
        request.infer()
        return {name: request.get_output_tensor(index).data.copy() for index, name in enumerate(self.outputs)}

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Bind inference on shared memory: neither inputs nor outputs are copied."""
        calls = {name: self._call(name, inputs) for name in self.compiled}
        self.chosen = fastest(calls)
        return calls[self.chosen]

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        """Times of every executed node, by the plug-in's counters in whole microseconds: means without the warm-up
        runs.
        """
        compiled, clock = self.profiled(self.chosen), time.perf_counter
        request = self._request(compiled, inputs)
        for _ in range(_WARMUP_RUNS):
            request.infer(share_outputs=True)
        first = {each.node_name: each.real_time.total_seconds() for each in request.get_profiling_info()}
        end, runs = clock() + seconds, _WARMUP_RUNS
        while runs < 4 * _WARMUP_RUNS or clock() < end:
            request.infer(share_outputs=True)
            runs += 1
        facts = {node.get_friendly_name(): node.get_rt_info() for node in compiled.get_runtime_model().get_ops()}
        found = []
        for each in request.get_profiling_info():
            if each.status.name == "EXECUTED":
                # Counters are means since the creation of the request.
                sums = runs * each.real_time.total_seconds() - _WARMUP_RUNS * first[each.node_name]
                names = tuple(filter(None, _text(facts.get(each.node_name, {}), "originalLayersNames").split(",")))
                found.append(LayerTime(names, max(0.0, sums / (runs - _WARMUP_RUNS)), each.exec_type))
        return found

    def _call(self, name: str, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        request = self._request(self.compiled[name], inputs)
        return lambda: request.infer(share_outputs=True)

    def _request(self, compiled: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        from openvino import Tensor

        request = compiled.create_infer_request()
        for index, each in enumerate(self.inputs):
            request.set_input_tensor(index, Tensor(np.asarray(inputs[each], order="C"), shared_memory=True))
        return request


@dataclass(frozen=True)
class OpenVinoEngine:
    """OpenVINO with one precision requirement."""

    # Inference precision hints to try, ``f32`` or ``bf16``; the fastest is used.
    hints: tuple[str, ...]
    # Names of the precision that layers must have, or None.
    required: tuple[str, ...] | None = None

    def prepare(self, workload: EngineWorkload, progress: Say) -> OpenVinoSession:
        """Read, reshape and compile the model. Raises ``Unavailable`` if the CPU lacks the precision."""
        import openvino

        core = openvino.Core()
        model, names = _read(core, workload)
        compiled: dict[str, Any] = {}
        hint_of: dict[str, str] = {}
        refusals: list[str] = []
        for hint in self.hints:
            try:
                made = _compile(core, model, hint, workload.threads)
                way = _described(_precisions(made), hint, self.required)
                compiled[way], hint_of[way] = made, hint
            except Unavailable as reason:
                refusals.append(str(reason))
        if not compiled:
            raise Unavailable(refusals[0])
        wanted = {info.name: None for info in workload.outputs}
        outputs = tuple(_name(port, wanted) for port in model.outputs)
        version = openvino.__version__.split("-")[0]

        def profiled(way: str) -> Any:
            return _compile(core, _read(core, workload)[0], hint_of[way], workload.threads, {"PERF_COUNT": True})

        return OpenVinoSession(version, compiled, names, outputs, next(iter(compiled)), profiled)


def _read(core: Any, workload: EngineWorkload) -> tuple[Any, tuple[str, ...]]:
    """Model with the shapes of the workload, and its input names as in the interface."""
    model = core.read_model(str(workload.model))
    shapes = {info.name: list(info.shape) for info in workload.inputs}
    names = tuple(_name(port, shapes) for port in model.inputs)
    if model.is_dynamic():
        model.reshape({port: shapes[name] for port, name in zip(model.inputs, names, strict=True)})
    return model, names


def _compile(core: Any, model: Any, hint: str, threads: int, further: Mapping[str, Any] | None = None) -> Any:
    """Compile with ``hint`` and ``further`` settings; raise ``Unavailable`` if OpenVINO uses another precision."""
    settings = {
        **(further or {}),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": hint,
    }
    compiled = core.compile_model(model, "CPU", settings)
    actual = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if actual not in (hint, _FULL_NAMES[hint]):
        raise Unavailable(f"OpenVINO runs {actual}, not {hint}, on this CPU")
    return compiled


def _precisions(compiled: Any) -> Counter[str]:
    """Number of layers per precision."""
    facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    return Counter(_text(each, "runtimePrecision").lower() for each in facts if _text(each, "layerType") in _LAYERS)


def _text(facts: Any, key: str) -> str:
    return facts[key].astype(str) if key in facts else ""


def _described(counts: Mapping[str, int], hint: str, required: tuple[str, ...] | None) -> str:
    """Text on the precision of the layers. Raises ``Unavailable`` if none has the required one."""
    integers, layers = count_of(counts, _INTEGERS)
    if required == _BFLOAT16 and layers:  # without layers the hint is the only information
        return require_precision("OpenVINO", "bf16", *count_of(counts, _BFLOAT16))
    if required == _INTEGERS:
        told = require_precision("OpenVINO", "int8", integers, layers)
        return f"{told}, the rest {hint}"
    return f"{precision_text('int8', integers, layers)}, the rest {hint}" if integers else hint


def _name(port: Any, known: Mapping[str, Any]) -> str:
    """Name of a port in the interface; a port may have several names."""
    return next(name for name in port.get_names() if name in known)


FP32 = OpenVinoEngine(("f32",))
BF16 = OpenVinoEngine(("bf16",), _BFLOAT16)
INT8 = OpenVinoEngine(("f32", "bf16"), _INTEGERS)
