"""Requests to ``predict`` for published training steps, and the reasons why some have none.

Settings missing in a table are taken from its source and listed in ``assumed`` of the row:

What a table leaves out is taken from its source; such a figure is said in the ``assumed`` of the row:

* llm-foundry trains with FSDP, mixed precision ``PURE`` (parameters, gathers and gradients in BF16, FP32 shards for the
  optimizer), flash attention (scripts/train/benchmarking, submit_benchmarks.py).
* NVIDIA's recipes (dgxc-benchmarking, NeMo) have a distributed optimizer among all replicas, whose parameters are
  gathered beside the forward pass, and tensor-parallel communication beside products; 8,192 tokens for Llama 3.1
  8B, 4,096 for Nemotron-4 15B and the fine-tuning of Llama 3 8B (tokens per step over sequences). Those of 25.04
  name neither batch nor degrees: as the recipe of 25.02. Fine-tuning is on SQuAD, packed in performance mode
  (llama3_finetune.py of the recipe; ``packed_sequence = performance_mode`` of NeMo's finetune recipes): attention is
  limited to each example. With LoRA the loss is not fused (``cross_entropy_loss_fusion = False`` there).
* Megatron-Bridge (scripts/performance of each release; docs/performance-summary.md) reduces gradients in BF16, shares
  tokens evenly among experts (``moe_router_force_load_balancing``, before 25.11 by dropping tokens beyond an equal
  share and padding to it) and repeats nothing in the backward pass but what :data:`REPEATED` names. FSDP = 1 is
  Megatron-FSDP, which shards parameters too. Virtual stages are in its table. Tokens go by ``alltoall``, since 26.04 on
  H100 by HybridEP: once to every node, as DeepEP's do. Its table of 25.09 has no column of precision, but a footnote on
  the scales of FP8 and figures (Llama 3 8B: 725 model TFLOP/s on H100) that BF16 cannot reach. FP8 keeps the first and
  the last layer in BF16, which the request omits: 2 of 32 or 48 layers. The table does not state whether 25.11 and
  26.02 overlapped tokens with computation, whether processes were bound to the cores near their GPU, and why 26.02.01
  takes 0.56 of the time of 26.02 with the same degrees (issue 1998: "2X slower with dropless than with token drop",
  still open).
* torchtitan trains only with FSDP2 unless the table states otherwise, among the ranks of context parallel too
  (``dp_shard_cp`` of its parallel_dims.py), and sums gradients in FP32 (``mixed_precision_reduce`` of its
  job_config.py).
* SimuMax ran Megatron-LM with Transformer Engine (simu_tools/megatron_scripts): distributed optimizer, FP32 gradients
  summed in FP32, nothing overlapped, no recomputation, fused cross entropy, every expert given the same number of rows.
  Its context parallel exchanges heads for tokens (``cp_comm_type=a2a``).
* Grok 1 (dgxc-benchmarking, grok1/grok1_314b.yaml): tp=4, pp=8 of 8 virtual stages, cp=2, ep=8, two sequences for a
  GPU, tokens beyond an equal share dropped and the rest padded to it, a product for every expert, tensor parallel
  messages not overlapped. The number of layers of its proxies is not given.
* NeMo's document of performance (2024): rates of sequences from 4k to 1M are model TFLOP/s by its own count
  (:func:`_nemo_flops`: attention as if it were not causal).
* ml-engineering (insights/when-to-upgrade-gpus/benchmark.py): DeepSpeed's ZeRO 3 with only the optimizer on the host
  (``offload_optimizer``), gradients clipped, whole layers recomputed, Liger's kernels, every GPU a sequence of its own;
  FlashAttention 3 on H200 and 4 on B200.
* CUDA graphs of whole steps (``full_iteration``) are requested if the recipe of that model and GPU has them
  (llama3_workload_base_configs.py: Llama 3 8B on B200). Graphs of parts of a layer are not requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from costmodel.operators.experts import BALANCED, ExpertRouting
from e2e.capture.models.transformer import PRESETS
from e2e.parallelism.spec import ParallelSpec, Recompute
from e2e.step.options import AttentionForm, Precision
from lab.steps.training_rows import TrainingRow

# Names in the table -> built-in model; longer names before their prefixes.
MODELS = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3-70b",
    "llama3.1-405b": "llama-3.1-405b",
    "llama3-70b": "llama-3-70b",
    "llama3-8b": "llama-3-8b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
    "llama 3.1 8b": "llama-3.1-8b",
    "llama3 8b finetuning": "llama-3-8b",
    "llama3_8b": "llama-3-8b",
    "nemotron4 15b": "nemotron-4-15b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "llama2-7b": "llama-2-7b",
    "llama3_70b": "llama-3-70b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "deepseekv3": "deepseek-v3",
    "gpt oss 120b": "gpt-oss-120b",
    "grok 1 314b": "grok-1",
    "llama3.1_405b": "llama-3.1-405b",
}
# SimuMax: model -> built-in model and its changes, according to run_pretrain_llama3.sh and run_pretrain_deepseekv2.sh.
SIMUMAX_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-70b": ("llama-3-70b", {}),
    "llama-3-405b": ("llama-3.1-405b", {"num_key_value_heads": 16}),
    "deepseek-v2": (
        "deepseek-v3",
        {
            "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "vocab_size": 102400,
        },
    ),
    "deepseek-v3": ("deepseek-v3", {"first_k_dense_replace": 1}),
}  # fmt: skip
ML_ENGINEERING = "stas00/ml-engineering"
LENGTHS = {"llama-3.1-8b": 8192, "nemotron-4-15b": 4096, "llama-3-8b": 4096}
# dim of NeMo's recipes (nemo/collections/llm/recipes/llama3_8b.py), whose performance mode adapts linear_qkv.
LORA_RANK = 8
# Fine-tuning packs SQuAD into sequences (see the module). An example of its training split has 906 bytes (dataset card:
# 79,346,108 bytes, 87,599 examples), 40 of them names and numbers; the prompt adds 27 letters. English text has 4.7
# letters per token of Llama 3.
SQUAD_TOKENS = 190
BF16 = ("bf16", "amp_bf16")
# Source and precision -> recipe. Composer's amp_fp8 and NeMo's FP8 are Transformer Engine's DelayedScaling; -CS is its
# current scaling, which Megatron-Bridge's recipes for H100 use where they only say FP8.
RECIPES_OF: dict[tuple[str, str], Precision] = {
    ("llm-foundry", "amp_fp8"): "fp8-delayed",
    ("dgxc-benchmarking", "fp8"): "fp8-delayed",
    ("Megatron-Bridge", "fp8-cs"): "fp8-current",
    ("Megatron-Bridge", "fp8"): "fp8-current",
    ("Megatron-Bridge", ""): "fp8-current",  # 25.09, see the module
    ("Megatron-Bridge", "fp8-cs (fp8-mx)"): "fp8-current",
    ("Megatron-Bridge", "fp8-mx"): "mxfp8",
    ("Megatron-Bridge", "mxfp8"): "mxfp8",
    ("NVIDIA/NeMo", "fp8"): "fp8-delayed",
    ("torchtitan", "float8"): "fp8-tensorwise",
}

Kind = Literal["dense BF16", "8 bits", "mixtures", "adapters", "fine-tuning", "offload"]


def is_mixture(model: str) -> bool:
    """True if the built-in ``model`` has experts."""
    return any(key in PRESETS[model] for key in ("num_experts", "num_local_experts")) or "deepseek" in model


@dataclass(frozen=True)
class AskedStep:
    """Row and the settings of its request. ``config``: changes to the configuration of the built-in ``model``."""

    row: TrainingRow
    model: str
    config: dict[str, Any]
    batch_size: int
    sequence_length: int
    spec: ParallelSpec
    stack: str
    compiled: bool = False
    lora: int | None = None
    assumed: tuple[str, ...] = ()
    precision: Precision | None = None
    routing: ExpertRouting = BALANCED
    document_length: int | None = None
    cuda_graph: bool = False

    @property
    def kind(self) -> Kind:
        """Main difference from dense 16-bit training entirely on GPUs."""
        if self.spec.offloaded_state:
            return "offload"
        if self.lora is not None:
            return "adapters"
        if is_mixture(self.model):
            return "mixtures"
        if self.precision is not None:
            return "8 bits"
        return "dense BF16" if self.row.task == "pretrain" else "fine-tuning"

    @property
    def attention(self) -> AttentionForm:
        """Attention kernel of the measured run: Triton's FlashAttention 1 for llm-foundry; cuDNN's on Hopper and
        FlashAttention 2 before for Transformer Engine; FlashAttention 2 for torchtitan's PyTorch of 2024. Megatron-LM's
        tests use separate operations, except for sequences split by context parallelism. ml-engineering's is Tri Dao's
        newest.
        """
        if self.row.family == ML_ENGINEERING:
            return "flash3" if self.row.gpu == "dgx-h200" else "flash4"
        if self.row.family == "Megatron-LM" and self.spec.cp == 1:
            return "eager"
        if self.row.family == "llm-foundry":
            return "flash1"
        return "flash2" if self.row.family == "torchtitan" or "a100" in self.row.gpu else "cudnn"


def asked_step(row: TrainingRow) -> AskedStep | str:
    """Request for ``row``, or the reason why there is none."""
    told = row.precision.lower()
    if told and told not in BF16 and (row.family, told) not in RECIPES_OF:
        return f"precision {row.precision}: which casts and scales that is, is not known"
    if "PROXY" in row.model:
        return "a proxy with fewer layers, how many is not told"
    asked = ASKING.get(row.family, _nvidia)(row)
    precision = RECIPES_OF.get((row.family, told))
    if not told and is_mixture(asked.model) and "b200" in row.gpu:
        precision = "mxfp8"  # 25.09 on Blackwell
    kind = f"{precision}, as a footnote tells" if precision else "BF16"
    assumed = asked.assumed if told else (*asked.assumed, f"{kind}, where no precision is told")
    asked = replace(asked, precision=precision, assumed=assumed)
    if not row.seconds:
        seconds = _nemo_flops(asked) / (row.tflops * 1e12 * row.gpus)
        asked = replace(asked, row=replace(row, seconds=seconds), assumed=(*assumed, "seconds from its TFLOP/s"))
    return asked


def _nemo_flops(asked: AskedStep) -> float:
    """Model FLOPs of a step as NeMo counts them (``llama2`` of nemo/utils/flops_formulas.py): a multiplication and an
    addition each, all keys of a sequence for every token.
    """
    config = PRESETS[asked.model]
    width, layers = config.get("hidden_size", 4096), config.get("num_hidden_layers", 32)
    inner, words = config.get("intermediate_size", 11008), config.get("vocab_size", 32000)
    heads = config.get("num_attention_heads", 32)
    keys = config.get("num_key_value_heads", heads) / heads
    length = asked.sequence_length
    of_layer = 12 + 12 * keys + 18 * inner / width + 12 * length / width
    return asked.row.global_batch * length * layers * width**2 * (of_layer + 6 * words / (layers * width))


def _model(row: TrainingRow) -> str:
    lowered = row.model.lower().replace("grok1", "grok 1")  # one model under several names
    return next((model for name, model in MODELS.items() if lowered.startswith(name)), lowered)


def _llm_foundry(row: TrainingRow) -> AskedStep:
    spec = ParallelSpec(
        fsdp=row.gpus,
        zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row.fsdp],
        micro_batches=row.global_batch // (row.micro_batch * row.gpus),
        recompute="full" if row.checkpointing == "True" else "none",
        master_weights=True,
    )
    config = {"n_positions": row.sequence_length}
    return AskedStep(row, row.model, config, row.micro_batch, row.sequence_length, spec, "llm-foundry")


# "selective layer" checkpoints every second layer (torchtitan's default selective_ac_option at that time).
TITAN_CHECKPOINTING: dict[str, tuple[Recompute, int]] = {
    "no": ("none", 1),
    "full": ("full", 1),
    "selective op": ("operators", 1),
    "selective layer": ("full", 2),
}


def _torchtitan(row: TrainingRow) -> AskedStep:
    recompute, every = TITAN_CHECKPOINTING[row.checkpointing]
    model = _model(row)
    tp, pp, cp = max(row.tp, 1), max(row.pp, 1), max(row.cp, 1)
    replicas = row.gpus // (tp * pp * cp)
    spec = ParallelSpec(
        fsdp=replicas,
        cp=cp,
        tp=tp,
        pp=pp,
        micro_batches=row.global_batch // (row.micro_batch * replicas),
        zero=3,
        recompute=recompute,
        recompute_every=every,
        master_weights=True,
        reduce_dtype="float32",
        context_form="ring" if cp > 1 else "gather",
        sequence_parallel=tp > 1,
        tp_overlap=row.async_tp,
    )
    if pp > 1:
        spec = _in_stages(spec, PRESETS[model]["num_hidden_layers"], row.virtual_stages)
    return AskedStep(row, model, {}, row.micro_batch, row.sequence_length, spec, "torchtitan", row.compiled)


def _in_stages(spec: ParallelSpec, layers: int, virtual_stages: int) -> ParallelSpec:
    """Pipeline of torchtitan: weights stay gathered and gradients unsharded from the first micro-batch to the last
    (``reshard_after_forward`` of apply_fsdp in parallelize_llama.py, ``set_requires_gradient_sync`` of the stages). The
    first part has the base number of layers, additional ones go to the following parts (``generate_split_points``).
    """
    if virtual_stages > 1:
        spec = replace(spec, schedule="interleaved", virtual_stages=virtual_stages)
    fewest, beyond = divmod(layers, spec.stages)
    ends = fewest if beyond else None
    return replace(spec, zero=1, overlap_gather=True, first_layers=ends, last_layers=ends)


# apply_moe_token_drop: moe_expert_capacity_factor and moe_pad_expert_input_to_capacity.
TOKEN_DROP = ExpertRouting(capacity=1.0)
# Megatron-Bridge pull request 2477: Qwen3 30B on H100 with HybridEP, in the container of 26.04; on B200 with the recipe
# that has four sequences a micro-batch.
HYBRID_EP = {"dgx-h100": "26.04", "dgx-b200": "26.02.01"}
# Mixtures whose recipe sends rows to experts without DeepEP or HybridEP (gpt_oss_workload_base_configs.py: none is set
# for B200), and those that overlap it with the other half of a micro-batch (moe_a2a_overlap of
# deepseek_workload_base_configs.py, B200, MXFP8 with a batch of 4096).
ALL_TO_ALL = (("gpt-oss-120b", "dgx-b200"),)
OVERLAPPED = (("deepseek-v3", "dgx-b200"),)
# recompute_modules of the same files.
REPEATED = {("deepseek-v3", "dgx-b200"): "mla_up_proj+mlp", ("gpt-oss-120b", "dgx-b200"): "layernorm+moe_act"}
# Recipes with a CUDA graph of the whole step.
WHOLE_GRAPHS = (("llama-3-8b", "dgx-b200"),)


def _nvidia(row: TrainingRow) -> AskedStep:
    model = _model(row)
    if model == "grok-1":
        return _grok(row)
    length = row.sequence_length or LENGTHS[model]
    config = _longer(model, length)
    assumed: tuple[str, ...] = ()
    tp, pp, cp, micro = max(row.tp, 1), max(row.pp, 1), max(row.cp, 1), max(row.micro_batch, 1)
    batch = row.global_batch
    if not batch:  # recipes of 25.04
        tp, pp, cp, batch = 1, 1, 2, 16 * row.gpus
        assumed = ("batch and degrees as in 25.02",)
    tuned, lora, stack = row.task in ("sft", "lora"), None, "megatron"
    if tuned:
        if pp == 41:
            pp, assumed = 1, ("pp=1: the table's 41 is a slip",)
        assumed += (f"examples of {SQUAD_TOKENS} tokens",)
    if row.task == "lora":
        lora, stack = LORA_RANK, "te"  # differs by the loss
    replicas = row.gpus // (tp * pp * cp)
    spec = ParallelSpec(
        fsdp=replicas, cp=cp, tp=tp, pp=pp, micro_batches=batch // (micro * replicas), master_weights=True
    )
    if replicas * cp > 1:
        spec = replace(spec, zero=1, overlap_gather=True)
    if tp > 1:
        spec = replace(spec, sequence_parallel=True, tp_overlap=True)
    if row.ep > 1:
        sent_once = row.release >= HYBRID_EP[row.gpu] and (model, row.gpu) not in ALL_TO_ALL
        spec = replace(spec, ep=row.ep, dispatch="deepep" if sent_once else "alltoall")
        spec = replace(spec, overlap_experts=(model, row.gpu) in OVERLAPPED)
        if (model, row.gpu) in REPEATED:
            spec = replace(spec, recompute="selective", recompute_modules=REPEATED[model, row.gpu])
        if tp > 1:
            spec = replace(spec, expert_tp=1)  # expert_tensor_parallel_size of all its recipes
    if row.virtual_stages > 1:
        spec = _interleaved(spec, row.virtual_stages, PRESETS[model].get("num_hidden_layers", 61))
    if row.fsdp.isdecimal() and int(row.fsdp) > 1:  # Megatron-FSDP
        spec = replace(spec, zero=3, overlap_gather=False)
    routing = TOKEN_DROP if "tokendrop" in row.model.lower() else BALANCED
    return AskedStep(
        row, model, config, micro, length, spec, stack, lora=lora, assumed=assumed, routing=routing,
        document_length=SQUAD_TOKENS if tuned else None, cuda_graph=(model, row.gpu) in WHOLE_GRAPHS,
    )  # fmt: skip


def _interleaved(spec: ParallelSpec, virtual_stages: int, layers: int) -> ParallelSpec:
    """Interleaved schedule; if ``layers`` do not divide evenly, the ends have fewer, the last part (with the head) the
    fewest.
    """
    spec = replace(spec, schedule="interleaved", virtual_stages=virtual_stages)
    most = -(-layers // spec.stages)
    ends = layers - most * (spec.stages - 2)
    return spec if layers % spec.stages == 0 else replace(spec, first_layers=-(-ends // 2), last_layers=ends // 2)


def _grok(row: TrainingRow) -> AskedStep:
    """Request for Grok 1 by its recipe (see the module)."""
    tp, pp, cp, ep = 4, 8, 2, 8
    replicas, batch = row.gpus // (tp * pp * cp), 2 * row.gpus
    spec = ParallelSpec(
        fsdp=replicas, cp=cp, tp=tp, pp=pp, ep=ep, micro_batches=batch // replicas, master_weights=True,
        zero=1, overlap_gather=True, sequence_parallel=True, schedule="interleaved", virtual_stages=8,
    )  # fmt: skip
    told = ("batch and degrees of its recipe",)
    row = replace(row, global_batch=batch)
    return AskedStep(row, "grok-1", {}, 1, 8192, spec, "megatron", assumed=told, routing=TOKEN_DROP)


def _ml_engineering(row: TrainingRow) -> AskedStep:
    spec = ParallelSpec(fsdp=row.gpus, zero=3, master_weights=True, recompute="full", offloaded_state=1.0)
    model = _model(row)
    config = _longer(model, row.sequence_length)
    return AskedStep(row, model, config, row.micro_batch, row.sequence_length, spec, "liger")


def _longer(model: str, length: int) -> dict[str, Any]:
    """Configuration change that lets ``model`` take sequences of ``length`` tokens."""
    known = PRESETS[model].get("max_position_embeddings", 0)
    return {"max_position_embeddings": length} if length > known else {}


def _simumax(row: TrainingRow) -> AskedStep:
    model, config = SIMUMAX_MODELS[row.model]
    config = {**config, "num_hidden_layers": row.layers, "max_position_embeddings": row.sequence_length}
    replicas = row.gpus // (row.tp * row.pp * row.cp)
    shared = replicas * row.cp > 1
    spec = ParallelSpec(
        fsdp=replicas,
        cp=row.cp,
        ep=row.ep,
        tp=row.tp,
        pp=row.pp,
        micro_batches=row.global_batch // replicas,
        zero=1 if shared else None,
        sequence_parallel=row.tp > 1,
        master_weights=True,
        reduce_dtype="float32",
        overlap=False,
        context_form="a2a" if row.cp > 1 else "gather",
    )
    return AskedStep(row, model, config, 1, row.sequence_length, spec, "megatron")


ASKING: Mapping[str, Callable[[TrainingRow], AskedStep]] = {
    "llm-foundry": _llm_foundry,
    "torchtitan": _torchtitan,
    "SimuMax": _simumax,
    ML_ENGINEERING: _ml_engineering,
}
