"""Convolutions on tensor cores and kernels over images, by layout, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel.base.errors import InputError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.convolution import Convolution, TensorConvolution, convolution_class, convolution_pieces
from costmodel.gpu.families.family import InvertedShares, inverted_shares, shares_of
from costmodel.gpu.families.memory_bound import WARM_SHARE
from costmodel.gpu.families.normalization import ImageKernels, image_class
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bandwidth, l2_bytes, vector_rate
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import ConvolutionBackward, Normalization, Pooling
from costmodel.operators.layers import Conv2d

A100 = load_machine("a100-sxm-80gb")
ONE = InvertedShares({}, 0.0, {})
CONV = Conv2d(64, 128, 28, 28, 256, (3, 3), padding=(1, 1, 1, 1), dtype="float16")
LAST = replace(CONV, channels_last=True)
DEPTHWISE = Conv2d(64, 128, 28, 28, 128, (5, 5), padding=(2, 2, 2, 2), groups=128, dtype="float16")


def seconds(operator: Conv2d | ConvolutionBackward, shares: InvertedShares = ONE) -> float:
    return float(TensorConvolution(shares).analyse([operator], A100).seconds[0])


@pytest.mark.parametrize(
    "wrap", [lambda c: c, lambda c: ConvolutionBackward(c, "data"), lambda c: ConvolutionBackward(c, "weight")]
)
def test_channels_first_turns_input_and_output_around_once(wrap):
    turned = 2 * (64 * 128 * 28 * 28 + 64 * 256 * 28 * 28) * 2
    assert seconds(wrap(CONV)) - seconds(wrap(LAST)) == pytest.approx(turned / dram_bandwidth(A100))


def test_factors_multiply_the_kernel_and_the_turning_each():
    floor, turned = kernel_floor(A100), seconds(CONV) - seconds(LAST)
    shares = InvertedShares({"spatial forward nchw": 2.0, "turning spatial forward": 0.5}, 0.1, {})
    assert seconds(CONV, shares) == pytest.approx(2 * (seconds(LAST) - floor) + 0.5 * turned + floor)
    assert seconds(LAST, shares) == seconds(LAST)


def test_depthwise_is_bytes_and_a_fifth_of_the_vector_rate_and_is_not_turned():
    pixels = 64 * 128 * 28 * 28
    expected = (2 * pixels * 2 + 128 * 25 * 2) / dram_bandwidth(A100) + 2 * 25 * pixels / (0.2 * vector_rate(A100))
    for channels_last in (False, True):
        assert seconds(replace(DEPTHWISE, channels_last=channels_last)) == pytest.approx(expected + kernel_floor(A100))


def test_classes_are_named_by_kind_direction_and_layout():
    grouped = replace(CONV, groups=8)
    names = [
        convolution_class(each)
        for each in (
            LAST,
            ConvolutionBackward(replace(CONV, kernel=(1, 1), padding=(0, 0, 0, 0)), "weight"),
            replace(CONV, in_channels=3),
            replace(DEPTHWISE, stride=(2, 2)),
            ConvolutionBackward(grouped, "data"),
            replace(CONV, in_channels=1024, out_channels=1024, groups=2),
            ConvolutionBackward(replace(CONV, in_channels=1024, out_channels=1024, groups=2), "weight"),
        )
    ]
    assert names == [
        "spatial forward nhwc",
        "pointwise weight nchw",
        "stem forward nchw",
        "depthwise-5-strided forward nchw",
        "grouped-16 data nchw",
        "spatial forward nchw",
        "direct-64 weight nchw",
    ]


def test_gradients_of_wide_grouped_weights_do_not_beat_fp32_before_ampere():
    wide = Conv2d(1, 2048, 84, 84, 2048, (3, 3), padding=(1, 1, 1, 1), groups=4, dtype="float16")
    volta = load_machine("v100-sxm2-16gb")
    on_a100, on_v100 = (
        convolution_pieces([ConvolutionBackward(wide, "weight")], machine).terms["compute"][0]
        for machine in (A100, volta)
    )
    # Eight channels of a group count in NCHW, at a twentieth of the rate.
    assert on_a100 == pytest.approx(wide.flops * 8 / 512 / (0.05 * vector_rate(A100)))
    assert on_v100 == pytest.approx(wide.flops / vector_rate(volta))
    assert on_a100 < wide.flops / vector_rate(A100)


def test_gradients_of_grouped_weights_in_fp32_take_as_long_for_any_narrow_width():
    volta = load_machine("v100-sxm2-16gb")

    def weight_seconds(groups: int) -> float:
        conv = Conv2d(64, 1024, 28, 28, 1024, (3, 3), padding=(1, 1, 1, 1), groups=groups)
        return float(Convolution().analyse([ConvolutionBackward(conv, "weight")], volta).seconds[0])

    pixels = 64 * 28 * 28 * 1024
    expected = 2 * 9 * 8 * pixels / (0.05 * vector_rate(volta)) + kernel_floor(volta)
    assert [weight_seconds(groups) for groups in (256, 32)] == pytest.approx([expected] * 2)
    plain = Conv2d(64, 1024, 28, 28, 1024, (3, 3), padding=(1, 1, 1, 1), groups=256)
    assert float(Convolution().analyse([plain], volta).seconds[0]) < expected / 2
    # Two groups of 512 are limited by their products.
    assert weight_seconds(2) > 2 * 9 * 512 * pixels / vector_rate(volta)


def test_channels_are_padded_to_sixteen_bytes():
    narrow, padded = (replace(LAST, in_channels=channels, height=56, width=56) for channels in (121, 128))
    compute = [convolution_pieces([each], A100).terms["compute"][0] for each in (narrow, padded)]
    assert compute[0] == pytest.approx(compute[1])


def resnet_50(batch: int) -> list[Conv2d]:
    """The convolutions of torchvision's ResNet-50 in TF32."""
    found = [Conv2d(batch, 3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), dtype="tf32")]
    channels, side = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            step = 2 if block == 0 and width > 64 else 1
            found.append(Conv2d(batch, channels, side, side, width, (1, 1), dtype="tf32"))
            found.append(Conv2d(batch, width, side, side, width, (3, 3), (step, step), (1, 1, 1, 1), dtype="tf32"))
            if block == 0:
                found.append(Conv2d(batch, channels, side, side, 4 * width, (1, 1), (step, step), dtype="tf32"))
            side //= step
            found.append(Conv2d(batch, width, side, side, 4 * width, (1, 1), dtype="tf32"))
            channels = 4 * width
    return found


