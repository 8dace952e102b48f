"""Guesses for unmeasured kernels: shipped records of the same operator, or the trained ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.base.errors import MachineError
from costmodel.cpu.learned_residual import ResidualModel
from costmodel.model.measurements import config_key
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.template_table import template_for
from schedules.records.cpu_identity import chip_name
from schedules.records.shipped_records import FoundRecords, KernelRecords, find_records
from schedules.tuning.kernel_ranking import read_ranking

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
