"""Tables of host overheads T1 to T5: fitted to samples from profiles, read from files, selected for a step.

A step takes the table of its GPU's generation, of a file or a known host, or one fitted to the user's own profile.
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
``call_seconds``; a table stores the mean number of records in its pieces, so that the cost can be subtracted. On an
H200 this was by far not all: host-bound steps took 1.3 to 1.9 times as long with the profiler. So where a step was also
timed without it, all its pieces are shortened to that time (:func:`profiler_ratio`).

``newer-servers`` is for GPUs of 2022 and later. Two such hosts are known: that of an H100, whose profiles have stacks,
which lengthen Python between operators (T1) but not the time inside them, and ``h200-server``, a virtual machine with
an H200. The table has the times of the second where it has any, at the geometric mean of both levels.

Files are JSON; every error names the file.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from annotated_types import Ge, Gt

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import MALFORMED, open_file, read_text
from costmodel.base.output_files import write_whole
from costmodel.machines.record_file import read_record
from e2e.price.overhead_samples import OverheadSample, OverheadSamples
from e2e.price.pricing import HostOverheads
from e2e.step.operator_trace import MARKED_GAPS, is_multi_tensor

if TYPE_CHECKING:
    from e2e.traces.kineto import KinetoTrace


OverheadPart = Literal["T1", "T2", "T3", "T4", "T5", "whole"]
KINDS: tuple[OverheadPart, ...] = get_args(OverheadPart)

# Other names of families: collectives in torch.compile and tensor parallelism.
_ALSO_CALLED = {"_c10d_functional": "c10d", "c10d_functional": "c10d"}
# Weight of the family's mean, in samples, in the mean of an operator with few samples.
_PRIOR_WEIGHT = 2.0
# Samples of an operator required for its mean to count for the level of a host.
_LEAST_SAMPLES = 3
# Factor within which 80 % of the times of other jobs lie on a host known by some: of 17 programs on an H200, by the
# overheads suite of its host.
SAME_HOST = 1.35
# Most seconds per record inside an operator that launches nothing, unless it computes on tensors of the host: to draw
# 50,000 numbers took 500 us, views and allocations take 1 to 5.
_LONGEST_RECORD = 3e-5
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
    # Width of the interval: the host's times may be this factor shorter or longer; 1 if fitted to the predicted job.
    factor: float = 1.0
    # Ratio of the host's times to those of the shared table, by which times of tensor lists are scaled.
    level: float = 1.0
    # Kind -> growth of pieces with the operators inside them.
    growth: Mapping[OverheadPart, Growth] = field(default_factory=dict)

    def seconds(self, kind: OverheadPart, name: str, records: float | None = None) -> float:
        """Return the seconds of one piece without the profiler, by the inflation model if the table has one.

        An operator with many samples has its own mean; with fewer samples it moves towards the expected value: from the
        number of operator ``records`` inside the piece, if that is given and the table has such pieces, otherwise the
        mean of its family (the part of the name before ``::``) or of the kind. For an operator that takes tensor lists,
        the time up to its first launch is the expected value; the rest grows with the lists
        (:mod:`e2e.price.pricing`).
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
        return self.families[kind].get(overhead_family(name), self.defaults[kind])

    def count(self, kind: OverheadPart, name: str) -> int:
        """Return the number of samples of the operator's own mean; 0 if it falls back."""
        own = self.means[kind].get(name)
        return own.count if own else 0

    def without_profiler(self, mean: Mean) -> float:
        """Return the seconds of ``mean`` in a run without the profiler, by the inflation model if the table has one."""
        return self.inflation.without(mean) if self.inflation else mean.seconds


def overhead_family(name: str) -> str:
    """Return the family of an operator name.

    ``aten`` for ``aten::add``; ``autograd::engine::evaluate_function`` for autograd nodes; ``backward`` for their work.
    A gap at the border of a marked range is its own family.
    """
    if name in MARKED_GAPS:
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


def profiler_ratio(samples: OverheadSamples, profiled: float, seconds: float, inflation: Inflation) -> float:
    """Return what the host times of a profile must be multiplied by, at most 1, to be those without the profiler.

    The step, which the host limits, takes ``profiled`` seconds with the profiler and ``seconds`` without. The cost of
    the profiler's records, by ``inflation``, is subtracted first.
    """
    records = Mean(profiled, 1, samples.operators / samples.steps, samples.calls / samples.steps)
    return min(seconds / inflation.without(records), 1.0)


def scaled(table: OverheadTable, factor: float) -> OverheadTable:
    """Return ``table`` without the records' cost, on a host that takes ``factor`` times as long."""
    means = {
        kind: {name: replace(mean, seconds=factor * table.without_profiler(mean)) for name, mean in entries.items()}
        for kind, entries in table.means.items()
    }
    return complete_table(table.name, means, table.sources, None)


