"""Fits the lattice of a family (:mod:`costmodel.gpu.residuals.lattice`) to the tables of a GPU and of its twins.

Twins have the same chip (:func:`costmodel.gpu.kernel_rows.are_twins`), so one forest is grown on the rows of all, every
GPU weighing the same, on features of one of them so that it cannot tell them apart. What is left of a GPU's own rows
moves its lattice by their size, as far as samples of one chip may differ and no farther.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Gridded
from costmodel.gpu.kernel_rows import KernelRows
from costmodel.gpu.residuals.lattice import Lattice, rising
from costmodel.gpu.residuals.residual import effort_for, middle_of

# How far (log units) a GPU may be from what it and its twins show together, by analytic seconds between which it is
# interpolated: a judgement. H100's and H200's tables differ by 6 to 11 % of products of 0.4 TFLOP and more, which is
# how they were measured and not the chip.
_OWN_MOVE = 0.025
_KNOTS = np.log(np.array([3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]))
_LEAST_ROWS = 20  # near a knot, before it moves


def fit_lattice(rows: KernelRows, twins: Sequence[KernelRows]) -> Lattice:
    """The lattice of the GPU of ``rows``; ``twins``: rows of the same family on twins."""
    family: Any = rows.family
    assert isinstance(family, Gridded)
    everyone = sorted([rows, *twins], key=lambda each: each.machine.name)
    reference = everyone[0].machine
    features = [family.analyse(each.operators, reference).matrix() for each in everyone]  # type: ignore[attr-defined]
    ratios = [each.log_ratio() for each in everyone]
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in ratios])
    matrix, effort = np.concatenate(features), effort_for(len(rows.operators))
    forest = middle_of(matrix, np.concatenate(ratios), effort, weights / weights.mean())
    place = everyone.index(rows)
    moves = _own_moves(rows, ratios[place] - forest.predict(features[place])) if twins else np.zeros(len(_KNOTS))
    points = Lattice(family.axes, np.empty([len(axis) for axis in family.axes])).points()
    analytic = family.at_sizes(points, rows.machine).seconds
    seen = family.at_sizes(points, reference).matrix()
    seconds = analytic * np.exp(forest.predict(seen) + np.interp(np.log(analytic), _KNOTS, moves))
    return Lattice(family.axes, rising(seconds.reshape([len(axis) for axis in family.axes])))


def _own_moves(rows: KernelRows, left: np.ndarray) -> np.ndarray:
    """What is ``left`` (rows,) of the log times, near each knot."""
    logs = np.log(rows.family.analyse(rows.operators, rows.machine).seconds)
    edges = np.concatenate([[-np.inf], (_KNOTS[1:] + _KNOTS[:-1]) / 2, [np.inf]])
    near = [left[(logs >= low) & (logs < high)] for low, high in zip(edges[:-1], edges[1:], strict=True)]
    moves = [float(np.median(each)) if len(each) >= _LEAST_ROWS else 0.0 for each in near]
    return np.clip(moves, -_OWN_MOVE, _OWN_MOVE)
