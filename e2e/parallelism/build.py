"""The entry point: a model, a step and a way to spread it -> the graph of its distinct ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from costmodel.errors import InputError
from e2e.graph import ExecutionGraph
from e2e.memory import MemoryUsage
from e2e.parallelism.spec import ParallelSpec


@dataclass(frozen=True)
class Step:
    """One training step. ``batch_size``: sequences of one micro-batch on one replica, so that a step sees
    ``batch_size * micro_batches * dp * fsdp`` of them; ``sequence_length``: tokens (``None``: what the model is made
    for); ``dtype`` and ``attention`` as in :class:`e2e.capture.CaptureOptions`.
    """

    batch_size: int = 1
    sequence_length: int | None = None
    dtype: str = "float32"
    attention: str = "eager"


@dataclass(frozen=True)
class ParallelGraph:
    """``graph``: unpriced, one rank per pipeline stage, each standing for ``multiplicity`` alike ones.

    ``memory``: by rank of the graph. ``samples``: sequences that all ranks together process in a step.
    """

    graph: ExecutionGraph
    memory: Mapping[int, MemoryUsage]
    samples: int
    warnings: tuple[str, ...] = field(default=())


def build(model: str | Path, spec: ParallelSpec, step: Step | None = None) -> ParallelGraph:
    """The step of ``model`` spread as ``spec`` says, for :func:`e2e.multi_rank.predict_ranks`.

    ``model``: a built-in transformer's name (``gpt3-xl``) or the path of a Hugging Face configuration. Ranks are
    numbered as Megatron-LM does: tensor-parallel neighbours first, then replicas, then stages, so that tensor-parallel
    groups lie inside a node. Collectives are tasks without a price whose ``ranks`` are the global ranks of the group.
    ``InputError`` for an unknown model and for sizes that do not divide (layers by stages, heads by ``tp``).
    """
    raise InputError(f"{model}: --parallel is not built yet")
