"""Kernels of layers in whole numbers: every byte, by the CPU's own instructions where it has them, else emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")

from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Pool2d
from schedules.contract.cpu_target import CpuTarget, host_target
from schedules.contract.kernel_compilation import compile_function, compile_kernel
from schedules.kernels.template_table import template_for
from schedules.measuring.kernel_verification import WrongValues, make_case

HOST = host_target(2)
EMULATED = "int8" not in HOST.dot_products
# What kernels are made for: what they are compiled for is the CPU at hand.
CPU = CpuTarget(16, 32, "cascadelake", ("avx512f", "avx512_vnni"), 2, 32 * 1024, 1024 * 1024)
BIAS, RESIDUAL = Epilogue(bias=True), Epilogue(bias=True, residual="before_activation")
SILU, HARD_SWISH = (Epilogue(bias=True, activation=name) for name in ("silu", "hard_swish"))
LEAKY = Epilogue(bias=True, activation="leaky_relu", slope=0.1)
PRELU = Epilogue(bias=True, activation="prelu")


def conv(channels, size, outputs, kernel, stride=1, padding=0, groups=1, epilogue=BIAS, **options) -> Conv2d:
    pads = (padding,) * 4 if isinstance(padding, int) else padding
    shape = (1, channels, size, size + 1, outputs)
    return Conv2d(
        *shape, (kernel, kernel), (stride, stride), pads, groups=groups, epilogue=epilogue, dtype="int8", **options
    )


def chain(*convs) -> FusedConvs:
    """Each of (outputs, kernel, stride, padding, groups) on what the one before makes."""
    first, *others = convs
    made = [first]
    for outputs, kernel, stride, padding, groups, epilogue in others:
        last = made[-1]
        made.append(
            Conv2d(
                1, last.out_channels, last.out_height, last.out_width, outputs, (kernel, kernel), (stride, stride),
                (padding,) * 4, groups=groups, epilogue=epilogue, dtype="int8",
            )
        )  # fmt: skip
    return FusedConvs(tuple(made))


OPERATORS = {
    "1x1": conv(24, 7, 40, 1),
    "1x1, residual, half a block": conv(32, 8, 20, 1, epilogue=RESIDUAL),
    "1x1, stride 2": conv(32, 9, 48, 1, 2),
    "1x1, few channels": conv(3, 9, 24, 1),
    "3x3, padded": conv(16, 9, 32, 3, 1, 1),
    "3x3, residual": conv(19, 8, 16, 3, 1, 1, epilogue=RESIDUAL),
    "3x3, stride 2, one-sided padding": conv(16, 8, 16, 3, 2, (0, 0, 1, 1)),
    "window larger than the image": conv(16, 4, 16, 7, 1, 3),
    "dilated": conv(16, 12, 16, 3, 1, 2, dilation=(2, 2)),
    "groups": conv(32, 8, 32, 3, 1, 1, groups=2),
    "first layer": conv(3, 20, 16, 3, 2, 1),
    "first layer, 7x7": conv(3, 29, 24, 7, 2, 3),
    "depthwise": conv(40, 11, 40, 3, 1, 1, groups=40),
    "depthwise, stride 2": conv(24, 11, 24, 3, 2, 1, groups=24),
    "depthwise, 5x5, residual": conv(32, 12, 32, 5, 1, 2, groups=32, epilogue=RESIDUAL),
    "depthwise, rows of three": conv(24, 2, 24, 3, 1, 1, groups=24),
    "depthwise, rows of four": conv(24, 3, 24, 3, 1, 1, groups=24),
    "depthwise, a window of rows of five": conv(16, 4, 16, 5, 1, 2, groups=16),
    "depthwise, long rows, half a block": conv(24, 33, 24, 3, 1, 1, groups=24),
    "depthwise, stride 2, one-sided padding": conv(16, 14, 16, 3, 2, (0, 0, 1, 1), groups=16),
    "depthwise, 5x5, stride 2": conv(16, 17, 16, 5, 2, 2, groups=16),
    "depthwise, 7x7": conv(16, 14, 16, 7, 1, 3, groups=16),
    "depthwise, 9x9": conv(16, 14, 16, 9, 1, 4, groups=16),
    "depthwise, dilated": conv(16, 12, 16, 3, 1, 2, groups=16, dilation=(2, 2)),
    "dense": Dense(1, 37, 50, BIAS, dtype="int8"),
    "dense, few outputs": Dense(3, 64, 10, BIAS, dtype="int8"),
    "max pooling": Pool2d("max", 1, 24, 13, 13, (3, 3), (2, 2), (1, 1, 1, 1), dtype="int8"),
    "1x1, SiLU": conv(24, 7, 40, 1, epilogue=SILU),
    "3x3, leaky ReLU": conv(19, 8, 16, 3, 1, 1, epilogue=LEAKY),
    "3x3, a slope for each channel": conv(19, 8, 40, 3, 1, 1, epilogue=PRELU),
    "depthwise, a slope for each channel": conv(24, 8, 24, 3, 1, 1, groups=24, epilogue=PRELU),
    "depthwise, hard swish": conv(40, 11, 40, 3, 1, 1, groups=40, epilogue=HARD_SWISH),
    "depthwise, dilated, SiLU": conv(16, 12, 16, 3, 1, 2, groups=16, dilation=(2, 2), epilogue=SILU),
    "dense, SiLU": Dense(1, 37, 50, SILU, dtype="int8"),
    "1x1 -> depthwise, SiLU": chain(conv(16, 9, 48, 1, epilogue=SILU), (48, 3, 2, 1, 48, SILU)),
    "depthwise -> 1x1": chain(conv(32, 9, 32, 3, 1, 1, groups=32), (24, 1, 1, 0, 1, RESIDUAL)),
    "1x1 -> depthwise": chain(conv(16, 9, 48, 1), (48, 3, 2, 1, 48, BIAS)),
    "1x1 -> depthwise -> 1x1": chain(conv(16, 9, 48, 1), (48, 3, 1, 1, 48, BIAS), (16, 1, 1, 0, 1, RESIDUAL)),
    "1x1 -> depthwise 5x5": chain(conv(16, 13, 32, 1), (32, 5, 1, 2, 32, BIAS)),
    "stem": chain(conv(3, 19, 16, 3, 2, 1), (16, 3, 1, 1, 16, BIAS), (24, 1, 1, 0, 1, BIAS)),
    "3x3 -> 3x3": chain(conv(32, 9, 32, 3, 1, 1), (32, 3, 1, 1, 1, RESIDUAL)),
    "1x1 -> 1x1": chain(conv(32, 9, 64, 1), (32, 1, 1, 0, 1, BIAS)),
}


def checked(operator, config=None):
    """Runs the kernel of one configuration and compares every byte."""
    template = template_for(operator, CPU)
    assert template is not None, operator
    chosen = template.space(operator, CPU)[0] if config is None else config
    own = template.for_config(chosen)
    case = make_case(operator, own, CPU, copies=1)
    run = compile_kernel(own.build(operator, chosen, CPU), replace(CPU, mcpu=HOST.mcpu), EMULATED)
    run(*case.rotation[0])
    case.verify()
    return case, run


@pytest.mark.parametrize("name", one_in(3, OPERATORS))
def test_every_byte(name):
    checked(OPERATORS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATORS)
def test_every_byte_of_another_configuration(name):
    operator = OPERATORS[name]
    space = template_for(operator, CPU).space(operator, CPU)
    checked(operator, space[len(space) // 2])


@pytest.mark.parametrize("name", ["3x3, residual", "depthwise, 5x5, residual"])
def test_emulated_instructions_make_the_same_bytes(name):
    """On a CPU with the instructions too: so tests elsewhere prove the kernels that run here."""
    operator = OPERATORS[name]
    template = template_for(operator, CPU)
    config = template.space(operator, CPU)[0]
    case = make_case(operator, template.for_config(config), CPU, copies=1)
    function = template.build(operator, config, CPU)
    compile_kernel(function, replace(CPU, mcpu=HOST.mcpu), emulated=True)(*case.rotation[0])
    case.verify()


@pytest.mark.parametrize("name", ["depthwise", "depthwise, 5x5, stride 2", "depthwise -> 1x1"])
def test_every_byte_of_every_tile_width(name):
    operator = OPERATORS[name]
    space = template_for(operator, CPU).space(operator, CPU)
    widths = "columns" if isinstance(operator, Conv2d) else "depthwise_columns"
    for width in sorted({config[widths] for config in space}):
        checked(operator, next(config for config in space if config[widths] == width))


@pytest.mark.skipif(EMULATED, reason="there are no such instructions here")
@pytest.mark.parametrize("name", ["depthwise", "1x1", "3x3, residual"])
def test_bytes_of_four_columns_are_multiplied_and_packed_together(name):
    operator = OPERATORS[name]
    template = template_for(operator, CPU)
    config = next(each for each in template.space(operator, CPU) if each["columns"] >= 4)
    own = template.for_config(config)
    function = own.build(operator, config, CPU)
    text = compile_function(function, replace(CPU, mcpu=HOST.mcpu)).mod.inspect_source("asm")
    assert "vpdpbusd" in text and "vpackuswb" in text and "vpackssdw" in text


@pytest.mark.parametrize("change", ["bias", "zero point in the padding", "bound"])
def test_a_wrong_constant_is_found(change):
    operator = OPERATORS["3x3, padded"]
    case, run = checked(operator)
    *arguments, output = case.rotation[0]
    constants = arguments[2].numpy()
    if change == "bias":
        constants.view(np.int32)[-1, 0] += 600
    elif change == "bound":
        constants[0, 1] -= 1
    else:  # the corner's bias as if the padding were zero
        constants[3:5] = constants[3 + 8 : 5 + 8]
    arguments[2].copyfrom(constants)
    case.output.reset()
    run(*arguments, output)
    with pytest.raises(WrongValues):
        case.verify()


def test_no_kernel_without_the_instruction():
    assert template_for(OPERATORS["1x1"], replace(CPU, features=("avx512f",))) is None
    assert "avx512_vnni" in replace(CPU, features=("avx512f",)).lacks("int8")


def test_an_average_of_bytes_is_not_one_of_them():
    assert template_for(Pool2d("average", 1, 32, 7, 7, (7, 7), dtype="int8"), CPU) is None
