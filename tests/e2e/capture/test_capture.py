"""Capture: what is recorded, in which nesting and phase, on which thread; nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from costmodel.base.errors import InputError
from e2e.capture import CapturedWorkload, capture
from e2e.step.operator_trace import OperatorCall, OperatorTrace, tensors
from e2e.step.options import StepOptions

ROOT = Path(__file__).resolve().parents[3]


def toy(optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW, **settings: object) -> CapturedWorkload:
    """Convolution, batch norm, ReLU, linear, dropout, cross entropy."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(512, 10),
            torch.nn.Dropout(0.1),
        )
        data, labels = torch.empty(4, 3, 8, 8), torch.empty(4, dtype=torch.int64)
    update = optimizer(model.parameters(), **settings) if optimizer else None

    def step() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(data), labels).backward()
        if update:
            update.step()

    return CapturedWorkload("toy", model, step)


@pytest.fixture(scope="module")
def trace() -> OperatorTrace:
    return capture(toy())


def named(trace: OperatorTrace, name: str) -> list[OperatorCall]:
    return [call for call in trace.calls if call.name == name]


def test_calls_are_numbered_in_order_with_parents_before_children(trace: OperatorTrace):
    assert [call.id for call in trace.calls] == list(range(len(trace.calls)))
    assert all(call.parent is None or call.parent < call.id for call in trace.calls)
    assert trace.source == "toy"


def test_outer_calls_nest_as_in_a_profile(trace: OperatorTrace):
    product = named(trace, "aten::addmm")[0]
    assert trace.calls[product.parent].name == "aten::linear"
    assert trace.calls[product.parent].parent is None
    gradient = named(trace, "aten::mm")[0]
    node = trace.calls[gradient.parent]
    assert node.name == "AddmmBackward0"
    assert trace.calls[node.parent].name == "autograd::engine::evaluate_function: AddmmBackward0"


def test_phases_and_threads(trace: OperatorTrace):
    assert {call.thread for call in trace.calls if call.phase == "backward"} == {1}
    assert {call.thread for call in trace.calls if call.phase != "backward"} == {0}
    order = [phase for phase, _ in Counter(call.phase for call in trace.calls).items()]
    assert order == ["forward", "backward", "optimizer"]


def test_backward_is_linked_with_its_forward_call_and_module(trace: OperatorTrace):
    forward, backward = named(trace, "aten::addmm")[0], named(trace, "AddmmBackward0")[0]
    assert forward.sequence == backward.sequence is not None
    assert forward.module == backward.module == "4"


def test_library_kernels_of_a_gpu_take_the_place_of_neutral_operators(trace: OperatorTrace):
    names = Counter(call.name for call in trace.calls)
    assert names["aten::cudnn_convolution"] == names["aten::cudnn_batch_norm"] == 1
    assert names["aten::cudnn_batch_norm_backward"] == names["aten::convolution_backward"] == 1
    assert names["CudnnBatchNormBackward0"] == 1 and not names["NativeBatchNormBackward0"]
    assert names["aten::native_dropout"] == names["aten::native_dropout_backward"] == 1
    assert not names["aten::convolution"] + names["aten::native_batch_norm"] + names["aten::bernoulli_"]
    convolution = named(trace, "aten::cudnn_convolution")[0]
    bias = trace.calls[convolution.id + 1]
    assert (bias.name, bias.parent) == ("aten::add_", convolution.parent)
    assert bias.inputs[1].shape == (1, 8, 1, 1)


def test_tensors_carry_shape_type_stride_device_and_identity(trace: OperatorTrace):
    weight = named(trace, "aten::addmm")[0].inputs[2]
    assert (weight.shape, weight.stride, weight.dtype, weight.device) == ((512, 10), (1, 512), "float32", "cuda:0")
    transposed = named(trace, "aten::t")[0]
    assert transposed.inputs[0].storage == weight.storage
    assert transposed.inputs[0].id != weight.id == transposed.outputs[0].id


def test_the_steady_optimizer_step_is_recorded_not_the_one_that_makes_state(trace: OperatorTrace):
    optimizer = [call for call in trace.calls if call.phase == "optimizer"]
    names = Counter(call.name for call in optimizer)
    assert optimizer[0].name == "Optimizer.step#AdamW.step"
    assert names["aten::_foreach_addcdiv_"] == 1
    assert not names["aten::zeros_like"]
    state = next(call for call in optimizer if call.name == "aten::_foreach_lerp_").inputs[0]
    assert len(state) == 6
    again = capture(toy())
    assert Counter(call.name for call in again.calls) == Counter(call.name for call in trace.calls)


