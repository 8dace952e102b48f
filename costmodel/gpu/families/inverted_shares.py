"""Factors of measured over analytic time for kernels of image models, found by inverting whole measured steps.

There is no public table of convolutions in 16-bit types, nor of batch norm and pooling by memory layout. Hundreds of
whole steps of different models share a few dozen classes of kernels; the factor of each class is fitted so that the
sums match (:mod:`lab.fit.image_steps`). A class is named like ``spatial forward nhwc``.

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
    """Factors of kernel classes."""

    # Measured over analytic time, by class of kernels.
    factors: Mapping[str, float]
    # Half of the interval, in log units, that holds 80 % of the steps of models left out of the fit; single classes
    # vary far more.
    spread: float
    provenance: Mapping[str, Any]

    def factor(self, name: str) -> float:
        """Factor of the class ``name``; 1 if no step contains it."""
        return self.factors.get(name, 1.0)

    def scaled(self, plain: KernelAnalysis, classes: Sequence[str], machine: Machine) -> KernelAnalysis:
        """Analysis ``plain`` of one kernel of each of ``classes`` multiplied by their factors; the launch is
        unchanged.
        """
        factor = np.array([self.factor(name) for name in classes])
        floor = kernel_floor(machine)
        terms = {name: column * factor for name, column in plain.terms.items()}
        terms["launch"] = plain.terms["launch"]
        return KernelAnalysis((plain.seconds - floor) * factor + floor, terms, plain.features)


@lru_cache(maxsize=4)
def inverted_shares(path: Path = SHARES) -> InvertedShares:
    """Read factors from ``path``; without the file every factor is 1. ``InputError`` names a corrupt file."""
    if not path.exists():
        return InvertedShares({}, 0.0, {})
    try:
        record = decoded(read_text(path, "record"))
        factors = {str(name): float(value) for name, value in record["factors"].items()}
        return InvertedShares(factors, float(record["spread"]), record["provenance"])
    except (OSError, *MALFORMED) as error:
        raise InputError(f"{path}: not a file of shares ({error}); install the package again") from None


def layout_name(channels_last: bool) -> str:
    """Name of a memory layout in class names."""
    return "nhwc" if channels_last else "nchw"