# Milliseconds of the kernels of ResNet-50 on V100 by kind, in the step profiled in traces/resnet50_V100 (32 pictures,
# FP32, cuDNN 8): forward, gradients of the data and of the weights.
PROFILED = {
    "3x3": (4.01, 3.93, 5.39),
    "3x3 strided": (1.83, 2.68, 1.92),
    "1x1": (9.84, 9.57, 13.52),
    "1x1 strided": (1.65, 2.47, 1.99),
}


def test_gradients_outside_the_tensor_cores_are_those_of_a_profiled_step():
    convs = [replace(each, dtype="float32") for each in resnet_50(32)[1:]]
    model = gpu_cost_model(load_machine("v100-sxm2-32gb"))
    for kind, measured in PROFILED.items():
        window, _, strided = kind.partition(" ")
        group = [each for each in convs if (each.kernel[0] == 3) == (window == "3x3")]
        group = [each for each in group if (each.stride[0] > 1) == bool(strided)]
        backward = [[ConvolutionBackward(each, wrt) for each in group] for wrt in ("data", "weight")]
        found = [sum(each.seconds for each in model.estimate(part)) * 1e3 for part in (group, *backward)]
        assert found == pytest.approx(measured, rel=0.13), kind


def test_the_gradient_of_the_data_is_a_convolution_with_channels_exchanged():
    model = gpu_cost_model(load_machine("v100-sxm2-16gb"))
    conv = Conv2d(8, 96, 30, 40, 160, (3, 3), padding=(0, 1, 0, 1))
    exchanged = Conv2d(8, 160, 28, 40, 96, (3, 3), padding=(2, 1, 2, 1))
    (gradient,), (forward,) = model.estimate([ConvolutionBackward(conv, "data")]), model.estimate([exchanged])
    assert gradient.seconds == forward.seconds and gradient.source == forward.source == "fitted"
    (strided,) = model.estimate([ConvolutionBackward(replace(conv, stride=(2, 2)), "data")])
    assert strided.source == "analytic"


