"""Published throughput of large mixtures of experts against ``predict``: ``python -m lab.bench.mixtures [TEXT]``.

Megatron-Bridge's performance summary (docs/performance-summary.md of each release; degrees and tokens per second and
GPU) on DGX H100, tokens shared evenly without dropping, not used in any fit. ``etp=2`` in addition: experts split like
the layers, which was not measured. Settings missing in the summary are from the releases' recipes
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class Row:
    """Published step: ``rates`` of tokens per second and GPU by release, or ``seconds`` of the step."""

    name: str
    model: str | dict[str, Any]
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


ROWS = (
    *(
        Row(
            f"Qwen3-235B-A22B, etp={etp}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN},ep={32 // etp},etp={etp},{QWEN_PARTS},{_micro_batches(2048, 16)}",
            {"25.09": 1204.0, "25.11": 1575.0, "26.02 to 26.06, of 8,192 sequences": 1633.0}, precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        Row(
            f"DeepSeek-V3, etp={etp}", "deepseek-v3", 1024, 8192, 1,
            f"{DEEPSEEK},etp={etp},{DEEPSEEK_PARTS},{_micro_batches(8192, 64)}", {"25.09": 1297.0},
            precision="fp8-current",
        )
        for etp in (1, 2)
    ),
    *(
        Row(
            f"Qwen3-235B-A22B, BF16, tokens once per node{named}", QWEN3_235B, 256, 2048, 1,
            f"{QWEN_BY_TOKENS},{QWEN_PARTS}{overlap},{_micro_batches(2048, 16)}", seconds=seconds,
        )
        for named, overlap, seconds in (("", "", 19.7), (", overlapped", ",ep-overlap=yes", 17.6))
    ),
    *(
        Row(
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
    Row(
        "gpt-oss-120b, micro-batches of 4", "gpt-oss-120b", 64, 512, 4,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(512, 16, 4)}", {"25.11": 5630.0},
    ),
    Row(
        "gpt-oss-120b", "gpt-oss-120b", 64, 1280, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,{_micro_batches(1280, 16)}", {"26.02": 5984.0, "later": 5824.0},
    ),
    Row(
        "Mixtral 8x7B", "mixtral-8x7b", 64, MIXTRAL_BATCH, 1,
        f"fsdp=16,{SHARED},pp=4,ep=8,schedule=interleaved,virtual-stages=8,{_micro_batches(MIXTRAL_BATCH, 16)}",
        {"README": _mixtral_rate()},
    ),
    *(
        Row(
            f"Qwen3-30B-A3B, optimizer offloaded {share:.0%}", "qwen3-30b-a3b", 16, 8, 1,
            OFFLOADED + (f",offload-optimizer={share:g}" if share else ""), seconds=seconds,
        )
        for share, seconds in ((0.0, 0.996), (0.25, 1.871), (0.5, 2.484), (1.0, 3.877))
    ),
)  # fmt: skip


def predict(row: Row, folder: Path) -> dict[str, Any]:
    """Prediction by ``predict``, run in a separate process."""
    model = ["--model", str(row.model)]
    if isinstance(row.model, dict):
        path = folder / "model.json"
        path.write_text(json.dumps(row.model), encoding="utf-8")
        model = ["--model-config", str(path)]
    command = [sys.executable, "-m", "e2e", "predict", *model, "--gpu", "dgx-h100", "--gpus", str(row.gpus), "--json"]
    command += ["--dtype", "bfloat16", "--stack", "megatron", "--attention", "cudnn", "--sequence-length", str(LENGTH)]
    command += ["--batch-size", str(row.micro_batch), "--parallel", row.spread, "--skew", "spread=0"]
    if row.precision:
        command += ["--precision", row.precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"{row.name}: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))  # also if the memory is too small, which gives status 2


def main() -> None:
    """Print published and predicted steps."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        for row in (each for each in ROWS if wanted in each.name):
            found = predict(row, Path(folder))
            seconds = found["iteration_seconds"]
            memory = max(rank["peak_memory_bytes"] for rank in found["ranks"]) / 2**30
            errors = ", ".join(
                f"{release} {value:.3f} s: {seconds / value - 1:+.1%}" for release, value in row.published()
            )
            print(f"{row.name}: {seconds:.3f} s, {memory:.1f} GiB; published {errors}", flush=True)


if __name__ == "__main__":
    main()
