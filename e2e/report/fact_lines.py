"""Lines of a report around the times: options, throughput, power and cost.

The text and the HTML page show the same lines. MFU and HFU are defined in ``docs/utilisation.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from e2e.explain.alternatives import TOGETHER, Advice, Alternative
from e2e.explain.energy import JOULES_OF_A_KILOWATT_HOUR
from e2e.explain.prediction import Prediction
from e2e.explain.step_facts import AskedValue
from e2e.step.execution_graph import OVERHEAD_MEANINGS

MILLION = 1e6
ADVICE_HEAD = ("what to change", "step", "per sample", "memory", "needs")
UTILISATION_MEANING = (
    "MFU: FLOPs of the model's products and attention in a step over peak dense rate x time; HFU: with what is "
    "computed again"
)
_ADVICE_HINT = (
    "--advice predicts other settings (compile, CUDA graph, number type, kernels, batch, ...) and finds the largest "
    "batch that fits"
)
_RECORDED_HINT = (
    "--what-if asks about the recorded step with something changed (host=2x, kernels:gemm=2x, batch=N, ...), "
    "--retarget about another GPU"
)
# Longest name in a table, and uninformative prefixes of C++ kernel names.
_MOST_LETTERS = 72
_NAMESPACES = re.compile(r"\bvoid |\bat::(?:native|detail|cuda)::|\(anonymous namespace\)::|<unnamed>::")


def short_name(name: str) -> str:
    """Shorten ``name`` to one line of a table: the beginning of C++ templates, without namespaces.

    JSON has all of it.
    """
    if len(name) <= _MOST_LETTERS:
        return name
    told = _NAMESPACES.sub("", name)
    return told if len(told) <= _MOST_LETTERS else f"{told[: _MOST_LETTERS - 1].rstrip()}…"


def next_hint(prediction: Prediction) -> str:
    """Suggestion of the next option to try; a recorded run has no other settings."""
    recorded = any(each.option == "--kineto" for each in prediction.asked)
    return _RECORDED_HINT if recorded else _ADVICE_HINT


def number_text(value: float, digits: int = 4) -> str:
    """Format ``value`` with ``digits`` significant digits, never in scientific notation."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def heading(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield lines of given options, defaults, and board."""
    given = [_option(each) for each in prediction.asked if each.given]
    defaults = [_option(each) for each in prediction.asked if not each.given]
    if given:
        yield "asked", ", ".join(given)
    if defaults:
        yield "by default", ", ".join(defaults)
    board = prediction.board
    if board is not None:
        yield (
            "GPU",
            f"{board.name}: {board.description}, {board.memory_bytes / 2**30:.0f} GiB, limit "
            f"{board.power_limit_watts:.0f} W, {board.multiprocessors} multiprocessors",
        )


