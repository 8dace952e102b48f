"""Change of step times between releases of libraries, for stacks older than the tables of kernels.

Tables of products and attention on tensor cores are of 2025 and 2026. Times with the libraries of 2023 are known for
few kernels, and for no whole steps except those used for validation. For image models they are known: timm's results
contain a thousand on one card under PyTorch 2.4 with CUDA 12.4 and again under 2.9 with 12.8. The half interval, in log
units, that holds 80 % of the differences is added to the interval of a step whose libraries are older
(``older_libraries`` of :class:`e2e.capture.models.stacks.Stack`).

The time itself changes for one kind of kernel with known older times: 16-bit products on Hopper. Libraries of the
chip's first year (CUDA 12.1) were not tuned to it: Vidur's H100 takes 1.3 times as long for products of 10 us and 1.05
times for products of 3 ms as LLMServingSim's with libraries of 2025. On A100, three years old by then, there is no such
difference. Changes of other kinds of kernels are not known.

    costmodel/calibration/release_spread.json    the half interval, the pairs, the times of products, and the source
           files; written by ``python -m lab.fit.release_spread``
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel, Estimate
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Gemm

RELEASE_SPREAD = Path(__file__).parents[2] / "costmodel" / "calibration" / "release_spread.json"
OLDER_NOTE = (
    "the libraries of this stack are older than those that kernels were measured with: products on Hopper take as long "
    "as such libraries took, and the interval is wider by what whole steps change from release to release"
)
UNTUNED = "hopper"  # chips that libraries of 2023 were not yet tuned to


def release_spread(path: Path = RELEASE_SPREAD) -> float:
    """Return the half interval in ``path``, log units; 0 without the file. Raise ``InputError`` for a corrupt file."""
    return _read(path)[0]


class OfOlderLibraries(CostModel):
    """Cost model ``newer`` with products as slow as with libraries from the release time of ``machine``."""

    def __init__(self, newer: CostModel, machine: Machine, path: Path = RELEASE_SPREAD) -> None:
        _, self._seconds, self._logs = _read(path)
        self._newer = newer
        self._untuned = machine.chip().architecture == UNTUNED and len(self._seconds) > 0

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        found = self._newer.estimate(operators)
        return [self._older(each, known) for each, known in zip(operators, found, strict=True)]

    def settle(self, estimates: Sequence[Estimate], counts: Sequence[int]) -> list[Estimate]:
        return self._newer.settle(estimates, counts)

    def _older(self, operator: AnyOperator, known: Estimate) -> Estimate:
        if not (self._untuned and isinstance(operator, Gemm) and operator.dtype in ("bfloat16", "float16")):
            return known
        factor = float(np.exp(np.interp(np.log(known.seconds), np.log(self._seconds), self._logs)))
        return replace(known, seconds=factor * known.seconds, lower=factor * known.lower, upper=factor * known.upper)


@lru_cache(maxsize=4)
def _read(path: Path) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return the half interval, product times in seconds, and their slowdowns in log units."""
    if not path.exists():
        return 0.0, (), ()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        older = record["older_products"]
        seconds, logs = (tuple(map(float, older[name])) for name in ("seconds", "logs"))
        if len(seconds) != len(logs) or not all(0 < one < other for one, other in pairwise(seconds)):
            raise ValueError("the seconds of products do not ascend")
        return float(record["spread"]), seconds, logs
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a spread of releases ({error!r}); install the package again") from None
