"""Larger gradient buckets: consecutive all-reduces of the backward pass, joined.

A bucket is reduced when it is full, so a joined one begins where the last of its parts began. Recordings do not tell
when the parts of a bucket were ready, so buckets are only joined, never split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from costmodel.model.cost_model import CostModel
from e2e.price.collective_pricing import NodeLayout, price_collectives
from e2e.step.execution_graph import (
    Action,
    Duration,
    ExecutionGraph,
    Launch,
    RankGraph,
    RecordEvent,
    StreamWait,
    Synchronize,
    Task,
)
from e2e.whatif.merged_calls import with_replaced

# Joined all-reduces: rank -> last part -> all parts.
_Joined = Mapping[int, Mapping[int, tuple[int, ...]]]


def bucket_sizes(graph: ExecutionGraph) -> list[int]:
    """Return the bytes of the all-reduces of the backward pass on the first rank."""
    return [_size(task) for task in _buckets(graph.ranks[0])]


def joined_buckets(
    graph: ExecutionGraph, limit_bytes: float, transfers: Callable[[], tuple[NodeLayout, CostModel]]
) -> ExecutionGraph:
    """Return ``graph`` with buckets of at least ``limit_bytes``, except for the last.

    If the all-reduces were measured, joined ones take the sum of their times, multiplied by the predicted ratio of one
    to several by the cost model of ``transfers``.
    """
    found = {rank.rank: list(_groups(rank, limit_bytes)) for rank in graph.ranks}
    # All ranks must join the same all-reduces.
    alike = set.intersection(*({tuple(map(_key, group)) for group in groups} for groups in found.values()))
    joined = {
        rank: {group[-1].id: tuple(task.id for task in group) for group in groups if tuple(map(_key, group)) in alike}
        for rank, groups in found.items()
    }
    ranks = [_joined_rank(rank, joined[rank.rank]) for rank in graph.ranks]
    made = replace(graph, ranks=tuple(ranks))
    measured = any(
        rank.tasks[task].duration is not None for rank in graph.ranks for task in joined[rank.rank]
    )  # fmt: skip
    return _with_times(graph, made, joined, *transfers()) if measured else made


def _buckets(rank: RankGraph) -> list[Task]:
    return [
        task
        for task in rank.tasks
        if task.collective is not None
        and task.collective.kind == "all_reduce"
        and len(task.collective.ranks) > 1
        and task.call is not None
        and task.call in rank.calls
        and rank.calls[task.call].phase == "backward"
    ]


def _size(task: Task) -> int:
    assert task.collective is not None
    return task.collective.size_bytes * task.collective.pieces


def _groups(rank: RankGraph, limit_bytes: float) -> Iterable[list[Task]]:
    """Yield groups of consecutive all-reduces of one process group, up to the bucket size or to a wait for one of them.

    Groups of one are left out.
    """
    buckets = {task.id: task for task in _buckets(rank)}
    for actions in rank.threads.values():
        held: dict[tuple[str, int], list[Task]] = {}
        marks: dict[int, int] = {}  # event -> stream whose work it marks
        for action in actions:
            if isinstance(action, Launch) and action.task in buckets:
                task = buckets[action.task]
                assert task.collective is not None
                mine = held.setdefault((task.collective.group, task.stream), [])
                mine.append(task)
                if sum(map(_size, mine)) >= limit_bytes:
                    yield from _several(held, {task.stream})
            elif isinstance(action, RecordEvent):
                marks[action.event] = action.stream
            elif isinstance(action, StreamWait | Synchronize):
                streams = set(marks.values()) | {stream for _, stream in held}
                if action.event is not None:
                    streams = {marks[action.event]} if action.event in marks else set()
                elif isinstance(action, Synchronize) and action.stream is not None:
                    streams = {action.stream}
                yield from _several(held, streams)
        yield from _several(held, {stream for _, stream in held})


def _several(held: dict[tuple[str, int], list[Task]], streams: set[int]) -> list[list[Task]]:
    """Remove and return the groups held on ``streams`` that have more than one task."""
    found = [held.pop(key) for key in list(held) if key[1] in streams]
    return [tasks for tasks in found if len(tasks) > 1]


def _joined_rank(rank: RankGraph, groups: Mapping[int, tuple[int, ...]]) -> RankGraph:
    into = {task: last for last, members in groups.items() for task in members if task != last}
    threads = {name: tuple(_later_marks(actions, rank.tasks, into)) for name, actions in rank.threads.items()}
    replaced: dict[int, tuple[Task, ...]] = dict.fromkeys(into, ())
    for last, members in groups.items():
        task = rank.tasks[last]
        assert task.collective is not None
        size = sum(_size(rank.tasks[each]) for each in members)
        whole = replace(task.collective, size_bytes=size, pieces=1)
        replaced[last] = (replace(task, collective=whole),)
    return with_replaced(replace(rank, threads=threads), replaced)


def _later_marks(actions: Sequence[Action], tasks: Sequence[Task], into: Mapping[int, int]) -> Iterable[Action]:
    """Move marks behind a bucket past the last of the joined ones, so that waits for it wait for the joined one."""
    open_: dict[int, int] = {}  # stream -> last of the joined ones, if the newest launch on the stream goes there
    marks: dict[int, list[Action]] = {}
    for action in actions:
        if isinstance(action, Launch):
            stream = tasks[action.task].stream
            open_.pop(stream, None)
            if action.task in into:
                open_[stream] = into[action.task]
            yield action
            yield from marks.pop(action.task, ())
        elif isinstance(action, RecordEvent) and action.stream in open_:
            marks.setdefault(open_[action.stream], []).append(action)
        else:
            yield action
    for left in marks.values():
        yield from left


def _with_times(
    before: ExecutionGraph, after: ExecutionGraph, joined: _Joined, layout: NodeLayout, model: CostModel
) -> ExecutionGraph:
    members = {rank: {task for group in groups.values() for task in group} for rank, groups in joined.items()}
    apart = _priced(before, members, layout, model)
    # Task ids have changed: joined tasks are identified by group and sequence number.
    keys = {
        rank.rank: {_key(rank.tasks[last]): group for last, group in joined[rank.rank].items()} for rank in before.ranks
    }
    chosen = {rank.rank: {task.id for task in rank.tasks if _key(task) in keys[rank.rank]} for rank in after.ranks}
    whole = _priced(after, chosen, layout, model)
    ranks = []
    for rank, known, old, new in zip(after.ranks, before.ranks, apart.ranks, whole.ranks, strict=True):
        tasks = list(rank.tasks)
        for place in chosen[rank.rank]:
            group = keys[rank.rank][_key(tasks[place])]
            measured = sum(_seconds(known.tasks[task]) for task in group)
            predicted = sum(_seconds(old.tasks[task]) for task in group)
            seconds = measured * (_seconds(new.tasks[place]) / predicted if predicted else 1.0)
            duration = Duration(seconds, seconds, seconds, "scaled by its size", "fitted")
            tasks[place] = replace(tasks[place], duration=duration)
        ranks.append(replace(rank, tasks=tuple(tasks)))
    return replace(after, ranks=tuple(ranks))


def _key(task: Task) -> tuple[str, int] | None:
    return None if task.collective is None else (task.collective.group, task.collective.sequence)


def _seconds(task: Task) -> float:
    return 0.0 if task.duration is None else task.duration.seconds


def _priced(
    graph: ExecutionGraph, chosen: Mapping[int, set[int]], layout: NodeLayout, model: CostModel
) -> ExecutionGraph:
    ranks = tuple(
        replace(
            rank,
            tasks=tuple(replace(task, duration=None) if task.id in chosen[rank.rank] else task for task in rank.tasks),
        )
        for rank in graph.ranks
    )
    return price_collectives(replace(graph, ranks=ranks), layout, model)
