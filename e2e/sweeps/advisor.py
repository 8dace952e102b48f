"""Predicts other settings of a predicted step, one after another, and selects those that help."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from costmodel.base.errors import ProjectError
from e2e.explain.alternatives import TOGETHER, WORTH_TELLING, Advice, Alternative, LargestBatch, ranked
from e2e.explain.prediction import Prediction
from e2e.explain.predictor import PredictionResult
from e2e.sources.known_requests import Recording
from e2e.sources.predict_request import predict_request
from e2e.sources.request import Request
from e2e.step.memory_room import largest_fitting
from e2e.sweeps.changes import Change, batch_change, batch_of, possible_changes, with_batch
from e2e.sweeps.largest_batch import largest_batch

# Time after which no further setting is started.
SECONDS = 180.0
# Time limit of the search for the largest batch.
SEARCH_SECONDS = 60.0
_OUT_OF_TIME = f"{SECONDS:.0f} s were over"
_STOPPED = "stopped with Ctrl-C"
Say = Callable[[str], object]


def advise(request: Request, answer: PredictionResult, say: Say) -> PredictionResult:
    """Return ``answer`` to ``request`` with advice. ``say``: callback with one line per setting.

    Ctrl-C stops the search and keeps its results so far.
    """
    request = request.settled()
    if isinstance(request, Recording):
        stopped = "a recorded run has its settings; only --retarget changes anything"
        return _advised(answer, Advice((), stopped=stopped))
    advisor = _Advisor(request, answer.prediction, say)
    return _advised(answer, advisor.advice())


def _advised(answer: PredictionResult, advice: Advice) -> PredictionResult:
    return replace(answer, prediction=replace(answer.prediction, advice=advice))


@dataclass
class _Advisor:
    request: Request
    now: Prediction
    say: Say
    begun: float = field(default_factory=time.monotonic)
    alternatives: list[Alternative] = field(default_factory=list)
    largest: LargestBatch | None = None

    def advice(self) -> Advice:
        """Predict all changes, then the combination of those that help."""
        changes = possible_changes(self.request, self.now)
        stopped = ""
        try:
            self.largest = self._largest_batch()
            changes = self._that_may_fit(changes)
            for place, change in enumerate(changes, 1):
                if self._late():
                    stopped = _OUT_OF_TIME
                    break
                self._try(change, f"{place} of {len(changes)}")
            self._try_together(changes)
        except KeyboardInterrupt:
            stopped = _STOPPED
        done = {each.change for each in self.alternatives}
        left = [each.change for each in changes if each.change not in done]
        return Advice(ranked(self.alternatives), self.largest, left, stopped)

    def _late(self) -> bool:
        return time.monotonic() - self.begun > SECONDS

    def _try(self, change: Change, place: str) -> Alternative:
        found = self._predicted(change)
        self.alternatives.append(found)
        if found.iteration_seconds is None:
            result = found.problem
        else:
            fits = ", does not fit" if found.fits is False else ""
            result = f"{found.iteration_seconds * 1e3:.3f} ms, {found.gain or 0.0:.2f}x per sample{fits}"
        self.say(f"advice, {place}: {change.change}: {result} ({time.monotonic() - self.begun:.0f} s)")
        return found

    def _predicted(self, change: Change) -> Alternative:
        try:
            other = predict_request(replace(change.apply(self.request), what_if=())).prediction
        except ProjectError as error:
            return Alternative(change.change, change.needs, problem=" ".join(str(error).split()), kind=change.kind)
        return Alternative(
            change.change,
            change.needs,
            other.iteration_seconds,
            None if other.throughput is None else other.throughput.samples,
            _seconds_per_sample(self.now) / _seconds_per_sample(other),
            other.peak_memory_bytes,
            other.fits,
            kind=change.kind,
        )

    def _largest_batch(self) -> LargestBatch | None:
        """Search for the largest batch; ``None`` if the batch cannot be changed or the memory is unknown."""
        batch = batch_of(self.request, self.now)
        sizes = [rank.allocated_bytes for rank in self.now.ranks if rank.allocated_bytes is not None]
        if batch is None or not sizes:
            return None

        def needed(size: int) -> int:
            step = with_batch(self.request, size).prepare()
            found = max(usage.allocated_bytes for usage in step.memory.values())
            seconds = time.monotonic() - self.begun
            self.say(f"advice, batch size {size}: {found / 2**30:.1f} GiB ({seconds:.0f} s)")
            return found

        try:
            return largest_batch(
                needed,
                largest_fitting(self.now.memory_room_bytes),
                (batch, max(sizes)),
                lambda: time.monotonic() - self.begun > SEARCH_SECONDS,
            )
        except ProjectError as error:
            self.say(f"advice, largest batch: {' '.join(str(error).split())}")
            return None

    def _that_may_fit(self, changes: list[Change]) -> list[Change]:
        """Return ``changes`` without batches that do not fit, and with the largest one that does."""
        batch = batch_of(self.request, self.now)
        if self.largest is None or batch is None:
            return changes
        largest = self.largest.batch_size
        kept = [
            each
            for each in changes
            if each.kind != "batch" or (getattr(each.apply(self.request), "batch_size", None) or 0) <= largest
        ]
        wanted = largest > batch or (self.now.fits is False and largest > 0)
        if wanted and all(each.change != batch_change(largest).change for each in kept):
            kept.append(batch_change(largest))
        return kept

    def _try_together(self, changes: Sequence[Change]) -> None:
        """Predict the best helping change of each kind together, with the same batch.

        Changes that do not help alone are then added one after another where they help.
        """
        by_text = {each.change: each for each in changes}
        helping: dict[str, Change] = {}
        others: dict[str, Change] = {}
        for alternative in ranked(self.alternatives):
            change = by_text[alternative.change]
            if change.kind != "batch" and not alternative.problem:
                # Each --parallel change is relative to the requested spec, so only one can be chosen.
                kind = "spread" if change.change.startswith("--parallel") else change.kind
                (helping if alternative.helps else others).setdefault(kind, change)
        if not helping:
            return
        chosen = list(helping.values())
        best = self._try(_all_of(chosen), TOGETHER) if len(chosen) > 1 and not self._late() else None
        known = best or next(each for each in self.alternatives if each.change == chosen[0].change)
        gain = known.gain or 1.0
        for kind, change in others.items():
            if kind in helping or kind == "spread" or self._late():
                continue
            more = self._try(_all_of([*chosen, change]), TOGETHER)
            if more.helps and (more.gain or 0.0) >= gain * WORTH_TELLING:
                chosen, gain = [*chosen, change], more.gain or gain


def _all_of(changes: Sequence[Change]) -> Change:
    def apply(request: Request) -> Request:
        for each in changes:
            request = each.apply(request)
        return request

    return Change(TOGETHER, " ".join(each.change for each in changes), "all of these", apply)


def _seconds_per_sample(prediction: Prediction) -> float:
    """Seconds per sample; of a step with an unknown number of samples its time, since the number does not change."""
    samples = 1 if prediction.throughput is None else prediction.throughput.samples
    return prediction.iteration_seconds / samples
