"""A timeline as a trace file for ui.perfetto.dev and chrome://tracing: one process per rank, one track per thread and
stream, arrows from launches to tasks, the wait and the transfer of a collective apart. Ranges and operators around
others (``record_function``) enclose them; the critical path is a process of its own.

Times are whole nanoseconds: begin and end are rounded, not the length, so that neighbours never overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import IO, Any

from costmodel.base.errors import OutputError
from costmodel.base.whole_file import whole_file
from costmodel.operators.any_operator import AnyOperator
from e2e.explain.critical_path import CriticalPath
from e2e.simulate.instructions import describe
from e2e.simulate.timeline import RankLayout, Timeline
from e2e.step.execution_graph import (
    Action,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Task,
)

# Track number of stream 0; threads count from 1.
FIRST_STREAM_TRACK = 1000
# Of an operator's sizes so many characters are told.
_MOST_TEXT = 400

Event = dict[str, Any]


def write_trace(
    graph: ExecutionGraph, timeline: Timeline, path: Path, critical: CriticalPath | None = None
) -> None:  # fmt: skip
    """Writes Chrome trace JSON, compressed if ``path`` ends in ``.gz``; :class:`OutputError` if it cannot.

    ``critical``: the path of the explained step, which gets a track.
    """
    try:
        with whole_file(path) as file:
            if path.suffix == ".gz":
                # No time stamp: the same timeline gives the same file.
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0) as packed:
                    _write(graph, timeline, packed, critical)
            else:
                _write(graph, timeline, file, critical)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def trace_events(
    graph: ExecutionGraph, timeline: Timeline, critical: CriticalPath | None = None
) -> Iterator[Event]:  # fmt: skip
    """The events of the trace: metadata, slices (``X``), instants (``i``) and arrows (``s``, ``f``)."""
    if critical is not None:
        yield from _critical_events(critical, max(rank.rank for rank in graph.ranks) + 2)
    for layout, rank in zip(timeline.layouts, graph.ranks, strict=True):
        writer = _RankWriter(timeline, layout, rank)
        yield from writer.tracks()
        yield from writer.around()
        yield from writer.actions()
        yield from writer.tasks()


def _critical_events(critical: CriticalPath, pid: int) -> Iterator[Event]:
    """A process with one track, above the ranks."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 1, "args": {"name": "critical path"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 1, "args": {"sort_index": -1}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "critical path of the step"}}
    for segment in critical.segments:
        start, end = round(segment.start * 1e9), round((segment.start + segment.seconds) * 1e9)
        told = {"rank": segment.rank, "operator": segment.operator, "had to wait for": segment.waits_for,
                "by": segment.edge.name.lower().replace("_", " ")}  # fmt: skip
        common = {"name": segment.name, "cat": segment.kind, "pid": pid, "tid": 1}
        yield {"ph": "X", **common, "ts": start / 1e3, "dur": (end - start) / 1e3, "args": told}


def _write(
    graph: ExecutionGraph, timeline: Timeline, file: IO[bytes] | gzip.GzipFile, critical: CriticalPath | None
) -> None:  # fmt: skip
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    separator = ""
    for event in trace_events(graph, timeline, critical):
        file.write(f"{separator}{encode(event)}".encode())
        separator = ",\n"
    file.write(b"\n]}\n")


def described(operator: AnyOperator) -> str:
    """Kind and sizes of a record of what is computed, without what is as usual: ``Gemm(m=64, n=16, k=32)``."""
    shown = []
    for each in fields(operator):
        value = getattr(operator, each.name)
        if each.default is MISSING or value != each.default:
            shown.append(f"{each.name}={value}")
    return f"{type(operator).__name__}({', '.join(shown)})"


