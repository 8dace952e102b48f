"""Host overheads T1 to T5: samples from profiles, outliers removed, tables of means that price operators.

The kinds are those of Lin et al. (HiPC 2022), as in :mod:`e2e.step.execution_graph`:

    T1  the gap between top-level operators
    T2  from an operator's start to its first launch
    T3  from its last launch to its end
    T4  the launch call itself
    T5  between launches, or the whole of an operator that launches nothing

Samples of an operator include its children, at every level of nesting, so a table prices an operator once, at the level
at which it is looked up. T1 has the name of the operator after the gap. T4 has the name of the runtime call: a launch
or, without its waiting, a synchronising call. ``whole`` is the T5 of an operator that launches nothing, separate from
the time between launches.

A profiler lengthens the times it records. Model: every operator record costs ``operator_seconds``, every runtime record
``call_seconds``; a table stores the mean number of records in its pieces, so that the cost can be subtracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from costmodel.base.errors import InputError
from e2e.price.overhead_samples import OverheadSample, OverheadSamples
from e2e.step.marked_ranges import MARKED
from e2e.step.multi_tensor_calls import is_multi_tensor

OverheadPart = Literal["T1", "T2", "T3", "T4", "T5", "whole"]
KINDS: tuple[OverheadPart, ...] = get_args(OverheadPart)

# Other names of families: collectives in torch.compile and tensor parallelism.
_ALSO_CALLED = {"_c10d_functional": "c10d", "c10d_functional": "c10d"}
# Weight of the family's mean, in samples, in the mean of an operator with few samples.
_PRIOR_WEIGHT = 2.0
# Largest weight of one operator in a median over operators, however often a job calls it.
_MOST_WEIGHT = 50


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean seconds of ``count`` samples; ``operators`` and ``calls``: mean number of profiler records in each."""

    seconds: float
    count: int
    operators: float = 0.0
    calls: float = 0.0

    @staticmethod
    def of(means: Sequence[Mean]) -> Mean:
        """Return the mean over all samples of ``means``."""
        weights = np.array([mean.count for mean in means], dtype=float)
        rows = np.array([(mean.seconds, mean.operators, mean.calls) for mean in means])
        seconds, operators, calls = (float(value) for value in weights @ rows / weights.sum())
        return Mean(seconds, int(weights.sum()), operators, calls)


@dataclass(frozen=True, slots=True)
class Growth:
    """Duration of pieces of one kind: ``base`` seconds, plus ``each`` seconds per nested operator record."""

    base: float
    each: float

    def at(self, records: float) -> Mean:
        """Return the mean of a piece with ``records`` records, with the weight of one sample."""
        return Mean(self.base + self.each * records, 1, records)


