"""Reports of an answer: text for people, a page with curves over concurrency, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.base.units import format_quantity
from costmodel.pages.charts import PALETTE, inline_chart, place_labels, set_logarithmic
from costmodel.pages.document import render, write_page
from e2e.report.timeline_export import Event, name_event, slice_event, write_events
from e2e.serving.schedule import LoggedStep
from e2e.serving.serving_answer import ServingAnswer, serve
from e2e.serving.serving_result import PROBABILITY, ServingResult, Spread, serving_result
from e2e.serving.step_price import StepPrice


def answer_text(result: ServingResult) -> str:
    """Lines of text."""
    lines = figure_lines(result)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def figure_lines(result: ServingResult) -> list[tuple[str, str]]:
    """Names and texts of the figures, in the field's words."""
    asked, step, prefill = result.request, result.decode_step, result.prefill_step
    low, high = result.output_tokens_per_second_interval
    interval = f"{result.interval_probability:.0%} interval"
    sure = f" ({interval} {low:,.0f} to {high:,.0f})" if low < high else ""
    preempted, hits = result.cache["preempted"], result.prefix_hit_rate
    lines = [
        ("deployment", _deployment(result)),
        ("load", _load(result)),
        ("TTFT", _latency(result.ttft_seconds, interval, result.ttft_interval_seconds)),
        ("TPOT", _latency(result.tpot_seconds, interval, result.tpot_interval_seconds)),
        ("ITL", _latency(result.itl_seconds)),
        ("request", _latency(result.request_seconds)),
        ("throughput", f"{result.output_tokens_per_second:,.0f} output tokens/s{sure}, "
                       f"{result.output_tokens_per_second_per_gpu:,.0f} per GPU; "
                       f"{result.requests_per_second:.3g} requests/s"),
        ("per user", f"{result.tokens_per_second_per_user:.1f} tokens/s"),
    ]  # fmt: skip
    if result.goodput is not None:
        targets = ", ".join(f"{name.upper()} {_time(asked[name])}" for name in ("ttft", "tpot") if name in asked)
        lines.append(("goodput", f"{result.goodput['share']:.1%} of the requests meet {targets}: "
                                 f"{result.goodput['requests_per_second']:.3g} requests/s"))  # fmt: skip
    lines += [
        ("limited by", f"{result.bound} ({_shares(result.bound_shares)})"),
        ("decoding", f"{step.sequences} sequences after {step.context:,} tokens: {_time(step.seconds)} a step, "
                     f"{_time(step.device_seconds)} of the GPU at {step.bandwidth_share:.0%} of its bandwidth"),
        ("prefill", f"{prefill.tokens:,} tokens: {_time(prefill.seconds)} a step, MFU {prefill.arithmetic_share:.0%}"),
        ("memory", ", ".join(f"{name.removesuffix('_bytes')} {value / 1e9:.3g} GB"
                             for name, value in result.memory.items())),
        ("cache", f"{result.cache['tokens']:,} tokens, {result.cache['used_share']:.0%} in use "
                  f"({result.cache['most_used_share']:.0%} at most)"
                  + f", {preempted:,} sequences preempted" * bool(preempted)
                  + ("" if hits is None else f"; {hits:.0%} of the prompts' tokens were in it")),
        ("prices", _shares(result.coverage)),
    ]  # fmt: skip
    return lines + [("note", text) for text in result.notes]


def _deployment(result: ServingResult) -> str:
    asked = result.request
    gpus, model = asked.get("gpus", 1), asked.get("model") or asked["model_config"]
    told = "; ".join(asked[name] for name in ("parallel", "disaggregate", "speculate") if name in asked)
    told = f" ({told})" * bool(told) + f", {result.gpus} GPUs in all" * (result.gpus != gpus)
    return f"{model} on {gpus} x {asked['gpu']}{told}, {result.engine}"


def _load(result: ServingResult) -> str:
    asked = result.request
    sent = f"{result.requests:,} requests"
    if isinstance(asked.get("requests"), str):
        return f"{sent} of {asked['requests']} in {result.seconds:,.1f} s"
    lengths = f"{asked.get('input_length', 1024):,} + {asked.get('output_length', 256):,} tokens"
    users = asked.get("concurrency", 1)
    how = f"{asked['rate']:g} requests/s" if "rate" in asked else f"{users:,} user{'s' * (users > 1)}"
    return f"{how}, {lengths}, {sent} in {result.seconds:,.1f} s"