class _RankWriter:
    def __init__(self, timeline: Timeline, layout: RankLayout, rank: RankGraph) -> None:
        self._layout, self._rank, self._iterations = layout, rank, timeline.iterations
        part = slice(layout.offset, layout.offset + timeline.iterations * layout.nodes)
        # Arrows are numbered through all processes.
        self._arrows = layout.offset
        # Nanoseconds.
        self._start, self._ready, self._end = (
            (of[part] * 1e9).round().astype("int64").tolist() for of in (timeline.start, timeline.ready, timeline.end)
        )
        # Not the rank itself: process 0 is the idle one for some viewers.
        self._pid = rank.rank + 1
        self._threads = {name: track for track, name in enumerate(rank.threads, start=1)}

    def tracks(self) -> Iterator[Event]:
        """Names and order of the tracks."""
        yield self._named("process_name", 0, {"name": f"rank {self._rank.rank}"})
        yield self._named("process_sort_index", 0, {"sort_index": self._rank.rank})
        streams = {
            FIRST_STREAM_TRACK + stream: f"stream {stream}" for stream in sorted(set(self._layout.streams.tolist()))
        }
        for track, name in ({track: name for name, track in self._threads.items()} | streams).items():
            yield self._named("thread_name", track, {"name": name})
            yield self._named("thread_sort_index", track, {"sort_index": track})

    def around(self) -> Iterator[Event]:
        """Operators and marked ranges around others, as slices that enclose what happens in them.

        Of slices that begin at one moment the outer comes first, as viewers want it; actions follow all of these.
        """
        for name, actions in self._rank.threads.items():
            track, first = self._threads[name], self._layout.threads[name][0]
            chains = [self._chain(action) for action in actions]
            for iteration in range(self._iterations):
                found = self._enclosing(chains, iteration * self._layout.nodes + first)
                for begin, _, _, end, call in sorted(found):
                    info = self._rank.calls[call]
                    told = {"iteration": iteration, "phase": info.phase, "module": info.module}
                    yield self._slice(info.name, "around", track, begin, end, told)

    def _enclosing(self, chains: Sequence[tuple[int, ...]], node: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(begin, -end, depth, end, call) of every call around neighbouring actions, the first of which is ``node``."""
        opened: list[tuple[int, int]] = []
        end = 0
        for place, chain in enumerate((*chains, ())):
            same = 0
            while same < min(len(chain), len(opened)) and chain[same] == opened[same][0]:
                same += 1
            while len(opened) > same:
                call, begin = opened.pop()
                yield begin, -end, len(opened), end, call
            if place < len(chains):
                opened += [(call, self._start[node + place]) for call in chain[same:]]
                end = self._end[node + place]

    def _chain(self, action: Action) -> tuple[int, ...]:
        """Calls around the one behind ``action``, the outermost first."""
        call = self._rank.tasks[action.task].call if isinstance(action, Launch) else getattr(action, "call", None)
        found: list[int] = []
        info = None if call is None else self._rank.calls.get(call)
        while info is not None and info.parent is not None and info.parent in self._rank.calls:
            found.append(info.parent)
            info = self._rank.calls[info.parent]
        return tuple(reversed(found))

    def actions(self) -> Iterator[Event]:
        for name, actions in self._rank.threads.items():
            track, first = self._threads[name], self._layout.threads[name][0]
            for iteration in range(self._iterations):
                for node, action in enumerate(actions, start=iteration * self._layout.nodes + first):
                    yield from self._action(node, action, track, iteration)

    def tasks(self) -> Iterator[Event]:
        for iteration in range(self._iterations):
            first = iteration * self._layout.nodes + self._layout.actions
            for node, task in enumerate(self._rank.tasks, start=first):
                yield from self._task(node, task, iteration)

    def _action(self, node: int, action: Action, track: int, iteration: int) -> Iterator[Event]:
        start, end = self._start[node], self._end[node]
        name, category = self._describe(action)
        if isinstance(action, (RecordEvent, StreamWait, Signal)):
            yield {"ph": "i", "s": "t", **self._common(name, category, track, start)}
            return
        arguments = {"iteration": iteration, "waited_us": (self._ready[node] - start) / 1e3}
        yield self._slice(name, category, track, start, end, arguments)
        if isinstance(action, Launch):
            # An arrow leaves the slice that encloses its time, so it starts where the launch does.
            yield {
                "ph": "s",
                "id": self._arrows + iteration * self._layout.nodes + action.task,
                **self._common("launch", "launch", track, start),
            }

    def _task(self, node: int, task: Task, iteration: int) -> Iterator[Event]:
        start, ready, end = self._start[node], self._ready[node], self._end[node]
        track = FIRST_STREAM_TRACK + task.stream
        arguments = self._task_arguments(task, iteration)
        if ready > start:
            yield self._slice(f"{task.name} (wait)", "collective wait", track, start, ready, arguments)
        yield self._slice(task.name, task.kind, track, ready, end, arguments)
        arrow = self._common("launch", "launch", track, start)
        yield {"ph": "f", "bp": "e", "id": self._arrows + node - self._layout.actions, **arrow}

    def _task_arguments(self, task: Task, iteration: int) -> Event:
        arguments: Event = {"iteration": iteration, "task": task.id}
        if task.duration is not None:
            arguments |= {"bound": task.duration.bound, "source": task.duration.source}
        if task.operators:
            arguments["computes"] = "; ".join(map(described, task.operators))[:_MOST_TEXT]
        if task.call is not None and task.call in self._rank.calls:
            call = self._rank.calls[task.call]
            arguments |= {"operator": call.name, "phase": call.phase, "module": call.module}
        if task.collective is not None:
            collective = task.collective
            arguments |= {"group": collective.group, "sequence": collective.sequence, "bytes": collective.size_bytes}
        return arguments

    def _describe(self, action: Action) -> tuple[str, str]:
        if isinstance(action, HostWork):
            call = self._rank.calls.get(action.call) if action.call is not None else None
            return (action.kind if call is None else call.name), action.kind
        return describe(action, self._rank), "T4" if isinstance(action, Launch) else "synchronisation"

    def _slice(self, name: str, category: str, track: int, start: int, end: int, arguments: Event) -> Event:
        return {"ph": "X", "dur": (end - start) / 1e3, "args": arguments, **self._common(name, category, track, start)}

    def _common(self, name: str, category: str, track: int, start: int) -> Event:
        """``ts`` in microseconds, as the format asks."""
        return {"name": name, "cat": category, "pid": self._pid, "tid": track, "ts": start / 1e3}

    def _named(self, what: str, track: int, arguments: Event) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": arguments}
