"""Lines and tables of a report as texts, the same on standard output and in HTML.

Options, throughput, power, cost and advice; ranks and collectives; operators and modules; ranges named by the script;
what-if questions.
MFU and HFU are defined in ``docs/utilisation.md``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from e2e.explain.breakdowns import RangeFigures, device_seconds
from e2e.explain.critical_path import CriticalPath
from e2e.explain.prediction import TOGETHER, Advice, Alternative, AskedValue, Prediction, WhatIfRow
from e2e.explain.rank_figures import CollectiveFigures, RankFigures, Straggler
from e2e.explain.utilisation import JOULES_OF_A_KILOWATT_HOUR
from e2e.step.execution_graph import OVERHEAD_MEANINGS, HostWork, Launch, RankGraph
from e2e.step.memory_room import largest_fitting

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
    "--what-if asks about the recorded step with something changed (host=2x, kernels:gemm=2x, ...), "
    "--retarget about another GPU"
)
# Labels of the parts of memory, and the smallest part that is shown.
MEMORY_ROLES = {"optimizer_state": "optimizer", "cache": "KV cache", "reserve": "allocator's reserve"}
SMALLEST_PART = 10 << 20
PATH_HEAD = ("critical path", "operator", "ms", "share", "waits mostly for")
# Longest name in a table, and uninformative prefixes of C++ kernel names.
_MOST_LETTERS = 72
_NAMESPACES = re.compile(r"\bvoid |\bat::(?:native|detail|cuda)::|\(anonymous namespace\)::|<unnamed>::")


def short_kernel_name(name: str) -> str:
    """Shorten ``name`` to one line of a table: the beginning of C++ templates, without namespaces.

    JSON has all of it.
    """
    if len(name) <= _MOST_LETTERS:
        return name
    told = _NAMESPACES.sub("", name)
    return told if len(told) <= _MOST_LETTERS else f"{told[: _MOST_LETTERS - 1].rstrip()}…"


def title(prediction: Prediction) -> str:
    """Return the title: workload, machine, number of GPUs and nodes."""
    count = f"{prediction.gpus} x " if prediction.gpus > 1 else ""
    nodes = f" on {prediction.nodes} nodes" if prediction.nodes > 1 else ""
    return f"{prediction.workload} on {count}{prediction.machine}{nodes}"


def phase_rows(prediction: Prediction) -> Mapping[str, float]:
    """Seconds of each phase; ``other`` only if it is not zero."""
    known = {
        "forward": prediction.forward_seconds,
        "backward": prediction.backward_seconds,
        "optimizer": prediction.optimizer_seconds,
    }
    return known | ({"other": prediction.other_seconds} if prediction.other_seconds > 0 else {})


def launches_text(prediction: Prediction) -> str:
    """Format the numbers of launches and of operator calls, per rank if there are several."""
    several = len(prediction.ranks) > 1
    kernels = _between([rank.kernels for rank in prediction.ranks]) if several else f"{prediction.kernels:,}"
    operators = _between([rank.operators for rank in prediction.ranks]) if several else f"{prediction.operators:,}"
    each = f" on each of {len(prediction.ranks)} distinct ranks" if several else ""
    if prediction.cuda_graph:
        return f"1 of a CUDA graph of {kernels}, captured from {operators} operator calls{each}"
    return f"{kernels} in {operators} operator calls{each}"


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:.3f} ms"


def next_hint(prediction: Prediction) -> str:
    """Suggestion of the next option to try; a recorded run has no other settings."""
    recorded = any(each.option == "--kineto" for each in prediction.asked)
    return _RECORDED_HINT if recorded else _ADVICE_HINT


def number_text(value: float, digits: int = 4) -> str:
    """Format ``value`` with ``digits`` significant digits, never in scientific notation."""
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def option_lines(prediction: Prediction) -> Iterator[tuple[str, str]]:
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


def speed_lines(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield lines of the mean of different steps, throughput, utilisation, energy and cost, as far as known."""
    mean, rate = prediction.mean, prediction.throughput
    if mean is not None:
        low, high = mean.interval_seconds
        interval = f"(80% interval {milliseconds(low)} to {milliseconds(high)})"
        over = f"a step, in a cycle of {mean.every:,} of which some do more (see the notes)"
        yield "mean", f"{milliseconds(mean.iteration_seconds)}  {interval} {over}"
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