@dataclass(frozen=True, slots=True)
class Inflation:
    """Cost of one profiler record in seconds, and the origin of the figures."""

    operator_seconds: float
    call_seconds: float
    origin: str

    def without(self, mean: Mean) -> float:
        """Return the seconds of ``mean`` in a run without the profiler; never negative."""
        cost = mean.operators * self.operator_seconds + mean.calls * self.call_seconds
        return max(mean.seconds - cost, 0.0)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Profile that a table was fitted to."""

    file: str
    gpu: str
    operators: int
    calls: int


@dataclass(frozen=True)
class OverheadTable:
    """Means by kind and operator name (times as recorded), with their sources. Unknown names fall back to families and
    kinds.
    """

    name: str
    means: Mapping[OverheadPart, Mapping[str, Mean]]
    # Kind -> prefix of a name (``aten``, ``autograd::engine::evaluate_function`` ...) -> mean.
    families: Mapping[OverheadPart, Mapping[str, Mean]]
    # Kind -> mean over all operators. Every kind has one.
    defaults: Mapping[OverheadPart, Mean]
    sources: tuple[Provenance, ...] = ()
    inflation: Inflation | None = None
    # Factor by which the host's times may be shorter or longer; 1 for a table of the user's own host.
    factor: float = 1.0
    # Ratio of the host's times to those of the shared table.
    level: float = 1.0
    # Kind -> growth of pieces with the operators inside them.
    growth: Mapping[OverheadPart, Growth] = field(default_factory=dict)

    def seconds(self, kind: OverheadPart, name: str, records: float | None = None) -> float:
        """Return the seconds of one piece without the profiler, by the inflation model if the table has one.

        An operator with many samples has its own mean; with fewer samples it moves towards the expected value: from the
        number of operator ``records`` inside the piece, if that is given and the table has such pieces, otherwise the
        mean of its family (the part of the name before ``::``) or of the kind. For an operator that takes tensor lists,
        the time up to its first launch is the expected value; the rest grows with the lists
        (:mod:`e2e.price.multi_tensor`).
        """
        growth = None if records is None else self.growth.get(kind)
        prior = self.without_profiler(self.family(kind, name) if growth is None else growth.at(records or 0.0))
        if kind in ("T1", "T2") and is_multi_tensor(name):
            return prior
        own = self.means[kind].get(name) or self.means[kind].get(_other_form(name))
        if own is None:
            return prior
        return (own.count * self.without_profiler(own) + _PRIOR_WEIGHT * prior) / (own.count + _PRIOR_WEIGHT)

    def family(self, kind: OverheadPart, name: str) -> Mean:
        """Return the mean for an operator without samples."""
        return self.families[kind].get(family_of(name), self.defaults[kind])

    def count(self, kind: OverheadPart, name: str) -> int:
        """Return the number of samples of the operator's own mean; 0 if it falls back."""
        own = self.means[kind].get(name)
        return own.count if own else 0

    def without_profiler(self, mean: Mean) -> float:
        """Return the seconds of ``mean`` in a run without the profiler, by the inflation model if the table has one."""
        return self.inflation.without(mean) if self.inflation else mean.seconds


def family_of(name: str) -> str:
    """Return the family of an operator name.

    ``aten`` for ``aten::add``; ``autograd::engine::evaluate_function`` for autograd nodes; ``backward`` for their work.
    A gap at the border of a marked range is its own family.
    """
    if name in MARKED:
        return name
    if ": " in name:
        return name.partition(": ")[0]
    if "::" in name:
        family = name.rpartition("::")[0]
        return _ALSO_CALLED.get(family, family)
    return "backward" if "Backward" in name else "other"


def _other_form(name: str) -> str:
    """Return the in-place form of an out-of-place operator and vice versa: both cost the host nearly the same."""
    return name[:-1] if name.endswith("_") else f"{name}_"


# --- fitting ---------------------------------------------------------------------------------------


