"""Last whole step of an execution trace: selected by the profiler's steps, else by the optimizer's.

A recording of many steps may exceed the memory as operator calls. :func:`read_last_step` reads it twice: once for the
order, nesting and step of every node, with a few bytes of memory each, then for the selected nodes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.input_files import MALFORMED
from costmodel.base.units import whole_number
from e2e.step.operator_trace import OperatorCall, OperatorTrace
from e2e.traces.formats.execution_trace import GROUPS_NODE, USER_SCOPE, read_execution_trace
from e2e.traces.formats.json_stream import read_members

_PROFILER_STEP = "ProfilerStep#"
_OPTIMIZER_STEP = "Optimizer.step#"
# Least similarity, as a share of calls with equal names, of two parts between optimizer steps that both end a step.
_ALIKE = 0.9


def last_step(trace: OperatorTrace) -> OperatorTrace:
    """Return ``trace`` with only its last whole step; unchanged if fewer than two steps are marked.

    Profiler steps are marks around all work of a step. Without them a step ends with the optimizer's: what follows the
    last one belongs to an incomplete step. With several optimizers and other work between them (two networks that train
    each other) a step ends with the one after which the calls repeat.
    """
    calls = trace.calls
    marks = [[step_mark(name) for name in _annotations(call)] for call in calls]
    numbers = [next((number for number in each if number is not None), None) for each in marks]
    optimizing = [any(is_optimizer_step(name) for name in _annotations(call)) for call in calls]
    chosen = of_last_step([call.thread for call in calls], numbers, optimizing, [call.name for call in calls])
    if chosen is None:
        return trace
    kept = tuple(compress(calls, chosen))
    present = {call.id for call in kept}
    whole = tuple(call if call.parent in present else replace(call, parent=None) for call in kept)
    return replace(trace, calls=whole, ranges=trace.ranges.within(present))


def of_last_step(
    threads: Sequence[int], steps: Sequence[int | None], optimizing: Sequence[bool], names: Sequence[Hashable]
) -> Sequence[bool] | None:
    """Select the calls (in the order they began) of the last whole step; ``None`` if fewer than two are marked.

    ``steps``: number of the profiler's step around a call; ``optimizing``: an optimizer's step is around it; ``names``:
    names of the calls, or hashes of them.
    """
    numbers = _by_profiler(threads, steps)
    if len(set(numbers) - {None}) < 2:
        numbers = _by_optimizer(optimizing, names)
    last = max((number for number in numbers if number is not None), default=None)
    return None if last is None else [number == last for number in numbers]


def step_mark(annotation: str) -> int | None:
    """Return the step number of an annotation of a profiler step, ``None`` for others."""
    number = annotation.removeprefix(_PROFILER_STEP)
    return whole_number(number) if number != annotation else None


def is_optimizer_step(annotation: str) -> bool:
    """True if ``annotation`` is PyTorch's mark of an optimizer's step."""
    return annotation.startswith(_OPTIMIZER_STEP)


def _by_profiler(threads: Sequence[int], steps: Sequence[int | None]) -> list[int | None]:
    """Assign calls to profiler steps; calls of threads without marks belong to the step that is open."""
    marked = {thread for thread, step in zip(threads, steps, strict=True) if step is not None}
    numbers: list[int | None] = []
    current: int | None = None
    for thread, step in zip(threads, steps, strict=True):
        if thread in marked:
            current = step
        numbers.append(current)
    return numbers


def _by_optimizer(optimizing: Sequence[bool], names: Sequence[Hashable]) -> list[int | None]:
    """Number of steps that had ended before each call began; empty with fewer than two steps."""
    places: list[int] = []
    ended, before = 0, False
    for now in optimizing:
        if before and not now:
            ended += 1
        before = now
        places.append(ended)
    whole = ended + before
    period = _period(places, names, whole)
    if period is None:
        return [None] * len(places)
    # Counted from the end, so that the last steps are whole.
    return [(place - whole) // period if place < whole else None for place in places]


def _period(places: Sequence[int], names: Sequence[Hashable], whole: int) -> int | None:
    """Number of parts, each up to an optimizer's step, after which the calls repeat; ``None`` if they do not."""
    parts: list[Counter[Hashable]] = [Counter() for _ in range(whole)]
    for place, name in zip(places, names, strict=True):
        if place < whole:
            parts[place][name] += 1
    return next((period for period in range(1, whole) if _alike(parts, whole - 1, whole - 1 - period)), None)


