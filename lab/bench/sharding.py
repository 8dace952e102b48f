"""The sharding figures: random tasks against greedy sharders, small tasks against the optimum, and a large one in time.

python -m lab.bench.sharding [--tasks 20] [--truths 5] [--small 10] [--large] [--gpu GPU] [--json FILE]

The first is the published experiment, by simulation: random tasks, seven sharders, costs that are wrong.

Every sharder plans with the models' costs; each plan is then simulated with "true" costs, the models' times multiplied
by lognormal factors: of each table and direction, of each way to cut it (half as wrong again), and of each collective.
Greedy sharders know no costs; what errors do to our choice is the question. ``oracle`` plans with the true costs. Our
planner draws errors, too, of the size that the models' own intervals tell and from other seeds; it never sees these.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from costmodel.collectives import collective_cost_model
from costmodel.gpu.embedding_tables import CountBin, EmbeddingTable, statistics_of_counts
from costmodel.machines.cluster import Cluster, load_cluster
from costmodel.operators.lookups import REUSE_BINS, REUSE_EDGES, IndexStatistics, zipf
from e2e.sharding.local_search import GREEDY
from e2e.sharding.placement import Option
from e2e.sharding.planner import SearchEffort, find_plan, make_problem, simulated_seconds
from e2e.sharding.step_graph import options_of_rank
from e2e.sharding.step_model import Problem, State, state_of
from e2e.sharding.task import BACKWARD, FORWARD, KINDS, OptionCosts, ShardingTask, TransferTimes
from e2e.step.arrays import Floats
from lab.command_line import program, run
from lab.data.data_folder import data_folder

OURS, ORACLE = "ours", "oracle"
NAMES = (OURS, *GREEDY, ORACLE)


@dataclass(frozen=True)
class Errors:
    """Standard deviation of the logarithm of true over predicted time. A deviation s is a mean error of about 0.8 s: by
    default 22 % of a lookup (forward kernels of the recorded DLRM step, ``python -m lab.bench.unseen_kernels lookups``;
    backward passes are more accurate) and 11 % of a collective (A100 from 1 MiB up, with the whole system left out of
    the fit, docs/collectives.md).
    """

    lookup: float = 0.275
    collective: float = 0.14


@dataclass(frozen=True)
class Outcome:
    """One task: seconds of the true step by sharder (``None``: does not fit), and the predicted seconds."""

    tables: int
    gpus: int
    batch_size: int
    true: Mapping[str, float | None]
    predicted: Mapping[str, float | None]

    @property
    def regret(self) -> float:
        """Relative excess of our plan's time over the best of the seven."""
        return self._true(OURS) / self._best() - 1

    @property
    def oracle_regret(self) -> float | None:
        """Relative excess of our plan's time over the best known with true costs (``None``: not planned with these)."""
        oracle = self.true[ORACLE]
        return None if oracle is None else self._true(OURS) / min(self._best(), oracle) - 1

    @property
    def against_greedy(self) -> float:
        """Relative difference of our step to that of the best greedy plan; below zero: shorter."""
        greedy = [each for name, each in self.true.items() if name in GREEDY and each is not None]
        return self._true(OURS) / min(greedy, default=np.inf) - 1

    def beats_all(self, seconds: Mapping[str, float | None]) -> bool:
        """True if our plan is faster than every greedy one that fits."""
        ours = seconds[OURS]
        others = [each for name, each in seconds.items() if name in GREEDY and each is not None]
        return ours is not None and all(ours < each for each in others)

    def _true(self, name: str) -> float:
        found = self.true[name]
        assert found is not None
        return found

    def _best(self) -> float:
        return min(each for name, each in self.true.items() if name != ORACLE and each is not None)


def random_tables(
    generator: np.random.Generator, count: int, popularity: Sequence[IndexStatistics]
) -> list[EmbeddingTable]:
    """Random tables with production-like sizes: rows log-uniform, pooling lognormal; popularity of a random data set
    each.
    """
    tables = []
    for place in range(count):
        rows = int(10 ** generator.uniform(3.5, 7.3))
        pooling = float(np.clip(generator.lognormal(2.0, 1.2), 1.0, 200.0))
        shape = popularity[int(generator.integers(len(popularity)))]
        width = int(generator.choice([32, 64, 128, 256]))
        tables.append(
            EmbeddingTable(f"t{place}", rows, width, pooling, "float32", shape.resized(rows), "rowwise_adagrad")
        )
    return tables


