"""Published whole training steps of language models as requests to ``predict``, and the reasons why some have none.

The rows are ``llm_training.csv`` and ``llm_training_kinds.csv`` in ``whole_step`` of the data folder, and
``simumax_b200.csv`` and ``torchtitan_h100.csv`` beside this file, to which nothing is fitted. Sources of the former:
mosaicml/llm-foundry (scripts/train/benchmarking), NVIDIA/dgxc-benchmarking, pytorch/torchtitan (docs/performance.md
and benchmarks), NVIDIA-NeMo/Megatron-Bridge; seconds are mostly batch x length / throughput. The latter name their
sources; SimuMax's steps include its own predictions.

Settings missing in a table are taken from its source and listed in ``assumed`` of the row:

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

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from costmodel.base.errors import InputError
from costmodel.operators.experts import BALANCED, ExpertRouting
from e2e.capture.models.configurations import PRESETS
from e2e.parallelism.spec import ParallelSpec, Recompute
from e2e.step.options import AttentionForm, Precision
from lab.data.data_folder import csv_rows, reading
from lab.data.selection import is_sealed

TRAINING_FILE = Path("whole_step/llm_training.csv")
# Kinds absent from the former; one job in four of it is sealed (:mod:`lab.data.selection`).
KINDS_FILE = Path("whole_step/llm_training_kinds.csv")
SIMUMAX_FILE, TORCHTITAN_FILE = "simumax_b200.csv", "torchtitan_h100.csv"
# Name of a GPU in the table -> machine or cluster.
TRAINING_MACHINES = {
    # 1,600 Gb/s of RoCE per node, according to the README of the table.
    "a100_40gb": "oci-bm-gpu4-8",
    "a100_80gb": "dgx-a100",
    "A100-80GB": "dgx-a100",
    "h100_80gb": "dgx-h100",
    "H100": "dgx-h100",
    "DGX-H100": "dgx-h100",
    "DGX-B200": "dgx-b200",
    "H200 SXM": "dgx-h200",
    "B200 SXM": "dgx-b200",
    "H100-96GB HBM2e 2.4TB/s 500W (Grand Teton)": "grand-teton-h100",
}


@dataclass(frozen=True)
class TrainingRow:
    """One published step. Sizes missing in the table are 0, texts empty."""

    # Line in the table, counted from 1 after the header.
    place: int
    source: str
    task: str
    model: str
    gpu: str
    gpus: int
    global_batch: int
    micro_batch: int
    sequence_length: int
    tp: int
    pp: int
    cp: int
    ep: int
    virtual_stages: int
    fsdp: str
    checkpointing: str
    precision: str
    compiled: bool
    seconds: float
    # Peak memory reserved by the allocator.
    memory_gib: float
    note: str
    layers: int = 0
    # Peak memory in use.
    allocated_gib: float = 0.0
    # Predictions of the source's own program.
    peer_seconds: float = 0.0
    peer_allocated_gib: float = 0.0
    # Tensor-parallel messages are overlapped with products.
    async_tp: bool = False
    # Nothing is fitted to the step.
    held_out: bool = False
    # As published, a share.
    mfu: float = 0.0
    # As published, per GPU.
    tflops: float = 0.0
    # The step was never looked at before.
    sealed: bool = False

    @property
    def name(self) -> str:
        """Name for ``--only``, after the GPU."""
        sizes = f"{self.gpus}gpus-batch{self.global_batch}-seq{self.sequence_length}"
        if self.held_out:
            degrees = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
            sizes += "".join(f"-{name}{degree}" for name, degree in degrees.items() if degree > 1)
        return f"{self.source}/{self.model}/{self.task}-{self.precision}-{sizes}-row{self.place}".replace(" ", "-")

    @property
    def family(self) -> str:
        """Source without its version."""
        return self.source.split()[0]

    @property
    def release(self) -> str:
        """Version of the source, empty if not given; versions compare as texts."""
        return self.source.partition(" ")[2]


def read_training_rows(data: Path) -> list[TrainingRow]:
    """Read all rows of the table below ``data``; ``InputError`` names the file if it is absent or malformed."""
    return [_row(place, cells) for place, cells in _table(data, TRAINING_FILE)]


def read_kinds_rows(data: Path, *, sealed: bool = False) -> list[TrainingRow]:
    """Read the unsealed rows of :data:`KINDS_FILE`, or the ``sealed`` ones; ``InputError`` as above."""
    table = KINDS_FILE.as_posix()
    return [
        replace(_row(place, cells), held_out=True, sealed=sealed)
        for place, cells in _table(data, KINDS_FILE)
        if is_sealed(table, cells) == sealed
    ]


def _table(data: Path, name: Path) -> list[tuple[int, dict[str, str]]]:
    """Lines of a table below ``data``, counted from 1 after the header."""
    path, what = data / name, "a table of training steps"
    if not path.is_file():
        raise InputError(f"{path}: not there; `data fetch` does not bring it; see docs/measurements.md for its source")
    lines = list(enumerate(csv_rows(path, what), 1))
    with reading(path, what):
        for place, cells in lines:
            _row(place, cells)
    return lines


def read_held_out_rows() -> list[TrainingRow]:
    """Rows of the files in this folder."""
    return [*read_simumax_rows(), *read_torchtitan_rows()]


def read_simumax_rows() -> list[TrainingRow]:
    """Rows of ``simumax_b200.csv``: 8 GPUs each, micro-batches of one sequence."""
    return [_simumax_row(place, cells) for place, cells in _own_table(SIMUMAX_FILE)]


def read_torchtitan_rows() -> list[TrainingRow]:
    """Rows of ``torchtitan_h100.csv``. Pipelines run as many micro-batches as they have stages of GPUs
    (``build_pipeline_schedule`` of torchtitan's pipelining_utils.py at that time), interleaved ones two parts on each
    (``generate_split_points``).
    """
    return [_torchtitan_row(place, cells) for place, cells in _own_table(TORCHTITAN_FILE)]


def _own_table(name: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows of a file in this folder, counted from 1; lines that begin with # give its source."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return enumerate(csv.DictReader(line for line in lines if not line.startswith("#")), 1)


def _simumax_row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    tp, pp, cp, ep = (int(cells[name]) for name in ("tp", "pp", "cp", "ep"))
    return TrainingRow(
        place=place,
        source="SimuMax 1.2",
        task="pretrain",
        model=cells["model"],
        gpu="simumax-b200",
        gpus=8,
        global_batch=int(cells["micro_batches"]) * 8 // (tp * pp * cp),
        micro_batch=1,
        sequence_length=int(cells["sequence_length"]),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        virtual_stages=0,
        fsdp="",
        checkpointing="",
        precision="bf16",
        compiled=False,
        seconds=float(cells["step_ms"]) / 1e3,
        memory_gib=float(cells["reserved_gib"]),
        note="",
        layers=int(cells["layers"]),
        allocated_gib=float(cells["allocated_gib"]),
        peer_seconds=float(cells["simumax_step_ms"]) / 1e3,
        peer_allocated_gib=float(cells["simumax_allocated_gib"]),
        held_out=True,
    )


def _torchtitan_row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    fsdp, tp, pp, cp, batch, tokens = (int(cells[name]) for name in ("fsdp", "tp", "pp", "cp", "local_batch", "tokens"))
    return TrainingRow(
        place=place,
        source="torchtitan 2024-12",
        task="pretrain",
        model=cells["model"],
        gpu="grand-teton-h100",
        gpus=fsdp * tp * pp * cp,
        global_batch=batch * fsdp,
        micro_batch=batch // pp,
        sequence_length=tokens,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=0,
        virtual_stages=2 if cells["schedule"] == "interleaved" else 0,
        fsdp=str(fsdp),
        checkpointing=cells["checkpointing"],
        precision=cells["precision"],
        compiled=cells["compiled"] == "1",
        seconds=batch * tokens / (float(cells["tokens_s_gpu"]) * tp * pp * cp),
        memory_gib=float(cells["reserved_gib"]),
        note="",
        async_tp=cells["async_tp"] == "1",
        held_out=True,
    )


def _row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    def number(name: str) -> int:
        told = cells[name].strip()
        return int(float(told)) if told not in ("", "n/a") else 0

    return TrainingRow(
        place=place,
        source=cells["source"],
        task=cells["task"],
        model=cells["model"],
        gpu=TRAINING_MACHINES[cells["gpu"]],
        gpus=number("n_gpus"),
        global_batch=number("global_batch"),
        micro_batch=number("micro_batch"),
        sequence_length=number("seq"),
        tp=number("tp"),
        pp=number("pp"),
        cp=number("cp"),
        ep=number("ep"),
        virtual_stages=number("vp"),
        fsdp=cells["fsdp"],
        checkpointing=cells["act_ckpt"],
        precision=cells["precision"],
        compiled=cells["compile"] in ("1", "1.0"),
        seconds=float(cells["step_s"] or 0),
        memory_gib=float(cells["mem_gib"] or 0),
        note=cells["note"],
        mfu=_published(cells["mfu_or_tflops"], "mfu") / 100,
        tflops=_published(cells["mfu_or_tflops"], "tflops"),
    )


def _published(told: str, kind: str) -> float:
    """Number in ``mfu 41.12`` (a percentage) or ``tflops 731``; 0 for another ``kind``."""
    found, _, number = told.partition(" ")
    return float(number) if found == kind else 0.0


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
    asked = REQUESTS.get(row.family, _ask_nvidia)(row)
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


def _ask_llm_foundry(row: TrainingRow) -> AskedStep:
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


def _ask_torchtitan(row: TrainingRow) -> AskedStep:
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


def _ask_nvidia(row: TrainingRow) -> AskedStep:
    model = _model(row)
    if model == "grok-1":
        return _ask_grok(row)
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


def _ask_grok(row: TrainingRow) -> AskedStep:
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


def _ask_ml_engineering(row: TrainingRow) -> AskedStep:
    spec = ParallelSpec(fsdp=row.gpus, zero=3, master_weights=True, recompute="full", offloaded_state=1.0)
    model = _model(row)
    config = _longer(model, row.sequence_length)
    return AskedStep(row, model, config, row.micro_batch, row.sequence_length, spec, "liger")


def _longer(model: str, length: int) -> dict[str, Any]:
    """Configuration change that lets ``model`` take sequences of ``length`` tokens."""
    known = PRESETS[model].get("max_position_embeddings", 0)
    return {"max_position_embeddings": length} if length > known else {}


def _ask_simumax(row: TrainingRow) -> AskedStep:
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


REQUESTS: Mapping[str, Callable[[TrainingRow], AskedStep]] = {
    "llm-foundry": _ask_llm_foundry,
    "torchtitan": _ask_torchtitan,
    "SimuMax": _ask_simumax,
    ML_ENGINEERING: _ask_ml_engineering,
}
