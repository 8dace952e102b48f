"""Products that are a few elements wide, and gradients of grouped weights and batch norms beside tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu.families.convolution import convolution_class
from costmodel.gpu.families.family import InvertedShares
from costmodel.gpu.families.gemm import TensorGemm, ThinProducts, gemm_family, thin_class
from costmodel.gpu.families.normalization import plain_image_analysis
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import ConvolutionBackward, Gemm, Normalization
from costmodel.operators.layers import Conv2d

RTX = load_machine("rtx-3090")
LONG = Gemm(1, 4, 4, 1 << 24, "float16", transpose_a=True)  # gradient of CaiT's mixing of heads


def test_a_long_sum_of_few_columns_streams_its_operands():
    assert isinstance(gemm_family(LONG, RTX), ThinProducts) and thin_class(LONG) == "thin sum"
    seconds = ThinProducts(InvertedShares({}, 0.0, {})).analyse([LONG], RTX).seconds[0]
    assert seconds == pytest.approx(LONG.read_bytes / 936e9, rel=0.25)
    assert TensorGemm().analyse([LONG], RTX).seconds[0] > 20 * seconds


def test_products_of_the_tables_keep_their_model():
    for other in (replace(LONG, k=1 << 16), replace(LONG, m=64), replace(LONG, batch=2)):
        assert isinstance(gemm_family(other, RTX), TensorGemm)


def grouped(width: int, groups: int, channels_last: bool) -> str:
    conv = Conv2d(8, width * groups, 28, 28, width * groups, (3, 3), groups=groups, dtype="float16")
    return convolution_class(ConvolutionBackward(replace(conv, channels_last=channels_last), "weight"))


def test_gradients_of_grouped_weights_have_fast_kernels_for_few_shapes():
    assert grouped(4, 32, True) == "grouped-4 weight nhwc"  # ResNeXt 32x4d
    assert grouped(4, 32, False) == "direct-4 weight nchw"  # 128 channels are too few in NCHW
    assert grouped(8, 32, False) == "grouped-8 weight nchw"
    assert grouped(64, 6, True) == "direct-64 weight nhwc"  # NFNet
    assert grouped(24, 7, True) == "direct-32 weight nhwc"  # RegNetX


def test_batch_norm_of_few_channels_does_not_fill_the_memory_in_nchw():
    rows = 1 << 20
    per_channel = {}
    for last in (False, True):
        norms = [Normalization("batch_norm", rows, each, "float16", channels_last=last) for each in (8, 256)]
        narrow, wide = plain_image_analysis(norms, RTX).seconds
        per_channel[last] = narrow / 8 / (wide / 256)
    assert per_channel[True] < 1.3 and per_channel[False] > 2.5
