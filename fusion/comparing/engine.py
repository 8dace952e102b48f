"""Engines that run ONNX models in the measurement protocol: their interface, shared code, and the table of all
engines by name. Packages are imported only in the engine's own process.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from costmodel.base.errors import InputError, Say
from fusion.model.conv_graph import BFLOAT16, FLOAT32, INT8
from fusion.model.named_arrays import Arrays, TensorInfo
from schedules.contract.template import load_extensions

EngineCall = Callable[[], Any]
# Number of rounds in which an engine's modes alternate, and seconds of a block.
ROUNDS = 7
SECONDS_PER_BLOCK = 0.05
# Drop a mode whose first-round time is above this multiple of the fastest: slow modes of large models would take
# minutes.
HOPELESS = 4.0


class Unavailable(Exception):
    """Raised if an engine cannot run here or cannot run this model; the message is the reason."""


@dataclass(frozen=True)
class EngineWorkload:
    """One model, as given to all engines."""

    model: Path
    model_sha256: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    threads: int
    # Build directory.
    build: Path
    # Folder for an engine's compiled files.
    cache: Path
    # Effort of engines that tune themselves.
    trials_per_task: int = 64
    # True for the reference: no float layer may be computed with fewer bits.
    exact: bool = False


@dataclass(frozen=True)
class LayerTime:
    """Time of one kernel of an engine in a run of the network."""

    # Names of the ONNX nodes or tensors that it computes, as far as known; incomplete for some fused kernels.
    names: tuple[str, ...]
    # Typical value over many runs.
    seconds: float
    # The engine's name of the kernel.
    kernel: str


def typical(durations: Sequence[float]) -> float:
    """Mean of the middle half: as robust as a median, and finer for clocks with microsecond resolution."""
    ordered = np.sort(np.asarray(durations, dtype=float))
    outside = len(ordered) // 4
    return float(ordered[outside : len(ordered) - outside].mean())


class Session(Protocol):
    """A model loaded in one engine, ready to run."""

    @property
    def mode(self) -> str:
        """Description of how the engine runs it: best mode, precision, version."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name."""

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Return the cheapest repeated call on fixed inputs, for timing."""


class ProfiledSession(Session, Protocol):
    """A session that can measure its kernels."""

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        """Measure every kernel in runs for ``seconds``. Raises :class:`Unavailable` if the engine has no such times."""


class Engine(Protocol):
    """A way to run ONNX models on this CPU."""

    def prepare(self, workload: EngineWorkload, progress: Say) -> Session:
        """Load, compile and tune; ``progress`` is called before long steps.

        Raises :class:`Unavailable` with the reason; any exception only fails this engine.
        """


def fastest(calls: Mapping[str, EngineCall]) -> str:
    """Name of the mode with the smallest median time, measured in alternating blocks of back-to-back calls."""
    if len(calls) == 1:
        return next(iter(calls))
    first = {name: _block(call) for name, call in calls.items()}
    least = min(first.values())
    samples = {name: [seconds] for name, seconds in first.items() if seconds <= HOPELESS * least}
    for _ in range(ROUNDS - 1 if len(samples) > 1 else 0):
        for name in samples:
            samples[name].append(_block(calls[name]))
    return min(samples, key=lambda name: statistics.median(samples[name]))


def _block(call: EngineCall) -> float:
    """Median seconds of one block, without its warm-up call."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS_PER_BLOCK
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def precision_text(precision: str, share: int, layers: int) -> str:
    """Text of the precision that an engine computes in: ``bf16 in 52 of 53 layers``, or its name only if all do."""
    return precision if share == layers else f"{precision} in {share} of {layers} layers"


def require_precision(engine: str, precision: str, share: int, layers: int) -> str:
    """Text of :func:`precision_text`; raises ``Unavailable`` if no layer is computed in the precision."""
    if not share:
        raise Unavailable(f"{engine} computes none of the {layers} layers in {precision} on this CPU")
    return precision_text(precision, share, layers)


def count_of(counts: Mapping[str, int], names: tuple[str, ...]) -> tuple[int, int]:
    """(Number of layers with a precision in ``names``, number of all layers); ``counts``: layers by precision."""
    return sum(counts.get(name, 0) for name in names), sum(counts.values())