def level_of(host: OverheadTable, other: OverheadTable) -> float:
    """Return the ratio of the times of ``host`` to those of ``other`` inside operators that both contain: of the sums
    over the samples of ``host``, without profiler overhead.
    """
    sums = [0.0, 0.0]
    for kind in KINDS:
        if kind == "T1":
            continue
        for name, mean in host.means[kind].items():
            if min(mean.count, other.count(kind, name)) >= _LEAST_SAMPLES and not is_multi_tensor(name):
                sums[0] += mean.count * host.without_profiler(mean)
                sums[1] += mean.count * other.without_profiler(other.means[kind][name])
    return round(sums[0] / sums[1], 4)


def of_other_jobs(table: OverheadTable) -> OverheadTable:
    """Return ``table``, measured with other jobs than the predicted one, for use with that: with the speed of its host
    (``level``), the factor within which its times hold (:data:`SAME_HOST`), and without the times of operators that
    compute on CPU tensors, which depend on the data of those jobs.
    """
    whole = {
        name: mean
        for name, mean in table.means["whole"].items()
        if not name.startswith("aten::") or mean.seconds <= _LONGEST_RECORD * max(mean.operators, 1)
    }
    kept = complete_table(table.name, {**table.means, "whole": whole}, table.sources, table.inflation)
    return replace(kept, factor=SAME_HOST, level=level_of(kept, load_table(SHARED)))


def merge_tables(name: str, tables: Sequence[OverheadTable], inflation: Inflation | None = None) -> OverheadTable:
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
            members[overhead_family(operator)].append(mean)
        families[kind] = {family: Mean.of(found) for family, found in sorted(members.items())}
        usual = [mean for operator, mean in entries.items() if operator not in MARKED_GAPS]
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


@dataclass(frozen=True)
class _TableFile:
    """Content of a file of :func:`save_table`; rows are the fields of :class:`Mean`."""

    format: Literal[1]
    name: str
    means: Mapping[OverheadPart, Mapping[str, tuple[float, int, float, float]]]
    sources: tuple[Provenance, ...]
    inflation: Inflation | None
    factor: Annotated[float, Ge(1)] = 1.0
    level: Annotated[float, Gt(0)] = 1.0


def save_table(table: OverheadTable, path: Path) -> None:
    """Write ``table`` as JSON for :func:`load_table`; raise ``OutputError`` if it cannot be written."""
    document = {
        "format": 1,
        "name": table.name,
        "factor": table.factor,
        "level": table.level,
        "units": "seconds; [mean, samples, operator records inside, runtime records inside]",
        "sources": [asdict(source) for source in table.sources],
        "inflation": asdict(table.inflation) if table.inflation else None,
        "means": {kind: {name: _rounded(mean) for name, mean in sorted(table.means[kind].items())} for kind in KINDS},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _one_line_per_mean(document))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def load_table(path: Path) -> OverheadTable:
    """Read the table in ``path``; raise :class:`InputError` naming the file if it is missing or not such a table."""
    content = read_record(path, _TableFile, "install the package again")
    try:
        means = {kind: {name: Mean(*row) for name, row in content.means[kind].items()} for kind in KINDS}
        table = complete_table(content.name, means, content.sources, content.inflation)
    except MALFORMED as error:
        raise InputError(f"{path}: not a table of host overheads ({error}); install the package again") from None
    return replace(table, factor=content.factor, level=content.level)


def load_inflation(path: Path) -> Inflation:
    """Read the inflation model in ``path``; raise :class:`InputError` naming the file."""
    return read_record(path, Inflation, "restore it from the repository")


def _rounded(mean: Mean) -> list[float]:
    return [float(f"{round(mean.seconds, 12):.4g}"), mean.count, round(mean.operators, 3), round(mean.calls, 3)]