def _latency(spread: Spread, interval: str = "", ends: tuple[float, float] | None = None) -> str:
    sure = f" ({interval} {_time(ends[0])} to {_time(ends[1])})" if ends else ""
    rest = ", ".join(f"{name} {_time(spread[name])}" for name in ("p50", "p90", "p99"))
    return f"{_time(spread.mean)} on average{sure}; {rest}"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else format_quantity(seconds, "s", 3)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


# --- the page -----------------------------------------------------------------------------------

_MEMORY_COLOURS = {"weight": "#4477aa", "activation": "#228833", "reserve": "#c9ced6", "cache": "#882255"}
# Colours of parts beyond the palette's.
_MORE_COLOURS = ("#8d6aa8", "#7a8b99", "#b08c2a", "#2a9d8f", "#c2556b", "#5e3b78")
_MOST_USERS = 1024

# Numbers of users, and their figures.
Curve = Sequence[tuple[int, ServingResult]]


def write_serving_page(answer: ServingAnswer, result: ServingResult, path: Path) -> None:
    """Write the page, for which more loads are predicted; ``OutputError`` if it cannot be written."""
    curve = users_curve(answer)
    steps = [(f"{name} step, {_time(step.seconds)}", {**step.parts, "host": step.host_seconds})
             for name, step in (("Decoding", result.decode_step), ("Prompts'", result.prefill_step))]  # fmt: skip
    names = dict.fromkeys(name for _, parts in steps for name in parts)
    page = render(
        "e2e.serving/serving.html",
        result=result,
        title=_deployment(result),
        lines={name: text for name, text in figure_lines(result) if name not in ("deployment", "note")},
        seconds=_time,
        frontier=inline_chart("Throughput per GPU against tokens per second and user",
                              lambda axes: _draw_frontier(axes, result, curve), 4.5),
        latency=inline_chart("TTFT and TPOT over users", lambda axes: _draw_latency(axes, curve), 4.0),
        points=[
            (f"{users:,}", _time(each.ttft_seconds.p50), _time(each.ttft_seconds.p99), _time(each.tpot_seconds.mean),
             f"{each.tokens_per_second_per_user:.1f}", f"{each.output_tokens_per_second_per_gpu:,.0f}",
             f"{each.cache['used_share']:.0%}", each.bound)
            for users, each in curve
        ],
        steps=steps,
        colours=dict(zip(names, (*PALETTE, *_MORE_COLOURS, *PALETTE), strict=False)),
        memory={name: result.memory[f"{name}_bytes"] for name in _MEMORY_COLOURS},
        memory_colours=_MEMORY_COLOURS,
    )  # fmt: skip
    write_page(path, page)


def users_curve(answer: ServingAnswer) -> Curve:
    """Figures for 1, 2, 4 ... users up to four times those of ``answer``, and until more of them only wait."""
    request, load = answer.request, answer.workload
    alike: dict[str, Any] = {"rate": None, "duration": None}
    if request.trace:  # requests are then all alike, and begin with nothing in common
        lengths = {"input_length": load.inputs, "output_length": load.outputs}
        alike |= {name: round(float(each.mean())) for name, each in lengths.items()} | {"router": "round-robin"}
    tokens = float((load.inputs + load.outputs).mean())
    most = min(max(4 * (request.concurrency or 64), 64), _MOST_USERS)
    # The last one waits.
    most = min(most, 2 * answer.most_sequences, int(4 * answer.room.tokens / tokens))
    found = []
    for users in (1 << power for power in range(max(most, 1).bit_length())):
        served = serve(replace(request, concurrency=users, requests=4 * users, **alike), answer.tables)
        found.append((users, serving_result(served, with_table_error=False)))
    return found


