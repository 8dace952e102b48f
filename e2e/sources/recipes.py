"""Which recipe is what: ``--recipe NAME`` sets kernels, number types, optimizer and overlap as one way to train does.

:data:`TRAINING_RECIPES` is the one table; ``docs/parallel.md`` says which recipe is for what. :func:`settled` puts what
a recipe says in the place of everything that was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine
from e2e.parallelism.spec import ParallelSpec, Recompute, ReduceDtype, keys_of, text_of
from e2e.sources.asked.option_table import BUILT_IN, CONFIGURATION, PARALLEL
from e2e.sources.asked.request import PredictRequest
from e2e.sources.request_parts import gpu_machine
from e2e.step.choices import AttentionForm, Dtype

# Number types of a GPU that are taken, the first that it has units for.
NUMBER_TYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
# The kernel that knows documents on every GPU that has fused attention.
PACKED_ATTENTION: AttentionForm = "flash2"
DEFAULT_RECIPE = "plain"


@dataclass(frozen=True)
class TrainingRecipe:
    """``stack``: whose kernels and optimizer (:data:`e2e.capture.models.stacks.STACKS`). ``attention``: the kernel,
    on GPUs of the architectures that ``newer_attention`` names the one there. ``master_weights``: FP32 weights and
    states beside 16-bit copies. ``reduce_dtype``: in which gradients are summed. ``sequence_parallel``: with ``tp``;
    ``tp_overlap``: what it gathers goes beside products. ``sharing``: what ``fsdp`` ranks share, in a pipeline
    ``pipeline_sharing``; ``overlap_gather``: parameters that are whole in the passes are gathered beside the forward
    pass. ``serves``: for inference alone. ``recompute_words``: words of ``recompute=`` by which the tool means another
    recomputation than the word says without it.
    """

    about: str
    stack: str | None = None
    attention: AttentionForm = "flash"
    newer_attention: Mapping[str, AttentionForm] = field(default_factory=dict)
    master_weights: bool = True
    reduce_dtype: ReduceDtype = "same"
    sequence_parallel: bool = False
    tp_overlap: bool = False
    sharing: int = 3
    pipeline_sharing: int | None = None
    overlap_gather: bool = False
    serves: bool = False
    recompute_words: Mapping[str, Recompute] = field(default_factory=dict)

    def recompute(self, word: Recompute) -> Recompute:
        """The recomputation that ``recompute=word`` means where this recipe is named."""
        return self.recompute_words.get(word, word)

    def kernel(self, machine: Machine) -> AttentionForm:
        """The kernel of attention on ``machine``."""
        return self.newer_attention.get(machine.chip().architecture, self.attention)

    def spread(self, spec: ParallelSpec, *, masters: bool, inference: bool, length: int | None) -> ParallelSpec:
        """``spec`` with what this recipe says of all that it leaves open. ``masters``: the number type has FP32 master
        weights; ``length``: tokens of a sequence, as far as they are asked for.
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
    """The recipe ``name`` (``None``: the default one); ``InputError`` for an unknown name."""
    if name is not None and name not in TRAINING_RECIPES:
        raise InputError(f"--recipe {name}: choose one of {', '.join(TRAINING_RECIPES)}")
    return TRAINING_RECIPES[name or DEFAULT_RECIPE]


def settled(request: PredictRequest, source: str) -> PredictRequest:
    """``request`` to the source of this name, with what its recipe says in the place of what is not asked for.

    A script, a trace and models without sequences say themselves what they do. ``InputError`` for a recipe that is not
    for the mode.
    """
    workload, asked = request.workload, request.configuration
    recipe = recipe_of(asked.recipe)
    if source not in (BUILT_IN, CONFIGURATION, PARALLEL) or request.machine.gpu is None or not has_sequences(request):
        return request
    inference = workload.mode == "inference"
    if recipe.serves and not inference:
        raise InputError(f"--recipe {asked.recipe}: is for inference; give --mode inference, or another recipe")
    machine = gpu_machine(request.machine.gpu)
    dtype = asked.dtype or next((each for each in NUMBER_TYPES if each in machine.compute), "float32")
    masters = dtype in NUMBER_TYPES
    spec = asked.parallel
    if spec is not None:
        spec = recipe.spread(spec, masters=masters, inference=inference, length=workload.sequence_length)
    configuration = replace(
        asked,
        dtype=dtype,
        attention=asked.attention or _attention(request, recipe, machine),
        stack=asked.stack or recipe.stack,
        parallel=spec,
    )
    kept = masters and recipe.master_weights and workload.mode == "train"
    return replace(request, configuration=configuration, master_weights=kept)


def told_by(request: PredictRequest, after: PredictRequest) -> dict[str, str]:
    """By option, what the recipe of ``request`` put into ``after``."""
    asked, found = request.configuration, after.configuration
    if found is asked:
        return {}
    recipe = recipe_of(asked.recipe)
    masters = after.master_weights if found.parallel is None else bool(found.parallel.master_weights)
    kept = "FP32 master weights and states" if masters else "no FP32 master weights"
    forward = request.workload.mode != "train"
    told = {
        "--recipe": f"{DEFAULT_RECIPE} ({recipe.about}{'' if forward else ' and AdamW'})",
        "--dtype": f"{found.dtype}" + ("" if forward or found.dtype not in NUMBER_TYPES else f" ({kept})"),
    }
    if found.stack is not None:
        told["--stack"] = found.stack
    if asked.parallel is not None and found.parallel is not None:
        given, whole = keys_of(asked.parallel), keys_of(found.parallel)
        more = [f"{key}={value}" for key, value in whole.items() if key not in given and value not in ("no", "same")]
        told["--parallel"] = ",".join(more)
    return told


def meant_by(request: PredictRequest, after: PredictRequest) -> dict[str, str]:
    """By option, what ``request`` asks for in a word that means something else in its recipe, as ``after`` has it."""
    asked, found = request.configuration.parallel, after.configuration.parallel
    if asked is None or found is None or asked.recompute == found.recompute:
        return {}
    recipe = request.configuration.recipe
    return {"--parallel": f"{text_of(asked)} ({recipe}'s {asked.recompute}: recompute={found.recompute} here)"}


def has_sequences(request: PredictRequest) -> bool:
    """Whether the model is a transformer."""
    from e2e.capture.models.transformer import PRESETS

    model, file = request.workload.model, request.workload.model_config
    return file is not None or model in PRESETS or Path(model or "").suffix == ".json"


def _attention(request: PredictRequest, recipe: TrainingRecipe, machine: Machine) -> AttentionForm:
    """The kernel of ``recipe``, or the nearest to it that the library's model takes."""
    from e2e.capture.models.transformer import attention_forms
    from e2e.parallelism.parallel_graph import configuration

    if request.workload.document_length is not None:
        return PACKED_ATTENTION
    wanted = recipe.kernel(machine)
    known = attention_forms(*configuration(request.workload.model or request.workload.model_config or ""))
    return wanted if wanted in known or not known else next(iter(known))
