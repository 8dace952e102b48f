"""The benchmark of whole networks: its arithmetic on made-up rows, its pictures, and what it says without a build."""

from __future__ import annotations

from lab.bench import models

PEERS = ("openvino-bf16", "torch-bf16")


def row(engine: str, ratio: float, error: float) -> dict[str, object]:
    """Of an engine that takes ``ratio`` times the 2 ms of ours in FP32."""
    seconds = 2e-3 * ratio
    errors = {"max_relative_error": error, "mean_relative_error": error / 8, "cosine": 0.5, "top1_agreement": 1.0}
    return dict(engine=engine, mode="mode", median_seconds=seconds, min_seconds=seconds, ratio_to_tuned=ratio, **errors)


def document(*rows: dict[str, object]) -> dict[str, object]:
    return {"rows": [row("tuned", 1.0, 1e-6), *rows], "not_measured": [], "absent": {}}


def test_ratios_of_a_precision_are_to_ours_in_that_precision():
    ours = row("ours, bfloat16", 0.5, 0.01)
    apart, peer, other = (
        row("ours, bfloat16, fusion off", 0.6, 0.01), row("openvino-bf16", 0.75, 0.02), row("torch-bf16", 2.0, 0.04),
    )  # fmt: skip
    second = document(row("ours, bfloat16", 1.0, 0.01), row("openvino-bf16", 6.0, 0.5))
    lines = models.overview({"a": document(ours, apart, peer, other), "b": second}, "bfloat16", PEERS).splitlines()
    assert lines[2] == "| a | 1.00 | 2.00 | 1.20 | 1.50 | 4.00 | 1.50 | 1.50 | 1.0e-02 | 2.0e-02 | 4.0e-02 |"
    assert lines[3] == "| b | 2.00 | 2.00 | - | 6.00 | - | 6.00 | 6.00 | 1.0e-02 | 5.0e-01 | - |"
    # Geometric means: twice and once as long in FP32; 1.5 and 6.
    assert lines[4] == "| geometric mean of 2 |  | 1.41 times | 1.20 | 3.00 | 4.00 | 3.00 | 3.00 |  |  |  |"
    assert len({line.count("|") for line in lines}) == 1


def test_a_network_without_our_build_has_a_line_all_the_same():
    lines = models.overview({"a": document(row("openvino-bf16", 0.5, 0.1))}, "bfloat16", PEERS).splitlines()
    assert lines[2].startswith("| a | - |")
    absent = {**document(), "absent": {"ours, int8": "not built"}}
    assert "| ours, int8 | not built |" in models.table("a", absent)
