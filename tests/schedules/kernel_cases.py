"""Builds, runs and checks one kernel of a template; shared by the tests of the templates."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Epilogue, FusedConvs, Pool2d
from schedules.contract.cpu_target import host_target
from schedules.contract.kernel_compilation import compile_kernel
from schedules.contract.template import Parameters, block, unblock
from schedules.kernels.template_table import template_for

CPU = host_target(2)

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "relu1": lambda x: torch.clamp(x, 0, 1),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "hard_swish": F.hardswish,
    "hard_sigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "elu": F.elu,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "selu": F.selu,
    "softplus": F.softplus,
}


def conv(batch, channels, height, width, out_channels, kernel, stride=1, padding=None, groups=1, **options) -> Conv2d:
    """A convolution with a square window; ``padding`` defaults to half the window on every side."""
    pads = (kernel // 2,) * 4 if padding is None else padding
    return Conv2d(
        batch, channels, height, width, out_channels, (kernel, kernel), (stride, stride), pads, groups=groups, **options
    )


def random_case(operator, seed=0):
    """(data, parameters, residual) in framework layouts, scaled so that sums stay near one."""
    generator = np.random.default_rng(seed)

    def normal(shape):
        return generator.standard_normal(shape).astype(np.float32)

    layers = operator.convs if isinstance(operator, FusedConvs) else () if isinstance(operator, Pool2d) else (operator,)
    parameters = [
        Parameters(
            normal(layer.weight_shape) / np.float32(np.sqrt(np.prod(layer.weight_shape[1:]))),
            normal(layer.weight_shape[0]) if layer.epilogue.bias else None,
            *([normal(layer.weight_shape[0]) for _ in range(2)] if layer.epilogue.affine else [None, None]),
            *([normal(layer.in_channels) for _ in range(2)] if has_prologue_affine(layer) else [None, None]),
            normal(layer.weight_shape[0]) if layer.epilogue.activation == "prelu" else None,
        )
        for layer in layers
    ]
    has_residual = not isinstance(operator, Pool2d) and operator.epilogue.residual
    return normal(operator.input_shape), parameters, normal(operator.output_shape) if has_residual else None


def has_prologue_affine(layer):
    """Whether the input of ``layer`` is scaled and shifted as it is read."""
    return isinstance(layer, Conv2d) and layer.prologue is not None and layer.prologue.affine


def random_gate(operator, seed=0):
    """Factors of a gated convolution; ``None`` of any other operator."""
    if not isinstance(operator, Conv2d) or not operator.gated:
        return None
    return np.random.default_rng(seed + 1).random(operator.gate_shape, dtype=np.float32)


def run_kernel(operator, config, data, parameters, residual=None, cpu=CPU, gate=None):
    """Output of the template's kernel in framework layout; the output buffer starts as NaN."""
    import tvm

    template = template_for(operator, cpu).for_config(config)
    signature = template.signature(operator, cpu)
    function = template.build(operator, config, cpu)
    constants = template.pack(operator, parameters, cpu)
    assert [array.shape for array in constants] == [spec.shape for spec in signature.constants]

    def laid_out(array, spec):
        return block(array, cpu.lanes) if spec.layout == "blocked" else array

    arguments = [laid_out(data, signature.data)]
    if signature.gate is not None:
        arguments.append(laid_out(gate, signature.gate))
    arguments += constants
    if signature.residual is not None:
        arguments.append(laid_out(residual, signature.residual))
    arguments.append(np.full(signature.output.shape, np.nan, np.float32))
    tensors = [tvm.runtime.tensor(array) for array in arguments]
    compile_kernel(function, cpu)(*tensors)
    output = tensors[-1].numpy()
    return unblock(output, operator.output_shape[1]) if signature.output.layout == "blocked" else output


def pytorch(operator, data, parameters, residual=None, gate=None):
    """The operator in PyTorch."""
    x = torch.from_numpy(data if gate is None else data * gate)
    added = None if residual is None else torch.from_numpy(residual)
    if isinstance(operator, Pool2d):
        return _pool(operator, x).numpy()
    layers = operator.convs if isinstance(operator, FusedConvs) else (operator,)
    for index, (layer, parameter) in enumerate(zip(layers, parameters, strict=True)):
        last = index == len(layers) - 1
        x = _epilogue(layer.epilogue, _linear(layer, x, parameter), added if last else None, parameter)
    return x.numpy()


def _linear(layer, x, parameter):
    weight = torch.from_numpy(parameter.weight)
    bias = None if parameter.bias is None else torch.from_numpy(parameter.bias)
    if isinstance(layer, Dense):
        return F.linear(x, weight, bias)
    if isinstance(layer, ChannelNorm):
        last = F.layer_norm(x.permute(0, 2, 3, 1), (layer.channels,), weight, bias, layer.epsilon)
        return last.permute(0, 3, 1, 2)
    if layer.prologue is not None:
        if layer.prologue.affine:
            scale, shift = (torch.from_numpy(each) for each in (parameter.input_scale, parameter.input_shift))
            x = x * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)
        x = _activated(x, layer.prologue)
    top, left, bottom, right = layer.padding
    padded = F.pad(x, (left, right, top, bottom))
    return F.conv2d(padded, weight, bias, layer.stride, 0, layer.dilation, layer.groups)


def _epilogue(epilogue: Epilogue, x, residual, parameter):
    if epilogue.residual == "before_activation":
        x = x + residual
    prelu = epilogue.activation == "prelu"
    x = F.prelu(x, torch.from_numpy(parameter.slopes)) if prelu else _activated(x, epilogue)
    if epilogue.affine:
        scale, shift = (torch.from_numpy(vector).reshape(-1, 1, 1) for vector in (parameter.scale, parameter.shift))
        x = x * scale + shift
    return x + residual if epilogue.residual == "after_activation" else x


def _activated(x, step):
    if step.activation == "leaky_relu":
        return F.leaky_relu(x, step.slope)
    if step.activation == "elu":
        return F.elu(x, step.slope or 1.0)
    if step.slope:
        gate = torch.clamp(x * step.slope + 0.5, 0, 1)
        return gate if step.activation == "hard_sigmoid" else x * gate
    return _ACTIVATIONS[step.activation](x)


def _pool(pool: Pool2d, x):
    top, left, bottom, right = pool.padding
    if pool.kind == "max":
        padded = F.pad(x, (left, right, top, bottom), value=float("-inf"))
        return F.max_pool2d(padded, pool.kernel, pool.stride)
    sums = F.avg_pool2d(F.pad(x, (left, right, top, bottom)), pool.kernel, pool.stride)
    if pool.count_include_pad:
        return sums
    counts = F.avg_pool2d(F.pad(torch.ones_like(x), (left, right, top, bottom)), pool.kernel, pool.stride)
    return sums / counts