def speeds(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield lines of throughput, utilisation, energy and cost, as far as known."""
    rate = prediction.throughput
    if rate is not None:
        several = prediction.gpus > 1
        found = [f"{number_text(rate.samples_per_second)} samples/s"]
        if rate.tokens_per_second is not None:
            found.append(f"{rate.tokens_per_second:,.0f} tokens/s")
        if several and rate.tokens_per_second_per_gpu is not None:
            found.append(f"{rate.tokens_per_second_per_gpu:,.0f} tokens/s per GPU")
        yield "throughput", f"{', '.join(found)} ({_step_size(prediction)})"
    used = prediction.utilisation
    if used is not None:
        shares = "" if used.mfu is None or used.hfu is None else f"MFU {used.mfu:.1%}, HFU {used.hfu:.1%} of "
        peaks = " and ".join(
            f"{number_text(peak / 1e12)} TFLOP/s in {dtype}" for dtype, peak in used.peak_flops_per_second.items()
        )
        peak = f"{shares}{peaks}" if shares else "MFU not known: the machine file has no datasheet rate of the products"
        flops = f"{number_text(used.model_flops / 1e12)} TFLOP of the model in a step"
        again = used.executed_flops / used.model_flops - 1
        yield "utilised", f"{peak}; {flops}" + (f", {again:.0%} more executed" if again >= 5e-3 else "")
        yield "", UTILISATION_MEANING
    yield from _energy_and_cost(prediction)


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Table rows under :data:`ADVICE_HEAD`: the best settings."""
    return [_advice_row(each) for each in advice.best]


def advice_remarks(advice: Advice, now_fits: bool | None = True) -> Iterator[str]:
    """Yield further remarks on the advice, in sentences. ``now_fits``: whether the requested step fits."""
    largest = advice.largest_batch
    if largest is not None:
        size = f"{largest.allocated_bytes / 2**30:.1f} GiB allocated"
        if largest.batch_size == 0:
            yield f"largest batch that fits: none, one sample needs {size}"
        else:
            about = " at least" if largest.at_least else ""
            yield f"largest batch that fits:{about} {largest.batch_size} per GPU and micro-batch ({size})"
    others = [
        each
        for each in advice.alternatives
        if each not in advice.best and each.gain is not None and each.kind != TOGETHER
    ]
    if others:
        yield "also predicted: " + "; ".join(_other(each, now_fits) for each in others)
    failed = [each.change for each in advice.alternatives if each.problem]
    if failed:
        yield f"not possible (reasons in --json): {'; '.join(failed)}"
    if advice.stopped:
        left = f"; not predicted: {'; '.join(advice.left)}" if advice.left else ""
        yield f"incomplete: {advice.stopped}{left}"
    if not advice.best and not advice.stopped:
        yield "none of the settings that were predicted is faster by 2 % or more"


def overhead_meanings(prediction: Prediction) -> str:
    """Explain the kinds of host time that occur in the step."""
    return ", ".join(f"{kind} {text}" for kind, text in OVERHEAD_MEANINGS.items() if kind in prediction.overheads)


def _option(asked: AskedValue) -> str:
    return f"{asked.option} {asked.value}"


def _step_size(prediction: Prediction) -> str:
    rate = prediction.throughput
    assert rate is not None
    made_of = f": {rate.made_of}" if rate.made_of else ""
    if rate.sequence_length is None:
        return f"a step is {rate.samples:,} sample{'s' if rate.samples > 1 else ''}{made_of}"
    tokens = "token" if rate.sequence_length == 1 else "tokens"
    sequences = "sequence" if rate.samples == 1 else "sequences"
    return f"a step is {rate.samples:,} {sequences} of {rate.sequence_length:,} {tokens}{made_of}"


def _energy_and_cost(prediction: Prediction) -> Iterator[tuple[str, str]]:
    energy, cost = prediction.energy, prediction.cost
    if energy is not None:
        each = _for_each(prediction, energy.joules / JOULES_OF_A_KILOWATT_HOUR, "kWh")
        yield (
            "energy",
            f"about {number_text(energy.joules, 3)} J a step{each}, {energy.mean_watts:.0f} of "
            f"{energy.limit_watts:.0f} W a board (GPU boards alone; modelled, not measured)",
        )
    if cost is not None:
        price = cost.price
        since = ", ".join(part for part in (price.origin, price.date) if part)
        each = _for_each(prediction, cost.per_step, price.currency)
        yield (
            "cost",
            f"{number_text(cost.per_step, 3)} {price.currency} a step{each} at {price.per_gpu_hour:g} {price.currency} "
            f"per GPU and hour ({since})",
        )


def _for_each(prediction: Prediction, amount: float, unit: str) -> str:
    """Format ``amount`` of a step per million tokens, or per million samples if they are not sequences."""
    rate = prediction.throughput
    if rate is None:
        return ""
    if rate.tokens is not None:
        return f", {number_text(amount * MILLION / rate.tokens, 3)} {unit} per million tokens"
    return f", {number_text(amount * MILLION / rate.samples, 3)} {unit} per million samples"


def _advice_row(each: Alternative) -> tuple[str, ...]:
    seconds = 0.0 if each.iteration_seconds is None else each.iteration_seconds
    memory = "" if each.peak_memory_bytes is None else f"{each.peak_memory_bytes / 2**30:.1f} GiB"
    doubt = "" if each.fits else " (may not fit)" if memory else ""
    return (each.change, f"{seconds * 1e3:.3f} ms", f"{each.gain or 0.0:.2f}x as fast", f"{memory}{doubt}", each.needs)


def _other(each: Alternative, now_fits: bool | None) -> str:
    fits = ", does not fit" if each.fits is False else ", fits" if each.fits and not now_fits else ""
    return f"{each.change} {each.gain or 0.0:.2f}x{fits}"
