"""Conversion of ONNX to Relax: TVM's importer, with own converters where its form hides operators that kernels
compute.

TVM converts Clip and Pad into opaque ``call_tir``, Sum of two tensors into stack + reduce, and applies the factors of
Gemm at run time. Here they stay plain Relax operators, and every binding has the name of its ONNX node. Integer
layers and byte steps (:mod:`fusion.relax.onnx.byte_steps`) become :mod:`fusion.relax.integer_calls`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as tvm_onnx

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.operators.layers import Conv2d, Dense, Epilogue, ResidualPosition
from fusion.model.conv_graph import identifier
from fusion.model.library_messages import sentence
from fusion.relax.bindings import constant_array, static_shape
from fusion.relax.canonical.rewriter import constant_of, rule_key, short_name
from fusion.relax.integer_calls import (
    ByteMean,
    BytePair,
    ByteResize,
    ByteStep,
    ByteTable,
    ByteWindow,
    byte_call,
    integer_call,
)
from fusion.relax.kernels.resize import resize_matrix
from fusion.relax.onnx.byte_steps import BYTE_MEAN, BYTE_PAIR, BYTE_RESIZE, BYTE_TABLE, BYTE_WINDOW
from fusion.relax.onnx.integer_layers import QUANTISED_CONV, QUANTISED_DENSE, with_integer_layers
from fusion.relax.onnx.model_file import opset_of
from fusion.relax.onnx.quantised_rewrites import padding_before, with_zero_points
from fusion.relax.onnx.recurrent_layers import convert_gru, convert_lstm

if TYPE_CHECKING:
    from onnx import ModelProto


def _byte_table(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    return ByteTable(shape, bool(attrs["per_channel"]))


def _byte_pair(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    return BytePair("add" if attrs["kind"] == b"add" else "multiply", shape, bool(attrs["per_channel"]))


def _byte_mean(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    batch, channels, height, width = shape
    return ByteMean((batch, channels, height, width))


def _byte_window(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteStep:
    batch, channels, height, width = shape
    (rows, columns), (down, across) = attrs["kernel"], attrs["stride"]
    top, left, bottom, right = attrs["padding"]
    counts_padding = bool(attrs["counts_padding"])
    return ByteWindow(
        (batch, channels, height, width), (rows, columns), (down, across), (top, left, bottom, right), counts_padding
    )


def _byte_resize(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> ByteResize:
    batch, channels, height, width = shape
    (rows, columns), (down, across) = attrs["size"], attrs["scales"]
    image = (batch, channels, height, width)
    return ByteResize(image, (rows, columns), (down, across), attrs["coordinates"].decode(), bool(attrs["cut_off"]))


def _byte_converter(
    make: Callable[[tuple[int, ...], Mapping[str, Any]], ByteStep],
) -> Callable[[relax.BlockBuilder, Sequence[Any], dict, str], relax.Expr]:
    def convert_step(builder: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict, name: str) -> relax.Expr:
        shape = static_shape(inputs[0])
        assert shape is not None
        step = make(shape, attrs)
        data, *others = inputs
        if isinstance(step, ByteResize):
            others[:0] = [relax.const(table) for table in step.tables()]
        return builder.emit(byte_call(builder, step, [data, *others]), name)

    return convert_step


BYTE_CONVERTERS = {
    BYTE_MEAN: _byte_converter(_byte_mean),
    BYTE_PAIR: _byte_converter(_byte_pair),
    BYTE_RESIZE: _byte_converter(_byte_resize),
    BYTE_TABLE: _byte_converter(_byte_table),
    BYTE_WINDOW: _byte_converter(_byte_window),
}


Inputs = MutableSequence[Any]  # Relax expressions; None for an optional input that is absent
Attributes = Mapping[str, Any]
# Operators in TVM's table under the name of a standard operator, but with the semantics of ONNX Runtime's own operator.
_NOT_STANDARD = frozenset({"Attention"})
_DIRECT = frozenset({"If", "Constant"})
# Operator types of this package, which occur in no file.
_OWN = frozenset({QUANTISED_CONV, QUANTISED_DENSE, *BYTE_CONVERTERS})


def supported_operators() -> frozenset[str]:
    """Return the standard ONNX operators with a converter."""
    return frozenset(tvm_onnx._get_convert_map()) - _NOT_STANDARD | _DIRECT | (_CONVERTERS.keys() - _OWN)


def as_computed(model: ModelProto, whole_numbers: bool) -> ModelProto:
    """Return a prepared model (:mod:`fusion.relax.onnx.preparation`) with its quantised layers in integers, or else in
    floats between dequantising and quantising.
    """
    model = with_zero_points(model)
    return with_integer_layers(model) if whole_numbers else model


def convert(model: ModelProto) -> tvm.IRModule:
    """Return the Relax module of a model from :func:`as_computed`, with function ``main``.

    ``UnsupportedOperatorError`` names the node that cannot be converted.
    """
    importer = _Importer(shape_dict={}, dtype_dict={})
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # renamed inputs; TVM also prints the operators it fails on
        try:
            return importer.from_onnx(model.graph, opset_of(model))
        except Exception:
            with contextlib.suppress(Exception):
                importer.bb._end_block()  # else the abandoned builder prints a warning to the terminal
            raise


class _Importer(tvm_onnx.ONNXGraphImporter):
    """TVM's importer, with the converters of :data:`_CONVERTERS` taking precedence over its own."""

    def _convert_operator(self, op_name: str, inputs: Inputs, attrs: dict, opset: int) -> relax.Expr:
        custom = attrs["tvm_custom"]
        name = identifier(custom["name"] or op_name)
        _require_layer(op_name, inputs, custom["name"])
        try:
            converted = self._ours(op_name, inputs, attrs, name)
            if converted is None:
                converted = super()._convert_operator(op_name, inputs, attrs, opset)
        except UnsupportedOperatorError:
            raise
        except Exception as error:  # a converter may fail with any error
            raise UnsupportedOperatorError(
                f"operator {op_name} of node {custom['name']!r} cannot be converted: {sentence(error)}; "
                "export the model without it"
            ) from error
        outputs = 1 if not isinstance(converted, relax.Tuple) else len(converted.fields)
        if outputs < custom["num_outputs"] and not isinstance(converted.ty, relax.TupleType):
            raise UnsupportedOperatorError(
                f"operator {op_name} of node {custom['name']!r}: only its first output is supported"
            )
        return bind(self.bb, converted, name)

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        """Skip TVM's check: operators without any converter were reported before."""

    def _sanitize_name(self, name: str) -> str:
        return identifier(name)

    def _ours(self, op_name: str, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
        converter = _CONVERTERS.get(op_name)
        return None if converter is None else converter(self.bb, inputs, attrs, name)


# Layers, whose operands must be of one type, and the minimum rank of their data.
_LAYERS = {"Conv": 3, "ConvTranspose": 3, "Gemm": 2, "MatMul": 1}
_ADVICE = {
    "float64": "export the model in float32 (in PyTorch: model.float())",
    "uint8": "put a Cast to float32 before the layer; inputs of bytes may stay so",
}


def _require_layer(op_name: str, inputs: Inputs, node: str) -> None:
    """Raise ``UnsupportedOperatorError`` for a layer of types other than float, or of too low rank."""
    if op_name not in _LAYERS:
        return
    types = [str(each.ty.dtype) for each in inputs[:2] if each is not None]
    other = next((dtype for dtype in types if dtype not in ("float32", "float16", "bfloat16")), None)
    if other is not None:
        advice = _ADVICE.get(other, "export the layer in float32")
        raise UnsupportedOperatorError(f"operator {op_name} of node {node!r}: {other} is not supported; {advice}")
    shape = None if inputs[0] is None else inputs[0].ty.shape
    if shape is not None and len(shape) < _LAYERS[op_name]:
        raise UnsupportedOperatorError(
            f"operator {op_name} of node {node!r} reads {len(shape)} dimensions, it takes {_LAYERS[op_name]} or more; "
            "export the model again"
        )


def bind(builder: relax.BlockBuilder, expr: relax.Expr, name: str) -> relax.Expr:
    """Emit a call under ``name``; calls nested in it get the name with their operator as suffix."""
    if isinstance(expr, relax.TupleGetItem):
        source = bind(builder, expr.tuple_value, f"{name}_{short_name(expr.tuple_value)}")
        return builder.emit(relax.TupleGetItem(source, expr.index), name)
    if rule_key(expr) is None:
        return expr
    args = [bind(builder, arg, f"{name}_{short_name(arg)}") for arg in expr.args]
    if any(new is not old for new, old in zip(args, expr.args, strict=True)):
        expr = relax.Call(expr.op, args, expr.attrs, expr.ty_args)
    return builder.emit(expr, name)


def _static_shape(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(int(size) for size in expr.ty.shape)


def _conv(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert a two-dimensional convolution with explicit padding, its bias as a separate addition; None: use TVM's
    converter.
    """
    data, weight, bias = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None
    if data is None or weight is None:
        return None
    kernel = _static_shape(weight)[2:]
    if len(data.ty.shape) != 4:
        attrs["pads"] = _padding(attrs, kernel, _static_shape(data)[2:])
        attrs["auto_pad"] = b"NOTSET"
        return None
    result = builder.emit(
        relax.op.nn.conv2d(
            data,
            weight,
            strides=attrs.get("strides", (1, 1)),
            padding=_padding(attrs, kernel, _static_shape(data)[2:]),
            dilation=attrs.get("dilations", (1, 1)),
            groups=attrs.get("group", 1),
        ),
        name,
    )
    if bias is None:
        return result
    values = constant_array(bias)
    channels = (1, -1, 1, 1)
    shaped = relax.op.reshape(bias, channels) if values is None else constant_of(values.reshape(channels))
    return bind(builder, relax.op.add(result, shaped), f"{name}_bias")


def _quantised_conv(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr:
    """Convert an integer convolution (:mod:`fusion.relax.onnx.integer_layers`)."""
    (batch, channels, height, width), weight = _static_shape(inputs[0]), _static_shape(inputs[1])
    top, left, bottom, right = _padding(attrs, weight[2:], (height, width))
    strides, dilations = attrs.get("strides", (1, 1)), attrs.get("dilations", (1, 1))
    operator = Conv2d(
        batch,
        channels,
        height,
        width,
        out_channels=weight[0],
        kernel=(weight[2], weight[3]),
        stride=(strides[0], strides[1]),
        padding=(top, left, bottom, right),
        dilation=(dilations[0], dilations[1]),
        groups=attrs.get("group", 1),
        epilogue=_quantised_epilogue(inputs, attrs),
        dtype="int8",
    )
    return builder.emit(integer_call(builder, operator, inputs), name)


def _quantised_dense(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr:
    """Convert an integer product with a constant matrix; leading dimensions of the data are rows."""
    shape, weight = _static_shape(inputs[0]), _static_shape(inputs[1])
    rows = math.prod(shape[:-1])
    operator = Dense(rows, shape[-1], weight[0], _quantised_epilogue(inputs, attrs), dtype="int8")
    data, *others = inputs
    if len(shape) != 2:
        data = builder.emit(relax.op.reshape(data, (rows, shape[-1])), f"{name}_rows")
        others[5:] = [
            builder.emit(relax.op.reshape(each, operator.output_shape), f"{name}_rows") for each in others[5:]
        ]
    result = builder.emit(integer_call(builder, operator, [data, *others]), name)
    if len(shape) == 2:
        return result
    return builder.emit(relax.op.reshape(result, (*shape[:-1], weight[0])), f"{name}_shaped")


def _quantised_epilogue(inputs: Inputs, attrs: Attributes) -> Epilogue:
    activation = attrs.get("activation", b"").decode() or None
    own = 7 if activation == "prelu" else 6  # one more for the slopes
    residual: ResidualPosition | None = "before_activation" if len(inputs) > own else None
    slope = round(float(attrs.get("slope", 0.0)), 6)
    return Epilogue(bias=True, activation=activation, residual=residual, slope=slope)


def _pool(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> None:
    """Resolve automatic padding, then leave the conversion to TVM's converter."""
    data = inputs[0]
    if attrs.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"") and data is not None:
        attrs["pads"] = _padding(attrs, attrs["kernel_shape"], _static_shape(data)[2:])
        attrs["auto_pad"] = b"NOTSET"


def _padding(attrs: Attributes, kernel: Sequence[int], image: Sequence[int]) -> tuple[int, ...]:
    """Return padding as (before for every axis, after for every axis); SAME as ONNX defines it for ``auto_pad``."""
    axes = range(len(kernel))
    strides = attrs.get("strides", (1,) * len(kernel))
    dilations = attrs.get("dilations", (1,) * len(kernel))
    mode = attrs.get("auto_pad", b"NOTSET").decode()
    if mode in ("NOTSET", ""):
        return tuple(attrs.get("pads", (0,) * 2 * len(kernel)))
    if mode == "VALID":
        return (0,) * 2 * len(kernel)
    extents = [dilations[axis] * (kernel[axis] - 1) + 1 for axis in axes]
    totals = [max((-(-image[a] // strides[a]) - 1) * strides[a] + extents[a] - image[a], 0) for a in axes]
    small, large = tuple(total // 2 for total in totals), tuple(-(-total // 2) for total in totals)
    return (*small, *large) if mode == "SAME_UPPER" else (*large, *small)


def _conv_transpose(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> None:
    """Resolve ``output_shape``, which TVM's converter ignores, into padding, then leave the conversion to it."""
    wanted = attrs.pop("output_shape", None)
    if wanted is None:
        return
    kernel, image = _static_shape(inputs[1])[2:], _static_shape(inputs[0])[2:]
    ones, axes = (1,) * len(kernel), range(len(kernel))
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    added = attrs.get("output_padding", (0,) * len(kernel))
    whole = [strides[a] * (image[a] - 1) + dilations[a] * (kernel[a] - 1) + 1 + added[a] for a in axes]
    cut = [whole[a] - wanted[a - len(kernel)] for a in axes]  # batch and channels may come first
    attrs["output_padding"] = tuple(added[a] + max(-cut[a], 0) for a in axes)
    before = [padding_before(total, attrs.get("auto_pad") == b"SAME_UPPER") for total in cut]
    attrs["pads"] = (*before, *(max(total, 0) - first for total, first in zip(cut, before, strict=True)))
    attrs["auto_pad"] = b"NOTSET"


_PAD_MODES = {b"constant": "constant", b"reflect": "reflect", b"edge": "replicate"}


def _pad(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert padding with known, non-negative widths to ``R.nn.pad``; None: use TVM's converter."""
    pads = constant_array(inputs[1]) if len(inputs) > 1 else None
    value = constant_array(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else np.zeros(())
    axes = constant_array(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    mode = _PAD_MODES.get(attrs.get("mode", b"constant"))
    if mode is None or pads is None or value is None or np.any(pads < 0):
        return None
    rank = len(inputs[0].ty.shape)
    padded = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    widths = np.zeros((rank, 2), np.int64)
    widths[list(padded)] = pads.reshape(2, -1).T
    return relax.op.nn.pad(inputs[0], widths.flatten().tolist(), mode, float(value.reshape(-1)[0]))


def _clip(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert Clip with constant bounds to ``R.clip``; a missing or NaN bound is open."""
    bounds = []
    for position, open_end in ((1, -np.inf), (2, np.inf)):
        bound = inputs[position] if len(inputs) > position else None
        values = np.array(open_end) if bound is None else constant_array(bound)
        if values is None:
            return None
        value = values.reshape(-1)[0].item()
        bounds.append(open_end if value != value else value)
    dtype = np.dtype(str(inputs[0].ty.dtype))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        bounds = [int(min(max(bound, limits.min), limits.max)) for bound in bounds]
    return relax.op.clip(inputs[0], *bounds)


def _gemm(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert ``alpha A B + beta C`` with constant B and C: the factors and the transposition are applied to the
    constants.
    """
    weight = constant_array(inputs[1])
    bias = constant_array(inputs[2]) if len(inputs) > 2 else None
    if weight is None or weight.dtype.kind != "f" or attrs.get("transA", 0):
        return None
    if bias is None and len(inputs) > 2 and inputs[2] is not None:
        return None
    weight = weight.T if attrs.get("transB", 0) else weight
    scaled = np.ascontiguousarray(weight * weight.dtype.type(attrs.get("alpha", 1.0)))
    result = builder.emit(relax.op.matmul(inputs[0], constant_of(scaled)), name)
    if bias is None:
        return result
    shift = constant_of(bias * bias.dtype.type(attrs.get("beta", 1.0)))
    return bind(builder, relax.op.add(result, shift), f"{name}_bias")


def _batch_norm(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert an inference batch norm with its one output; mixed precision is left to TVM's converter."""
    if attrs.get("training_mode", 0):
        raise UnsupportedOperatorError(
            f"operator BatchNormalization of node {name!r} is in training mode; export the model for inference"
        )
    if len({str(value.ty.dtype) for value in inputs}) > 1:
        return None
    norm = relax.op.nn.batch_norm(*inputs, axis=1, epsilon=attrs.get("epsilon", 1e-5), training=False)
    return relax.TupleGetItem(builder.normalize(norm), 0)


def _instance_norm(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert an instance norm to a group norm with as many groups as channels."""
    data, weight, bias = inputs
    shape = data.ty.shape
    if any(constant_array(each) is None for each in (weight, bias)) or str(data.ty.dtype) != "float32":
        return None
    axes = list(range(2, len(shape)))
    epsilon = attrs.get("epsilon", 1e-5)
    return relax.op.nn.group_norm(data, weight, bias, int(shape[1]), channel_axis=1, axes=axes, epsilon=epsilon)


def _resize(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert a resize of images, channels first or last, to ``resize2d``. Images whose size is not ``scales`` times
    that of the input (13 rows times 1.5 are 19), that are filtered before they shrink (``antialias``) or symmetric
    about their middle, and other axes, are converted to products with the weights along each axis; the rest is left to
    TVM's converter.
    """
    data, mode = inputs[0], attrs.get("mode", b"nearest").decode()
    if str(data.ty.dtype) in ("int8", "uint8") and mode != "nearest":
        return _resize_whole_numbers(builder, inputs, attrs, name)
    coordinates = attrs.get("coordinate_transformation_mode", b"half_pixel").decode()
    shape, rank = _static_shape(data), len(_static_shape(data))
    scales = constant_array(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else None
    sizes = constant_array(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    if scales is not None and not scales.size:  # opset 11 requires this input, so it may be empty
        inputs[2] = scales = None
    given = sizes if scales is None else scales
    kept = attrs.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
    if given is None or kept or coordinates == "tf_crop_and_resize":
        return None
    axes = [int(axis) % rank for axis in attrs.get("axes", range(rank))]
    factors = dict.fromkeys(range(rank), 1.0)
    results = dict(enumerate(shape))
    for axis, value in zip(axes, given.tolist(), strict=True):
        results[axis] = int(value) if given is sizes else int(np.floor(np.float32(shape[axis]) * np.float32(value)))
        factors[axis] = results[axis] / shape[axis] if given is sizes else float(value)
    changed = [axis for axis in range(rank) if results[axis] != shape[axis] or factors[axis] != 1.0]
    exact = all(abs(factors[axis] * shape[axis] - results[axis]) < 1e-3 for axis in changed)
    filtered = bool(attrs.get("antialias", 0)) and min((factors[axis] for axis in changed), default=1.0) < 1.0
    known = exact and not filtered and coordinates != "half_pixel_symmetric"
    if known and rank == 4 and {*changed} <= {2, 3}:
        return _resize_image(data, (results[2], results[3]), mode, coordinates, attrs)
    if known and rank == 4 and {*changed} <= {1, 2}:
        first = builder.emit(relax.op.permute_dims(data, (0, 3, 1, 2)), f"{name}_first")
        image = _resize_image(first, (results[1], results[2]), mode, coordinates, attrs)
        return relax.op.permute_dims(builder.emit(image, f"{name}_image"), (0, 2, 3, 1))
    if str(data.ty.dtype) != "float32" or (known and axes == list(range(rank)) and {*changed} <= {*range(2, rank)}):
        return None
    for axis in changed:
        matrix = resize_matrix(
            shape[axis], results[axis], factors[axis], mode, coordinates,
            rounding=attrs.get("nearest_mode", b"round_prefer_floor").decode(),
            alpha=float(attrs.get("cubic_coeff_a", -0.75)),
            exclude=bool(attrs.get("exclude_outside", 0)),
            antialias=bool(attrs.get("antialias", 0)),
        )  # fmt: skip
        if axis == rank - 1:
            data = builder.emit(relax.op.matmul(data, constant_of(np.ascontiguousarray(matrix.T))), f"{name}_{axis}")
            continue
        order = [*(other for other in range(rank) if other != axis), axis]
        last = builder.emit(relax.op.permute_dims(data, order), f"{name}_{axis}_last")
        last = builder.emit(relax.op.matmul(last, constant_of(np.ascontiguousarray(matrix.T))), f"{name}_{axis}")
        data = builder.emit(
            relax.op.permute_dims(last, [order.index(each) for each in range(rank)]), f"{name}_{axis}_back"
        )
    return data


def _resize_whole_numbers(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert an interpolation of bytes: computed in floats and truncated, as in ONNX Runtime, but rounded with
    ``antialias``.
    """
    data, *others = inputs
    dtype = str(data.ty.dtype)
    wide = builder.emit(relax.op.astype(data, "float32"), f"{name}_floats")
    image = _resize(builder, [wide, *others], attrs, name)
    if image is None:
        return None
    bounds = np.iinfo(dtype)
    rounding = relax.op.round if attrs.get("antialias", 0) else relax.op.trunc
    whole = relax.op.clip(rounding(builder.emit(image, f"{name}_image")), int(bounds.min), int(bounds.max))
    return relax.op.astype(bind(builder, whole, f"{name}_whole"), dtype)


def _resize_image(
    data: relax.Expr, size: tuple[int, int], mode: str, coordinates: str, attrs: Attributes
) -> relax.Expr:  # fmt: skip
    """Return NCHW ``data`` resized to ``size`` rows and columns."""
    return relax.op.image.resize2d(
        data,
        size,
        layout="NCHW",
        method="nearest_neighbor" if mode == "nearest" else mode,
        coordinate_transformation_mode=coordinates,
        rounding_method=attrs.get("nearest_mode", b"round_prefer_floor").decode(),
        cubic_alpha=float(attrs.get("cubic_coeff_a", -0.75)),
        cubic_exclude=bool(attrs.get("exclude_outside", 0)),
    )


# Square roots are vector instructions; a power is a library call per value.
_BY_ROOTS: dict[float, Callable[[relax.Expr], relax.Expr]] = {
    0.5: relax.op.rsqrt,
    0.75: lambda x: relax.op.multiply(relax.op.rsqrt(x), relax.op.sqrt(relax.op.rsqrt(x))),
    1.0: lambda x: relax.op.divide(relax.const(1.0), x),
}


def _local_response_norm(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert ``x / (bias + alpha / size * sum of squares of neighbouring channels) ** beta``: the sum becomes a 1x1
    convolution with a band of weights, for which there is a kernel.
    """
    data, size = inputs[0], int(attrs["size"])
    shape = _static_shape(data)
    if len(shape) != 4 or str(data.ty.dtype) != "float32":
        return None
    offsets = np.subtract.outer(np.arange(shape[1]), np.arange(shape[1]))  # output channel minus input channel
    band = (offsets <= (size - 1) // 2) & (-offsets <= size // 2)
    weight = (float(attrs.get("alpha", 1e-4)) / size * band).astype(np.float32)
    squares = builder.emit(relax.op.multiply(data, data), f"{name}_squares")
    sums = builder.emit(relax.op.nn.conv2d(squares, constant_of(weight[:, :, None, None])), name)
    shift = np.full((1, shape[1], 1, 1), attrs.get("bias", 1.0), np.float32)
    sums = builder.emit(relax.op.add(sums, constant_of(shift)), f"{name}_sums")
    beta = float(attrs.get("beta", 0.75))
    by_roots = _BY_ROOTS.get(round(beta, 6))
    factor = relax.op.power(sums, relax.const(-beta)) if by_roots is None else by_roots(sums)
    return bind(builder, relax.op.multiply(data, factor), f"{name}_scaled")


def _pairwise(operator: Callable) -> Callable:
    """Return a converter of a variadic element-wise operator to a chain of binary ones."""

    def convert_pairwise(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
        if any(isinstance(value.ty, relax.ShapeType) for value in inputs):
            return None
        return functools.reduce(operator, inputs)

    return convert_pairwise


def _power(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr | None:
    """Convert a power of integers by way of doubles, as ONNX Runtime computes it; TVM has no integer power."""
    dtype = str(inputs[0].ty.dtype)
    if "int" not in dtype:
        return None
    doubles = [relax.op.astype(value, "float64") for value in inputs]
    return relax.op.astype(relax.op.power(*doubles), dtype)


def _dropout(builder: relax.BlockBuilder, inputs: Inputs, attrs: dict, name: str) -> relax.Expr:
    training = constant_array(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else np.array(False)
    if training is None or training.any():
        raise UnsupportedOperatorError(f"operator Dropout of node {name!r} is in training mode; export for inference")
    return inputs[0]


_CONVERTERS: dict[str, Callable[..., relax.Expr | None]] = {
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    **BYTE_CONVERTERS,
    "Clip": _clip,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "GRU": convert_gru,
    "Gemm": _gemm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response_norm,
    "LSTM": convert_lstm,
    "Max": _pairwise(relax.op.maximum),
    "MaxPool": _pool,
    "Min": _pairwise(relax.op.minimum),
    "Pad": _pad,
    "Pow": _power,
    "Resize": _resize,
    QUANTISED_CONV: _quantised_conv,
    QUANTISED_DENSE: _quantised_dense,
    "Sum": _pairwise(relax.op.add),
}
