"""Phases and steps of execution traces, by hand and on real traces of every schema version."""

from __future__ import annotations

from collections import Counter

import pytest

from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorCall, OperatorTrace
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.step_window import last_step
from tests.e2e.recorded_traces import recorded

TRACES = "execution_traces"


def call(
    number: int, *annotations: str, thread: int = 0, parent: int | None = None, name: str = "aten::mm"
) -> OperatorCall:
    attributes = {"annotations": annotations} if annotations else {}
    return OperatorCall(number, name, parent, thread, attributes=attributes)


def kept(*calls: OperatorCall) -> list[int]:
    return [each.id for each in last_step(OperatorTrace(calls)).calls]


def test_the_last_of_the_profilers_steps_is_kept():
    assert kept(call(0, "ProfilerStep#3"), call(1, "ProfilerStep#4"), call(2, "ProfilerStep#4")) == [1, 2]


def test_calls_of_other_threads_are_of_the_step_that_is_open():
    calls = [call(0, "ProfilerStep#3"), call(1, thread=1), call(2, "ProfilerStep#4"), call(3, thread=1)]
    assert kept(*calls) == [2, 3]


def test_calls_after_the_last_step_on_its_thread_are_none_of_it():
    assert kept(call(0, "ProfilerStep#3"), call(1, "ProfilerStep#4"), call(2)) == [1]


def test_without_a_profiler_a_step_ends_with_the_optimizer():
    first = [call(0), call(1, thread=1), call(2, "Optimizer.step#SGD.step")]
    second = [call(3), call(4, thread=1), call(5, "Optimizer.step#SGD.step"), call(6, "Optimizer.step#SGD.step")]
    assert kept(*first, *second, call(7)) == [3, 4, 5, 6]


def parts_of(names: str) -> list[OperatorCall]:
    """Four calls of each name and an optimizer's step behind them."""
    calls: list[OperatorCall] = []
    for name in names:
        calls += [call(len(calls) + place, name=f"aten::{name}") for place in range(4)]
        calls.append(call(len(calls), "Optimizer.step#Adam.step"))
    return calls


def test_a_step_of_several_optimizers_is_kept_whole():
    """A generator (g) and a discriminator (d): each has its own optimizer, one step has both."""
    both = parts_of("dg")
    assert kept(*both) == list(range(10))
    assert kept(*parts_of("dgdg")) == list(range(10, 20))
    assert kept(*parts_of("gdgdg"), call(25)) == list(range(15, 25))
    assert kept(*parts_of("ddd")) == list(range(10, 15))
    # A second optimizer right after the first, with a few calls of its own (a loss scaler's) before it.
    scaled = [*parts_of("d"), call(5, name="aten::d"), call(6, "Optimizer.step#SGD.step")]
    assert kept(*scaled) == list(range(7))


def test_a_first_step_that_makes_the_optimizers_state_is_a_step():
    state = [call(place, "Optimizer.step#Adam.step", name="aten::zeros_like") for place in range(3)]
    second = [call(10 + each.id, *each.attributes.get("annotations", ()), name=each.name) for each in parts_of("d")]
    first = [*[call(3 + each.id, name=each.name) for each in parts_of("d")[:4]], *state, parts_of("d")[4]]
    renumbered = [
        call(place, *each.attributes.get("annotations", ()), name=each.name) for place, each in enumerate(first)
    ]
    assert kept(*renumbered, *second) == [10, 11, 12, 13, 14]


def test_a_trace_of_one_step_stays_as_it_is():
    calls = (call(0, "ProfilerStep#3"), call(1, thread=1), call(2, "Optimizer.step#SGD.step"), call(3))
    assert last_step(OperatorTrace(calls)).calls == calls


def test_a_parent_that_is_not_kept_is_none():
    (only,) = last_step(OperatorTrace((call(0, "ProfilerStep#1"), call(1, "ProfilerStep#2", parent=0)))).calls
    assert only.parent is None


@pytest.mark.parametrize(
    "name",
    [
        "resnet_1gpu_et.json.tar.gz",  # 1.0.1
        "1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz",
        "1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz",
    ],
)
def test_phases_of_one_step_of_resnet_by_schema_version(name):
    trace = last_step(read_execution_trace(recorded(f"{TRACES}/{name}")))
    phases = [each.phase for each in trace.calls if each.parent is None]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]
    assert phases == sorted(phases, key=("forward", "backward", "optimizer").index)  # one of each, in order
    named = Counter((each.phase, each.name) for each in trace.calls)
    assert named["forward", "aten::conv2d"] == named["backward", "aten::convolution_backward"] == 53
    assert named["forward", "aten::batch_norm"] == named["backward", "aten::cudnn_batch_norm_backward"] == 53
    # Weights and biases; gradients are added to, and one foreach update of them all.
    assert named["backward", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"] == 161
    assert sum(count for (phase, name), count in named.items() if phase == "optimizer" and "_foreach_" in name) == 3


def test_phases_of_gpt2():
    trace = last_step(read_execution_trace(recorded(f"{TRACES}/hf_GPT2_et.json.tar.gz")))
    named = Counter((each.phase, each.name) for each in trace.calls)
    assert named["forward", "aten::addmm"] == 144
    assert named["backward", "AddmmBackward0"] == 144
    assert not named["backward", "aten::addmm"]
    assert named["optimizer", "aten::_foreach_lerp_"] == 1


def test_sequence_numbers_link_backward_operators_with_forward_ones():
    trace = last_step(read_execution_trace(recorded(f"{TRACES}/resnet_1gpu_et.json.tar.gz")))
    forward = {
        each.sequence: each.name for each in trace.calls if each.phase == "forward" and each.sequence is not None
    }
    pairs = Counter(
        (forward.get(each.sequence), each.name)
        for each in trace.calls
        if each.phase == "backward" and each.name == "ConvolutionBackward0"
    )
    assert sum(pairs.values()) == 53
    assert all(name is not None and "conv" in name for name, _ in pairs)


def test_kernels_of_a_compiler_are_launches_of_their_own():
    trace = last_step(read_execution_trace(recorded(f"{TRACES}/pt2_et.json.tar.gz")))
    graph = lower(trace)
    assert [task.name for task in graph.tasks] == ["aten::mm", "triton_poi_fused_add_cos_neg_sin_0"]
    (record,) = graph.tasks[1].operators
    # Four matrices of 4 x 4: three that are read and the result.
    assert (record.kind, record.elements, record.inputs, record.outputs) == ("fused", 16, 3, 1)
