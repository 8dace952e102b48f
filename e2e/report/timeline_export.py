"""A timeline as a trace file for ui.perfetto.dev and chrome://tracing: one process per rank, one track per thread and
stream, arrows from launches to tasks, the wait and the transfer of a collective apart.

Times are whole nanoseconds: begin and end are rounded, not the length, so that neighbours never overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from costmodel.base.errors import OutputError
from costmodel.base.whole_file import whole_file
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

Event = dict[str, Any]


def write_trace(graph: ExecutionGraph, timeline: Timeline, path: Path) -> None:
    """Writes Chrome trace JSON, compressed if ``path`` ends in ``.gz``; :class:`OutputError` if it cannot."""
    try:
        with whole_file(path) as file:
            if path.suffix == ".gz":
                # No time stamp: the same timeline gives the same file.
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0) as packed:
                    _write(graph, timeline, packed)
            else:
                _write(graph, timeline, file)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def trace_events(graph: ExecutionGraph, timeline: Timeline) -> Iterator[Event]:
    """The events of the trace: metadata, slices (``X``), instants (``i``) and arrows (``s``, ``f``)."""
    for layout, rank in zip(timeline.layouts, graph.ranks, strict=True):
        writer = _RankWriter(timeline, layout, rank)
        yield from writer.tracks()
        yield from writer.actions()
        yield from writer.tasks()


def _write(graph: ExecutionGraph, timeline: Timeline, file: IO[bytes] | gzip.GzipFile) -> None:
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    separator = ""
    for event in trace_events(graph, timeline):
        file.write(f"{separator}{encode(event)}".encode())
        separator = ",\n"
    file.write(b"\n]}\n")


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