def test_gradients_of_weights_save_multiplications_until_the_transformed_tensors_are_too_large():
    volta = load_machine("v100-sxm2-32gb")

    def rate(batch: int, dilation: int = 1) -> float:
        conv = Conv2d(batch, 256, 96, 128, 256, (3, 3), padding=(dilation,) * 4, dilation=(dilation, dilation))
        return conv.flops / float(Convolution().analyse([ConvolutionBackward(conv, "weight")], volta).seconds[0])

    peak = vector_rate(volta)
    assert rate(2) > 1.2 * peak  # 113 MB of transformed tensors
    assert rate(8) < peak and rate(2, dilation=2) < peak  # 453 MB; windows with holes


def test_convolutions_are_those_of_a_step_recorded_on_a_gpu_that_no_factor_was_fitted_on():
    # HolisticTraceAnalysis, ResNet-50 with 32 pictures on A100 of 40 GB: 4.32 ms forward, 9.37 ms backward, without
    # the kernels that turn layouts. Without waits between waves it would be 13 % less.
    machine = load_machine("a100-sxm-40gb")
    forward = resnet_50(32)
    assert len(forward) == 53
    backward = [ConvolutionBackward(each, wrt) for each in forward for wrt in ("data", "weight")][1:]
    pieces = convolution_pieces([*forward, *backward], machine)
    factors = [inverted_shares().factor(name) for name in pieces.names]
    assert float(np.dot(factors, pieces.kernel)) == pytest.approx(13.69e-3, rel=0.06)


def test_blocks_wait_for_memory_wave_by_wave_where_it_is_stacked():
    thin = replace(LAST, kernel=(1, 1), padding=(0, 0, 0, 0), in_channels=64, batch=1024)
    for name, waits in (("a100-sxm-80gb", True), ("v100-sxm2-16gb", True), ("h100-sxm", True), ("rtx-3090", False)):
        (waiting,) = convolution_pieces([thin], load_machine(name)).terms["launch"]
        (longer,) = convolution_pieces([replace(thin, batch=4096)], load_machine(name)).terms["launch"]
        assert longer == pytest.approx(4 * waiting, rel=0.05) and bool(waiting > 0) is waits, name


def test_number_types_choose_the_family():
    model = gpu_cost_model(A100)
    tensor, simt = model.estimate([LAST, replace(LAST, dtype="float32")])
    assert tensor.seconds < simt.seconds / 3
    assert model.estimate([replace(CONV, dtype="float32")])[0].seconds == simt.seconds


def test_batch_norm_reads_again_in_training_and_gradients_read_both_twice():
    rows, columns, size = 64 * 56 * 56, 256, 2
    tensor = rows * columns * size
    norms = [
        Normalization("batch_norm", rows, columns, "float16", "forward", training=False),
        Normalization("batch_norm", rows, columns, "float16", "forward"),
        Normalization("batch_norm", rows, columns, "float16", "backward", channels_last=True),
    ]
    found = (ImageKernels(ONE).analyse(norms, A100).seconds - kernel_floor(A100)) * dram_bandwidth(A100) / tensor
    found += WARM_SHARE * l2_bytes(A100) / tensor  # what the kernel before left in L2
    assert found == pytest.approx(np.array([2.0, 3.0, 5.0]), rel=1e-3)
    assert [image_class(each) for each in norms] == [
        "batch-norm forward evaluation nchw",
        "batch-norm forward nchw",
        "batch-norm backward nhwc",
    ]