def figure_lines(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield lines of the mean rank, phases, GPU, launches, memory, host time and sources of prices.

    Phases and GPU times are those of the only rank, or of the one that computes longest.
    """
    several = len(prediction.ranks) > 1
    if prediction.gpus > 1:
        names = ("compute", "exposed_transfer", "exposed_wait", "bubble", "idle")
        compute, transfer, wait, bubble, idle = (
            sum(getattr(rank, f"{name}_seconds") * rank.multiplicity for rank in prediction.ranks) / prediction.gpus
            for name in names
        )
        yield (
            "mean rank",
            f"compute {milliseconds(compute)}, exposed communication {milliseconds(transfer + wait)} "
            f"({milliseconds(transfer)} transfer, {milliseconds(wait)} waiting), pipeline bubble "
            f"{milliseconds(bubble)}, idle {milliseconds(idle)}",
        )
    longest = prediction.longest_computing.rank
    which = f" (rank {longest}, the one that computes longest)" if several else ""
    parts = ", ".join(f"{name} {milliseconds(value)}" for name, value in phase_rows(prediction).items() if value > 0)
    yield "phases", f"{parts}{which}"
    yield (
        "GPU",
        f"active {milliseconds(prediction.gpu_active_seconds)}, idle {milliseconds(prediction.gpu_idle_seconds)}"
        f"{which}; {prediction.host_bound_fraction:.0%} of the critical path is on the host",
    )
    yield "launches", launches_text(prediction)
    yield from _memory(prediction)
    yield "host", ", ".join(f"{kind} {milliseconds(value)}" for kind, value in prediction.overheads.items())
    if prediction.overheads:
        yield "", overhead_meanings(prediction)
    sources = ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items())
    whole = "the device time of all ranks" if prediction.gpus > 1 else "the device time"
    yield "coverage", f"{sources} (share of {whole} by source of its price)"


def overhead_meanings(prediction: Prediction) -> str:
    """Explain the kinds of host time that occur in the step."""
    return ", ".join(f"{kind} {text}" for kind, text in OVERHEAD_MEANINGS.items() if kind in prediction.overheads)


def _memory(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the peak memory and whether it fits, and the parts of the fullest rank, largest first, as far as known."""
    peaks = [rank.peak_memory_bytes for rank in prediction.ranks if rank.peak_memory_bytes is not None]
    if peaks:
        fits = {"does not fit": "DOES NOT FIT", "not known": "not known for all ranks"}.get(
            prediction.memory_verdict, prediction.memory_verdict
        )
        least = f"{min(peaks) / 2**30:.2f} to " if len(prediction.ranks) > 1 else ""
        room = f"{prediction.memory_room_bytes / 2**30:.1f} GiB"
        in_use = max(rank.allocated_bytes or 0 for rank in prediction.ranks)
        # The allocator takes all room there is: on a full card the bytes in use tell whether it fits.
        full = in_use < max(peaks) and max(peaks) > largest_fitting(prediction.memory_room_bytes)
        kept = f" ({in_use / 2**30:.2f} GiB in use, the rest kept by the allocator)" if full else ""
        yield "memory", f"{least}{max(peaks) / 2**30:.2f} GiB at the peak{kept} of {room} for tensors: {fits}"
    parts = ", ".join(
        f"{MEMORY_ROLES.get(role, role)} {size / 2**30:.2f}"
        for role, size in sorted(prediction.memory_breakdown.items(), key=lambda item: -item[1])
        if size >= SMALLEST_PART
    )
    if parts:
        yield "", f"{parts} GiB{' (fullest rank)' if len(prediction.ranks) > 1 else ''}"


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Return the rows of the best settings under :data:`ADVICE_HEAD`."""
    rows: list[tuple[str, ...]] = []
    for each in advice.best:
        memory = "" if each.peak_memory_bytes is None else f"{each.peak_memory_bytes / 2**30:.1f} GiB"
        doubt = "" if each.fits or not memory else " (may not fit)"
        step, gain = milliseconds(each.iteration_seconds or 0.0), f"{each.gain or 0.0:.2f}x as fast"
        rows.append((each.change, step, gain, f"{memory}{doubt}", each.needs))
    return rows


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


def _other(each: Alternative, now_fits: bool | None) -> str:
    fits = ", does not fit" if each.fits is False else ", fits" if each.fits and not now_fits else ""
    return f"{each.change} {each.gain or 0.0:.2f}x{fits}"


def share_rows(parts: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return name, milliseconds and share of every part."""
    whole = sum(parts.values()) or 1.0
    return [(short_kernel_name(name), f"{value * 1e3:.3f}", f"{value / whole:.1%}") for name, value in parts.items()]


def path_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """Return the rows under :data:`PATH_HEAD`."""
    whole = prediction.critical_path_seconds or 1.0
    return [
        (
            part.kind,
            short_kernel_name(part.name),
            f"{part.seconds * 1e3:.3f}",
            f"{part.seconds / whole:.1%}",
            short_kernel_name(part.waits_for),
        )
        for part in prediction.critical_path
    ]


RANK_HEAD = (
    "rank", "alike", "step", "compute", "communication", "exposed", "waiting", "bubble", "idle", "on the path", "GiB",
)  # fmt: skip
PATH_MEANING = (
    "on the path: how much of the step's critical path lies on this rank (a transfer is counted for one of the ranks "
    "in it). The column sums to the step; the step never waits for a rank with 0"
)
COLLECTIVE_HEAD = (
    "collective", "ranks", "bytes", "count", "transfer ms", "by shared links ms", "mean wait ms", "longest wait ms",
    "source",
)  # fmt: skip


def rank_rows(ranks: Sequence[RankFigures]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`RANK_HEAD`, times in milliseconds; see :data:`PATH_MEANING` for the path."""
    return [_rank_row(rank) for rank in ranks]


def _rank_row(rank: RankFigures) -> tuple[str, ...]:
    seconds = (
        rank.step_seconds,
        rank.compute_seconds,
        rank.communication_seconds,
        rank.exposed_transfer_seconds,
        rank.exposed_wait_seconds,
        rank.bubble_seconds,
        rank.idle_seconds,
        rank.path_seconds,
    )
    memory = "" if rank.peak_memory_bytes is None else f"{rank.peak_memory_bytes / 2**30:.2f}"
    return (str(rank.rank), str(rank.multiplicity), *(f"{value * 1e3:.3f}" for value in seconds), memory)


def collective_rows(collectives: Sequence[CollectiveFigures]) -> list[tuple[str, ...]]:
    """Group collectives of equal kind, ranks and size, longest total first: counts, bytes, milliseconds."""
    groups: dict[tuple[str, int, int], list[CollectiveFigures]] = {}
    for each in collectives:
        groups.setdefault((each.kind, each.ranks, each.size_bytes), []).append(each)
    ordered = sorted(groups.items(), key=lambda item: -sum(each.transfer_seconds for each in item[1]))
    rows: list[tuple[str, ...]] = []
    for (kind, ranks, size), alike in ordered:
        waits = [wait for each in alike for wait in each.waiting_seconds.values()]
        rows.append(
            (
                kind,
                str(ranks),
                f"{size:,}",
                str(len(alike)),
                f"{1e3 * sum(each.transfer_seconds for each in alike):.3f}",
                f"{1e3 * sum(each.sharing_seconds for each in alike):.3f}",
                f"{1e3 * sum(waits) / len(waits):.3f}",
                f"{1e3 * max(waits):.3f}",
                alike[0].source,
            )
        )
    return rows


STRAGGLER_HEAD = ("rank", "came last in", "the next one waited ms")


def straggler_rows(stragglers: Sequence[Straggler]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`STRAGGLER_HEAD`."""
    return [(str(each.rank), str(each.collectives), f"{each.caused_seconds * 1e3:.3f}") for each in stragglers]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass
class OperatorRow:
    """Figures of one operator within one step."""

    name: str
    launches: int = 0
    # Device time, regardless of overlap.
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    # Time on the critical path.
    path_seconds: float = 0.0
    # Seconds by limiting resource.
    bounds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def bound(self) -> str:
        """Limiting resource of most of its device time."""
        return max(self.bounds, key=lambda name: self.bounds[name], default="")


def operator_rows(rank: RankGraph, path: CriticalPath) -> list[OperatorRow]:
    """Return rows, most device time first. ``path``: through all ranks, or the rank's own."""
    rows: dict[str, OperatorRow] = {}

    def row(name: str) -> OperatorRow:
        return rows.setdefault(name, OperatorRow(name))

    for (name, bound), seconds in device_seconds(
        rank, lambda task, duration: (_operator(rank, task.call, task.name), duration.bound or task.kind)
    ).items():
        row(name).device_seconds += seconds
        row(name).bounds[bound] += seconds
    for name, count in Counter(
        _operator(rank, each.call, each.name) for task in rank.tasks for each in (task.kernels or (task,))
    ).items():
        row(name).launches = count
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            call = rank.tasks[action.task].call if isinstance(action, Launch) else action.call
            if call is not None and call in rank.calls:
                row(rank.calls[call].name).host_seconds += action.duration.seconds
    for segment in path.segments:
        if segment.rank == rank.rank and segment.operator in rows:
            rows[segment.operator].path_seconds += segment.seconds
    return sorted(rows.values(), key=lambda each: (-each.device_seconds, -each.host_seconds))


def module_seconds(rank: RankGraph) -> Mapping[str, float]:
    """Device time by module, identical layers merged (``h.*.mlp``), in descending order.

    Empty if no module is known.
    """

    def module(call: int | None) -> str:
        return "" if call is None or call not in rank.calls else _NUMBER.sub("*", rank.calls[call].module)

    found = device_seconds(rank, lambda task, _: module(task.call))
    named = {name: seconds for name, seconds in found.items() if name}
    return named and {**named, **({"(none)": found[""]} if "" in found else {})}


def _operator(rank: RankGraph, call: int | None, name: str) -> str:
    return name if call is None or call not in rank.calls else rank.calls[call].name


RANGE_HEAD = (
    "named range", "entered", "launches", "forward ms", "backward ms", "other ms", "host ms", "on the path ms",
)  # fmt: skip
RANGE_MEANING = (
    "device time by pass; a backward operator counts for the ranges of its forward operator, what is inside of several "
    "ranges for each of them, and gradients that are only added up for none"
)


def range_rows(ranges: Sequence[RangeFigures]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`RANGE_HEAD`."""
    return [
        (
            each.name,
            f"{each.entered:,}",
            f"{each.launches:,}",
            *(f"{seconds * 1e3:.3f}" for seconds in _seconds(each)),
        )
        for each in ranges
    ]


def range_meaning(prediction: Prediction) -> str:
    """Explanation of the figures and of the rank that they are of."""
    which = f"of rank {prediction.longest_computing.rank}, which computes longest: " if prediction.gpus > 1 else ""
    return which + RANGE_MEANING


def _seconds(each: RangeFigures) -> tuple[float, ...]:
    return (each.forward_seconds, each.backward_seconds, each.other_seconds, each.host_seconds, each.path_seconds)


_PARTS = ("host", "device", "communication")


def what_if_cells(rows: Sequence[WhatIfRow]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows, one per question: step time, gain, and composition of the critical path."""
    resized = any(row.gain_per_sample is not None for row in rows)
    head = ["what if", "step", "80% interval", "gain (80%)", *(["per sample"] if resized else [])]
    head += [*(f"path: {name}" for name in _PARTS), "longest on it"]
    return head, [_cells(row, rows[0], resized) for row in rows]


def what_if_remarks(rows: Sequence[WhatIfRow]) -> Iterator[str]:
    """Yield the rows that cannot be told apart, each pair once."""
    if not rows:
        return
    if rows[0].gain_interval is None:
        yield "the step is too large to be simulated again for every cause of error: its gains have no intervals"
        return
    for place, row in enumerate(rows):
        others = [each.question for each in rows[place + 1 :] if each.question in row.alike]
        if others:
            yield f"not told apart (80 %): {row.question} and {', '.join(others)}"


def what_if_warnings(rows: Sequence[WhatIfRow]) -> Iterator[str]:
    """Yield the warnings of each answer, prefixed with its question."""
    for row in rows:
        for warning in row.warnings:
            yield f"{row.question}: {warning}"


def _cells(row: WhatIfRow, first: WhatIfRow, resized: bool) -> list[str]:
    low, high = row.interval_seconds
    cells = [
        row.question + (" (DOES NOT FIT)" if row.fits is False else ""),
        f"{row.iteration_seconds * 1e3:.3f} ms",
        f"{low * 1e3:.3f} to {high * 1e3:.3f}",
        # With another number of samples, the gain per sample matters.
        "" if row is first else _gain(row.gain, row.gain_interval if row.gain_per_sample is None else None),
    ]
    if resized:
        cells.append("" if row.gain_per_sample is None else _gain(row.gain_per_sample, row.gain_per_sample_interval))
    cells += [_share(first.shares[name], row.shares[name], row is first) for name in _PARTS]
    longest = row.longest.seconds / (sum(row.path_seconds.values()) or 1.0)
    return [*cells, f"{row.longest.kind} of {row.longest.name}, {longest:.0%}"]


def _gain(gain: float, interval: tuple[float, float] | None) -> str:
    return f"{gain:.2f}x" if interval is None else f"{gain:.2f}x ({interval[0]:.2f}-{interval[1]:.2f})"


def _share(before: float, now: float, first: bool) -> str:
    return f"{before:.0%}" if first else f"{before:.0%} -> {now:.0%}"
