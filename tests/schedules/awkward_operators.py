"""Operators over shapes that are not nice, one of every kind; shared by the tests of the templates."""

from __future__ import annotations

from dataclasses import replace

from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Epilogue, FusedConvs, Pool2d, Prologue
from tests.schedules.kernel_cases import conv

RELU6 = Epilogue(bias=True, activation="relu6")
NORM = Prologue(affine=True, activation="relu")


def separable(channels, out_channels, size=9, kernel=3, stride=1, batch=1, last=RELU6):
    """depthwise -> 1x1"""
    first = conv(batch, channels, size, size + 2, channels, kernel, stride, groups=channels, epilogue=RELU6)
    shape = (batch, channels, first.out_height, first.out_width)
    return FusedConvs((first, Conv2d(*shape, out_channels, (1, 1), epilogue=last)))


def expanded(channels, middle, size=9, kernel=3, stride=1, batch=1, last=RELU6):
    """1x1 -> depthwise"""
    first = Conv2d(batch, channels, size, size + 2, middle, (1, 1), epilogue=RELU6)
    second = conv(batch, middle, size, size + 2, middle, kernel, stride, groups=middle, epilogue=last)
    return FusedConvs((first, second))


def pair(channels, middle, out_channels, size=9, batch=1, last=RELU6, activation="gelu"):
    """1x1 -> 1x1"""
    first = Conv2d(batch, channels, size, size + 2, middle, (1, 1), epilogue=Epilogue(True, activation))
    return FusedConvs((first, Conv2d(batch, middle, size, size + 2, out_channels, (1, 1), epilogue=last)))


def inverted(channels, middle, out_channels, size=9, kernel=3, stride=1, batch=1, residual=None):
    """1x1 -> depthwise -> 1x1"""
    first, second = expanded(channels, middle, size, kernel, stride, batch).convs
    shape = (batch, middle, second.out_height, second.out_width)
    last = Conv2d(*shape, out_channels, (1, 1), epilogue=Epilogue(True, None, residual))
    return FusedConvs((first, second, last))


def stem(channels, middle, out_channels, size=17, kernel=3, stride=1, batch=1, residual=None):
    """3x3, stride 2 -> depthwise -> 1x1"""
    first = conv(batch, channels, size, size + 2, middle, 3, 2, epilogue=RELU6)
    shape = (batch, middle, first.out_height, first.out_width)
    second = conv(*shape, middle, kernel, stride, groups=middle, epilogue=RELU6)
    shape = (batch, middle, second.out_height, second.out_width)
    return FusedConvs((first, second, Conv2d(*shape, out_channels, (1, 1), epilogue=Epilogue(True, "relu", residual))))


def windows(first, kernel, stride, out_channels, groups=1):
    """``first``, then a window of its output."""
    shape = (first.batch, first.out_channels, first.out_height, first.out_width)
    return FusedConvs((first, conv(*shape, out_channels, kernel, stride, groups=groups, epilogue=RELU6)))


