"""Operators fused, lookups batched, faster kernels and hosts, by arithmetic."""

from __future__ import annotations

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.device_work import Elementwise, Gemm
from costmodel.operators.lookups import EmbeddingLookup
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import ExecutionGraph, HostWork, Kernel, Launch
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.step.options import StepOptions
from e2e.whatif.questions import FasterHost, FasterKernels
from e2e.whatif.speeds import SpeedChange
from e2e.whatif.traced_rank import TracedRank, batched_lookups, fusible_chains, merge_calls
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import Table, Toy

ROWS, COLUMNS = 64, 128


class Script:
    def __init__(self):
        self.calls, self.tensors = [], 0

    def tensor(self, *shape, dtype="float32"):
        self.tensors += 1
        return Tensor(self.tensors, self.tensors, shape or (ROWS, COLUMNS), dtype, "cuda:0")

    def call(self, name, *inputs, shape=(), phase="forward"):
        output = self.tensor(*shape)
        call = OperatorCall(len(self.calls), f"aten::{name}", None, 0, inputs, (output,), phase)
        self.calls.append(call)
        return output

    def traced(self):
        return TracedRank(OperatorTrace(tuple(self.calls)), StepOptions())


def merged(traced, groups, ratio=lambda before, after: (1.0, 1.0, 1.0), rank=None):
    rank = rank or traced.lowered
    operators = {
        call: tuple(record for task in traced.work[call] for record in task.operators)
        for group in groups
        for call in group.calls
    }
    return merge_calls(rank, groups, traced.homes(rank), operators, ratio)


def launches(rank):
    return [action for actions in rank.threads.values() for action in actions if isinstance(action, Launch)]


def host_calls(rank):
    return [action.call for actions in rank.threads.values() for action in actions if isinstance(action, HostWork)]


def test_a_named_chain_becomes_one_kernel_and_the_host_forgets_what_is_between():
    script = Script()
    first, second = script.tensor(), script.tensor()
    script.call("exp", script.call("relu", script.call("add", first, second)))
    traced = script.traced()
    rank = merged(traced, fusible_chains(traced, "add|relu"))
    fused, other = rank.tasks
    assert isinstance(fused.operators[0], Elementwise) and other.name == "aten::exp"
    # Reads both, writes what exp reads: what add wrote for relu stays on the chip.
    assert (fused.operators[0].inputs, fused.operators[0].outputs) == (2, 1)
    assert rank.calls[fused.call].name == "what-if::fused_add_relu"
    assert 0 not in host_calls(rank) and {1, 2} <= set(host_calls(rank))
    before = price(ExecutionGraph((traced.lowered,)), Toy(1.0), Table(10.0))
    after = price(ExecutionGraph((rank,)), Toy(1.0), Table(10.0))
    # One operator less: its gap, its launch and what is around it.
    assert simulate(before).step_seconds - simulate(after).step_seconds == pytest.approx(40.0)


def test_a_result_that_is_used_outside_is_written():
    script = Script()
    first = script.call("add", script.tensor(), script.tensor())
    script.call("relu", first)
    script.call("mm", first, script.tensor(COLUMNS, COLUMNS))
    traced = script.traced()
    (chain,) = fusible_chains(traced, "add|relu")
    assert chain.work[0].operators[0].outputs == 2
    assert fusible_chains(traced, "relu|mm") == [] and fusible_chains(traced, "nothing") == []


def test_measured_chains_keep_their_level():
    """Two kernels of 3 and 5 s whose model says that one takes half of both."""
    script = Script()
    script.call("relu", script.call("add", script.tensor(), script.tensor()))
    traced = script.traced()
    drawing = Drawing()
    drawing.calls = dict(traced.lowered.calls)
    for call, seconds in ((0, 3.0), (1, 5.0)):
        drawing.host(1.0, "T2", call=call)
        drawing.kernel("k", seconds, call=call)
        drawing.host(1.0, "T3", call=call)
    rank = merged(traced, fusible_chains(traced, "add|relu"), lambda before, after: (0.5 * len(after), 0.4, 0.6),
                  drawing.graph())  # fmt: skip
    (task,) = rank.tasks
    # Alone, the new work is all of itself.
    assert task.duration.seconds == pytest.approx(8.0 * 0.5 * 0.5)
    assert len(launches(rank)) == 1 and host_calls(rank) == [1, 1]


BAGS, LOOKUPS, DIM = 32, 320, 16


