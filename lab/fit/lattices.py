"""Fit of a family's lattice (:mod:`costmodel.gpu.residuals.lattice`) to the tables of a GPU and of its twins.

Twins have the same chip (:func:`lab.fit.kernel_rows.are_twins`), so one forest is trained on the rows of all, GPUs
weighing equally, on features of one of them so that it cannot distinguish them. The remaining error of a GPU's own rows
shifts its lattice by their size, at most by the spread between samples of one chip.

Libraries do take longer for some smaller products (a kernel for 33 rows may be worse than that for 64), which no
non-decreasing lattice can represent. So the select split decides between it and plain trees
(:func:`lattice_if_as_good`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Gridded
from costmodel.gpu.residuals.lattice import Lattice, rising
from lab.fit.kernel_rows import KernelRows
from lab.fit.trees import effort_for, middle_of

# Largest distance (log units) of a GPU from the joint fit of it and its twins, interpolated between knots of analytic
# seconds: a judgement. H100's and H200's tables differ by 6 to 11 % of products of 0.4 TFLOP and more, which is an
# effect of measurement and not of the chip.
_OWN_MOVE = 0.025
_KNOTS = np.log(np.array([3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]))
_LEAST_ROWS = 20  # rows near a knot needed to shift it
# Advantage (log units, mean) on the select split that makes trees preferable, since they may predict less time for more
# work: a judgement.
_WORTH_OF_RISING = 0.01


def lattice_if_as_good(rows: KernelRows, twins: Sequence[KernelRows]) -> Lattice | None:
    """Lattice of the GPU of ``rows``, or ``None`` if trees of each GPU's own rows, both trained on the fit split, are
    clearly nearer to the select split of it and its ``twins`` (rows of the same family), equally weighted.
    """
    everyone = [rows, *twins]
    lost = [
        _missed_by_lattice(each, [other for other in everyone if other is not each]) - _missed_by_trees(each)
        for each in everyone
    ]
    return fit_lattice(rows, twins) if np.mean(lost) <= _WORTH_OF_RISING else None


def _missed_by_lattice(rows: KernelRows, twins: Sequence[KernelRows]) -> float:
    family: Any = rows.family
    asked = rows.of("select")
    known = fit_lattice(rows.of("fit"), [each.of("fit") for each in twins])
    found = family.from_lattice(asked.operators, known.at(family.sizes(asked.operators)), rows.machine)
    return float(np.abs(np.log(asked.seconds / found)).mean())


def _missed_by_trees(rows: KernelRows) -> float:
    seen, asked = rows.of("fit"), rows.of("select")
    features, there = (each.family.analyse(each.operators, each.machine).matrix() for each in (seen, asked))
    forest = middle_of(features, seen.log_ratio(), effort_for(len(seen.operators)))
    return float(np.abs(asked.log_ratio() - forest.predict(there)).mean())


def fit_lattice(rows: KernelRows, twins: Sequence[KernelRows]) -> Lattice:
    """Lattice of the GPU of ``rows``, with the sizes of all its and its ``twins``' rows as points."""
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
    sizes = np.concatenate([family.sizes(each.operators) for each in everyone])
    axes = tuple(np.union1d(few, column) for few, column in zip(family.axes, sizes.T, strict=True))
    points = Lattice(axes, np.empty([len(axis) for axis in axes])).points()
    analytic = family.at_sizes(points, rows.machine).seconds
    seen = family.at_sizes(points, reference).matrix()
    seconds = analytic * np.exp(forest.predict(seen) + np.interp(np.log(analytic), _KNOTS, moves))
    return Lattice(axes, rising(seconds.reshape([len(axis) for axis in axes])))


def _own_moves(rows: KernelRows, left: np.ndarray) -> np.ndarray:
    """Median of the residual log times ``left`` (rows,) near each knot."""
    logs = np.log(rows.family.analyse(rows.operators, rows.machine).seconds)
    edges = np.concatenate([[-np.inf], (_KNOTS[1:] + _KNOTS[:-1]) / 2, [np.inf]])
    near = [left[(logs >= low) & (logs < high)] for low, high in zip(edges[:-1], edges[1:], strict=True)]
    moves = [float(np.median(each)) if len(each) >= _LEAST_ROWS else 0.0 for each in near]
    return np.clip(moves, -_OWN_MOVE, _OWN_MOVE)
