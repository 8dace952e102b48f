"""Published training throughput of large language models against ``predict``; nothing is fitted to these figures.

    python -m lab.bench.published_throughput llama3             # Llama 3 405B on 8,192 and 16,384 H100
    python -m lab.bench.published_throughput megatron [NAME ...]   # Megatron-LM's GPT, 1.7 to 1,008 billion parameters
    python -m lab.bench.published_throughput mixtures [TEXT]    # mixtures of experts; rows whose name contains TEXT

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
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Configuration = Mapping[str, Any]  # ``config.json`` of Hugging Face


def predict(
    model: str | Configuration, gpu: str, *, gpus: int, batch: int, length: int, spread: str, more: str
) -> dict[str, Any]:
    """Prediction by ``predict``, run in a separate process. ``batch``: sequences of a micro-batch; ``more``: other
    options.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        named = ["--model", model] if isinstance(model, str) else ["--model-config", str(path)]
        if not isinstance(model, str):
            path.write_text(json.dumps(model), encoding="utf-8")
        command = [sys.executable, "-m", "e2e", "predict", *named, "--gpu", gpu, "--gpus", str(gpus), "--json"]
        command += ["--batch-size", str(batch), "--sequence-length", str(length), "--parallel", spread, *more.split()]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr.strip())
    return dict(json.loads(done.stdout))  # also if the memory is too small, which gives status 2


def memory_of(found: Mapping[str, Any]) -> float:
    """Largest peak of a rank in GiB."""
    return float(max(rank["peak_memory_bytes"] for rank in found["ranks"]) / 2**30)


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


@dataclass(frozen=True)
class LlamaRow:
    """Row of Llama 3's table. ``batch``: sequences per step and data-parallel rank."""

    gpus: int
    tp: int
    cp: int
    pp: int
    dp: int
    length: int
    batch: int
    tflops: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.dp * self.batch * self.length

    @property
    def flops(self) -> float:
        """Flops of a step."""
        layer = 2 * WIDTH * WIDTH * (1 + KV_HEADS / HEADS) + 3 * WIDTH * INNER
        parameters = LAYERS * layer + WORDS * WIDTH
        return self.tokens * (6 * parameters + 6 * LAYERS * WIDTH * self.length)

    def spread(self) -> str:
        """Value of ``--parallel``."""
        parts = (LAYERS + 2) // self.pp
        return (
            f"fsdp={self.dp},zero=2,tp={self.tp},cp={self.cp},pp={self.pp},micro-batches={self.batch},sp=yes,"
            f"schedule=interleaved,virtual-stages={parts},first-layers=0,last-layers=0,master-weights=yes"
        )


LLAMA_ROWS = (
    LlamaRow(8192, 8, 1, 16, 64, 8192, 32, 430),
    LlamaRow(16384, 8, 1, 16, 128, 8192, 16, 400),
    LlamaRow(16384, 8, 16, 16, 8, 131072, 16, 380),
)


def llama3(names: Sequence[str]) -> None:
    """Print published and predicted throughput."""
    print(" GPUs  CP  tokens   step s  TFLOP/s per GPU  published   error  memory GiB")
    for row in LLAMA_ROWS:
        more = "--dtype bfloat16 --attention flash"
        found = predict(LLAMA, "h100-sxm", gpus=row.gpus, batch=1, length=row.length, spread=row.spread(), more=more)
        seconds = found["iteration_seconds"]
        rate = row.flops / seconds / row.gpus / 1e12
        cells = f"{row.gpus:5} {row.cp:3} {row.length:7} {seconds:8.2f}  {rate:15.1f}  {row.tflops:9.0f}"
        print(f"{cells}  {rate / row.tflops - 1:+6.1%}  {memory_of(found):10.1f}", flush=True)


# --- Megatron-LM's GPT ----------------------------------------------------------------------------

TOKENS, GPT_WORDS = 2048, 51200


