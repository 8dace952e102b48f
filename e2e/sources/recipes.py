"""Training recipes: ``--recipe NAME`` sets kernels, number types, optimizer and overlap as a training library does.

:data:`TRAINING_RECIPES` is the table; ``docs/parallel.md`` describes the recipes. :func:`settled` fills the values of a
recipe in for all options that were not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine
from e2e.parallelism.spec import ParallelSpec, Recompute, ReduceDtype, keys_of, text_of
from e2e.sources.known_requests import Model, SpreadModel
from e2e.sources.prepared_step import gpu_machine
from e2e.step.options import AttentionForm, Dtype

# 16-bit number types in order of preference; the first supported by the GPU is used.
NUMBER_TYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
# Attention kernel that supports documents on every GPU with fused attention.
PACKED_ATTENTION: AttentionForm = "flash2"
DEFAULT_RECIPE = "plain"
M = TypeVar("M", Model, SpreadModel)


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


def recipe_of(name: str | None) -> TrainingRecipe:
    """Return the recipe ``name`` (``None``: the default); raises ``InputError`` for an unknown name."""
    if name is not None and name not in TRAINING_RECIPES:
        raise InputError(f"--recipe {name}: choose one of {', '.join(TRAINING_RECIPES)}")
    return TRAINING_RECIPES[name or DEFAULT_RECIPE]


def settled(request: M) -> M:
    """Return ``request`` with the recipe's values for all options that were not given.

    Models without sequences have their own defaults. Raises ``InputError`` for a recipe that does not support the mode.
    """
    recipe = recipe_of(request.recipe)
    if not has_sequences(request):
        return request
    if recipe.serves and request.mode != "inference":
        raise InputError(f"--recipe {request.recipe}: is for inference; give --mode inference, or another recipe")
    machine = gpu_machine(request.gpu)
    dtype = request.dtype or next((each for each in NUMBER_TYPES if each in machine.compute), "float32")
    masters = dtype in NUMBER_TYPES
    found: Any = replace(
        request,
        dtype=dtype,
        attention=request.attention or _attention(request, recipe, machine),
        stack=request.stack or recipe.stack,
    )
    if isinstance(request, Model):
        found = replace(found, master_weights=masters and recipe.master_weights and request.mode == "train")
    if isinstance(request, Model) or found.parallel is None:
        filled: M = found
        return filled
    inference, length = request.mode == "inference", request.sequence_length
    spec = recipe.spread(found.parallel, masters=masters, inference=inference, length=length)
    return replace(found, parallel=spec)


def settled_texts(request: Model | SpreadModel, found: Model | SpreadModel) -> dict[str, str]:
    """Describe, by option, the values that the recipe of ``request`` has set in ``found``."""
    if found is request:
        return {}
    recipe = recipe_of(request.recipe)
    spec = None if isinstance(found, Model) else found.parallel
    masters = found.master_weights if isinstance(found, Model) else spec is not None and bool(spec.master_weights)
    kept = "FP32 master weights and states" if masters else "no FP32 master weights"
    forward = request.mode != "train"
    texts = {
        "--recipe": f"{DEFAULT_RECIPE} ({recipe.about}{'' if forward else ' and AdamW'})",
        "--dtype": f"{found.dtype}" + ("" if forward or found.dtype not in NUMBER_TYPES else f" ({kept})"),
    }
    if found.stack is not None:
        texts["--stack"] = found.stack
    if isinstance(request, SpreadModel) and request.parallel is not None and spec is not None:
        given, whole = keys_of(request.parallel), keys_of(spec)
        more = [f"{key}={value}" for key, value in whole.items() if key not in given and value not in ("no", "same")]
        texts["--parallel"] = ",".join(more)
    return texts


def meant_texts(request: SpreadModel, found: SpreadModel) -> dict[str, str]:
    """Describe, by option, values of ``request`` whose meaning differs in its recipe, as set in ``found``."""
    asked, spec = request.parallel, found.parallel
    if asked is None or spec is None or asked.recompute == spec.recompute:
        return {}
    return {"--parallel": f"{text_of(asked)} ({request.recipe}'s {asked.recompute}: recompute={spec.recompute} here)"}


def has_sequences(request: Model | SpreadModel) -> bool:
    """True if the model is a transformer."""
    from e2e.capture.models.transformer import PRESETS

    return request.model_config is not None or request.model in PRESETS or Path(request.model or "").suffix == ".json"


def _attention(request: Model | SpreadModel, recipe: TrainingRecipe, machine: Machine) -> AttentionForm:
    """Return the attention kernel of ``recipe``, or the nearest one that the library's model supports."""
    from e2e.capture.models.transformer import attention_forms
    from e2e.parallelism.parallel_graph import configuration

    if request.document_length is not None:
        return PACKED_ATTENTION
    wanted = recipe.kernel(machine)
    known = attention_forms(*configuration(request.named))
    return wanted if wanted in known or not known else next(iter(known))