def without_hiccups(samples: Sequence[OverheadSample], steps: int) -> list[OverheadSample]:
    """Remove hiccups from ``samples`` of ``steps`` iterations of one job.

    Samples within Tukey's fences are kept, and so are longer ones that recur: those as long, within a factor of two, as
    one in every other iteration at least. Long samples in every step (a batch is loaded before this ``aten::slice``, a
    module is entered before that ``aten::linear``) are part of the step's cost, however far from the operator's other
    samples.
    """
    fence = max(sample.seconds for sample in without_outliers(samples))
    longest = sorted((sample.seconds for sample in samples), reverse=True)
    often = longest[min(max((steps + 1) // 2, 1), len(longest)) - 1]
    return [sample for sample in samples if sample.seconds <= max(fence, 2.0 * often)]


def without_outliers(samples: Sequence[OverheadSample]) -> list[OverheadSample]:
    """Return the samples within Tukey's fences, 1.5 times the interquartile range beyond the quartiles."""
    seconds = np.array([sample.seconds for sample in samples])
    if len(seconds) < 4:
        return list(samples)
    first, third = np.quantile(seconds, (0.25, 0.75))
    reach = 1.5 * (third - first)
    kept = (seconds >= first - reach) & (seconds <= third + reach)
    return [sample for sample, keep in zip(samples, kept, strict=True) if keep]


def fit_table(
    name: str,
    profiles: Iterable[OverheadSamples],
    inflation: Inflation | None = None,
    *,
    of_job: bool = False,
    others: OverheadTable | None = None,
) -> OverheadTable:
    """Fit the table of all samples of ``profiles``; raise :class:`InputError` if a kind has no sample.

    ``others``: table for kinds without a sample, which a short profile may lack. ``of_job``: the table predicts the
    profiled job itself, so that its long pieces count, such as loading a batch between two operators; in a table for
    other jobs they would lengthen every operator of the same name.
    """
    gathered: dict[tuple[str, str], list[OverheadSample]] = defaultdict(list)
    sources = []
    steps = 0
    for samples in profiles:
        steps += samples.steps
        sources.append(Provenance(samples.source, samples.gpu, samples.operators, samples.calls))
        for key, values in samples.values.items():
            gathered[key].extend(values)
    means: dict[OverheadPart, dict[str, Mean]] = {kind: {} for kind in KINDS}
    for (kind, operator), values in sorted(gathered.items()):
        kept = without_hiccups(values, steps) if of_job else without_outliers(values)
        means[kind][operator] = _mean(kept)  # type: ignore[index]
    if others is not None:
        means = {kind: found or dict(others.means[kind]) for kind, found in means.items()}
    return complete_table(name, means, tuple(sources), inflation)


def merge(name: str, tables: Sequence[OverheadTable], inflation: Inflation | None = None) -> OverheadTable:
    """Merge tables into one: an operator's mean is over the samples of all of them."""
    means: dict[OverheadPart, dict[str, Mean]] = {}
    for kind in KINDS:
        names = sorted({operator for table in tables for operator in table.means[kind]})
        means[kind] = {
            operator: Mean.of([table.means[kind][operator] for table in tables if operator in table.means[kind]])
            for operator in names
        }
    return complete_table(name, means, tuple(source for table in tables for source in table.sources), inflation)


def _mean(samples: Sequence[OverheadSample]) -> Mean:
    rows = np.array([(sample.seconds, sample.operators, sample.calls) for sample in samples])
    seconds, operators, calls = (float(value) for value in rows.mean(axis=0))
    return Mean(seconds, len(samples), operators, calls)


def complete_table(
    name: str,
    means: Mapping[OverheadPart, Mapping[str, Mean]],
    sources: tuple[Provenance, ...],
    inflation: Inflation | None,
) -> OverheadTable:
    """Complete ``means`` with those of families and kinds; raise :class:`InputError` for a kind without any."""
    families: dict[OverheadPart, dict[str, Mean]] = {}
    defaults: dict[OverheadPart, Mean] = {}
    for kind, entries in means.items():
        if not entries:
            raise InputError(f"{name}: no sample of {kind} in the profiles; record at least one whole training step")
        members: dict[str, list[Mean]] = defaultdict(list)
        for operator, mean in entries.items():
            members[family_of(operator)].append(mean)
        families[kind] = {family: Mean.of(found) for family, found in sorted(members.items())}
        usual = [mean for operator, mean in entries.items() if operator not in MARKED]
        defaults[kind] = Mean.of(usual or list(entries.values()))
    growth = {kind: grown for kind, entries in means.items() if (grown := _growth(list(entries.values()))) is not None}
    return OverheadTable(name, means, families, defaults, sources, inflation, growth=growth)


def _growth(means: Sequence[Mean]) -> Growth | None:
    """Return the growth of pieces, or None if no piece has a whole operator inside, as between operators and in
    launches.

    Base and slope are medians over the operators, weighted by their samples up to :data:`_MOST_WEIGHT`.
    """
    bare = [(mean.seconds, mean.count) for mean in means if mean.operators < 1.0]
    base = _weighted_median(bare) if bare else 0.0
    grown = [((mean.seconds - base) / mean.operators, mean.count) for mean in means if mean.operators >= 1.0]
    return Growth(base, max(_weighted_median(grown), 0.0)) if grown else None


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    found = sorted((value, min(count, _MOST_WEIGHT)) for value, count in values)
    half, reached = sum(weight for _, weight in found) / 2.0, 0.0
    for value, weight in found:
        reached += weight
        if reached >= half:
            return value
    return found[-1][0]
