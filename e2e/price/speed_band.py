"""Errors of whole steps: slowdown by the slowest of many GPUs, remaining error, change between releases of libraries.

GPUs differ in speed by chip, power and temperature (by 8 % on average within a cluster: Sinha et al., "Not All GPUs Are
Created Equal", SC 2022). Tables are of one GPU. In a synchronised step all GPUs wait for the slowest in every
collective: each takes as long as the slowest. If speeds are uniform over a band, the slowest of n GPUs is on average
(n - 1) / (n + 1) of its width behind the fastest: 78 % with 8 GPUs, all of it with thousands. The published steps have
eight GPUs and more. A GPU alone loses half the width if its products are in 16 or 8 bits, as in those steps: tables are
measured in short bursts, and what no model covers of long steps is lost there too. The published steps cannot say which
part is waiting and which is lost on every GPU (5 % on every GPU and a band of 4 %: 2.9 % mean error; the band alone:
2.8 %).

The width is fitted to whole steps (:mod:`lab.fit.speed_band`), so it also contains all other losses of long steps that
no model covers, such as clocks that fall under load. It is fitted by architecture: steps on H100 ask for twice the
width of those on A100 (each source left out, 3.9 % mean error instead of 4.3 %). It is the same for every step of
several GPUs that is predicted kernel by kernel: programs, ``--parallel``, ``--script`` and inference. The residual
error gives the width of a step's interval, also for one GPU: the weight of the fitted error is the fraction of the step
in products and attention like those of the fitted steps (:meth:`StepErrors.in_step`).

Alternatives tried on an earlier version (mean error, each source left out: 4.1 % at best): the same loss for every n
(4.6 %); a normal distribution of speeds, which is unbounded and 17 % too slow at 16,384 GPUs.

Releases, for stacks older than the tables of kernels: tables of products and attention on tensor cores are of 2025 and
2026. Times with the libraries of 2023 are known for few kernels, and for no whole steps except those used for
validation. For image models they are known: timm's results contain a thousand on one card under PyTorch 2.4 with
CUDA 12.4 and again under 2.9 with 12.8. The half interval, in log units, that holds 80 % of the differences is added to
the interval of a step whose libraries are older (``older_libraries`` of :class:`e2e.capture.models.stacks.Stack`).

The time itself changes for one kind of kernel with known older times: 16-bit products on Hopper. Libraries of the
chip's first year (CUDA 12.1) were not tuned to it: Vidur's H100 takes 1.3 times as long for products of 10 us and 1.05
times for products of 3 ms as LLMServingSim's with libraries of 2025. On A100, three years old by then, there is no such
difference. Changes of other kinds of kernels are not known.

    costmodel/calibration/speed_band.json        the width, the errors of the steps it was fitted to, which steps
    costmodel/calibration/release_spread.json    the half interval, the pairs, the times of products, and the source
           files; written by ``python -m lab.fit.speed_band --releases``
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Gemm, ScaledGemm
from costmodel.operators.experts import GroupedGemm
from costmodel.operators.layers import Conv2d
from e2e.step.execution_graph import Duration, ExecutionGraph, Kernel, RankGraph, Task

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


SPEED_BAND = Path(__file__).parents[2] / "costmodel" / "calibration" / "speed_band.json"
# Families that must dominate a step for the fitted errors to apply.
_PRODUCTS = ("Gemm", "Attention")
_MULTIPLY = (Gemm, ScaledGemm, GroupedGemm, Attention, Conv2d)
# Half intervals (log units) of a step that consists of 8-bit products, or of experts, alone. Of the steps withheld from
# the developers of version 1.0, 94 in 8 bits had a mean error of 13.1 % and 36 mixtures of 24 %; 80 % of a normal
# distribution lie within 1.606 times the mean error. Together with the intervals of their kernels these values match
# that for steps with four tenths in 8-bit products, and with half in experts and their messages: an estimate, not a
# fit.
EIGHT_BITS, EXPERTS = 0.33, 0.63
_EXPERTS = ("GroupedGemm", "all_to_all")
# The same of a step whose multiplications are convolutions. Of the first answers to 41 published image steps
# (docs/programs.md) two thirds were inside the interval of their kernels alone; with this residual 82 % of all 62 first
# answers were.
CONVOLUTIONS = 0.20
_CONVOLUTIONS = ("Conv2d", "ConvolutionBackward")
# The fraction of the errors of convolutions that remains beside it: layers of a network err each by itself.
OF_CONVOLUTIONS = 0.3
_ANY_PRODUCTS = ("Gemm", "Attention", "ScaledGemm", "GroupedGemm")
# The same of a program that is run unmodified, whatever its kernels: its measured speed contains more than operators
# (loading of data, older software, its machine). Of 111 published figures, predicted before anything was mended for
# them, 61 % were inside their 80 % intervals without it; 73 % are with it (docs/programs.md).
PROGRAMS = 0.20


@dataclass(frozen=True)
class StepErrors:
    """Errors of predicted steps, learned from measured whole steps."""

    # Half interval (log units) that holds 80 % of the steps of a source left out of the fit, besides the errors of
    # kernels.
    residual: float = 0.0
    # Fraction of the errors of kernels that remains in a step, for ``families``; 1 for other families.
    kept: float = 1.0
    families: tuple[str, ...] = ()
    # Residual of a step of any kernels, independent of the others.
    whole: float = 0.0

    def share(self, family: str) -> float:
        """Return the fraction of the errors of ``family``'s kernels that remains in a step."""
        if family in _CONVOLUTIONS:
            return OF_CONVOLUTIONS
        return self.kept if family in self.families else 1.0

    def in_step(self, taken: Mapping[str, float], seconds: float) -> StepErrors:
        """Return the errors of a step of ``seconds`` whose critical path has ``taken`` seconds of each family.

        The learned errors are weighted by the fraction of products and attention of the fitted families. Without any,
        errors of kernels remain in full. 8-bit products and experts widen the residual by their fractions of the step,
        and so do all kernels of a step by the fraction of convolutions among its multiplications.
        """
        whole = max(seconds, math.fsum(taken.values())) or 1.0
        share = math.fsum(taken.get(family, 0.0) for family in self.families if family in _PRODUCTS) / whole
        experts = math.fsum(taken[family] for family in taken if _of_experts(family)) / whole
        scaled = math.fsum(
            taken[family] for family in taken if family.startswith("ScaledGemm") and not _of_experts(family)
        )
        images = _convolution_share(taken) * math.fsum(taken.values()) / whole
        residual = self.residual * share + EXPERTS * experts + EIGHT_BITS * scaled / whole + CONVOLUTIONS * images
        return replace(self, residual=math.hypot(residual, self.whole), kept=1.0 - (1.0 - self.kept) * share)

    def widened(self, spread: float) -> StepErrors:
        """Return these errors widened by an independent effect of up to ``spread`` (log units) for 80 % of steps."""
        return replace(self, residual=math.hypot(self.residual, spread))


