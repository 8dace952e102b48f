"""How much whole steps change with the release of PyTorch and its libraries: the same models, timed twice on one card.

``python -m e2e.validate.fit_release_spread [--data FOLDER] [-o FILE]`` writes
``costmodel/calibration/release_spread.json`` (:mod:`e2e.price.release_spread`) from timm's results in the data folder;
some seconds, no model is built.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.whole_file import write_whole
from costmodel.datasets.data_folder import data_folder
from costmodel.datasets.named_files import named_tables
from costmodel.datasets.timm_steps import FOLDER, TimmStep, read_timm, timm_files
from e2e.price.release_spread import FIT_COMMAND, RELEASE_SPREAD

CONFIDENCE = 0.8
_LEAST_PAIRS = 100  # of which the ends of an interval say anything


def release_pairs(steps: Iterable[TimmStep]) -> list[tuple[TimmStep, TimmStep]]:
    """Eager steps of the same model, batch and pictures on the same card, of an older and of a newer PyTorch."""
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
        record = {
            "provenance": {
                "command": FIT_COMMAND,
                "sources": "huggingface/pytorch-image-models results (Apache-2.0): whole steps",
                **named_tables({path: count for path, count in rows.items() if count}, data),
            },
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
