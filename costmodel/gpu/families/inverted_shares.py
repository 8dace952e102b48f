"""Shares by which kernels of image models differ from their analytic time, found by inverting whole measured steps.

There is no public table of convolutions in 16-bit types, nor of batch norm and pooling by memory layout. Hundreds of
whole steps of different models share a few dozen classes of kernels; what each class costs is what makes the sums come
out (:mod:`lab.fit.image_steps`). A class is named as ``spatial forward nhwc``.

calibration/vision/shares.json    factor by class; how far measured steps lie from predicted ones; which steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.gpu.families.family import KernelAnalysis
from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.machine_records import Machine

SHARES = Path(__file__).parents[2] / "calibration" / "vision" / "shares.json"


@dataclass(frozen=True)
class InvertedShares:
    """``factors``: class of kernels -> measured time over analytic time. ``spread``: half of the interval in log units
    that holds 80 % of the steps of models left out of the fit, of one class alone more by far.
    """

    factors: Mapping[str, float]
    spread: float
    provenance: Mapping[str, Any]

    def factor(self, name: str) -> float:
        """Of the class ``name``; 1 where no step told."""
        return self.factors.get(name, 1.0)

    def scaled(self, plain: KernelAnalysis, classes: Sequence[str], machine: Machine) -> KernelAnalysis:
        """``plain``, the analysis of a kernel of each of ``classes``, times their factors; the launch stays."""
        factor = np.array([self.factor(name) for name in classes])
        floor = kernel_floor(machine)
        terms = {name: column * factor for name, column in plain.terms.items()}
        terms["launch"] = plain.terms["launch"]
        return KernelAnalysis((plain.seconds - floor) * factor + floor, terms, plain.features)


@lru_cache(maxsize=4)
def inverted_shares(path: Path = SHARES) -> InvertedShares:
    """What is in ``path``; without the file every factor is 1. ``InputError`` names a corrupt file."""
    if not path.exists():
        return InvertedShares({}, 0.0, {})
    try:
        record = decoded(read_text(path, "record"))
        factors = {str(name): float(value) for name, value in record["factors"].items()}
        return InvertedShares(factors, float(record["spread"]), record["provenance"])
    except (OSError, *MALFORMED) as error:
        raise InputError(f"{path}: not a file of shares ({error}); install the package again") from None


def layout_name(channels_last: bool) -> str:
    """How a layout is called in the names of classes."""
    return "nhwc" if channels_last else "nchw"