@dataclass(frozen=True)
class GptRow:
    """Published figure of Megatron-LM. ``batch``: sequences per step; ``micro``: per micro-batch (assumed)."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro: int
    tflops: float

    @property
    def flops(self) -> float:
        """Flops of a step, recomputation included (equation 3)."""
        work = 96 * self.batch * TOKENS * self.layers * self.hidden**2
        return work * (1 + TOKENS / (6 * self.hidden) + GPT_WORDS / (16 * self.layers * self.hidden))

    def spread(self, interleaved: bool) -> str:
        """Value of ``--parallel``."""
        replicas = self.gpus // self.tp // self.pp
        parts = {"dp": replicas, "tp": self.tp, "pp": self.pp, "micro-batches": self.batch // replicas // self.micro}
        text = ",".join(f"{name}={value}" for name, value in parts.items())
        schedule = ",schedule=interleaved,virtual-stages=2" if interleaved else ""
        return f"{text},recompute=full,master-weights=yes{schedule}"


GPT_ROWS = {
    "1.7B": GptRow(24, 2304, 24, 1, 1, 32, 512, 4, 137),
    "3.6B": GptRow(32, 3072, 30, 2, 1, 64, 512, 4, 138),
    "7.5B": GptRow(32, 4096, 36, 4, 1, 128, 512, 4, 142),
    "18.4B": GptRow(48, 6144, 40, 8, 1, 256, 1024, 4, 135),
    "39.1B": GptRow(64, 8192, 48, 8, 2, 512, 1536, 2, 138),
    "76.1B": GptRow(80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    "145.6B": GptRow(96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    "145.6B-i": GptRow(96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    "174.6B-i": GptRow(96, 12288, 96, 8, 12, 384, 1536, 1, 153),
    "174.6B-x4-i": GptRow(96, 12288, 96, 8, 12, 1536, 1536, 1, 141),
    "310.1B": GptRow(128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
    "529.6B": GptRow(128, 20480, 105, 8, 35, 2520, 2520, 1, 163),
    "1008B": GptRow(160, 25600, 128, 8, 64, 3072, 3072, 1, 163),
}


def megatron(names: Sequence[str]) -> None:
    """Print published and predicted throughput of the named points, by default all of them."""
    names = names or list(GPT_ROWS)
    unknown = [name for name in names if name not in GPT_ROWS]
    if unknown:
        raise SystemExit(f"{unknown[0]}: no such point; known: {', '.join(GPT_ROWS)}")
    print("point        GPUs  step s  TFLOP/s per GPU  published  error")
    for name in names:
        row = GPT_ROWS[name]
        config = {
            "model_type": "gpt2", "n_positions": TOKENS, "vocab_size": GPT_WORDS,
            "n_embd": row.hidden, "n_head": row.heads, "n_layer": row.layers,
        }  # fmt: skip
        spread = row.spread(name.endswith("-i"))
        found = predict(
            config,
            "a100-sxm-80gb",
            gpus=row.gpus,
            batch=row.micro,
            length=TOKENS,
            spread=spread,
            more="--dtype float16",
        )
        seconds = found["iteration_seconds"]
        rate = row.flops / seconds / row.gpus / 1e12
        cells = f"{name:12} {row.gpus:4} {seconds:7.2f}  {rate:15.1f}  {row.tflops:9.0f}"
        print(f"{cells}  {rate / row.tflops - 1:+.1%}", flush=True)


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


@dataclass(frozen=True)
class MixtureRow:
    """Published step: ``rates`` of tokens per second and GPU by release, or ``seconds`` of the step."""

    name: str
    model: str | Configuration
    gpus: int
    batch: int
    micro_batch: int
    spread: str
    rates: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    precision: str = ""

    def published(self) -> Iterator[tuple[str, float]]:
        """Yield release and seconds of a step."""
        if self.seconds:
            yield "", self.seconds
        for release, rate in self.rates.items():
            yield release, self.batch * LENGTH / (rate * self.gpus)


def _micro_batches(batch: int, replicas: int, size: int = 1) -> str:
    return f"micro-batches={batch // (replicas * size)}"


def _mixtral_rate() -> float:
    """Tokens per second and GPU from the published TFLOP/s: 6 x active parameters per token, and causal attention."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    return MIXTRAL_TFLOPS * 1e12 / (6 * (32 * layer + 32000 * 4096) + 6 * 32 * 4096 * LENGTH)


