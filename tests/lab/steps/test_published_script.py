"""NVIDIA's script of image classifiers: what a step does beside the network."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from e2e.capture.session import capture
from e2e.lowering.lower_trace import lower_step
from e2e.step.options import StepOptions
from lab.steps.image_steps import CLASSES, ScriptRun, scripted_workload

SIDE, BATCH = 16, 8


def network() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.AdaptiveAvgPool2d((1, 1)),
            torch.nn.Flatten(),
            torch.nn.Linear(8, CLASSES),
        )


def called(run: ScriptRun, training: bool = True, channels_last: bool = True, amp: bool = True) -> Counter[str]:
    """How often each operator is called; the step is lowered too, without an operator that nobody knows."""
    workload = scripted_workload(
        "toy", network(), SIDE, BATCH, run, training=training, channels_last=channels_last, mixed_precision=amp
    )
    trace = capture(workload, StepOptions(mode="train" if training else "inference"))
    assert not lower_step(trace, StepOptions()).warnings
    return Counter(call.name for call in trace.calls)


def test_gradients_of_several_batches_are_added_up_before_the_optimizer_runs():
    one, four = (called(ScriptRun(mixup=True, batches=count)) for count in (1, 4))
    for name in ("aten::cudnn_convolution", "aten::convolution_backward", "aten::index", "cudaDeviceSynchronize"):
        assert four[name] == 4 * one[name] > 0
    names = [name for name in one if name.startswith("Optimizer.step")]
    assert names and all(one[name] == four[name] == 1 for name in names)
    assert one["aten::_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert four["aten::_amp_foreach_non_finite_check_and_unscale_"] == 1


def test_the_optimizer_runs_tensor_by_tensor():
    calls = called(ScriptRun())
    assert not any(name.startswith("aten::_foreach") for name in calls)
    assert calls["aten::zero_"] >= len(list(network().parameters()))


def test_what_the_loader_and_mixup_do_on_the_gpu():
    mixed, plain = called(ScriptRun(mixup=True)), called(ScriptRun())
    assert plain["aten::sub_"] == 1 and plain["aten::div_"] == 2  # by the deviation; the loss by the number of batches
    assert mixed["aten::index"] == 2 and plain["aten::index"] == 0
    dali = called(ScriptRun("dali-cpu", divides=True))
    assert dali["aten::sub_"] == 0 and dali["aten::clone"] > plain["aten::clone"]
    assert dali["aten::div_"] == len(list(network().parameters()))


@pytest.mark.parametrize("channels_last", [False, True])
def test_dali_s_pictures_are_copied_into_the_layout_of_the_network(channels_last):
    copies = called(ScriptRun("dali-cpu"), channels_last=channels_last)["aten::clone"]
    assert (copies > 0) is channels_last
