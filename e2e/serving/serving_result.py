"""Figures of an answer: latencies, throughput, what limits them, how sure they are; what ``--json`` prints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from costmodel.cost_model import Estimate
from costmodel.gpu.families.rates import dense_peak, dram_bandwidth
from costmodel.machines.machine_records import Machine
from e2e.serving.serving_answer import ServingAnswer
from e2e.serving.step_price import Prompt
from e2e.serving.step_work import Work
from e2e.serving.workload import weighted_quantiles

# Share of measured runs that an interval is meant to hold.
PROBABILITY = 0.8
# A cache that is this full on average, while requests wait, is what limits.
_FULL = 0.85
# The wait for the first token grows by this factor from the second to the last third of an overloaded run.
_GROWS, _LEAST_OF_A_TREND = 1.25, 30
_LIMITS = {"compute": "arithmetic", "launch": "kernel latency", "latency": "kernel latency"}


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    def __getitem__(self, name: str) -> float:
        return float(getattr(self, name))


@dataclass(frozen=True)
class StepFigures:
    """One typical step: ``sequences`` decode after ``context`` tokens, or ``tokens`` of prompts are computed."""

    sequences: int
    context: int
    tokens: int
    seconds: float
    # Of them: the GPU's, and what the step adds to it (0 where the host prepares steps in time).
    device_seconds: float
    host_seconds: float
    # Seconds of the GPU by part of the layer, and by what limits the kernels.
    parts: Mapping[str, float]
    limits: Mapping[str, float]
    # Share of the GPU's time in kernels whose price is measured, fitted to measurements, or analytic.
    sources: Mapping[str, float]
    # Share of the memory's bandwidth and of the datasheet's arithmetic that the GPU reaches (MFU).
    bandwidth_share: float
    arithmetic_share: float
    # Factors of the GPU's time within which it lies.
    lower: float
    upper: float


@dataclass(frozen=True)
class ServingResult:
    """What a deployment gives its users under a load; seconds and bytes."""

    request: Mapping[str, Any]
    engine: str
    fits: bool
    ttft_seconds: Spread
    tpot_seconds: Spread
    # Time between tokens as they arrive, and of whole requests.
    itl_seconds: Spread
    request_seconds: Spread
    # Where the mean lies with ``interval_probability``.
    ttft_interval_seconds: tuple[float, float]
    tpot_interval_seconds: tuple[float, float]
    output_tokens_per_second_interval: tuple[float, float]
    interval_probability: float
    output_tokens_per_second: float
    output_tokens_per_second_per_gpu: float
    # Output tokens that one user gets per second once the first is there.
    tokens_per_second_per_user: float
    requests_per_second: float
    requests: int
    seconds: float
    # Requests that meet --ttft and --tpot: their share and number per second; None without targets.
    goodput: Mapping[str, float] | None
    # What limits, and the share of the time of each limit.
    bound: str
    bound_shares: Mapping[str, float]
    # More requests arrive than are served: latencies grow as long as the run lasts.
    overloaded: bool
    # Tokens that the cache holds, share in use on average and at most, sequences preempted.
    cache: Mapping[str, float]
    # Bytes of the fullest GPU: usable, weights, activations, reserve, cache.
    memory: Mapping[str, float]
    decode_step: StepFigures
    prefill_step: StepFigures
    # Share of the GPU's time in kernels from tables, fitted to tables, and by physics alone.
    coverage: Mapping[str, float]
    # Share of the tokens of prompts that were in the prefix cache; None where no prompts begin alike.
    prefix_hit_rate: float | None
    # Relative error of the steps' tabulated times against times priced step by step: median and largest of some.
    step_table_error: tuple[float, float]
    # What was assumed.
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """The record as ``--json`` prints it."""
        return asdict(self)


def serving_result(answer: ServingAnswer) -> ServingResult:
    """Return the figures of ``answer``."""
    run, load, request = answer.run, answer.workload, answer.request
    ttft, tpot = answer.ttft_seconds, answer.tpot_seconds
    whole = ttft + run.last - run.first
    several = load.outputs > 1
    seconds = float(run.last.max() - run.sent.min())
    decode, prefill = decode_figures(answer), prefill_figures(answer)
    # Shares of the engine's time in the work of single tokens and of prompts.
    decoding = min(run.steps * decode.seconds / max(run.busy, 1e-12), 1.0)
    work = ((decode, decoding), (prefill, 1 - decoding))
    limits, coverage = _limits(work), _coverage(work)
    room = max(answer.room.tokens, 1)
    occupied = min(run.cached_seconds / max(run.busy, 1e-12) / room, 1.0)
    overloaded = _overloaded(answer, ttft)
    running = float((run.last - run.first).sum()) / max(float(run.last.max() - run.first.min()), 1e-12)
    waits = overloaded or (load.arrivals is None and running < 0.9 * load.concurrency)
    bound = "cache" if occupied > _FULL and waits else next(iter(limits))
    tpot_spread = _spread(tpot[several] if several.any() else np.zeros(1))
    tokens = float(load.outputs.sum()) / seconds
    gpus, error = answer.gpus, answer.table_error()
    first, per_token = latency_intervals(answer, decode, prefill)
    faster, slower = ((first[end] + (load.outputs.mean() - 1) * per_token[end]) / whole.mean() for end in (0, 1))
    follows = load.arrivals is None or overloaded
    met = float(((ttft <= (request.ttft or math.inf)) & (tpot <= (request.tpot or math.inf))).mean())
    goodput = {"share": met, "requests_per_second": met * load.count / seconds}
    return ServingResult(
        request=request.to_json(),
        engine=answer.deployment.engine.title + (f" {answer.deployment.engine.version}".rstrip()),
        fits=True,
        ttft_seconds=_spread(ttft),
        tpot_seconds=tpot_spread,
        itl_seconds=_gaps(run.gaps, run.gap_tokens),
        request_seconds=_spread(whole),
        ttft_interval_seconds=first,
        tpot_interval_seconds=per_token,
        output_tokens_per_second_interval=(tokens / slower, tokens / faster) if follows else (tokens, tokens),
        interval_probability=PROBABILITY,
        output_tokens_per_second=tokens,
        output_tokens_per_second_per_gpu=tokens / gpus,
        tokens_per_second_per_user=1 / tpot_spread.mean if tpot_spread.mean else 0.0,
        requests_per_second=load.count / seconds,
        requests=load.count,
        seconds=seconds,
        goodput=None if request.ttft is None and request.tpot is None else goodput,
        bound=bound,
        bound_shares=limits,
        overloaded=overloaded,
        cache={
            "tokens": answer.room.tokens, "used_share": occupied,
            "most_used_share": min(max(run.most_cached / room, occupied), 1.0), "preempted": run.preempted,
        },
        memory=answer.room.memory(),
        decode_step=decode,
        prefill_step=prefill,
        coverage=coverage,
        prefix_hit_rate=run.prefix_hits / run.prompt_tokens if load.prefixes is not None else None,
        step_table_error=(error.median, error.largest),
        notes=_notes(answer, coverage.get("analytic", 0.0), overloaded),
    )  # fmt: skip


def _spread(values: np.ndarray) -> Spread:
    return Spread(float(values.mean()), *(float(each) for each in np.quantile(values, (0.5, 0.9, 0.99))))


def _gaps(gaps: Sequence[float], weights: Sequence[float]) -> Spread:
    if not sum(weights):
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(float(np.average(gaps, weights=weights)), *weighted_quantiles(gaps, weights, (0.5, 0.9, 0.99)))


def decode_figures(answer: ServingAnswer) -> StepFigures:
    """The typical decoding step: as many sequences, after as many tokens, as a step has on average."""
    load, run = answer.workload, answer.run
    weights = np.maximum(run.last - run.first, 1e-12)
    context = round(float(np.average(load.inputs + load.outputs / 2, weights=weights)))
    tokens = float((load.outputs - 1).sum()) / answer.price.tokens_per_step / max(run.steps, 1)
    sequences = max(round(min(tokens, answer.deployment.engine.sequences)), 1)
    return _figures(answer, sequences, context, 0)


def prefill_figures(answer: ServingAnswer) -> StepFigures:
    """The typical step of prompts alone: the token budget, or all prompts if they have fewer tokens."""
    load = answer.workload
    return _figures(answer, 0, 0, int(min(answer.deployment.engine.token_budget, load.inputs.sum())))


def _figures(answer: ServingAnswer, sequences: int, context: int, tokens: int) -> StepFigures:
    price = answer.price
    prompts: list[Prompt] = []
    if tokens:
        each = max(int(min(answer.workload.inputs.mean(), tokens)), 1)
        prompts = [Prompt(each)] * max(tokens // each, 1)
        tokens = each * len(prompts)
    found = price.estimates(price.listed(sequences, context, prompts))
    device = sum(each.count * estimate.seconds for each, estimate in found) or 1e-12
    host = price.step_seconds(sequences, context, prompts) - price.device_seconds(sequences, context, prompts)
    machine = answer.deployment.cluster.machine
    arithmetic = sum(each.count * _least_seconds(each, machine) for each, _ in found)
    moved = sum(each.count * _bytes(each) for each, _ in found)
    return StepFigures(
        sequences, context, tokens, device + host, device, host,
        parts=_by(found, lambda each, estimate: each.part),
        limits=_by(found, _limit),
        sources={name: value / device for name, value in _by(found, lambda each, estimate: estimate.source).items()},
        bandwidth_share=moved / device / dram_bandwidth(machine),
        arithmetic_share=arithmetic / device,
        **dict(zip(("lower", "upper"), _factors(found, device), strict=True)),
    )  # fmt: skip


def _bytes(each: Work) -> float:
    return float(getattr(each.operator, "read_bytes", 0)) + float(getattr(each.operator, "write_bytes", 0))


def _least_seconds(each: Work, machine: Machine) -> float:
    """Seconds of the arithmetic at the datasheet's rate of the operator's number type."""
    operator = each.operator
    peak = dense_peak(machine, getattr(operator, "dtype", "")) or dense_peak(machine, "bfloat16") or math.inf
    return float(getattr(operator, "flops", 0)) / peak


def _limit(each: Work, estimate: Estimate) -> str:
    if each.part in ("all-reduce", "all-to-all") or not hasattr(each.operator, "flops"):
        return "interconnect"
    return _LIMITS.get(estimate.bound, "memory bandwidth" if estimate.memory_bound else "kernel latency")


def _by(found: Iterable[tuple[Work, Estimate]], name: Any) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for each, estimate in found:
        sums[name(each, estimate)] += each.count * estimate.seconds
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _factors(found: Iterable[tuple[Work, Estimate]], device: float) -> tuple[float, float]:
    """Factors of the GPU's time: errors within a family of kernels are the same, those of families independent."""
    below: dict[type, float] = defaultdict(float)
    above: dict[type, float] = defaultdict(float)
    for each, estimate in found:
        below[type(each.operator)] += each.count * (estimate.seconds - estimate.lower)
        above[type(each.operator)] += each.count * (estimate.upper - estimate.seconds)
    return 1 - math.hypot(*below.values()) / device, 1 + math.hypot(*above.values()) / device


