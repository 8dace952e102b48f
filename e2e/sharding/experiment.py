"""The published experiment on sharding, by simulation: random tasks, seven sharders, costs that are wrong.

Every sharder plans with the models' costs; each plan is then simulated with "true" costs, the models' times multiplied
by lognormal factors: of each table and direction, of each way to cut it (half as wrong again), and of each collective.
Greedy sharders know no costs; what errors do to our choice is the question. ``oracle`` plans with the true costs. Our
planner draws errors, too, of the size that the models' own intervals tell and from other seeds; it never sees these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.collectives import collective_cost_model
from costmodel.embedding.embedding_tables import EmbeddingTable
from costmodel.embedding.reuse_histograms import read_histograms
from costmodel.machines.cluster import Cluster, load_cluster
from costmodel.operators.index_statistics import IndexStatistics, zipf
from e2e.sharding.planner import SearchEffort, find_plan, make_problem, simulated_seconds
from e2e.sharding.polish import ExactTimes
from e2e.sharding.problem.option_costs import BACKWARD, FORWARD, OptionCosts
from e2e.sharding.problem.placement import Option
from e2e.sharding.problem.state import Problem, State, state_of
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.problem.transfers import KINDS, TransferTimes
from e2e.sharding.search.greedy import GREEDY
from e2e.step.arrays import Floats

OURS, ORACLE = "ours", "oracle"


@dataclass(frozen=True)
class Errors:
    """Standard deviation of the logarithm of true over predicted time. A deviation s is a mean error of about 0.8 s:
    by default 22 % of a lookup (forward kernels of the recorded DLRM step, ``python benchmarks/embedding_kernels.py``;
    backward passes are nearer) and 11 % of a collective (A100 from 1 MiB up, if the whole system is left out of the
    fit, docs/collectives.md).
    """

    lookup: float = 0.275
    collective: float = 0.14


@dataclass(frozen=True)
class Outcome:
    """One task: seconds of the true step by sharder (``None``: does not fit), and as planned (predicted)."""

    tables: int
    gpus: int
    batch_size: int
    true: Mapping[str, float | None]
    predicted: Mapping[str, float | None]

    @property
    def regret(self) -> float:
        """How much slower our plan is than the best of the seven."""
        return self._true(OURS) / self._best() - 1

    @property
    def oracle_regret(self) -> float | None:
        """How much slower our plan is than the best known with true costs (``None``: nobody planned with these)."""
        oracle = self.true[ORACLE]
        return None if oracle is None else self._true(OURS) / min(self._best(), oracle) - 1

    @property
    def against_greedy(self) -> float:
        """How much longer our step is than that of the best greedy plan, as a share of it; below zero: shorter."""
        greedy = [each for name, each in self.true.items() if name in GREEDY and each is not None]
        return self._true(OURS) / min(greedy, default=np.inf) - 1

    def beats_all(self, seconds: Mapping[str, float | None]) -> bool:
        """Whether our plan is faster than every greedy one that fits."""
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
    """Sizes as in production-like tables: rows log-uniform, pooling lognormal; popularity of a data set each."""
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


def popularities(data: Path) -> list[IndexStatistics]:
    """Of the published data sets; of Zipf distributions where ``data`` has none."""
    files = sorted((data / "dlrm_datasets").glob("locality_stats_*.txt"))
    if not files:
        return [zipf(10**6, exponent) for exponent in (0.0, 0.6, 0.9, 1.05, 1.2)]
    return [histogram.statistics() for file in files for histogram in read_histograms(file).values()]


def random_task(seed: int, gpu: str, popularity: Sequence[IndexStatistics]) -> ShardingTask:
    """20 to 60 tables on 4 or 8 GPUs."""
    generator = np.random.default_rng(seed)
    tables = random_tables(generator, int(generator.integers(20, 61)), popularity)
    cluster = load_cluster(gpu, int(generator.choice([4, 8])))
    return ShardingTask(tuple(tables), cluster, int(generator.choice([512, 1024, 2048, 4096])))


def run_task(task: ShardingTask, errors: Errors, effort: SearchEffort, seed: int, truths: int = 1) -> list[Outcome]:
    """Plans by all sharders, and their times for so many draws of true costs. They plan before anything is drawn; the
    oracle plans with the first draw alone.
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
        # Who knows the true costs needs no caution.
        oracle = find_plan(truth, replace(effort, rebuilds=0)).best.simulated if place == 0 else None
        outcomes.append(Outcome(len(task.tables), task.ranks, task.batch_size, true | {ORACLE: oracle}, predicted))
    return outcomes


def _moved(truth: Problem, state: State) -> float:
    return simulated_seconds(state_of(truth, state.placements()))


@dataclass(frozen=True, eq=False)
class _WrongCosts(OptionCosts):
    """``factors`` (options, 2): true over predicted, forward and backward."""

    factors: Floats = None  # type: ignore[assignment]

    def kernel(self, options: Sequence[int]) -> tuple[float, float]:
        numbers = list(options)
        seconds = super().kernel(numbers)
        # `shard` is multiplied already; the mean factor of a kernel is that of its tables, by their times.
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
    """Four tables on three GPUs, or five on two: few enough for every placement to be looked at."""
    generator = np.random.default_rng([seed, 2])
    gpus = int(generator.choice([2, 3]))
    tables = random_tables(generator, 4 if gpus == 3 else 5, popularity)
    cluster: Cluster = load_cluster(gpu, gpus)
    return ShardingTask(tuple(tables), cluster, int(generator.choice([512, 2048, 8192])))


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
    """How much slower the plan found is than the optimum."""
    problem = make_problem(task)
    return ExactTimes().seconds(find_plan(problem, effort).best.state) / optimum(problem) - 1


def with_whole_tables_only(task: ShardingTask) -> ShardingTask:
    """The same task for table-wise plans alone, as all greedy ones are."""
    return replace(task, rules=replace(task.rules, kinds=("table-wise",)))
