"""Errors of the GPU models by split, family and machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.model.cost_model import Estimate
from costmodel.model.error_figures import Accuracy, accuracy


@dataclass(frozen=True)
class KernelErrors:
    """Accuracy of one split, family and machine (``all``: the rows of all machines together)."""

    split: str
    family: str
    machine: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Predicted:
    """``estimates`` of rows of one family on one machine that took ``seconds`` (rows,)."""

    split: str
    family: str
    machine: str
    estimates: list[Estimate]
    seconds: np.ndarray


def result_record(result: KernelErrors) -> dict[str, Any]:
    """JSON-able content, errors as fractions."""
    content = {field.name: getattr(result.accuracy, field.name) for field in dataclasses.fields(result.accuracy)}
    return {"split": result.split, "family": result.family, "machine": result.machine, **content}


def results_of(predicted: Sequence[Predicted]) -> list[KernelErrors]:
    """By split and family in the order of ``predicted``: every machine, then all of them together."""
    groups: dict[tuple[str, str], list[Predicted]] = {}
    for each in predicted:
        groups.setdefault((each.split, each.family), []).append(each)
    results = []
    for (split, family), members in groups.items():
        results += [
            KernelErrors(split, family, each.machine, accuracy(each.estimates, each.seconds.tolist()))
            for each in members
        ]
        together = [estimate for each in members for estimate in each.estimates]
        seconds = [float(value) for each in members for value in each.seconds]
        results.append(KernelErrors(split, family, "all", accuracy(together, seconds)))
    return results


def joined(predicted: list[Predicted]) -> list[Predicted]:
    """Predictions of one kind, family and machine as one."""
    groups: dict[tuple[str, str, str], list[Predicted]] = {}
    for each in predicted:
        groups.setdefault((each.split, each.family, each.machine), []).append(each)
    return [
        Predicted(
            *key, [one for each in members for one in each.estimates], np.concatenate([e.seconds for e in members])
        )
        for key, members in groups.items()
    ]
