"""Published throughput of large language models, trained and served, against ours; nothing is fitted to these figures.

    python -m lab.bench.published_throughput llama3|megatron|mixtures|serving|community [--only TEXT]
    python -m lab.bench.published_throughput mfu --every 9

**Llama 3**: "The Llama 3 herd of models" (arXiv 2407.21783), table 4: BF16 on 8,192 and 16,384 H100 SXM in nodes of
eight, one 400 Gbit/s port each, 16 million tokens a step. Tensor and pipeline parallel with the interleaved schedule,
one layer in every part and none in the first and the last (section 3.3.2); sharded optimizer state and gradients, no
recomputation. What it does not give is assumed: micro-batches of one sequence; sequence parallelism; FP32 master
weights. TFLOP/s per GPU are taken as those of the products of 6 x parameters per token, and 12 x layers x width x
length / 2 of causal attention.

**Megatron**: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM" (arXiv
2104.04473): table 1 (weak scaling) and table 2 (174.6 billion parameters on more and more GPUs) on DGX A100 80 GB with
eight HDR cards each; FP16 with FP32 master weights, every layer recomputed, sequences of 2048 tokens, 51,200 words.
TFLOP/s per GPU are those of its equation 3, recomputation included. What it does not give is assumed: micro-batches of
4 sequences without a pipeline, of 2 and 1 with one, and two parts per stage where its schedule is interleaved
(``name-i``). Its fused kernels are not modelled: the layers are those of Hugging Face's GPT-2.

**Mixtures**: Megatron-Bridge's performance summary (docs/performance-summary.md of each release; degrees and tokens per
second and GPU) on DGX H100, tokens shared evenly without dropping. ``etp=2`` in addition: experts split like the
layers, which was not measured. Settings missing in the summary are from the releases' recipes
(scripts/performance/configs): ``expert_tensor_parallel_size`` 1, the distributed optimizer, gradients
reduced in BF16; Qwen3-235B overlaps tokens with another micro-batch (``moe_a2a_overlap``), DeepSeek-V3 sends them by
DeepEP and computes what up-projects its latent keys and its dense MLP twice (not asked here), gpt-oss norms and
activations of experts (not asked here either). FP8 is that of the present tensor's scale. Mixtral: Megatron-Core's
README of mixtures (without its batch). DeepSeek-V3's layer of multi-token prediction is left out, of 61 others.

In BF16: Qwen3-30B of Megatron-Bridge's guide to expert-parallel overlap (pull requests 3862 and 5094; rows unfused and
without CUDA graphs, tokens by HybridEP with graphs of the router; a profile of the third had 8.25 s of exchange and
22.82 s of kernels in the step, 463,348 of them) and Qwen3-235B of yanring/Megatron-MoE-ModelZoo (best_practice/Qwen3;
DeepEP; norms and activations computed twice, not asked here).

Offloading of the optimizer: Qwen3-30B-A3B on two such nodes, TP 2, PP 2, EP 4, 8 sequences of 4,096 tokens a step
(Megatron-Bridge, docs/training/cpu-offloading.md and its measured results of March 2026).

**Serving** by TensorRT-LLM: output tokens per second and GPU of its performance overview (perf-overview.md of release
1.2: 1,500 requests at once, 3,000 of 1,024 + 1,024 tokens), of its guide to DeepSeek-R1 (8 GPUs) and of that to gpt-oss
(4 GPUs), and two of one user (tokens per second): gpt-oss, and DeepSeek-R1 without multi-token prediction (111 before
the last three improvements, which made 368 of 253 with it, 8 % of them by looser acceptance). B200 and GB200, and H200
for comparison. Attention of DeepSeek-R1 in FP4 is taken to be in BF16, the cache of all but the first of 8 GPUs in FP8.

**Community**: mean TTFT, TPOT and output tokens per second of ``published_serving.csv``, as users measured them on
the engines' own servers: GPUStack's performance lab, SGLang's cookbook, CloudRift, IOG, Vultr and threads of vLLM. Half
of the rows, by the SHA-256 of their names, were held out before any was predicted. Lengths are ``fixed``, ``even``
(from one token to twice the mean) or ``sharegpt``: of its lengths only the means are told; they are taken to be
exponential. Requests without users or a rate are sent at once. GPUStack's H100 of Qwen3 14B and 32B is a PCIe card,
whatever its pages say: steps that decode with a full cache read 70 to 75 GB in 42 to 46 ms, 1.5 to 1.7 TB/s. The halves
of Qwen3 14B are those of the names that said SXM. Left out: four runs of SGLang's cookbook whose prompts were in the
prefix cache (the first wave took less than at the GPUs' peak), and gpt-oss on H100 (it is not said which). Nemotron 3
Nano could be asked only later.

**MFU**: published MFU against our count for the same measured steps (rows of :mod:`lab.steps.training`). Only the
count of FLOPs is compared: both divide by the measured time and by the same datasheet rate. The sources use a closed
form, ``6 x parameters + 12 x layers x width x sequence`` per token, in which embeddings count as parameters, whether a
product uses them (a head tied to the words) or they are only looked up (positions of MPT, words of Llama).
``embeddings`` of :class:`ComparedMfu` is that addition.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodel.base.errors import InputError
from e2e.explain.utilisation import utilisation_of
from e2e.serving.serving_answer import serve
from e2e.serving.serving_request import ServingRequest
from e2e.serving.serving_result import serving_result
from lab.command_line import program, run
from lab.data.data_folder import csv_rows, data_folder
from lab.steps.training import AskedStep, TrainingRow, asked_step, read_training_rows
from lab.steps.training_runs import prepared
from lab.validate.serving import MeasuredServing, ServingSection, answered, errors_of

Configuration = Mapping[str, Any]  # ``config.json`` of Hugging Face


@dataclass(frozen=True)
class PublishedRun:
    """Published steps of one run."""

    name: str
    model: str | Configuration
    gpu: str
    gpus: int
    # Sequences.
    micro_batch: int
    length: int
    # Value of `--parallel`, and other options of `predict`.
    parallel: str
    options: str
    # Seconds of a step by release.
    seconds: Mapping[str, float]
    # Operations of a step as the source counts them; 0 where it gives no rate.
    flops: float = 0.0


def compare(row: PublishedRun) -> str:
    """Predict ``row`` in a separate process; returns a line of what is predicted and published."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        named = ["--model", row.model] if isinstance(row.model, str) else ["--model-config", str(path)]
        if not isinstance(row.model, str):
            path.write_text(json.dumps(row.model), encoding="utf-8")
        command = [sys.executable, "-m", "e2e", "predict", *named, "--gpu", row.gpu, "--gpus", str(row.gpus), "--json"]
        command += ["--batch-size", str(row.micro_batch), "--sequence-length", str(row.length)]
        command += ["--parallel", row.parallel, *row.options.split()]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise InputError(done.stderr.strip())
    found = json.loads(done.stdout)  # also if the memory is too small, which gives status 2
    seconds = found["iteration_seconds"]
    memory = max(rank["peak_memory_bytes"] for rank in found["ranks"]) / 2**30
    told = []
    for release, published in row.seconds.items():
        text = f"{release} {published:.3f} s ({seconds / published - 1:+.1%}".lstrip()
        if row.flops:
            rate = row.flops / row.gpus / 1e12
            text += f"), {rate / published:.0f} TFLOP/s per GPU (predicted {rate / seconds:.1f}, "
            text += f"{published / seconds - 1:+.1%}"
        told.append(f"{text})")
    return f"{row.name}: {seconds:.3f} s, {memory:.1f} GiB; published {', '.join(told)}"


