"""Interface of engines that run ONNX models in the measurement protocol, and shared code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from costmodel.base.say import Say
from fusion.model.named_arrays import Arrays
from fusion.model.tensor_info import TensorInfo

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


def told_share(precision: str, share: int, layers: int) -> str:
    """Text of the precision that an engine computes in: ``bf16 in 52 of 53 layers``, or its name only if all do."""
    return precision if share == layers else f"{precision} in {share} of {layers} layers"


def require_precision(engine: str, precision: str, share: int, layers: int) -> str:
    """Text of :func:`told_share`; raises ``Unavailable`` if no layer is computed in the precision."""
    if not share:
        raise Unavailable(f"{engine} computes none of the {layers} layers in {precision} on this CPU")
    return told_share(precision, share, layers)


def count_of(counts: Mapping[str, int], names: tuple[str, ...]) -> tuple[int, int]:
    """(Number of layers with a precision in ``names``, number of all layers); ``counts``: layers by precision."""
    return sum(counts.get(name, 0) for name in names), sum(counts.values())