# Published in ms by xwang233 (GitHub, code-snippet). batchnorm3d-channels-last: one volume of 112^3.
# conv3d-channels-last: two volumes (channels, extent, filters, window, stride), forward and both gradients together,
# NCDHW and NDHWC.
NORMS = {
    "a100-sxm-40gb": {8: (0.808, 2.217), 64: (0.984, 2.863)},
    "v100-sxm2-32gb": {8: (0.780, 2.048), 64: (1.110, 3.492)},
}
LAYERS = {
    "a100-sxm-40gb": {
        (4, 128, 32, 3, 1): ((3.639, 8.261), (2.910, 6.866)),
        (32, 128, 32, 3, 1): ((3.858, 8.894), (2.812, 6.966)),
        (32, 128, 64, 3, 2): ((1.195, 5.627), (0.532, 4.517)),
        (32, 128, 64, 2, 2): ((1.082, 3.523), (0.428, 2.412)),
        (128, 64, 64, 3, 1): ((1.583, 3.502), (1.225, 2.869)),
        (256, 32, 128, 3, 1): ((0.623, 1.344), (0.530, 1.204)),
    },
    "v100-sxm2-16gb": {
        (32, 128, 32, 3, 1): ((8.575, 19.555), (6.957, 16.683)),
        (32, 128, 64, 3, 2): ((2.409, 8.173), (1.414, 6.464)),
        (32, 128, 64, 2, 2): ((1.855, 5.449), (0.800, 4.605)),
        (128, 64, 64, 3, 1): ((4.098, 9.245), (3.472, 8.175)),
    },
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_few_large_channels_take_what_was_measured(name):
    for channels, measured in NORMS[name].items():
        norms = [
            Normalization("batch_norm", 112**3, channels, "float16", each, apart=True)
            for each in ("forward", "backward")
        ]
        found = ImageKernels().analyse(norms, load_machine(name)).seconds * 1e3
        assert np.abs(np.log(found / measured)).max() < 0.2
        last = ImageKernels().analyse([replace(each, channels_last=True) for each in norms], load_machine(name)).seconds
        assert channels > 8 or (last * 1e3 < found / 5).all()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_of_volumes_take_what_was_measured(name, channels_last):
    machine = load_machine(name)
    for (channels, extent, filters, window, stride), measured in LAYERS[name].items():
        out, around = extent // stride, (window - 1) // 2
        conv = Conv2d(
            2 * out,
            channels * window,
            extent,
            extent,
            filters,
            (window, window),
            (stride, stride),
            padding=(around,) * 4,
            dtype="float16",
            channels_last=channels_last,
            depth=(window, 2 * extent),
        )
        each = [conv, ConvolutionBackward(conv, "data"), ConvolutionBackward(conv, "weight")]
        forward, data, weight = TensorConvolution().analyse(each, machine).seconds * 1e3
        # The measured ones add a bias, and sum its gradient: at most the bytes of the result three times.
        bias = 3 * conv.output_bytes / dram_bandwidth(machine) * 1e3 / 2
        errors = np.log(np.array([forward + bias, data + weight + bias / 2]) / measured[channels_last])
        assert np.abs(errors).max() < 0.26, (channels, extent, filters, window, stride)


def test_four_channels_of_a_volume_fill_as_much_as_thirty_two():
    def volume(channels: int, depth: tuple[int, int] | None) -> Conv2d:
        window = 1 if depth is None else depth[0]
        planes = 256
        return Conv2d(planes, channels * window, 128, 128, 32, (3, 3), padding=(1,) * 4, dtype="float16", depth=depth)

    pieces = convolution_pieces([volume(4, (3, 256)), volume(32, (3, 256)), volume(4, None), volume(32, None)], A100)
    compute = pieces.terms["compute"]
    assert compute[0] == compute[1] and compute[2] < compute[3] / 2
    assert pieces.names == ["volume forward", "volume forward", "stem forward nchw", "spatial forward nchw"]


def test_gradients_of_volumes_outside_the_tensor_cores_are_dearer_than_their_products():
    volta, windows = load_machine("v100-sxm2-32gb"), {1: (0,) * 4, 3: (1,) * 4}
    for window, padding in windows.items():
        conv = Conv2d(64, 128 * window, 56, 56, 128, (window, window), padding=padding, depth=(window, 64))
        each = [conv, ConvolutionBackward(conv, "data"), ConvolutionBackward(conv, "weight")]
        forward, data, weight = Convolution().analyse(each, volta).seconds
        assert 1.8 < data / forward < 2.4 and 1.8 < weight / forward < 2.4
        halves = [replace(conv, dtype="float16"), ConvolutionBackward(replace(conv, dtype="float16"), "data")]
        forward, data = TensorConvolution().analyse(halves, volta).seconds
        assert data < 1.5 * forward


def test_a_factor_of_pooling_leaves_the_launch_alone():
    pool = Pooling("max", 64, 64, 112, 112, 56, 56, (3, 3), "float16")
    plain = ImageKernels(ONE).analyse([pool], A100).seconds[0]
    twice = ImageKernels(InvertedShares({"max-pooling forward nchw": 2.0}, 0.1, {})).analyse([pool], A100).seconds[0]
    assert twice - plain == pytest.approx(plain - kernel_floor(A100))


@pytest.mark.parametrize(("name", "bytes_per_pixel"), [("a100-sxm-40gb", 104), ("v100-sxm2-32gb", 88)])
def test_spilled_registers_of_max_pooling_backward_go_through_l2(name, bytes_per_pixel):
    chip, pixels = load_machine(name), 32 * 64 * 112 * 112
    pool = Pooling("max", 32, 64, 112, 112, 56, 56, (3, 3), direction="backward")
    without = replace(chip, gpu=replace(chip.chip(), max_threads=1536))
    found, plain = (ImageKernels(ONE).analyse([pool], each).terms["memory:L2"][0] for each in (chip, without))
    assert (found - plain) * l2_bandwidth(chip) == pytest.approx(pixels * bytes_per_pixel)
    for other in ({"channels_last": True}, {"direction": "forward"}, {"kind": "average"}):
        operator = replace(pool, **other)
        kept, same = (ImageKernels(ONE).analyse([operator], each).seconds[0] for each in (chip, without))
        assert kept == same


@pytest.mark.parametrize(
    ("name", "recorded"), [("a100-sxm-40gb", 0.599e-3), ("v100-sxm2-32gb", 1.109e-3)], ids=["A100", "V100"]
)
def test_max_pooling_backward_takes_what_recorded_resnet_50_steps_show(name, recorded):
    pool = Pooling("max", 32, 64, 112, 112, 56, 56, (3, 3), direction="backward")
    assert ImageKernels().analyse([pool], load_machine(name)).seconds[0] == pytest.approx(recorded, rel=0.06)


def test_a_corrupt_file_of_shares_is_named(tmp_path):
    file = tmp_path / "shares.json"
    file.write_text('{"factors": [], "spread": 1}', encoding="utf-8")
    with pytest.raises(InputError, match=r"shares\.json.*install the package again"):
        inverted_shares(file)
    assert inverted_shares(tmp_path / "none.json").factor("anything") == 1.0


H200 = load_machine("h200-sxm")


def turned_on_hopper(conv: Conv2d) -> float:
    return float(convolution_pieces([conv], H200).turned[0])


def test_hopper_turns_weights_too_in_tiles_of_32_by_32():
    images = 2 * (64 * 128 * 784 * 800 / 784 + 64 * 256 * 784 * 800 / 784) * 2
    weights = 2 * 256 * 128 * 9 * (32 / 9) * 2
    expected = (images + weights) / dram_bandwidth(H200) + 3 * kernel_floor(H200)
    assert turned_on_hopper(CONV) == pytest.approx(expected)
    # Weights of one by one need no turning, nor does a picture of one pixel; three channels fill a tenth of a tile.
    pixel = Conv2d(64, 128, 1, 1, 256, (1, 1), dtype="tf32")
    assert turned_on_hopper(pixel) == 0
    few = Conv2d(64, 3, 32, 32, 64, (1, 1), stride=(2, 2), dtype="tf32")
    traffic = 2 * 4 * 64 * (32 * 1024 + 64 * 256)
    assert turned_on_hopper(few) == pytest.approx(traffic / dram_bandwidth(H200) + 2 * kernel_floor(H200))


def test_hopper_multiplies_planes_of_pointwise_convolutions_as_they_are():
    conv = Conv2d(64, 256, 14, 14, 1024, (1, 1), dtype="tf32")
    assert turned_on_hopper(conv) == 0 and turned_on_hopper(replace(conv, height=7, width=7)) > 0
    assert turned_on_hopper(replace(conv, stride=(2, 2))) > 0
    # Picture by picture: 196 pixels are two tiles of 128.
    planes, together = (
        convolution_pieces([each], H200).terms["compute"][0] for each in (conv, replace(conv, channels_last=True))
    )
    assert 1.2 < planes / together < 2


@pytest.mark.parametrize(
    ("conv", "measured"),
    [  # NCHW: turning alone would take 7 us; NHWC: 3 and 5 channels
        (Conv2d(1, 3, 8, 8, 32, (3, 3), padding=(1, 1, 1, 1), dtype="bfloat16"), 4.96e-6),
        (Conv2d(1, 3, 28, 28, 128, (3, 3), (2, 2), (1, 1, 1, 1), dtype="bfloat16"), 5.18e-6),
        (Conv2d(168, 64, 17, 17, 384, (1, 1), dtype="tf32"), 58.4e-6),
        (Conv2d(2, 5, 56, 56, 96, (7, 7), padding=(3, 3, 3, 3), dtype="tf32", channels_last=True), 28.6e-6),
        (Conv2d(6, 3, 56, 56, 800, (7, 7), padding=(3, 3, 3, 3), dtype="bfloat16", channels_last=True), 231.6e-6),
    ],
)
def test_hopper_convolves_few_channels_outside_the_tensor_cores(conv, measured):
    (found,) = gpu_cost_model(H200).estimate([conv])
    assert found.seconds == pytest.approx(measured, rel=0.27)
    # A stem with a stride and NHWC channels of whole loads stay on them.
    last = Conv2d(128, 3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), dtype="bfloat16", channels_last=True)
    wide = replace(last, in_channels=8, stride=(1, 1))
    for each in (last, wide):
        (estimate,) = gpu_cost_model(H200).estimate([each])
        pieces = convolution_pieces([each], H200)
        factor = shares_of(H200).factor(pieces.names[0])
        assert estimate.seconds == pytest.approx(factor * pieces.kernel[0] + kernel_floor(H200))


