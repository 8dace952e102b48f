"""Element-wise operators: arithmetic with broadcasting, activations and their gradients, dropout, comparisons."""

from __future__ import annotations

from math import prod

from costmodel.operators.device_work import Elementwise, Reduction
from costmodel.operators.layers import DTYPE_BYTES
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    argument,
    elementwise,
    gpu_inputs,
    gpu_outputs,
    numel,
    priced_dtype,
    rearrangement,
)
from e2e.step.operator_trace import OperatorCall, Tensor

# One kernel that reads every tensor argument once and writes every output once.
SIMPLE = (
    ("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "neg", "negative")
    + ("abs", "sign", "sgn", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")
    + ("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "erf", "erfc", "erfinv", "square")
    + ("sigmoid", "tanh", "relu", "relu6", "gelu", "silu", "mish", "elu", "celu", "selu", "leaky_relu", "hardtanh")
    + ("hardswish", "hardsigmoid", "softplus", "threshold", "glu", "log_sigmoid_forward", "logit", "prelu")
    + ("_prelu_kernel", "hardshrink", "softshrink", "ceil", "floor", "round", "trunc", "frac", "clamp", "clip")
    + ("clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "lerp", "addcmul", "addcdiv", "where", "xlogy")
    + ("eq", "ne", "lt", "le", "gt", "ge", "greater", "less", "greater_equal", "less_equal", "not_equal")
    + ("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not")
    + (
        "bitwise_xor",
        "__and__",
        "__or__",
        "__xor__",
        "isnan",
        "isinf",
        "isfinite",
        "isneginf",
        "isposinf",
        "nan_to_num",
    )
    + ("masked_fill", "__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift", "hypot", "heaviside")
    + ("native_dropout_backward", "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward")
    + ("sigmoid_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward", "hardswish_backward")
    + ("hardsigmoid_backward", "softplus_backward", "mish_backward", "glu_backward", "log_sigmoid_backward")
    + ("logit_backward", "hardshrink_backward", "softshrink_backward", "mse_loss_backward", "_prelu_kernel_backward")
    + ("smooth_l1_loss_backward", "huber_loss_backward", "polar", "complex", "real")
    + ("conj_physical", "special_erf", "digamma", "lgamma", "addcmul_out", "_masked_scale", "positive", "gcd", "lcm")
)

# Kernels that write without reading: from a generator, an index, a constant.
GENERATED = (
    ("arange", "linspace", "rand", "randn", "randint", "randperm", "uniform_", "normal_", "bernoulli_", "random_")
    + ("exponential_", "eye", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "rand_like")
    + ("randn_like", "scalar_tensor", "fill_", "zero_", "log_normal_", "geometric_", "cauchy_", "new_zeros", "new_ones")
    + ("new_full", "range", "bernoulli", "randint_like", "normal", "ones_out")
)

KINDS = {
    "native_dropout_backward": "mul",
    "threshold_backward": "relu_backward",
    "clamp_min": "relu",
    "fill_": "fill",
    "zero_": "fill",
    "true_divide": "div",
    "rsub": "sub",
}


def _simple(name: str) -> Lowering:
    kind = KINDS.get(name, name)

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        outputs = gpu_outputs(call) or gpu_inputs(call)[:1]
        largest = max(outputs, key=lambda tensor: len(tensor.shape))
        inputs = gpu_inputs(call)
        if kind == "add" and len(inputs) == 2 and _is_sparse(inputs[1], largest):
            return _add_rows(context, largest, inputs[1])
        return [elementwise(context, kind, largest, inputs, max(len(outputs), 1), call.name)]

    return lower


def _is_sparse(rows: Tensor, target: Tensor) -> bool:
    """True for rows of ``target``, which are not as many and not one for all."""
    some = rows.shape[:1] not in ((1,), target.shape[:1])
    return some and len(rows.shape) == len(target.shape) and rows.shape[1:] == target.shape[1:]


def _add_rows(context: Context, target: Tensor, rows: Tensor) -> list[DeviceWork]:
    """Lower the addition of a sparse tensor, some rows of the target in any order: a product with the factor, then
    ``index_add_`` (``add_out_dense_sparse_cuda`` in aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu).
    """
    written = Tensor(-1, -1, rows.shape, target.dtype, target.device)
    return [
        elementwise(context, "mul", written, [written], 1, "aten::mul"),
        rearrangement("scatter", written, prod(rows.shape[1:]), name="aten::index_add_"),
    ]


def _generated(name: str) -> Lowering:
    kind = KINDS.get(name, "fill")

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        outputs = gpu_outputs(call)
        auxiliary = name in ("fill_", "zero_")
        return [elementwise(context, kind, outputs[0], (), 1, call.name, auxiliary)] if outputs else []

    return lower


def _dropout(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``native_dropout``: reads the tensor, writes the output and a mask of one byte per element.

    All outputs of a record have one type, so the mask is counted in whole elements among the smaller operands.
    """
    data = gpu_inputs(call)[0]
    elements, dtype = numel(data), priced_dtype(data)
    mask = elements // DTYPE_BYTES[dtype]
    return [DeviceWork(call.name, (Elementwise("dropout", elements, 1, 1, mask, dtype),))]


def _bce_with_logits(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the loss to its CUDA kernels: log-sigmoid, 1 - target, product, difference, then the reduction."""
    data, target = gpu_inputs(call)[:2]
    pieces = (("log_sigmoid_forward", [data]), ("rsub", [target]), ("mul_", [data, target]), ("sub_", [data, data]))
    work = [elementwise(context, kind.rstrip("_"), data, read, 1, f"aten::{kind}") for kind, read in pieces]
    mean = Reduction("mean", numel(data), numel(gpu_outputs(call)[0]), priced_dtype(data))
    return [*work, DeviceWork("aten::mean", (mean,))]


def _bce_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``binary_cross_entropy_backward(grad, self, target, weight, reduction)``; that of a mean is divided by the
    number of elements in a kernel of its own (``binary_cross_entropy_backward_out_cuda`` in Loss.cu).
    """
    output = gpu_outputs(call)[0]
    work = [elementwise(context, "binary_cross_entropy_backward", output, gpu_inputs(call), 1, call.name)]
    if argument(call, 4, "reduction", _MEAN) == _MEAN:
        work.append(elementwise(context, "div", output, [output], 1, "aten::div_"))
    return work


_MEAN = 1  # at::Reduction


def in_place_forms(names: tuple[str, ...]) -> dict[str, str]:
    """Return operator name -> base name, for each operator and its in-place form."""
    forms = {f"aten::{name}": name for name in names}
    forms.update({f"aten::{name}_": name for name in names if not name.endswith("_")})
    return forms


TABLE: dict[str, Lowering] = {
    **{form: _simple(base) for form, base in in_place_forms(SIMPLE).items()},
    **{f"aten::{name}": _generated(name) for name in GENERATED},
    "aten::native_dropout": _dropout,
    "aten::binary_cross_entropy_with_logits": _bce_with_logits,
    "aten::binary_cross_entropy_backward": _bce_backward,
}