# --- Llama 3 405B ---------------------------------------------------------------------------------

LAYERS, WIDTH, WORDS, INNER, HEADS, KV_HEADS = 126, 16384, 128256, 53248, 128, 8
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": WORDS,
    "max_position_embeddings": 131072,
}


def _llama(gpus: int, cp: int, replicas: int, length: int, batch: int, tflops: float) -> PublishedRun:
    """Row of Llama 3's table. ``batch``: sequences per step and data-parallel rank."""
    tokens, parts = replicas * batch * length, (LAYERS + 2) // 16
    layer = 2 * WIDTH * WIDTH * (1 + KV_HEADS / HEADS) + 3 * WIDTH * INNER
    flops = tokens * (6 * (LAYERS * layer + WORDS * WIDTH) + 6 * LAYERS * WIDTH * length)
    parallel = (
        f"fsdp={replicas},zero=2,tp=8,cp={cp},pp=16,micro-batches={batch},sp=yes,"
        f"schedule=interleaved,virtual-stages={parts},first-layers=0,last-layers=0,master-weights=yes"
    )
    options, seconds = "--dtype bfloat16 --attention flash", {"": flops / gpus / (tflops * 1e12)}
    name = f"{gpus} GPUs, cp={cp}"
    return PublishedRun(name, LLAMA, "h100-sxm", gpus, 1, length, parallel, options, seconds, flops)


