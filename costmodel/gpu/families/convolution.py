"""Convolutions on GPUs, forward and gradients: on the tensor cores by memory layout, outside them, depthwise.

**Outside the tensor cores**: implicit GEMM, and Winograd where it applies. A convolution is the product of
(batch * out_height * out_width, in_channels/groups * kernel) with as many columns as filters, one product per group
(implicit GEMM, Chetlur et al., arXiv 1410.0759). For 3x3 filters of stride 1 in FP32, Winograd's F(4x4, 3x3) needs a
quarter of the multiplications and moves the transformed tensors, 36/16 of the originals, through DRAM once more
(Lavin and Gray, CVPR 2016). The faster is taken, as cuDNN's heuristics try to.

The gradient of the data of stride 1 is a convolution with channels exchanged, by the same kernels: the profile of
ResNet-50 on V100 that the tests hold has both within 4 %. That of the weights is a product over all pixels, or over all
tiles of Winograd's, whose result is then transformed. Gradients of the data with stride and of 1x1 weights have factors
of their own, from that profile; so have both gradients of volumes.

**On the tensor cores** (TF32, FP16, BF16) operands have their channels together (NHWC). cuDNN transposes inputs and
outputs in NCHW by kernels of their own, before and after (``nchwToNhwcKernel``); each reads and writes the tensor
once. So

    seconds = factor * (|compute, DRAM, L2|_3 + waves * latency) + factor of the turning * bytes turned / DRAM bandwidth
              + launch

On Hopper NCHW pictures so few that turning them costs more than they do, and NHWC pictures of few channels, are
computed outside the tensor cores (:func:`_outside`).

``latency`` is the time that the blocks of a wave wait for their first operands and for their stores (:mod:`~.gemm`).
``compute`` counts what is padded: channels to 8 (16-byte loads), of grouped convolutions those of each group. The
gradient of the weights of a grouped convolution has tensor-core kernels for groups of 4, 8, 16 or 32 channels, 128
(NHWC) or 256 channels side by side; other shapes fall to a kernel outside the tensor cores
(``wgrad2d_grouped_direct_kernel`` of cuDNN 8), whose tiles are padded:

    seconds = factor * (bytes / DRAM bandwidth + flops of the padded width / (0.05 * FP32 rate)) + launch

Groups wider than those of the networks on which factors are fitted (StyleGAN's: one for each picture, 512 channels)
have the classes of plain convolutions. Before Ampere no tensor-core kernel computes the gradient of their weights: it
takes at least its flops at the FP32 rate. In FP32 the gradient of grouped weights takes at least what the direct kernel
takes, on every chip (ResNeXt-101 and SE-ResNeXt-101 in FP32 on V100, published by NVIDIA, are predicted 1 and 5 % too
quick with it, 9 and 13 % without).

**Volumes**: the products of their windows, with channels padded to 64 bytes and factors of their own.

**Depthwise** convolutions use no tensor core:

    seconds = factor * (bytes / DRAM bandwidth + flops / (0.2 * FP32 rate)) + launch

PyTorch uses cuDNN for all of them in NHWC, in NCHW for those in FP16 with square windows of 1, 3 or 5 elements from
32 channels on, of stride 1, or of stride 2 with many channels (``use_cudnn_depthwise`` and
``check_cudnn_depthwise_workload_with_filter`` in aten/src/ATen/native/Convolution.cpp, cuDNN 8.2 and later). The rest
are kernels of its own (aten/src/ATen/native/cuda/DepthwiseConv2d.cu): forward and the gradient of the data take a
thread per element of the result; the gradient of the weights takes a block of threads for each channel and each
element of the window, whose warps go over the pictures one by one,

    seconds = factor * max(bytes / DRAM bandwidth, waves * loads of a thread * latency of a load)

so that it costs as many passes over both tensors as the window has elements, and few channels leave most of the GPU
idle. Forward and data kernels of the two libraries share classes: separate classes do not improve the predictions of
held-out families.

Factors by class (stem, pointwise, spatial, grouped by width, depthwise by window), direction and layout are inverted
from whole steps (:class:`~costmodel.gpu.families.family.InvertedShares`): they include losses of implementations,
such as second readings of the operands by the gradient of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.family import (
    MEASURED_KERNELS,
    Family,
    Grade,
    InvertedShares,
    KernelAnalysis,
    layout_name,
    least_seconds,
    safe_log2,
    shares_of,
)
from costmodel.gpu.families.gemm import (
    TENSOR_TILES,
    Products,
    Triple,
    analyse_products,
    choose_rows,
    simt_tiles,
    wave_seconds,
)
from costmodel.gpu.families.rates import (
    BEFORE_AMPERE,
    dram_bandwidth,
    kernel_floor,
    latency,
    long_load_shares,
    matrix_rate,
    uses_tensor_cores,
    vector_rate,
)
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d, element_bytes

# Rate of implicit GEMM relative to a plain product, since its operands are gathered from a pixel grid (a judgement;
# trees correct it where there are tables).
_GATHER = 0.9
_WINOGRAD_TILE = 4
_WINOGRAD_POINTS = 36
# Most bytes of transformed tensors for which the gradient of the weights is computed so, which has no fused form: that
# profile has it up to 116 MB, and the published peak of memory of detectron2's Faster R-CNN (3.0 GB; 2.9 without them)
# has no room for the 620 MB of its largest maps.
_WINOGRAD_WORKSPACE = 256 << 20
# Gradients outside the tensor cores, from the kernels of PyTorch's profile of ResNet-50 on V100 (32 pictures, FP32,
# cuDNN 8; traces/resnet50_V100). With stride cuDNN clears the gradient of the data and adds to it (``dgrad_engine``):
# the six of the network take 1.32 to 1.92 times what their products take, 1.57 in sum. Weights of one by one are a
# product for each picture and a sum of these, or ``wgrad_alg0_engine``: 37 of them, 1.23 in sum (0.95 to 1.6).
_STRIDED_DATA, _POINTWISE_WEIGHT = 1.57, 1.23
# Both gradients of volumes outside the tensor cores, with whatever window: epochs of nnU-Net on a Titan Xp, which has
# none (MIC-DKFZ/nnUNet, expected_epoch_times.md, cuDNN 8.1, made-up batches), take 2.6, 1.6 and 2.0 times what their
# products take, for three tasks, where forward kernels take what theirs do (pytorch/pytorch, issue 24082: 78 % of the
# FP32 rate of an RTX 2080 Ti).
_VOLUME_GRADIENT = 2.0
# cuDNN's forward kernels do not split the sum; those of the weights' gradient, few outputs over many pixels, do.
_FORWARD_SPLITS, _WEIGHT_SPLITS = (1,), (1, 4, 16, 64)


class Convolution(Family[Conv2d | ConvolutionBackward]):
    """Forward convolutions and their two gradients."""

    name = "convolution"

    def analyse(self, operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine) -> KernelAnalysis:
        operators = [_as_forward(each) for each in operators]
        convs = [_forward(each) for each in operators]
        weight = np.array([_direction(each) == "weight" for each in operators])
        products = _products(operators, machine)
        implicit = _slowed(_implicit(products, weight, operators, machine), operators, machine)
        winograd = _winograd(operators, convs, machine)
        eligible = np.array([_winograd_applies(each, machine) for each in operators])
        faster = eligible & (winograd[0] < implicit[0])
        chosen = choose_rows(faster, winograd, implicit)
        return _with_features(chosen, implicit[0], winograd[0], convs, eligible)

    def least(self, operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine) -> np.ndarray:
        multiplied = 9 * _WINOGRAD_TILE**2 / _WINOGRAD_POINTS
        return least_seconds(
            operators, machine, [multiplied if _winograd_applies(each, machine) else 1.0 for each in operators]
        )

    def covers(self, operator: Conv2d | ConvolutionBackward) -> bool:
        # The tables only hold 3x3 filters of stride 1.
        if not isinstance(operator, Conv2d) or operator.dtype != "float32" or operator.groups != 1:
            return False
        return operator.kernel == (3, 3) and operator.stride == (1, 1)

    def follows(self, operator: Conv2d | ConvolutionBackward) -> bool:
        return self.covers(_as_forward(operator))


def _as_forward(operator: Conv2d | ConvolutionBackward) -> Conv2d | ConvolutionBackward:
    """Convolution that is the gradient of the data, where its stride is 1; ``operator`` itself otherwise."""
    conv = _forward(operator)
    if _direction(operator) != "data" or conv.stride != (1, 1) or conv.groups > 1 or conv.depth is not None:
        return operator
    high, wide = (step * (taps - 1) for step, taps in zip(conv.dilation, conv.kernel, strict=True))
    sides = tuple(room - padded for room, padded in zip((high, wide, high, wide), conv.padding, strict=True))
    if min(sides) < 0:
        return operator
    return dataclasses.replace(
        conv, in_channels=conv.out_channels, out_channels=conv.in_channels, height=conv.out_height,
        width=conv.out_width, padding=(sides[0], sides[1], sides[2], sides[3]),
    )  # fmt: skip


def _products(operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine) -> Products:
    shapes = np.array([_gemm_shape(each) for each in operators], dtype=float).reshape(-1, 4).T
    size = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
    rate = np.array([_GATHER * matrix_rate(machine, each.dtype) for each in operators])
    loads = long_load_shares(machine, [each.dtype for each in operators])
    return Products(shapes[0], shapes[1], shapes[2], shapes[3], size, rate, loads)


def _gemm_shape(operator: Conv2d | ConvolutionBackward) -> tuple[int, int, int, int]:
    """(groups, m, n, k) of the implicit product."""
    conv = operator if isinstance(operator, Conv2d) else operator.forward
    pixels = conv.batch * conv.out_height * conv.out_width
    taps = conv.kernel[0] * conv.kernel[1]
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if isinstance(operator, Conv2d):
        return conv.groups, pixels, outputs, inputs * taps
    if operator.wrt == "weight":
        return conv.groups, outputs, inputs * taps, pixels
    # As many products as forward: each input pixel contributes to taps / stride^2 outputs.
    steps = conv.stride[0] * conv.stride[1]
    return conv.groups, conv.batch * conv.height * conv.width, inputs, max(outputs * taps // steps, 1)


def _implicit(
    products: Products, weight: np.ndarray, operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine
) -> Triple:
    """Analysis like :func:`analyse_products`, with the traffic of the tensors instead of the gathered matrix."""
    tensor = np.array([uses_tensor_cores(machine, each.dtype) for each in operators])
    results = []
    for tiles in (TENSOR_TILES, simt_tiles(machine, False)):
        plain = analyse_products(products, tiles, machine, _FORWARD_SPLITS)
        deep = analyse_products(products, tiles, machine, _WEIGHT_SPLITS)
        results.append(choose_rows(weight, deep, plain))
    seconds, terms, features = choose_rows(tensor, results[0], results[1])
    traffic = np.array(
        [
            each.read_bytes + each.write_bytes
            if isinstance(each, ConvolutionBackward)
            else each.input_bytes + each.weight_bytes + each.output_bytes
            for each in operators
        ],
        dtype=float,
    )
    dram = traffic / dram_bandwidth(machine)
    compute = terms["compute"]
    terms = {**terms, "memory:DRAM": dram}
    seconds = (compute**3 + dram**3 + terms["memory:L2"] ** 3) ** (1 / 3) + kernel_floor(machine)
    return seconds, terms, features


def _slowed(implicit: Triple, operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine) -> Triple:
    """``implicit`` with the factors of gradients, where those of grouped weights in FP32 take at least what the direct
    kernel takes.
    """
    seconds, terms, features = implicit
    slow = np.array([_gradient_factor(each) for each in operators])
    seconds = (seconds - kernel_floor(machine)) * slow + kernel_floor(machine)
    terms = {**terms, "compute": terms["compute"] * slow}

    def at_least(operator: Conv2d | ConvolutionBackward) -> float:
        conv = _forward(operator)
        slow = conv.groups > 1 and _direction(operator) == "weight" and conv.dtype == "float32"
        return _direct_seconds(conv, machine) if slow else 0.0

    direct = np.array([at_least(each) for each in operators])
    slower = direct + kernel_floor(machine) > seconds
    terms = {**terms, "compute": np.where(slower, direct, terms["compute"])}
    return np.where(slower, direct + kernel_floor(machine), seconds), terms, features


def _gradient_factor(operator: Conv2d | ConvolutionBackward) -> float:
    """Time of a gradient over that of a product of its size."""
    conv = _forward(operator)
    if conv.groups > 1 or isinstance(operator, Conv2d):
        return 1.0
    if conv.depth is not None:
        return _VOLUME_GRADIENT
    if _direction(operator) == "data":
        return _STRIDED_DATA if conv.stride != (1, 1) else 1.0
    return _POINTWISE_WEIGHT if _direction(operator) == "weight" and conv.kernel == (1, 1) else 1.0


def _winograd_applies(operator: Conv2d | ConvolutionBackward, machine: Machine) -> bool:
    conv = _forward(operator)
    plain = conv.kernel == (3, 3) and conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1
    if not plain or conv.depth is not None or uses_tensor_cores(machine, conv.dtype):
        return False
    transformed = _tiles(conv) * (conv.in_channels + conv.out_channels) * _WINOGRAD_POINTS * element_bytes(conv.dtype)
    return _direction(operator) != "weight" or transformed <= _WINOGRAD_WORKSPACE


def _tiles(conv: Conv2d) -> int:
    return conv.batch * -(-conv.out_height // _WINOGRAD_TILE) * -(-conv.out_width // _WINOGRAD_TILE)


def _winograd(operators: Sequence[Conv2d | ConvolutionBackward], convs: Sequence[Conv2d], machine: Machine) -> Triple:
    tiles = [_tiles(conv) for conv in convs]
    forward = [isinstance(each, Conv2d) for each in operators]
    inputs = [c.in_channels if f else c.out_channels for c, f in zip(convs, forward, strict=True)]
    outputs = [c.out_channels if f else c.in_channels for c, f in zip(convs, forward, strict=True)]
    weight = np.array([_direction(each) == "weight" for each in operators])
    m, n, k = (np.array(each, dtype=float) for each in (tiles, outputs, inputs))
    # The gradient of the weights is the sum over the tiles.
    m, n, k = np.where(weight, outputs, m), np.where(weight, inputs, n), np.where(weight, tiles, k)
    size = np.array([element_bytes(each.dtype) for each in convs], dtype=float)
    rate = np.array([matrix_rate(machine, each.dtype) for each in convs])
    products = Products(
        np.full(len(convs), float(_WINOGRAD_POINTS)),
        m,
        n,
        k,
        size,
        rate,
        long_load_shares(machine, [c.dtype for c in convs]),
    )
    seconds, terms, features = analyse_products(products, simt_tiles(machine, True), machine, (1,))
    # Input, output and filters before and after their transformations, each written by one kernel and read by the next.
    sides = np.array(inputs) + np.array(outputs), np.array(inputs) * np.array(outputs)
    moved = np.array(tiles) * sides[0] * (_WINOGRAD_POINTS + _WINOGRAD_TILE**2) + sides[1] * (_WINOGRAD_POINTS + 9)
    moved = moved * size
    transforms = moved / dram_bandwidth(machine) + 3 * kernel_floor(machine)
    terms = {**terms, "memory:DRAM": terms["memory:DRAM"] + transforms}
    return seconds + transforms, terms, features


def _with_features(
    chosen: Triple, implicit: np.ndarray, winograd: np.ndarray, convs: Sequence[Conv2d], eligible: np.ndarray
) -> KernelAnalysis:
    columns = {
        "implicit_to_winograd": np.where(eligible, safe_log2(implicit / winograd), 0.0),
        "in_channels": safe_log2(np.array([conv.in_channels for conv in convs])),
        "out_channels": safe_log2(np.array([conv.out_channels for conv in convs])),
        "images": safe_log2(np.array([conv.batch for conv in convs])),
        "out_width": safe_log2(np.array([conv.out_width for conv in convs])),
        "width_rest": np.array([-conv.out_width % _WINOGRAD_TILE for conv in convs], dtype=float),
        "channel_rest": np.array([np.gcd(conv.in_channels, 8) for conv in convs], dtype=float),
    }
    return KernelAnalysis(chosen[0], chosen[1], {**chosen[2], **columns})


_CUDNN_WINDOWS, _CUDNN_CHANNELS, _CUDNN_WIDTH = (1, 3, 5), 32, 7
# For stride 2 and more than one picture: fewest channels at any width, and at this width.
_STRIDED_CHANNELS, _STRIDED_CHANNELS_WIDE, _STRIDED_WIDTH = 512, 256, 28
_WARP, _GRADIENT_WARPS = 32, 8  # getGradParamsNumThreads: a warp per picture, 256 threads at most


def asks_cudnn(conv: Conv2d) -> bool:
    """True if PyTorch computes the depthwise ``conv`` and its gradients by cuDNN rather than by its own kernels."""
    if conv.channels_last:
        return True
    plane = conv.depth is None and conv.dilation == (1, 1)
    if conv.dtype != "float16" or not plane or conv.in_channels < _CUDNN_CHANNELS:
        return False
    stride = conv.stride[1]
    if conv.height == 1 and stride == 1:
        return True
    square = conv.kernel[0] == conv.kernel[1] and (conv.stride[0] == stride or conv.height == 1)
    if not square or conv.kernel[0] not in _CUDNN_WINDOWS or conv.width < _CUDNN_WIDTH:
        return False
    return stride == 1 or (stride == 2 and _asks_strided(conv))


def _asks_strided(conv: Conv2d) -> bool:
    if conv.kernel == (1, 1):
        few = conv.batch <= 16 and conv.in_channels >= 128 and conv.width <= _CUDNN_WIDTH
        return conv.width <= _STRIDED_WIDTH if conv.batch == 1 else few
    wide = conv.in_channels >= _STRIDED_CHANNELS_WIDE and conv.width >= _STRIDED_WIDTH
    return conv.batch == 1 or conv.in_channels >= _STRIDED_CHANNELS or wide


def own_gradient_seconds(conv: Conv2d, machine: Machine) -> float:
    """Load time, before any factor, of PyTorch's own gradient of the weights of ``conv``, in seconds.

    Of a window's passes over the tensors the first reads DRAM, the others, which run concurrently, read L2.
    """
    chip = machine.chip()
    window = conv.kernel[0] * conv.kernel[1] * (1 if conv.depth is None else conv.depth[0])
    resident = chip.sm_count * (chip.max_threads // (_GRADIENT_WARPS * _WARP))
    waves = max(conv.plane_channels * window / resident, 1.0)
    loads = conv.batch / min(_GRADIENT_WARPS, conv.batch) * -(-conv.out_height * conv.out_width // _WARP)
    return waves * loads * (latency(machine, 1) + (window - 1) * latency(machine, 0)) / window


AnyConvolution = Conv2d | ConvolutionBackward
_ALIGNMENT_BYTES = 16
# A block multiplies 128 bytes of each row and filter at a time, one after the other, which takes 0.2 to 0.5 us on H200
# where blocks are too few to hide it: forward and data, sums of 576 to 10,976 products in 16 bits and TF32. The sums of
# the weights' gradient are split.
_STEP_BYTES, _STEP_SECONDS = 128, 0.3e-6
# Tile of channels by pixels through which a tensor is turned, filled or not: on H200 3 x 3 weights turn at 1.3 TB/s,
# pictures of 3 channels at 0.5, wide images at 4.
_TURNING_TILE = 32
# Time of NHWC forward convolutions whose channels are no whole loads over that of their products outside the tensor
# cores (H200: 3 or 5 channels, windows of 7, in TF32 and BF16, 2.0 to 2.3).
_ODD_CHANNELS = 2.1
_STEM_CHANNELS = 4  # most channels of an input that counts as pictures
# a judgement, as is the share of direct kernels below: factors by class are fitted on top of both
_DEPTHWISE_SHARE = 0.2
# Classes of depthwise windows and of channels per group; the last includes all above.
_WINDOWS, _WIDTHS = (3, 5, 7, 9), (4, 8, 16, 32, 64)
TURNING, CHANNELWISE, VOLUME = "turning", "channelwise", "volume"
# Widest groups of the networks on which factors are fitted (ResNeSt). Wider ones, such as StyleGAN's of a picture each,
# fill tiles of their own: plain convolutions side by side.
_WIDEST_FITTED = 256
_GROUP_TILE = 32  # columns of the narrowest tile of grouped kernels
# The slow gradients of grouped weights follow from steps of the families on which factors are fitted (ResNeXt 32x4d and
# 64x4d against 32x16d, ResNeSt, NFNet, NF-RegNet): groups of these widths, in multiples of these numbers of channels
# (NHWC, NCHW), are fast. The others take in NHWC as long per pixel and channel for 128 channels in a group as for 64,
# less for up to 32; in NCHW as long for any width.
_GROUPED_WIDTHS, _GROUPED_STEPS = (4, 8, 16, 32), (128, 256)
_DIRECT_TILE, _DIRECT_NARROW, _DIRECT_NCHW, _DIRECT_SHARE = 128, 32, 8, 0.05
# Three-dimensional convolutions of more than a point. A step of the loop of cuDNN's kernels takes 64 bytes of channels,
# filled or not: 4 channels at 128^3 take as long as 32. Factors by class, from xwang233's times in FP16 on A100 and
# V100 (GitHub, code-snippet, conv3d-channels-last, cuDNN 8.0.5: the 23 layers of a network at 128^3, forward and both
# gradients together, in both layouts). Gradients of the data with a stride take three times what their products take,
# about 15 passes over the gradient, on both chips, with windows of 2 and of 3. Turning costs more than pictures' does.
_VOLUME_BYTES = 64
_VOLUME_FACTORS = {
    "volume forward": 0.86,
    "volume data": 0.63,
    "volume weight": 1.65,
    "volume-strided forward": 1.18,
    "volume-strided data": 3.0,
    "volume-strided weight": 1.2,
    "turning volume forward": 1.3,
    "turning volume data": 1.1,
    "turning volume weight": 1.1,
}


@dataclass(frozen=True)
class ConvolutionPieces:
    """Times of convolution kernels before any factor: arrays over the operators, in seconds, without the launch."""

    # Classes whose factors multiply `kernel`.
    names: Sequence[str]
    kernel: np.ndarray
    # Classes whose factors multiply `turned`, the transposition of operands.
    turned_names: Sequence[str]
    turned: np.ndarray
    terms: dict[str, np.ndarray]


class TensorConvolution(Family[AnyConvolution]):
    """Convolutions on tensor cores and depthwise ones, forward and gradients."""

    name = "convolution-tensor"

    def __init__(self, shares: InvertedShares | None = None) -> None:
        self._shares = shares

    def analyse(self, operators: Sequence[AnyConvolution], machine: Machine) -> KernelAnalysis:
        shares = self._shares or shares_of(machine)
        pieces = convolution_pieces(operators, machine)
        factor = np.array([_factor(shares, name) for name in pieces.names])
        turning = np.array([_factor(shares, name) for name in pieces.turned_names])
        turned = turning * pieces.turned
        seconds = factor * pieces.kernel + turned + kernel_floor(machine)
        terms = {name: factor * column for name, column in pieces.terms.items()}
        terms["memory:DRAM"] = terms["memory:DRAM"] + turned
        terms["launch"] = terms["launch"] + kernel_floor(machine)
        seconds, terms = _outside(operators, seconds, terms, machine)
        convs = [_forward(each) for each in operators]
        features = {
            "seconds": safe_log2(seconds),
            "in_channels": safe_log2(np.array([conv.in_channels for conv in convs])),
            "out_channels": safe_log2(np.array([conv.out_channels for conv in convs])),
            "images": safe_log2(np.array([conv.batch for conv in convs])),
            "out_width": safe_log2(np.array([conv.out_width for conv in convs])),
        }
        return KernelAnalysis(seconds, terms, features)

    def covers(self, operator: AnyConvolution) -> bool:
        """False: no table holds single kernels of these types."""
        return False

    def grade(self, operator: AnyConvolution) -> Grade:
        """Unknown for depthwise convolutions that the networks of the fit do not have: of few channels, or gradients of
        NHWC weights in FP32, for which cuDNN has several kernels (H200: up to 17 times the analytic time).
        """
        conv = _forward(operator)
        slow = _direction(operator) == "weight" and conv.channels_last and conv.dtype in ("float32", "tf32")
        return "unknown" if conv.is_depthwise and (slow or conv.in_channels < _CUDNN_CHANNELS) else "kind"


def _outside(
    operators: Sequence[AnyConvolution], seconds: np.ndarray, terms: dict[str, np.ndarray], machine: Machine
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """``seconds`` and ``terms`` of ``operators``, with those that Hopper computes outside the tensor cores: NCHW where
    that is faster than to turn the operands, NHWC whose channels are no whole loads. Stems with a stride, as
    networks have them, keep the factor of their class.
    """
    if machine.chip().architecture not in MEASURED_KERNELS:
        return seconds, terms
    convs = [_forward(each) for each in operators]
    plain = np.array([isinstance(each, Conv2d) and each.groups == 1 and each.depth is None for each in operators])
    last = np.array([conv.channels_last for conv in convs])
    odd = np.array([conv.stride == (1, 1) and _has_odd_channels(conv) for conv in convs])
    singles = [dataclasses.replace(conv, dtype="float32") for conv in convs]
    vector = _implicit(_products(singles, machine), np.zeros(len(convs), dtype=bool), singles, machine)[0]
    vector = np.where(last, _ODD_CHANNELS * vector, vector)
    chosen = plain & np.where(last, odd & (vector > seconds), vector < seconds)
    terms = {**terms, "compute": np.where(chosen, vector, terms["compute"])}
    return np.where(chosen, vector, seconds), terms


def _has_odd_channels(conv: Conv2d) -> bool:
    return conv.plane_channels * element_bytes(conv.dtype) % _ALIGNMENT_BYTES != 0


def _factor(shares: InvertedShares, name: str) -> float:
    """Factor of the class ``name``: that of volumes, which no step of ``shares`` has, or that of whole steps."""
    return _VOLUME_FACTORS[name] if name in _VOLUME_FACTORS else shares.factor(name)


def convolution_pieces(operators: Sequence[AnyConvolution], machine: Machine) -> ConvolutionPieces:
    """Split the times of ``operators`` into the parts that factors multiply."""
    convs = [_forward(each) for each in operators]
    traffic = np.array([_traffic(each) for each in operators], dtype=float)
    dram = traffic / dram_bandwidth(machine)
    depthwise = np.array([conv.is_depthwise for conv in convs])
    compute, l2, waiting, dense = _products_seconds(operators, machine, dram)
    vector = np.array([conv.flops for conv in convs], dtype=float) / (_DEPTHWISE_SHARE * vector_rate(machine))
    direct = np.array([_is_direct(each) for each in operators], dtype=bool)
    fused = np.array([_direct_seconds(conv, machine) for conv in convs])
    vector, outside = np.where(direct, fused, vector), depthwise | direct
    own = np.array([_is_own_gradient(each) for each in operators], dtype=bool)
    loads = np.array(
        [own_gradient_seconds(conv, machine) if mine else 0.0 for conv, mine in zip(convs, own, strict=True)]
    )
    vector = np.where(own, loads, vector)
    turned = np.array([_turned_seconds(each, machine) for each in operators], dtype=float)
    return ConvolutionPieces(
        [convolution_class(each) for each in operators],
        np.where(own, np.maximum(dram, loads), np.where(outside, dram + vector, dense)),
        [turning_class(each) for each in operators],
        turned,
        {
            "compute": np.where(outside, vector, compute),
            "memory:DRAM": dram,
            "memory:L2": np.where(outside, 0.0, l2),
            "launch": np.where(outside, 0.0, waiting),
        },
    )


def convolution_class(operator: AnyConvolution) -> str:
    """Class name: kind, direction and layout."""
    conv = _forward(operator)
    kind = f"direct-{_next(conv.plane_channels // conv.groups, _WIDTHS)}" if _is_direct(operator) else _kind(conv)
    kind = CHANNELWISE if _is_own_gradient(operator) else kind
    if kind.startswith(VOLUME):
        return f"{kind} {_direction(operator)}"
    return f"{kind} {_direction(operator)} {layout_name(conv.channels_last)}"


def turning_class(operator: AnyConvolution) -> str:
    """Class name of the kernels that transpose operands, by kind and direction."""
    conv = _forward(operator)
    kind = "pointwise" if conv.kernel == (1, 1) else "spatial"
    kind = VOLUME if conv.depth is not None else kind
    return f"{TURNING} {kind} {_direction(operator)}"


def _forward(operator: AnyConvolution) -> Conv2d:
    return operator if isinstance(operator, Conv2d) else operator.forward


def _direction(operator: AnyConvolution) -> str:
    return "forward" if isinstance(operator, Conv2d) else operator.wrt


def _kind(conv: Conv2d) -> str:
    window = max(*conv.kernel, _depth(conv))
    if conv.is_depthwise:
        return f"depthwise-{_next(window, _WINDOWS)}" + ("-strided" if conv.stride[0] > 1 else "")
    width = conv.plane_channels // conv.groups
    if conv.groups > 1 and width <= _WIDEST_FITTED:
        return f"grouped-{_next(width, _WIDTHS)}"
    if conv.depth is not None and window > 1:
        return f"{VOLUME}-strided" if conv.stride != (1, 1) else VOLUME
    if conv.plane_channels <= _STEM_CHANNELS:
        return "stem"
    return "pointwise" if window == 1 else "spatial"


def _is_own_gradient(operator: AnyConvolution) -> bool:
    """True if PyTorch computes this gradient of the weights by its own kernel."""
    conv = _forward(operator)
    return _direction(operator) == "weight" and conv.is_depthwise and not asks_cudnn(conv)


def _is_direct(operator: AnyConvolution) -> bool:
    """True if ``operator`` is a gradient of grouped weights without a tensor-core kernel."""
    conv = _forward(operator)
    if _direction(operator) != "weight" or conv.groups == 1 or conv.is_depthwise:
        return False
    width = conv.plane_channels // conv.groups
    alike = width == conv.out_channels // conv.groups and width in _GROUPED_WIDTHS
    return not (alike and conv.plane_channels % _GROUPED_STEPS[not conv.channels_last] == 0)


def _direct_seconds(conv: Conv2d, machine: Machine) -> float:
    """Seconds of arithmetic of the direct kernel; before Ampere no faster for wide groups than FP32 is."""
    seconds = _direct_flops(conv) / (_DIRECT_SHARE * vector_rate(machine))
    outside = machine.chip().architecture in BEFORE_AMPERE or conv.dtype == "float32"
    return max(seconds, conv.flops / vector_rate(machine)) if outside else seconds


def _direct_flops(conv: Conv2d) -> float:
    """Flops of the padded width: half of a tile's, as no product needs both of its sides filled."""
    width = conv.plane_channels // conv.groups
    padded = width if width <= _DIRECT_NARROW else -(-width // _DIRECT_TILE) * _DIRECT_TILE // 2
    return conv.flops * (padded if conv.channels_last else _DIRECT_NCHW) / width


def _next(value: int, steps: Sequence[int]) -> int:
    """First of ``steps`` that is not below ``value``, or the last."""
    return next((step for step in steps if value <= step), steps[-1])


def _traffic(operator: AnyConvolution) -> int:
    conv = _forward(operator)
    return conv.input_bytes + conv.weight_bytes + conv.output_bytes


def _turned_seconds(operator: AnyConvolution, machine: Machine) -> float:
    """Seconds of transposing the NCHW tensors of ``operator``; 0 for channels-last images and for depthwise kernels."""
    conv = _forward(operator)
    if conv.channels_last or conv.is_depthwise:
        return 0.0
    if machine.chip().architecture not in MEASURED_KERNELS or conv.depth is not None:
        return 2 * (conv.input_bytes + conv.output_bytes) / dram_bandwidth(machine)
    if _reads_planes(conv):
        return 0.0
    taps = conv.kernel[0] * conv.kernel[1]
    tensors = (
        (conv.input_bytes, conv.plane_channels, conv.height * conv.width),
        (conv.weight_bytes, conv.in_channels // conv.groups, taps),
        (conv.output_bytes, conv.out_channels, conv.out_height * conv.out_width),
    )
    turned = [(size, channels, run) for size, channels, run in tensors if channels > 1 and run > 1]
    padded = sum(2 * size * _padding(channels) * _padding(run) for size, channels, run in turned)
    return padded / dram_bandwidth(machine) + len(turned) * kernel_floor(machine)


def _padding(extent: int) -> float:
    """Elements of whole tiles over those of ``extent``."""
    return _multiple(extent, _TURNING_TILE) / extent


def _reads_planes(conv: Conv2d) -> bool:
    """True if a kernel multiplies NCHW planes as they are: one by one, stride 1, rows of whole 16-byte loads."""
    points = conv.kernel == (1, 1) and conv.stride == (1, 1) and not any(conv.padding) and conv.groups == 1
    return points and conv.height * conv.width * element_bytes(conv.dtype) % _ALIGNMENT_BYTES == 0


def _products_seconds(
    operators: Sequence[AnyConvolution], machine: Machine, dram: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of arithmetic, of L2, of waiting, and of the whole implicit products, whose tensors take ``dram``
    seconds.

    Sums of the weights' gradient are split if that is faster; an additional kernel adds the parts.
    """
    shapes = np.array([_padded_shape(each, machine) for each in operators], dtype=float).reshape(-1, 4).T
    size = np.array([element_bytes(each.dtype) for each in operators], dtype=float)
    rate = np.array([matrix_rate(machine, each.dtype) for each in operators])
    long = long_load_shares(machine, [each.dtype for each in operators])
    products = Products(shapes[0], shapes[1], shapes[2], shapes[3], size, rate, long, wave_seconds(machine))
    weight = np.array([_direction(each) == "weight" for each in operators])
    found: list[np.ndarray] = []
    for split in _WEIGHT_SPLITS:
        _, terms, _ = analyse_products(products, TENSOR_TILES, machine, (split,))
        compute, l2 = terms["compute"], terms["memory:L2"]
        waiting = terms["launch"] - kernel_floor(machine)
        adding = kernel_floor(machine) if split > 1 else 0.0
        whole = (compute**3 + dram**3 + l2**3) ** (1 / 3) + waiting + adding
        found.append(np.stack([compute, l2, waiting, np.where(weight | (split == 1), whole, np.inf)]))
    cube = np.stack(found)  # (splits, terms, operators)
    compute, l2, waiting, whole = cube[np.argmin(cube[:, 3], axis=0), :, np.arange(len(operators))].T
    if machine.chip().architecture in MEASURED_KERNELS:
        steps = np.where(weight, 0.0, np.ceil(shapes[3] * size / _STEP_BYTES) * _STEP_SECONDS)
        compute, whole = np.maximum(compute, steps), np.maximum(whole, steps)
    return compute, l2, waiting, whole


def _padded_shape(operator: AnyConvolution, machine: Machine) -> tuple[int, int, int, int]:
    """(products, m, n, k) with padded channels. Groups lie side by side in one product, padded to the width of
    a tile. Planes are multiplied picture by picture.
    """
    conv = _forward(operator)
    if machine.chip().architecture in MEASURED_KERNELS and not conv.channels_last and _reads_planes(conv):
        pixels, (inputs, outputs) = conv.height * conv.width, (conv.plane_channels, conv.out_channels)
        if _direction(operator) != "weight":
            rows = (outputs, inputs) if _direction(operator) == "forward" else (inputs, outputs)
            return conv.batch, pixels, *rows
    volume = _kind(conv).startswith(VOLUME)
    step = (_VOLUME_BYTES if volume else _ALIGNMENT_BYTES) // element_bytes(conv.dtype)
    pixels = conv.batch * conv.out_height * conv.out_width
    taps = conv.kernel[0] * conv.kernel[1] * _depth(conv)
    inputs = _multiple(conv.plane_channels // conv.groups, step)
    outputs = _multiple(conv.out_channels // conv.groups, step)
    groups = conv.groups
    if groups > 1:
        # Several groups share a tile: the off-diagonal part is multiplied in vain.
        together = max(min(groups, _GROUP_TILE // max(outputs, 1)), 1)
        groups, inputs, outputs = -(-groups // together), inputs * together, outputs * together
    if _direction(operator) == "forward":
        return groups, pixels, outputs, inputs * taps
    if _direction(operator) == "weight":
        return groups, outputs, inputs * taps, pixels
    planes = conv.batch if conv.depth is None else conv.depth[1]
    steps = conv.stride[0] * conv.stride[1] * planes / conv.batch
    return groups, planes * conv.height * conv.width, inputs, max(int(outputs * taps / steps), 1)


def _depth(conv: Conv2d) -> int:
    """Window of ``conv`` along the depth; 1 for two dimensions."""
    return 1 if conv.depth is None else conv.depth[0]


def _multiple(channels: int, step: int) -> int:
    return -(-channels // step) * step


_TENSOR, _SIMT = TensorConvolution(), Convolution()


def convolution_family(operator: AnyConvolution, machine: Machine) -> Family[AnyConvolution]:
    """Family whose kernels compute ``operator`` on ``machine``: by its dtype, except that depthwise convolutions use
    the same kernels in all types.
    """
    tensor = uses_tensor_cores(machine, operator.dtype) or _forward(operator).is_depthwise
    return _TENSOR if tensor else _SIMT
