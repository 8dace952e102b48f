"""Fits to whole steps: the band of speeds of GPUs that wait for each other, and the spread between releases.

``python -m lab.fit.speed_band [--data FOLDER] [-o FILE]`` predicts the published training steps of
:mod:`lab.steps.training` with nothing fitted to them, and writes ``costmodel/calibration/speed_band.json``, what is
taken from whole steps of language models.

The width, by architecture and of all, makes the sum of |log(predicted / measured)| least over steps of dense models in
16 bits, every source weighing the same. What is left says how wide intervals are: with k the share of the kernels' own
errors that a step keeps and r the rest, k is what makes the interval score of Gneiting and Raftery (2007) least (width,
and ten times what is missed at 80 %), r then holds 80 % of the steps. All models were developed with these steps in
view, so their errors are not those of unseen steps: r is at least :data:`UNSEEN`. ``lab.validate training`` repeats all
of it without the source that it asks about.

``--releases`` writes ``costmodel/calibration/release_spread.json`` (:mod:`e2e.price.speed_band`) instead: how far whole
steps move between releases of PyTorch and its libraries (timm's models, timed twice on one card), and how much slower
products were with Hopper's first libraries (kernels within layers on H100, Vidur's and LLMServingSim's); half a minute,
no model is built.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodel.base.errors import InputError
from costmodel.base.input_files import content_digest
from costmodel.base.output_files import write_whole
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from e2e.price.speed_band import (
    RELEASE_SPREAD,
    SPEED_BAND,
    SpeedBand,
    StepErrors,
    architecture_of,
    band_record,
)
from lab.command_line import program, run
from lab.data.data_folder import data_folder
from lab.data.kernel_table import counted_only
from lab.data.profiled_kernels import read_layer_kernels
from lab.data.selection import named_tables
from lab.data.timm_steps import FOLDER, TimmStep, read_timm, timm_files
from lab.fit.kernels import OF_FIRST_LIBRARIES, collection_of
from lab.steps.training import TRAINING_FILE, read_training_rows
from lab.steps.training_runs import BareStep, predicted_steps, teaches

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
    architectures = [architecture_of(step.predicted.chip) for step in taught]
    widths = {}
    for name in sorted(set(architectures)):
        own = [place for place, each in enumerate(architectures) if each == name]
        widths[name] = _width([taught[place] for place in own], weights[own])
    families = sorted({family for step in taught for family in step.predicted.above} - {"host"})  # it differs by job
    chips = tuple(sorted({step.predicted.chip for step in taught}))
    provenance = {"command": "python -m lab.fit.speed_band", "rows": dict(sorted(rows.items()))}
    errors = StepErrors(families=tuple(families))
    bare = SpeedBand(_width(taught, weights), errors, chips, provenance, widths=widths)
    return replace(bare, errors=_errors(taught, weights, bare))


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
    return round(float(WIDTHS[int(np.argmin(misses))]), 4)


def _errors(steps: Sequence[BareStep], weights: np.ndarray, band: SpeedBand) -> StepErrors:
    """Remaining errors of the steps: the share ``kept`` of the kernels' errors with the least score, and the rest."""
    slowed = [step.predicted.slowed(band.on(step.predicted.chip).slowdown(step.asked.row.gpus)) for step in steps]
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


def fit_band(data: Path) -> tuple[dict[str, Any], str]:
    """Record of the band fitted to the published training steps below ``data``, and a line that sums it up."""
    rows = [row for row in read_training_rows(data) if teaches(row)]
    steps, _, failed = predicted_steps(rows, banded=False)
    band = fit_speed_band(steps)
    if band is None:
        raise InputError(f"{data / TRAINING_FILE}: too few steps; give two sources or more of dense models in 16 bits")
    table = {"file": TRAINING_FILE.as_posix(), "sha256": content_digest(data / TRAINING_FILE)}
    record = band_record(band)
    others = {name: each for name, each in left_out_bands(steps).items() if each is not None}
    record["left_out"] = {name: band_record(each) for name, each in others.items()}
    record["provenance"] |= {"table": table, "not_predicted": len(failed)}
    widths = ", ".join(f"{name} {width:.1%}" for name, width in band.widths.items())
    return record, f"GPUs within {widths} (all {band.width:.1%}), steps within {band.errors.residual:.1%} of it"


# --- releases --------------------------------------------------------------------------------------
_KNOTS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # seconds of products, knots of the interpolation
_SOURCES = (
    "huggingface/pytorch-image-models results (Apache-2.0): whole steps; microsoft/vidur (MIT) and "
    "casys-kaist/LLMServingSim (MIT): products"
)
_LEAST_PAIRS = 100  # pairs needed to estimate the ends of an interval


