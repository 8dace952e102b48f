"""Selection of one iteration of a profile: by the profiler's steps, another annotation, or repetition."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.base.errors import InputError
from e2e.step.operator_trace import OPTIMIZER_STEP
from e2e.traces.formats.kineto import HostSpan, KinetoTrace
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


def choose(kineto: KinetoTrace, step: int | str | None = None) -> StepWindow:
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


def choose_together(
    profiles: Sequence[KinetoTrace], step: int | str | None = None, links: Mapping[int, LinkedTrace] | None = None
) -> list[StepWindow]:
    """Return the same iteration of every rank of a job, selected as in :func:`choose`.

    Without ``step`` the one of median length among those that all ranks recorded: profiler steps are matched by number,
    other iterations by their begin. With ``links`` (by rank) only iterations whose operators are in the execution
    traces are considered. Raises :class:`InputError` if no step was recorded on all ranks.
    """
    if step is not None:
        return [choose(profile, step) for profile in profiles]
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
