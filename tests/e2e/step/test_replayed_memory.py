"""Captured steps through PyTorch's allocator, drawn by hand: whole segments of 2 and 20 MiB can be counted."""

from __future__ import annotations

from e2e.lowering.lower_trace import memory_of
from e2e.step.memory import LARGE_SEGMENT, SMALL_SEGMENT, replayed_memory, workspace_bytes
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Phase, Tensor

MIB = 1 << 20


def tensor(number: int, size: int) -> Tensor:
    return Tensor(number, number, (size // 4,), "float32", "cuda:0")


def call(
    number: int, inputs: tuple = (), outputs: tuple = (), phase: Phase = "forward", name: str = "aten::op",
    thread: int = 0, parent: int | None = None, **more: object,
) -> OperatorCall:  # fmt: skip
    return OperatorCall(number, name, parent, thread, inputs, outputs, phase, attributes=more)  # type: ignore[arg-type]


def test_segments_and_what_is_used_of_them():
    small, large = tensor(0, 512), tensor(1, 3 * MIB)
    usage = replayed_memory(
        OperatorTrace((call(0, (small,), (large,), freed=()), call(1, (large,), (), freed=(9,)))), 0
    )
    assert usage.allocated_bytes == 512 + 3 * MIB
    # One segment of 2 MiB for the weight, one of 20 MiB for the result.
    assert usage.peak_bytes == SMALL_SEGMENT + LARGE_SEGMENT
    assert usage.breakdown["parameters"] == 512 and usage.breakdown["temporary"] == 3 * MIB


def test_what_is_freed_is_used_again():
    """Two results of 30 MiB one after the other share a segment; at the same time they need two."""
    first, second = tensor(1, 30 * MIB), tensor(2, 30 * MIB)
    after = OperatorTrace((call(0, (), (first,)), call(1, (), (second,), freed=(1,)), call(2, freed=(2,))))
    beside = OperatorTrace((call(0, (), (first,)), call(1, (), (second,)), call(2, freed=(1, 2))))
    assert replayed_memory(after, 0).peak_bytes == 30 * MIB
    assert replayed_memory(beside, 0).peak_bytes == 60 * MIB


def test_the_optimizers_state_comes_among_what_activations_left():
    """AdamW's state of 12 MiB does not fit into the segment of the activation of 10 MiB that is free by then."""
    weight, activation, state = tensor(0, 12 * MIB), tensor(1, 10 * MIB), tensor(2, 12 * MIB)
    calls = (
        call(0, (weight,), (activation,)),
        call(1, (activation,), (), "backward", freed=()),
        call(2, (weight, state), (), "optimizer", freed=(1,)),
    )
    usage = replayed_memory(OperatorTrace(calls), 0)
    # In the second step the activation's segment is there again beside the state: no more is taken.
    assert usage.peak_bytes == 34 * MIB and usage.allocated_bytes == 34 * MIB
    assert usage.breakdown["optimizer_state"] == 12 * MIB and usage.breakdown["activations"] == 10 * MIB


def test_gradients_live_until_the_next_step_begins():
    weight, gradient = tensor(0, 12 * MIB), tensor(1, 12 * MIB)
    calls = (
        call(0, (weight,), (), freed=()),
        call(1, (), (gradient,), "backward"),
        call(2, (), (), "backward", name="torch::autograd::AccumulateGrad"),
        call(3, (gradient,), (gradient,), "backward", parent=2),
    )
    usage = replayed_memory(OperatorTrace(calls), 0)
    assert usage.peak_bytes == 24 * MIB and usage.breakdown["gradients"] == 12 * MIB


def test_gradients_that_are_cleared_behind_a_step_are_not_there_in_the_next():
    """Two passes, of which the first one's are cleared between them (sharpness-aware minimisation)."""
    weight, first, second = tensor(0, 12 * MIB), tensor(1, 12 * MIB), tensor(2, 12 * MIB)

    def peak(last: str | None) -> int:
        told = {} if last is None else {"gradients": last}
        calls = (
            call(0, (weight,), (), freed=()),
            call(1, (), (first,), "backward"),
            call(2, (), (), "backward", name="torch::autograd::AccumulateGrad"),
            call(3, (first,), (first,), "backward", parent=2),
            call(4, (weight,), (), freed=(1,), gradients="cleared"),
            call(5, (), (second,), "backward"),
            call(6, (), (), "backward", name="torch::autograd::AccumulateGrad"),
            call(7, (second,), (second,), "backward", parent=6, **told),
        )
        return replayed_memory(OperatorTrace(calls), 0).allocated_bytes

    assert peak("cleared behind") == 24 * MIB
    # Otherwise those of the second pass are still there in the first one of the next step.
    assert peak(None) == peak("kept behind") == 36 * MIB


def test_an_output_lives_until_its_name_is_given_to_the_next():
    """Storage 1 is of the step before: freed behind the forward pass that makes the new one, 4."""
    weight, before, output = tensor(0, 12 * MIB), tensor(1, 30 * MIB), tensor(4, 30 * MIB)

    def peak(used: bool, freed_at: int) -> int:
        calls = (
            call(0, (weight, before) if used else (weight,), (), freed=(1,) if freed_at == 0 else ()),
            call(1, (weight,), (output,)),
            call(2, (output,), (), "backward", freed=(1,) if freed_at else ()),
        )
        return replayed_memory(OperatorTrace(calls), 0).allocated_bytes

    assert peak(used=True, freed_at=2) == peak(used=False, freed_at=2) == 72 * MIB
    assert peak(used=False, freed_at=0) == 42 * MIB


def test_activations_of_a_backward_pass_in_the_next_step_are_there_once():
    """Storage 1 is of the step before and read here; storage 4 takes its place."""
    weight, before, activation = tensor(0, 12 * MIB), tensor(1, 30 * MIB), tensor(4, 30 * MIB)
    calls = (
        call(0, (before,), (), "backward", freed=()),
        call(1, (weight,), (activation,), freed=(1,)),
        call(2, (activation,), (), "forward"),
    )
    assert replayed_memory(OperatorTrace(calls), 0).allocated_bytes == 42 * MIB


def test_what_a_call_allocates_for_itself_is_there_beside_its_result():
    trace = OperatorTrace((call(0, (tensor(0, 12 * MIB),), (tensor(1, 30 * MIB),), freed=()),))
    usage = replayed_memory(trace, 0, scratch={0: 20 * MIB})
    assert usage.allocated_bytes == 62 * MIB and usage.breakdown["buffers"] == 20 * MIB


def test_threads_and_streams_with_products_have_a_workspace_each():
    one, two = tensor(0, 512), tensor(1, 512)
    products = (
        call(0, (one, two), (), name="aten::mm", freed=()),
        call(1, (one, two), (), name="aten::addmm"),
        call(2, (one, two), (), "backward", name="aten::mm", thread=1),
        call(3, (one, two), (), name="aten::bmm", stream=5),
    )
    size = workspace_bytes("hopper")
    assert replayed_memory(OperatorTrace(products), size).breakdown["buffers"] == 3 * size
    assert size == 32 * MIB and workspace_bytes("ampere") == 8 * MIB + 128 * 1024


def test_a_recording_that_tells_no_frees_is_counted_by_its_tensors():
    recorded = OperatorTrace((call(0, (tensor(0, 512),), (tensor(1, 3 * MIB),)),))
    usage = memory_of(recorded, "hopper")
    assert usage.peak_bytes == 512 + 3 * MIB and usage.breakdown["reserve"] == 0