# --- popularity of rows in public data sets ---------------------------------------------------------
_NAME = re.compile(r"\S*_t(?P<tables>\d+)_bs(?P<batch>\d+)\S*\.pt")
_COUNT = re.compile(r"Avg # of (indices|unique cols): (\d+)")
_BIN = re.compile(r"\((\d+)(?:, (\d+)\]|\+): ([0-9.]+)")
_RELIABLE = 0.01  # shares from here on are known to 5 %


@dataclass(frozen=True)
class ReuseHistogram:
    """One data set of ``locality_stats_*.txt`` of facebookresearch/dlrm_datasets (MIT): ``tables`` together have
    ``lookups`` of ``unique`` distinct rows in a batch of ``batch_size``.

    ``unique_shares``, ``lookup_shares``: share of the distinct rows, and of the lookups that go to them, by how often
    the batch touches a row: bins of ``REUSE_EDGES``, (17,). They are rounded to three digits: where a bin's rows are
    too few to be printed, they follow from its lookups.
    """

    name: str
    tables: int
    batch_size: int
    lookups: int
    unique: int
    unique_shares: tuple[float, ...]
    lookup_shares: tuple[float, ...]

    @property
    def pooling(self) -> float:
        """Mean number of lookups per sample and table."""
        return self.lookups / (self.tables * self.batch_size)

    def statistics(self, rows: int | None = None) -> IndexStatistics:
        """Row popularity in the mean table of the data set, stretched to ``rows`` rows if given."""
        bins = [each for each in map(self._bin, range(REUSE_BINS)) if each is not None]
        found = statistics_of_counts(bins, None, f"dlrm_datasets {self.name}")
        return found if rows is None else found.resized(rows)

    def _bin(self, place: int) -> CountBin | None:
        above, up_to = REUSE_EDGES[place], REUSE_EDGES[place + 1]
        lookups = self.lookup_shares[place] * self.lookups / self.tables
        rows = self.unique_shares[place] * self.unique / self.tables
        if lookups <= 0:
            return None
        typical = (above * min(up_to, 4 * above)) ** 0.5 if above else 1.0
        mean = lookups / rows if self.unique_shares[place] >= _RELIABLE else typical
        mean = min(max(mean, above + 1), up_to)
        return CountBin(above, up_to, lookups / mean, mean)


def read_histograms(path: Path) -> dict[str, ReuseHistogram]:
    """Read every data set of the file ``path`` by name; ``InputError`` names a missing or malformed file."""
    try:
        lines = read_text(path, "table").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text ({error.reason}); fetch the file again") from None
    found = {}
    for name, section in _sections(lines):
        try:
            found[name] = _histogram(name, section)
        except ValueError as error:
            raise InputError(f"{path}: {name}: {error}; fetch the file again") from None
    if not found:
        raise InputError(f"{path}: no data set (a line such as fbgemm_t856_bs65536_0.pt); give a locality_stats file")
    return found


