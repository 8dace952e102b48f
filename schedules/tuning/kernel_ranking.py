"""Order of trials for unmeasured kernels, trained on the records of many networks.

The model is :class:`costmodel.cpu.learned_residual.ResidualModel` on the analytic cost of the templates; here it is
trained on the shipped records (:mod:`schedules.records.shipped_records`), of all thread counts together. A tuning run
uses its trees as a prior and corrects them by its measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from costmodel.cpu.learned_residual import FamilyTrees, ResidualModel, train_together
from costmodel.cpu.roofline import RooflineModel
from costmodel.cpu.trees_file import read_trees, write_trees
from costmodel.machines.machine_file import read_machine
from costmodel.machines.machine_records import Machine
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import config_terms, template_for
from schedules.records.shipped_records import MACHINE_FILE, RANKING_FILE, CpuRecords, FoundRecords


def empty_ranking(machine: Machine, cpu: CpuTarget, before: ResidualModel | None = None) -> ResidualModel:
    """Untrained model on top of ``before``, or of the templates' analytic cost."""
    return ResidualModel(
        RooflineModel(machine, cpu.threads), key=cpu.key, config_terms=partial(config_terms, cpu=cpu), before=before
    )


def train_ranking(content: CpuRecords, machine: Machine) -> dict[str, FamilyTrees]:
    """Train trees for every family of kernels with enough records. ``machine``: the rates of that CPU."""
    models = []
    for threads in sorted({kernel.threads for kernel in content.kernels}):
        cpu = content.cpu.target(threads)
        model = empty_ranking(machine, cpu)
        known = [kernel for operator, kernel in content.of(threads).items() if template_for(operator, cpu) is not None]
        model.update([each for kernel in known for each in kernel.measurements])
        models.append(model)
    return train_together(models)


def write_ranking(directory: Path, content: CpuRecords, trees: Mapping[str, FamilyTrees]) -> Path:
    """Write the trees beside the records they were trained on; raise ``OutputError`` on failure."""
    path = directory / RANKING_FILE
    provenance = {
        "written": datetime.now(UTC).date().isoformat(),
        "networks": list(content.networks),
        "measurements": sum(len(kernel.records) for kernel in content.kernels),
    }
    write_trees(path, _key(content), trees, provenance)
    return path


def read_ranking(found: FoundRecords, threads: int) -> ResidualModel:
    """Shipped ranking for ``threads`` threads; raises ``InputError`` for a missing, damaged or foreign file."""
    machine = read_machine(found.directory / MACHINE_FILE)
    model = empty_ranking(machine, found.content.cpu.target(threads))
    model.install(read_trees(found.directory / RANKING_FILE, _key(found.content)))
    return model


def _key(content: CpuRecords) -> str:
    """Key of trees: one CPU (threads are a feature), TVM version and revision of the templates."""
    one = content.cpu.target(1).key.rpartition("/threads=")[0]
    return f"{content.cpu.chip}/{one}/tvm={content.tvm}/templates={content.templates}"
