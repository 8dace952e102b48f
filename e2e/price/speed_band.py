"""What a step of many GPUs loses to the slowest of them, and how far predicted steps then are from measured ones.

No two GPUs run at the same speed: chips, power and temperature differ (by 8 % on average within a cluster: Sinha et
al., "Not All GPUs Are Created Equal", SC 2022). Tables are of one GPU. In a synchronised step all wait for the slowest
in every collective, so that the kernels of all take as long as its own. If speeds are spread evenly over a band, the
slowest of n GPUs is expected at (n - 1) / (n + 1) of its width: 78 % with 8 GPUs, all of it with thousands.

The width is fitted to whole steps (:mod:`lab.fit.speed_band`): all else that a long step loses and no model
knows is in it too. It is the same for every step of several GPUs that is predicted kernel by kernel: ``--parallel``,
``--script`` and inference. What it leaves says how wide the interval of a step is, of one GPU too: the more so the more
of it are products and attention like those of the steps that taught (:meth:`StepErrors.in_step`).

Tried instead, on an earlier version (mean error, each source left out: 4.1 % at best): the same loss whatever n is
(4.6 %); a normal distribution of speeds, which has no end and is 17 % slow at 16,384 GPUs; one loss per generation.

costmodel/calibration/speed_band.json    the width, the errors of the steps it was fitted to, which steps
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine
from e2e.price.release_spread import release_spread
from e2e.step.execution_graph import Duration, ExecutionGraph, Kernel, RankGraph, Task

SPEED_BAND = Path(__file__).parents[2] / "costmodel" / "calibration" / "speed_band.json"
# What most of a step must be for it to err like those that taught.
_PRODUCTS = ("Gemm", "Attention")
# Half intervals (log units) of a step that were all of this. Of steps kept from the makers of version 1.0, 94 in 8
# bits erred by 13.1 % in the mean and 36 mixtures by 24 %; 80 % of a normal distribution lie within 1.606 times as
# much. Together with the intervals of their kernels this comes up to that where products in 8 bits are four tenths of
# a step, and experts and their messages half of it: an estimate, not a fit.
EIGHT_BITS, EXPERTS = 0.33, 0.63
_EXPERTS = ("GroupedGemm", "all_to_all")


@dataclass(frozen=True)
class StepErrors:
    """By how much measured steps differ from predicted ones, learned from whole steps.

    ``residual``: half of the interval (log units) that holds 80 % of the steps of a source that was not fitted to,
    where kernels err by nothing; ``kept``: the share of the errors of kernels that is left in a step, those of
    ``families`` alone: of all others it is the whole.
    """

    residual: float = 0.0
    kept: float = 1.0
    families: tuple[str, ...] = ()

    def share(self, family: str) -> float:
        """What is left of the errors of the kernels of ``family`` in a step."""
        return self.kept if family in self.families else 1.0

    def in_step(self, taken: Mapping[str, float], seconds: float) -> StepErrors:
        """What is left in a step of ``seconds`` whose path has ``taken`` of each family: with half of it products and
        attention that taught, half of what they teach. Of one without any, kernels err as much as by themselves; such
        steps are off besides by as much as those in 8 bits and of experts were found to be.
        """
        whole = max(seconds, math.fsum(taken.values())) or 1.0
        share = math.fsum(taken.get(family, 0.0) for family in self.families if family in _PRODUCTS) / whole
        experts = math.fsum(taken[family] for family in taken if _of_experts(family)) / whole
        scaled = math.fsum(
            taken[family] for family in taken if family.startswith("ScaledGemm") and not _of_experts(family)
        )
        residual = self.residual * share + EXPERTS * experts + EIGHT_BITS * scaled / whole
        return replace(self, residual=residual, kept=1.0 - (1.0 - self.kept) * share)

    def widened(self, spread: float) -> StepErrors:
        """These, where something else moves 80 % of steps by up to ``spread`` (log units) each way."""
        return replace(self, residual=math.hypot(self.residual, spread))


def _of_experts(family: str) -> bool:
    return family.startswith(_EXPERTS) or family.endswith("of experts")


@dataclass(frozen=True)
class SpeedBand:
    """``width``: slowest over fastest GPU, less one. ``chips``: those that ``errors`` were learned on
    (:func:`chip_name`); ``provenance``: command, rows, sources. ``left_out``: source of steps -> the band that those of
    the others tell, by which its own are judged.
    """

    width: float
    errors: StepErrors
    chips: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, SpeedBand] = field(default_factory=dict)

    def slowdown(self, gpus: int) -> float:
        """By how much (a fraction) kernels take longer where ``gpus`` GPUs wait for each other."""
        return self.width * (gpus - 1) / (gpus + 1)

    def meant_for(self, machine: Machine, *, older_libraries: bool = False) -> SpeedBand:
        """This band for steps on ``machine``: of chips that no step told of, kernels may err in a step as much as by
        themselves; with libraries older than the tables' a step is also as far off as releases differ
        (:mod:`e2e.price.release_spread`).
        """
        known = chip_name(machine) in self.chips
        if known and not older_libraries:
            return self
        errors = self.errors if known else replace(self.errors, families=())
        return replace(self, errors=errors.widened(release_spread()) if older_libraries else errors)


def chip_name(machine: Machine) -> str:
    """What tells chips apart, whatever memory and power they have."""
    chip = machine.chip()
    return f"{chip.architecture} of {chip.sm_count} multiprocessors"


@lru_cache(maxsize=4)
def load_speed_band(path: Path = SPEED_BAND) -> SpeedBand | None:
    """What is in ``path``; ``None`` without the file. ``InputError`` names a corrupt one."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return _band(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a band of speeds ({error!r}); install the package again") from None


