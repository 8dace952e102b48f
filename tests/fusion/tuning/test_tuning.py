"""Which kernels are tuned and compared, by a runner whose kernels take the times that the test says."""

from __future__ import annotations

import json
import time

import pytest

from costmodel.base.errors import OutputError, TuningError
from costmodel.operators.layers import Conv2d, FusedConvs
from fusion.model.build_folder import output_directory
from fusion.model.conv_graph import FusionPlan, Graph, Node, find_sites
from fusion.report.console_report import short_names
from fusion.tuning import network_tuning, rehearsal
from fusion.tuning.network_tuning import HOPELESS, SCREENING_TRIALS, NetworkTuner, TunedKernels, TuningBudget
from fusion.tuning.rehearsal import Rehearsed
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import template_for
from schedules.tuning import kernel_tuner
from schedules.tuning.kernel_tuner import SearchSettings, Tuner
from schedules.tuning.tuning_records import RecordStore
from tests.fusion.fake_runner import FakeRunner, NoOpinion

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
DEPTHWISE = Conv2d(1, 32, 14, 14, 32, (3, 3), padding=(1, 1, 1, 1), groups=32)
POINTWISE = Conv2d(1, 32, 14, 14, 64, (1, 1))
FUSED = FusedConvs((DEPTHWISE, POINTWISE))


GRAPH = Graph(
    (Node("dw", DEPTHWISE, "x", None, (), "dw.out", ()), Node("pw", POINTWISE, "dw.out", None, (), "pw.out", ())),
    (),
    {"dw.out": 1, "pw.out": 1},
)


def tuner(directory, runner, reports=None) -> tuple[NetworkTuner, RecordStore]:
    store = RecordStore(directory, CPU)
    sites = find_sites(GRAPH, CPU)
    report = (lambda state, network: None) if reports is None else (lambda state, network: reports.append(network))
    return NetworkTuner(GRAPH, sites, store, CPU, NoOpinion(), runner, report), store


def test_every_kernel_gets_its_trials_and_is_run_in_the_network(tmp_path):
    runner = FakeRunner(lambda operator: 3e-6 if operator == FUSED else 2e-6)
    reports: list[float | None] = []
    kernels, store = tuner(tmp_path, runner, reports)
    with store:
        tuned = kernels.tune(TuningBudget(trials=10))
    assert {operator: runner.measured.count(operator) for operator in (DEPTHWISE, POINTWISE, FUSED)} == {
        DEPTHWISE: 10,
        POINTWISE: 10,
        FUSED: 10,
    }
    assert tuned.trials == 30 and not tuned.interrupted and tuned.unsolved == ()
    assert {(FUSED,), (DEPTHWISE, POINTWISE)} == set(runner.rehearsed)
    assert tuned.comparable_seconds()[FUSED] == pytest.approx(3e-6)
    assert reports[-1] == pytest.approx(3e-6)  # the fused kernel replaces both


def test_the_network_outranks_times_of_kernels_by_themselves(tmp_path):
    """By itself the fused kernel is faster (3 against 4 us); in the network it takes 6 against 4 us."""
    runner = FakeRunner(lambda op: 3e-6 if op == FUSED else 2e-6, lambda op: 6e-6 if op == FUSED else 2e-6)
    kernels, store = tuner(tmp_path, runner)
    with store:
        tuned = kernels.tune(TuningBudget(trials=4))
    assert tuned.comparable_seconds()[FUSED] == 6e-6
    assert not any(group.is_fused for group in tuned.plan(GRAPH, find_sites(GRAPH, CPU)).groups)


def test_a_hopeless_site_gets_no_more_than_the_screening(tmp_path):
    runner = FakeRunner(lambda operator: 1.01 * HOPELESS * 4e-6 if operator == FUSED else 2e-6)
    kernels, store = tuner(tmp_path, runner)
    with store:
        tuned = kernels.tune(TuningBudget(trials=12))
    assert runner.measured.count(FUSED) == SCREENING_TRIALS
    assert runner.measured.count(DEPTHWISE) == 12
    assert tuned.rehearsed is not None and FUSED not in tuned.rehearsed.seconds


def test_a_second_run_measures_nothing_and_knows_the_same(tmp_path):
    def seconds(operator):
        return 3e-6 if operator == FUSED else 2e-6

    kernels, store = tuner(tmp_path, FakeRunner(seconds))
    with store:
        first = kernels.tune(TuningBudget(trials=5))
    again = FakeRunner(seconds)
    kernels, store = tuner(tmp_path, again)
    with store:
        second = kernels.tune(TuningBudget(trials=5))
    assert again.measured == [] and again.rehearsed == []
    assert (second.seconds, second.configs) == (first.seconds, first.configs)
    assert first.rehearsed is not None and second.rehearsed is not None
    assert second.rehearsed.seconds == first.rehearsed.seconds