LLAMA_RUNS = (
    _llama(8192, 1, 64, 8192, 32, 430),
    _llama(16384, 1, 128, 8192, 16, 400),
    _llama(16384, 16, 8, 131072, 16, 380),
)

# --- Megatron-LM's GPT ----------------------------------------------------------------------------

TOKENS, GPT_WORDS = 2048, 51200


def _gpt(
    name: str, heads: int, hidden: int, layers: int, tp: int, pp: int, gpus: int, batch: int, micro: int, tflops: float
) -> PublishedRun:
    """Published figure of Megatron-LM. ``batch``: sequences per step; ``micro``: per micro-batch (assumed)."""
    # Equation 3, recomputation included.
    work = 96 * batch * TOKENS * layers * hidden**2
    flops = work * (1 + TOKENS / (6 * hidden) + GPT_WORDS / (16 * layers * hidden))
    replicas = gpus // tp // pp
    parallel = f"dp={replicas},tp={tp},pp={pp},micro-batches={batch // replicas // micro},recompute=full"
    parallel += ",master-weights=yes" + (",schedule=interleaved,virtual-stages=2" if name.endswith("-i") else "")
    config = {
        "model_type": "gpt2", "n_positions": TOKENS, "vocab_size": GPT_WORDS,
        "n_embd": hidden, "n_head": heads, "n_layer": layers,
    }  # fmt: skip
    seconds = {"": flops / gpus / (tflops * 1e12)}
    return PublishedRun(name, config, "a100-sxm-80gb", gpus, micro, TOKENS, parallel, "--dtype float16", seconds, flops)


