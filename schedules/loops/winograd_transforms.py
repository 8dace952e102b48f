"""Winograd's minimal filtering of 3-tap windows: its matrices, and their products with vectors in registers.

m outputs of a 3-tap filter cost n = m + 2 multiplications instead of 3 m: y = A^T [(G g) * (B^T d)] (Winograd 1980; for
convolutions Lavin and Gray, CVPR 2016). The matrices are those of Toom and Cook: values of polynomials at n - 1 points
and their leading coefficient. All points but zero come in pairs of both signs, so that even and odd parts are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.winograd_work import TAPS
from schedules.loops import emit

# Positive points of each pair, by the outputs of a tile: those of least error among the candidates of Barabasz et al.
# (ACM TOMS 2020, arXiv:1803.10986) and Alam et al. (ACM TECS 2022: c and 1/c). Their values in the matrices are exact
# in FP32. Mean error over 128 channels against FP64, relative to direct summation: 2 outputs 0.7; 4 outputs 1.7, at 1
# and 2 3.2, at 1 and 1/2 3.1, at 2/3 and 3/2 1.8; 6 outputs, left out, 6.6 at best for at most 1.3 times fewer
# products.
_POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.625, 1.5)}


class WinogradMatrices(NamedTuple):
    """Matrices in FP64: ``input`` is B^T (n, n), ``weight`` G (n, taps), ``output`` A^T (m, n)."""

    input: np.ndarray
    weight: np.ndarray
    output: np.ndarray


@lru_cache
def winograd_matrices(outputs: int) -> WinogradMatrices:
    """Return the matrices of tiles of ``outputs``, a key of the table of points; rows of the points 0, +p, -p, +q, -q
    ..., infinity.
    """
    points = [0.0, *(sign * point for point in _POINTS[outputs] for sign in (1.0, -1.0))]
    return toom_cook(points, outputs, TAPS)


def toom_cook(points: Sequence[float], outputs: int, taps: int) -> WinogradMatrices:
    """Return the matrices for ``outputs`` of a window of ``taps`` with finite ``points``, one fewer than products; the
    last point is infinity.
    """
    count = outputs + taps - 1
    inputs, weights, sums = np.zeros((count, count)), np.zeros((count, taps)), np.zeros((outputs, count))
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        inputs[row, : count - 1] = np.poly(others)[::-1]
        weights[row] = point ** np.arange(taps) / np.prod([point - other for other in others])
        sums[:, row] = point ** np.arange(outputs)
    inputs[-1] = np.poly(points)[::-1]
    weights[-1, -1] = sums[-1, -1] = 1.0
    return WinogradMatrices(inputs, weights, sums)


def transformed_weight(weight: np.ndarray, outputs: int) -> np.ndarray:
    """Transform (O, I, 3, 3) to FP64 (O, I, n * n): G g G^T."""
    matrix = winograd_matrices(outputs).weight
    return np.einsum("ay,oiyx,bx->oiab", matrix, weight.astype(np.float64), matrix).reshape(*weight.shape[:2], -1)


def relative_rounding(outputs: int) -> float:
    """Return the RMS error of the sums over many channels, relative to that of direct summation.

    The k-th partial sum of terms of variance v has an error of eps^2 k v. Direct: 9 C terms of variance 1; here C terms
    at each position, of variance |G_i|^2 |G_j|^2 |B_i|^2 |B_j|^2, weighted by the squares of A: norms of rows, as in
    the bound of Barabasz et al., but for independent errors instead of the worst case. Rounding in the transforms is
    not included.
    """
    inputs, weights, sums = (matrix**2 for matrix in winograd_matrices(outputs))
    return float((sums @ (weights.sum(axis=1) * inputs.sum(axis=1))).mean()) / TAPS**2


def input_transform(tile: Sequence[Sequence[Any]], outputs: int, lanes: int) -> list[list[Any]]:
    """Return B^T d B of n rows of n vectors."""
    return _both_axes(tile, lambda line: _input_line(line, outputs, lanes))


def output_transform(tile: Sequence[Sequence[Any]], outputs: int, lanes: int) -> list[list[Any]]:
    """Return A^T M A: m rows of m vectors from n rows of n."""
    return _both_axes(tile, lambda line: _output_line(line, outputs, lanes))


def _both_axes(tile: Sequence[Sequence[Any]], line: Any) -> list[list[Any]]:
    """Apply ``line`` to every column, then to every row."""
    columns = [line([row[x] for row in tile]) for x in range(len(tile[0]))]
    return [line([column[y] for column in columns]) for y in range(len(columns[0]))]


def _input_line(values: Sequence[Any], outputs: int, lanes: int) -> list[Any]:
    matrix = winograd_matrices(outputs).input
    result = [combination(matrix[0], values, lanes)]
    for pair, point in enumerate(_POINTS[outputs]):
        row = matrix[1 + 2 * pair]
        # (x + p) E(x) and (x - p) E(x), E of odd powers only: x E(x) is even and shared, as is p E(x).
        even = combination(row[::2].tolist(), values[::2], lanes)
        odd = combination((row[1::2] / point).tolist(), values[1::2], lanes)
        result += _sum_and_difference(even, odd, point, lanes)
    return [*result, combination(matrix[-1], values, lanes)]


def _output_line(values: Sequence[Any], outputs: int, lanes: int) -> list[Any]:
    pairs = [(values[1 + 2 * pair], values[2 + 2 * pair]) for pair in range(len(_POINTS[outputs]))]
    sums = [T.bind(plus + minus) for plus, minus in pairs]
    differences = [T.bind(plus - minus) for plus, minus in pairs]
    result = []
    for power in range(outputs):
        terms = sums if power % 2 == 0 else differences
        factors = [point**power for point in _POINTS[outputs]]
        if power == 0:
            terms, factors = [values[0], *terms], [1.0, *factors]
        if power == outputs - 1:
            terms, factors = [values[-1], *terms], [1.0, *factors]
        result.append(combination(factors, terms, lanes))
    return result


def combination(factors: Sequence[float], values: Sequence[Any], lanes: int) -> Any:
    """Return the sum of ``factors`` times ``values``; factors of zero cost nothing."""
    terms = [(float(factor), value) for factor, value in zip(factors, values, strict=True) if factor]
    terms.sort(key=lambda term: (abs(term[0]) != 1.0, term[0] < 0.0))
    result = _scaled(*terms[0], lanes)
    for factor, value in terms[1:]:
        if abs(factor) == 1.0:
            result = result + value if factor > 0 else result - value
        else:
            result = result + _scaled(factor, value, lanes)
    return T.bind(result)


def _scaled(factor: float, value: Any, lanes: int) -> Any:
    return value if factor == 1.0 else value * emit.splat(factor, lanes)


def _sum_and_difference(even: Any, odd: Any, point: float, lanes: int) -> list[Any]:
    scaled = _scaled(point, odd, lanes)
    return [T.bind(even + scaled), T.bind(even - scaled)]
