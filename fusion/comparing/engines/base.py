"""What every engine that runs an ONNX model offers to the measurement protocol, and what engines share."""

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
# An engine's modes take turns for so many rounds, in blocks of so many seconds.
ROUNDS = 7
SECONDS_PER_BLOCK = 0.05
# A call that takes so many times as long as another in the first round is not tried again: slow modes of large models
# would take minutes.
HOPELESS = 4.0


class Unavailable(Exception):
    """This engine cannot run here or cannot run this model; the message is the reason."""


@dataclass(frozen=True)
class EngineWorkload:
    """One model as all engines see it. ``build``: the build directory; ``cache``: where an engine keeps what it
    compiled. ``trials_per_task``: effort of engines that tune themselves. ``exact``: it is what others are compared
    with, and no layer of floats may be computed in fewer bits.
    """

    model: Path
    model_sha256: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    threads: int
    build: Path
    cache: Path
    trials_per_task: int = 64
    exact: bool = False


@dataclass(frozen=True)
class LayerTime:
    """What one kernel of an engine takes in a run of the network.

    ``names``: of the ONNX nodes, or of the tensors, that it is known to compute, as far as the engine tells them; of a
    fused kernel some may be missing. ``seconds``: typical over many runs; ``kernel``: the engine's own name of it.
    """

    names: tuple[str, ...]
    seconds: float
    kernel: str


def typical(durations: Sequence[float]) -> float:
    """The mean of the middle half: as robust as a median, and finer where a clock counts whole microseconds."""
    ordered = np.sort(np.asarray(durations, dtype=float))
    outside = len(ordered) // 4
    return float(ordered[outside : len(ordered) - outside].mean())


class Session(Protocol):
    """A model that is loaded and ready in one engine."""

    @property
    def mode(self) -> str:
        """How the engine runs it: its best mode, precision, version."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All outputs by name."""

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """The cheapest repeated call on fixed inputs, for timing."""


class ProfiledSession(Session, Protocol):
    """A session that tells where a run's time goes."""

    def layers(self, inputs: Mapping[str, np.ndarray], seconds: float) -> list[LayerTime]:
        """Every kernel of a run, from runs for ``seconds``. :class:`Unavailable` where they cannot be told."""


class Engine(Protocol):
    """A way to run ONNX models on this CPU."""

    def prepare(self, workload: EngineWorkload, progress: Say) -> Session:
        """Load, compile, tune; ``progress`` hears what takes long.

        Raises :class:`Unavailable` with the reason, or anything else: it fails this engine alone.
        """


def fastest(calls: Mapping[str, EngineCall]) -> str:
    """Name of the mode with the least median, measured in alternating blocks of back-to-back calls."""
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
    """Median seconds of one block; its first call only warms up."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS_PER_BLOCK
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def told_share(precision: str, share: int, layers: int) -> str:
    """Precision that an engine really computes in: ``bf16 in 52 of 53 layers``, or its name alone where all are."""
    return precision if share == layers else f"{precision} in {share} of {layers} layers"


def require_precision(engine: str, precision: str, share: int, layers: int) -> str:
    """The text of :func:`told_share`; ``Unavailable`` where no layer is computed in the precision."""
    if not share:
        raise Unavailable(f"{engine} computes none of the {layers} layers in {precision} on this CPU")
    return told_share(precision, share, layers)


def count_of(counts: Mapping[str, int], names: tuple[str, ...]) -> tuple[int, int]:
    """How many layers have a precision of ``names``, and how many there are; ``counts``: layers by precision."""
    return sum(counts.get(name, 0) for name in names), sum(counts.values())