def bag(script, rows, dim=DIM, phase="forward"):
    indices, offsets = script.tensor(LOOKUPS, dtype="int64"), script.tensor(BAGS, dtype="int64")
    table = script.tensor(rows, dim)
    return script.call("_embedding_bag", table, indices, offsets, False, 0, shape=(BAGS, dim), phase=phase)


def test_lookups_alike_are_one_and_others_stay():
    script = Script()
    found = [bag(script, 1000), bag(script, 1000), bag(script, 1000, dim=64), bag(script, 1000)]
    script.call("cat", tuple(found), 1, shape=(BAGS, 3 * DIM + 64))
    traced = script.traced()
    (group,) = batched_lookups(traced)
    assert group.calls == (0, 1, 3)
    (record,) = group.work[0].operators
    assert record == EmbeddingLookup(1000, DIM, LOOKUPS, BAGS, 3, kernel="table_batched")
    assert [task.name for task in merged(traced, [group]).tasks] == [
        "what-if::3 batched lookups", "aten::_embedding_bag", "aten::cat",
    ]  # fmt: skip


def test_tables_of_several_sizes_are_summed_and_work_between_decides_the_place():
    script = Script()
    first = bag(script, 1000)
    script.call("relu", first, shape=(BAGS, DIM))
    bag(script, 50)
    traced = script.traced()
    (group,) = batched_lookups(traced)
    # What the second looks up is there from the beginning, so both are looked up first.
    assert group.anchor == 0 and group.work[0].operators[0].mixed
    script = Script()
    first = bag(script, 1000)
    used = script.call("relu", first, shape=(BAGS, DIM))
    indices = script.call("argsort", used, shape=(LOOKUPS,))
    script.call("_embedding_bag", script.tensor(50, DIM), indices, script.tensor(BAGS), False, 0, shape=(BAGS, DIM))
    assert batched_lookups(script.traced()) == []  # the second needs what the first found


def test_kernels_are_faster_by_family_by_name_and_inside_of_runs():
    drawing = Drawing()
    drawing.kernel("ampere_sgemm", 8.0)
    drawing.kernel("add", 4.0)
    graph = together(drawing)

    def seconds(pattern, factor=2.0):
        change = SpeedChange((FasterKernels(pattern, factor),), {})
        change.check(graph)
        return [task.duration.seconds for task in change.applied(graph).ranks[0].tasks]

    assert seconds("sgemm") == [4.0, 4.0] and seconds("SGEMM|add", 4) == [2.0, 1.0] and seconds("kernel") == [4.0, 2.0]
    with pytest.raises(InputError, match="kernels:conv.*families: kernel"):
        seconds("conv")


def test_a_family_is_meant_before_a_name():
    from dataclasses import replace

    drawing = Drawing()
    drawing.kernel("a", 8.0)
    drawing.kernel("gemm of somebody", 4.0)
    rank = drawing.graph()
    product = Gemm(1, 8, 8, 8)
    rank = replace(rank, tasks=(replace(rank.tasks[0], operators=(product,)), rank.tasks[1]))
    faster = SpeedChange((FasterKernels("gemm", 2.0),), {}).applied(ExecutionGraph((rank,)))
    assert [task.duration.seconds for task in faster.ranks[0].tasks] == [4.0, 4.0]
    # A run of two kernels, of which one is a product: 6 + 2 become 3 + 2.
    parts = tuple(
        Kernel(name, "kernel", operators, None, rank.tasks[0].duration.__class__(value, value, value))
        for name, operators, value in (("a", (product,), 6.0), ("b", (), 2.0))
    )
    rank = replace(rank, tasks=(replace(rank.tasks[0], operators=(), kernels=parts), rank.tasks[1]))
    faster = SpeedChange((FasterKernels("gemm", 2.0),), {}).applied(ExecutionGraph((rank,)))
    assert [task.duration.seconds for task in faster.ranks[0].tasks] == [pytest.approx(5.0), 4.0]


def test_a_faster_host_takes_less_for_everything_it_does():
    drawing = Drawing()
    drawing.host(6.0)
    drawing.kernel("k", 1.0, launch=2.0)
    drawing.synchronize(cost=4.0)
    graph = together(drawing)
    faster = SpeedChange((FasterHost(2.0),), {}).applied(graph)
    assert simulate(graph).step_seconds == 13.0 and simulate(faster).step_seconds == 7.0
