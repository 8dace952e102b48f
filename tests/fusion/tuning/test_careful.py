"""A model that does not bear what a fast algorithm rounds is built without it, at first and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm")

from costmodel.base.errors import TuningError
from costmodel.operators.layers import Conv2d
from fusion.model.conv_graph import Graph, Node, unfused_plan
from fusion.tuning import job as tuning_job
from fusion.tuning import network_check
from fusion.tuning.clock import StageClock
from fusion.tuning.finals import FinalNetwork
from fusion.tuning.job import TuningJob
from fusion.tuning.network import careful_configs, complete_configs
from fusion.tuning.network_check import CAREFUL, CheckCost, CheckedNetwork, NetworkCheck, first_check
from fusion.tuning.network_tuning import TunedKernels
from schedules.contract.cpu_target import host_target
from schedules.kernels.template_table import template_for
from schedules.tuning.kernel_ranking import KernelGuesses
from schedules.tuning.tuning_records import RecordStore

CPU = host_target(2)
GUESSES = KernelGuesses(CPU)
FAST = Conv2d(1, 64, 14, 14, 64, (3, 3), padding=(1, 1, 1, 1))
OTHER = Conv2d(1, 64, 14, 14, 32, (1, 1))
NODES = (Node("a", FAST, "x", None, (), "y", ()), Node("b", OTHER, "y", None, (), "z", ()))
GRAPH = Graph(NODES, (), {})
PLAN = unfused_plan(GRAPH)


def rounds_more(configs) -> bool:
    return any(template_for(each, CPU).relative_rounding(config) > 1.0 for each, config in configs.items())


@dataclass(frozen=True)
class Network:
    """A network whose direct sums are the only careful algorithm."""

    cpu: object = CPU
    guesses: object = field(default_factory=lambda: GUESSES)
    graph: object = GRAPH
    sites: tuple = ()
    request: object = field(default_factory=lambda: SimpleNamespace(minutes=None, output=None))
    analysis: object = field(default_factory=lambda: SimpleNamespace(sites=()))
    folder: object = None

    def carefully(self) -> Network:
        return replace(self, guesses=self.guesses.carefully())


@dataclass
class Display:
    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def stage(self, name: str) -> None:
        pass


@dataclass(frozen=True)
class Check:
    """Refuses every network that rounds more than direct sums do, or all of them."""

    log: list = field(default_factory=list)
    refuses_all: bool = False
    careful: bool = False
    outputs: object = field(default_factory=lambda: SimpleNamespace(unchecked=None))
    subject: object = field(default_factory=lambda: SimpleNamespace(plan=lambda fused: PLAN, path=None, model=None))

    exposes: tuple = ()
    first: object = None
    checked: object = None
    cost: object = CheckCost(0.0, 0.0)
    objects: object = None

    def compilation_seconds(self, networks) -> float:
        return 0.0

    def require_built(self, name, plan, configs, executable) -> tuple[None, object]:
        return self.require_plan(name, plan, configs)

    def require_plan(self, name, plan, configs) -> tuple[None, object]:
        self.log.append(dict(configs))
        if self.refuses_all or rounds_more(configs):
            raise TuningError("wrong")
        return None, SimpleNamespace(run_seconds=0.0)


def test_careful_configurations_round_no_more_than_direct_sums():
    configs = complete_configs(PLAN, GUESSES, {})
    assert rounds_more(configs) and rounds_more({FAST: configs[FAST]})
    careful = careful_configs(configs, CPU)
    assert not rounds_more(careful) and careful[OTHER] == configs[OTHER]
    space = template_for(FAST, CPU).space(FAST, CPU)
    assert careful[FAST] == next(each for each in space if not rounds_more({FAST: each}))
    measured = next(each for each in space if "winograd_outputs" not in each)
    assert careful_configs(configs, CPU, {FAST: measured, OTHER: {}}) == {FAST: measured, OTHER: configs[OTHER]}


def checked_by(check: Check, monkeypatch) -> None:
    """Nothing is built, and ``check`` says what is right."""
    monkeypatch.setattr(network_check, "subject_of", lambda network, scratch: (check.subject, None))
    monkeypatch.setattr(network_check, "build_network", lambda *arguments: None)
    monkeypatch.setattr(network_check, "network_check", lambda *arguments: check)


def test_the_first_network_is_built_again_without_what_rounds_more(monkeypatch, tmp_path):
    check, display = Check(), Display()
    checked_by(check, monkeypatch)
    found = first_check(Network(), tmp_path, display)
    assert found.careful and display.said == [CAREFUL]
    assert [rounds_more(configs) for configs in check.log] == [True, False]


def test_what_is_wrong_with_direct_sums_too_is_refused(monkeypatch, tmp_path):
    display = Display()
    checked_by(Check(refuses_all=True), monkeypatch)
    with pytest.raises(TuningError, match="wrong"):
        first_check(Network(), tmp_path, display)
    assert not display.said


def job_of(check: Check, tuned: object = None) -> TuningJob:
    """A job behind its first check and its search."""
    job = TuningJob(Network(), Path(), StageClock(0.0), Display())
    job.check, job.tuned = check, tuned
    return job


@pytest.mark.parametrize("careful", [False, True])
def test_the_finals_are_repeated_without_what_rounds_more(monkeypatch, careful):
    """With the fastest of what was measured; at once where the first network has shown it."""
    direct = template_for(FAST, CPU).space(FAST, CPU)[-1]
    fast = complete_configs(PLAN, GUESSES, {})
    tuned = TunedKernels(fast, {}, None, (), 0, 0, False, careful={FAST: direct})
    raced = []

    def race(job, networks, end, careful):
        raced.append([dict(network.configs) for network in networks])
        if any(map(rounds_more, raced[-1])):
            raise TuningError("wrong")
        return careful

    monkeypatch.setattr(TuningJob, "_race", race)
    job = job_of(Check(careful=careful), tuned)
    assert job.race([FinalNetwork("unfused", PLAN, {FAST: fast[FAST]})], 0.0)
    assert raced[-1] == [{FAST: direct, OTHER: fast[OTHER]}]
    assert len(raced) == 1 + (not careful) and job.display.said == ([] if careful else [CAREFUL])


def test_wrong_finals_without_fast_algorithms_are_refused(monkeypatch):
    def race(*arguments, **options):
        raise TuningError("wrong")

    monkeypatch.setattr(TuningJob, "_race", race)
    configs = careful_configs(complete_configs(PLAN, GUESSES, {}), CPU)
    job = job_of(Check(), TunedKernels(configs, {}, None, (), 0, 0, False))
    with pytest.raises(TuningError, match="wrong"):
        job.race([FinalNetwork("unfused", PLAN, configs)], 0.0)
    assert not job.display.said


def test_no_trial_is_spent_on_what_a_careful_network_cannot_have():
    guesses = KernelGuesses(CPU)
    every, careful = guesses.space(FAST), guesses.carefully().space(FAST)
    fast = [config for config in every if rounds_more({FAST: config})]
    assert fast and careful == [config for config in every if config not in fast]
    assert any(config.get("winograd_outputs") for config in careful)  # of 2x2: no less exact than sums
    assert not rounds_more({FAST: guesses.carefully().guess(FAST).config})
    assert list(guesses.carefully().space(OTHER)) == list(guesses.space(OTHER))


def test_records_of_fast_algorithms_are_not_seen_by_a_careful_search(tmp_path):
    """Those of a run before, when other outputs were compared."""
    guesses = KernelGuesses(CPU)
    fast = next(config for config in guesses.space(FAST) if rounds_more({FAST: config}))
    direct = next(config for config in guesses.space(FAST) if not rounds_more({FAST: config}))
    with RecordStore(tmp_path, CPU) as store:
        store.add(FAST, fast, 1e-6)
        store.add(FAST, direct, 2e-6)
        store.add_failure(FAST, {**fast, "tiles": 1}, "run", "")
    careful = RecordStore(tmp_path, CPU, guesses.carefully().allows)
    assert careful.best(FAST).config == direct and not careful.failures(FAST)
    assert RecordStore(tmp_path, CPU, guesses.allows).best(FAST).config == fast


@pytest.mark.parametrize("careful", [False, True])
def test_the_search_hears_what_the_first_check_found(monkeypatch, careful):
    heard = []
    monkeypatch.setattr(tuning_job, "finalists", lambda *arguments, **options: ())
    monkeypatch.setattr(TuningJob, "race", lambda job, *more: heard.append(job.network.guesses.careful))
    monkeypatch.setattr(TuningJob, "measure", lambda job, network, *more: heard.append(network.guesses.careful))
    job = job_of(Check(careful=careful))
    job.search(0.0)
    job.finals()
    assert heard == [careful, careful]


def test_only_kernels_that_the_first_network_lacks_are_compiled_at_the_end():
    """The first network took 10 s for two kernels; one of them is there in another configuration at the end."""
    first = complete_configs(PLAN, GUESSES, {})
    checked = CheckedNetwork(Path(), PLAN, first, None)
    check = NetworkCheck(None, None, CPU, None, None, CheckCost(10.0, 1.0), checked=(None, checked))
    other = {**first, FAST: GUESSES.space(FAST)[-1]}
    assert check.compilation_seconds([(PLAN, first)]) == 0.0
    assert check.compilation_seconds([(PLAN, first), (PLAN, other), (PLAN, other)]) == 5.0
