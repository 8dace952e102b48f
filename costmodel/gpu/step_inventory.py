"""Kernels of whole measured steps, counted: a file of operators and of how often each step runs which.

calibration/vision/steps.json.gz    written by e2e/validate/step_inventory.py, which captures the models
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.gpu.families.inverted_shares import SHARES
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.serialization import from_record, to_record

INVENTORY = SHARES.parent / "steps.json.gz"


@dataclass(frozen=True)
class CountedStep:
    """``name``: as in the table of measured steps; ``family``: of its model; ``counts``: operator -> launches;
    ``seconds``: measured, 0 where a table of measured steps says it.
    """

    name: str
    family: str
    counts: Mapping[AnyOperator, int]
    seconds: float = 0.0


def write_inventory(steps: Sequence[CountedStep], path: Path) -> Path:
    """Writes ``steps``, each distinct operator once; the same steps give the same bytes."""
    operators: dict[AnyOperator, int] = {}
    rows = []
    for step in steps:
        counts = [[operators.setdefault(each, len(operators)), count] for each, count in step.counts.items()]
        row = {"name": step.name, "family": step.family, "counts": counts}
        rows.append({**row, "seconds": step.seconds} if step.seconds else row)
    record = {"operators": [to_record(each) for each in operators], "steps": rows}
    text = json.dumps(record, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 9, mtime=0))
    return path


def read_inventory(path: Path) -> list[CountedStep]:
    """The steps in ``path``; ``InputError`` names a file that cannot be read."""
    try:
        record = json.loads(gzip.decompress(path.read_bytes()))
        operators = [from_record(each) for each in record["operators"]]
        return [
            CountedStep(
                row["name"],
                row["family"],
                {operators[place]: count for place, count in row["counts"]},
                float(row.get("seconds", 0.0)),
            )
            for row in record["steps"]
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{path}: not the kernels of steps ({error}); install the package again") from None
