"""Durations from a model whose answers are mental arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.cost_model import CostModel, Estimate
from costmodel.operators.device_work import Elementwise, Gemm
from e2e.explain.critical_path import task_family
from e2e.price.pricing import (
    GATHERING_SECONDS,
    GATHERING_SHARE,
    RECORDED_TENSORS,
    TENSOR_SECONDS,
    UNKNOWN_TIMES,
    HostPrices,
    duration_of,
    price,
)
from e2e.step.execution_graph import (
    UNKNOWN_PRODUCT,
    CallInfo,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    Synchronize,
    Task,
)
from e2e.step.operator_trace import OPTIMIZER_STEP

ADD, PRODUCT = Elementwise("add", 100), Gemm(1, 10, 10, 10)


class Toy(CostModel):
    """An element-wise kernel takes a second, anything else ten; counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def estimate(self, operators):
        self.asked += len(operators)
        return [
            Estimate(1.0, 0.5, 2.0, "memory:DRAM", {}, "fitted")
            if isinstance(operator, Elementwise)
            else Estimate(10.0, 9.0, 12.0, "compute", {}, "analytic")
            for operator in operators
        ]


class Table:
    """Every piece by its kind."""

    SECONDS = {"T1": 0.1, "T2": 0.2, "T3": 0.3, "T4": 0.4, "T5": 0.5, "whole": 5.0}
    level = 2.0

    def __init__(self, factor=1.5):
        self.factor = factor

    def seconds(self, kind, name, records=None):
        return self.SECONDS[kind]


CALLS = {0: CallInfo(0, "aten::add", "forward"), 1: CallInfo(1, "aten::view", "forward"), 2: CallInfo(2, "aten::mm")}


def graph(*tasks: Task) -> ExecutionGraph:
    actions = (
        *(HostWork("T1", 0), HostWork("T2", 0), Launch(0), HostWork("T3", 0)),
        *(HostWork("T1", 1), HostWork("T5", 1)),
        *(HostWork("T1", 2), HostWork("T2", 2), Launch(1), HostWork("T5", 2), Launch(2), HostWork("T3", 2)),
        Synchronize(),
    )
    return ExecutionGraph((RankGraph(0, {"main": actions}, tasks, CALLS),))


def three_tasks() -> ExecutionGraph:
    return graph(
        Task(0, "add", "kernel", 0, (ADD,), call=0),
        Task(1, "mm", "kernel", 0, (PRODUCT,), call=2),
        Task(2, "mm with add", "kernel", 0, (PRODUCT, ADD), Duration.measured(3.0), call=2),
    )


def test_a_product_of_which_only_the_bytes_are_known_may_take_much_longer():
    records = ADD, replace(ADD, kind=UNKNOWN_PRODUCT)
    tasks = [Task(place, "triton::kernel", "kernel", 7, (each,), call=0) for place, each in enumerate(records)]
    prices = dict(zip(records, Toy().estimate(records), strict=True))
    plain, product = (duration_of(task, prices) for task in tasks)
    assert (plain.seconds, plain.upper) == (1.0, 2.0)
    assert (product.seconds, product.lower, product.upper) == (1.0, 0.5, UNKNOWN_TIMES)
    assert [task_family(task) for task in tasks] == ["Elementwise", UNKNOWN_PRODUCT]


def test_missing_durations_are_filled_in_and_measured_ones_stay():
    model = Toy()
    (rank,) = price(three_tasks(), model, Table()).ranks
    assert [task.duration for task in rank.tasks] == [
        Duration(1.0, 0.5, 2.0, "memory:DRAM", "fitted"),
        Duration(10.0, 9.0, 12.0, "compute", "analytic"),
        Duration.measured(3.0),
    ]
    assert model.asked == 2  # each distinct operator once
    seconds = [action.duration.seconds for action in rank.threads["main"]]
    # An operator that launches nothing takes its whole time; between launches it is T5.
    assert seconds == [0.1, 0.2, 0.4, 0.3, 0.1, 5.0, 0.1, 0.2, 0.4, 0.5, 0.4, 0.3, 0.4]