def _convolution_share(taken: Mapping[str, float]) -> float:
    """Return the fraction of convolutions among these, products and attention, by time; 0 without any."""
    products = math.fsum(taken[family] for family in taken if family.startswith(_ANY_PRODUCTS))
    convolutions = math.fsum(taken.get(family, 0.0) for family in _CONVOLUTIONS)
    return convolutions / (products + convolutions) if convolutions else 0.0


def _of_experts(family: str) -> bool:
    return family.startswith(_EXPERTS) or family.endswith("of experts")


@dataclass(frozen=True)
class SpeedBand:
    """Band of GPU speeds, fitted to whole steps."""

    # Ratio of slowest to fastest GPU time, less one.
    width: float
    errors: StepErrors
    # Chips of the fitted steps (:func:`chip_name`).
    chips: tuple[str, ...] = ()
    # Command, rows, sources.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    # Source of steps -> band fitted without it, for validation on its steps.
    left_out: Mapping[str, SpeedBand] = field(default_factory=dict)
    # Architecture -> width on its chips; ``width`` is that of all steps, for chips of other architectures.
    widths: Mapping[str, float] = field(default_factory=dict)

    def on(self, chip: str) -> SpeedBand:
        """Return this band with the width on ``chip`` (:func:`chip_name`)."""
        width = self.widths.get(architecture_of(chip), self.width)
        return self if width == self.width else replace(self, width=width)

    def of_program(self) -> SpeedBand:
        """Return this band for a program run as it is."""
        return replace(self, errors=replace(self.errors, whole=PROGRAMS))

    def slowdown(self, gpus: int) -> float:
        """Return the slowdown (a fraction) of kernels where ``gpus`` GPUs wait for each other."""
        return self.width * (gpus - 1) / (gpus + 1)

    def slowdown_of(self, graph: ExecutionGraph) -> float:
        """Return the slowdown of the kernels of a priced ``graph``: at least half the band where products are in 16 or
        8 bits, as in the fitted steps. On chips of none of those convolutions do not count: their factors are inverted
        from whole steps, which contain the loss.
        """
        gpus = sum(graph.multiplicity.get(rank.rank, 1) for rank in graph.ranks)
        return max(self.slowdown(gpus), 0.5 * self.width * narrow_share(graph, images=bool(self.errors.families)))

    def meant_for(self, machine: Machine, *, older_libraries: bool = False) -> SpeedBand:
        """Return this band for steps on ``machine``.

        For chips without fitted steps, errors of kernels remain in full; libraries older than the tables' add the
        spread between releases (:mod:`e2e.price.speed_band`).
        """
        chip = chip_name(machine)
        band, known = self.on(chip), chip in self.chips
        if known and not older_libraries:
            return band
        errors = self.errors if known else replace(self.errors, families=())
        return replace(band, errors=errors.widened(release_spread()) if older_libraries else errors)


