"""Published throughput of Megatron-LM against ``predict``: ``python -m lab.bench.megatron [NAME ...]``.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM" (arXiv 2104.04473):
table 1 (weak scaling) and table 2 (174.6 billion parameters on more and more GPUs) on DGX A100 80 GB with eight HDR
cards each; FP16 with FP32 master weights, every layer recomputed, sequences of 2048 tokens, 51,200 words. TFLOP/s per
GPU are those of its equation 3, recomputation included. What it does not give is assumed: micro-batches of 4 sequences
without a pipeline, of 2 and 1 with one, and two parts per stage where its schedule is interleaved (``name-i``). Its
fused kernels are not modelled: the layers are those of Hugging Face's GPT-2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOKENS, WORDS = 2048, 51200


@dataclass(frozen=True)
class Point:
    """Published figure. ``batch``: sequences per step; ``micro``: per micro-batch (assumed)."""

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
        return work * (1 + TOKENS / (6 * self.hidden) + WORDS / (16 * self.layers * self.hidden))

    def spread(self, interleaved: bool) -> str:
        """Value of ``--parallel``."""
        replicas = self.gpus // self.tp // self.pp
        parts = {"dp": replicas, "tp": self.tp, "pp": self.pp, "micro-batches": self.batch // replicas // self.micro}
        text = ",".join(f"{name}={value}" for name, value in parts.items())
        schedule = ",schedule=interleaved,virtual-stages=2" if interleaved else ""
        return f"{text},recompute=full,master-weights=yes{schedule}"


POINTS = {
    "1.7B": Point(24, 2304, 24, 1, 1, 32, 512, 4, 137),
    "3.6B": Point(32, 3072, 30, 2, 1, 64, 512, 4, 138),
    "7.5B": Point(32, 4096, 36, 4, 1, 128, 512, 4, 142),
    "18.4B": Point(48, 6144, 40, 8, 1, 256, 1024, 4, 135),
    "39.1B": Point(64, 8192, 48, 8, 2, 512, 1536, 2, 138),
    "76.1B": Point(80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    "145.6B": Point(96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    "145.6B-i": Point(96, 12288, 80, 8, 8, 1536, 2304, 1, 148),
    "174.6B-i": Point(96, 12288, 96, 8, 12, 384, 1536, 1, 153),
    "174.6B-x4-i": Point(96, 12288, 96, 8, 12, 1536, 1536, 1, 141),
    "310.1B": Point(128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
    "529.6B": Point(128, 20480, 105, 8, 35, 2520, 2520, 1, 163),
    "1008B": Point(160, 25600, 128, 8, 64, 3072, 3072, 1, 163),
}


def predict(name: str, folder: Path) -> float:
    """Predicted seconds of a step, by ``predict`` in a separate process."""
    point = POINTS[name]
    config = {"n_embd": point.hidden, "n_head": point.heads, "n_layer": point.layers}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_positions": TOKENS, "vocab_size": WORDS, **config}))
    command = [sys.executable, "-m", "e2e", "predict", "--model-config", str(path), "--gpu", "a100-sxm-80gb", "--json"]
    command += ["--gpus", str(point.gpus), "--dtype", "float16", "--sequence-length", str(TOKENS)]
    command += ["--batch-size", str(point.micro), "--parallel", point.spread(name.endswith("-i"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["iteration_seconds"])


def main() -> None:
    """Print published and predicted throughput of the named points, by default all of them."""
    names = sys.argv[1:] or list(POINTS)
    unknown = [name for name in names if name not in POINTS]
    if unknown:
        raise SystemExit(f"{unknown[0]}: no such point; known: {', '.join(POINTS)}")
    print("point        GPUs  step s  TFLOP/s per GPU  published  error")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            point, seconds = POINTS[name], predict(name, Path(folder))
            rate = point.flops / seconds / point.gpus / 1e12
            row = f"{name:12} {point.gpus:4} {seconds:7.2f}  {rate:15.1f}  {point.tflops:9.0f}"
            print(f"{row}  {rate / point.tflops - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
