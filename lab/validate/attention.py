"""Errors of the models of attention when extrapolating beyond their training rows.

``lengths from 16k left out``   trees trained only on a GPU's shorter queries and keys, tested on longer
``head counts left out``        trees trained only on powers of two, tested on 3, 5, 6, 10, 12 ... heads
``one head count left out``     trees that saw all numbers of heads but one, on that one, each in turn (serving
                                engines)
``published, longest left out``  kernels known from a few published figures (training's forward and backward): pace
                                and level fitted without the lengths from 8k on, or without every third row where all
                                lengths are equal

Random rows and whole GPUs are left out of the same tables by :mod:`lab.validate.kernels`.

Constants of :mod:`costmodel.gpu.families.attention_paces` are fitted to measured rows of one kernel and phase by least
soft absolute error of log times (scale 0.1), within bounds that physics sets: no more than 1.05 of the GEMM rate,
up to 300 cycles per 1,000 scores, the launches of one or two kernels (four where an engine writes its cache besides).

Of linear attention, on random rows, on GPUs, and on lengths and shapes left out:

``held-out shapes``, ``left-out GPU``: as :mod:`lab.validate.kernels` says
``lengths from 8k left out``     trees trained only on a GPU's shorter sequences, tested on longer
``one width left out``           trees that saw every size of a model but one (heads x widths), on that one, each
                                 in turn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from costmodel.gpu.families.attention import FusedAttention
from costmodel.gpu.families.attention_paces import KernelPace
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.residuals.fitted import DIRECTORY
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.linear_attention import CausalConvolution, LinearAttention
from lab.data.attention_tables import read_attention
from lab.data.named_files import Wanted, everything
from lab.fit.kernel_rows import KernelRows, transfer_of
from lab.fit.kernels import read_engines, read_points, read_scans, rows_by_family
from lab.fit.trees import train
from lab.validate.kernels import KernelErrors, Predicted, joined, results_of, validate

LONG, HEADS = "lengths from 16k left out", "head counts left out"
ONE_COUNT = "one head count left out"
PUBLISHED = "published, longest left out"
LONG_TOKENS, _LONG_PUBLISHED = 16384, 8192
_LEAST_ROWS, _LEAST_POINTS = 60, 8


def validate_attention(data: Path, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results; empty if ``data`` has no tables of attention."""
    rows = rows_by_family(read_attention(data, wanted))
    predicted: list[Predicted] = []
    for name, is_left_out in ((LONG, _is_long), (HEADS, _is_odd)):
        predicted += [
            found for each in rows if (found := without_rows(each, name, _marked(each, is_left_out))) is not None
        ]
    predicted += _published()
    return results_of(predicted)


