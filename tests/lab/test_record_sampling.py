"""Configurations measured to learn from: which ones, in which order, and where they are kept."""

from __future__ import annotations

import pytest

from costmodel.cost_model import config_key
from costmodel.operators.layers import Conv2d
from lab.records import TURN, measure_samples, sample, sampled_kernels
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import template_for
from schedules.measuring.timing_protocol import MeasureOutcome
from schedules.tuning.tuning_records import RecordStore

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
FIRST, SHARED, LAST = (Conv2d(1, channels, 14, 14, 64, (1, 1)) for channels in (32, 64, 96))


class FakeRunner:
    """Answers at once; the clock of the test stands still. ``stop_after``: then somebody presses Ctrl-C."""

    def __init__(self, stop_after: int | None = None, failing: int = 0) -> None:
        self.measured: list[tuple[object, object]] = []
        self.stop_after, self.failing = stop_after, failing

    def measure_batch(self, operator, configs, best_seconds=None):
        for config in configs:
            if len(self.measured) == self.stop_after:
                raise KeyboardInterrupt
            self.measured.append((operator, config_key(config)))
            failed = len(self.measured) <= self.failing
            yield config, MeasureOutcome(None, "build", "no") if failed else MeasureOutcome(1e-6 * len(self.measured))


@pytest.fixture
def stores(tmp_path):
    with RecordStore(tmp_path / "a", CPU) as one, RecordStore(tmp_path / "b", CPU) as other:
        yield one, other


def kernels(stores, count=12):
    one, other = stores
    return sampled_kernels([(one, [FIRST, SHARED]), (other, [SHARED, LAST, LAST])], CPU, count)


def space(operator):
    return template_for(operator, CPU).space(operator, CPU)


def test_half_is_what_should_be_fast_and_half_from_all_over():
    configs = [config_key(each) for each in space(SHARED)]
    places = [configs.index(config_key(each)) for each in sample(SHARED, space(SHARED), 20)]
    assert len(set(places)) == 20 and sorted(places)[:10] == list(range(10))
    assert places[::2] == list(range(10))  # by turns: whatever is reached has some of both
    assert max(places) > len(configs) / 2 and min(places[1::2]) >= 10
    assert sample(SHARED, space(SHARED), 20) == sample(SHARED, space(SHARED), 20)


def test_a_kernel_of_two_networks_is_measured_once_and_kept_for_both(stores):
    runner = FakeRunner()
    state = measure_samples(kernels(stores), runner)
    assert (state.measured, state.wanted, state.kernels, state.failures) == (36, 36, 3, 0)
    assert len(runner.measured) == len(set(runner.measured)) == 36
    one, other = stores
    assert set(one.operators()) == {FIRST, SHARED} and set(other.operators()) == {SHARED, LAST}
    assert one.all(SHARED) == other.all(SHARED) and len(one.all(SHARED)) == 12


def test_a_run_that_is_stopped_has_as_much_of_every_kernel_and_the_next_goes_on(stores):
    first = FakeRunner(stop_after=3 * TURN)
    with pytest.raises(KeyboardInterrupt):
        measure_samples(kernels(stores), first)
    assert {operator: sum(each == operator for each, _ in first.measured) for operator in (FIRST, SHARED, LAST)} == {
        FIRST: TURN,
        SHARED: TURN,
        LAST: TURN,
    }
    second = FakeRunner()
    state = measure_samples(kernels(stores), second)
    assert state.measured == state.wanted == 36
    assert not set(first.measured) & set(second.measured) and len(second.measured) == 36 - 3 * TURN


def test_what_fails_is_not_tried_again(stores):
    assert measure_samples(kernels(stores), FakeRunner(failing=2)).failures == 2
    assert all(not each.pending for each in kernels(stores))
