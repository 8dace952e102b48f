"""Published against predicted times of the gated delta rule and Kimi's rule: ``python lab/bench/linear_scans.py``.

Kernels of flash-linear-attention in BF16, heads of 128. H200 and GB200: QwenLM/FlashQLA, benchmark_results_H200.txt and
_GB200.txt (MIT; version 0.5.1 in a CUDA graph, kernels called without autograd). B200: pytorch/helion,
examples/linear/BENCHMARKS.md (BSD-3; through autograd; backward is forward and backward less forward). Paces are fitted
to the rows of GB200 and the backward rows of H200; no fit uses those of B200.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import LinearAttention, LinearKind
from costmodel.operators.lookups import Direction

WIDTH = 128


@dataclass(frozen=True)
class Row:
    """Published time of ``batch`` sequences of ``length`` tokens; ``key_heads`` are shared by ``heads`` value heads."""

    gpu: str
    kind: LinearKind
    direction: Direction
    batch: int
    length: int
    key_heads: int
    heads: int
    milliseconds: float

    @property
    def operator(self) -> LinearAttention:
        """The operator record of the row."""
        kept = self.gpu != "b200-sxm"
        return LinearAttention(
            self.kind, self.batch, self.length, self.key_heads, WIDTH, self.heads, WIDTH,
            direction=self.direction, keeps_states=kept and self.direction == "forward",
        )  # fmt: skip


# GPU -> (key heads, value heads) -> milliseconds forward of one sequence of 32,768, 16,384, 8,192, 4,096, 2,048 tokens,
# and of four of 8,192, eight of 4,096, four of 2,048, eight of 1,024.
SHAPES = ((1, 32768), (1, 16384), (1, 8192), (1, 4096), (1, 2048), (4, 8192), (8, 4096), (4, 2048), (8, 1024))
FORWARD: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {
    "h200-sxm": {
        (2, 8): (0.902, 0.455, 0.234, 0.132, 0.081, 0.467, 0.471, 0.126, 0.131),
        (4, 16): (1.241, 0.614, 0.316, 0.166, 0.098, 0.935, 0.945, 0.244, 0.252),
        (16, 32): (1.890, 0.930, 0.472, 0.247, 0.132, 1.898, 1.914, 0.485, 0.501),
        (16, 48): (2.711, 1.311, 0.665, 0.344, 0.191, 2.532, 2.550, 0.629, 0.650),
        (16, 64): (3.331, 1.598, 0.814, 0.417, 0.220, 3.362, 3.390, 0.829, 0.854),
    },
    "gb200": {
        (2, 8): (1.016, 0.519, 0.264, 0.147, 0.089, 0.455, 0.458, 0.124, 0.128),
        (4, 16): (1.253, 0.642, 0.333, 0.171, 0.100, 0.879, 0.882, 0.243, 0.249),
        (16, 32): (1.770, 0.901, 0.468, 0.245, 0.128, 1.764, 1.687, 0.476, 0.467),
        (16, 48): (2.521, 1.275, 0.655, 0.341, 0.189, 2.283, 2.296, 0.607, 0.622),
        (16, 64): (2.943, 1.478, 0.755, 0.396, 0.211, 2.956, 2.852, 0.772, 0.759),
    },
}
# One sequence of 8,192 and of 32,768 tokens, backward.
BACKWARD: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
    "h200-sxm": {(16, 32): (1.444, 5.697), (8, 16): (0.957, 3.701), (4, 8): (0.722, 2.743), (2, 4): (0.606, 2.311)},
    "gb200": {(32, 32): (1.446, 5.714), (16, 16): (1.013, 3.934), (8, 8): (0.798, 3.068), (4, 4): (0.671, 2.640)},
}
# (sequences, tokens, heads) -> forward, forward and backward, on B200.
AUTOGRAD: dict[LinearKind, dict[tuple[int, int, int], tuple[float, float]]] = {
    "gated_delta": {
        (1, 8192, 96): (1.204, 5.388), (2, 16384, 16): (0.925, 4.072), (4, 2048, 16): (0.347, 1.820),
        (4, 4096, 64): (1.517, 6.945),
    },
    "kimi_delta": {
        (1, 8192, 96): (2.241, 11.204), (2, 16384, 16): (1.609, 7.777), (4, 2048, 16): (0.503, 2.111),
        (4, 4096, 64): (2.925, 14.615),
    },
}  # fmt: skip


def published() -> list[Row]:
    """All published rows."""
    rows = [
        Row(gpu, "gated_delta", "forward", *shape, *heads, taken)
        for gpu, table in FORWARD.items()
        for heads, times in table.items()
        for shape, taken in zip(SHAPES, times, strict=True)
    ]
    rows += [
        Row(gpu, "gated_delta", "backward", 1, length, *heads, taken)
        for gpu, backward in BACKWARD.items()
        for heads, both in backward.items()
        for length, taken in zip((8192, 32768), both, strict=True)
    ]
    for kind, measured in AUTOGRAD.items():
        for (batch, length, heads), (forward, whole) in measured.items():
            rows.append(Row("b200-sxm", kind, "forward", batch, length, heads, heads, forward))
            rows.append(Row("b200-sxm", kind, "backward", batch, length, heads, heads, whole - forward))
    return rows


def main() -> None:
    """Print the errors by GPU, kind and direction."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in published():
        groups.setdefault((row.gpu, row.kind, row.direction), []).append(row)
    for (gpu, kind, direction), rows in groups.items():
        found = gpu_cost_model(load_machine(gpu)).estimate([row.operator for row in rows])
        errors = np.array([each.seconds * 1e3 / row.milliseconds - 1 for each, row in zip(found, rows, strict=True)])
        inside = np.mean(
            [each.lower <= row.milliseconds / 1e3 <= each.upper for each, row in zip(found, rows, strict=True)]
        )
        print(
            f"{gpu:9} {kind:12} {direction:8} {len(rows):3} rows: mean {np.mean(np.abs(errors)):5.1%}, "
            f"bias {np.mean(errors):+6.1%}, {errors.min():+.0%} to {errors.max():+.0%}, in the interval {inside:.0%}"
        )


if __name__ == "__main__":
    main()