def validate_serving(data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results for kernels only in serving engines; each number of heads is left out in turn."""
    rows = rows_by_family(read_engines(data, wanted))
    if not rows:
        return []
    predicted = [found for each in rows if (found := without_rows(each, LONG, _marked(each, _is_long))) is not None]
    for each in rows:
        heads = [one.heads for one in _attentions(each)]
        for count in dict.fromkeys(heads):
            found = without_rows(each, ONE_COUNT, np.array([one == count for one in heads]))
            predicted += [] if found is None else [found]
    return [*validate(data, directory, wanted, read_engines), *results_of(joined(predicted))]


def _attentions(rows: KernelRows) -> list[Attention]:
    return [each for each in rows.operators if isinstance(each, Attention)]


def _is_long(operator: Attention) -> bool:
    return max(operator.query_length, operator.keys_seen) >= LONG_TOKENS


def _is_odd(operator: Attention) -> bool:
    return operator.heads & (operator.heads - 1) != 0


def _marked(rows: KernelRows, is_left_out: Callable[[Attention], bool]) -> np.ndarray:
    return np.array([is_left_out(each) for each in _attentions(rows)], dtype=bool)


def without_rows(rows: KernelRows, name: str, out: np.ndarray, least: int = _LEAST_ROWS) -> Predicted | None:
    """Predict the rows marked by ``out`` with trees trained on the others; ``None`` if fewer than ``least`` are marked,
    or few are left.
    """
    if out.sum() < least or (~out).sum() < _LEAST_ROWS:
        return None
    seen, asked = _only(rows, ~out), _only(rows, out)
    analysis = rows.family.analyse(seen.operators, rows.machine)
    held = seen.splits != "fit"
    residual = train(analysis.features, np.log(seen.seconds / analysis.seconds), held)
    residuals = {rows.family.name: (rows.machine.name, residual)}
    model = KernelModel(rows.machine, lambda operator: rows.family, residuals, transfer_of([seen]))
    return Predicted(name, rows.family.name, rows.machine.name, model.estimate(asked.operators), asked.seconds)


def _only(rows: KernelRows, mask: np.ndarray) -> KernelRows:
    kept = tuple(each for each, keep in zip(rows.operators, mask, strict=True) if keep)
    return KernelRows(rows.family, rows.machine, kept, rows.seconds[mask], rows.splits[mask])


def _published() -> list[Predicted]:
    own = [each for each in read_points() if isinstance(each.operators[0], Attention)]
    return [found for each in rows_by_family(own) if (found := _refitted(each)) is not None]


def _refitted(rows: KernelRows) -> Predicted | None:
    """Predict the longest sequences, or every third row if all lengths are equal, by a pace fitted to the other
    rows.
    """
    lengths = np.array([each.query_length for each in _attentions(rows)])
    out = lengths >= _LONG_PUBLISHED if lengths.max() > lengths.min() else np.arange(len(lengths)) % 3 == 2
    if (~out).sum() < _LEAST_POINTS or not isinstance(rows.family, FusedAttention):
        return None
    seen, asked = _only(rows, ~out), _only(rows, out)
    family = rows.family.with_pace(fit_pace([seen]))
    level = transfer_of([KernelRows(family, seen.machine, seen.operators, seen.seconds, seen.splits)])
    model = KernelModel(rows.machine, lambda operator: family, {}, level)
    return Predicted(PUBLISHED, family.name, rows.machine.name, model.estimate(asked.operators), asked.seconds)


_START = (0.7, 30.0, 3000.0, 1.5)
_LEAST, _MOST = (0.15, 0.5, 50.0, 0.99), (1.05, 300.0, 20000.0, 2.0)
_ENGINE_LAUNCHES = 4.0
_SCALE = 0.1


def fit_pace(rows: Sequence[KernelRows]) -> KernelPace:
    """Pace with the best fit of ``rows`` (machines of one generation); all of one family of attention."""
    from scipy.optimize import least_squares

    family = rows[0].family
    if not isinstance(family, FusedAttention):
        raise TypeError(f"no attention: {family.name}")
    most = (*_MOST[:3], _ENGINE_LAUNCHES if family.phase in ("paged", "decode") else _MOST[3])

    cases = [([one for one in each.operators if isinstance(one, Attention)], each.machine) for each in rows]
    measured = np.log(np.concatenate([each.seconds for each in rows]))

    def errors(logs: np.ndarray) -> np.ndarray:
        with_pace = family.with_pace(KernelPace(*np.exp(logs)))
        analysed = [with_pace.analyse(each, machine).seconds for each, machine in cases]
        missed: np.ndarray = np.log(np.concatenate(analysed)) - measured
        return missed

    bounds = (np.log(_LEAST), np.log(most))
    solution = least_squares(errors, np.log(_START), loss="soft_l1", f_scale=_SCALE, bounds=bounds)
    return KernelPace(*(float(value) for value in np.exp(solution.x)))


LONG_SCANS, SIZES = "lengths from 8k left out", "one width left out"
LONG_SCAN_TOKENS = 8192


def validate_scans(data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything) -> list[KernelErrors]:
    """All results; empty if ``data`` has no tables of linear attention."""
    rows = rows_by_family(read_scans(data, wanted))
    if not rows:
        return []
    predicted = [found for each in rows if (found := without_rows(each, LONG_SCANS, _are_long(each))) is not None]
    for each in rows:
        sizes = [_size(operator) for operator in each.operators]
        for size in dict.fromkeys(sizes):
            out = np.array([one == size for one in sizes])
            found = without_rows(each, SIZES, out, least=1)
            predicted += [] if found is None else [found]
    return [*validate(data, directory, wanted, read_scans), *results_of(joined(predicted))]


def _are_long(rows: KernelRows) -> np.ndarray:
    return np.array([getattr(each, "length", 0) >= LONG_SCAN_TOKENS for each in rows.operators])


def _size(operator: AnyOperator) -> int:
    """Model size: states of a sequence, or channels."""
    if isinstance(operator, CausalConvolution):
        return operator.channels
    return operator.states // operator.batch if isinstance(operator, LinearAttention) else 0