SMALL = Conv2d(1, 224, 7, 7, 352, (3, 3), padding=(1, 1, 1, 1), dtype="bfloat16")


@pytest.mark.parametrize(
    ("operator", "steps", "measured"),
    [
        (Conv2d(1, 224, 56, 56, 64, (7, 7), padding=(3, 3, 3, 3), dtype="bfloat16"), 224 * 49 / 64, 79.8e-6),
        (Conv2d(8, 96, 35, 35, 64, (5, 5), (2, 2), (2, 2, 2, 2), dtype="tf32"), 96 * 25 / 32, 36.7e-6),
        (ConvolutionBackward(SMALL, "data"), 352 * 9 / 64, 29.4e-6),
    ],
)
def test_few_blocks_of_hopper_take_a_step_for_128_bytes_of_the_sum(operator, steps, measured):
    (kernel,) = convolution_pieces([operator], H200).kernel
    assert kernel == pytest.approx(np.ceil(steps) * 0.3e-6)
    (found,) = gpu_cost_model(H200).estimate([operator])
    assert found.seconds == pytest.approx(measured, rel=0.25)


def test_single_kernels_of_hopper_lie_in_the_interval_that_80_of_100_do():
    conv = Conv2d(64, 64, 56, 56, 64, (3, 3), padding=(1, 1, 1, 1), dtype="tf32")
    (found,) = gpu_cost_model(H200).estimate([conv])
    assert found.upper / found.seconds == pytest.approx(np.exp(np.hypot(0.5, 0.15)))
    (older,) = gpu_cost_model(load_machine("a100-sxm-80gb")).estimate([conv])
    assert older.upper / older.seconds < 1.3