def _alike(parts: Sequence[Counter[Hashable]], later: int, earlier: int) -> bool:
    """True if two parts have similar calls; the first one may be truncated, or also create the optimizer's state."""
    first, second = parts[earlier].total(), parts[later].total()
    common = (parts[later] & parts[earlier]).total()
    lenient = earlier == 0 and second > first / 2
    return common >= _ALIKE * (min(first, second) if lenient else max(first, second))


def _annotations(call: OperatorCall) -> tuple[str, ...]:
    found = call.attributes.get("annotations")
    return tuple(str(name) for name in found) if isinstance(found, tuple) else ()


def read_last_step(path: Path | str) -> OperatorTrace:
    """Return :func:`last_step` of :func:`read_execution_trace`, with memory for that step alone.

    Same errors as both.
    """
    survey = _Survey()
    for key, value in read_members(path):
        if key == "nodes":
            try:
                survey.add(value)
            except MALFORMED:
                return read_execution_trace(path)  # reports the invalid node
    return last_step(read_execution_trace(path, survey.last_step()))


class _Survey:
    """Nodes in the order of the file. ``marks``: by id, the parsed annotations; ``annotations``: ids of all of them."""

    def __init__(self) -> None:
        self.ids, self.parents, self.threads, self.names = array("q"), array("q"), array("q"), array("q")
        self.marks: dict[int, tuple[int | None, bool]] = {}
        self.annotations: set[int] = set()
        self.groups: set[int] = set()

    def add(self, node: Mapping[str, Any]) -> None:
        nested = "attrs" in node
        own = {item["name"]: item["value"] for item in node["attrs"]} if nested else node
        number, name = node["id"], node["name"]
        self.ids.append(number)
        self.parents.append(node["ctrl_deps"] if nested else node["parent"])
        self.threads.append(max(own["tid"], 0))
        self.names.append(hash(name))
        if name == GROUPS_NODE:
            self.groups.add(number)
        elif own["scope"] == USER_SCOPE:
            self.annotations.add(number)
            mark = (step_mark(name), is_optimizer_step(name))
            if mark != (None, False):
                self.marks[number] = mark

    def last_step(self) -> set[int] | None:
        """Ids of the calls of the last step, of the annotations around them and of process groups.

        ``None``: all nodes.
        """
        if not self.marks:
            return None
        ids = np.frombuffer(self.ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        ids, parents = ids[order], np.frombuffer(self.parents, dtype=np.int64)[order]
        if (np.diff(ids) == 0).any():
            return None  # ids are not unique
        above = np.searchsorted(ids, parents)
        above[above == len(ids)] = 0
        above[(ids[above] != parents) | (above >= np.arange(len(ids)))] = -1
        threads = np.frombuffer(self.threads, dtype=np.int64)[order]
        threads = np.maximum(threads, threads[threads > 0].min(initial=np.iinfo(np.int64).max))
        names = np.frombuffer(self.names, dtype=np.int64)[order]
        return self._chosen(ids.tolist(), above.tolist(), threads.tolist(), names.tolist())

    def _chosen(self, ids: list[int], above: list[int], threads: list[int], names: list[int]) -> set[int] | None:
        steps: list[int | None] = []
        optimizing: list[bool] = []
        for number, parent in zip(ids, above, strict=True):
            step, optimizer = (steps[parent], optimizing[parent]) if parent >= 0 else (None, False)
            own_step, own_optimizer = self.marks.get(number, (None, False))
            steps.append(own_step if step is None else step)
            optimizing.append(optimizer or own_optimizer)
        calls = [
            place for place, number in enumerate(ids) if number not in self.annotations and number not in self.groups
        ]
        chosen = of_last_step(
            [threads[place] for place in calls],
            [steps[place] for place in calls],
            [optimizing[place] for place in calls],
            [names[place] for place in calls],
        )
        if chosen is None:
            return None
        wanted = set(self.groups)
        for place, kept in zip(calls, chosen, strict=True):
            if kept:
                wanted.add(ids[place])
                self._add_annotations(above[place], ids, above, wanted)
        return wanted

    def _add_annotations(self, place: int, ids: list[int], above: list[int], wanted: set[int]) -> None:
        """Add the annotations around a node, up to the first one that has been added before."""
        while place >= 0 and ids[place] not in wanted:
            if ids[place] in self.annotations:
                wanted.add(ids[place])
            place = above[place]