def _band(record: Mapping[str, Any]) -> SpeedBand:
    known = record["errors"]
    errors = StepErrors(float(known["residual"]), float(known["kept"]), tuple(map(str, known["families"])))
    left_out = {str(name): _band(each) for name, each in record["left_out"].items()}
    chips = tuple(map(str, record["chips"]))
    return SpeedBand(float(record["width"]), errors, chips, record["provenance"], left_out)


def band_record(band: SpeedBand) -> dict[str, Any]:
    """The JSON document that :func:`load_speed_band` reads."""
    return asdict(band)


def band_of(machine: Machine, *, older_libraries: bool = False) -> SpeedBand | None:
    """The shipped band for steps on ``machine``; ``None`` where there is none."""
    band = load_speed_band()
    return None if band is None else band.meant_for(machine, older_libraries=older_libraries)


def slowed(graph: ExecutionGraph, slowdown: float) -> ExecutionGraph:
    """Priced ``graph`` with kernels that take ``1 + slowdown`` times as long; transfers and the host keep theirs."""
    if not slowdown:
        return graph
    return replace(graph, ranks=tuple(_slowed_rank(rank, 1.0 + slowdown) for rank in graph.ranks))


def _slowed_rank(rank: RankGraph, factor: float) -> RankGraph:
    runs: dict[int, tuple[Kernel, ...]] = {}  # tasks that repeat share their kernels

    def slower(task: Task) -> Task:
        if task.collective is not None or task.kind != "kernel":
            return task
        if task.kernels and id(task.kernels) not in runs:
            runs[id(task.kernels)] = tuple(
                replace(each, duration=_longer(each.duration, factor)) for each in task.kernels
            )
        return replace(task, duration=_longer(task.duration, factor), kernels=runs.get(id(task.kernels), task.kernels))

    return replace(rank, tasks=tuple(slower(task) for task in rank.tasks))


def _longer(duration: Duration | None, factor: float) -> Duration | None:
    if duration is None:
        return None
    seconds, lower, upper = (factor * value for value in (duration.seconds, duration.lower, duration.upper))
    return replace(duration, seconds=seconds, lower=lower, upper=upper)
