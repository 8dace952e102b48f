"""Features of (operator, configuration): generic over knob names, one matrix per operator, no loop over rows.

Trees split on one column at a time, so ratios that decide a kernel's speed are columns of their own: the product of
every two knobs (register and cache tiles are products) and, for each knob and dimension, the work wasted when the knob
does not divide the dimension.

Kernels of all dtypes are one family: what differs (bytes of a value, multiply-adds of an instruction) is in the
analytic cost, and in two columns where a family has operators of several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.model.cost_model import Estimate
from costmodel.model.measurements import Config
from costmodel.operators.any_operator import AnyOperator, dtype_of
from costmodel.operators.layers import (
    ChannelNorm,
    Conv2d,
    Dense,
    FusedConvs,
    Operator,
    Pool2d,
    conv_kind,
    element_bytes,
)

# Columns of families with operators of several dtypes, beside their knobs: bytes of a stored value, and the logarithm
# of the rate at which the machine computes the operator.
DTYPE_COLUMNS = ("dtype bytes", "dtype rate")


def tunable(operator: AnyOperator) -> Operator:
    """Return ``operator`` if kernels are tuned for its type, else raise :class:`UnsupportedOperatorError`."""
    if not isinstance(operator, Operator):
        raise UnsupportedOperatorError(
            f"no kernels are tuned for operator {type(operator).__name__}; give a convolution, pool or dense layer"
        )
    return operator


def operator_family(operator: AnyOperator) -> str:
    """Family name shared by operators of one kernel template, hence the same knobs: one learned model each, for all
    dtypes.
    """
    if isinstance(operator, FusedConvs):
        return operator.kind
    if isinstance(operator, Conv2d):
        return conv_kind(operator)
    if isinstance(operator, Pool2d):
        return "global-pool" if operator.is_global else "pool"
    return type(operator).__name__.lower()


def knob_names(configs: Sequence[Config]) -> tuple[str, ...]:
    """Names of all knobs in ``configs``, sorted."""
    return tuple(sorted({knob for config in configs for knob in config}))


def column_names(operators: Sequence[Operator], configs: Sequence[Config]) -> tuple[str, ...]:
    """Names of all knobs of ``configs``, and :data:`DTYPE_COLUMNS` if ``operators`` have several dtypes."""
    several = len({dtype_of(operator) for operator in operators}) > 1
    return (*knob_names(configs), *(DTYPE_COLUMNS if several else ()))


def feature_matrix(
    operator: Operator, configs: Sequence[Config], estimate: Estimate, knobs: Sequence[str]
) -> np.ndarray:
    """Features of each configuration, shape (len(configs), features), float32; a missing knob is NaN.

    ``estimate`` is the analytic one of ``operator``; ``knobs`` those of :func:`column_names`. Rows of one family and
    one ``knobs`` have equal length.
    """
    of_dtype = _dtype_values(operator, estimate) if set(DTYPE_COLUMNS) <= set(knobs) else []
    knobs = [knob for knob in knobs if knob not in DTYPE_COLUMNS]
    values = np.array([[config.get(knob, math.nan) for knob in knobs] for config in configs], dtype=np.float64)
    values = values.reshape(len(configs), len(knobs))
    dimensions = _dimensions(operator)
    fixed = np.array([*_logs(dimensions), *_scalars(operator, estimate), *of_dtype])
    positive = np.maximum(values, 1.0)
    logs = np.log2(positive)
    pairs = [logs[:, a] + logs[:, b] for a, b in combinations(range(len(knobs)), 2)]
    waste = [np.ceil(size / positive) * positive / size for size in _tiled_dimensions(operator)]
    columns = [np.broadcast_to(fixed, (len(configs), fixed.size)), values, logs, *waste]
    if pairs:
        columns.append(np.stack(pairs, axis=1))
    return np.concatenate(columns, axis=1).astype(np.float32)


def _dtype_values(operator: Operator, estimate: Estimate) -> list[float]:
    """Values of the columns :data:`DTYPE_COLUMNS`, in their order."""
    seconds = _number(estimate.breakdown.get("compute_seconds"))
    rate = operator.flops / seconds if seconds > 0 else math.nan
    return [float(element_bytes(dtype_of(operator))), math.log2(rate) if rate > 0 else math.nan]


def _dimensions(operator: Operator) -> list[int]:
    """All extents that define the operator; the same number for each operator of a family."""
    if isinstance(operator, FusedConvs):
        return [size for conv in operator.convs for size in _dimensions(conv)]
    if isinstance(operator, Dense):
        return [operator.rows, operator.in_features, operator.out_features]
    if isinstance(operator, Pool2d):
        shape = (operator.batch, operator.channels, operator.height, operator.width)
        return [*shape, *operator.kernel, *operator.stride, operator.out_height, operator.out_width]
    if isinstance(operator, ChannelNorm):
        return [*operator.input_shape]
    return [
        *operator.input_shape,
        *operator.output_shape,
        *operator.kernel,
        *operator.stride,
        *operator.dilation,
        operator.groups,
    ]


def _tiled_dimensions(operator: Operator) -> list[int]:
    """Extents that knobs are likely to tile: channels and image of every output, channels of the input."""
    if isinstance(operator, FusedConvs):
        first = operator.convs[0].in_channels
        return [first, *(size for conv in operator.convs for size in conv.output_shape[1:])]
    if isinstance(operator, Dense):
        return [operator.rows, operator.in_features, operator.out_features]
    return [operator.input_shape[1], *operator.output_shape[1:]]


def _scalars(operator: Operator, estimate: Estimate) -> list[float]:
    terms = ("compute_seconds", "operand_seconds", "memory_seconds", "rho")
    shares = [_number(estimate.breakdown.get(term)) for term in terms]
    size = [operator.flops, operator.input_bytes, operator.weight_bytes, operator.output_bytes, operator.residual_bytes]
    return [math.log2(max(estimate.seconds, 1e-12)), *_logs(size), *shares]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _logs(sizes: Sequence[float]) -> list[float]:
    return [math.log2(max(size, 1)) for size in sizes]
