"""One step of a recording: an iteration of a profile, or the last whole step of an execution trace.

Iterations of a profile (:class:`StepWindow`) are marked by the profiler's steps, another annotation, or repetition. The
last step of an execution trace is found by the profiler's steps, else by the optimizer's. A recording of many steps may
exceed the memory as operator calls. :func:`read_last_step` reads it twice: once for the order, nesting and step of
every node, with a few bytes of memory each, then for the selected nodes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED
from costmodel.base.units import whole_number
from e2e.step.operator_trace import OPTIMIZER_STEP, OperatorCall, OperatorTrace
from e2e.traces.execution_trace import GROUPS_NODE, USER_SCOPE, read_execution_trace
from e2e.traces.json_stream import read_members
from e2e.traces.kineto import HostSpan, KinetoTrace
from e2e.traces.linked_trace import LinkedTrace

_STEP = "ProfilerStep#"
_WHOLE = "whole trace"  # name of the only iteration if nothing repeats
_BACKWARD = "autograd::engine::evaluate_function"
# Least number of linked operators, relative to the iteration with most of them, for an iteration to count as traced.
_LINKED_SHARE = 0.9
# Runtime calls of the first steps of a process; a steady step spends little time in them.
_STARTING = ("cudaMalloc", "cuModuleLoad", "cuLibraryLoad", "cudaHostAlloc", "cudaFuncGetAttributes", "cuModuleGet")
_STARTING_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Host time of one iteration, ``start <= t < end`` in seconds of the profile."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the iteration."""
        return self.end - self.start

    def holds(self, time: float) -> bool:
        """True if ``time`` is in the iteration."""
        return self.start <= time < self.end


def iterations(kineto: KinetoTrace) -> tuple[StepWindow, ...]:
    """Return all iterations in order: from each ``ProfilerStep`` to the next, else from each repetition to the next.

    A profile without repetition is one iteration, its whole length.
    """
    main = [span for span in kineto.annotations if span.thread == kineto.main_thread]
    steps = [span for span in main if span.name.startswith(_STEP)]
    if steps:
        return _between(steps, steps[-1].end)
    for spans in (main, [span for span in kineto.operators if span.thread == kineto.main_thread]):
        repeated = _repeated(spans)
        if repeated:
            end = repeated[-1].start + (repeated[-1].start - repeated[0].start) / (len(repeated) - 1)
            windows = _between(repeated, min(end, kineto.end))
            if _all_launch(kineto, windows[:-1]) and _whole_steps(kineto, windows):
                return windows
    return (StepWindow(_WHOLE, 0.0, kineto.end),)


def choose_step(kineto: KinetoTrace, step: int | str | None = None) -> StepWindow:
    """Return the iteration ``step``: its index (negative from the end), the name of an annotation, or ``None``.

    ``None`` selects the one of median length among those after the first; of an annotation that occurs several times,
    the last outermost one is used. Raises :class:`InputError` that lists the existing ones.
    """
    found = iterations(kineto)
    if step is None:
        return found[_steady([window.seconds for window in found])]
    if isinstance(step, int):
        if not -len(found) <= step < len(found):
            raise InputError(f"{kineto.source}: no iteration {step}; it has {len(found)}: {_names(found)}")
        return found[step]
    named = _outermost([span for span in kineto.annotations if span.name == step])
    if not named:
        known = list(dict.fromkeys(span.name for span in kineto.annotations))[:8]
        raise InputError(f"{kineto.source}: no annotation {step!r}; it has {', '.join(known) or 'none'}")
    return StepWindow(step, named[-1].start, named[-1].end)


def choose_step_of_ranks(
    profiles: Sequence[KinetoTrace], step: int | str | None = None, links: Mapping[int, LinkedTrace] | None = None
) -> list[StepWindow]:
    """Return the same iteration of every rank of a job, selected as in :func:`choose_step`.

    Without ``step`` the one of median length among those that all ranks recorded: profiler steps are matched by number,
    other iterations by their begin. With ``links`` (by rank) only iterations whose operators are in the execution
    traces are considered. Raises :class:`InputError` if no step was recorded on all ranks.
    """
    if step is not None:
        return [choose_step(profile, step) for profile in profiles]
    found = [iterations(profile) for profile in profiles]
    counted = all(window.name.startswith(_STEP) for windows in found for window in windows)
    rows = _by_number(profiles, found) if counted else _by_time(profiles, found)
    # The last one may have been stopped before it launched anything.
    launching = [_launches(profile) for profile in profiles]
    rows = [row for row in rows if all(map(_count_within, launching, row))] or rows
    if links:
        starts = [_linked_starts(profile, links.get(profile.rank)) for profile in profiles]
        linked = [sum(map(_count_within, starts, row)) for row in rows]
        rows = [row for row, count in zip(rows, linked, strict=True) if count >= _LINKED_SHARE * max(linked)]
    return rows[_steady([sum(window.seconds for window in row) for row in rows])]