def _sections(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [place for place, line in enumerate(lines) if _NAME.fullmatch(line.strip())]
    ends = [*starts, len(lines)][1:]
    for start, end in zip(starts, ends, strict=True):
        yield lines[start].strip(), list(lines[start + 1 : end])


def _histogram(name: str, section: Sequence[str]) -> ReuseHistogram:
    counts = {match[1]: int(match[2]) for line in section if (match := _COUNT.match(line))}
    shares = [float(match[3]) for line in section if (match := _BIN.match(line))]
    if set(counts) != {"indices", "unique cols"} or len(shares) != 2 * REUSE_BINS:
        raise ValueError(f"needs two counts and two histograms of {REUSE_BINS} bins, has {len(counts)}, {len(shares)}")
    match = _NAME.fullmatch(name)
    assert match is not None
    sizes = (int(match["tables"]), int(match["batch"]), counts["indices"], counts["unique cols"])
    return ReuseHistogram(name, *sizes, tuple(shares[:REUSE_BINS]), tuple(shares[REUSE_BINS:]))


def popularities(data: Path) -> list[IndexStatistics]:
    """Row popularities of the published data sets, or Zipf distributions if ``data`` has none."""
    files = sorted((data / "dlrm_datasets").glob("locality_stats_*.txt"))
    if not files:
        return [zipf(10**6, exponent) for exponent in (0.0, 0.6, 0.9, 1.05, 1.2)]
    return [histogram.statistics() for file in files for histogram in read_histograms(file).values()]


def random_task(seed: int, gpu: str, popularity: Sequence[IndexStatistics]) -> ShardingTask:
    """Random task of 20 to 60 tables on 4 or 8 GPUs."""
    generator = np.random.default_rng(seed)
    tables = random_tables(generator, int(generator.integers(20, 61)), popularity)
    cluster = load_cluster(gpu, int(generator.choice([4, 8])))
    return ShardingTask(tuple(tables), cluster, int(generator.choice([512, 1024, 2048, 4096])))


def run_task(task: ShardingTask, errors: Errors, effort: SearchEffort, seed: int, truths: int = 1) -> list[Outcome]:
    """Plans by all sharders, and their times for ``truths`` draws of true costs. They plan before the draws; the oracle
    plans only with the first draw.
    """
    problem = make_problem(task)
    planning = find_plan(problem, effort)
    plans: dict[str, State | None] = {
        OURS: planning.best.state,
        **{name: None if each is None else each.state for name, each in planning.greedy.items()},
    }
    predicted = {name: None if state is None else simulated_seconds(state) for name, state in plans.items()}
    outcomes = []
    for place in range(truths):
        truth = perturbed(problem, errors, np.random.default_rng([seed, place + 1]))
        true = {name: None if state is None else _moved(truth, state) for name, state in plans.items()}
        # With true costs no caution is needed.
        oracle = find_plan(truth, replace(effort, cautious=False)).best.simulated if place == 0 else None
        outcomes.append(Outcome(len(task.tables), task.ranks, task.batch_size, true | {ORACLE: oracle}, predicted))
    return outcomes


def _moved(truth: Problem, state: State) -> float:
    return simulated_seconds(state_of(truth, state.placements()))


@dataclass(frozen=True, eq=False)
class _WrongCosts(OptionCosts):
    """Costs with errors. ``factors`` (options, 2): true over predicted, forward and backward."""

    factors: Floats = None  # type: ignore[assignment]

    def kernel(self, options: Sequence[int]) -> tuple[float, float]:
        numbers = list(options)
        seconds = super().kernel(numbers)
        # `shard` already includes the factors; the mean factor of a kernel is that of its tables, weighted by their
        # times.
        load = self.shard[numbers][:, [FORWARD, BACKWARD]]
        mean = load.sum(axis=0) / np.maximum((load / self.factors[numbers]).sum(axis=0), 1e-30)
        return seconds[0] * float(mean[0]), seconds[1] * float(mean[1])


def perturbed(problem: Problem, errors: Errors, generator: np.random.Generator) -> Problem:
    """The same task with other times."""
    costs, task = problem.costs, problem.task
    of_table = generator.normal(0, errors.lookup, (len(task.tables), 2))
    tables = [option.table for option in costs.options]
    factors = np.exp(of_table[tables] + generator.normal(0, errors.lookup / 2, (len(tables), 2)))
    shard = costs.shard.copy()
    shard[:, [FORWARD, BACKWARD]] *= factors
    scale: dict[str, float] = {kind: float(np.exp(generator.normal(0, errors.collective))) for kind in KINDS}
    wrong = _WrongCosts(
        costs.options,
        shard,
        costs.everywhere,
        costs.all_reduce * scale["all_reduce"],
        costs.launch,
        costs.alone * factors,
        costs.lookups,
        costs.pieces,
        costs.update,
        costs.half_width,
        factors,
    )
    cluster = task.cluster
    times = TransferTimes(collective_cost_model(cluster), task.ranks, cluster.nodes, scale)
    return Problem(task, wrong, times)


# --- exhaustive search -----------------------------------------------------------------------------
def small_task(seed: int, gpu: str, popularity: Sequence[IndexStatistics]) -> ShardingTask:
    """Four tables on three GPUs, or five on two: few enough for an exhaustive search of placements."""
    generator = np.random.default_rng([seed, 2])
    gpus = int(generator.choice([2, 3]))
    tables = random_tables(generator, 4 if gpus == 3 else 5, popularity)
    cluster: Cluster = load_cluster(gpu, gpus)
    return ShardingTask(tuple(tables), cluster, int(generator.choice([512, 2048, 8192])))


class ExactTimes:
    """Exact step times of plans of one problem, with a cache of kernels."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, ...], tuple[float, float]] = {}

    def seconds(self, state: State) -> float:
        """Return the time of a step.

        An upper bound if different ranks have the most forward and the most backward work.
        """
        groups = [options_of_rank(state, rank) for rank in range(state.problem.ranks)]
        placed = np.array([self._kernel(state, group["placed"]) for group in groups]).max(axis=0)
        rows, copies = (self._kernel(state, groups[0][name]) for name in ("rows", "copies"))
        pieces = replace(
            state.problem.model.pieces(state.loads.max(axis=0), state.totals),
            placed_forward=placed[0],
            placed_backward=placed[1],
            row_forward=np.array(rows[0]),
            row_backward=np.array(rows[1]),
            copy_forward=np.array(copies[0]),
            copy_backward=np.array(copies[1]),
        )
        return float(state.problem.model.combine(pieces))

    def _kernel(self, state: State, options: list[int]) -> tuple[float, float]:
        key = tuple(sorted(options))
        if key not in self._kernels:
            self._kernels[key] = state.problem.costs.kernel(key) if key else (0.0, 0.0)
        return self._kernels[key]


def optimum(problem: Problem) -> float:
    """Seconds of the best of all placements, kernels priced exactly; infinite if none fits."""
    exact, state, best = ExactTimes(), State(problem), np.inf
    choices = [
        [(number, ranks) for number in numbers for ranks in _placements(problem.costs.options[number], problem.ranks)]
        for numbers in problem.of_table
    ]
    for plan in itertools.product(*choices):
        for table, choice in enumerate(plan):
            if state.choices[table] != choice:
                state.put(table, choice)
        if state.fits():
            best = min(best, exact.seconds(state))
    return float(best)


def _placements(option: Option, ranks: int) -> list[tuple[int, ...]]:
    everywhere = tuple(range(ranks))
    return list(itertools.combinations(everywhere, option.shards)) if option.placed else [everywhere]


def small_gap(task: ShardingTask, effort: SearchEffort) -> float:
    """Relative excess of the found plan's time over the optimum."""
    problem = make_problem(task)
    return ExactTimes().seconds(find_plan(problem, effort).best.state) / optimum(problem) - 1


@dataclass(frozen=True)
class Effort:
    """Numbers of tasks, of draws of true costs for each, of tasks solved exhaustively; and their GPU."""

    tasks: int
    truths: int
    small: int
    gpu: str
    search: SearchEffort


def sharding_command(
    tasks: Annotated[int, typer.Option(help="Random tasks.")] = 20,
    truths: Annotated[int, typer.Option(min=1, help="Draws of true costs for every task.")] = 5,
    small: Annotated[int, typer.Option(help="Tasks that are solved exhaustively too.")] = 10,
    large: Annotated[bool, typer.Option("--large", help="Plan 1,000 tables over 64 GPUs too.")] = False,
    gpu: Annotated[str, typer.Option()] = "a100-sxm-40gb",
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements: how popular rows are.")] = None,
    seconds: Annotated[float, typer.Option(help="Search per task.")] = 8.0,
    output: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
) -> None:
    """Plan random tasks and compare the plans with greedy ones, with the optimum, and with right costs."""
    popularity = popularities(data_folder(data))
    given = Effort(tasks, truths, small, gpu, SearchEffort(seconds))
    record: dict[str, object] = {}
    if small:
        record["small"] = solve_small(given, popularity)
    if tasks:
        record["tasks"] = solve_tasks(given, popularity)
    if large:
        record["large"] = solve_large(given, popularity)
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def solve_small(given: Effort, popularity: Sequence[IndexStatistics]) -> list[float]:
    """Gaps to the optimum for tasks solved exhaustively."""
    gaps = [small_gap(small_task(seed, given.gpu, popularity), given.search) for seed in range(given.small)]
    print(
        f"{len(gaps)} small tasks: plan above the optimum by {np.mean(gaps):.2%} on average, {max(gaps):.2%} at worst"
    )
    return gaps


def solve_tasks(given: Effort, popularity: Sequence[IndexStatistics]) -> list[list[dict[str, Any]]]:
    """Print the table of the published experiment for the first draw of true costs, and a summary of all draws."""
    print("task  tables gpus batch  " + " ".join(f"{name:>17}" for name in NAMES) + "   true step, ms")
    outcomes = []
    for seed in range(given.tasks):
        task = random_task(seed, given.gpu, popularity)
        found = run_task(task, Errors(), given.search, seed, given.truths)
        outcomes.append(found)
        first = found[0]
        cells = (first.true[name] for name in NAMES)
        texts = " ".join(f"{'does not fit' if each is None else f'{each * 1e3:.3f}':>17}" for each in cells)
        print(f"{seed:4}  {first.tables:6} {first.gpus:4} {first.batch_size:5}  {texts}", flush=True)
    _summary(outcomes)
    return [[asdict(outcome) for outcome in found] for found in outcomes]


def _summary(outcomes: list[list[Outcome]]) -> None:
    """Print the summary of the tasks, for every draw of true costs."""
    count, draws = len(outcomes), len(outcomes[0])
    predicted = sum(found[0].beats_all(found[0].predicted) for found in outcomes)
    true = [sum(found[draw].beats_all(found[draw].true) for found in outcomes) for draw in range(draws)]
    every = [outcome for found in outcomes for outcome in found]
    right = sum(outcome.regret <= 0.1 for outcome in every)
    regrets = np.array([outcome.regret for outcome in every])
    oracle = np.array([found[0].oracle_regret for found in outcomes])
    against = np.array([outcome.against_greedy for outcome in every])
    lost = against[against >= 0]
    print(f"better than every greedy sharder: {predicted} of {count} as predicted, with true costs")
    print(f"  {', '.join(map(str, true))} by draw: {np.mean(true):.1f} of {count} on average")
    if lost.size:
        print(
            f"  where it is not: slower than the best of them by {lost.mean():.2%} on average, "
            f"{lost.max():.2%} at worst"
        )
    print(f"  step against the best of the greedy ones: {against.mean():+.2%} on average")
    print(f"fastest of the seven or within 10 %: {right} of {len(every)}")
    print(f"regret against the best of the seven: mean {regrets.mean():.2%}, worst {regrets.max():.2%}")
    print(f"regret against planning with true costs: mean {oracle.mean():.2%}, worst {oracle.max():.2%}")


def solve_large(given: Effort, popularity: Sequence[IndexStatistics]) -> dict[str, float]:
    """Plan 1,000 tables over 64 GPUs."""
    begin = time.perf_counter()
    tables = random_tables(np.random.default_rng(3), 1000, popularity)
    cluster = load_cluster(given.gpu, 64)
    planning = find_plan(make_problem(ShardingTask(tuple(tables), cluster, 512)))
    seconds = time.perf_counter() - begin
    greedy = [each.simulated for each in planning.greedy.values() if each is not None]
    best = min(greedy) if greedy else float("nan")
    print(
        f"1,000 tables, 64 GPUs: planned in {seconds:.1f} s; step {planning.best.simulated * 1e3:.2f} ms, best greedy "
        f"{best * 1e3:.2f} ms, bound {planning.bound * 1e3:.2f} ms"
    )
    return {"seconds": seconds, "step": planning.best.simulated, "greedy": best, "bound": planning.bound}


if __name__ == "__main__":
    sys.exit(run(program(sharding_command), "lab.bench.sharding"))