GPT_RUNS = (
    _gpt("1.7B", 24, 2304, 24, 1, 1, 32, 512, 4, 137),
    _gpt("3.6B", 32, 3072, 30, 2, 1, 64, 512, 4, 138),
    _gpt("7.5B", 32, 4096, 36, 4, 1, 128, 512, 4, 142),
    _gpt("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 4, 135),
    _gpt("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 2, 138),
    _gpt("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    _gpt("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    _gpt("145.6B-i", 96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    _gpt("174.6B-i", 96, 12288, 96, 8, 12, 384, 1536, 1, 153),
    _gpt("174.6B-x4-i", 96, 12288, 96, 8, 12, 1536, 1536, 1, 141),
    _gpt("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
    _gpt("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 163),
    _gpt("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 163),
)

# --- mixtures of experts --------------------------------------------------------------------------

LENGTH = 4096
QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": LENGTH,
}  # fmt: skip
MIXTRAL_TFLOPS, MIXTRAL_BATCH = 468.0, 256
SHARED = "zero=1,overlap-gather=yes,master-weights=yes"
QWEN = f"fsdp=16,{SHARED},tp=2,sp=yes,tp-overlap=yes,pp=8,ep-overlap=yes"
QWEN_PARTS = "schedule=interleaved,virtual-stages=4,first-layers=2,last-layers=2"
DEEPSEEK = f"fsdp=64,{SHARED},tp=2,sp=yes,tp-overlap=yes,pp=8,ep=64,ep-dispatch=deepep"
DEEPSEEK_PARTS = "schedule=interleaved,virtual-stages=4,first-layers=1,last-layers=0"
# In BF16: tokens by HybridEP among 16 ranks on two nodes; the same model by rows, on the same nodes.
QWEN_30B = f"fsdp=16,{SHARED},ep=16"
QWEN_BY_TOKENS = f"fsdp=16,{SHARED},tp=2,sp=yes,tp-overlap=yes,pp=8,ep=32,etp=1,ep-dispatch=deepep"
OFFLOADED = "fsdp=4,zero=1,master-weights=yes,tp=2,sp=yes,pp=2,ep=4,etp=1,micro-batches=2"


def _mixture(
    name: str, model: str | Configuration, gpus: int, batch: int, micro_batch: int, parallel: str,
    rates: Mapping[str, float] | None = None, seconds: float = 0.0, precision: str = "",
) -> PublishedRun:  # fmt: skip
    """Published step of ``batch`` sequences: ``rates`` of tokens per second and GPU by release, or ``seconds``."""
    options = "--dtype bfloat16 --stack megatron --attention cudnn --speed-spread 0"
    options += f" --precision {precision}" if precision else ""
    published = {release: batch * LENGTH / (rate * gpus) for release, rate in (rates or {}).items()}
    published |= {"": seconds} if seconds else {}
    return PublishedRun(name, model, "dgx-h100", gpus, micro_batch, LENGTH, parallel, options, published)


def _micro_batches(batch: int, replicas: int, size: int = 1) -> str:
    return f"micro-batches={batch // (replicas * size)}"


def _mixtral_rate() -> float:
    """Tokens per second and GPU from the published TFLOP/s: 6 x active parameters per token, and causal attention."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    return MIXTRAL_TFLOPS * 1e12 / (6 * (32 * layer + 32000 * 4096) + 6 * 32 * 4096 * LENGTH)


MIXTURES = (
    *(
        _mixture(
            f"Qwen3-235B-A22B, etp={etp}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN},ep={32 // etp},etp={etp},{QWEN_PARTS},{_micro_batches(2048, 16)}",
            {"25.09": 1204.0, "25.11": 1575.0, "26.02 to 26.06, of 8,192 sequences": 1633.0}, precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        _mixture(
            f"DeepSeek-V3, etp={etp}", "deepseek-v3", 1024, 8192, 1,
            f"{DEEPSEEK},etp={etp},{DEEPSEEK_PARTS},{_micro_batches(8192, 64)}", {"25.09": 1297.0},
            precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        _mixture(
            f"Qwen3-235B-A22B, BF16, tokens once per node{named}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN_BY_TOKENS},{QWEN_PARTS}{overlap},{_micro_batches(2048, 16)}", seconds=seconds,
        )
        for named, overlap, seconds in (("", "", 19.7), (", overlapped", ",ep-overlap=yes", 17.6))
    ),
    *(
        _mixture(
            f"Qwen3-30B-A3B, BF16, {named}", "qwen3-30b-a3b", 16, 1024, 1,
            f"{QWEN_30B},{dispatch},{_micro_batches(1024, 16)}", seconds=seconds,
        )
        for named, dispatch, seconds in (
            ("rows", "ep-dispatch=alltoall", 41.25),
            ("rows, overlapped", "ep-dispatch=alltoall,ep-overlap=yes", 31.31),
            ("tokens once per node", "ep-dispatch=deepep", 24.714),
            ("tokens once per node, overlapped", "ep-dispatch=deepep,ep-overlap=yes", 20.992),
        )
    ),
    _mixture(
        "gpt-oss-120b, micro-batches of 4", "gpt-oss-120b", 64, 512, 4,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(512, 16, 4)}", {"25.11": 5630.0},
    ),
    _mixture(
        "gpt-oss-120b", "gpt-oss-120b", 64, 1280, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(1280, 16)}", {"26.02": 5984.0, "later": 5824.0},
    ),
    _mixture(
        "Mixtral 8x7B", "mixtral-8x7b", 64, MIXTRAL_BATCH, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,schedule=interleaved,virtual-stages=8,{_micro_batches(MIXTRAL_BATCH, 16)}",
        {"README": _mixtral_rate()},
    ),
    *(
        _mixture(
            f"Qwen3-30B-A3B, optimizer offloaded {share:.0%}", "qwen3-30b-a3b", 16, 8, 1,
            OFFLOADED + (f",offload-optimizer={share:g}" if share else ""), seconds=seconds,
        )
        for share, seconds in ((0.0, 0.996), (0.25, 1.871), (0.5, 2.484), (1.0, 3.877))
    ),
)  # fmt: skip


# --- MFU -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedMfu:
    """``published`` and ``counted`` MFU of ``row``, as shares; ``hfu``: as counted. ``embeddings``: share of the
    published MFU for embeddings that are only looked up.
    """

    row: TrainingRow
    published: float
    counted: float
    hfu: float
    embeddings: float = 0.0

    @property
    def difference(self) -> float:
        """(counted - published) / published."""
        return self.counted / self.published - 1.0

    @property
    def unexplained(self) -> float:
        """(counted - published) / published, with embeddings counted as published."""
        return (self.counted + self.embeddings) / self.published - 1.0


def published_rows(data: Path) -> list[AskedStep]:
    """Requests for the rows of the table below ``data`` with a published MFU."""
    asked = (asked_step(row) for row in read_training_rows(data) if row.mfu)
    return [each for each in asked if isinstance(each, AskedStep)]


def compared(steps: Sequence[AskedStep], kept: Path) -> Iterator[ComparedMfu]:
    """Compare each of ``steps``; captures are cached in ``kept``. All micro-batches are the same: one is counted."""
    for step in steps:
        micro_batches = step.spec.micro_batches
        once = prepared(replace(step, spec=replace(step.spec, micro_batches=1)), kept)
        found = utilisation_of(once.graph, once.setting.machine, step.row.seconds / micro_batches)
        assert found is not None and found.mfu is not None and found.hfu is not None
        (peak,) = found.peak_flops_per_second.values() if step.precision is None else (0.0,)
        yield ComparedMfu(step.row, step.row.mfu, found.mfu, found.hfu, _embeddings(step) / peak if peak else 0.0)


def _embeddings(step: AskedStep) -> float:
    """Flop/s of one GPU for embeddings that are only looked up, if they were multiplied."""
    from transformers import CONFIG_MAPPING

    from e2e.capture.models.configurations import PRESETS

    given = {**PRESETS[step.model], **step.config}
    config = CONFIG_MAPPING[given.pop("model_type")](**given)
    rows = getattr(config, "n_positions", 0) + (0 if config.tie_word_embeddings else config.vocab_size)
    tokens = step.row.global_batch * step.sequence_length / step.row.seconds / step.row.gpus
    return float(6 * rows * config.hidden_size * tokens)


# --- serving --------------------------------------------------------------------------------------

_FP4, _FP8 = "weights=nvfp4,experts=nvfp4,kv=fp8", "weights=fp8,experts=fp8,kv=fp8"
_MXFP4, _R1_FP4, _R1_FP8 = "experts=mxfp4", "weights=bf16,experts=nvfp4", "weights=fp8-block,experts=fp8-block,kv=fp8"
# Model, GPU, number, parallelism, precision, tokens of prompts and outputs, users, published tokens per second.
SERVED = (
    ("llama-3.1-70b", "h200-sxm", 2, "tp=2", _FP8, 1024, 1024, 3000, 2582),
    ("llama-3.1-70b", "h200-sxm", 2, "tp=2", _FP8, 1024, 8192, 1500, 2009),
    ("llama-3.1-70b", "h200-sxm", 2, "tp=2", _FP8, 8192, 1024, 1500, 537),
    ("llama-3.1-70b", "b200-sxm", 1, "tp=1", _FP4, 1024, 1024, 3000, 6842),
    ("llama-3.1-70b", "b200-sxm", 1, "tp=1", _FP4, 1024, 8192, 1500, 3242),
    ("llama-3.1-70b", "b200-sxm", 1, "tp=1", _FP4, 8192, 1024, 1500, 1362),
    ("gpt-oss-120b", "h200-sxm", 1, "tp=1", _MXFP4, 1024, 1024, 3000, 6798),
    ("gpt-oss-120b", "h200-sxm", 1, "tp=1", _MXFP4, 8192, 1024, 1500, 1828),
    ("gpt-oss-120b", "gb200", 1, "tp=1", f"{_MXFP4},kv=fp8", 1024, 1024, 3000, 26609),
    ("gpt-oss-120b", "gb200", 1, "tp=1", f"{_MXFP4},kv=fp8", 1024, 8192, 1500, 14800),
    ("gpt-oss-120b", "gb200", 1, "tp=1", f"{_MXFP4},kv=fp8", 8192, 1024, 1500, 6835),
    ("gpt-oss-120b", "b200-sxm", 2, "tp=2,ep=2,dp-attention=2", f"{_MXFP4},kv=fp8", 1024, 1024, 3000, 25870),
    ("gpt-oss-120b", "b200-sxm", 4, "tp=4,ep=4,dp-attention=4", _MXFP4, 1024, 2048, 2560, 19500),
    ("gpt-oss-120b", "b200-sxm", 8, "tp=8", _MXFP4, 1024, 2048, 1, 420),
    ("deepseek-r1", "h200-sxm", 8, "tp=8,ep=8,dp-attention=8", _R1_FP8, 1024, 2048, 1024, 1436),
    ("deepseek-r1", "h200-sxm", 8, "tp=8,ep=8,dp-attention=8", _R1_FP8, 1024, 1024, 3000, 1620),
    ("deepseek-r1", "b200-sxm", 4, "tp=4,ep=4,dp-attention=4", f"{_R1_FP4},kv=fp8", 1024, 1024, 3000, 6430),
    ("deepseek-r1", "b200-sxm", 4, "tp=4,ep=4,dp-attention=4", f"{_R1_FP4},kv=fp8", 1024, 8192, 1500, 3862),
    ("deepseek-r1", "b200-sxm", 8, "tp=8,ep=8,dp-attention=8", _R1_FP4, 1024, 2048, 3072, 4548),
    ("deepseek-r1", "b200-sxm", 8, "tp=8,ep=8,dp-attention=8", f"{_R1_FP4},kv=fp8", 1024, 2048, 7168, 5393),
    ("deepseek-r1", "b200-sxm", 8, "tp=8,ep=2", _R1_FP4, 1024, 2048, 1, 149),
    ("qwen3-235b", "h200-sxm", 4, "tp=4,ep=4,dp-attention=4", _FP8, 1024, 1024, 3000, 3268),
    ("qwen3-235b", "h200-sxm", 4, "tp=4,ep=4,dp-attention=4", _FP8, 1024, 8192, 1500, 1417),
    ("qwen3-235b", "b200-sxm", 4, "tp=4,ep=4,dp-attention=4", _FP4, 1024, 1024, 3000, 5756),
    ("qwen3-235b", "b200-sxm", 4, "tp=4,ep=4,dp-attention=4", _FP4, 1024, 8192, 1500, 3389),
)


def _served(only: str) -> None:
    """Print predicted and published tokens per second of the rows whose GPU and model contain ``only``."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for model, gpu, gpus, parallel, precision, inputs, outputs, users, published in SERVED:
        name = f"{gpu} {model} {parallel} {inputs}+{outputs} x {users}"
        if only not in name:
            continue
        answer = serve(ServingRequest(
            model=model, gpu=gpu, gpus=gpus, parallel=parallel, precision=precision, engine="trtllm",
            input_length=inputs, output_length=outputs, concurrency=users, requests=users if users > 1 else 3,
        ))  # fmt: skip
        last, one = answer.run.last, users == 1
        rate = 1 / float(answer.tpot_seconds.mean()) if one else len(last) * outputs / float(last.max()) / gpus
        found[gpu == "h200-sxm"].append(rate / published - 1)
        print(f"{name}: {rate:.0f} tokens/s; published {published} ({rate / published - 1:+.0%})", flush=True)
    for hopper, errors in found.items():
        if errors:
            middle = sorted(abs(each) for each in errors)[len(errors) // 2]
            print(f"{'H200' if hopper else 'Blackwell'}: {len(errors)} rows, median {middle:.0%}")


COMMUNITY = Path(__file__).with_name("published_serving.csv")


def read_community_runs(folder: Path) -> list[MeasuredServing]:
    """The served runs that users measured and published; their traces of requests are written to ``folder``."""
    found: list[MeasuredServing] = []
    for row in csv_rows(COMMUNITY, "served runs"):
        users, count, rate = int(row["users"] or 0), int(row["requests"]), float(row["rate"] or 0)
        inputs, outputs = float(row["input_tokens"]), float(row["output_tokens"])
        lengths: dict[str, Any] = {"requests": count}
        if row["lengths"] == "sharegpt":
            lengths["requests"] = folder / f"{len(found)}.jsonl"
            lengths["requests"].write_text(_chat_trace(count, inputs, outputs, rate), encoding="utf-8")
        else:
            longest = 2 if row["lengths"] == "even" else 1
            lengths |= {"input_length": round(longest * inputs), "output_length": round(longest * outputs)}
        if row["lengths"] == "even":
            lengths["shortest_length"] = 0.5 / max(inputs, outputs)
        request = ServingRequest(
            model=row["model"], gpu=row["gpu"], gpus=int(row["gpus"]), parallel=row["parallel"],
            precision=row["precision"], engine=row["engine"], engine_options=row["engine_options"],
            replicas=int(row["replicas"]), concurrency=None if rate else users or count, **lengths,
        )  # fmt: skip
        scales = {"ttft": ("ttft_ms", 1e-3), "tpot": ("tpot_ms", 1e-3), "throughput": ("tokens_per_second", 1.0)}
        measured = {name: float(row[column]) * scale for name, (column, scale) in scales.items() if row[column]}
        load = "few" if rate or 0 < users <= 16 else "many"
        group = f"{row['half']}/{row['gpu']}/{row['engine'].split('=')[0]}/{load} at once"
        found.append(MeasuredServing(group, row["name"], request, measured))
    return found


def _chat_trace(count: int, inputs: float, outputs: float, rate: float) -> str:
    """A trace of ``count`` requests with exponential lengths of these means, shuffled, at ``rate`` a second or 0 s."""
    drawn = np.random.default_rng(5)
    even = -np.log1p(-(np.arange(count) + 0.5) / count)
    gaps = drawn.exponential(1 / rate, count) if rate else np.zeros(count)
    lengths = [np.maximum(np.round(mean * drawn.permutation(even)), 1).astype(int) for mean in (inputs, outputs)]
    rows = zip(np.cumsum(gaps).tolist(), *(each.tolist() for each in lengths), strict=True)
    return "".join(
        json.dumps({"timestamp": 1e3 * at, "input_length": prompt, "output_length": output}) + "\n"
        for at, prompt, output in rows
    )


def _whole_run(row: MeasuredServing) -> tuple[Mapping[str, float], Mapping[str, tuple[float, float]]]:
    """Means and intervals of a whole run, its begin and its end included."""
    result = serving_result(answered(row), with_table_error=False)
    values = {
        "ttft": result.ttft_seconds.mean,
        "tpot": result.tpot_seconds.mean,
        "throughput": result.output_tokens_per_second,
    }
    return values, {
        "ttft": result.ttft_interval_seconds,
        "tpot": result.tpot_interval_seconds,
        "throughput": result.output_tokens_per_second_interval,
    }


def _community(only: str) -> None:
    """Print the errors of the runs whose group and name contain ``only``, one by one and by group."""
    with tempfile.TemporaryDirectory(prefix="published-serving-") as folder:
        rows = [each for each in read_community_runs(Path(folder)) if only in f"{each.group}/{each.name}"]
        section = ServingSection(*errors_of(rows, _whole_run))
    for each in section.errors:
        told = (f"{name} {each.predicted[name]:.4g} ({each.error(name):+.0%})" for name in each.row.measured)
        print(f"{each.row.group} {each.row.name}: {', '.join(told)}", flush=True)
    section.render()


TABLES: Mapping[str, Sequence[PublishedRun]] = {"llama3": LLAMA_RUNS, "megatron": GPT_RUNS, "mixtures": MIXTURES}


def throughput_command(
    table: Annotated[str, typer.Argument(help=f"Of {', '.join(TABLES)}, mfu, serving, community.")],
    only: Annotated[str, typer.Option(help="Runs whose name contains this.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Every n-th run alone.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements, for mfu.")] = None,
) -> None:
    """Compare the published throughput, or MFU, of a table of runs with ours."""
    if table == "mfu":
        steps = [step for step in published_rows(data_folder(data)) if only in step.row.name]
        _print_mfu(steps[::every])
    elif table == "serving":
        _served(only)
    elif table == "community":
        _community(only)
    elif table in TABLES:
        for row in [each for each in TABLES[table] if only in each.name][::every]:
            print(compare(row), flush=True)
    else:
        raise InputError(f"{table}: no such table; choose of {', '.join(TABLES)}, mfu, serving, community")


def _print_mfu(steps: Sequence[AskedStep]) -> None:
    found = []
    with tempfile.TemporaryDirectory(prefix="published-mfu-") as kept:
        for each in compared(steps, Path(kept)):
            found.append(each)
            print(
                f"{each.row.name:88s} published {each.published:6.2%}  counted {each.counted:6.2%} "
                f"({each.difference:+.2%}, embeddings counted {each.unexplained:+.2%})  HFU {each.hfu:6.2%}",
                flush=True,
            )
    for name in ("difference", "unexplained"):
        values = [abs(getattr(each, name)) for each in found]
        print(f"{len(values)} rows, {name}: mean {sum(values) / len(values):.2%}, largest {max(values):.2%}")


if __name__ == "__main__":
    sys.exit(run(program(throughput_command), "lab.bench.published_throughput"))