def release_pairs(steps: Iterable[TimmStep]) -> list[tuple[TimmStep, TimmStep]]:
    """Pairs of eager steps of the same model, batch and pictures on the same card, of an older and of a newer
    PyTorch.
    """
    found: dict[tuple[str, str, str, int, int, float], dict[int, TimmStep]] = {}
    for step in steps:
        if not step.compiled:
            key = (step.machine, step.group, step.architecture, step.batch, step.side, step.parameters)
            found.setdefault(key, {})[step.version] = step
    several = [sorted(each.items()) for each in found.values() if len(each) > 1]
    return [(each[0][1], each[-1][1]) for each in several]


def spread_of(pairs: Sequence[tuple[TimmStep, TimmStep]]) -> float:
    """Half of the interval around 0, in log units, that holds 80 % of ``pairs``."""
    return float(np.quantile([abs(math.log(old.seconds / new.seconds)) for old, new in pairs], CONFIDENCE))


def older_products(data: Path) -> tuple[list[float], list[float], dict[Path, int]]:
    """Seconds of products, slowdown (log units) of the libraries of Hopper's first year, and rows by file."""
    model = gpu_cost_model(load_machine(OF_FIRST_LIBRARIES[1]))
    kind, machine, _ = OF_FIRST_LIBRARIES
    tables = counted_only([each for each in read_layer_kernels(data) if collection_of(each)[:2] == (kind, machine)])
    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for table in tables:
        predicted = np.array([each.seconds for each in model.estimate(table.operators)])
        older = collection_of(table) == OF_FIRST_LIBRARIES
        found[older].append(np.stack([np.log(predicted), np.log(table.seconds / predicted)]))
    if not found[True] or not found[False]:
        raise InputError(
            f"{data}: no products within layers of H100 of both laboratories; give the folder that has them"
        )
    old, new = (np.concatenate(found[older], axis=1) for older in (True, False))
    knots = np.log(np.array(_KNOTS))
    edges = np.concatenate([[-np.inf], (knots[1:] + knots[:-1]) / 2, [np.inf]])
    slower = [_middle(old, *ends) - _middle(new, *ends) for ends in zip(edges[:-1], edges[1:], strict=True)]
    rows = Counter({Path(table.source): len(table.operators) for table in tables})
    return list(_KNOTS), [round(max(each, 0.0), 4) for each in slower], dict(rows)


def _middle(rows: np.ndarray, low: float, high: float) -> float:
    """Median of the second of ``rows`` where the first is in the range; 0 if there is none."""
    near = rows[1][(rows[0] >= low) & (rows[0] < high)]
    return float(np.median(near)) if len(near) else 0.0


def fit_release_spread(data: Path) -> tuple[dict[str, Any], str]:
    """Record of what releases change, from the measurements below ``data``, and a line that sums it up."""
    files = {path: list(read_timm(path)) for path in timm_files(data)}
    pairs = release_pairs(step for steps in files.values() for step in steps)
    if len(pairs) < _LEAST_PAIRS:
        raise InputError(
            f"{data / FOLDER}: {len(pairs)} models under two releases; {_LEAST_PAIRS} are needed; "
            "give the folder that has both"
        )
    taken = {step for pair in pairs for step in pair}
    rows = {path: sum(step in taken for step in steps) for path, steps in files.items()}
    seconds, logs, products = older_products(data)
    record: dict[str, Any] = {
        "provenance": {
            "command": "python -m lab.fit.speed_band --releases",
            "sources": _SOURCES,
            **named_tables({**{path: count for path, count in rows.items() if count}, **products}, data),
        },
        "older_products": {"seconds": seconds, "logs": logs},
        "pairs": len(pairs),
        "spread": round(spread_of(pairs), 4),
    }
    return record, f"four of five models within {record['spread']:.1%} of their time, {len(pairs)} pairs"


def speed_band_command(
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File; default: the shipped one.")] = None,
    releases: Annotated[bool, typer.Option("--releases", help="The spread between releases instead.")] = False,
) -> None:
    """Fit the band of speeds to published training steps, or the spread between releases, and write it."""
    record, summary = (fit_release_spread if releases else fit_band)(data_folder(data))
    path = output or (RELEASE_SPREAD if releases else SPEED_BAND)
    write_whole(path, json.dumps(record, indent=1) + "\n")
    print(f"{path}: {summary}")


app = program(speed_band_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run(app, "lab.fit.speed_band", arguments)


if __name__ == "__main__":
    sys.exit(main())
