"""Configurations changed inside a network, by networks whose kernels take the times that the test says."""

from __future__ import annotations

import pytest

from costmodel.operators.layers import Conv2d, Epilogue
from fusion.model.conv_graph import Graph, Node, unfused_plan
from fusion.tuning.rehearsal import LEAST_GAIN, Neighbours, Variant, improvements, refine, trials
from schedules.measuring.timing_protocol import MeasureOutcome

EXPAND = Conv2d(1, 32, 14, 14, 64, (1, 1))
DEPTHWISE = Conv2d(1, 64, 14, 14, 64, (3, 3), padding=(1, 1, 1, 1), groups=64)
REDUCE = Conv2d(1, 64, 14, 14, 32, (1, 1), epilogue=Epilogue(residual="before_activation"))
LAST = Conv2d(1, 32, 14, 14, 128, (1, 1))
GRAPH = Graph(
    (
        Node("expand", EXPAND, "x", None, (), "a", ()),
        Node("dw", DEPTHWISE, "a", None, (), "b", ()),
        Node("reduce", REDUCE, "b", "x", (), "c", ()),
        Node("last", LAST, "c", None, (), "d", ()),
    ),
    (),
    {"a": 1, "b": 1, "c": 1, "d": 1},
)
OPERATORS = (EXPAND, DEPTHWISE, REDUCE, LAST)
CHANNELS, PIXELS = {"channel_tasks": 2}, {"channel_tasks": 1}
POOL = {operator: [CHANNELS, PIXELS] for operator in OPERATORS}


def chosen(config=CHANNELS) -> Variant:
    return Variant(unfused_plan(GRAPH), dict.fromkeys(OPERATORS, config))


class Networks:
    """A kernel takes ``seconds(operator, its config, the config of the kernel it reads or None)``."""

    def __init__(self, seconds):
        self.seconds, self.networks = seconds, 0

    def __call__(self, tried):
        self.networks += len(tried)
        return [self.outcome(variant.program()) for variant in tried]

    def outcome(self, program):
        steps = tuple(
            self.seconds(*step.candidate, None if step.data is None else program[step.data].candidate[1])
            for step in program
        )
        return MeasureOutcome(sum(steps), step_seconds=steps)


def crossing(operator, config, source) -> float:
    """Reading what is split otherwise costs half as much again; splitting pixels costs 1x1 kernels a little more."""
    alone = 1.0 if config == CHANNELS or operator is DEPTHWISE else 1.05
    return alone * (1.5 if source is not None and source != config else 1.0)


def test_who_is_concerned_by_a_change():
    neighbours = Neighbours(chosen().program())
    assert neighbours.concerned(EXPAND) == {0, 1} and neighbours.concerned(REDUCE) == {2, 3}
    assert neighbours.interact(EXPAND, DEPTHWISE) and neighbours.interact(DEPTHWISE, LAST) is False
    assert (
        not neighbours.interact(EXPAND, REDUCE)
        and LAST in neighbours
        and Conv2d(1, 8, 8, 8, 8, (1, 1)) not in neighbours
    )


def test_trials_contain_every_change_and_never_two_that_meet():
    neighbours = Neighbours(chosen().program())
    tried = list(trials(chosen(), POOL, neighbours))
    assert sorted(map(id, (operator for changed in tried for operator in changed))) == sorted(map(id, OPERATORS))
    assert all(config == PIXELS for changed in tried for config in changed.values())
    for changed in tried:
        operators = list(changed)
        assert not any(neighbours.interact(a, b) for a in operators for b in operators if a is not b)
    assert len(tried) == 2  # every other kernel of a chain, twice


def test_a_kernel_that_is_faster_but_slows_its_reader_down_stays_as_it_is():
    def seconds(operator, config, source):
        return (0.9 if config == PIXELS else 1.0) * (1.5 if source is not None and source != config else 1.0)

    alone = Networks(lambda operator, config, source: seconds(operator, config, None))
    assert improvements(chosen(), POOL, alone) != []
    assert improvements(chosen(), POOL, Networks(seconds)) == []


def test_a_kernel_follows_the_split_of_its_neighbours():
    """All but the depthwise layer split pixels; taken for itself, its split makes no difference."""
    start = Variant(unfused_plan(GRAPH), {**chosen(PIXELS).configs, DEPTHWISE: CHANNELS})
    refined = refine(start, {DEPTHWISE: [CHANNELS, PIXELS]}, Networks(crossing))
    assert refined.configs == chosen(PIXELS).configs and refined.plan is start.plan


def test_no_change_for_less_than_the_noise():
    networks = Networks(lambda operator, config, source: 1.0 if config == CHANNELS else 1.0 - 0.9 * LEAST_GAIN)
    start = chosen()
    assert refine(start, POOL, networks) is start
    assert networks.networks == 1 + 2  # the network and its trials, once


def test_changes_that_lose_as_a_whole_are_taken_back():
    """Each change seems to gain while the others stay; all together take longer."""

    def seconds(operator, config, source):
        return 1.0 if config == CHANNELS else 0.5

    class Interfering(Networks):
        def __call__(self, tried):
            outcomes = super().__call__(tried)
            if len(tried) != 2:
                return outcomes
            return [MeasureOutcome(1.0, step_seconds=outcomes[0].step_seconds), MeasureOutcome(2.0, step_seconds=())]

    start = chosen()
    assert refine(start, POOL, Interfering(seconds)) is start
    assert refine(start, POOL, Networks(seconds)).configs == chosen(PIXELS).configs


def test_networks_that_fail_change_nothing():
    failed = MeasureOutcome(None, "crash", "boom")
    start = chosen()
    assert refine(start, POOL, lambda tried: [failed] * len(tried)) is start
    working = Networks(lambda operator, config, source: 1.0)
    assert refine(start, POOL, lambda tried: [*working(tried[:1]), *[failed] * (len(tried) - 1)]) is start


@pytest.mark.parametrize("pool", [{}, {EXPAND: [CHANNELS]}])
def test_nothing_else_to_try(pool):
    start = chosen()
    assert refine(start, pool, Networks(crossing)) is start


def test_nothing_is_tried_without_time():
    networks = Networks(lambda operator, config, source: 1.0 if config == CHANNELS else 0.5)
    start = chosen()
    assert refine(start, POOL, networks, affordable=lambda tried: False) is start and networks.networks == 0
    one_sweep = iter([True, False])
    once = refine(start, POOL, networks, affordable=lambda tried: next(one_sweep))
    assert once is not start and once.configs != chosen(PIXELS).configs  # neighbours change in different sweeps