TUNED = "tuned"
REFERENCE = "onnxruntime"
UNFUSED_ENGINE = "tvm-unfused"


@dataclass(frozen=True)
class EngineSpec:
    """Location of an engine (``module:attribute``), the packages it imports, and the extra of this project that
    installs them (empty for an engine from outside).

    ``precision``: number type of its layers; an INT8 engine runs the quantised file of the model.
    """

    name: str
    location: str
    packages: tuple[str, ...]
    extra: str = ""
    precision: str = FLOAT32

    def missing(self) -> str | None:
        """Reason why the engine cannot be used here, or None if its packages are installed. Imports nothing."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if not absent:
            return None
        wanted = f"-e '.[{self.extra}]'" if self.extra else " ".join(absent)
        return f"{', '.join(absent)} not installed: pip install {wanted}"

    def load(self) -> Engine:
        """Import the engine."""
        module, _, attribute = self.location.partition(":")
        return cast(Engine, getattr(importlib.import_module(module), attribute))


ENGINES: dict[str, EngineSpec] = {}


def register(spec: EngineSpec) -> EngineSpec:
    """Add an engine to those of ``fusion compare``.

    For an engine outside of this project, call it in a module that an entry point of the group ``fusion.extensions``
    names.
    """
    ENGINES[spec.name] = spec
    return spec


for _spec in (
    EngineSpec(TUNED, "fusion.comparing.apache_tvm:TUNED", ("tvm",), "fusion"),
    EngineSpec(UNFUSED_ENGINE, "fusion.comparing.apache_tvm:UNFUSED", ("tvm",), "fusion"),
    EngineSpec("tvm-metaschedule", "fusion.comparing.apache_tvm:METASCHEDULE", ("tvm", "onnx"), "fusion"),
    EngineSpec(REFERENCE, "fusion.comparing.onnx_runtime:ENGINE", ("onnxruntime",), "fusion"),
    EngineSpec("openvino", "fusion.comparing.open_vino:FP32", ("openvino",), "peers"),
    EngineSpec("openvino-bf16", "fusion.comparing.open_vino:BF16", ("openvino",), "peers", BFLOAT16),
    EngineSpec("openvino-int8", "fusion.comparing.open_vino:INT8", ("openvino",), "peers", INT8),
    EngineSpec("onnxruntime-int8", "fusion.comparing.onnx_runtime:INT8", ("onnxruntime",), "fusion", INT8),
    EngineSpec("torch", "fusion.comparing.pytorch:BEST", ("torch", "onnx", "onnx2fx"), "peers"),
    EngineSpec("torch-eager", "fusion.comparing.pytorch:EAGER", ("torch", "onnx", "onnx2fx"), "peers"),
    EngineSpec("zentorch", "fusion.comparing.pytorch:ZENTORCH", ("torch", "onnx", "onnx2fx", "zentorch"), "zentorch"),
    EngineSpec("torch-bf16", "fusion.comparing.pytorch:BF16", ("torch", "onnx", "onnx2fx"), "peers", BFLOAT16),
):
    register(_spec)
# Engines without tuning.
DEFAULT = ("onnxruntime", "openvino", "openvino-bf16", "torch", "torch-eager", UNFUSED_ENGINE)


def peers_of(precision: str) -> tuple[str, ...]:
    """Names of other engines in ``precision`` (``float32``, ``bfloat16`` or ``int8``), without those that tune."""
    ours = (TUNED, UNFUSED_ENGINE, "tvm-metaschedule")
    return tuple(spec.name for spec in ENGINES.values() if spec.precision == precision and spec.name not in ours)


def select_engines(names: Iterable[str]) -> list[EngineSpec]:
    """Engines of these names in the given order, with ``tuned`` first. Raises ``InputError``."""
    load_extensions()
    chosen = {TUNED: ENGINES[TUNED]}
    for name in names:
        if name not in ENGINES:
            raise InputError(f"--against {name}: no such engine; there are {', '.join(ENGINES)}")
        chosen[name] = ENGINES[name]
    return list(chosen.values())
