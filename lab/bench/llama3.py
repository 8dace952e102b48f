"""Published throughput of Llama 3 405B's training against ``predict``: ``python -m lab.bench.llama3``.

"The Llama 3 herd of models" (arXiv 2407.21783), table 4: BF16 on 8,192 and 16,384 H100 SXM in nodes of eight, one
400 Gbit/s port each, 16 million tokens a step. Tensor and pipeline parallel with the interleaved schedule, one layer in
every part and none in the first and the last (section 3.3.2); sharded optimizer state and gradients, no recomputation.
What it does not give is assumed: micro-batches of one sequence; sequence parallelism; FP32 master weights. TFLOP/s per
GPU are taken as those of the products of 6 x parameters per token, and 12 x layers x width x length / 2 of causal
attention.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, WIDTH, WORDS, INNER, HEADS, KV_HEADS = 126, 16384, 128256, 53248, 128, 8
CONFIG = {
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
class Point:
    """Row of the table. ``batch``: sequences per step and data-parallel rank."""

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


POINTS = (
    Point(8192, 8, 1, 16, 64, 8192, 32, 430),
    Point(16384, 8, 1, 16, 128, 8192, 16, 400),
    Point(16384, 8, 16, 16, 8, 131072, 16, 380),
)


def predict(point: Point, folder: Path) -> dict[str, Any]:
    """Prediction by ``predict``, run in a separate process."""
    path = folder / "llama-3-405b.json"
    path.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "e2e", "predict", "--model-config", str(path), "--gpu", "h100-sxm", "--json"]
    command += ["--gpus", str(point.gpus), "--dtype", "bfloat16", "--sequence-length", str(point.length)]
    command += ["--attention", "flash", "--batch-size", "1", "--parallel", point.spread()]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr.strip())
    return dict(json.loads(done.stdout))  # also if the memory is too small, which gives status 2


def main() -> None:
    """Print published and predicted throughput."""
    print(" GPUs  CP  tokens   step s  TFLOP/s per GPU  published   error  memory GiB")
    with tempfile.TemporaryDirectory() as folder:
        for point in POINTS:
            found = predict(point, Path(folder))
            seconds = found["iteration_seconds"]
            memory = max(rank["peak_memory_bytes"] for rank in found["ranks"]) / 2**30
            rate = point.flops / seconds / point.gpus / 1e12
            row = f"{point.gpus:5} {point.cp:3} {point.length:7} {seconds:8.2f}  {rate:15.1f}  {point.tflops:9.0f}"
            print(f"{row}  {rate / point.tflops - 1:+6.1%}  {memory:10.1f}", flush=True)


if __name__ == "__main__":
    main()
