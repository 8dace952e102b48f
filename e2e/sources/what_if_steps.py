"""Applies what-if questions to a prepared step.

Steps are captured anew for another batch or other gradient buckets. All other changes edit the graph of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from costmodel.base.errors import InputError
from e2e.explain.prediction import AS_IT_IS, WhatIfRow, what_if_row, with_gain_intervals
from e2e.explain.predictor import PredictionResult
from e2e.price.host_overheads import load_overheads
from e2e.price.pricing import price
from e2e.sources.prepared_step import PreparedStep, run_step
from e2e.sources.requests import Program, Request
from e2e.step.execution_graph import RankGraph
from e2e.whatif.paired_intervals import ComparedStep, Comparison
from e2e.whatif.questions import (
    BatchChange,
    BatchedLookups,
    BucketChange,
    Change,
    FasterHost,
    FasterKernels,
    FusedOperators,
    OtherHost,
    WhatIf,
    all_together,
)
from e2e.whatif.speeds import SpeedChange
from e2e.whatif.traced_rank import (
    Estimates,
    MergedCalls,
    TracedRank,
    batched_lookups,
    fusible_chains,
    merge_calls,
    operator_names,
)

# Changes of single operators.
_OF_OPERATORS = (BatchedLookups, FusedOperators)
_LISTED = 8


def check_questions(request: Request) -> None:
    """Raise ``InputError`` for a question that ``request`` cannot answer, before anything is captured or read."""
    for question in request.what_if:
        for change in question.changes:
            reason = _refused(change, request)
            if reason is not None:
                raise InputError(f"--what-if {question.text}: {reason}")
            if isinstance(change, OtherHost):
                load_overheads(change.table)


def _refused(change: Change, request: Request) -> str | None:
    if isinstance(change, BatchChange) and request.request_with(change) is None:
        if request.recorded:
            return "a recorded step has its own batch; predict the step of its --script or --model with another"
        if isinstance(request, Program):
            return "a program has its own batch; predict it with another one in its command"
        return "the script's function takes no batch_size; give it that argument"
    if isinstance(change, BucketChange) and request.request_with(change) is None:
        return "buckets of gradients are those of several GPUs, captured: give --parallel, or a --script with --gpus"
    if isinstance(change, _OF_OPERATORS):
        if not request.single_operators:
            return f"a {request.title} has whole layers, whose operators are not single"
        if request.recorded and not getattr(request, "traces", True):
            return "profiles alone do not tell tensors; give --trace of every rank too"
        if isinstance(change, FusedOperators) and getattr(request, "compile", False):
            return "--compile has fused what goes together already; leave it out"
    return None


def _compared(step: PreparedStep, answer: PredictionResult, changes: Sequence[Change] = ()) -> ComparedStep:
    """Return the compared step of ``answer``, in which a question has made ``changes``."""
    host = getattr(step.setting.overheads, "name", "")
    batch = next((each.samples for each in changes if isinstance(each, BatchChange)), None)
    faster = frozenset(each for each in changes if isinstance(each, FasterKernels | FasterHost) and each.factor >= 1)
    return ComparedStep(answer, host, answer.host_factor, answer.errors, batch, faster, frozenset(changes) - faster)


@dataclass
class WhatIfSteps:
    """Unchanged ``step`` of ``request``, and the steps of its questions."""

    request: Request
    step: PreparedStep

    def __post_init__(self) -> None:
        self._estimates = Estimates(self.step.setting.prices())
        self._alone: dict[Change, PreparedStep] = {}

    def questions(self) -> list[WhatIf]:
        """Return each change alone, the requested combinations, and all together if that is another one."""
        asked = self.request.what_if
        alone = [
            WhatIf(text, (change,), (text,))
            for each in asked
            for change, text in zip(each.changes, each.texts, strict=True)
        ]
        every = all_together(asked)
        found: dict[frozenset[Change], WhatIf] = {}
        for each in (*alone, *asked, *([] if every is None else [every])):
            found.setdefault(frozenset(each.changes), each)
        return list(found.values())

    def check(self) -> None:
        """Raise ``InputError`` for a change that does not apply to the step, before anything is simulated."""
        for change in dict.fromkeys(change for each in self.request.what_if for change in each.changes):
            if not self._is_made_anew(change):
                self._alone[change] = self._changed(self.step, change)
        for question in self.request.what_if:
            if not any(map(self._is_made_anew, question.changes)):
                self.changed(question)

    def rows(self, as_it_is: PredictionResult) -> tuple[WhatIfRow, ...]:
        """Return the unchanged step, then one row for each of the :meth:`questions`.

        The combination of all is left out if one change removes the target of another.
        """
        before, samples = as_it_is.prediction, self._samples()
        found = [what_if_row(AS_IT_IS, before, before, samples, samples)]
        steps = [_compared(self.step, as_it_is)]
        for question in self.questions():
            try:
                step = self.changed(question)
            except InputError:
                if question.changes in [each.changes for each in self.request.what_if]:
                    raise
                continue
            answer = run_step(step)
            asked = next((each.samples for each in question.changes if isinstance(each, BatchChange)), samples)
            found.append(what_if_row(question.text, answer.prediction, before, asked, samples))
            steps.append(_compared(step, answer, question.changes))
        return with_gain_intervals(found, Comparison(steps).ratio)

    def changed(self, question: WhatIf) -> PreparedStep:
        """Return the step of ``question``."""
        anew = self._anew(question.ordered)
        step = anew.prepare() if anew is not None else self.step
        for change in question.ordered:
            if not self._is_made_anew(change):
                step = self._changed(step, change)
        return replace(step, recorded_seconds=None)

    # --- captured anew --------------------------------------------------------------------------------

    def _anew(self, changes: Sequence[Change]) -> Request | None:
        """Return the request with those of ``changes`` that need a new capture; ``None`` if none does."""
        found: Request | None = None
        for change in changes:
            found = (found or self.request).request_with(change) or found
        return found

    def _is_made_anew(self, change: Change) -> bool:
        return self.request.request_with(change) is not None

    def _samples(self) -> int | None:
        """Samples of the unchanged step, if known."""
        if not any(isinstance(change, BatchChange) for each in self.request.what_if for change in each.changes):
            return None
        given: int | None = getattr(self.request, "batch_size", None)
        if given is not None:
            return given
        if self.step.batch is not None and self.step.batch.batch_size is not None:
            return self.step.batch.batch_size
        known: int | None = getattr(self.request, "samples", None)
        return known

    # --- the graph changed ----------------------------------------------------------------------------

    def _changed(self, step: PreparedStep, change: Change) -> PreparedStep:
        if step is self.step and change in self._alone:
            return self._alone[change]
        if step.fewer is not None:
            step = replace(step, fewer=self._changed(step.fewer, change))
        if isinstance(change, _OF_OPERATORS) and any(rank.rank not in step.traced for rank in step.graph.ranks):
            raise InputError(
                f"--what-if: the operators of {step.graph.source} are not known, only its kernels; "
                "give the execution trace too, with --trace"
            )
        if isinstance(change, BatchedLookups):
            return self._merged(step, batched_lookups, "batch-embeddings: no two lookups by embedding_bag are alike "
                                "(as many bags, as wide, of one number type); leave it out")  # fmt: skip
        if isinstance(change, FusedOperators):
            names = ", ".join(operator_names(list(step.traced.values()))[:_LISTED])
            return self._merged(
                step,
                lambda rank: fusible_chains(rank, change.pattern),
                f"fuse:{change.pattern}: no two element-wise operators that follow each other match; the step has "
                f"{names} ...",
            )
        if isinstance(change, FasterKernels | FasterHost):
            speeds = SpeedChange((*(step.speeds.changes if step.speeds else ()), change), step.traced)
            speeds.check(step.graph)
            return replace(step, speeds=speeds)
        assert isinstance(change, OtherHost)
        if step.starts is not None:
            raise InputError(
                f"--what-if host={change.table}: the host's times are as recorded; host=1.5x makes them faster"
            )
        return replace(step, setting=replace(step.setting, overheads=load_overheads(change.table)))

    def _merged(
        self, step: PreparedStep, find: Callable[[TracedRank], list[MergedCalls]], nothing: str
    ) -> PreparedStep:
        ranks: list[RankGraph] = []
        traced: dict[int, TracedRank] = dict(step.traced)
        for rank in step.graph.ranks:
            behind = step.traced[rank.rank]
            groups = find(behind)
            operators = {
                call: tuple(record for task in behind.work[call] for record in task.operators)
                for group in groups
                for call in group.calls
            }
            ranks.append(merge_calls(rank, groups, behind.homes(rank), operators, self._estimates.ratio))
            merged = {group.anchor: group.calls for group in groups}
            traced[rank.rank] = replace(behind, merged={**behind.merged, **merged})
        if all(len(new.tasks) == len(old.tasks) for new, old in zip(ranks, step.graph.ranks, strict=True)):
            raise InputError(f"--what-if {nothing}")
        graph = replace(step.graph, ranks=tuple(ranks))
        if step.starts is not None:
            # Replacements of recorded work have no times yet; existing times are kept.
            graph = price(graph, self._estimates.model, step.setting.overheads)
        return replace(step, graph=graph, traced=traced)
