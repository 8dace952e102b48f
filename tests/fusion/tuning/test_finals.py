"""The fastest whole network is shipped: engines whose calls take the times that the test says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.operators.layers import Conv2d, FusedConvs
from fusion.comparing.timing import LEAST_ROUNDS, Sampling
from fusion.model.conv_graph import Graph, Node, Site, cover, unfused_plan
from fusion.tuning.clock import StageClock, TimeLimit
from fusion.tuning.finals import MOST_REPEATS, differ_clearly, finalists, race
from fusion.tuning.job import TuningJob
from fusion.tuning.network_tuning import TunedKernels
from fusion.tuning.rehearsal import Rehearsed

ROUNDS = Sampling(rounds=15, seconds=0.0)


@dataclass
class Fake:
    """Each block's calls take ``seconds(index of the block)``."""

    seconds: Callable[[int], float]
    blocks: list[int] = field(default_factory=list)

    def block(self, warmup, calls, seconds):
        self.blocks.append(len(self.blocks))
        return np.full(3, self.seconds(self.blocks[-1]))


def steady(seconds: float) -> Fake:
    """With noise that all engines share: a machine with neighbours."""
    return Fake(lambda index: seconds * (1 + 0.3 * (index % 4)))


@pytest.mark.parametrize("fastest", ["fused", "partly fused", "unfused"])
def test_the_fastest_is_shipped_whichever_it_is(fastest):
    fakes = {name: steady(1.0 if name == fastest else 1.03) for name in ("fused", "partly fused", "unfused")}
    runtime = steady(2.0)
    found = race({name: (0, fake) for name, fake in fakes.items()}, {"onnxruntime": runtime}, math.inf, ROUNDS)
    assert found.winner == fastest and found.differ_clearly
    assert [entry.rounds for entry in found.entries] == [15] * 3
    assert found.entry(fastest).ratio_to_unfused == pytest.approx(1.0 if fastest == "unfused" else 1 / 1.03)
    assert found.others["onnxruntime"] == pytest.approx(2.0 * 1.3)


def test_fusion_that_is_slower_in_most_rounds_loses_though_it_was_faster_first():
    """Two chances to look faster shipped a slower network: all rounds count together."""
    fused = Fake(lambda index: 0.99 if index % 2 else 1.02)
    found = race({"fused": (3, fused), "unfused": (0, Fake(lambda index: 1.0))}, {}, math.inf, ROUNDS)
    assert found.winner == "unfused"


def test_close_networks_are_timed_again_but_not_for_ever():
    fused = Fake(lambda index: 0.999 if index % 2 else 1.001)
    apart = Fake(lambda index: 1.0)
    said: list[str] = []
    found = race({"fused": (3, fused), "unfused": (0, apart)}, {}, math.inf, ROUNDS, said.append)
    assert not found.differ_clearly and len(said) == MOST_REPEATS - 1
    assert found.entries[0].rounds == MOST_REPEATS * 15 == len(apart.blocks)


def test_no_round_is_added_when_time_is_up():
    engines = {"fused": (3, Fake(lambda i: 0.999 if i % 2 else 1.001)), "unfused": (0, Fake(lambda i: 1.0))}
    assert race(engines, {}, time.monotonic() - 1, ROUNDS).entries[0].rounds == LEAST_ROUNDS


def test_of_equals_the_simpler_one_is_shipped():
    found = race({"fused": (3, steady(1.0)), "unfused": (0, steady(1.0))}, {}, math.inf, ROUNDS)
    assert found.winner == "unfused" and not found.differ_clearly


def test_a_single_network_is_timed_once():
    alone = steady(1.0)
    found = race({"unfused": (0, alone)}, {}, math.inf, ROUNDS)
    assert found.winner == "unfused" and found.differ_clearly and len(alone.blocks) == 15
    assert found.to_json()["networks"][0]["ratio_to_unfused"] == 1.0


def test_a_lucky_majority_decides_nothing():
    assert not differ_clearly({"fused": [0.9] * 9 + [1.1] * 6, "unfused": [1.0] * 15})
    assert differ_clearly({"fused": [0.9] * 12 + [1.1] * 3, "unfused": [1.0] * 15})


# --- which networks ------------------------------------------------------------------------------

