"""The headline figures of docs/trust.md do not slip: a fixed sample of published training steps, predicted anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.data.data_folder import data_folder
from lab.steps.training import TRAINING_FILE, read_training_rows
from lab.validate.training import training_section

TRUST = Path(__file__).resolve().parents[3] / "docs" / "trust.md"
# Lines of the table: llm-foundry on H100 and A100, NeMo's pre-training, fine-tuning and LoRA, torchtitan.
SAMPLE = (4, 46, 84, 117, 131, 157, 163, 211, 212)
SLIP = 1.1


def documented() -> tuple[int, float]:
    """Rows and mean error of the sample, as the page says."""
    found = re.search(r"\| sample that a test watches \| (\d+) \| ([\d.]+) \|", TRUST.read_text(encoding="utf-8"))
    assert found, "docs/trust.md has no line `sample that a test watches`"
    return int(found[1]), float(found[2]) / 100


def test_the_page_names_the_sample() -> None:
    count, error = documented()
    assert count == len(SAMPLE) and 0 < error < 0.2


@pytest.mark.thorough
def test_the_mean_error_of_the_sample_is_at_most_a_tenth_above_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_folder()
    if not (data / TRAINING_FILE).exists():
        pytest.skip(f"{data / TRAINING_FILE} is not there")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = training_section([row for row in read_training_rows(data) if row.place in SAMPLE])
    assert report is not None and len(report.cases) == len(SAMPLE) and not report.failed
    whole = report.figures()[0]
    assert whole.mape <= SLIP * documented()[1], {case.asked.row.name: f"{case.error:+.1%}" for case in report.cases}
