"""The answer to one what-if question, beside the step as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from e2e.explain.critical_path import HOST_KINDS
from e2e.explain.prediction import PathPart, Prediction

_COMMUNICATION = ("collective transfer", "collective wait", "bubble")
_DEVICE = ("compute", "memory", "kernel", "copy")
AS_IT_IS = "as it is"
# Shares of a step below which two are the same.
_SAME = 1e-3


@dataclass(frozen=True)
class WhatIfRow:
    """A step with what ``question`` changes; the first row of a table is the step :data:`AS_IT_IS`.

    ``gain``: the step as it is, over this one (1.25: takes a fifth less time); ``gain_per_sample``: the same of the
    time per sample, where the question changes how many there are and that is known. ``path_seconds``: the critical
    path on the ``host``, the ``device``, in ``communication`` and ``other``; ``longest``: its longest part.
    ``interval_seconds`` is the step's own. ``gain_interval``: where the gain lies (80 %), what is wrong in both steps
    alike left out (:mod:`e2e.explain.paired_intervals`); ``None`` where the step is too large to look at twice.
    ``alike``: the other rows that this one cannot be told apart from: which of them is faster per sample is not known.
    ``samples``: of a pass on one GPU, as ``--batch-size`` counts them, where a question is about them. ``fits``:
    whether it fits the memory (``None``: not known). ``warnings``: those that the step as it is does not have.
    """

    question: str
    iteration_seconds: float
    interval_seconds: tuple[float, float]
    gain: float
    gain_per_sample: float | None
    path_seconds: Mapping[str, float]
    longest: PathPart
    samples: int | None = None
    fits: bool | None = None
    warnings: Sequence[str] = ()
    gain_interval: tuple[float, float] | None = None
    alike: Sequence[str] = ()

    @property
    def worth(self) -> float:
        """What is gained per sample, or per step where that is as many samples or not known."""
        return self.gain if self.gain_per_sample is None else self.gain_per_sample

    @property
    def gain_per_sample_interval(self) -> tuple[float, float] | None:
        """As ``gain_interval``, of the gain per sample."""
        if self.gain_interval is None or self.gain_per_sample is None:
            return None
        low, high = (each * self.gain_per_sample / self.gain for each in self.gain_interval)
        return low, high

    @property
    def shares(self) -> Mapping[str, float]:
        """Of the critical path."""
        whole = sum(self.path_seconds.values()) or 1.0
        return {name: seconds / whole for name, seconds in self.path_seconds.items()}


def what_if_row(
    question: str,
    answer: Prediction,
    as_it_is: Prediction,
    samples: int | None = None,
    samples_before: int | None = None,
) -> WhatIfRow:
    """``answer`` to ``question`` beside the prediction ``as_it_is``. ``samples``: of its step and of that."""
    gain = as_it_is.iteration_seconds / answer.iteration_seconds
    known = samples is not None and samples_before is not None and samples != samples_before
    return WhatIfRow(
        question,
        answer.iteration_seconds,
        answer.interval_seconds,
        gain,
        gain * samples / samples_before if known and samples and samples_before else None,
        _parts(answer.attribution),
        max(answer.critical_path, key=lambda part: part.seconds),
        samples,
        answer.fits,
        tuple(line for line in answer.warnings if _told(line) not in {_told(each) for each in as_it_is.warnings}),
    )


def compared(
    rows: Sequence[WhatIfRow], ratio: Callable[[int, int], tuple[float, float] | None]
) -> tuple[WhatIfRow, ...]:
    """``rows``, the step as it is first, with the intervals of their gains. ``ratio``: by which factors that of two of
    them, by their places, may be lower and higher.
    """
    found: list[WhatIfRow] = []
    for place, row in enumerate(rows):
        off = ratio(0, place)
        if off is None:
            return tuple(rows)
        alike = [
            other.question
            for at, other in enumerate(rows)
            if at != place and _overlaps(row.worth / other.worth, ratio(at, place))
        ]
        interval = (row.gain * off[0], row.gain * off[1])
        found.append(replace(row, gain_interval=interval, alike=tuple(alike)))
    return tuple(found)


def _overlaps(times: float, off: tuple[float, float] | None) -> bool:
    """Whether a step that is predicted to be ``times`` as fast as another one may be as fast."""
    return off is not None and times * off[0] <= 1.0 + _SAME and times * off[1] >= 1.0 - _SAME


def _told(warning: str) -> str:
    """A warning without its numbers."""
    return "".join(letter for letter in warning if not letter.isdigit())


def _parts(attribution: Mapping[str, float]) -> dict[str, float]:
    groups = {"host": HOST_KINDS, "device": _DEVICE, "communication": _COMMUNICATION}
    found = {name: sum(attribution.get(kind, 0.0) for kind in kinds) for name, kinds in groups.items()}
    return found | {"other": max(sum(attribution.values()) - sum(found.values()), 0.0)}