def test_gradients_are_stolen_not_copied(trace: OperatorTrace):
    """A recorder that holds on to tensors makes autograd copy each gradient."""
    accumulated = [call for call in trace.calls if call.name == "torch::autograd::AccumulateGrad"]
    children = [call.name for call in trace.calls if call.parent in {call.id for call in accumulated}]
    assert children == ["aten::detach"] * 6


def test_saved_results_leave_no_trace(trace: OperatorTrace):
    inside = {trace.calls[call.parent].name for call in named(trace, "aten::detach")}
    assert inside == {"torch::autograd::AccumulateGrad"}


def test_gradients_of_a_tensor_used_twice_are_added_in_place():
    """As in profiles of residual networks: one ``add_`` per shortcut, in the memory of the first gradient."""
    first, second = torch.nn.Linear(8, 8, device="meta"), torch.nn.Linear(8, 8, device="meta")
    data = torch.empty(4, 8, device="meta")

    both = torch.nn.ModuleList([first, second])

    def step() -> None:
        both.zero_grad()
        hidden = first(data)
        (hidden + second(hidden)).square().sum().backward()

    trace = capture(CapturedWorkload("shortcut", both, step))
    added = [call for call in trace.calls if call.phase == "backward" and call.name.startswith("aten::add")]
    assert [call.name for call in added] == ["aten::add_"]
    assert added[0].outputs[0].storage == added[0].inputs[0].storage
    assert sum(call.name == "aten::add" for call in trace.calls) == 1


def test_fused_optimizer():
    calls = capture(toy(), StepOptions(optimizer="fused")).calls
    optimizer = [call.name for call in calls if call.phase == "optimizer" and call.parent is not None]
    assert "aten::_fused_adamw_" in optimizer
    assert not any(name.startswith("aten::_foreach_mul") for name in optimizer)


def test_a_form_that_the_script_chose_stays():
    calls = capture(toy(torch.optim.SGD, lr=0.1, foreach=False), StepOptions(optimizer="fused")).calls
    assert sum(call.name == "aten::add_" for call in calls if call.phase == "optimizer") == 6


def test_without_optimizer_and_backward():
    forward_backward = capture(toy(None), StepOptions(mode="forward-backward"))
    assert {call.phase for call in forward_backward.calls} == {"forward", "backward"}
    model = torch.nn.Linear(8, 8, device="meta")
    data = torch.empty(2, 8, device="meta")
    inference = capture(CapturedWorkload("linear", model, lambda: model(data)), StepOptions(mode="inference"))
    assert [call.name for call in inference.calls] == ["aten::linear", "aten::t", "aten::addmm"]
    assert all(call.sequence is None for call in inference.calls)


def test_freed_storages_are_told_after_their_last_use(trace: OperatorTrace):
    last: dict[int, int] = {}
    for call in trace.calls:
        for tensor in (*tensors(call.inputs), *tensors(call.outputs)):
            last[tensor.storage] = call.id
    freed = [(storage, call.id) for call in trace.calls for storage in call.attributes.get("freed", ())]
    assert freed
    final = dict(freed)
    assert all(last[storage] < when for storage, when in final.items() if storage in last)


def test_pytorch_is_left_as_it_was_even_after_a_failure():
    before = (torch.cuda.is_available(), torch.nn.functional.has_torch_function, torch.cuda.synchronize)
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)

    def fail() -> None:
        raise ZeroDivisionError("the script's own")

    with pytest.raises(ZeroDivisionError, match="the script's own"):
        capture(CapturedWorkload("broken", torch.nn.Identity(), fail))
    after = (torch.cuda.is_available(), torch.nn.functional.has_torch_function, torch.cuda.synchronize)
    assert before == after
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch.dropout(torch.ones(4), 0.5, False).sum() == 4


@pytest.mark.parametrize("wrong", [{"mode": "fly"}, {"dtype": "int4"}, {"attention": "best"}, {"optimizer": "slow"}])
def test_unknown_options_name_what_is_known(wrong: dict[str, str]):
    with pytest.raises(InputError, match="choose one of"):
        StepOptions(**wrong)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, e2e.capture, e2e.lowering, e2e.step.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
