"""Parts of a step that its script names: which operators of forward and backward pass are in which."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

import torch
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from e2e.capture import load_script
from e2e.capture.script import capture_script
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorTrace, names_around


class Named(torch.nn.Module):
    """Two alike blocks, each in a range, inside of one around both; the head is in none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, data):
        with record_function("blocks"):
            for block in self.blocks:
                with record_function("block"):
                    data = block(data).relu()
        return self.head(data)


def captured(function, **parameters) -> OperatorTrace:
    return capture_script(load_script(function, **parameters))


def named(trace: OperatorTrace, phase: str = "") -> Counter[tuple[str, tuple[str, ...]]]:
    """(operator, names around it) -> how often, of those that launch kernels."""
    rank = lower(trace)
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for task in rank.tasks:
        info = rank.calls[task.call]
        if not phase or info.phase == phase:
            found[info.name, tuple(names_around(rank.ranges, rank.calls, task.call))] += 1
    return found


def simple():
    model = Named()
    data = torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        with record_function("pass back"):
            loss.backward()
        optimizer.step()

    return model, step


def test_operators_are_in_every_range_around_them():
    found = named(captured(simple), "forward")
    assert found["aten::addmm", ("blocks", "block")] == 2 and found["aten::relu", ("blocks", "block")] == 2
    assert found["aten::addmm", ()] == 1 and found["aten::mean", ()] == 1


def test_backward_operators_are_in_the_ranges_of_their_forward_and_around_backward():
    found = named(captured(simple), "backward")
    assert found["aten::threshold_backward", ("pass back", "blocks", "block")] == 2
    # Gradients of two weights and of the input of the second block alone.
    assert found["aten::mm", ("pass back", "blocks", "block")] == 3
    assert found["aten::mm", ("pass back",)] == 2  # the head's
    assert all("pass back" in names for _, names in found)


def test_the_same_name_twice_is_two_entries_and_pytorchs_own_marks_are_none():
    ranges = captured(simple).ranges
    assert Counter(each.name for each in ranges.entered.values()) == {"blocks": 1, "block": 2, "pass back": 1}
    (outer,) = (each for each in ranges.entered.values() if each.name == "blocks")
    assert {each.parent for each in ranges.entered.values() if each.name == "block"} == {outer.id}


def test_nothing_of_a_step_changes_by_names():
    """The same operators, in the same order, on the same host: names stand beside them."""
    plain, marked = captured(_unmarked), captured(simple)
    names = [[(call.name, call.parent, call.phase, call.module) for call in trace.calls] for trace in (plain, marked)]
    assert names[0] == names[1] and not plain.ranges
    one, other = lower(plain), lower(marked)
    assert one.threads == other.threads and one.tasks == other.tasks


def _unmarked():
    model = Named()
    model.forward = lambda data: model.head(model.blocks[1](model.blocks[0](data).relu()).relu())
    data = torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step


class OwnGradient(torch.autograd.Function):
    """Names a part of its backward pass itself."""

    @staticmethod
    def forward(context, data):
        context.save_for_backward(data)
        return data.sin()

    @staticmethod
    def backward(context, gradient):
        with record_function("by hand"):
            return gradient * context.saved_tensors[0].cos()


def test_ranges_inside_of_a_backward_pass_are_there_too():
    def make():
        model, data = torch.nn.Linear(16, 16), torch.randn(8, 16)

        def step():
            with record_function("wave"):
                result = OwnGradient.apply(model(data))
            result.sum().backward()

        return model, step

    found = named(captured(make), "backward")
    assert found["aten::cos", ("by hand", "wave")] == 1 and found["aten::mul", ("by hand", "wave")] == 1


def test_what_checkpointing_runs_again_is_in_its_ranges():
    def make():
        model, data = Named(), torch.randn(8, 16)

        def step():
            checkpoint(model, data, use_reentrant=False).sum().backward()

        return model, step

    trace = captured(make)
    rank = lower(trace)
    again = [call for call, info in rank.calls.items() if info.recomputed and info.name == "aten::addmm"]
    inside = [call for call in again if "block" in names_around(rank.ranges, rank.calls, call)]
    assert len(inside) == 2
    found = named(trace, "backward")
    assert sum(count for (name, names), count in found.items() if name == "aten::mm" and "block" in names) == 3


def test_a_range_that_ends_after_one_that_began_later_ends_alone():
    def make():
        model, data = torch.nn.Linear(16, 16), torch.randn(8, 16)

        def step():
            one, other = record_function("one"), record_function("other")
            one.__enter__()
            other.__enter__()
            first = model(data)
            one.__exit__(None, None, None)
            first.relu()
            other.__exit__(None, None, None)
            first.sigmoid()

        return model, step

    found = named(captured(make))
    assert found["aten::addmm", ("one", "other")] == 1
    assert found["aten::relu", ("one", "other")] == 1  # inside of what was open when the other began
    assert found["aten::sigmoid", ()] == 1


def test_ranges_of_nvtx_and_decorated_functions():
    def make():
        model, data = torch.nn.Linear(16, 16), torch.randn(8, 16)

        @record_function("decorated")
        def activation(given):
            return given.relu()

        def step():
            torch.cuda.nvtx.range_push("pushed")
            with torch.cuda.nvtx.range("with"):
                given = model(data)
            torch.cuda.nvtx.range_pop()
            for _ in range(3):
                activation(given)

        return model, step

    trace = captured(make)
    found = named(trace)
    assert found["aten::addmm", ("pushed", "with")] == 1 and found["aten::relu", ("decorated",)] == 3
    assert Counter(each.name for each in trace.ranges.entered.values())["decorated"] == 3