def _one_line_per_mean(document: Mapping[str, Any]) -> str:
    """Format JSON for readable diffs: one line per mean and per source."""
    parts = []
    for key, value in document.items():
        if key == "means":
            kinds = [
                f'  "{kind}": {{\n'
                + ",\n".join(f"   {json.dumps(n)}: {json.dumps(row)}" for n, row in rows.items())
                + "\n  }"
                for kind, rows in value.items()
            ]
            parts.append(' "means": {\n' + ",\n".join(kinds) + "\n }")
        elif isinstance(value, list):
            parts.append(f' "{key}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


DIRECTORY = Path(__file__).parents[2] / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"
# Bytes read to find a profile's events, which follow metadata on devices and ranks.
_HEAD = 1 << 16
INFLATION = DIRECTORY / "profiler_inflation.json"
# GPUs of 2022 and later are in servers of 2022 and later.
_NEWER, _NEWER_GPUS = "newer-servers", ("ada", "hopper", "blackwell", "blackwell-rtx")


def known_hosts() -> list[str]:
    """Return the names of the tables in the package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json") if path != INFLATION)


def load_overheads(path: Path | None = None, architecture: str = "") -> OverheadTable:
    """Load the table of ``path``, a file or a name in :func:`known_hosts`; by default the table for GPUs of
    ``architecture``.

    ``path`` may also name profiles (a file, a pattern, an archive) of the predicted job, to which a table is then
    fitted. Raise ``InputError`` if the table cannot be read.
    """
    if path is None:
        return load_table(DIRECTORY / f"{_NEWER}.json" if architecture in _NEWER_GPUS else SHARED)
    if _is_name(path):
        if path.name not in known_hosts():
            raise InputError(f"{path}: no such file, and no host of that name; known: {', '.join(known_hosts())}")
        return load_table(DIRECTORY / f"{path.name}.json")
    if is_table(path):
        return load_table(path)
    from e2e.price.overhead_samples import extract
    from e2e.traces.kineto import read_kineto
    from e2e.traces.recorded_run import expand_files

    files = expand_files([path])
    profiles = [extract(read_kineto(file)) for file in files]
    timed = [_timed(file) for file in files]
    if not all(timed):
        return _of_job(path.name, profiles)
    tables, inflation = [], load_inflation(INFLATION)
    for samples, (profiled, seconds) in zip(profiles, timed, strict=True):
        ratio = profiler_ratio(samples, profiled, seconds, inflation)
        tables.append(scaled(_of_job(path.name, [samples]), ratio))
    return of_other_jobs(merge_tables(path.name, tables))


def _timed(profile: Path) -> tuple[float, ...]:
    """Return the seconds of a step of ``profile`` with and without the profiler, by the table that the overheads suite
    of ``costmodel measure`` wrote beside it; empty if there is none.
    """
    table = profile.parent / "overheads.csv"
    rows = csv.DictReader(io.StringIO(read_text(table, "table"))) if table.is_file() else ()
    seconds = {row.get("quantity"): row for row in rows}
    for quantity, row in seconds.items():
        without = seconds.get(str(quantity).removeprefix("profiled "))
        if row.get("trace") == profile.name and without is not None:
            try:
                return float(row["median_s"]), float(without["median_s"])
            except MALFORMED as error:
                raise InputError(f"{table}: no seconds of {quantity!r} ({error}); measure the suite again") from None
    return ()


def check_overheads(path: Path | None) -> None:
    """Raise ``InputError`` where :func:`load_overheads` would, before long work; profiles are not opened yet."""
    from e2e.traces.recorded_run import expand_files

    if path is None:
        return
    if _is_name(path) or is_table(path):
        load_overheads(path)
        return
    for profile in expand_files([path]):
        if not any(each.is_file() for each in (profile, *profile.parents)):  # it may be inside an archive
            raise InputError(f"{profile}: is no file; give a table of host overheads, a known host or profiles")


def _is_name(path: Path) -> bool:
    return not path.suffix and "*" not in path.name and not path.exists()


def is_table(path: Path) -> bool:
    """True if ``path`` is read as a table: a JSON file without a profiler's events."""
    if path.suffix != ".json" or "*" in path.name:
        return False
    try:
        with open_file(path, "trace") as file:
            return b'"traceEvents"' not in file.read(_HEAD)
    except OSError:
        return True


def foreign_host_note(table: HostOverheads, *, grace: bool = False) -> str:
    """Return a note that names the host used instead of the user's; empty for a table of the user's own host.

    ``grace``: the GPU is sold with a Grace CPU, for which no overheads have been published.
    """
    if not isinstance(table, OverheadTable) or table.factor == 1.0:
        return ""
    other = ", an x86 server for a Grace CPU that was not measured" if grace else ""
    told = f"host overheads are those of {table.name}{other}"
    if table.factor == SAME_HOST:
        return f"{told}, measured on other jobs (the interval takes them up to {SAME_HOST:g} times as short or long)"
    return (
        f"{told} (the interval takes hosts up to {table.factor:g} times as fast or slow); name another host or a table "
        "of your own with --overheads"
    )


def fitted_overheads(name: str, profile: KinetoTrace) -> OverheadTable:
    """Fit the overheads of the host of ``profile``, without the profiler's cost."""
    from e2e.price.overhead_samples import extract

    return _of_job(name, [extract(profile)])


def _of_job(name: str, profiles: Sequence[OverheadSamples]) -> OverheadTable:
    """Fit the table of a job; kinds that a short profile lacks are taken from the shared table."""
    return fit_table(name, profiles, load_inflation(INFLATION), of_job=True, others=load_table(SHARED))
