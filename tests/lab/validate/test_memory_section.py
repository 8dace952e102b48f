"""The section ``memory`` of ``lab.validate``: what it asks, and what it calls wrong."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from lab.data.selection import is_sealed
from lab.data.timm_steps import TimmStep
from lab.validate.memory import (
    GOLDEN_FILE,
    AskedMemory,
    FoundMemory,
    MemoryCase,
    MemorySection,
    _found,
    golden_memory,
    tried_before,
)

CASES = [f"gpt/gpt3_mcore_te_tp2_pp2{end}" for end in ("", "_ddp_average_in_collective", "_resume_torch_dist", "_mla")]
CELLS = {
    "median_iteration_s": "0.3", "layers": "2", "hidden": "64", "heads": "4", "seq": "32", "mbs": "4", "gbs": "32",
    "tp": "2", "pp": "2", "cp": "",
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A table of runs, each recorded twice."""
    path = tmp_path / GOLDEN_FILE
    path.parent.mkdir()
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, ["case", "mem_max_bytes", *CELLS])
        writer.writeheader()
        for case in CASES:
            for peak in ("1e9", "2e9"):
                writer.writerow({"case": case, "mem_max_bytes": peak, **CELLS})
    return tmp_path


def test_a_case_is_asked_once_unless_it_is_sealed_and_others_say_why_not(data: Path) -> None:
    found, left_out = golden_memory(data)
    seen = {case for case in CASES[:2] if not is_sealed(GOLDEN_FILE, {"case": case})}
    assert {each.name.partition("golden/")[2] for each in found} == seen and seen
    assert all(each.allocated == 2e9 and each.last for each in found)
    step = found[0].step
    assert (step.batch_size, step.spec.micro_batches, step.config["vocab_size"]) == (4, 4, 50432)  # type: ignore[union-attr]
    assert step.attention == "eager" and not set(left_out) & {each.name for each in found}  # type: ignore[union-attr]


def test_the_last_rank_is_predicted_with_its_own_loss(data: Path, tmp_path: Path) -> None:
    found = _found((golden_memory(data)[0][0], tmp_path))
    assert found.failure is None and found.said == "fits" and 0 < found.allocated <= found.reserved < found.room
    # Scores of 128 tokens and half of the words, in 16 bits and in one FP32 copy.
    assert found.allocated > 128 * 50432 // 2 * (2 + 4)


@pytest.mark.parametrize(
    ("batch", "first", "before"), [(768, 1024, 1024), (512, 1024, 768), (6, 1024, 8), (3, 512, 4), (2, 512, 3)]
)
def test_timm_tries_halves_and_a_step_between(batch: int, first: int, before: int) -> None:
    assert tried_before(batch, first) == before


def test_wrong_is_what_ran_and_is_refused_and_what_failed_and_fits() -> None:
    def case(ran: bool, said: str) -> MemoryCase:
        step = TimmStep("toy", "rtx-3090", True, False, False, 240, 8, 224, 1.0)
        asked = AskedMemory("toy", "toy", step, ran, reserved=100.0, allocated=80.0)
        return MemoryCase(asked, FoundMemory(100, 84, 90, said))  # type: ignore[arg-type]

    cases = [case(True, "fits"), case(True, "may not fit"), case(True, "does not fit"), case(False, "fits")]
    assert [each.wrong for each in cases] == [False, False, True, True]
    figures = MemorySection(cases, {}).figures()[-1]
    assert (figures["ran"], figures["refused"], figures["did_not_run"], figures["passed"]) == (3, 1, 1, 1)
    assert figures["mean"] == pytest.approx(0.05)
