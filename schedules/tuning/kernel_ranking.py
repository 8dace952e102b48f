"""Order of trials for unmeasured kernels, trained on the records of many networks.

The model is :class:`costmodel.cpu.learned_residual.ResidualModel` on the analytic cost of the templates; here it is
trained on the shipped records (:mod:`schedules.tuning.shipped_records`), of all thread counts together. A tuning run
first tries what the shipped records of the same operator, or this ranking, expect to be fast; it uses the trees as a
prior and corrects them by its measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from costmodel.base.errors import MachineError
from costmodel.cost_model import config_key
from costmodel.cpu.learned_residual import FamilyTrees, ResidualModel, read_trees, train_together, write_trees
from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_file import read_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.template_table import config_terms, template_for
from schedules.tuning.shipped_records import (
    MACHINE_FILE,
    RANKING_FILE,
    CpuRecords,
    FoundRecords,
    KernelRecords,
    chip_name,
    find_records,
)


def empty_ranking(machine: Machine, cpu: CpuTarget, before: ResidualModel | None = None) -> ResidualModel:
    """Untrained model on top of ``before``, or of the templates' analytic cost."""
    return ResidualModel(
        RooflineModel(machine, cpu.threads), config_terms=partial(config_terms, cpu=cpu), before=before
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


# Number of recorded configurations tried first, if they are within this factor of the best.
RECORDED_FIRST = 3
RECORDED_RATIO = 1.05
# Number of configurations of a space, in the order of analytic cost, that are ranked.
RANKED = 160


@dataclass(frozen=True)
class KernelGuess:
    """A configuration not measured here, and its expected time (None: unknown)."""

    config: Config
    seconds: float | None


@dataclass
class KernelGuesses:
    """Guesses for one CPU."""

    cpu: CpuTarget
    # Trained ranking, or None.
    ranking: ResidualModel | None = None
    # Records by operator, on the same number of threads.
    recorded: Mapping[Operator, KernelRecords] = field(default_factory=dict)
    # Records are from a chip of the same name, so that their times are valid here.
    trusted: bool = False
    # Origin of the records in words.
    origin: str = ""
    # Exclude configurations with larger rounding errors than a plain sum of products.
    careful: bool = False
    _known: dict[Operator, KernelGuess] = field(default_factory=dict, repr=False)
    _spaces: dict[Operator, Sequence[Config]] = field(default_factory=dict, repr=False)

    def carefully(self) -> KernelGuesses:
        """Guesses for a network whose errors are too large with fast algorithms."""
        return KernelGuesses(self.cpu, self.ranking, self.recorded, self.trusted, self.origin, careful=True)

    def allows(self, operator: Operator, config: Config) -> bool:
        """True if a network may be built with ``config``."""
        template = template_for(operator, self.cpu) if self.careful else None
        return template is None or template.relative_rounding(config) <= 1.0

    def first(self, operator: Operator) -> list[Config]:
        """Configurations to try first: the best recorded ones of the same operator."""
        kernel = self.recorded.get(operator)
        if kernel is None:
            return []
        legal = {config_key(config) for config in self.space(operator)}
        near = kernel.near_best(RECORDED_RATIO, RECORDED_FIRST)
        return [config for config in near if config_key(config) in legal]

    def space(self, operator: Operator) -> Sequence[Config]:
        """Allowed space of the operator's template, enumerated once."""
        if operator not in self._spaces:
            template = template_for(operator, self.cpu)
            assert template is not None, "only kernels of a template are guessed"
            space = template.space(operator, self.cpu)
            if self.careful:
                space = [config for config in space if self.allows(operator, config)]
            self._spaces[operator] = space
        return self._spaces[operator]

    def trials(self, operator: Operator) -> int:
        """Number of configurations of the operator measured on the same kind of chip before."""
        return len(self.recorded[operator].records) if self.trusted and operator in self.recorded else 0

    def seconds(self, operator: Operator) -> float | None:
        """Expected time of the operator, or None; the space is not enumerated if it is unknown."""
        ranked = self.ranking is not None and self.ranking.knows(operator)
        return self.guess(operator).seconds if ranked or (self.trusted and operator in self.recorded) else None

    def guess(self, operator: Operator) -> KernelGuess:
        """Configuration to use without a measurement. ``operator`` must have a template."""
        if operator not in self._known:
            self._known[operator] = self._guess(operator)
        return self._known[operator]

    def _guess(self, operator: Operator) -> KernelGuess:
        recorded = self.first(operator)
        if recorded and self.trusted:
            best = self.recorded[operator].best
            return KernelGuess(recorded[0], best.seconds if best.config == recorded[0] else None)
        space = self.space(operator)[:RANKED]
        if self.ranking is None or not self.ranking.knows(operator):
            return KernelGuess(recorded[0] if recorded else space[0], None)
        config = recorded[0] if recorded else space[self.ranking.rank(operator, space)[0]]
        return KernelGuess(config, float(self.ranking.seconds(operator, [config])[0]))


def guesses_for(cpu: CpuTarget) -> KernelGuesses:
    """Guesses from the shipped records of ``cpu`` or of the most similar CPU; empty if none has vectors of the same
    width.
    """
    found: FoundRecords | None = find_records(cpu, nearest=True)
    chip = chip_name() or cpu.mcpu
    if found is None:
        origin = f"no records of {chip} or a CPU like it: kernels that were never measured are chosen by their cost"
        return KernelGuesses(cpu, origin=origin)
    try:
        ranking = read_ranking(found, cpu.threads)
    except MachineError:  # the machine model has fewer threads
        ranking = None
    origin = f"starting from records of this CPU, {chip}"
    if not found.same_chip:
        other = f"{found.content.cpu.chip}, {found.content.cpu.mcpu}"
        like = "which runs the same code" if found.same_code else "the nearest with vectors as wide"
        origin = f"no records of this CPU, {chip}: starting from those of {other}, {like}"
    return KernelGuesses(cpu, ranking, found.content.of(cpu.threads), found.same_chip, origin)
