"""Operator records of layers: shapes and dtype in, flops and bytes out; the counts that all operators have.

They describe the computation, not its implementation. Shapes are those of the framework (NCHW, unpadded channels); a
multiply-accumulate counts as two flops. Epilogues (bias, residual, activation) belong to the operator because a tuned
kernel computes them on its accumulators; their flops are not counted, as in the literature on convolution kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


class CountedWork:
    """Operator with counts of its computation and data movement."""

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-accumulate counts as two."""
        raise NotImplementedError

    @property
    def read_bytes(self) -> int:
        """Bytes that must be read into the chip at least once, with cold caches."""
        raise NotImplementedError

    @property
    def write_bytes(self) -> int:
        """Bytes that must be written out of the chip at least once."""
        raise NotImplementedError


class LayerWork:
    """Network layer from one tensor to another, with sizes tensor by tensor."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input as in the framework, channels unpadded."""
        raise NotImplementedError

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output as in the framework, channels unpadded."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Floating-point operations without those of the epilogue; a multiply-accumulate counts as two."""
        raise NotImplementedError

    @property
    def input_bytes(self) -> int:
        """Bytes of the input."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and biases; 0 for a layer without any."""
        raise NotImplementedError

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        raise NotImplementedError

    @property
    def residual_bytes(self) -> int:
        """Bytes of the tensor that the epilogue adds; 0 if none."""
        raise NotImplementedError


DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "float8": 1,
    "float4": 1,  # half a byte, counted whole where nothing says how weights are stored
    "uint8": 1,
    "bool": 1,
}

ACTIVATIONS = (
    *("relu", "relu6", "relu1", "sigmoid", "silu", "hard_swish", "hard_sigmoid", "gelu", "gelu_tanh", "leaky_relu"),
    *("tanh", "elu", "mish", "quick_gelu", "prelu", "selu", "softplus"),
)
# Activations with a slope: of a leaky ReLU below zero; of a hard sigmoid through 1/2, if not the usual 1/6; of an ELU
# just below zero, if not one.
_SLOPED = ("leaky_relu", "hard_sigmoid", "hard_swish", "elu")
# SELU is a scaled ELU (Klambauer et al., NeurIPS 2017).
SELU_SCALE, SELU_SLOPE = 1.0507009873554805, 1.6732632423543772
ResidualPosition = Literal["before_activation", "after_activation"]


def element_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; ``ValueError`` for an unknown dtype."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}, known: {', '.join(DTYPE_BYTES)}") from None


# Bits of a weight stored in fewer bits than it is multiplied with, its scales included: FP4 with a byte per 32 (MX) or
# per 16 (NVIDIA), integers with an FP16 per group of 128, FP8 with an FP32 per matrix or per block of 128 x 128.
STORED_BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "int4": 4.125, "int8": 8.125, "fp8": 8.0, "fp8-block": 8.002}


def stored_bytes(stored: str, dtype: str) -> float:
    """Bytes of a weight of ``dtype`` that is ``stored`` in a type of :data:`STORED_BITS`; empty: as it is multiplied.
    ``ValueError`` for an unknown type.
    """
    if not stored:
        return element_bytes(dtype)
    try:
        return STORED_BITS[stored] / 8
    except KeyError:
        raise ValueError(f"weights stored as {stored!r}: known are {', '.join(STORED_BITS)}") from None


@dataclass(frozen=True)
class Epilogue:
    """Operations of a kernel on its accumulator before the store.

    ``y = activation(x + bias [+ residual]) [* scale + shift] [+ residual]``: the residual is added before the
    activation (ResNet) or after it; with neither activation nor affine the position is ``before_activation``.
    ``affine``: a scale and a shift for each output channel after the activation (PP-LCNetV3). ``slope``: of
    ``leaky_relu`` below zero, of ``hard_sigmoid`` and ``hard_swish`` in the middle (0: 1/6), or of ``elu`` just below
    zero (0: 1), between 0 and 1. ``prelu`` has a slope below zero for each output channel.
    """

    bias: bool = False
    activation: str | None = None
    residual: ResidualPosition | None = None
    affine: bool = False
    slope: float = 0.0

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}, known: {', '.join(ACTIVATIONS)}")
        sloped = self.activation in _SLOPED and 0 < self.slope < 1
        if not sloped and (self.slope != 0 or self.activation == "leaky_relu"):
            raise ValueError(f"slope={self.slope}: {', '.join(_SLOPED)} have one between 0 and 1, others none")
        if self.residual == "after_activation" and self.activation is None and not self.affine:
            object.__setattr__(self, "residual", "before_activation")

    @property
    def constants(self) -> int:
        """Number of constants read for each output channel."""
        return int(self.bias) + 2 * int(self.affine) + int(self.activation == "prelu")


