"""Fits the constants of :mod:`costmodel.gpu.families.attention_paces` to measured rows of one kernel and phase.

Least soft absolute error of log times (scale 0.1), within bounds that physics sets: no more than 1.05 of the GEMM rate,
up to 300 cycles per 1,000 scores, the launches of one or two kernels (four where an engine writes its cache besides).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.attention import FusedAttention
from costmodel.gpu.families.attention_paces import KernelPace
from costmodel.gpu.kernel_rows import KernelRows
from costmodel.operators.attention import Attention

_START = (0.7, 30.0, 3000.0, 1.5)
_LEAST, _MOST = (0.15, 0.5, 50.0, 0.99), (1.05, 300.0, 20000.0, 2.0)
_ENGINE_LAUNCHES = 4.0
_SCALE = 0.1


def fit_pace(rows: Sequence[KernelRows]) -> KernelPace:
    """The pace that fits ``rows`` (machines of one generation) best; all of one family of attention."""
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
