"""Fit of the one parameter taken from whole steps: the band of speeds of GPUs that wait for each other.

``python -m lab.fit.speed_band [--data FOLDER] [-o FILE]`` predicts the published training steps of
:mod:`lab.steps.training` with nothing fitted to them, and writes ``costmodel/calibration/speed_band.json``.

The width makes the sum of |log(predicted / measured)| least over steps of dense models in 16 bits, every source
weighing the same. What is left says how wide intervals are: with k the share of the kernels' own errors that a step
keeps and r the rest, k is what makes the interval score of Gneiting and Raftery (2007) least (width, and ten times what
is missed at 80 %), r then holds 80 % of the steps. All models were developed with these steps in view, so their errors
are not those of unseen steps: r is at least :data:`UNSEEN`. ``lab.validate training`` repeats all
of it without the source that it asks about.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.input_files import digest
from costmodel.base.output_files import write_whole
from e2e.price.speed_band import SPEED_BAND, SpeedBand, StepErrors, band_record
from lab.data.data_folder import data_folder
from lab.steps.training import TRAINING_FILE, read_training_rows
from lab.steps.training_runs import BareStep, teaches

WIDTHS = np.linspace(0.0, 0.3, 601)
KEPT = np.linspace(0.0, 1.0, 21)
CONFIDENCE = 0.8
# Of 182 dense steps in 16 bits that were withheld during the work on version 1.0 the mean error was 9.2 %: of a normal
# distribution 80 % then lie within 1.606 times as much.
UNSEEN = 1.606 * 0.092


def fit_speed_band(steps: Sequence[BareStep]) -> SpeedBand | None:
    """Band fitted to those of ``steps`` that qualify; ``None`` if they are from fewer than two sources."""
    taught = [step for step in steps if step.teaches]
    rows = Counter(step.asked.row.family for step in taught)
    if len(rows) < 2:
        return None
    weights = np.array([1.0 / rows[step.asked.row.family] for step in taught])
    width = _width(taught, weights)
    families = sorted({family for step in taught for family in step.predicted.above})
    bare = SpeedBand(width, StepErrors(families=tuple(families)))
    errors = _errors(taught, weights, bare)
    chips = tuple(sorted({step.predicted.chip for step in taught}))
    return SpeedBand(
        width, errors, chips, {"command": "python -m lab.fit.speed_band", "rows": dict(sorted(rows.items()))}
    )


def left_out_bands(steps: Sequence[BareStep]) -> dict[str, SpeedBand | None]:
    """Bands by source, each fitted to the steps of all other sources."""
    sources = dict.fromkeys(step.asked.row.family for step in steps)
    return {name: fit_speed_band([step for step in steps if step.asked.row.family != name]) for name in sources}


def _width(steps: Sequence[BareStep], weights: np.ndarray) -> float:
    seconds = np.array([step.predicted.seconds for step in steps])
    share = np.array([step.predicted.kernel_share for step in steps])
    measured = np.array([step.asked.row.seconds for step in steps])
    of_width = np.array([SpeedBand(1.0, StepErrors()).slowdown(step.asked.row.gpus) for step in steps])
    predicted = seconds * (1.0 + WIDTHS[:, None] * of_width * share)
    misses = np.abs(np.log(predicted / measured)) @ weights
    return float(WIDTHS[int(np.argmin(misses))])


def _errors(steps: Sequence[BareStep], weights: np.ndarray, band: SpeedBand) -> StepErrors:
    """Remaining errors of the steps: the share ``kept`` of the kernels' errors with the least score, and the rest."""
    slowed = [step.predicted.slowed(band.slowdown(step.asked.row.gpus)) for step in steps]
    logs = np.array([np.log(s.asked.row.seconds / p.seconds) for s, p in zip(steps, slowed, strict=True)])
    found: list[tuple[float, float, float]] = []
    for kept in KEPT.tolist():
        errors = StepErrors(0.0, kept, band.errors.families)
        bounds = np.array([each.interval(errors) for each in slowed])
        middle = np.array([each.seconds for each in slowed])
        lower, upper = np.log(middle / np.maximum(bounds[:, 0], 1e-9)), np.log(bounds[:, 1] / middle)
        needed = np.sqrt(np.maximum(logs**2 - np.where(logs < 0, lower, upper) ** 2, 0.0))
        residual = _weighted_quantile(needed, weights, CONFIDENCE)
        lower, upper = np.hypot(lower, residual), np.hypot(upper, residual)
        missed = np.maximum(logs - upper, 0.0) + np.maximum(-logs - lower, 0.0)
        score = float((lower + upper + 2 / (1 - CONFIDENCE) * missed) @ weights)
        found.append((score, kept, residual))
    _, kept, residual = min(found)
    return StepErrors(round(max(residual, UNSEEN), 4), round(kept, 2), band.errors.families)


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(int(np.searchsorted(reached, share * reached[-1])), len(values) - 1)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits the band of speeds to published training steps, and writes it."""
    from lab.steps.training_runs import predicted_steps

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=SPEED_BAND)
    asked = parser.parse_args(arguments)
    try:
        data = data_folder(asked.data)
        rows = [row for row in read_training_rows(data) if teaches(row)]
        steps, _, failed = predicted_steps(rows, banded=False)
        band = fit_speed_band(steps)
        if band is None:
            raise InputError(
                f"{data / TRAINING_FILE}: too few steps; give two sources or more of dense models in 16 bits"
            )
        table = {"file": TRAINING_FILE.as_posix(), "sha256": digest(data / TRAINING_FILE)}
        record = band_record(band)
        others = {name: each for name, each in left_out_bands(steps).items() if each is not None}
        record["left_out"] = {name: band_record(each) for name, each in others.items()}
        record["provenance"] |= {"table": table, "not_predicted": len(failed)}
        write_whole(asked.output, json.dumps(record, indent=1) + "\n")
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{asked.output}: GPUs within {band.width:.1%}, steps within {band.errors.residual:.1%} of it")


if __name__ == "__main__":
    main()
