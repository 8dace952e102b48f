"""What whole steps that were measured on one GPU say about its kernels: a level for each family and number type.

A user often has no times of single kernels, but those of twenty steps. With X the seconds that are predicted of each
family in each step (steps x families), y the measured steps, and one level that all families share beside their own,

    sum of huber(log(X exp(shared + own)) - log y) + (shared / sigma)^2 + sum of (own / sigma)^2

is made least (:func:`costmodel.gpu.fit_steps.inverted`). What is left of a well predicted GPU are errors of single
models, which say nothing of the next one: so levels count only if each step is met better, on average, by those of all
others than by none. The levels are kept as the same record that points of single
kernels make (:mod:`costmodel.gpu.residuals.adaptation`), so that every prediction on that GPU uses them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.say import Say
from costmodel.datasets.data_folder import digest
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.fit_steps import inverted
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.power import GpuCostModel
from costmodel.gpu.residuals.adaptation import MINIMUM_POINTS, Adaptation
from costmodel.gpu.residuals.fitted import DIRECTORY, Fitted, fitted_in, write_fitted
from costmodel.gpu.step_inventory import CountedStep, read_inventory
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator

# Of log levels: what all families share (a clock, a driver), and each has of its own; of log times of whole steps,
# beyond which errors count linearly. The last two make 94 steps of the RTX 3090 that no factor was fitted on most
# likely, as a normal process over the families' shares with Student's errors; GPUs as a whole are off by so much (A100
# and V100 by NVIDIA's published steps 2 to 16 %). None was chosen by steps of the RTX 4090, which judge them.
_SHARED_SIGMA, _OWN_SIGMA, _STEP_SIGMA = 0.08, 0.044, 0.067
NO_LEVEL = "no level: those of the others meet a step no better than none; what errs are single models, not the GPU"


def fit_to_steps(file: Path, machine_name: str, output: Path | None, progress: Say) -> Path:
    """Writes the levels of ``machine_name`` by the steps in ``file`` (``seconds`` of each measured) into the folder
    ``output`` (default: where models are shipped); returns the file. What it knew of single kernels stays.

    ``InputError`` for fewer steps than :data:`MINIMUM_POINTS`, or without their times.
    """
    machine = load_machine(machine_name)
    steps = read_inventory(file)
    if not all(step.seconds > 0 for step in steps) or len(steps) < MINIMUM_POINTS:
        raise InputError(f"{file}: needs {MINIMUM_POINTS} steps or more, each with its measured `seconds`")
    known = fitted_in(DIRECTORY).get(machine.name)
    levels = step_levels(steps, machine)
    kinds = f"{len(levels)} families and number types"
    progress(f"{machine.name}: {len(steps)} steps, {kinds if levels else NO_LEVEL}")
    chip = machine.chip()
    base = known or Fitted(
        machine.name, chip.architecture, chip.power_limited, {}, {"command": "python -m costmodel fit"}
    )
    provenance = {**base.provenance, "steps": {file.name: {"rows": len(steps), "sha256": digest(file)}}}
    return write_fitted(
        replace(base, provenance=provenance, adaptations={**base.adaptations, **levels}), output or DIRECTORY
    )


def step_levels(
    steps: Sequence[CountedStep], machine: Machine, model: GpuCostModel | None = None
) -> Mapping[str, Adaptation]:
    """The levels by name of family and number type; those that a model has already are moved on. None where each of
    ``steps`` is met no better by what the others tell.
    """
    priced = model or gpu_cost_model(machine)
    assert isinstance(priced, GpuCostModel)
    seconds, examples = family_seconds(steps, priced)
    keys = sorted(examples)
    table = np.array([[row.get(key, 0.0) for key in keys] for row in seconds])
    measured = np.log([step.seconds for step in steps])
    if not _helps(table, measured):
        return {}
    logs = level_logs(table, measured)
    steps_with = (table > 0).sum(axis=0)
    return {
        key: _moved(_model_of(priced, examples[key]), examples[key], key, float(log), int(count))
        for key, log, count in zip(keys, logs, steps_with, strict=True)
    }


def level_logs(seconds: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Log level of each family, by ``seconds`` predicted (steps, families) and the log times ``measured`` (steps,)."""
    families = seconds.shape[1]
    mapping = np.column_stack([np.ones(families), np.eye(families)])
    precision = np.array([_SHARED_SIGMA**-2, *[_OWN_SIGMA**-2] * families])
    return inverted(seconds, measured, mapping, precision, _STEP_SIGMA)


def _helps(seconds: np.ndarray, measured: np.ndarray) -> bool:
    """Whether levels of all steps but one meet that one better, on average over all of them, than no levels do."""
    with_levels, without = [], []
    for place, row in enumerate(seconds):
        others = np.arange(len(measured)) != place
        logs = level_logs(seconds[others], measured[others])
        with_levels.append(abs(np.log(row @ np.exp(logs)) - measured[place]))
        without.append(abs(np.log(row.sum()) - measured[place]))
    return bool(np.mean(with_levels) < np.mean(without))


def family_seconds(
    steps: Sequence[CountedStep], model: GpuCostModel
) -> tuple[list[Mapping[str, float]], Mapping[str, AnyOperator]]:
    """Predicted seconds of each step by family and number type, and an operator of each."""
    distinct = list(Counter(each for step in steps for each in step.counts))
    estimates = dict(zip(distinct, model.estimate(distinct), strict=True))
    keys: dict[AnyOperator, str] = {}
    for each in distinct:
        found = model.model_of(each)
        if isinstance(found, KernelModel):
            keys[each] = found.adaptation_name(each)
    rows: list[Mapping[str, float]] = []
    for step in steps:
        row: dict[str, float] = defaultdict(float)
        for operator, count in step.counts.items():
            row[keys[operator]] += count * estimates[operator].seconds
        rows.append(row)
    return rows, {key: operator for operator, key in keys.items()}


def _model_of(model: GpuCostModel, operator: AnyOperator) -> KernelModel:
    found = model.model_of(operator)
    assert isinstance(found, KernelModel)
    return found


def _moved(model: KernelModel, operator: AnyOperator, key: str, log: float, count: int) -> Adaptation:
    before = model.adaptations.get(key)
    if before is None:
        names = model.feature_names(operator)
        weights = np.zeros(1 + len(names))
        before = Adaptation(names, np.zeros(len(names)), np.ones(len(names)), weights, 0)
    weights = before.weights.copy()
    weights[0] += log
    return replace(before, weights=weights, points=before.points + count)