AWKWARD = {
    "first layer, 3 channels": conv(1, 3, 33, 31, 24, 3, 2, epilogue=RELU6),
    "first layer, one-sided padding": conv(1, 3, 32, 32, 16, 3, 2, (0, 0, 1, 1)),
    "first layer, 7x7": conv(2, 3, 30, 30, 24, 7, 2, epilogue=Epilogue(True, "relu")),
    "3x3, odd size, batch 2": conv(2, 24, 15, 13, 40, 3, epilogue=RELU6),
    "3x3, stride 2": conv(1, 64, 14, 14, 48, 3, 2),
    "3x3, dilated": conv(1, 32, 14, 14, 32, 3, padding=(2, 2, 2, 2), dilation=(2, 2)),
    "3x3, padding wider than the image": conv(1, 16, 2, 2, 16, 3, padding=(2, 2, 2, 2)),
    "5x5 on 3x3 pixels": conv(1, 16, 3, 3, 24, 5),
    "1x1, stride 2": conv(1, 40, 15, 15, 24, 1, 2, (0, 0, 0, 0)),
    "5x5 to one channel, batch 2": conv(2, 20, 9, 37, 1, 5, epilogue=Epilogue(True, "sigmoid")),
    "3x17 to three channels from three": Conv2d(1, 3, 6, 41, 3, (3, 17), padding=(1, 8, 1, 8), epilogue=RELU6),
    "1x1": conv(2, 24, 15, 13, 40, 1),
    "1x1, 3 channels": conv(1, 3, 9, 9, 8, 1),
    "1x1, one pixel": conv(1, 40, 1, 1, 24, 1),
    "1x1 behind a gate": conv(2, 24, 15, 13, 40, 1, gated=True, epilogue=Epilogue(True, "relu")),
    "1x1 behind a gate, 3 channels, residual": conv(
        1, 3, 9, 9, 24, 1, gated=True, epilogue=Epilogue(True, None, "before_activation")
    ),
    "1x1 behind a batch norm and a ReLU": conv(2, 24, 15, 13, 40, 1, prologue=NORM, epilogue=RELU6),
    "1x1 behind a gate and an activation": conv(1, 40, 9, 7, 24, 1, gated=True, prologue=Prologue(False, "relu6")),
    "1x1 behind a SiLU, 3 channels": conv(1, 3, 9, 9, 24, 1, prologue=Prologue(True, "silu")),
    "3x3 behind a batch norm and a ReLU": conv(2, 24, 15, 13, 40, 3, prologue=NORM, epilogue=RELU6),
    "3x3 behind a batch norm, 3 channels": conv(1, 3, 9, 8, 24, 3, prologue=Prologue(True)),
    "3x3, stride 2, behind a leaky ReLU": conv(1, 40, 14, 15, 24, 3, 2, prologue=Prologue(True, "leaky_relu", 0.2)),
    "1x1, stride 2, behind a batch norm and a ReLU": conv(1, 40, 15, 14, 24, 1, 2, (0, 0, 0, 0), prologue=NORM),
    "5x5 on 3x3 pixels behind a batch norm": conv(1, 16, 3, 3, 24, 5, prologue=NORM),
    "groups of 32": conv(1, 64, 10, 10, 64, 3, groups=2),
    "groups of 4": conv(1, 64, 10, 10, 64, 3, groups=16),
    "groups of 24": conv(1, 48, 10, 10, 96, 3, groups=2),
    "groups of 5 and 3": conv(1, 40, 7, 7, 24, 3, groups=8),
    "depth multiplier 2": conv(1, 24, 9, 9, 48, 3, groups=24),
    "depthwise 3x3": conv(2, 24, 15, 13, 24, 3, groups=24, epilogue=RELU6),
    "depthwise 5x5, stride 2": conv(1, 40, 14, 14, 40, 5, 2, groups=40),
    "depthwise 7x7": conv(1, 32, 9, 9, 32, 7, groups=32),
    "depthwise 13x13, stride 2": conv(1, 24, 15, 17, 24, 13, 2, groups=24),
    "depthwise 31x31": conv(1, 20, 19, 33, 20, 31, groups=20, epilogue=RELU6),
    "depthwise 9x9 without padding": conv(2, 16, 12, 21, 16, 9, padding=(0, 0, 0, 0), groups=16),
    "depthwise, dilated": conv(1, 32, 12, 12, 32, 3, padding=(2, 2, 2, 2), groups=32, dilation=(2, 2)),
    "depthwise, window wider than the image": conv(1, 24, 3, 3, 24, 7, groups=24),
    "dense": Dense(1, 100, 40, Epilogue(True)),
    "dense, 1001 classes, batch 3": Dense(3, 64, 1001, Epilogue(True, "relu")),
    "dense, fewer features than lanes": Dense(2, 20, 3, Epilogue(True, None, "before_activation")),
    "global average": Pool2d("average", 2, 24, 5, 5, (5, 5)),
    "global average, 1 channel block": Pool2d("average", 1, 3, 7, 5, (7, 5)),
    "global maximum": Pool2d("max", 1, 40, 7, 7, (7, 7)),
    "max pool": Pool2d("max", 1, 24, 15, 15, (3, 3), (2, 2), (1, 1, 1, 1)),
    "average pool": Pool2d("average", 2, 40, 14, 13, (3, 3), (2, 2), (1, 1, 1, 1)),
    "average pool over padding": Pool2d("average", 1, 40, 14, 14, (3, 3), (1, 1), (1, 1, 1, 1), True),
    "channel norm": ChannelNorm(1, 32, 7, 9),
    "channel norm, partial block, batch 2": ChannelNorm(2, 40, 5, 7, 1e-6),
    "channel norm, fewer channels than lanes": ChannelNorm(1, 3, 4, 4),
    "channel norm, one pixel": ChannelNorm(1, 24, 1, 1),
    "depthwise-pointwise": separable(24, 40),
    "depthwise-pointwise, stride 2, batch 2": separable(40, 24, 14, 3, 2, 2),
    "depthwise-pointwise, 5x5, residual": separable(40, 24, 9, 5, last=Epilogue(True, None, "before_activation")),
    "pointwise-depthwise": expanded(24, 40),
    "pointwise-depthwise, stride 2, batch 2": expanded(24, 72, 15, 3, 2, 2),
    "pointwise-depthwise, 7x7, residual": expanded(16, 40, 8, 7, last=Epilogue(True, "relu", "after_activation")),
    "pointwise-pointwise": pair(24, 96, 24, last=Epilogue(True, None, "before_activation")),
    "pointwise-pointwise, batch 2": pair(40, 24, 72, 5, 2),
    "pointwise-pointwise, 11 output blocks of few pixels": pair(16, 11 * 16, 16, 1),
    "pointwise-pointwise, one pixel row, few channels": pair(3, 20, 10, 1),
    "inverted residual": inverted(24, 72, 24, residual="before_activation"),
    "inverted residual, stride 2, batch 2": inverted(16, 40, 24, 15, 3, 2, 2),
    "inverted residual, 5x5": inverted(24, 48, 40, 14, 5, 2),
    "inverted residual, 7x7 on one row": inverted(16, 40, 16, 1, 7),
    "inverted residual, 3 channels": inverted(3, 24, 16, 6),
    "inverted residual, narrow middle": inverted(24, 6, 24, residual="before_activation"),
    "stem": stem(3, 24, 16),
    "stem, 5x5 depthwise, stride 2, batch 2": stem(3, 40, 24, 30, 5, 2, 2),
    "3x3 on blocked data, depthwise, 1x1": stem(40, 24, 33, 12, residual="after_activation"),
    "3x3, 1x1": windows(conv(1, 24, 9, 11, 40, 3, epilogue=RELU6), 1, 1, 24),
    "1x1, 3x3, stride 2": windows(conv(2, 24, 9, 11, 40, 1, epilogue=RELU6), 3, 2, 24),
    "3x3, 3x3": windows(conv(1, 40, 9, 11, 24, 3, epilogue=RELU6), 3, 1, 24),
    "3x3, depthwise": windows(conv(1, 3, 17, 19, 24, 3, 2, epilogue=RELU6), 3, 1, 24, 24),
}


def stored_as(operator, dtype):
    """``operator`` with its activations and weights stored as ``dtype``."""
    if isinstance(operator, FusedConvs):
        return FusedConvs(tuple(stored_as(layer, dtype) for layer in operator.convs))
    return replace(operator, dtype=dtype)
