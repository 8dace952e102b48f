"""Peak memory on traces drawn by hand: sizes are multiples of 512 bytes, lifetimes can be counted on fingers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from e2e.capture import CapturedWorkload, capture
from e2e.step.memory import peak_memory
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Phase, Tensor


def block(number: int, blocks: int = 1, dtype: str = "float32", storage: int | None = None) -> Tensor:
    """A tensor of ``blocks`` x 512 bytes in float32."""
    return Tensor(number, number if storage is None else storage, (128 * blocks,), dtype, "cuda:0")


def call(
    number: int, inputs: tuple = (), outputs: tuple = (), phase: Phase = "forward", **more: object
) -> OperatorCall:
    parent = more.pop("parent", None)
    name = str(more.pop("name", "aten::op"))
    return OperatorCall(number, name, parent, 0, inputs, outputs, phase, attributes=more)  # type: ignore[arg-type]


def test_nothing():
    usage = peak_memory(OperatorTrace(()))
    assert (usage.peak_bytes, usage.call, sum(usage.breakdown.values())) == (0, -1, 0)


def test_a_chain_holds_two_results_at_a_time():
    weight = block(0)
    chain = [call(n, (weight, block(n)), (block(n + 1),)) for n in range(1, 5)]
    trace = OperatorTrace((call(0, (weight,), (block(1),)), *chain))
    usage = peak_memory(trace)
    assert usage.peak_bytes == 3 * 512
    assert usage.breakdown["parameters"] == 512
    assert usage.breakdown["temporary"] == 1024


def test_views_share_their_storage():
    trace = OperatorTrace((call(0, (block(0),), (block(1, storage=0),)), call(1, (block(1, storage=0),), ())))
    assert peak_memory(trace).peak_bytes == 512


def test_roles_at_the_peak():
    weight, state, tokens = block(0), block(1, 2), block(2, 1, "int64")
    activation, gradient = block(3, 4), block(4)
    trace = OperatorTrace(
        (
            call(0, (weight, tokens), (activation,)),
            call(1, (activation,), (gradient,), "backward"),
            call(2, (), (), "backward", name="torch::autograd::AccumulateGrad"),
            call(3, (gradient,), (gradient,), "backward", parent=2),
            call(4, (weight, gradient, state), (weight,), "optimizer"),
        )
    )
    usage = peak_memory(trace)
    assert usage.call == 1
    assert usage.breakdown == {
        "parameters": 512,
        "gradients": 512,
        "optimizer_state": 1024,
        "inputs": 1024,
        "activations": 2048,
        "temporary": 0,
        "buffers": 0,
        "cache": 0,
        "reserve": 0,
    }
    assert usage.peak_bytes == sum(usage.breakdown.values())


def test_what_a_capture_says_of_freeing_counts_more_than_the_last_use():
    first, second, third = block(1), block(2), block(3)
    used = (call(0, (), (first,)), call(1, (), (second,)), call(2, (), (third,)))
    assert peak_memory(OperatorTrace(used)).peak_bytes == 512
    held = (used[0], used[1], call(2, (), (third,), freed=(1,)))
    assert peak_memory(OperatorTrace(held)).peak_bytes == 1024


def test_memory_of_earlier_steps_that_is_only_written_was_there_from_the_start():
    """A bucket of DDP. Captures number storages in the order of their first use; the numbers of others say nothing."""
    bucket, activation, gradient = block(1, 4), block(7, 8), block(8, 2)
    calls = (
        call(0, (block(0),), (activation,)),
        call(1, (activation,), (gradient,), "backward"),
        call(2, (gradient,), (bucket,), "backward", freed=(7,)),
    )
    usage = peak_memory(OperatorTrace(calls))
    assert usage.peak_bytes == (1 + 4 + 8 + 2) * 512
    unnumbered = replace(calls[2], attributes={})
    assert peak_memory(OperatorTrace((*calls[:2], unnumbered))).peak_bytes == (1 + 8 + 2) * 512


def test_memory_of_the_host_is_not_counted():
    on_host = Tensor(1, 1, (1024,), "float32", "cpu")
    assert peak_memory(OperatorTrace((call(0, (on_host,), (block(2),)),))).peak_bytes == 512


def test_small_tensors_take_a_whole_block_and_strided_ones_their_span():
    small, spread = Tensor(1, 1, (), "float32", "cuda:0"), Tensor(2, 2, (2, 1), "float32", "cuda:0", (256, 1))
    assert peak_memory(OperatorTrace((call(0, (small,), ()),))).peak_bytes == 512
    assert peak_memory(OperatorTrace((call(0, (spread,), ()),))).peak_bytes == 1536


@pytest.mark.parametrize(("optimizer", "copies"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_a_captured_step_holds_weights_gradients_and_state(optimizer: type[torch.optim.Optimizer], copies: int):
    """One large layer on a small batch: the peak lies in the optimizer or just before, and is nearly all weights."""
    layer = torch.nn.Linear(1024, 1024, bias=False, device="meta")
    data = torch.empty(1, 1024, device="meta")
    update = optimizer(layer.parameters(), lr=0.1)

    def step() -> None:
        update.zero_grad()
        layer(data).sum().backward()
        update.step()

    usage = peak_memory(capture(CapturedWorkload("layer", layer, step)))
    size = 4 * 1024 * 1024
    assert usage.breakdown["gradients"] == size
    assert usage.breakdown["optimizer_state"] == copies * size
    assert usage.breakdown["parameters"] == pytest.approx(size, rel=0.01)


def test_hooks_of_gradients_that_update_parameters_leave_no_gradient():
    """Parameters and states that an optimizer updates in the backward pass are seen there below the gradient's node."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(4)))
    data = torch.empty(1, 1024, device="meta")
    updates = {each: torch.optim.AdamW([each], lr=0.1) for each in layers.parameters()}

    def update(parameter: torch.Tensor) -> None:
        updates[parameter].step()
        updates[parameter].zero_grad()

    for each in updates:
        each.register_post_accumulate_grad_hook(update)
    usage = peak_memory(capture(CapturedWorkload("layers", layers, lambda: layers(data).sum().backward())))
    size = 4 * 1024 * 1024
    assert usage.breakdown["gradients"] == size
    assert usage.breakdown["parameters"] == pytest.approx(4 * size, rel=0.01)
    assert usage.breakdown["optimizer_state"] == pytest.approx(8 * size, rel=0.01)