CONVS = [Conv2d(1, 8 + index, 8, 8, 9 + index, (1, 1)) for index in range(4)]
NODES = tuple(Node(f"n{i}", conv, f"v{i}", None, (), f"v{i + 1}", ()) for i, conv in enumerate(CONVS))
GRAPH = Graph(NODES, (), {})
SITES = [
    Site("a", "", NODES[:2], FusedConvs((CONVS[0], CONVS[1]))),
    Site("b", "", NODES[2:], FusedConvs((CONVS[2], CONVS[3]))),
]


def tuned(plan, fused_seconds):
    seconds = {**dict.fromkeys(CONVS, 1e-6), **{site.operator: s for site, s in zip(SITES, fused_seconds, strict=True)}}
    configs = {operator: {"x": 1} for operator in seconds}
    rehearsed = Rehearsed(plan, configs, {conv: {"x": 2} for conv in CONVS}, seconds)
    return TunedKernels(configs, seconds, rehearsed, (), 0, 0, False)


def test_the_end_is_planned_for_the_networks_that_trials_have_left(monkeypatch):
    """All sites gain clearly: two networks, whose kernels take five seconds each to compile; then the one alone."""

    class Check:
        def compilation_seconds(self, networks):
            return 5.0 * len(list(networks))

    job = TuningJob(SimpleNamespace(graph=GRAPH, sites=SITES), Path(), StageClock(0.0), None)
    job.check = Check()
    limit = TimeLimit(end=100.0, check_seconds=2.0, most_compile_seconds=60.0)
    monkeypatch.setattr(TuningJob, "time_limit", lambda job: limit)
    both = job.finals_limit(tuned(cover(GRAPH, SITES), (1e-6, 1e-6)))
    assert (both.finalists, both.compile_seconds, both.most_compile_seconds) == (2, 10.0, 60.0)
    rehearsed = replace(tuned(unfused_plan(GRAPH), (9e-6, 9e-6)).rehearsed, configs={c: {"x": 2} for c in CONVS})
    alone = replace(tuned(unfused_plan(GRAPH), (9e-6, 9e-6)), rehearsed=rehearsed)
    found = job.finals_limit(alone)
    assert (found.finalists, found.compile_seconds) == (1, 5.0)


def test_sites_that_gain_little_are_left_out_of_one_network():
    found = finalists(GRAPH, SITES, tuned(cover(GRAPH, SITES), (1e-6, 1.98e-6)))
    assert [(each.name, each.fused_sites) for each in found] == [("unfused", 0), ("fused", 2), ("partly fused", 1)]
    partly = found[2]
    assert partly.plan.fuses(SITES[0]) and not partly.plan.fuses(SITES[1])
    assert partly.configs[CONVS[3]] == {"x": 2} and partly.configs[SITES[0].operator] == {"x": 1}
    assert [each.name for each in finalists(GRAPH, SITES, tuned(cover(GRAPH, SITES), (1e-6, 1.98e-6)), False)] == [
        "unfused",
        "fused",
    ]


def test_the_same_network_is_built_once():
    apart = unfused_plan(GRAPH)
    same = tuned(apart, (3e-6, 3e-6))
    same = TunedKernels(same.configs, same.seconds, None, (), 0, 0, False)
    assert [each.name for each in finalists(GRAPH, SITES, same)] == ["unfused"]
    all_gain = finalists(GRAPH, SITES, tuned(cover(GRAPH, SITES), (1e-6, 1e-6)))
    assert [each.name for each in all_gain] == ["unfused", "fused"]


def test_one_network_alone_is_its_own_baseline():
    """Without time for the network without fusion."""
    found = race({"fused": (3, steady(1.0))}, {"onnxruntime": steady(2.0)}, math.inf, ROUNDS)
    assert found.winner == "fused" and found.differ_clearly
    assert found.entry("fused").ratio_to_unfused == 1.0 and found.others["onnxruntime"] == pytest.approx(2.6)


def test_a_comparison_is_not_begun_again_that_would_end_too_late(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fusion.tuning.finals.time.monotonic", lambda: clock[0])

    def block(index: int) -> float:
        clock[0] += 1.0
        return 1.0

    fakes = {name: (0, Fake(block)) for name in ("fused", "unfused")}
    # Fifteen rounds of two engines take 30 s, the least rounds of another comparison 10 s.
    assert len(race(fakes, {}, 39.0, ROUNDS).entries) == 2
    assert len(fakes["fused"][1].blocks) == 15
    clock[0] = 0.0
    race(fakes, {}, 41.0, ROUNDS)
    assert len(fakes["fused"][1].blocks) > 15 + 15