def _steady(seconds: Sequence[float]) -> int:
    """Index of the iteration of median length among those after the first."""
    places = sorted(range(min(1, len(seconds) - 1), len(seconds)), key=lambda place: seconds[place])
    return places[(len(places) - 1) // 2]


def _by_number(profiles: Sequence[KinetoTrace], found: Sequence[Sequence[StepWindow]]) -> list[list[StepWindow]]:
    """Return rows of the windows with the same profiler step, for steps that all ranks have."""
    named = [{window.name: window for window in windows} for windows in found]
    rows = [[names[window.name] for names in named] for window in found[0] if all(window.name in n for n in named)]
    if not rows:
        place = next((place for place, names in enumerate(named) if not named[0].keys() & names.keys()), 1)
        raise InputError(
            f"{profiles[0].source} and {profiles[place].source}: no step is in both ({_names(found[0])}; "
            f"{_names(found[place])}); record the same steps on every rank"
        )
    return rows


def _by_time(profiles: Sequence[KinetoTrace], found: Sequence[Sequence[StepWindow]]) -> list[list[StepWindow]]:
    """Return, for every window of the first rank, those of the others that began nearest to it."""

    def nearest(place: int, moment: float) -> StepWindow:
        base = profiles[place].base_seconds
        return min(found[place], key=lambda window: abs(base + window.start - moment))

    begins = [profiles[0].base_seconds + window.start for window in found[0]]
    return [[nearest(place, begin) for place in range(len(profiles))] for begin in begins]


def _linked_starts(profile: KinetoTrace, linked: LinkedTrace | None) -> list[float]:
    """Begin times of the operators in the execution trace, ascending."""
    known = set() if linked is None else set(linked.spans.values())
    return [span.start for span in profile.operators if span.id in known]


def _count_within(starts: Sequence[float], window: StepWindow) -> int:
    return bisect_left(starts, window.end) - bisect_left(starts, window.start)


def doubts(kineto: KinetoTrace, window: StepWindow) -> list[str]:
    """Return a line for each reason why the iteration ``window`` may not be a steady step of the recording."""
    found: list[str] = []
    count = len(iterations(kineto))
    if count > 1 and not window.name.startswith(_STEP):
        found.append(
            f"no profiler steps mark iterations: one is taken to begin with {window.name!r}, which repeats {count} "
            f"times ({window.seconds * 1e3:.1f} of {kineto.end * 1e3:.1f} ms); where that is a layer of a step, record "
            "with prof.step() behind each step"
        )
    if window.name == _WHOLE:
        found.append(
            "no profiler steps mark iterations, and nothing repeats: all that was recorded, from the first event to "
            "the last, is taken for one step; record with prof.step() behind each step"
        )
    calls = [span for span in kineto.runtime if window.holds(span.start)]
    if any(span.name.startswith("cudaStreamBeginCapture") for span in calls):
        found.append("a CUDA graph is captured in the recorded step, which runs nothing then; record a later step")
    starting = sum(span.seconds for span in calls if span.name.startswith(_STARTING))
    if starting > _STARTING_SHARE * window.seconds:
        found.append(
            f"{starting / window.seconds:.0%} of the recorded step load kernels and allocate memory, as the first "
            "steps do; record a later one: schedule(wait=..., warmup=...)"
        )
    return found


def _launches(kineto: KinetoTrace) -> list[float]:
    """Begin times of the calls that launched device work, ascending."""
    launched = {span.correlation for span in kineto.device}
    return sorted(call.start for call in kineto.runtime if call.correlation in launched)


def _all_launch(kineto: KinetoTrace, windows: Sequence[StepWindow]) -> bool:
    """True if each window launches device work: repetitions without any are parts of an iteration."""
    starts = _launches(kineto)
    return all(_count_within(starts, window) for window in windows)


def _whole_steps(kineto: KinetoTrace, windows: Sequence[StepWindow]) -> bool:
    """True if the windows are steps, not layers.

    Work that is done once in a step, the backward pass and the optimizer, is in all complete windows, or in none.
    """
    once = [span.start for span in kineto.operators if span.name.startswith(_BACKWARD)]
    once += [span.start for span in kineto.annotations if span.name.startswith(f"{OPTIMIZER_STEP}#")]
    once.sort()
    return not once or all(_count_within(once, window) for window in windows[:-1])


def _names(windows: Sequence[StepWindow]) -> str:
    return ", ".join(window.name for window in windows[:8])


def _between(spans: Sequence[HostSpan], end: float) -> tuple[StepWindow, ...]:
    ends = [span.start for span in spans[1:]] + [end]
    return tuple(StepWindow(span.name, span.start, until) for span, until in zip(spans, ends, strict=True))


def _outermost(spans: Sequence[HostSpan]) -> list[HostSpan]:
    found: list[HostSpan] = []
    for span in spans:
        if not found or span.start >= found[-1].end:
            found.append(span)
    return found


def _repeated(spans: Sequence[HostSpan]) -> list[HostSpan]:
    """Return the spans that begin the iterations.

    They are the first name of the longest regular repetition, at least three times.

    Regular: between two of them the same outermost spans follow each time (except the last, which may be truncated).
    """
    outer = _outermost(spans)
    names = [span.name for span in outer]
    for name, count in Counter(names).items():
        if count < 3:
            continue
        places = [place for place, other in enumerate(names) if other == name]
        bodies = [tuple(names[one:other]) for one, other in zip(places, places[1:], strict=False)]
        common, times = Counter(bodies).most_common(1)[0]
        # Most bodies are equal and cover nearly all of the trace: an inner loop repeats too, but covers less.
        if times >= 2 and times * len(common) >= 0.8 * len(names[places[0] :]):
            return [outer[place] for place in places]
    return []


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
