"""A recorded graph with the kernels of another batch: measured times scaled by the ratio of model estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodel.model.cost_model import CostModel, Estimate
from costmodel.operators.any_operator import AnyOperator
from e2e.price.collective_pricing import NodeLayout, price_collectives
from e2e.price.retarget import tasks_behind
from e2e.step.execution_graph import Duration, ExecutionGraph, RankGraph, Task
from e2e.whatif.operators_behind import TracedRank


@dataclass
class Estimates:
    """Cache of a cost model's estimates, each operator estimated once."""

    model: CostModel

    def __post_init__(self) -> None:
        self._known: dict[AnyOperator, Estimate] = {}

    def sums(self, operators: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Return the total (seconds, lower bound, upper bound) of the operators run one after another."""
        new = [each for each in dict.fromkeys(operators) if each not in self._known]
        if new:
            self._known |= dict(zip(new, self.model.estimate(new), strict=True))
        found = [self._known[each] for each in operators]
        return (
            sum(each.seconds for each in found),
            sum(each.lower for each in found),
            sum(each.upper for each in found),
        )

    def ratio(self, before: Sequence[AnyOperator], after: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Return the ratio of the time of ``after`` to that of ``before``, with lower and upper bound.

        Only the interval of ``after`` counts, as for another GPU (:mod:`e2e.price.retarget`). All are 1 if
        nothing is known of ``before``.
        """
        known = self.sums(before)[0]
        if not known:
            return 1.0, 1.0, 1.0
        seconds, lower, upper = self.sums(after)
        return seconds / known, lower / known, upper / known


def resized_graph(
    graph: ExecutionGraph,
    before: Mapping[int, TracedRank],
    after: Mapping[int, TracedRank],
    estimates: Estimates,
    transfers: Callable[[], tuple[NodeLayout, CostModel]],
) -> ExecutionGraph:
    """Convert ``graph``, whose tasks and calls are those of ``before``, to a step with the operators ``after``.

    Times of measured kernels are multiplied by the ratio of the estimates, unmeasured kernels get their new operators,
    collectives their new sizes; times of measured collectives are multiplied by the ratio predicted by the cost model
    of ``transfers``. Kernels of unknown operators are unchanged. The share of a measured time in which a kernel waits
    for its launch does not grow.
    """
    made = replace(
        graph,
        ranks=tuple(
            _resized_rank(rank, before[rank.rank], after[rank.rank], estimates) if rank.rank in before else rank
            for rank in graph.ranks
        ),
    )
    changed = {
        (rank.rank, task.id)
        for rank, old in zip(made.ranks, graph.ranks, strict=True)
        for task, was in zip(rank.tasks, old.tasks, strict=True)
        if task.collective != was.collective and was.duration is not None
    }
    if not changed:
        return made
    return _with_transfers(graph, made, changed, *transfers())


def _resized_rank(rank: RankGraph, before: TracedRank, after: TracedRank, estimates: Estimates) -> RankGraph:
    behind = tasks_behind(rank, before.lowered)
    homes = before.homes(rank)
    of_call: dict[int, list[Task]] = {}
    for task in after.lowered.tasks:
        if task.call is not None:
            of_call.setdefault(task.call, []).append(task)

    def one(task: Task) -> Task:
        call = homes.get(task.id)
        if call is None:
            return task
        if task.collective is not None:
            return _resized_collective(task, before.work.get(call, ()), of_call.get(call, ()))
        old = behind.get(task.id, ())
        new = _counterparts(old, before.work[call], of_call.get(call, []))
        records = tuple(record for each in new for record in each.operators)
        if task.duration is None:
            return replace(task, operators=records) if task.operators else task
        known = tuple(record for each in old for record in each.operators)
        if not known or known == records:
            return task
        seconds = task.duration.seconds
        likely, lower, upper = (seconds * ratio for ratio in estimates.ratio(known, records))
        scaled = Duration(likely, lower, upper, "scaled by its operator", "fitted")
        return replace(task, duration=scaled, operators=records if task.operators else ())

    return replace(rank, tasks=tuple(one(task) for task in rank.tasks))


def _counterparts(old: Sequence[Task], all_old: Sequence[Task], all_new: Sequence[Task]) -> Sequence[Task]:
    """Return the launches of a call with the new batch at the places of ``old``; all if their number differs."""
    if len(all_old) != len(all_new):
        return all_new
    places = {task.id: place for place, task in enumerate(all_old)}
    return [all_new[places[task.id]] for task in old]


def _resized_collective(task: Task, old: Sequence[Task], new: Sequence[Task]) -> Task:
    """Scale the bytes of ``task`` by the ratio of the sizes of the operators' collectives."""
    first = next((each.collective for each in old if each.collective), None)
    second = next((each.collective for each in new if each.collective), None)
    if first is None or second is None or task.collective is None or not first.size_bytes:
        return task
    ratio = second.size_bytes / first.size_bytes
    taken = task.collective.received_bytes
    if ratio == 1:
        return task
    sized = replace(
        task.collective,
        size_bytes=round(task.collective.size_bytes * ratio),
        received_bytes=None if taken is None else round(taken * ratio),
    )
    return replace(task, collective=sized)


def _with_transfers(
    before: ExecutionGraph,
    after: ExecutionGraph,
    changed: set[tuple[int, int]],
    layout: NodeLayout,
    model: CostModel,
) -> ExecutionGraph:
    """Multiply the times of measured collectives by the ratio of the predicted times of both sizes."""

    def predicted(graph: ExecutionGraph) -> ExecutionGraph:
        ranks = tuple(
            replace(
                rank,
                tasks=tuple(
                    replace(task, duration=None) if (rank.rank, task.id) in changed else task for task in rank.tasks
                ),
            )
            for rank in graph.ranks
        )
        return price_collectives(replace(graph, ranks=ranks), layout, model)

    old, new = predicted(before), predicted(after)
    ranks = []
    for rank, known, small, large in zip(after.ranks, before.ranks, old.ranks, new.ranks, strict=True):
        tasks = []
        for task, was, first, second in zip(rank.tasks, known.tasks, small.tasks, large.tasks, strict=True):
            if (rank.rank, task.id) in changed and was.duration and first.duration and second.duration:
                ratio = second.duration.seconds / first.duration.seconds if first.duration.seconds else 1.0
                seconds = was.duration.seconds * ratio
                scaled = Duration(seconds, seconds, seconds, "scaled by its size", "fitted")
                task = replace(task, duration=scaled)
            tasks.append(task)
        ranks.append(replace(rank, tasks=tuple(tasks)))
    return replace(after, ranks=tuple(ranks))
