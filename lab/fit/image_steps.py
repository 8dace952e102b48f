"""Inversion of whole measured steps: factors of kernel classes that reproduce the measured sums.

With X the analytic seconds of each class of kernels in each step (steps x classes) and y the measured steps, the
factors exp(p) make

    sum of huber(log(X exp(p)) - log y) + sum of (p / sigma)^2

least. A class shrinks towards what it shares with the other layout, and that towards what the kinds of its name share,
so that a class that few models use is not made up from their noise. Kernels that have tables of their own (products,
element-wise work, layer norm) take part with factors close to 1, by kind, which are not kept: an error of theirs is
not blamed on convolutions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from costmodel.base.output_files import write_whole
from costmodel.cost_model import CostModel
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.convolution import convolution_pieces
from costmodel.gpu.families.family import SHARES, KernelAnalysis
from costmodel.gpu.families.gemm import is_thin, plain_thin_analysis, thin_class
from costmodel.gpu.families.normalization import (
    half_class,
    image_class,
    is_half_work,
    is_image_work,
    plain_half_analysis,
    plain_image_analysis,
)
from costmodel.gpu.families.rates import kernel_floor, uses_tensor_cores
from costmodel.gpu.own_gpu import CountedStep, invert_factors, read_inventory
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import ConvolutionBackward, Elementwise, Gemm, Normalization
from costmodel.operators.layers import Conv2d
from lab.data.data_folder import Wanted, everything
from lab.data.selection import named_tables
from lab.data.timm_steps import INVENTORY, TimmStep, read_timm, timm_files

OTHER = "other "  # prefix of kinds whose factors are discarded
# Standard deviations of log factors: shared by all windows, widths and layouts of a kind, forward and data gradient
# together; specific to directions, windows and layouts; kinds with tables of their own.
_SHARED_SIGMA, _DIRECTION_SIGMA, _OWN_SIGMA, _OTHER_SIGMA = 1.0, 0.3, 0.5, 0.1
# Batch norm in evaluation reads once and writes once: no implementation makes that another time than its bytes'.
_STREAMED, _STREAMED_SIGMA = " evaluation ", 0.07
# The gradient of the data is a convolution again, with channels exchanged.
_ALIKE = {"data": "forward"}
_STEP_SIGMA = 0.1  # of log times of whole steps; beyond it errors count linearly
_FOLDS = 5


@dataclass(frozen=True)
class StepTable:
    """Steps and classes. ``seconds``: analytic, steps x ``classes``; ``measured`` and ``families``: of each step."""

    classes: tuple[str, ...]
    seconds: np.ndarray
    measured: np.ndarray
    families: np.ndarray


def fit_steps(
    data: Path,
    output: Path = SHARES,
    progress: Say = lambda line: None,
    wanted: Wanted = everything,
    inventory: Path = INVENTORY,
) -> list[Path]:
    """Write the factors to ``output``; returns no file if ``data`` has no steps. Takes under a minute."""
    files = [path for path in timm_files(data) if wanted(path)]
    measured = {step.name: (step, path) for path in files for step in read_timm(path)}
    counted = [step for step in read_inventory(inventory) if step.name in measured]
    if not counted:
        return []
    progress(f"vision: {len(counted)} steps of {len({step.family for step in counted})} families of models")
    table = step_table(counted, {name: step for name, (step, _) in measured.items()})
    logs = invert(table)
    kept = {name: round(float(np.exp(p)), 4) for name, p in logs.items() if not name.startswith(OTHER)}
    rows = {path: sum(measured[step.name][1] == path for step in counted) for path in files}
    record = {
        "provenance": {
            "command": "python -m lab.fit",
            "sources": "huggingface/pytorch-image-models results (Apache-2.0): whole steps; grade: inverted",
            "families": sorted({step.family for step in counted}),
            **named_tables({path: count for path, count in rows.items() if count}, data),
        },
        "spread": round(left_out_spread(table), 4),
        "factors": dict(sorted(kept.items())),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, json.dumps(record, indent=1) + "\n")
    return [output]


def step_table(counted: Sequence[CountedStep], measured: Mapping[str, TimmStep]) -> StepTable:
    """Analytic seconds of every class in each of ``counted``, with the ``measured`` time by name."""
    rows = [class_seconds(each.counts, _priced_machine(measured[each.name].machine)) for each in counted]
    classes = tuple(sorted({name for row in rows for name in row}))
    seconds = np.array([[row.get(name, 0.0) for name in classes] for row in rows])
    times = np.array([measured[each.name].seconds for each in counted])
    return StepTable(classes, seconds, times, np.array([each.family for each in counted]))


@cache
def _priced_machine(name: str) -> tuple[Machine, CostModel]:
    machine = load_machine(name)
    return machine, gpu_cost_model(machine)


def class_seconds(counts: Mapping[AnyOperator, int], on: tuple[Machine, CostModel]) -> dict[str, float]:
    """Analytic seconds by class of kernels of a step in which each operator runs as often as in ``counts``."""
    machine, model = on
    found: dict[str, float] = defaultdict(float)
    floor = kernel_floor(machine)
    convolutions = [each for each in counts if _is_tensor_convolution(each, machine)]
    thin = [each for each in counts if is_thin(each) and uses_tensor_cores(machine, each.dtype)]  # type: ignore[union-attr]
    groups: list[tuple[list[Any], Callable[..., KernelAnalysis], Callable[..., str]]] = [
        ([each for each in counts if is_image_work(each)], plain_image_analysis, image_class),
        ([each for each in counts if is_half_work(each)], plain_half_analysis, half_class),
        (thin, plain_thin_analysis, thin_class),
    ]
    apart = {*convolutions, *(each for members, *_ in groups for each in members)}
    rest = [each for each in counts if each not in apart]
    if convolutions:
        pieces = convolution_pieces(convolutions, machine)  # type: ignore[arg-type]
        for place, operator in enumerate(convolutions):
            found[pieces.names[place]] += counts[operator] * pieces.kernel[place]
            found[pieces.turned_names[place]] += counts[operator] * pieces.turned[place]
            found[f"{OTHER}launch"] += counts[operator] * floor
    for members, analysis, class_of in groups:
        for operator, seconds in zip(members, analysis(members, machine).seconds if members else (), strict=True):
            found[class_of(operator)] += counts[operator] * (seconds - floor)
            found[f"{OTHER}launch"] += counts[operator] * floor
    for operator, estimate in zip(rest, model.estimate(rest), strict=True):
        found[OTHER + _kind(operator)] += counts[operator] * estimate.seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _is_tensor_convolution(operator: AnyOperator, machine: Machine) -> bool:
    return isinstance(operator, (Conv2d, ConvolutionBackward)) and uses_tensor_cores(machine, operator.dtype)


def _kind(operator: AnyOperator) -> str:
    if isinstance(operator, Gemm):
        return "batched products" if operator.batch > 1 else "products"
    if isinstance(operator, Normalization):
        return operator.kind
    if isinstance(operator, Elementwise):
        return "strided element-wise" if operator.strided_elements else "element-wise"
    return type(operator).__name__


def invert(table: StepTable, mask: np.ndarray | None = None) -> dict[str, float]:
    """Log factor by class, from the steps where ``mask`` is true; damped Gauss-Newton steps, reweighted."""
    use = np.ones(len(table.measured), dtype=bool) if mask is None else mask
    seconds, target = table.seconds[use], np.log(table.measured[use])
    mapping, precision = _hierarchy(table.classes)
    logs = invert_factors(seconds, target, mapping, precision, _STEP_SIGMA)
    return dict(zip(table.classes, logs.tolist(), strict=True))


def _hierarchy(classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Parameters shared between classes: matrix classes x parameters, and 1 / sigma^2 of the parameters."""
    names: dict[str, float] = {}
    shares = []
    for each in classes:
        if each.startswith(OTHER):
            own = {each: _OTHER_SIGMA}
        elif each.startswith("thin "):
            own = {"thin *": _SHARED_SIGMA, each: _OWN_SIGMA}
        elif _STREAMED in each:
            own = {f"{each.rpartition(' ')[0]} ***": _STREAMED_SIGMA, each: _STREAMED_SIGMA}
        else:
            without_layout = each.rpartition(" ")[0]
            kind, _, rest = without_layout.partition(" ")
            alike = kind.partition("-")[0]
            own = {
                f"{alike} {_ALIKE.get(rest, rest)} *": _SHARED_SIGMA,
                f"{alike} {rest} **": _DIRECTION_SIGMA,
                f"{without_layout} ***": _OWN_SIGMA,
                each: _OWN_SIGMA,
            }
        names |= own
        shares.append(own)
    order = {name: place for place, name in enumerate(names)}
    mapping = np.zeros((len(classes), len(names)))
    for place, own in enumerate(shares):
        mapping[place, [order[name] for name in own]] = 1.0
    return mapping, np.array([1 / sigma**2 for sigma in names.values()])


def left_out_spread(table: StepTable) -> float:
    """Half of the interval, in log units, that holds 80 % of steps of held-out families, a fifth of them at a time."""
    families = sorted(set(table.families.tolist()))
    fold = np.array([families.index(each) % _FOLDS for each in table.families])
    errors = np.zeros(len(table.measured))
    for part in range(_FOLDS):
        out = fold == part
        if out.any() and not out.all():
            errors[out] = log_errors(table, invert(table, ~out))[out]
    return float(np.quantile(np.abs(errors), 0.8))


def log_errors(table: StepTable, logs: Mapping[str, float]) -> np.ndarray:
    """log(predicted / measured) of every step with factors exp(``logs``); 1 for discarded kinds."""
    kept = np.array([0.0 if name.startswith(OTHER) else logs[name] for name in table.classes])
    return np.asarray(np.log(table.seconds @ np.exp(kept)) - np.log(table.measured))
