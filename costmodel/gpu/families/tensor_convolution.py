"""Convolutions in TF32, FP16 and BF16: kernels of the tensor cores by memory layout, and depthwise ones of any type.

Tensor cores take operands whose channels lie together (NHWC). Of tensors in NCHW cuDNN turns input and output around
in kernels of their own, before and after (``nchwToNhwcKernel``); each reads and writes the tensor once. So

    seconds = factor * (|compute, DRAM, L2|_3 + waves * latency) + factor of the turning * bytes turned / DRAM bandwidth
              + launch

``latency`` is what the blocks of a wave wait for their first operands and for their stores (:mod:`~.gemm`).

``compute`` counts what is padded: channels to 8 (16-byte loads), of grouped convolutions those of each group. A
depthwise convolution uses no tensor core:

    seconds = factor * (bytes / DRAM bandwidth + flops / (0.2 * FP32 rate)) + launch

but for the gradient of its weights by PyTorch's own kernel (:mod:`costmodel.gpu.families.depthwise`).

The gradient of the weights of a grouped convolution has tensor-core kernels for groups of 4, 8, 16 or 32 channels, 128
(NHWC) or 256 channels side by side; other shapes fall to a kernel outside the tensor cores
(``wgrad2d_grouped_direct_kernel`` of cuDNN 8), whose tiles are padded:

    seconds = factor * (bytes / DRAM bandwidth + flops of the padded width / (0.05 * FP32 rate)) + launch

Factors by class (stem, pointwise, spatial, grouped by width, depthwise by window), direction and layout are inverted
from whole steps (:mod:`costmodel.gpu.families.inverted_shares`): they include losses of implementations, such as second
readings of the operands by the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.gpu.families.clock import long_load_shares
from costmodel.gpu.families.convolution import Convolution
from costmodel.gpu.families.depthwise import asks_cudnn, own_gradient_seconds
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.gemm import TENSOR_TILES, Products, analyse_products, wave_seconds
from costmodel.gpu.families.inverted_shares import InvertedShares, inverted_shares, layout_name
from costmodel.gpu.families.rates import (
    dram_bandwidth,
    kernel_floor,
    matrix_rate,
    uses_tensor_cores,
    vector_rate,
)
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d, element_bytes

AnyConvolution = Conv2d | ConvolutionBackward
_ALIGNMENT_BYTES = 16
_STEM_CHANNELS = 4  # most channels of an input that counts as pictures
# a judgement, as is the share of direct kernels below: factors by class are fitted on top of both
_DEPTHWISE_SHARE = 0.2
# Classes of depthwise windows and of channels per group; the last includes all above.
_WINDOWS, _WIDTHS = (3, 5, 7, 9), (4, 8, 16, 32, 64)
_WEIGHT_SPLITS = (1, 4, 16, 64)  # splits of the sum over all pixels
TURNING, CHANNELWISE = "turning", "channelwise"
_GROUP_TILE = 32  # columns of the narrowest tile of grouped kernels
# The slow gradients of grouped weights follow from steps of the families on which factors are fitted (ResNeXt 32x4d and
# 64x4d against 32x16d, ResNeSt, NFNet, NF-RegNet): groups of these widths, in multiples of these numbers of channels
# (NHWC, NCHW), are fast. The others take in NHWC as long per pixel and channel for 128 channels in a group as for 64,
# less for up to 32; in NCHW as long for any width.
_GROUPED_WIDTHS, _GROUPED_STEPS = (4, 8, 16, 32), (128, 256)
_DIRECT_TILE, _DIRECT_NARROW, _DIRECT_NCHW, _DIRECT_SHARE = 128, 32, 8, 0.05


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
        shares = self._shares or inverted_shares()
        pieces = convolution_pieces(operators, machine)
        factor = np.array([shares.factor(name) for name in pieces.names])
        turning = np.array([shares.factor(name) for name in pieces.turned_names])
        turned = turning * pieces.turned
        seconds = factor * pieces.kernel + turned + kernel_floor(machine)
        terms = {name: factor * column for name, column in pieces.terms.items()}
        terms["memory:DRAM"] = terms["memory:DRAM"] + turned
        terms["launch"] = terms["launch"] + kernel_floor(machine)
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


def convolution_pieces(operators: Sequence[AnyConvolution], machine: Machine) -> ConvolutionPieces:
    """Split the times of ``operators`` into the parts that factors multiply."""
    convs = [_forward(each) for each in operators]
    traffic = np.array([_traffic(each) for each in operators], dtype=float)
    dram = traffic / dram_bandwidth(machine)
    depthwise = np.array([conv.is_depthwise for conv in convs])
    compute, l2, waiting, dense = _products_seconds(operators, machine, dram)
    vector = np.array([conv.flops for conv in convs], dtype=float) / (_DEPTHWISE_SHARE * vector_rate(machine))
    direct = np.array([_is_direct(each) for each in operators], dtype=bool)
    fused = np.array([_direct_flops(conv) for conv in convs]) / (_DIRECT_SHARE * vector_rate(machine))
    vector, outside = np.where(direct, fused, vector), depthwise | direct
    own = np.array([_is_own_gradient(each) for each in operators], dtype=bool)
    loads = np.array(
        [own_gradient_seconds(conv, machine) if mine else 0.0 for conv, mine in zip(convs, own, strict=True)]
    )
    vector = np.where(own, loads, vector)
    turned = np.array([_turned_bytes(each) for each in operators], dtype=float) / dram_bandwidth(machine)
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
    kind = _kind(conv).replace("grouped", "direct") if _is_direct(operator) else _kind(conv)
    kind = CHANNELWISE if _is_own_gradient(operator) else kind
    return f"{kind} {_direction(operator)} {layout_name(conv.channels_last)}"


def turning_class(operator: AnyConvolution) -> str:
    """Class name of the kernels that transpose operands, by kind and direction."""
    conv = _forward(operator)
    kind = "pointwise" if conv.kernel == (1, 1) and _depth(conv) == 1 else "spatial"
    return f"{TURNING} {kind} {_direction(operator)}"


def _forward(operator: AnyConvolution) -> Conv2d:
    return operator if isinstance(operator, Conv2d) else operator.forward


def _direction(operator: AnyConvolution) -> str:
    return "forward" if isinstance(operator, Conv2d) else operator.wrt


def _kind(conv: Conv2d) -> str:
    window = max(*conv.kernel, _depth(conv))
    if conv.is_depthwise:
        return f"depthwise-{_next(window, _WINDOWS)}" + ("-strided" if conv.stride[0] > 1 else "")
    if conv.groups > 1:
        return f"grouped-{_next(conv.plane_channels // conv.groups, _WIDTHS)}"
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


def _turned_bytes(operator: AnyConvolution) -> int:
    """Bytes of transposing NCHW tensors: the whole image, read and written once; depthwise kernels need no
    transposition.
    """
    conv = _forward(operator)
    if conv.channels_last or conv.is_depthwise:
        return 0
    return 2 * (conv.input_bytes + conv.output_bytes)


def _products_seconds(
    operators: Sequence[AnyConvolution], machine: Machine, dram: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of arithmetic, of L2, of waiting, and of the whole implicit products, whose tensors take ``dram``
    seconds.

    Sums of the weights' gradient are split if that is faster; an additional kernel adds the parts.
    """
    shapes = np.array([_padded_shape(each) for each in operators], dtype=float).reshape(-1, 4).T
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
    return compute, l2, waiting, whole


def _padded_shape(operator: AnyConvolution) -> tuple[int, int, int, int]:
    """(products, m, n, k) with padded channels. Groups lie side by side in one product, padded to the width of
    a tile.
    """
    conv = _forward(operator)
    step = _ALIGNMENT_BYTES // element_bytes(conv.dtype)
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