def _draw_frontier(axes: Any, result: ServingResult, curve: Curve) -> None:
    places = [(each.tokens_per_second_per_user, each.output_tokens_per_second_per_gpu) for _, each in curve]
    axes.plot(*zip(*places, strict=True), marker="o", color=PALETTE[0])
    axes.plot(result.tokens_per_second_per_user, result.output_tokens_per_second_per_gpu, marker="D", markersize=10,
              color=PALETTE[1])  # fmt: skip
    axes.set(xlabel="tokens/s per user", ylabel="output tokens/s per GPU", xlim=(0, None), ylim=(0, None))
    place_labels(axes, [(f"{users:,}", place) for (users, _), place in zip(curve, places, strict=True)])


def _draw_latency(axes: Any, curve: Curve) -> None:
    users, results = zip(*curve, strict=True)
    lines = {
        "TTFT p99": [each.ttft_seconds.p99 for each in results],
        "TTFT p50": [each.ttft_seconds.p50 for each in results],
        f"TPOT, with the {PROBABILITY:.0%} interval of its mean": [each.tpot_seconds.mean for each in results],
    }
    for (name, seconds), colour in zip(lines.items(), PALETTE, strict=False):
        axes.plot(users, [1e3 * each for each in seconds], marker="o", label=name, color=colour)
    low, high = ([1e3 * each.tpot_interval_seconds[end] for each in results] for end in (0, 1))
    axes.fill_between(users, low, high, alpha=0.2, color=PALETTE[2], linewidth=0)
    set_logarithmic(axes, "xy")
    axes.set_xticks(users, [f"{each:,}" for each in users])
    axes.set(xlabel="users", ylabel="latency, ms")
    axes.legend()


# --- the timeline -------------------------------------------------------------------------------

# Steps and requests of a timeline.
_MOST_STEPS, _MOST_REQUESTS = 5000, 256
_ENGINE, _REQUESTS = 1, 2


def write_serving_timeline(answer: ServingAnswer, path: Path) -> None:
    """Write the first steps as Chrome trace JSON for ui.perfetto.dev, compressed if ``path`` ends in ``.gz``;
    ``OutputError`` if it cannot be written.
    """
    write_events(path, serving_events(answer))


def serving_events(answer: ServingAnswer) -> Iterator[Event]:
    """Yield tracks and slices: on the GPU the parts of each step, on the host what it adds to them."""
    yield name_event("process_name", _ENGINE, 1, answer.deployment.engine.title)
    yield name_event("process_name", _REQUESTS, 1, "requests")
    for replica in sorted({step.replica for step in answer.run.log}):
        which = f" of replica {replica}" if len(answer.run.busy_seconds) > 1 else ""
        yield name_event("thread_name", _ENGINE, 2 * replica + 1, f"GPU{which}")
        yield name_event("thread_name", _ENGINE, 2 * replica + 2, f"host between steps{which}")
    until, written, price = 0.0, 0, answer.price
    for step in answer.run.log:
        for place in range(min(step.repeats, _MOST_STEPS - written)):
            until = step.start + (place + 1) * step.seconds
            yield from _step_events(price, step, until - step.seconds, place)
        written = min(written + step.repeats, _MOST_STEPS)
    run, load = answer.run, answer.workload
    sent, first, last = run.sent.tolist(), run.first.tolist(), run.last.tolist()
    shown = [each for each in range(load.count) if sent[each] <= until][:_MOST_REQUESTS]
    for track, number in enumerate(shown, 1):
        told = {"prompt tokens": int(load.inputs[number]), "output tokens": int(load.outputs[number])}
        yield name_event("thread_name", _REQUESTS, track, f"request {number}")
        yield slice_event("queue and prompt", "serving", _REQUESTS, track, sent[number], first[number], told)
        yield slice_event("output", "serving", _REQUESTS, track, first[number], last[number], told)


def _step_events(price: StepPrice, step: LoggedStep, start: float, place: int) -> Iterator[Event]:
    tokens = sum(each.queries for each in step.prompts)
    device = min(price.device_seconds(step.sequences, step.context + place, step.prompts), step.seconds)
    names = [f"prompts {tokens}"] * bool(tokens) + [f"decode {step.sequences}"] * bool(step.sequences)
    told = {"sequences": step.sequences, "context": round(step.context + place), "prompt tokens": tokens}
    yield slice_event(" + ".join(names), "serving", _ENGINE, 2 * step.replica + 1, start, start + device, told)
    yield slice_event("host", "serving", _ENGINE, 2 * step.replica + 2, start + device, start + step.seconds, told)
