"""What host work is looked up by, how parts of a task add up, and what stays of a step that is one CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.cost_model import CostModel, Estimate
from costmodel.gpu.power import DRAWN_POWER
from costmodel.operators.device_work import Elementwise, Gemm
from e2e.price.pricing import as_cuda_graph, launching_calls, price, sum_durations
from e2e.step.execution_graph import (
    CallInfo,
    Duration,
    ExecutionGraph,
    HostWork,
    Kernel,
    Launch,
    RankGraph,
    RecordEvent,
    StreamWait,
    Synchronize,
    Task,
)

ADD, PRODUCT = Elementwise("add", 100), Gemm(1, 10, 10, 10)


class TwoPrices(CostModel):
    """1 s at power 0.25 for what is element-wise, 10 s at 0.5 for products; settles by what it is told."""

    def __init__(self) -> None:
        self.settled: list[list[int]] = []

    def estimate(self, operators):
        return [
            Estimate(1.0, 0.5, 2.0, "memory:DRAM", {DRAWN_POWER: 0.25}, "fitted")
            if isinstance(operator, Elementwise)
            else Estimate(10.0, 9.0, 12.0, "compute", {DRAWN_POWER: 0.5}, "measured")
            for operator in operators
        ]

    def settle(self, estimates, counts):
        self.settled.append(list(counts))
        return list(estimates)


class Ledger:
    """Every piece takes a second; notes what it is asked for."""

    level = factor = 1.0

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def seconds(self, kind, name, records=None):
        self.asked.append((kind, name, records))
        return 1.0


def rank(actions, tasks=(), calls=None) -> ExecutionGraph:
    return ExecutionGraph((RankGraph(0, {"main": tuple(actions)}, tuple(tasks), calls or {}),))


# --- the host --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "call"),
    [("kernel", "cudaLaunchKernel"), ("collective", "cudaLaunchKernel"), ("copy", "cudaMemcpyAsync"),
     ("memset", "cudaMemsetAsync"), ("graph", "cudaGraphLaunch")],
)  # fmt: skip
def test_a_launch_is_looked_up_by_the_call_of_the_runtime(kind, call):
    ledger = Ledger()
    task = Task(0, "t", kind, 0, (), Duration.measured(1.0))
    (priced,) = price(rank([Launch(0), Synchronize()], [task]), TwoPrices(), ledger).ranks
    assert ledger.asked == [("T4", call, None), ("T4", "cudaStreamSynchronize", None)]
    assert [action.duration for action in priced.actions()] == [Duration(1.0, 1.0, 1.0, "host", "fitted")] * 2


def test_host_work_is_looked_up_once_for_each_kind_name_and_number_of_records():
    ledger = Ledger()
    calls = {0: CallInfo(0, "aten::add"), 1: CallInfo(1, "aten::add"), 2: CallInfo(2, "aten::mul")}
    work = [HostWork("T1", 0), HostWork("T1", 1), HostWork("T1", 2), HostWork("T1", 0, records=2.5), HostWork("T3", 0)]
    price(rank([*work, HostWork("T1"), HostWork("T1", 9)], calls=calls), TwoPrices(), ledger)
    assert ledger.asked == [
        ("T1", "aten::add", None),
        ("T1", "aten::mul", None),
        ("T1", "aten::add", 2.5),
        ("T3", "aten::add", None),
        ("T1", "", None),  # for no call, or for one that nobody knows
    ]


def test_an_operator_that_launches_something_has_a_time_before_its_first_launch():
    actions = [HostWork("T1", 0), HostWork("T2", 1), Launch(0), HostWork("T5", 1), HostWork("T5", 2)]
    assert launching_calls(actions) == {1}
    ledger = Ledger()
    calls = {number: CallInfo(number, f"call {number}") for number in range(3)}
    price(rank(actions, [Task(0, "t", "kernel", 0, (ADD,))], calls), TwoPrices(), ledger)
    assert [asked[:2] for asked in ledger.asked if asked[0] not in ("T1", "T2", "T4")] == [
        ("T5", "call 1"), ("whole", "call 2")]  # fmt: skip


def test_times_of_the_host_that_are_there_stay():
    known = Duration.measured(7.0)
    ledger = Ledger()
    actions = [HostWork("T1", None, known), Launch(0, known), Synchronize(duration=known)]
    graph = rank(actions, [Task(0, "t", "kernel", 0, (ADD,), known)])
    assert price(graph, TwoPrices(), ledger) == graph and not ledger.asked


# --- tasks -----------------------------------------------------------------------------------------


def test_a_task_of_kernels_takes_their_sum_and_each_kernel_its_own():
    kernels = (Kernel("one", "kernel", (PRODUCT,)), Kernel("two", "kernel", (ADD, ADD)))
    tasks = [Task(number, "both", "kernel", 0, kernels=kernels) for number in range(2)]
    (priced,) = price(rank([Launch(0), Launch(1)], tasks), TwoPrices(), Ledger()).ranks
    for task in priced.tasks:
        assert (task.duration.seconds, task.duration.lower, task.duration.upper) == (12.0, 10.0, 16.0)
        assert (task.duration.bound, task.duration.source) == ("compute", "fitted")
        assert task.duration.power == pytest.approx((10 * 0.5 + 2 * 0.25) / 12)
        assert [(kernel.name, kernel.duration.seconds) for kernel in task.kernels] == [("one", 10.0), ("two", 2.0)]


def test_operators_are_counted_as_often_as_they_run():
    """In each of two tasks of the same kernels, in a third by itself; not in one that has its time."""
    kernels = (Kernel("one", "kernel", (PRODUCT,)), Kernel("two", "kernel", (ADD, ADD)))
    tasks = [Task(number, "both", "kernel", 0, kernels=kernels) for number in range(2)]
    tasks.append(Task(2, "add", "kernel", 0, (ADD,)))
    tasks.append(Task(3, "known", "kernel", 0, (PRODUCT,), Duration.measured(1.0)))
    model = TwoPrices()
    price(rank([Launch(task.id) for task in tasks], tasks), model, Ledger())
    assert model.settled == [[2, 5]]  # products, additions


def test_what_no_model_prices_stays_without_a_price():
    empty = Kernel("unknown", "kernel", ())
    tasks = [
        Task(0, "unknown", "kernel", 0),
        Task(1, "partly", "kernel", 0, kernels=(Kernel("add", "kernel", (ADD,)), empty)),
        Task(2, "add", "kernel", 0, (ADD,)),
    ]
    (priced,) = price(rank([Launch(task.id) for task in tasks], tasks), TwoPrices(), Ledger()).ranks
    assert priced.tasks[:2] == tuple(tasks[:2]) and priced.tasks[2].duration.seconds == 1.0


def part(seconds: float, bound: str = "", source="measured", power: float | None = None) -> Duration:
    return Duration(seconds, seconds / 2, seconds * 2, bound, source, power)


def test_a_sum_is_limited_by_its_longest_part_and_as_sure_as_its_least_sure():
    whole = sum_durations([part(1, "a", "fitted"), part(3, "b", "measured"), part(2, "c", "analytic")])
    assert whole == Duration(6, 3, 12, "b", "analytic")
    assert sum_durations([part(1, source="measured"), part(1, source="fitted")]).source == "fitted"
    assert sum_durations([part(1, source="measured"), part(1, source="measured")]).source == "measured"


def test_power_is_the_mean_over_the_seconds_where_it_is_known_of_all():
    assert sum_durations([part(1, power=0.2), part(3, power=0.6)]).power == pytest.approx(0.5)
    assert sum_durations([part(1, power=0.2), part(3)]).power is None
    assert sum_durations([part(0.0, power=0.2)]).power is None


# --- one CUDA graph --------------------------------------------------------------------------------


def test_a_cuda_graph_keeps_what_is_on_the_device_and_its_order():
    known = Duration.measured(1.0)
    tasks = tuple(Task(number, "t", "kernel", number, (), known) for number in range(2))
    threads = {
        "main": (HostWork("T1", None, known), Launch(0, known), RecordEvent(1, 0), Synchronize(duration=known)),
        "autograd": (HostWork("T2", None, known), StreamWait(1, 1), Launch(1, known)),
    }
    graph = ExecutionGraph((RankGraph(0, threads, tasks), RankGraph(3, {"main": ()}, ())), {0: 2})
    replayed = as_cuda_graph(graph, 0.5)
    first, second = replayed.ranks
    start = HostWork("T4", None, Duration(0.5, 0.5, 0.5, "host", "fitted"))
    nothing = Duration(0.0, 0.0, 0.0, "host", "fitted")
    assert dict(first.threads) == {
        "main": (start, Launch(0, nothing), RecordEvent(1, 0)),
        "autograd": (StreamWait(1, 1), Launch(1, nothing)),
    }
    assert first.tasks == tasks and dict(second.threads) == {"main": ()}
    assert replace(replayed, ranks=graph.ranks) == graph