def latency_intervals(
    answer: ServingAnswer, decode: StepFigures | None = None, prefill: StepFigures | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the mean time to the first token, and that per output token, lie with :data:`PROBABILITY`."""
    engine, outputs = answer.deployment.engine, answer.workload.outputs
    several = answer.tpot_seconds[outputs > 1]
    mean = float(several.mean()) if several.size else 0.0
    per_token = _interval(mean, decode or decode_figures(answer), engine.band_tpot)
    return _interval(float(answer.ttft_seconds.mean()), prefill or prefill_figures(answer), engine.band_ttft), per_token


def _interval(mean: float, step: StepFigures, band: float) -> tuple[float, float]:
    """Where ``mean`` lies: errors of kernels, as far as they are part of the step, and of runs are independent."""
    share = step.device_seconds / step.seconds
    lower, upper = 1 - share * (1 - max(step.lower, 0.01)), 1 + share * (step.upper - 1)
    return (
        mean * math.exp(-math.hypot(math.log(lower), math.log(band))),
        mean * math.exp(math.hypot(math.log(upper), math.log(band))),
    )


def _limits(work: Iterable[tuple[StepFigures, float]]) -> dict[str, float]:
    """Share of the time of each limit, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for step, share in work:
        for name, seconds in [*step.limits.items(), ("host", step.host_seconds)]:
            sums[name] += share * seconds / step.seconds
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _coverage(work: Iterable[tuple[StepFigures, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for step, share in work:
        for name, part in step.sources.items():
            sums[name] += share * part
    return dict(sums)


def _overloaded(answer: ServingAnswer, ttft: np.ndarray) -> bool:
    """Whether requests arrive faster than they are served: their wait grows to the end of the run."""
    if answer.workload.arrivals is None or len(ttft) < _LEAST_OF_A_TREND:
        return False
    middle, last = (float(each.mean()) for each in np.array_split(ttft, 3)[1:])
    return last > _GROWS * middle and last > 3 * float(np.quantile(ttft, 0.02))


def _notes(answer: ServingAnswer, analytic: float, overloaded: bool) -> list[str]:
    deployment, request = answer.deployment, answer.request
    precision, engine = deployment.precision, deployment.engine
    stored = f"weights {precision.weights}"
    if deployment.model.expert_parameters:
        stored += f", experts {precision.experts}"
    found = [f"{stored}, activations {precision.activations}, cache {precision.kv}"]
    if not engine.version:
        found.append(
            f"{engine.title}: the newest version that is known; name yours with --engine {engine.name}=VERSION"
        )
    if request.disaggregate:
        # Copies that decode are the first.
        split, spent = answer.split, answer.run.busy_seconds
        span = float(answer.run.last.max())
        decoding = sum(spent[: split.decode]) / split.decode / span
        prompts = sum(spent[split.decode :]) / split.prefill / span
        found.append(f"copies for prompts compute {prompts:.0%} of the time, those for decoding {decoding:.0%}")
    if deployment.model.expert_parameters:
        found.append(f"tokens choose experts by the distribution {request.routing} (--routing)")
    if request.concurrency is None and request.rate is None and request.trace is None:
        found.append("one user (--concurrency, --rate or --requests FILE for more)")
    if answer.workload.longest > deployment.model.longest:
        found.append(
            f"requests of up to {answer.workload.longest:,} tokens are longer than the {deployment.model.longest:,} of "
            "max_position_embeddings: engines take them only if they are told to"
        )
    if analytic > 0.3:
        found.append(
            f"{analytic:.0%} of the GPU's time is priced by physics alone: no table has these kernels on this GPU"
        )
    if overloaded:
        found.append("overloaded: more requests arrive than are served, so latencies grow with the length of the run")
    if answer.workload.concurrency > engine.sequences:
        found.append(f"{engine.title} runs {engine.sequences} sequences at once; the others wait")
    return found
