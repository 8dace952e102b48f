"""One request: workload x configuration x machine. Every option of ``predict`` is typed here, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.operators.expert_routing import BALANCED, ExpertRouting
from e2e.capture.script_reference import Script
from e2e.parallelism.spec import ParallelSpec
from e2e.step.choices import (
    AttentionForm,
    Dtype,
    LinearAttentionForm,
    MemoryLayout,
    MixtureForm,
    Mode,
    OptimizerForm,
)
from e2e.step.precision import Precision
from e2e.whatif.questions import WhatIf

if TYPE_CHECKING:
    from e2e.simulate.skew import Skew


@dataclass(frozen=True)
class WorkloadOptions:
    """What is computed. ``model``: a built-in one's name; ``model_config``: a Hugging Face configuration; ``script``:
    ``FILE.py:FUNCTION``, or the function; ``traces`` and ``kineto``: execution traces and profiles of a recorded run;
    ``tables``: the embedding tables of a sharded DLRM. Sizes that are ``None``: 1 and the model's own, of a script and
    a sharding plan their own. ``document_length``: tokens of each document of which sequences are packed (``None``: a
    sequence is one).
    """

    model: str | None = None
    model_config: Path | None = None
    script: Script | None = None
    traces: tuple[str, ...] = ()
    kineto: tuple[str, ...] = ()
    tables: Path | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    mode: Mode = "train"
    document_length: int | None = None
    cache_length: int | None = None

    @property
    def samples(self) -> int:
        """The batch size where nothing else has one of its own."""
        return 1 if self.batch_size is None else self.batch_size


@dataclass(frozen=True)
class ConfigurationOptions:
    """How it is computed. ``dtype`` and ``attention``: ``None`` for what the recipe says, of others than transformers
    float32 and flash, as PyTorch itself would choose; ``overheads``: a table of host overheads (``None``: by the
    GPU's generation); ``sharding``: a plan of ``python -m e2e shard``; ``ranks``: those of a script to capture,
    where it does not show that they differ; ``stack``: a name of :data:`e2e.capture.models.stacks.STACKS`
    (``None``: kernels as the model's library writes them); ``lora``: the rank of adapters beside frozen weights;
    ``layout``: of a built-in image model and its pictures. ``mixture``: how experts of built-in models are
    computed, ``routing`` how they share the rows of tokens; ``recipe``: a name of
    :data:`e2e.sources.recipes.TRAINING_RECIPES`, which says what is left open (``dtype``, ``attention``, ``stack``,
    keys of ``parallel``) for transformers; ``precision``: a recipe of 8 bits; ``linear_attention``: by fused
    kernels or not (``None``: where their libraries are installed); ``optimizer``: how parameters are updated where
    a model leaves it open (``None``: as the stack does).
    """

    dtype: Dtype | None = None
    attention: AttentionForm | None = None
    cuda_graph: bool = False
    compiled: bool = False
    overheads: Path | None = None
    parallel: ParallelSpec | None = None
    sharding: Path | None = None
    ranks: tuple[int, ...] = ()
    stack: str | None = None
    lora: int | None = None
    layout: MemoryLayout = "contiguous"
    mixture: MixtureForm = "grouped"
    routing: ExpertRouting = BALANCED
    precision: Precision | None = None
    linear_attention: LinearAttentionForm | None = None
    optimizer: OptimizerForm | None = None
    recipe: str | None = None

    @property
    def number_type(self) -> Dtype:
        """``dtype``; single precision where neither an option nor a recipe says one."""
        return self.dtype or "float32"


@dataclass(frozen=True)
class MachineOptions:
    """On what. ``gpu``: a name or file of a machine or cluster; ``gpus`` and ``nodes``: of the whole job; ``retarget``:
    the GPU to which a recorded run is moved; ``skew``: how ranks vary.
    """

    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    network: str | None = None
    retarget: str | None = None
    skew: Skew | None = None


@dataclass(frozen=True)
class PredictRequest:
    """All that ``predict`` is asked: what is computed, how, on what, and what if that were changed. The defaults ask
    for nothing. ``bucket_mb``: MiB of a gradient bucket, where a question about a script wants others than its own;
    ``master_weights``: FP32 weights and states of the optimizer beside 16-bit weights on one GPU, as a recipe says.
    """

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    configuration: ConfigurationOptions = field(default_factory=ConfigurationOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    what_if: tuple[WhatIf, ...] = ()
    bucket_mb: float | None = None
    master_weights: bool = False
