"""Answer to one what-if question, compared with the unchanged step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from e2e.explain.critical_path import HOST_KINDS
from e2e.explain.path_parts import PathPart
from e2e.explain.prediction import Prediction

_COMMUNICATION = ("collective transfer", "collective wait", "bubble")
_DEVICE = ("compute", "memory", "kernel", "copy")
AS_IT_IS = "as it is"
# Relative difference below which two steps count as equal.
_SAME = 1e-3


@dataclass(frozen=True)
class WhatIfRow:
    """A step with the change of ``question``; the first row of a table is the unchanged step :data:`AS_IT_IS`."""

    question: str
    iteration_seconds: float
    # Interval of the step time itself.
    interval_seconds: tuple[float, float]
    # Time of the unchanged step divided by this one (1.25: a fifth less time).
    gain: float
    # Ratio of the times per sample, if the question changes a known number of samples.
    gain_per_sample: float | None
    # Critical path on the `host`, the `device`, in `communication` and `other`; `longest`: its longest part.
    path_seconds: Mapping[str, float]
    longest: PathPart
    # Samples of a pass on one GPU, as counted by `--batch-size`; only if the question changes them.
    samples: int | None = None
    # True if it fits the memory; `None`: unknown.
    fits: bool | None = None
    # Warnings that the unchanged step does not have.
    warnings: Sequence[str] = ()
    # 80 % interval of the gain, without errors common to both steps (e2e/explain/paired_intervals.py); `None` if the
    # step is too large to simulate again
    gain_interval: tuple[float, float] | None = None
    # Other rows that cannot be told apart from this one: which is faster per sample is unknown.
    alike: Sequence[str] = ()

    @property
    def worth(self) -> float:
        """Gain per sample, or per step where the number of samples is unchanged or unknown."""
        return self.gain if self.gain_per_sample is None else self.gain_per_sample

    @property
    def gain_per_sample_interval(self) -> tuple[float, float] | None:
        """Interval of ``gain_per_sample``, like ``gain_interval``."""
        if self.gain_interval is None or self.gain_per_sample is None:
            return None
        low, high = (each * self.gain_per_sample / self.gain for each in self.gain_interval)
        return low, high

    @property
    def shares(self) -> Mapping[str, float]:
        """Shares of the critical path."""
        whole = sum(self.path_seconds.values()) or 1.0
        return {name: seconds / whole for name, seconds in self.path_seconds.items()}


def what_if_row(
    question: str,
    answer: Prediction,
    as_it_is: Prediction,
    samples: int | None = None,
    samples_before: int | None = None,
) -> WhatIfRow:
    """Make the row of ``answer``, compared with ``as_it_is``.

    ``samples``: of its step, ``samples_before``: of the latter.
    """
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
    """Return ``rows``, unchanged step first, with the intervals of their gains.

    ``ratio``: function of two places of rows that returns the factors by which their ratio may be lower and higher.
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
    """True if a step predicted to be ``times`` as fast as another one may be equally fast."""
    return off is not None and times * off[0] <= 1.0 + _SAME and times * off[1] >= 1.0 - _SAME


def _told(warning: str) -> str:
    """Return a warning without its digits."""
    return "".join(letter for letter in warning if not letter.isdigit())


def _parts(attribution: Mapping[str, float]) -> dict[str, float]:
    groups = {"host": HOST_KINDS, "device": _DEVICE, "communication": _COMMUNICATION}
    found = {name: sum(attribution.get(kind, 0.0) for kind in kinds) for name, kinds in groups.items()}
    return found | {"other": max(sum(attribution.values()) - sum(found.values()), 0.0)}