def test_gradients_that_stay_and_are_cleared_in_place_are_gradients():
    layer = torch.nn.Linear(1024, 1024, bias=False, device="meta")
    data = torch.empty(1, 1024, device="meta")

    def step() -> None:
        layer.zero_grad(set_to_none=False)
        layer(data).sum().backward()

    usage = peak_memory(capture(CapturedWorkload("layer", layer, step)))
    size = 4 * 1024 * 1024
    assert usage.breakdown["gradients"] >= size and usage.breakdown["optimizer_state"] == 0
    assert usage.breakdown["parameters"] == pytest.approx(size, rel=0.01)


def test_a_tensor_that_gets_other_memory_frees_its_own_unless_another_has_it():
    size = 1 << 20
    layer = torch.nn.Linear(1, 1, device="meta")

    def peak(step: Callable[[], object]) -> int:
        return peak_memory(capture(CapturedWorkload("moved", layer, step))).peak_bytes

    def made() -> torch.Tensor:
        return torch.ones(size, device="meta", dtype=torch.uint8)

    def moved(held: bool) -> None:
        first, second = made(), made()
        view = first.data if held else None  # no operator that is recorded
        first.data = second
        del second
        third = made()
        if view is not None:
            first.data = view
        first + third

    # The first memory is free before the third is made, and the second lives on under the first name.
    assert peak(lambda: moved(False)) == 3 * size
    # It is not free where a view has it, which becomes the tensor's again; the second is then.
    assert peak(lambda: moved(True)) == 3 * size

    def back() -> None:
        first = made()
        view = first.data
        first.data = made()
        first.data = view
        del view
        first + (made() + made())

    assert peak(back) == 4 * size


def test_saved_activations_stay_until_the_backward_pass():
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6))).to(
        "meta"
    )
    data = torch.empty(4096, 64, device="meta")
    training = peak_memory(capture(CapturedWorkload("deep", layers, lambda: layers(data).sum().backward())))
    size = 4096 * 64 * 4
    # At the peak the last layer's result has given way to its gradient and the one before.
    assert training.breakdown["activations"] == pytest.approx(5 * size, rel=0.01)
    assert training.breakdown["temporary"] == pytest.approx(2 * size, rel=0.01)
    with torch.no_grad():
        inference = peak_memory(capture(CapturedWorkload("deep", layers, lambda: layers(data))))
    assert inference.breakdown["activations"] == 0
    assert inference.peak_bytes < training.peak_bytes