@pytest.mark.parametrize("factor, counted", [(1.5, RECORDED_TENSORS + 100), (1.0, 100)])
def test_lists_of_tensors_take_the_host_longer_the_longer_they_are(factor, counted):
    """T1: what the optimizer gathers, once, of a measured host beyond what its tables know of; T2: each call's own
    lists; both at the host's level (2, of the toy).
    """
    table = Table(factor)
    gathered = RECORDED_TENSORS + 100
    names = {0: ("aten::_foreach_mul_", 100, gathered), 1: ("aten::_foreach_add_", 100, 0), 2: ("aten::add", 0, 0)}
    calls = {n: CallInfo(n, name, "optimizer", tensors=t, gathered=g) for n, (name, t, g) in names.items()}
    work = [HostWork(kind, call) for call in calls for kind in ("T1", "T2", "T3")]
    actions = tuple(step for part in work for step in ((part, Launch(part.call)) if part.kind == "T2" else (part,)))
    tasks = tuple(Task(n, "update", "kernel", 0, (ADD,), call=n) for n in calls)
    (rank,) = price(ExecutionGraph((RankGraph(0, {"main": actions}, tasks, calls),)), Toy(), table).ranks
    seconds = [each.duration.seconds for each in rank.threads["main"] if isinstance(each, HostWork)]
    gathering, lists = 2 * counted * GATHERING_SECONDS, 2 * 100 * TENSOR_SECONDS
    assert seconds == pytest.approx([0.1 + gathering, 0.2 + lists, 0.3, 0.1, 0.2 + lists, 0.3, 0.1, 0.2, 0.3], rel=1e-9)


def test_lists_that_are_not_changed_in_place_are_allocated_and_those_on_the_host_worked_through():
    """Tensor by tensor, each at the table's whole time of an operator that launches nothing (5 s, of the toy)."""
    host = HostPrices(Table())
    calls = {n: CallInfo(n, f"aten::_foreach_{name}", tensors=10) for n, name in enumerate(("sqrt", "sqrt_", "add_"))}
    lists = 0.2 + 2 * 10 * TENSOR_SECONDS
    before = [host.work(HostWork("T2", call), calls, {0, 1}).seconds for call in (0, 1)]
    assert before == pytest.approx([lists + 10 * 5.0, lists])
    assert host.work(HostWork("T5", 2), calls, {0, 1}).seconds == pytest.approx(5.0 + 10 * 5.0)


def test_the_gap_before_an_optimizer_is_that_of_its_own_tensors():
    """That of a shared table contains the tensors of its model; with as many of them it lasts as long as there."""
    call = CallInfo(0, OPTIMIZER_STEP)
    measured, shared = (
        HostPrices(Table(factor)).work(HostWork("T1", 0), {0: call}, set()).seconds for factor in (1.0, 1.5)
    )
    assert measured == 0.1 and shared == pytest.approx((1 - GATHERING_SHARE) * measured)
    assert pytest.approx(GATHERING_SHARE * 784e-6) == GATHERING_SECONDS * RECORDED_TENSORS


@pytest.mark.parametrize("factor, seconds", [(1.5, [1.0, 2.0]), (1.0, [0.1, 0.1])])
def test_gaps_last_as_long_as_the_functions_called_in_them(factor, seconds, monkeypatch):
    """At the host's level, 2; a host that was measured has its own gaps."""
    table = Table(factor)
    monkeypatch.setattr("e2e.price.pricing.FUNCTION_SECONDS", 0.1)
    calls = {n: CallInfo(n, "aten::add", functions=count) for n, count in ((0, 5), (1, 10))}
    actions = tuple(HostWork("T1", call) for call in calls)
    (rank,) = price(ExecutionGraph((RankGraph(0, {"main": actions}, (), calls),)), Toy(), table).ranks
    assert [each.duration.seconds for each in rank.threads["main"]] == pytest.approx(seconds)


class Settling(Toy):
    """The more kernels run besides, the faster arithmetic is."""

    def settle(self, estimates, counts):
        factor = sum(counts)
        return [
            replace(each, seconds=each.seconds / factor, lower=0.0) if each.bound == "compute" else each
            for each in estimates
        ]


def test_prices_settle_for_the_mixture_of_each_rank():
    """However many ranks it stands for; what else the other ranks run does not change the clock of its GPU."""
    tasks = tuple(Task(place, "mm", "kernel", 0, (PRODUCT,)) for place in range(5))
    actions = tuple(Launch(task.id) for task in tasks)
    many, one = RankGraph(0, {"main": actions}, tasks), RankGraph(1, {"main": actions[:1]}, tasks[:1])
    model = Settling()
    priced = price(ExecutionGraph((many, one), {0: 3, 1: 1}), model, Table())
    assert [rank.tasks[0].duration.seconds for rank in priced.ranks] == [10 / 5, 10 / 1]
    assert model.asked == 1
