"""Fit of the user's own GPU: to tables of ``python -m costmodel measure``, or to times of whole steps.

**Tables.** Each family and dtype with enough measurements is adapted by a level and, from eight on, by slopes over its
features (:mod:`costmodel.gpu.residual`). The adaptation is applied to the shipped model of that GPU, or of
a relative.

**Steps.** A user often has no times of single kernels, but those of twenty steps. With X the predicted seconds of each
family in each step (steps x families), y the measured steps, and one level shared by all families besides their own,

    sum of huber(log(X exp(shared + own)) - log y) + (shared / sigma)^2 + sum of (own / sigma)^2

is minimised (:func:`invert_factors`). On a well predicted GPU the remaining errors are those of single models, which do
not generalise to other models: so levels are used only if each step is predicted better, on average, with the levels of
all other steps than without levels. Levels are stored as the same record as adaptations to single kernels, so that
every prediction on that GPU uses them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from costmodel.base.errors import InputError, Say, UnsupportedOperatorError
from costmodel.base.input_files import MALFORMED, content_digest, count_parts, decoded, read_text
from costmodel.cost_model import Measurement
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.fitted import DIRECTORY, Fitted, fitted_in, own_directory, write_fitted
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.power import GpuCostModel
from costmodel.gpu.residual import MINIMUM_POINTS, Adaptation
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.machines.record_file import made_by, read_record
from costmodel.operators.any_operator import AnyOperator, from_record, to_record


def fit_to_tables(files: Sequence[Path], machine_name: str, output: Path | None, progress: Say) -> Path:
    """Write the adaptation of the GPU ``machine_name`` (a name, or a machine file) to the tables in ``files``, where
    predictions find it, or into ``output``; returns the file. Replaces an earlier adaptation.

    ``InputError`` for a damaged table, or if no family has :data:`MINIMUM_POINTS` rows of one dtype; ``MachineError``
    if there is no such GPU. ``progress`` receives the shift of each family.
    """
    machine = load_machine(machine_name)
    rows = {file: [Measurement(operator, seconds=seconds) for operator, seconds in read_rows(file)] for file in files}
    moved = adaptations_of([each for members in rows.values() for each in members], machine)
    if not moved:
        raise InputError(
            f"{', '.join(map(str, files))}: of no family and number type {MINIMUM_POINTS} kernels or more; measure "
            "longer (--minutes), and give all tables at once"
        )
    for key, each in sorted(moved.items()):
        progress(
            f"{machine.name}: {key}: {each.points} kernels, {math.exp(each.weights[0]):.2f} times as long as before"
        )
    points = {file.name: {"rows": len(members), "sha256": content_digest(file)} for file, members in rows.items()}
    provenance = {"command": "python -m costmodel fit --table", "points": points}
    chip = machine.chip()
    fitted = Fitted(machine.name, chip.architecture, chip.power_limited, {}, provenance, moved)
    return write_fitted(fitted, output or own_directory())


def adaptations_of(measurements: Sequence[Measurement], machine: Machine) -> dict[str, Adaptation]:
    """Adaptations of the models of ``machine`` to ``measurements``, by family and dtype; operators without a model are
    skipped.
    """
    priced = gpu_cost_model(machine)
    assert isinstance(priced, GpuCostModel)
    groups: dict[int, tuple[KernelModel, list[Measurement]]] = {}
    for each in measurements:
        try:
            model = priced.model_of(each.operator)
        except UnsupportedOperatorError:
            continue
        if isinstance(model, KernelModel):
            groups.setdefault(id(model), (model, []))[1].append(each)
    found: dict[str, Adaptation] = {}
    for model, members in groups.values():
        model.fit(members)
        found |= model.adaptations
    return found


# Standard deviations of log levels, shared by all families (a clock, a driver) and of each family; of log times of
# whole steps, beyond which errors count linearly. The last two maximise the likelihood of 94 steps of the RTX 3090 on
# which no factor was fitted, as a normal process over the families' shares with Student's errors; the first is the
# typical error of whole GPUs (A100 and V100 by NVIDIA's published steps 2 to 16 %). None was chosen by steps of the RTX
# 4090, which validate them.
_SHARED_SIGMA, _OWN_SIGMA, _STEP_SIGMA = 0.08, 0.044, 0.067
NO_LEVEL = "no level: those of the others meet a step no better than none; what errs are single models, not the GPU"


def fit_to_steps(file: Path, machine_name: str, output: Path | None, progress: Say) -> Path:
    """Write the levels of ``machine_name`` fitted to the steps in ``file`` (each with measured ``seconds``) to the
    folder ``output`` (default: that of shipped models); returns the file. Models of single kernels are kept.

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
    provenance = {**base.provenance, "steps": {file.name: {"rows": len(steps), "sha256": content_digest(file)}}}
    return write_fitted(
        replace(base, provenance=provenance, adaptations={**base.adaptations, **levels}), output or DIRECTORY
    )


