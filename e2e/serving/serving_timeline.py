"""The first steps of a served load as a trace file for ui.perfetto.dev: GPU, host, and every request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.report.timeline_export import Event, name_event, slice_event, write_events
from e2e.serving.schedule import LoggedStep
from e2e.serving.serving_answer import ServingAnswer

# Steps and requests that are written.
_MOST_STEPS, _MOST_REQUESTS = 5000, 256
_ENGINE, _REQUESTS = 1, 2


def write_serving_timeline(answer: ServingAnswer, path: Path) -> None:
    """Write Chrome trace JSON, compressed if ``path`` ends in ``.gz``; ``OutputError`` if it cannot be written."""
    write_events(path, serving_events(answer))


def serving_events(answer: ServingAnswer) -> Iterator[Event]:
    """Yield tracks and slices: on the GPU the parts of each step, on the host what it adds to them."""
    yield name_event("process_name", _ENGINE, 1, answer.deployment.engine.title)
    yield name_event("process_name", _REQUESTS, 1, "requests")
    for replica in sorted({step.replica for step in answer.run.log}):
        which = f" of replica {replica}" if len(answer.run.busy_seconds) > 1 else ""
        yield name_event("thread_name", _ENGINE, 2 * replica + 1, f"GPU{which}")
        yield name_event("thread_name", _ENGINE, 2 * replica + 2, f"host between steps{which}")
    until, written = 0.0, 0
    for step in answer.run.log:
        for place in range(min(step.repeats, _MOST_STEPS - written)):
            until = step.start + (place + 1) * step.seconds
            yield from _step_events(answer, step, until - step.seconds, place)
        written = min(written + step.repeats, _MOST_STEPS)
    run, load = answer.run, answer.workload
    sent, first, last = run.sent.tolist(), run.first.tolist(), run.last.tolist()
    shown = [each for each in range(load.count) if sent[each] <= until][:_MOST_REQUESTS]
    for track, number in enumerate(shown, 1):
        told = {"prompt tokens": int(load.inputs[number]), "output tokens": int(load.outputs[number])}
        yield name_event("thread_name", _REQUESTS, track, f"request {number}")
        yield slice_event("queue and prompt", "serving", _REQUESTS, track, sent[number], first[number], told)
        yield slice_event("output", "serving", _REQUESTS, track, first[number], last[number], told)


def _step_events(answer: ServingAnswer, step: LoggedStep, start: float, place: int) -> Iterator[Event]:
    price, tokens = answer.price, sum(each.queries for each in step.prompts)
    device = min(price.device_seconds(step.sequences, step.context + place, step.prompts), step.seconds)
    names = [f"prompts {tokens}"] * bool(tokens) + [f"decode {step.sequences}"] * bool(step.sequences)
    told = {"sequences": step.sequences, "context": round(step.context + place), "prompt tokens": tokens}
    yield slice_event(" + ".join(names), "serving", _ENGINE, 2 * step.replica + 1, start, start + device, told)
    yield slice_event("host", "serving", _ENGINE, 2 * step.replica + 2, start + device, start + step.seconds, told)
