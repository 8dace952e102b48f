"""Advice: other settings of the same step, each predicted, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Number of recommended alternatives.
BEST = 3
# Least gain of a recommendation; smaller ones are within the errors of the kernel models.
WORTH_TELLING = 1.02
TOGETHER = "together"


@dataclass(frozen=True)
class Alternative:
    """One alternative setting and its prediction; without times, but with a ``problem``, if it cannot be predicted."""

    # The changed option.
    change: str
    # Requirements of the change, in words.
    needs: str
    iteration_seconds: float | None = None
    samples: int | None = None
    # Time per sample now, divided by that with the change.
    gain: float | None = None
    peak_memory_bytes: int | None = None
    # Verdict as in `e2e.explain.prediction.Prediction`.
    fits: bool | None = None
    problem: str = ""
    # Only one of several alternatives of one kind can be chosen; `TOGETHER`: several changes combined.
    kind: str = ""

    @property
    def helps(self) -> bool:
        """True if it is faster by at least :data:`WORTH_TELLING` and does not exceed the memory, as far as known."""
        return self.gain is not None and self.gain >= WORTH_TELLING and self.fits is not False


@dataclass(frozen=True)
class LargestBatch:
    """Largest ``batch_size`` (per GPU and micro-batch) whose estimated memory fits; 0: not even one sample fits."""

    batch_size: int
    # At the peak, without the optional reserve of the caching allocator.
    allocated_bytes: int
    # The search ended at its limit: larger batches may fit.
    at_least: bool = False


@dataclass(frozen=True)
class Advice:
    """All predicted alternatives and the largest batch."""

    # All alternatives, by decreasing gain.
    alternatives: Sequence[Alternative]
    largest_batch: LargestBatch | None = None
    # Alternatives skipped for lack of time.
    left: Sequence[str] = ()
    # Reason for skipping them; empty: none was skipped.
    stopped: str = ""

    @property
    def best(self) -> Sequence[Alternative]:
        """The best alternative of each kind, at most :data:`BEST`, after the combination of several if that helps."""
        found: dict[str, Alternative] = {}
        for each in self.alternatives:
            if each.helps:
                found.setdefault(each.kind or each.change, each)
        together = found.pop(TOGETHER, None)
        return [*([] if together is None else [together]), *list(found.values())[:BEST]]


def ranked(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Sort alternatives: helpful ones by gain, then unhelpful ones, those that do not fit, those without prediction."""
    return sorted(
        alternatives, key=lambda each: (not each.helps, each.gain is None, each.fits is False, -(each.gain or 0.0))
    )
