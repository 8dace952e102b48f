"""The figures of image models in docs/trust.md do not slip: held-out steps of timm's table, captured once, priced anew.

vision_sample.json.gz    ``python -m lab.steps.image_steps --held-out 12``: the kernels of each step and its
                         measured time; timm, which the capture needs, is no dependency
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.family import inverted_shares
from costmodel.gpu.own_gpu import CountedStep, read_inventory
from costmodel.machines.machine_file import load_machine

SAMPLE = Path(__file__).parent / "vision_sample.json.gz"
TRUST = Path(__file__).resolve().parents[3] / "docs" / "trust.md"
SLIP = 1.1


def documented() -> tuple[int, float]:
    """Rows and mean error of the sample, as the page says."""
    found = re.search(r"\| random held-out steps that a test watches \| (\d+) \| ([\d.]+) \|", TRUST.read_text("utf-8"))
    assert found, "docs/trust.md has no line `random held-out steps that a test watches`"
    return int(found[1]), float(found[2]) / 100


def error(step: CountedStep) -> float:
    """Of the sum of its kernels: steps of this size do not wait for their host."""
    estimates = gpu_cost_model(load_machine(step.name.partition("/")[0])).estimate(list(step.counts))
    seconds = sum(each.seconds * count for each, count in zip(estimates, step.counts.values(), strict=True))
    return seconds / step.seconds - 1


def test_no_factor_is_fitted_on_the_sample() -> None:
    fitted = inverted_shares().provenance["families"]
    for step in read_inventory(SAMPLE):
        assert step.family not in fitted or step.name.startswith("rtx-4090/") or "-compiled-" in step.name


def test_the_mean_error_of_the_sample_is_at_most_a_tenth_above_what_the_page_says() -> None:
    steps = read_inventory(SAMPLE)
    errors = {step.name: error(step) for step in steps}
    rows, said = documented()
    assert len(steps) == rows >= 10
    assert np.mean(np.abs(list(errors.values()))) <= SLIP * said, {
        name: f"{each:+.1%}" for name, each in errors.items()
    }
