"""Reports of an answer: text for people, and a page with curves over concurrency."""

from __future__ import annotations

from collections.abc import Mapping

from costmodel.base.units import format_quantity
from e2e.serving.serving_result import ServingResult, Spread


def show(result: ServingResult) -> str:
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
    return format_quantity(seconds, "s", 3)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _memory(result: ServingResult) -> list[tuple[str, float]]:
    return [(name.removesuffix("_bytes"), value) for name, value in result.memory.items()]