MIXTURES = (
    *(
        MixtureRow(
            f"Qwen3-235B-A22B, etp={etp}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN},ep={32 // etp},etp={etp},{QWEN_PARTS},{_micro_batches(2048, 16)}",
            {"25.09": 1204.0, "25.11": 1575.0, "26.02 to 26.06, of 8,192 sequences": 1633.0}, precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        MixtureRow(
            f"DeepSeek-V3, etp={etp}", "deepseek-v3", 1024, 8192, 1,
            f"{DEEPSEEK},etp={etp},{DEEPSEEK_PARTS},{_micro_batches(8192, 64)}", {"25.09": 1297.0},
            precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        MixtureRow(
            f"Qwen3-235B-A22B, BF16, tokens once per node{named}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN_BY_TOKENS},{QWEN_PARTS}{overlap},{_micro_batches(2048, 16)}", seconds=seconds,
        )
        for named, overlap, seconds in (("", "", 19.7), (", overlapped", ",ep-overlap=yes", 17.6))
    ),
    *(
        MixtureRow(
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
    MixtureRow(
        "gpt-oss-120b, micro-batches of 4", "gpt-oss-120b", 64, 512, 4,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(512, 16, 4)}", {"25.11": 5630.0},
    ),
    MixtureRow(
        "gpt-oss-120b", "gpt-oss-120b", 64, 1280, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(1280, 16)}", {"26.02": 5984.0, "later": 5824.0},
    ),
    MixtureRow(
        "Mixtral 8x7B", "mixtral-8x7b", 64, MIXTRAL_BATCH, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,schedule=interleaved,virtual-stages=8,{_micro_batches(MIXTRAL_BATCH, 16)}",
        {"README": _mixtral_rate()},
    ),
    *(
        MixtureRow(
            f"Qwen3-30B-A3B, optimizer offloaded {share:.0%}", "qwen3-30b-a3b", 16, 8, 1,
            OFFLOADED + (f",offload-optimizer={share:g}" if share else ""), seconds=seconds,
        )
        for share, seconds in ((0.0, 0.996), (0.25, 1.871), (0.5, 2.484), (1.0, 3.877))
    ),
)  # fmt: skip


def mixtures(names: Sequence[str]) -> None:
    """Print published and predicted steps of the rows whose name contains the first of ``names``."""
    wanted = names[0] if names else ""
    for row in (each for each in MIXTURES if wanted in each.name):
        more = "--dtype bfloat16 --stack megatron --attention cudnn --speed-spread 0"
        more += f" --precision {row.precision}" if row.precision else ""
        found = predict(
            row.model, "dgx-h100", gpus=row.gpus, batch=row.micro_batch, length=LENGTH, spread=row.spread, more=more
        )
        seconds = found["iteration_seconds"]
        errors = ", ".join(f"{release} {value:.3f} s: {seconds / value - 1:+.1%}" for release, value in row.published())
        print(f"{row.name}: {seconds:.3f} s, {memory_of(found):.1f} GiB; published {errors}", flush=True)


TABLES: Mapping[str, Callable[[Sequence[str]], None]] = {
    "llama3": llama3,
    "megatron": megatron,
    "mixtures": mixtures,
}


def main() -> None:
    """Print the named table."""
    name, *rest = sys.argv[1:] or [""]
    if name not in TABLES:
        raise SystemExit(f"which table? {', '.join(TABLES)}")
    TABLES[name](rest)


if __name__ == "__main__":
    main()
