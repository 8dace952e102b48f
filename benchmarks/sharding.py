"""The sharding figures: random tasks against greedy sharders, small tasks against the optimum, and a large one in time.

python benchmarks/sharding.py [--tasks 20] [--truths 5] [--small 10] [--large] [--table-wise] [--gpu GPU] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from costmodel.datasets.data_folder import data_folder
from costmodel.machines.cluster import load_cluster
from e2e.sharding import experiment
from e2e.sharding.planner import SearchEffort, find_plan, make_problem
from e2e.sharding.problem.task import ShardingTask
from e2e.sharding.search.greedy import GREEDY

NAMES = (experiment.OURS, *GREEDY, experiment.ORACLE)


def main() -> None:
    """Runs the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--truths", type=int, default=5, help="draws of true costs for every task")
    parser.add_argument("--small", type=int, default=10)
    parser.add_argument("--large", action="store_true", help="1,000 tables over 64 GPUs")
    parser.add_argument("--table-wise", action="store_true", help="our plans, too, keep tables whole")
    parser.add_argument("--gpu", default="a100-sxm-40gb")
    parser.add_argument("--data", type=Path, default=data_folder())
    parser.add_argument("--lookup-error", type=float, default=experiment.Errors.lookup)
    parser.add_argument("--collective-error", type=float, default=experiment.Errors.collective)
    parser.add_argument("--seconds", type=float, default=8.0, help="search per task")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    popularity = experiment.popularities(given.data)
    record: dict[str, object] = {}
    if given.small:
        record["small"] = small(given, popularity)
    if given.tasks:
        record["tasks"] = random_tasks(given, popularity)
    if given.large:
        record["large"] = large(given, popularity)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def small(given: argparse.Namespace, popularity: list) -> list[float]:
    """Gap to the optimum of tasks solved exhaustively."""
    effort = SearchEffort(given.seconds, deterministic=0.2)
    gaps = [
        experiment.small_gap(experiment.small_task(seed, given.gpu, popularity), effort) for seed in range(given.small)
    ]
    print(
        f"{len(gaps)} small tasks: plan above the optimum by {np.mean(gaps):.2%} on average, {max(gaps):.2%} at worst"
    )
    return gaps


def random_tasks(given: argparse.Namespace, popularity: list) -> list[list[dict]]:
    """The table of the published experiment, for the first draw of true costs; the summary is of all draws."""
    errors = experiment.Errors(given.lookup_error, given.collective_error)
    effort = SearchEffort(given.seconds, deterministic=0.2)
    print("task  tables gpus batch  " + " ".join(f"{name:>17}" for name in NAMES) + "   true step, ms")
    outcomes = []
    for seed in range(given.tasks):
        task = experiment.random_task(seed, given.gpu, popularity)
        if given.table_wise:
            task = experiment.with_whole_tables_only(task)
        found = experiment.run_task(task, errors, effort, seed, given.truths)
        outcomes.append(found)
        first = found[0]
        cells = (first.true[name] for name in NAMES)
        texts = " ".join(f"{'does not fit' if each is None else f'{each * 1e3:.3f}':>17}" for each in cells)
        print(f"{seed:4}  {first.tables:6} {first.gpus:4} {first.batch_size:5}  {texts}", flush=True)
    _summary(outcomes)
    return [[asdict(outcome) for outcome in found] for found in outcomes]


def _summary(outcomes: list[list[experiment.Outcome]]) -> None:
    """Of the tasks, for every draw of true costs."""
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


def large(given: argparse.Namespace, popularity: list) -> dict[str, float]:
    """1,000 tables over 64 GPUs."""
    begin = time.perf_counter()
    tables = experiment.random_tables(np.random.default_rng(3), 1000, popularity)
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
    main()