def chip_name(machine: Machine) -> str:
    """Return a name of the chip, the same for all variants of memory and power."""
    chip = machine.chip()
    return f"{chip.architecture} of {chip.sm_count} multiprocessors"


def architecture_of(chip: str) -> str:
    """Return the architecture in a name by :func:`chip_name`."""
    return chip.partition(" ")[0]


@lru_cache(maxsize=4)
def load_speed_band(path: Path = SPEED_BAND) -> SpeedBand | None:
    """Read the band in ``path``; return None without the file. Raise ``InputError`` for a corrupt file."""
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
    widths = {str(name): float(width) for name, width in record["widths"].items()}
    return SpeedBand(float(record["width"]), errors, chips, record["provenance"], left_out, widths)


def band_record(band: SpeedBand) -> dict[str, Any]:
    """Return the JSON document that :func:`load_speed_band` reads."""
    # The residual of a program is no result of the fit.
    return asdict(band, dict_factory=lambda pairs: {name: value for name, value in pairs if name != "whole"})


def band_of(machine: Machine, *, older_libraries: bool = False) -> SpeedBand | None:
    """Return the shipped band for steps on ``machine``, or None."""
    band = load_speed_band()
    return None if band is None else band.meant_for(machine, older_libraries=older_libraries)


def narrow_share(graph: ExecutionGraph, images: bool = True) -> float:
    """Return the share, by time, of products and attention in 16 or 8 bits among those of a priced ``graph``, and, with
    ``images``, of convolutions.
    """
    seconds = {True: 0.0, False: 0.0}
    for rank in graph.ranks:
        for task in rank.tasks:
            for part in task.kernels or (task,):
                product = next((each for each in part.operators if isinstance(each, _MULTIPLY)), None)
                if product is not None and part.duration is not None:
                    narrow = "16" in product.dtype or "8" in product.dtype
                    counts = images or not isinstance(product, Conv2d)
                    seconds[narrow and counts] += part.duration.seconds
    return seconds[True] / (sum(seconds.values()) or 1.0)


def slow_down(graph: ExecutionGraph, slowdown: float) -> ExecutionGraph:
    """Return the priced ``graph`` with kernels ``1 + slowdown`` times as long; transfers and host work are
    unchanged.
    """
    if not slowdown:
        return graph
    return replace(graph, ranks=tuple(_slowed_rank(rank, 1.0 + slowdown) for rank in graph.ranks))


def with_speeds(graph: ExecutionGraph, spread: float) -> ExecutionGraph:
    """Return the priced ``graph`` with a random speed for the GPU of each rank.

    Slowdowns are log-normal with mean 1 and standard deviation ``spread``, and the same in every call. A rank that
    represents several gets the slowest of them, for which the rest wait in collectives.
    """
    if not spread:
        return graph
    variance = math.log1p(spread**2)
    ranks = []
    for rank in graph.ranks:
        source = np.random.default_rng((0, rank.rank))
        alike = graph.multiplicity.get(rank.rank, 1)
        slowest = float(source.lognormal(-variance / 2, math.sqrt(variance), alike).max())
        ranks.append(_slowed_rank(rank, slowest, copies=True))
    return replace(graph, ranks=tuple(ranks))


def _slowed_rank(rank: RankGraph, factor: float, copies: bool = False) -> RankGraph:
    """Return ``rank`` with kernels (``copies``: and copies over the bus) that take ``factor`` times as long."""
    runs: dict[int, tuple[Kernel, ...]] = {}  # repeated tasks share their kernels

    def slower(task: Task) -> Task:
        if task.collective is not None or (task.kind != "kernel" and not copies):
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
