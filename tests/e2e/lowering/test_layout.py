"""Memory layouts from capture to device work: NHWC follows the tensors, and what lies otherwise is copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from costmodel.operators.device_work import ConvolutionBackward, Normalization, Pooling, Rearrangement
from costmodel.operators.layers import Conv2d
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.families.work import is_channels_last, lies_dense
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import compile_rank, turns_to_channels_last
from e2e.step.execution_graph import Task
from e2e.step.options import StepOptions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(2)

    def forward(self, data):
        return self.pool(torch.relu(self.norm(self.conv(data))))


def records(layout: torch.memory_format, train: bool, pictures: torch.memory_format | None = None):
    """Operators of one step, in order."""
    with torch.device("meta"):
        net = Net().to(memory_format=layout).train(train)
        data = torch.empty((8, 16, 20, 20), memory_format=pictures or layout)

    def step():
        result = net(data)
        if train:
            result.sum().backward()

    trace = capture(CapturedWorkload("net", net, step), StepOptions(mode="train" if train else "inference"))
    return [each for task in lower(trace).tasks for each in task.operators], trace


@pytest.mark.parametrize(("layout", "expected"), [(torch.channels_last, True), (torch.contiguous_format, False)])
def test_every_kernel_over_images_takes_the_layout_of_its_tensors(layout, expected):
    found, _ = records(layout, train=True)
    images = [each.forward if isinstance(each, ConvolutionBackward) else each for each in found]
    images = [each for each in images if isinstance(each, (Conv2d, Normalization, Pooling))]
    assert len(images) == 6  # forward and backward of each; no gradient of the pictures
    assert {each.channels_last for each in images} == {expected}


def test_pictures_that_lie_otherwise_are_brought_into_the_layout_of_the_weights():
    found, _ = records(torch.channels_last, train=False, pictures=torch.contiguous_format)
    copies = [each for each in found if isinstance(each, Rearrangement)]
    assert [(each.kind, each.elements) for each in copies] == [("transpose", 8 * 16 * 20 * 20)]
    assert not any(isinstance(each, Rearrangement) for each in records(torch.channels_last, train=False)[0])


@pytest.mark.parametrize("shape", [(8, 16, 20, 20), (8, 1, 20, 20), (8, 16, 1, 1), (1, 16, 5, 1)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_strides_are_read_as_pytorch_reads_them(shape, layout):
    tensor = torch.empty(shape, device="meta").contiguous(memory_format=layout)
    says = torch._prims_common.suggest_memory_format(tensor) is torch.channels_last
    assert is_channels_last(shape, tensor.stride()) == says
    for last, wanted in ((True, torch.channels_last), (False, torch.contiguous_format)):
        assert lies_dense(shape, tensor.stride(), last) == tensor.is_contiguous(memory_format=wanted)


def test_what_is_expanded_or_cut_out_lies_in_neither_layout():
    whole = torch.empty((8, 16, 20, 20), device="meta").contiguous(memory_format=torch.channels_last)
    part = whole[:, :8]
    assert is_channels_last(part.shape, part.stride()) and not lies_dense(part.shape, part.stride(), True)
    spread = torch.empty((), device="meta").expand(8, 16, 20, 20)
    assert not is_channels_last(spread.shape, spread.stride())


def conv(channels: int, out: int, kernel: int = 3, groups: int = 1) -> Conv2d:
    return Conv2d(8, channels, 28, 28, out, (kernel, kernel), padding=(kernel // 2,) * 4, groups=groups)


def graph(*convs: Conv2d, training: bool = False, others: int = 0) -> list[Task]:
    found = [(each,) for each in convs] + [((ConvolutionBackward(each, "weight")),) for each in convs if training]
    return [Task(place, "kernel", "kernel", 0, operators=each) for place, each in enumerate([*found, *[()] * others])]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (graph(conv(128, 256)), True),
        (graph(conv(128, 256, groups=4)), False),  # 1.358 of its time
        (graph(conv(128, 128, groups=128)), True),  # depthwise counts as other
        (graph(conv(256, 256), conv(128, 128, groups=4)), True),  # mostly the large one
        (graph(conv(128, 256), others=299), False),  # one in 300 nodes
        (graph(conv(128, 256), training=True), True),
        (graph(conv(128, 256), conv(128, 256, groups=4), training=True), False),
        (graph(conv(256, 128), training=True), False),  # narrowing
        (graph(conv(64, 64), training=True), False),  # all small
        (graph(), False),
    ],
)
def test_inductor_decides_over_all_convolutions_of_a_graph(tasks, expected):
    assert turns_to_channels_last(tasks) is expected


def test_a_compiled_step_has_its_convolutions_in_nhwc():
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(128, 256, 3, bias=False)
            self.norm = nn.BatchNorm2d(256)

    with torch.device("meta"):
        net, data = Wide().eval(), torch.empty((8, 128, 20, 20))
    trace = capture(CapturedWorkload("wide", net, lambda: net(data)), StepOptions(mode="inference"))
    plain, compiled = lower(trace), compile_rank(lower(trace), trace)
    layouts = [
        [each.channels_last for task in rank.tasks for each in task.operators if isinstance(each, Conv2d)]
        for rank in (plain, compiled)
    ]
    assert layouts == [[False], [True]]
