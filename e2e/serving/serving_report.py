"""Reports of an answer: text for people, and a page with curves over concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.units import format_quantity
from costmodel.pages.charts import PALETTE, inline_chart, place_labels
from costmodel.pages.document import render, write_page
from e2e.serving.serving_answer import ServingAnswer, serve
from e2e.serving.serving_result import ServingResult, Spread, serving_result


def answer_text(result: ServingResult) -> str:
    """Lines of text."""
    lines = figure_lines(result)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def figure_lines(result: ServingResult) -> list[tuple[str, str]]:
    """Names and texts of the figures, in the field's words."""
    asked, step, prefill = result.request, result.decode_step, result.prefill_step
    low, high = result.output_tokens_per_second_interval
    lines = [
        ("deployment", _deployment(result)),
        ("load", _load(result)),
        ("TTFT", _latency(result.ttft_seconds, result.ttft_interval_seconds)),
        ("TPOT", _latency(result.tpot_seconds, result.tpot_interval_seconds)),
        ("ITL", _latency(result.itl_seconds)),
        ("request", _latency(result.request_seconds)),
        ("throughput", f"{result.output_tokens_per_second:,.0f} output tokens/s ({low:,.0f} to {high:,.0f}), "
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
        ("memory", ", ".join(f"{name} {value / 1e9:.3g} GB" for name, value in _memory(result))),
        ("cache", f"{result.cache['tokens']:,} tokens, {result.cache['used_share']:.0%} in use "
                  f"({result.cache['most_used_share']:.0%} at most)"),
        ("prices", _shares(result.coverage)),
    ]  # fmt: skip
    return lines + [("note", text) for text in result.notes]


def _deployment(result: ServingResult) -> str:
    asked = result.request
    model = asked.get("model") or asked.get("model_config")
    spread = f" ({asked['parallel']})" if asked.get("parallel") else ""
    return f"{model} on {asked.get('gpus', 1)} x {asked['gpu']}{spread}, {result.engine}"


def _load(result: ServingResult) -> str:
    asked = result.request
    if isinstance(asked.get("requests"), str):
        return f"{result.requests:,} requests of {asked['requests']} in {result.seconds:,.1f} s"
    lengths = f"{asked.get('input_length', 1024):,} + {asked.get('output_length', 256):,} tokens"
    how = f"{asked['rate']:g} requests/s" if "rate" in asked else f"{asked.get('concurrency', 1):,} users"
    return f"{how}, {lengths}, {result.requests:,} requests in {result.seconds:,.1f} s"


def _latency(spread: Spread, interval: tuple[float, float] | None = None) -> str:
    sure = f" ({_time(interval[0])} to {_time(interval[1])})" if interval else ""
    rest = ", ".join(f"{name} {_time(spread[name])}" for name in ("p50", "p90", "p99"))
    return f"{_time(spread.mean)} on average{sure}; {rest}"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else format_quantity(seconds, "s", 3)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _memory(result: ServingResult) -> list[tuple[str, float]]:
    return [(name.removesuffix("_bytes"), value) for name, value in result.memory.items()]


# --- the page -----------------------------------------------------------------------------------

_MEMORY_COLOURS = dict(zip(("weight", "activation", "reserve", "cache"), ("#4477aa", "#228833", "#c9ced6", "#882255"),
                           strict=True))  # fmt: skip
# Colours of parts beyond the palette's.
_MORE_COLOURS = ("#8d6aa8", "#7a8b99", "#b08c2a", "#2a9d8f", "#c2556b", "#5e3b78")
_MOST_USERS = 1024


def write_serving_page(answer: ServingAnswer, result: ServingResult, path: Path) -> None:
    """Write the page, for which more loads are predicted; ``OutputError`` if it cannot be written."""
    write_page(path, serving_page(result, users_curve(answer)))


def users_curve(answer: ServingAnswer) -> list[tuple[int, ServingResult]]:
    """Figures for 1, 2, 4 ... users up to four times those of ``answer``, and until more of them only wait."""
    request, found, tables = answer.request, [], answer.tables
    inputs, outputs = (round(float(each.mean())) for each in (answer.workload.inputs, answer.workload.outputs))
    alike = replace(request, rate=None, duration=None, requests=None)
    if request.trace:
        alike = replace(alike, input_length=inputs, output_length=outputs, shortest_length=1.0)
    most = min(max(4 * (request.concurrency or 64), 64), _MOST_USERS)
    users = 1
    while users <= most:
        asked = replace(alike, concurrency=users, requests=4 * users)
        found.append((users, serving_result(serve(asked, tables), with_table_error=False)))
        if users > answer.deployment.engine.sequences or users * (inputs + outputs) > 2 * answer.room.tokens:
            break
        users *= 2
    return found


def serving_page(result: ServingResult, curve: Sequence[tuple[int, ServingResult]]) -> str:
    """Return the HTML text."""
    steps = [(f"{name} step, {_time(step.seconds)}", {**step.parts, "host": step.host_seconds})
             for name, step in (("Decoding", result.decode_step), ("Prompts'", result.prefill_step))]  # fmt: skip
    names = list(dict.fromkeys(name for _, parts in steps for name in parts))
    return render(
        "e2e.serving/serving.html",
        result=result,
        title=_deployment(result),
        lines={name: text for name, text in figure_lines(result) if name not in ("deployment", "note")},
        seconds=_time,
        frontier=inline_chart("Throughput per GPU against tokens per second and user",
                              lambda axes: _draw_frontier(axes, result, curve), 4.5),
        latency=inline_chart("TTFT and TPOT over users", lambda axes: _draw_latency(axes, curve), 4.0),
        points=[_point(users, each) for users, each in curve],
        steps=steps,
        colours=dict(zip(names, (*PALETTE, *_MORE_COLOURS, *PALETTE), strict=False)),
        memory={name: value for name, value in _memory(result) if name in _MEMORY_COLOURS},
        memory_colours=_MEMORY_COLOURS,
    )  # fmt: skip


def _point(users: int, each: ServingResult) -> tuple[str, ...]:
    return (
        f"{users:,}", _time(each.ttft_seconds.p50), _time(each.ttft_seconds.p99), _time(each.tpot_seconds.mean),
        f"{each.tokens_per_second_per_user:.1f}", f"{each.output_tokens_per_second_per_gpu:,.0f}",
        f"{each.cache['used_share']:.0%}", each.bound,
    )  # fmt: skip


def _draw_frontier(axes: Any, result: ServingResult, curve: Sequence[tuple[int, ServingResult]]) -> None:
    users = [each.tokens_per_second_per_user for _, each in curve]
    axes.plot(users, [each.output_tokens_per_second_per_gpu for _, each in curve], marker="o", color=PALETTE[0])
    axes.plot([result.tokens_per_second_per_user], [result.output_tokens_per_second_per_gpu], marker="D", markersize=10,
              linestyle="none", color=PALETTE[1])  # fmt: skip
    axes.set(xlabel="tokens/s per user", ylabel="output tokens/s per GPU", xlim=(0, None), ylim=(0, None))
    place_labels(axes, [(f"{number:,}", (each.tokens_per_second_per_user, each.output_tokens_per_second_per_gpu))
                        for number, each in curve])  # fmt: skip


def _draw_latency(axes: Any, curve: Sequence[tuple[int, ServingResult]]) -> None:
    numbers = [number for number, _ in curve]
    for place, (name, value) in enumerate((("TTFT p99", lambda each: each.ttft_seconds.p99),
                                           ("TTFT p50", lambda each: each.ttft_seconds.p50),
                                           ("TPOT", lambda each: each.tpot_seconds.mean))):  # fmt: skip
        axes.plot(numbers, [1e3 * value(each) for _, each in curve], marker="o", label=name, color=PALETTE[place])
    low, high = (np.array([1e3 * each.tpot_interval_seconds[end] for _, each in curve]) for end in (0, 1))
    axes.fill_between(numbers, low, high, alpha=0.2, color=PALETTE[2], linewidth=0)
    axes.set(xlabel="users", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