@pytest.mark.parametrize(
    ("channels", "dtype", "last", "wide"),
    [(3, "bfloat16", False, True), (64, "tf32", True, True), (64, "tf32", False, False), (64, "float16", True, False)],
)
def test_depthwise_gradients_that_no_network_of_the_fit_has_are_unknown(channels, dtype, last, wide):
    conv = Conv2d(8, channels, 28, 28, channels, (3, 3), padding=(1, 1, 1, 1), groups=channels, dtype=dtype)
    weight = ConvolutionBackward(replace(conv, channels_last=last), "weight")
    (found,) = gpu_cost_model(load_machine("a100-sxm-80gb")).estimate([weight])
    assert (found.upper / found.seconds == pytest.approx(3)) == wide


@pytest.mark.parametrize(
    ("operator", "measured"),
    [
        (Normalization("batch_norm", 64 * 112 * 112, 64), 462e-6),
        (Normalization("batch_norm", 64 * 56 * 56, 256), 205e-6),
        (Normalization("batch_norm", 64 * 49, 2048), 38.9e-6),
        (Normalization("batch_norm", 64 * 112 * 112, 64, direction="backward"), 1165e-6),
        (Normalization("batch_norm", 64 * 49, 2048, direction="backward"), 54e-6),
        (Pooling("average", 527, 32, 32, 32, 16, 16, (2, 2), direction="backward"), 338e-6),
        (Pooling("max", 64, 64, 112, 112, 56, 56, (3, 3), direction="backward"), 573e-6),
        (Normalization("layer_norm", 4096, 768), 14.2e-6),
        (Normalization("layer_norm", 6039, 4096, "bfloat16"), 43.8e-6),
        (Normalization("rms_norm", 2048, 512, direction="backward"), 5.6e-6),
        (Conv2d(64, 64, 56, 56, 64, (3, 3), padding=(1, 1, 1, 1), dtype="tf32"), 142e-6),
        (Conv2d(64, 64, 56, 56, 256, (1, 1), dtype="tf32"), 80e-6),
    ],
)
def test_times_of_h200(operator, measured):
    (found,) = gpu_cost_model(H200).estimate([operator])
    assert found.seconds == pytest.approx(measured, rel=0.2)
