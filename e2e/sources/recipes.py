"""Training recipes: ``--recipe NAME`` sets kernels, number types, optimizer and overlap as a training library does.

:data:`TRAINING_RECIPES` is the table; ``docs/parallel.md`` describes the recipes. Requests of models fill the values of
their recipe in for all options that were not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from e2e.parallelism.spec import ParallelSpec, Recompute, ReduceDtype, text_of
from e2e.step.options import AttentionForm, Dtype

if TYPE_CHECKING:
    from costmodel.machines.machine_records import Machine

# 16-bit number types in order of preference; the first supported by the GPU is used.
NUMBER_TYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
# Attention kernel that supports documents on every GPU with fused attention.
PACKED_ATTENTION: AttentionForm = "flash2"
DEFAULT_RECIPE = "plain"


@dataclass(frozen=True)
class TrainingRecipe:
    """Defaults of a training or inference library."""

    about: str
    # Source of kernels and optimizer (`e2e.capture.models.stacks.STACKS`).
    stack: str | None = None
    # Attention kernel; on GPUs of the architectures in `newer_attention` the kernel given there.
    attention: AttentionForm = "flash"
    newer_attention: Mapping[str, AttentionForm] = field(default_factory=dict)
    # FP32 weights and states, in addition to 16-bit copies.
    master_weights: bool = True
    # Number type in which gradients are summed.
    reduce_dtype: ReduceDtype = "same"
    # Sequence parallelism with `tp`; `tp_overlap`: its gathers overlap with matrix products.
    sequence_parallel: bool = False
    tp_overlap: bool = False
    # ZeRO stage of `fsdp` ranks, without and with a pipeline.
    sharing: int = 3
    pipeline_sharing: int | None = None
    # Parameters that stay whole during the passes are gathered during the forward pass.
    overlap_gather: bool = False
    # True for a recipe of inference only.
    serves: bool = False
    # Words of `recompute=` with another meaning in this recipe.
    recompute_words: Mapping[str, Recompute] = field(default_factory=dict)

    def recompute(self, word: Recompute) -> Recompute:
        """Return the recomputation that ``recompute=word`` means in this recipe."""
        return self.recompute_words.get(word, word)

    def kernel(self, machine: Machine) -> AttentionForm:
        """Return the attention kernel on ``machine``."""
        return self.newer_attention.get(machine.chip().architecture, self.attention)

    def spread(self, spec: ParallelSpec, *, masters: bool, inference: bool, length: int | None) -> ParallelSpec:
        """Return ``spec`` with this recipe's values for everything that it leaves open.

        ``masters``: the number type has FP32 master weights; ``length``: tokens of a sequence, if given.
        """
        if self.recompute(spec.recompute) != spec.recompute:
            if spec.recompute_modules != "core_attn":
                raise InputError(
                    f"--parallel {text_of(spec)!r}: recompute-modules is Megatron's; {self.about} has "
                    f"recompute={spec.recompute} without it"
                )
            spec = replace(spec, recompute=self.recompute(spec.recompute))
        split = spec.tp > 1 and (length is None or length % (spec.cp * spec.tp) == 0)
        found = replace(spec, sequence_parallel=_or(spec.sequence_parallel, self.sequence_parallel and split))
        found = replace(
            found, tp_overlap=_or(spec.tp_overlap, self.tp_overlap and bool(found.sequence_parallel) and not inference)
        )
        if inference:
            return found
        if spec.zero is None and (spec.fsdp > 1 or (spec.dp == 1 and spec.cp > 1 and self.sharing != 3)):
            sharing = self.sharing if spec.pp == 1 else self.pipeline_sharing or self.sharing
            found = replace(found, zero=sharing)
        return replace(
            found,
            master_weights=_or(spec.master_weights, self.master_weights and masters),
            reduce_dtype=spec.reduce_dtype or (self.reduce_dtype if masters else "same"),
            overlap_gather=_or(spec.overlap_gather, self.overlap_gather and found.sharing in (1, 2)),
        )


def _or(asked: bool | None, otherwise: bool) -> bool:
    return otherwise if asked is None else asked


TRAINING_RECIPES: dict[str, TrainingRecipe] = {
    "plain": TrainingRecipe("PyTorch's modules", sequence_parallel=True),
    # accelerate's mixed precision for FSDP has reduce_dtype=bfloat16 with bf16=True.
    "hf-trainer": TrainingRecipe("Trainer of transformers with bf16=True", stack="huggingface"),
    # job_config.py: mixed_precision_reduce is float32; parallelize_llama.py: sequence parallel wherever there is tp;
    # apply_fsdp: in a pipeline parameters stay gathered and gradients whole from the first micro-batch to the last.
    # activation_checkpoint.mode = "selective" with its default option "op" saves attention and every second product.
    "torchtitan": TrainingRecipe(
        "torchtitan with FSDP2",
        stack="torchtitan", reduce_dtype="float32", sequence_parallel=True, pipeline_sharing=1, overlap_gather=True,
        recompute_words={"selective": "operators"},
    ),
    # NVIDIA's recipes (Megatron-Bridge, scripts/performance): distributed optimizer with overlap_param_gather,
    # sequence parallel, user buffers (tp_comm_overlap), gradients reduced in BF16; Transformer Engine's attention is
    # cuDNN's on Hopper and FlashAttention 2 before.
    "megatron": TrainingRecipe(
        "Megatron-Core with Transformer Engine, as NeMo and Megatron-Bridge set it",
        stack="megatron", attention="flash2", newer_attention={"hopper": "cudnn", "blackwell": "cudnn"},
        sequence_parallel=True, tp_overlap=True, sharing=1, overlap_gather=True,
    ),
    # scripts/train/yamls: attn_impl flash, FSDP with mixed precision PURE.
    "llm-foundry": TrainingRecipe("llm-foundry with Composer and FSDP", stack="llm-foundry", attention="flash2"),
    # bf16 engine: BF16 weights and gradients, FP32 masters in FusedAdam; communication_data_type is that of the model.
    "deepspeed": TrainingRecipe("DeepSpeed ZeRO over modules of transformers", stack="huggingface"),
    "pure-bf16": TrainingRecipe(
        "as plain, but weights, gradients and Adam's states are BF16 alone", master_weights=False,
        sequence_parallel=True,
    ),
    "vllm": TrainingRecipe(
        "kernels as serving engines have them (vLLM, TensorRT-LLM)",
        stack="te", newer_attention={"hopper": "flash3"}, serves=True,
    ),
}  # fmt: skip


def training_recipe(name: str | None) -> TrainingRecipe:
    """Return the recipe ``name`` (``None``: the default); raises ``InputError`` for an unknown name."""
    if name is not None and name not in TRAINING_RECIPES:
        raise InputError(f"--recipe {name}: choose one of {', '.join(TRAINING_RECIPES)}")
    return TRAINING_RECIPES[name or DEFAULT_RECIPE]
