"""Reasons why an operator is in no template kernel; operators share the same texts, so that they can be counted."""

from __future__ import annotations

from collections.abc import Collection

from tvm import relax

from fusion.relax.bindings import Program, is_bytes, is_float32, operator_name, static_shape
from fusion.relax.blocked_operators import group_norm_of, resize_of
from fusion.relax.channel_moves import ChannelMoves
from fusion.relax.row_operators import row_work

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
