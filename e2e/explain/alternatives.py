"""What to change: other settings of the same step, each predicted; the largest batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How many are told as what to change.
BEST = 3
# What gains less is no advice: models of kernels err by more.
WORTH_TELLING = 1.02
TOGETHER = "together"


@dataclass(frozen=True)
class Alternative:
    """``change``: what would be asked instead; ``needs``: what that takes, in words. ``gain``: time of one sample now
    over that with the change; ``fits`` as in :class:`e2e.explain.prediction.Prediction`. What cannot be predicted has
    no times, and a ``problem``. ``kind``: of two of one kind only one can be chosen; :data:`TOGETHER` for several.
    """

    change: str
    needs: str
    iteration_seconds: float | None = None
    samples: int | None = None
    gain: float | None = None
    peak_memory_bytes: int | None = None
    fits: bool | None = None
    problem: str = ""
    kind: str = ""

    @property
    def helps(self) -> bool:
        """Whether it is faster, by enough to be told, and fits as far as is known."""
        return self.gain is not None and self.gain >= WORTH_TELLING and self.fits is not False


@dataclass(frozen=True)
class LargestBatch:
    """The largest ``batch_size`` (per GPU and micro-batch) whose memory fits by the estimate; ``allocated_bytes`` at
    its peak, without what the allocator keeps besides where there is room. 0: not even one sample fits. ``at_least``:
    the search ended at its limit, more may fit.
    """

    batch_size: int
    allocated_bytes: int
    at_least: bool = False


@dataclass(frozen=True)
class Advice:
    """``alternatives``: all that were predicted, the one that gains most first. ``left``: those that there was no time
    for; ``stopped``: why (empty: all are there).
    """

    alternatives: Sequence[Alternative]
    largest_batch: LargestBatch | None = None
    left: Sequence[str] = ()
    stopped: str = ""

    @property
    def best(self) -> Sequence[Alternative]:
        """The :data:`BEST` that help most, of each kind the best; before them several together, where they help."""
        found: dict[str, Alternative] = {}
        for each in self.alternatives:
            if each.helps:
                found.setdefault(each.kind or each.change, each)
        together = found.pop(TOGETHER, None)
        return [*([] if together is None else [together]), *list(found.values())[:BEST]]


def ranked(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Those that help, by their gain; then those that do not, those that do not fit, those without a prediction."""
    return sorted(
        alternatives, key=lambda each: (not each.helps, each.gain is None, each.fits is False, -(each.gain or 0.0))
    )
