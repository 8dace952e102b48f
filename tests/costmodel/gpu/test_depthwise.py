"""Depthwise convolutions: which of them PyTorch gives to cuDNN, and what its own gradient of the weights costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.convolution import TensorConvolution, asks_cudnn, convolution_class, own_gradient_seconds
from costmodel.gpu.families.family import InvertedShares
from costmodel.gpu.families.rates import kernel_floor, latency
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d

CARD = load_machine("rtx-3090")
THREE = Conv2d(64, 144, 28, 28, 144, (3, 3), padding=(1, 1, 1, 1), groups=144, dtype="float16")
SEVEN = replace(THREE, kernel=(7, 7), padding=(3, 3, 3, 3))


def strided(channels: int, width: int, batch: int = 64) -> Conv2d:
    return replace(
        THREE,
        batch=batch,
        in_channels=channels,
        out_channels=channels,
        groups=channels,
        height=width,
        width=width,
        stride=(2, 2),
    )


@pytest.mark.parametrize(
    ("conv", "cudnn"),
    [
        (THREE, True),
        (replace(THREE, kernel=(5, 5), padding=(2, 2, 2, 2)), True),
        (SEVEN, False),
        (replace(SEVEN, channels_last=True), True),
        (replace(THREE, dtype="bfloat16"), False),
        (replace(THREE, dtype="tf32"), False),
        (replace(THREE, in_channels=24, out_channels=24, groups=24), False),
        (replace(THREE, dilation=(2, 2), padding=(2, 2, 2, 2)), False),
        (replace(THREE, height=6, width=6), False),
        (replace(THREE, kernel=(1, 11), padding=(0, 5, 0, 5)), False),
        (strided(144, 28), False),
        (strided(256, 28), True),
        (strided(256, 14), False),
        (strided(512, 14), True),
        (strided(144, 14, batch=1), True),
        (Conv2d(64, 96, 1, 256, 96, (1, 7), padding=(0, 3, 0, 3), groups=96, dtype="float16"), True),
    ],
)
def test_cudnn_is_asked_as_pytorch_asks_it(conv: Conv2d, cudnn: bool) -> None:
    assert asks_cudnn(conv) is cudnn


def test_the_own_gradient_passes_over_the_tensors_once_per_element_of_the_window() -> None:
    # 144 * 49 blocks of 256 threads, 6 of them on each of 82 multiprocessors; 8 pictures of 25 warps for each warp.
    expected = 144 * 49 / (82 * 6) * 8 * 25 * (latency(CARD, 1) + 48 * latency(CARD, 0)) / 49
    assert own_gradient_seconds(SEVEN, CARD) == pytest.approx(expected)
    found = TensorConvolution(InvertedShares({}, 0.0, {})).analyse([ConvolutionBackward(SEVEN, "weight")], CARD)
    assert found.seconds[0] == pytest.approx(expected + kernel_floor(CARD))


def test_few_channels_take_as_long_as_those_that_fill_the_gpu() -> None:
    narrow, filled = (replace(SEVEN, in_channels=c, out_channels=c, groups=c) for c in (2, 10))
    assert own_gradient_seconds(narrow, CARD) == own_gradient_seconds(filled, CARD)


def test_the_own_gradient_is_a_class_of_its_own() -> None:
    assert convolution_class(THREE) == "depthwise-3 forward nchw"
    assert convolution_class(SEVEN) == "depthwise-7 forward nchw"
    assert convolution_class(ConvolutionBackward(SEVEN, "data")) == "depthwise-7 data nchw"
    assert convolution_class(ConvolutionBackward(SEVEN, "weight")) == "channelwise weight nchw"
    assert convolution_class(replace(SEVEN, channels_last=True)) == "depthwise-7 forward nhwc"


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-32gb", "a100-sxm-80gb", "l4"])
@pytest.mark.parametrize("wrt", [None, "data", "weight"])
def test_in_32_bits_they_are_the_same_kernels_none_faster_than_memory(gpu: str, wrt: Literal["data", "weight"] | None):
    machine = load_machine(gpu)
    fastest = machine.memory[-1].datasheet
    assert fastest is not None
    large = replace(THREE, height=56, width=56)

    def seconds(dtype: str) -> float:
        conv = replace(large, dtype=dtype)
        (found,) = gpu_cost_model(machine).estimate([conv if wrt is None else ConvolutionBackward(conv, wrt)])
        return found.seconds

    plain = replace(large, dtype="float32")
    assert seconds("float32") == pytest.approx(seconds("tf32"))
    assert seconds("float32") > (plain.input_bytes + plain.output_bytes) / fastest