def step_levels(
    steps: Sequence[CountedStep], machine: Machine, model: GpuCostModel | None = None
) -> Mapping[str, Adaptation]:
    """Levels by name of family and dtype, added to those that a model already has; empty if holding out each of
    ``steps`` shows no improvement.
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
    """Log level of each family, from predicted ``seconds`` (steps, families) and measured log times ``measured``
    (steps,).
    """
    families = seconds.shape[1]
    mapping = np.column_stack([np.ones(families), np.eye(families)])
    precision = np.array([_SHARED_SIGMA**-2, *[_OWN_SIGMA**-2] * families])
    return invert_factors(seconds, measured, mapping, precision, _STEP_SIGMA)


def _helps(seconds: np.ndarray, measured: np.ndarray) -> bool:
    """True if leave-one-out levels predict the held-out step better on average than no levels."""
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
    """Predicted seconds of each step by family and dtype, and an example operator of each."""
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


@dataclass(frozen=True)
class CountedStep:
    """One step as counts of operators."""

    # As in the table of measured steps.
    name: str
    # Family of its model.
    family: str
    # Number of launches of each operator.
    counts: Mapping[AnyOperator, int]
    # Measured seconds; 0 if a table of measured steps holds them.
    seconds: float = 0.0


@dataclass(frozen=True)
class _StepRow:
    name: str
    family: str
    counts: tuple[tuple[int, int], ...]  # place of an operator, number of its launches
    seconds: float = 0.0


@dataclass(frozen=True)
class _Inventory:
    operators: tuple[Annotated[Any, made_by(from_record)], ...]
    steps: tuple[_StepRow, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= place < len(self.operators) for row in self.steps for place, _ in row.counts):
            raise ValueError("steps count operators that it lacks")


def read_inventory(path: Path) -> list[CountedStep]:
    """Read the steps in ``path``; ``InputError`` names a file that cannot be read."""
    content = read_record(path, _Inventory, "install the package again")
    return [
        CountedStep(row.name, row.family, {content.operators[at]: count for at, count in row.counts}, row.seconds)
        for row in content.steps
    ]


_ROUNDS = 60


def invert_factors(
    seconds: np.ndarray, target: np.ndarray, mapping: np.ndarray, precision: np.ndarray, step_sigma: float
) -> np.ndarray:
    """Log factors (classes,) of ``seconds`` (steps, classes) that fit the log times ``target`` (steps,).

    ``mapping`` (classes, parameters): weights of the parameters in each class; ``precision``: 1 / sigma^2 of the
    parameters around zero; ``step_sigma``: error of log times beyond which errors count linearly.
    """
    parameters = np.zeros(mapping.shape[1])
    for _ in range(_ROUNDS):
        parts = seconds * np.exp(mapping @ parameters)
        total = parts.sum(axis=1)
        residual = np.log(total) - target
        weight = 1 / np.maximum(np.abs(residual), step_sigma) / step_sigma
        slopes = (parts / total[:, None]) @ mapping
        left = slopes.T @ (weight[:, None] * slopes) + np.diag(precision)
        move = np.linalg.solve(left, -(slopes.T @ (weight * residual) + precision * parameters))
        parameters = parameters + np.clip(move, -0.3, 0.3)
    return np.asarray(mapping @ parameters)


def read_rows(path: Path) -> Iterator[tuple[Any, float]]:
    """Read operators and seconds of the rows without an error; ``InputError`` for a malformed file."""
    try:
        table = csv.DictReader(io.StringIO(read_text(path, "table"), newline=""))
        if not {"operator", "median_s", "error"} <= set(table.fieldnames or ()):
            raise ValueError("no columns operator, median_s, error")
        rows = list(count_parts(table, "table"))
        pairs = [(from_record(decoded(row["operator"])), float(row["median_s"])) for row in rows if not row["error"]]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cannot be read ({error}); compress the measured table again") from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: cannot be read ({reason}); check its path and permissions") from None
    except MALFORMED as error:
        raise InputError(f"{path}: not a table of `python -m costmodel measure` ({error!r})") from None
    if not all(seconds > 0 for _, seconds in pairs):
        raise InputError(f"{path}: times that are not above zero; measure again")
    yield from pairs


def write_inventory(steps: Sequence[CountedStep], path: Path) -> Path:
    """Write ``steps``, each distinct operator once; the same steps give the same bytes."""
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
