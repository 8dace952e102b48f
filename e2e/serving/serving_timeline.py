"""The first steps of a served load as a trace file for ui.perfetto.dev: GPU, host, and every request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from e2e.report.timeline_export import Event, write_events
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
    for process, name in ((_ENGINE, answer.deployment.engine.title), (_REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 1, "args": {"name": name}}
    for replica in sorted({step.replica for step in answer.run.log}):
        number = f" of replica {replica}" if answer.run.replicas > 1 else ""
        for track, name in ((2 * replica + 1, "GPU"), (2 * replica + 2, "host between steps")):
            yield {"ph": "M", "name": "thread_name", "pid": _ENGINE, "tid": track, "args": {"name": name + number}}
    until, written = 0.0, 0
    for step in answer.run.log:
        for number in range(step.count):
            if written == _MOST_STEPS:
                break
            written += 1
            until = step.start + (number + 1) * step.seconds
            yield from _step_events(answer, step, step.start + number * step.seconds, number)
    run, load = answer.run, answer.workload
    shown = [each for each in range(load.count) if run.sent[each] <= until][:_MOST_REQUESTS]
    for track, number in enumerate(shown, 1):
        told = {"prompt tokens": int(load.inputs[number]), "output tokens": int(load.outputs[number])}
        yield {"ph": "M", "name": "thread_name", "pid": _REQUESTS, "tid": track, "args": {"name": f"request {number}"}}
        yield _slice("queue and prompt", _REQUESTS, track, run.sent[number], run.first[number], told)
        yield _slice("output", _REQUESTS, track, run.first[number], run.last[number], told)


def _step_events(answer: ServingAnswer, step: LoggedStep, start: float, number: int) -> Iterator[Event]:
    price, tokens = answer.price, sum(each.queries for each in step.prompts)
    device = min(price.device_seconds(step.sequences, step.context + number, step.prompts), step.seconds)
    names = [f"prompts {tokens}"] * bool(tokens) + [f"decode {step.sequences}"] * bool(step.sequences)
    told = {"sequences": step.sequences, "context": round(step.context + number), "prompt tokens": tokens}
    yield _slice(" + ".join(names), _ENGINE, 2 * step.replica + 1, start, start + device, told)
    yield _slice("host", _ENGINE, 2 * step.replica + 2, start + device, start + step.seconds, told)


def _slice(name: str, process: int, track: int, start: float, end: float, told: Event) -> Event:
    begin, stop = round(float(start) * 1e9), round(float(end) * 1e9)
    return {
        "ph": "X", "name": name, "cat": "serving", "pid": process, "tid": track, "ts": begin / 1e3,
        "dur": (stop - begin) / 1e3, "args": told,
    }  # fmt: skip