def test_ctrl_c_keeps_what_is_known(tmp_path):
    runner = FakeRunner(lambda operator: 2e-6)
    runner.stop_after = 7
    kernels, store = tuner(tmp_path, runner)
    with store:
        tuned = kernels.tune(TuningBudget(trials=50))
    assert tuned.interrupted and tuned.trials == 7
    assert set(tuned.seconds) == {DEPTHWISE, POINTWISE, FUSED}
    assert runner.rehearsed == [] and tuned.rehearsed is None


def test_ctrl_c_between_two_stages_keeps_what_is_known(tmp_path, monkeypatch):
    """While the spaces are enumerated anew for the kernels that are left after screening."""
    kernels, store = tuner(tmp_path, FakeRunner(lambda operator: 2e-6))
    enumerated = []

    def stop(tuner, tasks):
        enumerated.append(tasks)
        if len(enumerated) == 2:
            raise KeyboardInterrupt
        return states(tuner, tasks)

    states = Tuner._states
    monkeypatch.setattr(Tuner, "_states", stop)
    with store:
        tuned = kernels.tune(TuningBudget(trials=50))
    assert tuned.interrupted and tuned.trials == 3 * SCREENING_TRIALS
    assert set(tuned.configs) == set(tuned.seconds) == {DEPTHWISE, POINTWISE, FUSED}


def test_ctrl_c_while_the_network_is_refined_builds_what_is_best_in_it(tmp_path):
    """By itself the fused kernel is faster (3 against 4 us); in the network it takes 6 against 4 us."""

    class Stopping(FakeRunner):
        def rehearse(self, programs, rounds=5, runs=12):
            if self.rehearsed:
                raise KeyboardInterrupt
            return super().rehearse(programs, rounds, runs)

    runner = Stopping(lambda op: 3e-6 if op == FUSED else 2e-6, lambda op: 6e-6 if op == FUSED else 2e-6)
    kernels, store = tuner(tmp_path, runner)
    with store:
        tuned = kernels.tune(TuningBudget(trials=4))
    assert tuned.interrupted and tuned.comparable_seconds()[FUSED] == 6e-6
    assert not any(group.is_fused for group in tuned.plan(GRAPH, find_sites(GRAPH, CPU)).groups)


