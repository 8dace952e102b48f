"""The experiment of ``lab/bench/sharding.py``: what its figures mean, and that right costs change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.operators.lookups import zipf
from e2e.sharding.local_search import GREEDY
from e2e.sharding.planner import SearchEffort, find_plan, make_problem, simulated_seconds
from e2e.sharding.step_model import state_of
from lab.bench.sharding import ORACLE, OURS, Errors, Outcome, perturbed, read_histograms, run_task, small_task
from lab.data.data_folder import data_folder

DATA = data_folder() / "dlrm_datasets"
QUICK = SearchEffort(seconds=0.5, kicks=3)
FIRST, SECOND, *OTHERS = GREEDY


def outcome(ours: float, first: float | None, second: float | None, oracle: float | None = None) -> Outcome:
    others: dict[str, float | None] = dict.fromkeys(OTHERS)
    seconds = {OURS: ours, FIRST: first, SECOND: second, ORACLE: oracle, **others}
    return Outcome(20, 4, 512, seconds, seconds)


def test_regret_is_against_the_best_plan_that_fits():
    behind = outcome(1.2, 1.0, 1.5)
    assert behind.regret == pytest.approx(0.2) and behind.against_greedy == pytest.approx(0.2)
    ahead = outcome(0.8, None, 1.0)
    assert ahead.regret == 0.0 and ahead.against_greedy == pytest.approx(-0.2)


def test_the_oracle_counts_only_where_it_planned():
    assert outcome(1.2, 1.0, 1.5).oracle_regret is None
    assert outcome(1.2, 1.0, 1.5, oracle=0.8).oracle_regret == pytest.approx(0.5)
    assert outcome(1.2, 1.0, 1.5, oracle=1.1).oracle_regret == pytest.approx(0.2)  # ours was worse than another


def test_true_costs_without_errors_are_the_models_and_with_errors_others():
    problem = make_problem(small_task(0, "a100-sxm-80gb", [zipf(10**5, 0.9)]))
    state = find_plan(problem, QUICK).best.state

    def seconds(errors: Errors, seed: int = 0) -> float:
        true = perturbed(problem, errors, np.random.default_rng(seed))
        return simulated_seconds(state_of(true, state.placements()))

    assert seconds(Errors(0.0, 0.0)) == pytest.approx(simulated_seconds(state), rel=1e-12)
    lookups, collectives = seconds(Errors(0.3, 0.0)), seconds(Errors(0.0, 0.3))
    assert len({round(each, 12) for each in (lookups, collectives, simulated_seconds(state))}) == 3
    assert seconds(Errors(0.3, 0.0)) == lookups != seconds(Errors(0.3, 0.0), seed=1)


def test_a_task_gives_every_sharder_its_predicted_and_its_true_time():
    task = small_task(1, "a100-sxm-80gb", [zipf(10**5, 0.9)])
    first, second = run_task(task, Errors(), QUICK, seed=0, truths=2)
    assert first.predicted == second.predicted and first.true != second.true
    assert set(first.true) == {OURS, ORACLE, *GREEDY} and set(first.predicted) == {OURS, *GREEDY}
    assert first.true[ORACLE] is not None and second.true[ORACLE] is None
    assert (first.tables, first.gpus) == (len(task.tables), task.ranks) and first.regret >= 0.0


# --- popularity in public data sets ---------------------------------------------------------------

SECTION = """toy_t2_bs10.pt
Locality stats after processing 1 batches of size 10
Avg # of indices: {lookups}
Avg # of unique cols: {unique}
Avg col size: 1.5
Histogram of col sizes:
{rows}
[0, 1, 2]
Ratio of index distribution at different column sizes:
{shares}
"""


def section(lookups: int, unique: int, rows: np.ndarray, shares: np.ndarray) -> str:
    """A file with one data set of two tables."""
    names = ["(0, 1]", *(f"({2**k}, {2 ** (k + 1)}]" for k in range(15)), "(32768+"]
    lines = [
        "\n".join(f"{name}: {share:.3f}" for name, share in zip(names, each, strict=True)) for each in (rows, shares)
    ]
    return SECTION.format(lookups=lookups, unique=unique, rows=lines[0], shares=lines[1])


def test_a_histogram_gives_back_the_data_it_was_made_of(tmp_path):
    truth = zipf(50_000, 1.1)
    shares = (each.clip(0.0) + 0.0 for each in (truth.reuse_factors(100_000), truth.lookup_shares(100_000)))
    path = tmp_path / "stats.txt"
    path.write_text(section(200_000, round(2 * truth.unique_rows(100_000)), *shares))
    histogram = read_histograms(path)["toy_t2_bs10.pt"]
    assert (histogram.tables, histogram.batch_size, histogram.pooling) == (2, 10, 10_000)
    found = histogram.statistics()
    for lookups in (1000, 10_000, 100_000):
        assert found.unique_rows(lookups) == pytest.approx(truth.unique_rows(lookups), rel=0.04)
    assert found.hit_rate(100_000, 1000) == pytest.approx(truth.hit_rate(100_000, 1000), abs=0.02)
    assert histogram.statistics(400).rows == 400


@pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} (public histograms) is absent")
@pytest.mark.parametrize(("year", "sets"), [(2021, 17), (2022, 16)])
def test_published_histograms_are_met(year, sets):
    known = read_histograms(DATA / f"locality_stats_{year}.txt")
    assert len(known) == sets
    for histogram in list(known.values())[:3]:
        found, lookups = histogram.statistics(), histogram.lookups / histogram.tables
        assert found.unique_rows(lookups) == pytest.approx(histogram.unique / histogram.tables, rel=0.015)
        assert found.reuse_factors(lookups) == pytest.approx(histogram.unique_shares, abs=0.005)
        assert found.lookup_shares(lookups) == pytest.approx(histogram.lookup_shares, abs=0.01)
