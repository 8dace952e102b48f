"""The user's own GPU by a few minutes of ``python -m costmodel measure`` on it, without a public table.

Each family and number type that was measured often enough is moved to the measurements by a level and, from eight on,
by slopes over its features (:mod:`costmodel.gpu.residuals.adaptation`). What is shipped of that GPU, or of a relative,
is what is moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from costmodel.base.errors import InputError, UnsupportedOperatorError
from costmodel.base.say import Say
from costmodel.datasets.data_folder import digest
from costmodel.datasets.own_tables import read_rows
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.power import GpuCostModel
from costmodel.gpu.residuals.adaptation import MINIMUM_POINTS, Adaptation
from costmodel.gpu.residuals.fitted import Fitted, own_directory, write_fitted
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.model.measurements import Measurement


def fit_to_tables(files: Sequence[Path], machine_name: str, output: Path | None, progress: Say) -> Path:
    """Writes what the tables in ``files`` say of the GPU ``machine_name`` (a name, or a machine file) where predictions
    look, or into ``output``; returns the file. It takes the place of what an earlier call wrote.

    ``InputError`` for a damaged table, or where no family has :data:`MINIMUM_POINTS` rows of one number type;
    ``MachineError`` where there is no such GPU. ``progress`` hears how far each family was moved.
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
    points = {file.name: {"rows": len(members), "sha256": digest(file)} for file, members in rows.items()}
    provenance = {"command": "python -m costmodel fit --table", "points": points}
    chip = machine.chip()
    fitted = Fitted(machine.name, chip.architecture, chip.power_limited, {}, provenance, moved)
    return write_fitted(fitted, output or own_directory())


def adaptations_of(measurements: Sequence[Measurement], machine: Machine) -> dict[str, Adaptation]:
    """How ``measurements`` move the models of ``machine``, by family and number type; operators that no model is for
    are left out.
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
