"""Conversion of a Relax function to a :class:`fusion.model.conv_graph.Graph`, with the reason of every operator that
is in no template kernel; operators share the same texts of reasons, so that they can be counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import tvm
from tvm import relax

from costmodel.base.errors import ModelError
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Pool2d
from fusion.model.conv_graph import Graph, Node, Other
from fusion.relax.bindings import (
    FUNCTION_RESULT,
    Program,
    image_shape,
    is_bytes,
    is_float32,
    operator_name,
    read_program,
    static_shape,
)
from fusion.relax.channel_moves import ChannelMoves
from fusion.relax.epilogue import Absorbed, absorb, absorb_before
from fusion.relax.integer_calls import operator_of
from fusion.relax.untuned_operators import group_norm_of, resize_of, row_work
from schedules.contract.operator_workload import requantisation_of
from schedules.contract.template import Parameters

MOVES = "moves values"
CHANNELS = "moves channels: one kernel for a chain of them"
ROWS = "along rows: one kernel, which is not tuned"
NORMALISED = "normalises groups of channels: two kernels, which are not tuned"
RESIZED = "resizes, mirrors or crops an image: one kernel, which is not tuned"
NO_TEMPLATE = "no template computes it"
DYNAMIC = "its shape is not known while compiling"
DTYPE = "it is not of float32"
QUANTISED = "between bytes and floats: what is computed behind or before it is no layer in whole numbers"
BYTES = "on bytes: one kernel, which is not tuned"
VARIABLE_WEIGHT = "its weight is no constant"
OTHER_LAYOUT = "its layout, rank or window has no template"
BROADCAST = "an operand has another shape than the result"
NO_LAYER = "follows no layer that has an epilogue"
SHARED = "something else reads the layer before it"
NO_EPILOGUE = "no epilogue has this form"

_MOVES = {
    *(f"relax.{name}" for name in ("reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "tile")),
    *(f"relax.{name}" for name in ("concat", "split", "strided_slice", "take")),
}
_WEIGHTED = ("relax.nn.conv2d", "relax.matmul")
_POOLS = ("relax.nn.max_pool2d", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d", "relax.mean", "relax.max")
_ELEMENT_WISE = {
    *(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "clip")),
    *(f"relax.{name}" for name in ("sigmoid", "tanh", "exp", "erf", "negative", "sqrt", "rsqrt", "power")),
    *(f"relax.nn.{name}" for name in ("relu", "relu6", "silu", "gelu", "gelu_tanh", "leakyrelu", "softplus", "prelu")),
}


def explain_leftover(
    program: Program, binding: relax.VarBinding, layers: Collection[relax.Var], moves: ChannelMoves
) -> str:
    """Return the reason why the call of ``binding`` is in no kernel; ``layers``: outputs of convolutions and dense
    layers in kernels.
    """
    name, result = operator_name(binding.value), binding.var
    if name in ("relax.quantize", "relax.dequantize"):
        return QUANTISED
    if name == "relax.call_tir" and is_bytes(result):
        return BYTES
    if resize_of(binding.value) is not None:
        return RESIZED
    if name in _MOVES:
        return MOVES if moves.of(result) is None else CHANNELS
    if group_norm_of(binding.value, program.constant) is not None:
        return NORMALISED
    if row_work(binding.value, program.constant) is not None:
        return ROWS
    if name not in _ELEMENT_WISE and name not in (*_WEIGHTED, *_POOLS):
        return NO_TEMPLATE
    if static_shape(result) is None:
        return DYNAMIC
    if not is_float32(result):
        return DTYPE
    if name in _WEIGHTED:
        return OTHER_LAYOUT if program.is_constant(binding.value.args[1]) else VARIABLE_WEIGHT
    return OTHER_LAYOUT if name in _POOLS else _element_wise(program, binding, layers)


def _element_wise(program: Program, binding: relax.VarBinding, layers: Collection[relax.Var]) -> str:
    tensors = [arg for arg in binding.value.args if isinstance(arg, relax.Var) and not program.is_constant(arg)]
    if any(static_shape(tensor) != static_shape(binding.var) for tensor in tensors):
        return BROADCAST
    before = [tensor for tensor in tensors if tensor in layers]
    if not before:
        return NO_LAYER
    return SHARED if all(len(program.users[tensor]) > 1 for tensor in before) else NO_EPILOGUE


def extract_graph(mod: tvm.IRModule, function: str = "main") -> Graph:
    """Return the graph of one Relax function; the module is not changed. ``ModelError`` if there is no such
    function.
    """
    names = [variable.name_hint for variable, body in mod.functions.items() if isinstance(body, relax.Function)]
    if function not in names:
        raise ModelError(f"the module has no Relax function {function!r}; it has {', '.join(names) or 'none'}")
    program = read_program(mod[function])
    claimed: set[relax.Var] = set()
    nodes: list[Node] = []
    # Backwards: an addition of two branches belongs to the later branch, whose other operand exists at that point.
    for binding in reversed(program.bindings):
        node = None if binding.var in claimed else _node(mod, program, binding, claimed)
        if node is not None:
            claimed.update(node.covered)
            nodes.append(node)
    nodes.sort(key=lambda node: program.position[node.output])
    nodes = absorb_before(program, nodes)
    counts = {var: len(users) for var, users in program.users.items()}
    readers = {
        var: tuple(program.bindings[place].var for place in dict.fromkeys(users) if place != FUNCTION_RESULT)
        for var, users in program.users.items()
    }
    return Graph(tuple(_uniquely_named(nodes)), _others(program, nodes), counts, readers)


def _uniquely_named(nodes: Sequence[Node]) -> list[Node]:
    taken: set[str] = set()
    unique = []
    for node in nodes:
        name, number = node.name, 1
        while name in taken:
            number += 1
            name = f"{node.name}_{number}"
        taken.add(name)
        unique.append(node if name == node.name else replace(node, name=name))
    return unique


def _others(program: Program, nodes: Sequence[Node]) -> tuple[Other, ...]:
    claimed = {var for node in nodes for var in node.covered}
    layers = {node.output for node in nodes if not isinstance(node.operator, Pool2d)}
    moves = ChannelMoves(program)
    return tuple(
        Other(
            binding.var.name,
            _called(binding.value),
            binding.var,
            explain_leftover(program, binding, layers, moves),
        )
        for binding in program.bindings
        if isinstance(binding.value, relax.Call)
        and binding.var not in claimed
        and not program.is_constant(binding.value)
    )


def _called(call: relax.Call) -> str:
    """Return the name of a call for reports; for a function of the module, its name without a number."""
    name = operator_name(call)
    return call.args[0].name_hint.rstrip("_0123456789") if name == "relax.call_tir" else name or str(call.op)


def _node(mod: tvm.IRModule, program: Program, binding: relax.VarBinding, claimed: set[relax.Var]) -> Node | None:
    """Return the node that begins at ``binding``; None if no node begins there."""
    name = operator_name(binding.value)
    if (known := operator_of(mod, binding.value)) is not None:
        return _integer_node(program, binding, *known)
    if name == "relax.nn.max_pool2d" and static_shape(binding.var) is not None:
        return _pool_node(program, binding)
    if not is_float32(binding.var) or static_shape(binding.var) is None:
        return None
    if name == "relax.nn.conv2d":
        return _conv_node(program, binding, claimed)
    if name == "relax.matmul":
        return _dense_node(program, binding, claimed)
    if name == "relax.nn.layer_norm":
        return _norm_node(program, binding)
    return _pool_node(program, binding)


def _pool_node(program: Program, binding: relax.VarBinding) -> Node | None:
    pool = _pool_operator(operator_name(binding.value), binding.value)
    if pool is None or not isinstance(binding.value.args[0], relax.Var):
        return None
    block = program.block[program.position[binding.var]]
    return Node(binding.var.name, pool, binding.value.args[0], None, (), binding.var, (binding.var,), block)


def _integer_node(
    program: Program, binding: relax.VarBinding, operator: Conv2d | Dense, arguments: Sequence[relax.Expr]
) -> Node | None:
    """Return the node of an integer layer from the arguments of its workload; None if a parameter is computed."""
    data, *others = arguments
    residual = others.pop() if operator.epilogue.residual else None
    constants = [array for array in map(program.constant, others) if array is not None]
    if len(constants) < len(others) or not isinstance(data, relax.Var) or isinstance(residual, tvm.ir.GenericConst):
        return None
    weight, bias, *rest = constants
    requantisation = requantisation_of(rest[0], rest[1], rest[2], residual is not None)
    slopes = rest[3] if operator.epilogue.activation == "prelu" else None
    parameters = (Parameters(weight, bias, slopes=slopes, requantisation=requantisation),)
    block = program.block[program.position[binding.var]]
    return Node(binding.var.name, operator, data, residual, parameters, binding.var, (binding.var,), block)


# --- convolutions and dense layers ---------------------------------------------------------------


def _conv_node(program: Program, binding: relax.VarBinding, claimed: set[relax.Var]) -> Node | None:
    call = binding.value
    data, weight = call.args[0], program.constant(call.args[1])
    shape = image_shape(data)
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    if weight is None or shape is None or layouts != ("NCHW", "OIHW", "NCHW") or not _is_plain_float(data, weight):
        return None
    absorbed = absorb(program, binding.var, 1, claimed)
    batch, channels, height, width = shape
    operator = Conv2d(
        batch,
        channels,
        height,
        width,
        out_channels=weight.shape[0],
        kernel=(weight.shape[2], weight.shape[3]),
        stride=_pair(attrs.strides),
        padding=_four(attrs.padding),
        dilation=_pair(attrs.dilation),
        groups=int(attrs.groups),
        epilogue=absorbed.epilogue,
    )
    if operator.output_shape != static_shape(binding.var):
        return None
    return _layer_node(program, binding, operator, data, weight, absorbed)


def _dense_node(program: Program, binding: relax.VarBinding, claimed: set[relax.Var]) -> Node | None:
    """Return the node of a product with a constant matrix, or None; leading dimensions of the data are rows."""
    data, weight = binding.value.args[0], program.constant(binding.value.args[1])
    shape = static_shape(data)
    if weight is None or shape is None or weight.ndim != 2 or len(shape) < 2 or not _is_plain_float(data, weight):
        return None
    absorbed = absorb(program, binding.var, len(shape) - 1, claimed, affine=False)
    rows = int(np.prod(shape[:-1]))
    operator = Dense(rows, shape[-1], weight.shape[1], absorbed.epilogue)
    return _layer_node(program, binding, operator, data, np.ascontiguousarray(weight.T), absorbed)


def _layer_node(
    program: Program,
    binding: relax.VarBinding,
    operator: Conv2d | Dense,
    data: relax.Var,
    weight: np.ndarray,
    absorbed: Absorbed,
) -> Node:
    return Node(
        name=binding.var.name,
        operator=operator,
        data=data,
        residual=absorbed.residual,
        parameters=(absorbed.parameters(weight),),
        output=absorbed.output,
        covered=(binding.var, *absorbed.covered),
        block=program.block[program.position[binding.var]],
    )


def _is_plain_float(data: relax.Expr, weight: np.ndarray) -> bool:
    return isinstance(data, relax.Var) and is_float32(data) and weight.dtype == np.float32


# --- normalisation -------------------------------------------------------------------------------


def _norm_node(program: Program, binding: relax.VarBinding) -> Node | None:
    """Return the node of a layer norm over the channels of an image, or None."""
    call = binding.value
    data, shape = call.args[0], image_shape(call.args[0])
    scale, shift = (program.constant(arg) for arg in call.args[1:])
    if shape is None or scale is None or shift is None or not _is_plain_float(data, scale):
        return None
    if [int(axis) % 4 for axis in call.attrs.axes] != [1]:
        return None
    operator = ChannelNorm(*shape, epsilon=float(call.attrs.epsilon))
    parameters = (Parameters(scale, shift),)
    block = program.block[program.position[binding.var]]
    return Node(binding.var.name, operator, data, None, parameters, binding.var, (binding.var,), block)


# --- pooling -------------------------------------------------------------------------------------


def _pool_operator(name: str, call: relax.Call) -> Pool2d | None:
    shape = image_shape(call.args[0]) if isinstance(call, relax.Call) and call.args else None
    if shape is None or str(call.args[0].ty.dtype) not in ("float32", "uint8"):
        return None
    batch, channels, height, width = shape
    if not is_float32(call.args[0]) and name != "relax.nn.max_pool2d":
        return None
    if name in ("relax.mean", "relax.max"):
        axes = call.attrs.axis
        if axes is None or sorted(int(axis) % 4 for axis in axes) != [2, 3]:
            return None
        return Pool2d(
            "max" if name == "relax.max" else "average", batch, channels, height, width, kernel=(height, width)
        )
    if name == "relax.nn.adaptive_avg_pool2d":
        size = call.attrs.output_size
        whole = size is not None and _pair(size) == (1, 1) and call.attrs.layout == "NCHW"
        return Pool2d("average", batch, channels, height, width, kernel=(height, width)) if whole else None
    if name in ("relax.nn.max_pool2d", "relax.nn.avg_pool2d"):
        return _window_pool("max" if "max" in name else "average", call, shape)
    return None


def _window_pool(kind: Literal["max", "average"], call: relax.Call, shape: tuple[int, int, int, int]) -> Pool2d | None:
    """Return a window pooling, or None; with ``ceil_mode`` the padding at the end grows until every window fits."""
    attrs = call.attrs
    if _pair(attrs.dilation) != (1, 1) or attrs.layout != "NCHW" or (attrs.out_layout or "NCHW") != "NCHW":
        return None
    kernel, stride, (top, left, bottom, right) = _pair(attrs.pool_size), _pair(attrs.strides), _four(attrs.padding)
    out = image_shape(call)
    if out is None:
        return None
    grown = [
        max(behind, (count - 1) * step + window - size - before)
        for count, step, window, size, before, behind in zip(
            out[2:], stride, kernel, shape[2:], (top, left), (bottom, right), strict=True
        )
    ]
    counts_padding = kind == "average" and bool(attrs.count_include_pad)
    if counts_padding and grown != [bottom, right]:
        return None  # frameworks use different divisors for a window that reaches beyond the padding
    # A window of padding alone has no maximum and no mean.
    starts = zip(out[2:], stride, (top, left), shape[2:], strict=True)
    if top >= kernel[0] or left >= kernel[1] or any((n - 1) * step - pad >= size for n, step, pad, size in starts):
        return None
    batch, channels, height, width = shape
    padding = (top, left, grown[0], grown[1])
    dtype = "float32" if is_float32(call.args[0]) else "int8"
    pool = Pool2d(kind, batch, channels, height, width, kernel, stride, padding, counts_padding, dtype)
    return pool if pool.output_shape == out else None


def _pair(values: Sequence[int]) -> tuple[int, int]:
    numbers = [int(value) for value in values]
    return (numbers[0], numbers[-1])


def _four(values: Sequence[int]) -> tuple[int, int, int, int]:
    """Return padding as (top, left, bottom, right) from one, two (vertical, horizontal) or four numbers."""
    numbers = [int(value) for value in values]
    if len(numbers) == 4:
        return (numbers[0], numbers[1], numbers[2], numbers[3])
    return (numbers[0], numbers[-1], numbers[0], numbers[-1])