@dataclass(frozen=True)
class Prologue:
    """Operations of a kernel on its input as it is read: ``activation(x [* scale + shift])``; padding stays zero.

    ``affine``: a scale and a shift for each input channel, the rest of a folded batch norm (pre-activation, He et al.
    2016). ``activation`` and ``slope`` as in :class:`Epilogue`.
    """

    affine: bool = False
    activation: str | None = None
    slope: float = 0.0

    def __post_init__(self) -> None:
        Epilogue(activation=self.activation, slope=self.slope)  # the same names, the same slopes
        if self.activation == "prelu":
            raise ValueError("a prologue has no slopes for each channel")
        if not self.affine and self.activation is None:
            raise ValueError("a prologue that does nothing")


@dataclass(frozen=True)
class Conv2d(LayerWork):
    """Two-dimensional convolution, NCHW x OIHW."""

    batch: int
    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    # Top, left, bottom, right.
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    epilogue: Epilogue = field(default_factory=Epilogue)
    # `int8` is a quantised layer: unsigned bytes as data and result, signed weights, 32-bit sums. Scales and zero
    # points are constants, and a clipping activation is part of the rounding of sums.
    dtype: str = "float32"
    # The input is multiplied by one factor for each image and channel as it is read (squeeze-and-excite).
    gated: bool = False
    # Tensors are stored as NHWC and OHWI, which matters only on GPUs.
    channels_last: bool = False
    # Operations on the input, after the gate. Not in the repr (like `depth`), whose checksum assigns the rows of a
    # table to splits (`split_of`).
    prologue: Prologue | None = field(default=None, repr=False)
    # For a three-dimensional convolution, its window along the depth and the planes of its input. The record then
    # describes the equivalent work: ``batch`` counts the planes of its output, ``in_channels`` the channels of all
    # planes in a window.
    depth: tuple[int, int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(f"groups={self.groups} divides neither or not both of the channel counts: {self}")
        if self.out_height < 1 or self.out_width < 1:
            raise ValueError(f"empty output: {self}")

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        extent = self.dilation[0] * (self.kernel[0] - 1) + 1
        return (self.height + self.padding[0] + self.padding[2] - extent) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        extent = self.dilation[1] * (self.kernel[1] - 1) + 1
        return (self.width + self.padding[1] + self.padding[3] - extent) // self.stride[1] + 1

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, self.height, self.width)

    @property
    def gate_shape(self) -> tuple[int, int, int, int]:
        """Shape of the input's factors, for a gated convolution."""
        return (self.batch, self.in_channels, 1, 1)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weights: OIHW, with I the input channels of one group."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.out_channels, self.out_height, self.out_width)

    @property
    def is_depthwise(self) -> bool:
        """True for one filter per channel (multiplier 1) and more than one channel."""
        return self.groups == self.plane_channels == self.out_channels and self.groups > 1

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1 convolution with stride 1 and no padding: a matrix product over the pixels."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.groups == 1 and self.padding == (0, 0, 0, 0)

    @property
    def flops(self) -> int:
        per_output = 2 * self.kernel[0] * self.kernel[1] * self.in_channels // self.groups
        return self.batch * self.out_channels * self.out_height * self.out_width * per_output

    @property
    def plane_channels(self) -> int:
        """Channels of one plane of the input."""
        return self.in_channels if self.depth is None else self.in_channels // self.depth[0]

    @property
    def input_bytes(self) -> int:
        planes = self.batch if self.depth is None else self.depth[1]
        return planes * self.plane_channels * self.height * self.width * element_bytes(self.dtype)

    @property
    def weight_bytes(self) -> int:
        count = self.out_channels * (self.in_channels // self.groups) * self.kernel[0] * self.kernel[1]
        before = 2 * self.in_channels if self.prologue is not None and self.prologue.affine else 0
        return (count + before + self.out_channels * self.epilogue.constants) * element_bytes(self.dtype)

    @property
    def output_bytes(self) -> int:
        return self.batch * self.out_channels * self.out_height * self.out_width * element_bytes(self.dtype)

    @property
    def residual_bytes(self) -> int:
        return self.output_bytes if self.epilogue.residual else 0


@dataclass(frozen=True)
class FusedConvs(LayerWork):
    """Convolutions computed by one kernel; the intermediate tensors never leave its caches."""

    convs: tuple[Conv2d, ...]

    def __post_init__(self) -> None:
        if len(self.convs) < 2:
            raise ValueError("a fused operator needs at least two convolutions")
        for first, second in zip(self.convs, self.convs[1:], strict=False):
            if first.output_shape != second.input_shape:
                raise ValueError(f"output {first.output_shape} does not feed input {second.input_shape}")
            if first.epilogue.residual:
                raise ValueError("only the last convolution of a fused operator may add a residual")

    @property
    def dtype(self) -> str:
        """Dtype of all its convolutions."""
        return self.convs[0].dtype

    @property
    def batch(self) -> int:
        """Number of images in the batch."""
        return self.convs[0].batch

    @property
    def epilogue(self) -> Epilogue:
        """The epilogue of the last convolution."""
        return self.convs[-1].epilogue

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.convs[0].input_shape

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.convs[-1].output_shape

    @property
    def kind(self) -> str:
        """Kinds of its convolutions, such as ``depthwise-pointwise``."""
        return "-".join(conv_kind(conv) for conv in self.convs)

    @property
    def flops(self) -> int:
        return sum(conv.flops for conv in self.convs)

    @property
    def input_bytes(self) -> int:
        return self.convs[0].input_bytes

    @property
    def weight_bytes(self) -> int:
        return sum(conv.weight_bytes for conv in self.convs)

    @property
    def output_bytes(self) -> int:
        return self.convs[-1].output_bytes

    @property
    def residual_bytes(self) -> int:
        return self.convs[-1].residual_bytes

    @property
    def intermediate_bytes(self) -> int:
        """Bytes of the intermediate tensors, which are never stored in memory."""
        return sum(conv.output_bytes for conv in self.convs[:-1])


@dataclass(frozen=True)
class Pool2d(LayerWork):
    """Window pooling, or global pooling when the window is the whole image. NCHW.

    ``count_include_pad`` only matters for ``average``.
    """

    kind: Literal["max", "average"]
    batch: int
    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    count_include_pad: bool = False
    dtype: str = "float32"

    @property
    def is_global(self) -> bool:
        """True if one window covers the whole image."""
        return self.kernel == (self.height, self.width) and self.padding == (0, 0, 0, 0)

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return (self.height + self.padding[0] + self.padding[2] - self.kernel[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return (self.width + self.padding[1] + self.padding[3] - self.kernel[1]) // self.stride[1] + 1

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.out_height, self.out_width)

    @property
    def flops(self) -> int:
        return self.batch * self.channels * self.out_height * self.out_width * self.kernel[0] * self.kernel[1]

    @property
    def input_bytes(self) -> int:
        return self.batch * self.channels * self.height * self.width * element_bytes(self.dtype)

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def output_bytes(self) -> int:
        return self.batch * self.channels * self.out_height * self.out_width * element_bytes(self.dtype)

    @property
    def residual_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Dense(LayerWork):
    """Fully connected layer (GEMM with constant weights): ``y[m, n] = epilogue(sum_k x[m, k] w[n, k])``."""

    rows: int
    in_features: int
    out_features: int
    epilogue: Epilogue = field(default_factory=Epilogue)
    dtype: str = "float32"

    @property
    def input_shape(self) -> tuple[int, int]:
        return (self.rows, self.in_features)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the weights: outputs x inputs."""
        return (self.out_features, self.in_features)

    @property
    def output_shape(self) -> tuple[int, int]:
        return (self.rows, self.out_features)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.in_features * self.out_features

    @property
    def input_bytes(self) -> int:
        return self.rows * self.in_features * element_bytes(self.dtype)

    @property
    def weight_bytes(self) -> int:
        count = self.out_features * (self.in_features + self.epilogue.constants)
        return count * element_bytes(self.dtype)

    @property
    def output_bytes(self) -> int:
        return self.rows * self.out_features * element_bytes(self.dtype)

    @property
    def residual_bytes(self) -> int:
        return self.output_bytes if self.epilogue.residual else 0


@dataclass(frozen=True)
class ChannelNorm(LayerWork):
    """Layer normalisation over the channels of every pixel, NCHW.

    ``y = (x - mean) / sqrt(variance + epsilon) * weight + bias`` with weight and bias per channel.
    """

    batch: int
    channels: int
    height: int
    width: int
    epsilon: float = 1e-5
    dtype: str = "float32"

    @property
    def epilogue(self) -> Epilogue:
        """Epilogue of a layer norm: only a bias."""
        return Epilogue(bias=True)

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.input_shape

    @property
    def weight_shape(self) -> tuple[int]:
        """Shape of the weights: one for each channel."""
        return (self.channels,)

    @property
    def flops(self) -> int:
        """Floating-point operations: a sum, a difference, its square, their sum, and four final steps per value."""
        return 8 * self.batch * self.channels * self.height * self.width

    @property
    def input_bytes(self) -> int:
        return self.batch * self.channels * self.height * self.width * element_bytes(self.dtype)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.channels * element_bytes(self.dtype)

    @property
    def output_bytes(self) -> int:
        return self.input_bytes

    @property
    def residual_bytes(self) -> int:
        return 0


Operator = Conv2d | FusedConvs | Pool2d | Dense | ChannelNorm


def conv_kind(conv: Conv2d) -> str:
    """Kind of a convolution: ``depthwise``, ``pointwise``, ``grouped`` or ``conv`` (any other dense convolution),
    prefixed by ``gated-`` for a gated input and ``preactivated-`` for a prologue.
    """
    if conv.prologue is not None:
        return f"preactivated-{conv_kind(replace(conv, prologue=None))}"
    if conv.gated:
        return f"gated-{conv_kind(replace(conv, gated=False))}"
    if conv.is_depthwise:
        return "depthwise"
    if conv.is_pointwise:
        return "pointwise"
    return "grouped" if conv.groups > 1 else "conv"
