"""The page of a sweep: its frontier, its ticks, labels with room, names escaped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from e2e.sources.gpu_prices import read_prices
from e2e.sweeps.sweep_driver import DAY, RunPlan, SweepResult
from e2e.sweeps.sweep_report import fastest, short_way, sweep_page, write_sweep_page
from e2e.sweeps.sweep_results import SweepRow
from e2e.sweeps.sweep_space import SweepRequest
from tests.web_pages import OVERLAPS, found_in, read_page


def row(gpu: str, gpus: int, parallel: str, rate: float) -> SweepRow:
    return SweepRow(gpu, gpus, max(gpus // 8, 1), parallel, "ok", iteration_seconds=gpus / rate, samples=gpus,
                    interval_seconds=(0.8 * gpus / rate, 1.3 * gpus / rate), samples_per_second=rate,
                    tokens_per_second_per_gpu=4096 * rate / gpus, exposed_seconds=1e-3, bubble_seconds=0.0,
                    peak_memory_bytes=40 << 30, memory_capacity_bytes=80 << 30)  # fmt: skip


def sweep(model: str = "llama-8b") -> SweepResult:
    """Two GPUs on five numbers of GPUs, whose frontiers nearly touch; three ways each."""
    rows = []
    for place, gpu in enumerate(("h100-sxm", "h200-sxm")):
        for gpus in (8, 16, 64, 256, 512):
            for way, share in (("dp=2,tp=4,micro-batches=4", 1.0), ("fsdp=8,micro-batches=4", 0.93), ("pp=8", 0.5)):
                rows.append(row(gpu, gpus, way, gpus * (1.0 + 0.02 * place) * share))
    rows.sort(key=lambda each: -(each.samples_per_second or 0))
    rows.append(SweepRow("h100-sxm", 8, 1, "dp=8", "does not fit", reason="needs 90.0 GiB"))
    return SweepResult(SweepRequest(model), tuple(rows), len(rows))


def test_the_page_has_the_answer_the_frontier_and_what_does_not_run():
    read = read_page(sweep_page(sweep()))
    for piece in ("llama-8b: 31 ways", "522.2 samples/s", "by 512 x h200-sxm", "needs 90.0 GiB",
                  "30 ok, 1 does not fit", "samples per second", "tokens/s per GPU"):  # fmt: skip
        assert piece in read.text, piece
    assert all(f" {count} " in read.text for count in (8, 16, 64, 256, 512))
    best = fastest(sweep().rows[:-1])
    assert len(best) == 10 and all(each.parallel.startswith("dp=2") for each in best.values())
    assert short_way("dp=2,tp=4,micro-batches=4") == "dp=2,tp=4"


def test_one_number_of_gpus_is_no_curve():
    one = replace(sweep(), rows=tuple(each for each in sweep().rows if each.gpus == 8))
    page = sweep_page(one)
    assert "<svg" not in page and "All that run" in page


def test_the_answer_tells_the_run_that_is_asked_about():
    """A trillion tokens at 522.2 sequences of 4,096 a second are 5.4 days of 512 GPUs at 2.50 an hour."""
    asked = replace(sweep(), plan=RunPlan(1e12, 100 * DAY, read_prices("2.5")))
    assert "days: 5.4; cost of the run: 166," in read_page(sweep_page(asked)).text


def test_labels_do_not_overlap_in_a_browser(tmp_path: Path):
    write_sweep_page(sweep(), tmp_path / "sweep.html")
    code = f"""[{OVERLAPS}("#frontier svg text"), document.querySelectorAll("#frontier g > title").length]"""
    (texts, overlaps), dots = found_in(tmp_path / "sweep.html", code)
    assert texts >= 15 and overlaps == 0 and dots == 30
