"""Convolutions on GPUs outside the tensor cores: implicit GEMM, and Winograd where it applies.

A convolution is the product of (batch * out_height * out_width, in_channels/groups * kernel) with as many columns as
filters, one product per group (implicit GEMM, Chetlur et al., arXiv 1410.0759). For 3x3 filters of stride 1 in FP32,
Winograd's F(4x4, 3x3) needs a quarter of the multiplications and moves the transformed tensors, 36/16 of the originals,
through DRAM once more (Lavin and Gray, CVPR 2016). The faster is taken, as cuDNN's heuristics try to.

The gradient of the data is a convolution with channels exchanged, that of the weights a product over all pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.clock import long_load_shares
from costmodel.gpu.families.family import Family, KernelAnalysis, least_seconds, safe_log2
from costmodel.gpu.families.gemm import TENSOR_TILES, Products, Triple, analyse_products, choose, simt_tiles
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, matrix_rate, uses_tensor_cores
from costmodel.machines.machine_records import Machine
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d, element_bytes

# Rate of implicit GEMM relative to a plain product, since its operands are gathered from a pixel grid (a judgement;
# trees correct it where there are tables).
_GATHER = 0.9
_WINOGRAD_TILE = 4
_WINOGRAD_POINTS = 36
# cuDNN's forward kernels do not split the sum; those of the weights' gradient, few outputs over many pixels, do.
_FORWARD_SPLITS, _WEIGHT_SPLITS = (1,), (1, 4, 16, 64)


class Convolution(Family[Conv2d | ConvolutionBackward]):
    """Forward convolutions and their two gradients."""

    name = "convolution"

    def analyse(self, operators: Sequence[Conv2d | ConvolutionBackward], machine: Machine) -> KernelAnalysis:
        convs = [each if isinstance(each, Conv2d) else each.forward for each in operators]
        weight = np.array([isinstance(each, ConvolutionBackward) and each.wrt == "weight" for each in operators])
        products = _products(operators, machine)
        implicit = _implicit(products, weight, operators, machine)
        winograd = _winograd(operators, convs, machine)
        eligible = np.array([_winograd_applies(each, machine) for each in operators])
        faster = eligible & (winograd[0] < implicit[0])
        chosen = choose(faster, winograd, implicit)
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
        results.append(choose(weight, deep, plain))
    seconds, terms, features = choose(tensor, results[0], results[1])
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


def _winograd_applies(operator: Conv2d | ConvolutionBackward, machine: Machine) -> bool:
    if isinstance(operator, ConvolutionBackward) and operator.wrt == "weight":
        return False
    conv = operator if isinstance(operator, Conv2d) else operator.forward
    plain = conv.kernel == (3, 3) and conv.stride == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1
    return plain and conv.depth is None and not uses_tensor_cores(machine, conv.dtype)


def _winograd(operators: Sequence[Conv2d | ConvolutionBackward], convs: Sequence[Conv2d], machine: Machine) -> Triple:
    tiles = [
        conv.batch * -(-conv.out_height // _WINOGRAD_TILE) * -(-conv.out_width // _WINOGRAD_TILE) for conv in convs
    ]
    forward = [isinstance(each, Conv2d) for each in operators]
    inputs = [c.in_channels if f else c.out_channels for c, f in zip(convs, forward, strict=True)]
    outputs = [c.out_channels if f else c.in_channels for c, f in zip(convs, forward, strict=True)]
    m, n, k = (np.array(each, dtype=float) for each in (tiles, outputs, inputs))
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
    moved = (m * (k + n) * (_WINOGRAD_POINTS + _WINOGRAD_TILE**2) + n * k * (_WINOGRAD_POINTS + 9)) * size
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