def test_time_that_the_end_does_not_need_goes_into_more_trials(tmp_path, monkeypatch):
    """A trial takes a second; of twelve seconds none is left, then the end turns out to need eight fewer, then none."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Slow(FakeRunner):
        def measure(self, operator, config, best_seconds=None):
            clock[0] += 1.0
            return super().measure(operator, config, best_seconds)

    asked: list[tuple[int, float]] = []

    def spare(known: TunedKernels) -> float:
        asked.append((known.trials, clock[0]))
        return 8.0 if len(asked) == 1 else 0.0

    def tuned_with(spare) -> TunedKernels:
        clock[0] = 0.0
        kernels, store = tuner(tmp_path / str(spare is None), Slow(lambda operator: 2e-6))
        with store:
            return kernels.tune(TuningBudget(50, 12.0, spare))

    without, with_spare = tuned_with(None), tuned_with(spare)
    assert len(asked) == 2 and 12.0 - 0.15 * 12.0 <= asked[0][1] <= 13.0
    assert without.trials <= 13 < with_spare.trials <= 21 and clock[0] <= asked[0][1] + 9.0


def test_a_failure_leaves_no_directory_but_keeps_records(tmp_path):
    with pytest.raises(TuningError), output_directory(tmp_path / "a" / "b"):
        raise TuningError("nothing works")
    assert not (tmp_path / "a").exists()
    with pytest.raises(TuningError), output_directory(tmp_path / "c"):
        (tmp_path / "c" / "records").mkdir()
        raise TuningError("nothing works")
    assert (tmp_path / "c" / "records").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"), output_directory(tmp_path / "file"):
        pass


def test_a_fused_kernel_outside_the_network_stands_to_its_parts_as_by_itself():
    """By itself 3 us against 2 + 2 us; its parts take 4 + 2 us in the network, so 4.5 us is its like."""
    rehearsed = Rehearsed(FusionPlan(()), {}, {}, {DEPTHWISE: 4e-6, POINTWISE: 2e-6})
    alone = {FUSED: 3e-6, DEPTHWISE: 2e-6, POINTWISE: 2e-6}
    assert TunedKernels({}, alone, rehearsed, (), 0, 0, False).comparable_seconds()[FUSED] == pytest.approx(4.5e-6)
    partly = {FUSED: 3e-6, DEPTHWISE: 2e-6}
    assert TunedKernels({}, partly, rehearsed, (), 0, 0, False).comparable_seconds()[FUSED] == 3e-6


def test_short_names_lose_what_all_share():
    names = ["net_layer_0_conv_3x3_Conv", "net_layer_1_conv_3x3_Conv", "net_stem_Conv"]
    assert list(short_names(names).values()) == ["layer_0_conv_3x3", "layer_1_conv_3x3", "stem"]
    scoped = ["a_a_1_a_1_conv_conv", "a_a_1_a_1_0_conv", "a_a_2_conv", "head_conv"]
    assert list(short_names(scoped).values()) == ["a_1_conv", "a_1_0", "a_2", "head"]
    assert list(short_names(["a_a_b", "a_b", "1_1_0"]).values()) == ["a_a_b", "a_b", "1_1_0"]  # would be alike
    assert short_names(["only"]) == {"only": "only"}
    assert json.dumps(short_names(["a", "b"])) == '{"a": "a", "b": "b"}'


def test_every_way_to_share_the_work_is_measured_for_the_network(tmp_path):
    """A few trials may all split channels; the network's kernels are tried with pixels split as well."""
    runner = FakeRunner(lambda operator: 9e-6 if operator == FUSED else 2e-6)
    kernels, store = tuner(tmp_path, runner)
    template = template_for(POINTWISE, CPU)
    space = template.space(POINTWISE, CPU)
    wide = [config for config in space if template.work_split(config, CPU) == "channels"]
    with store:
        for operator in (DEPTHWISE, FUSED):
            store.add(operator, template_for(operator, CPU).space(operator, CPU)[0], runner.seconds(operator))
        store.add(POINTWISE, wide[0], 1e-6)
        assert kernels._measure_missing_splits([POINTWISE], trials=8, end=time.monotonic()) == []
        added = kernels._measure_missing_splits([POINTWISE, POINTWISE], trials=8, end=time.monotonic() + 60.0)
        splits = {template.work_split(record.config, CPU) for record in store.all(POINTWISE)}
        assert splits == {template.work_split(config, CPU) for config in space} > {"channels"}
        assert added == [True] * (len(splits) - 1)
        rehearsed = kernels._rehearsal_configs(POINTWISE)
        assert {template.work_split(config, CPU) for config in rehearsed} == {"channels"}  # 2 : 1
        assert kernels._measure_missing_splits([POINTWISE], trials=8) == []
        assert kernels._measure_missing_splits([DEPTHWISE], trials=1) == []


def test_what_is_predicted_to_matter_most_is_measured_first(tmp_path):
    """The longer layer before the other, and the fused kernel after both; with no prediction in program order."""

    def order(predicted) -> list:
        runner = FakeRunner(lambda operator: 2e-6)
        runner.stop_after = 3
        with RecordStore(tmp_path / str(len(predicted)), CPU) as store:
            sites = find_sites(GRAPH, CPU)
            tuner = NetworkTuner(
                GRAPH, sites, store, CPU, NoOpinion(), runner, lambda *state: None, predicted=predicted
            )
            tuner._tune(sites, TuningBudget(trials=1), SearchSettings(minimum_trials=1))
        return runner.measured

    assert order({}) == [DEPTHWISE, POINTWISE, FUSED]
    assert order({DEPTHWISE: 1e-6, POINTWISE: 3e-6, FUSED: 2e-6}) == [POINTWISE, DEPTHWISE, FUSED]


def test_what_a_comparison_leaves_of_the_time_goes_into_trials_again(tmp_path, monkeypatch):
    """A trial takes 1 s, networks take no time: of 60 s none is given back, and what was found late is compared too."""
    clock = [0.0]
    monkeypatch.setattr(network_tuning.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(kernel_tuner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: clock[0])

    class Slow(FakeRunner):
        def measure(self, operator, config, best_seconds=None):
            clock[0] += 1.0
            return super().measure(operator, config, best_seconds)

    runner = Slow(lambda operator: 3e-6 if operator == FUSED else 2e-6)
    kernels, store = tuner(tmp_path, runner)
    with store:
        tuned = kernels.tune(TuningBudget(trials=1000, seconds=60.0))
    assert 60.0 * (1.0 - network_tuning.WORTHWHILE_SHARE) <= clock[0] <= 61.0
    assert tuned.trials == len(runner.measured) >= 50
    assert tuned.rehearsed is not None and (FUSED,) in runner.rehearsed
