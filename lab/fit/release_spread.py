"""Spread of whole steps between releases of PyTorch and its libraries: the same models, timed twice on one card.

``python -m lab.fit.release_spread [--data FOLDER] [-o FILE]`` writes
``costmodel/calibration/release_spread.json`` (:mod:`e2e.price.speed_band`) from timm's results and from products
within layers on H100 (Vidur's and LLMServingSim's) in the data folder; half a minute, no model is built.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.output_files import write_whole
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from e2e.price.speed_band import RELEASE_SPREAD
from lab.data.data_folder import data_folder
from lab.data.kernel_table import counted_only
from lab.data.profiled_kernels import read_layer_kernels
from lab.data.selection import named_tables
from lab.data.timm_steps import FOLDER, TimmStep, read_timm, timm_files
from lab.fit.kernels import OF_FIRST_LIBRARIES, collection_of

CONFIDENCE = 0.8
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what releases change, and writes it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=RELEASE_SPREAD)
    asked = parser.parse_args(arguments)
    try:
        data = data_folder(asked.data)
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
        record = {
            "provenance": {
                "command": "python -m lab.fit.release_spread",
                "sources": _SOURCES,
                **named_tables({**{path: count for path, count in rows.items() if count}, **products}, data),
            },
            "older_products": {"seconds": seconds, "logs": logs},
            "pairs": len(pairs),
            "spread": round(spread_of(pairs), 4),
        }
        write_whole(asked.output, json.dumps(record, indent=1) + "\n")
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{asked.output}: four of five models within {record['spread']:.1%} of their time, {len(pairs)} pairs")


if __name__ == "__main__":
    main()
