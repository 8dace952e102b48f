"""Figures of an answer: latencies, throughput, what limits them, how sure they are; what ``--json`` prints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from costmodel.cost_model import Estimate
from costmodel.gpu.families.rates import dense_peak, dram_bandwidth
from e2e.serving.serving_answer import ServingAnswer, split_of
from e2e.serving.step_price import Prompt, table_error
from e2e.serving.step_work import Work

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

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray, weights: Sequence[float] | None = None) -> Spread:
        """The spread of ``values``, of which each counts ``weights`` times; all zero if there are none."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        method: Literal["linear", "inverted_cdf"] = "linear" if weights is None else "inverted_cdf"
        quantiles = np.quantile(values, (0.5, 0.9, 0.99), weights=weights, method=method)
        return cls(float(np.average(values, weights=weights)), *quantiles.tolist())

    def __getitem__(self, name: str) -> float:
        return float(getattr(self, name))


@dataclass(frozen=True)
class StepFigures:
    """One typical step: ``sequences`` decode after ``context`` tokens, or ``tokens`` of prompts are computed."""

    sequences: int
    context: int
    tokens: int
    seconds: float
    device_seconds: float  # the GPU's
    host_seconds: float  # what the step adds to them; 0 where the host prepares steps in time
    parts: Mapping[str, float]  # seconds of the GPU by part of the layer
    limits: Mapping[str, float]  # and by what limits the kernels
    sources: Mapping[str, float]  # share of them whose price is measured, fitted to measurements, or analytic
    bandwidth_share: float  # of the datasheet's memory bandwidth
    arithmetic_share: float  # of the datasheet's arithmetic (MFU)
    lower: float  # factors of the GPU's time within which it lies
    upper: float


@dataclass(frozen=True)
class ServingResult:
    """What a deployment gives its users under a load; seconds and bytes."""

    request: Mapping[str, Any]
    engine: str
    gpus: int  # of all copies
    fits: bool
    ttft_seconds: Spread
    tpot_seconds: Spread
    itl_seconds: Spread  # time between tokens as they arrive
    request_seconds: Spread  # of whole requests
    ttft_interval_seconds: tuple[float, float]  # where the mean lies with ``interval_probability``
    tpot_interval_seconds: tuple[float, float]
    output_tokens_per_second_interval: tuple[float, float]
    interval_probability: float
    output_tokens_per_second: float
    output_tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float  # output tokens once the first is there
    requests_per_second: float
    requests: int
    seconds: float
    goodput: Mapping[str, float] | None  # share and number per second of requests that meet the targets
    bound: str  # what limits
    bound_shares: Mapping[str, float]  # share of the time of each limit
    overloaded: bool  # more requests arrive than are served: latencies grow as long as the run lasts
    cache: Mapping[str, float]  # tokens that it holds, share in use on average and at most, sequences preempted
    memory: Mapping[str, float]  # bytes of the fullest GPU: usable, weights, activations, reserve, cache
    decode_step: StepFigures
    prefill_step: StepFigures
    coverage: Mapping[str, float]  # share of the GPU's time by source of its price, as ``StepFigures.sources``
    prefix_hit_rate: float | None  # share of the prompts' tokens in the prefix cache; None where none begin alike
    step_table_error: tuple[float, float] | None  # of tabulated steps: median and largest of some, if asked for
    notes: Sequence[str]  # what was assumed

    def to_json(self) -> dict[str, Any]:
        """The record as ``--json`` prints it."""
        return asdict(self)


def serving_result(answer: ServingAnswer, *, with_table_error: bool = True) -> ServingResult:
    """Return the figures of ``answer``; the error of tabulated steps takes longer than all others."""
    run, load, request = answer.run, answer.workload, answer.request
    ttft, tpot = answer.ttft_seconds, Spread.of(answer.tpot_seconds[load.outputs > 1])
    whole = ttft + run.last - run.first
    engine = answer.deployment.engine
    seconds = float(run.last.max() - run.sent.min())
    tokens = float(load.outputs.sum()) / seconds
    decode, prefill = decode_figures(answer), prefill_figures(answer)
    first = _interval(float(ttft.mean()), prefill, engine.band_ttft)
    per_token = _interval(tpot.mean, decode, engine.band_tpot)
    overloaded = _overloaded(answer, ttft)
    # Users wait for answers: faster steps are more throughput.
    follows = load.arrivals is None or overloaded
    faster, slower = (
        (first[end] + (load.outputs.mean() - 1) * per_token[end]) / whole.mean() if follows else 1.0 for end in (0, 1)
    )
    # Shares of the engine's time in the work of single tokens and of prompts.
    decoding = min(run.steps * decode.seconds / max(run.busy, 1e-12), 1.0)
    steps = ((decode, decoding), (prefill, 1 - decoding))
    limits = _sums((name, share * seconds / step.seconds) for step, share in steps
                   for name, seconds in (*step.limits.items(), ("host", step.host_seconds)))  # fmt: skip
    coverage = _sums((name, share * part) for step, share in steps for name, part in step.sources.items())
    room = max(answer.room.tokens, 1)
    occupied = min(run.cached_seconds / max(run.busy, 1e-12) / room, 1.0)
    running = float((run.last - run.first).sum()) / max(float(run.last.max() - run.first.min()), 1e-12)
    waits = overloaded or (load.arrivals is None and running < 0.9 * load.concurrency)
    met = float(((ttft <= (request.ttft or math.inf)) & (answer.tpot_seconds <= (request.tpot or math.inf))).mean())
    goodput = {"share": met, "requests_per_second": met * load.count / seconds}
    return ServingResult(
        request=request.to_json(),
        engine=f"{engine.title} {engine.version}".rstrip(),
        gpus=answer.gpus,
        fits=True,
        ttft_seconds=Spread.of(ttft),
        tpot_seconds=tpot,
        itl_seconds=Spread.of(run.gaps, run.gap_tokens),
        request_seconds=Spread.of(whole),
        ttft_interval_seconds=first,
        tpot_interval_seconds=per_token,
        output_tokens_per_second_interval=(tokens / slower, tokens / faster),
        interval_probability=PROBABILITY,
        output_tokens_per_second=tokens,
        output_tokens_per_second_per_gpu=tokens / answer.gpus,
        tokens_per_second_per_user=1 / tpot.mean if tpot.mean else 0.0,
        requests_per_second=load.count / seconds,
        requests=load.count,
        seconds=seconds,
        goodput=None if request.ttft is None and request.tpot is None else goodput,
        bound="cache" if occupied > _FULL and waits else next(iter(limits)),
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
        step_table_error=_table_error(answer) if with_table_error else None,
        notes=_notes(answer, coverage.get("analytic", 0.0), overloaded),
    )  # fmt: skip


def _table_error(answer: ServingAnswer) -> tuple[float, float]:
    """Error of tabulated steps, over steps like those of this run."""
    load, steps = answer.workload, max(answer.run.steps, 1)
    sequences = max(round(min(float(load.outputs.sum()) / steps, answer.most_sequences)), 1)
    contexts = int(load.inputs.min()), int((load.inputs + load.outputs).max())
    return table_error(answer.price, sequences, contexts, int(load.inputs.max()))


def decode_figures(answer: ServingAnswer) -> StepFigures:
    """The typical decoding step: as many sequences, after as many tokens, as a step has on average."""
    load, run = answer.workload, answer.run
    weights = np.maximum(run.last - run.first, 1e-12)
    context = round(float(np.average(load.inputs + load.outputs / 2, weights=weights)))
    tokens = float((load.outputs - 1).sum()) / answer.price.tokens_per_step / max(run.steps, 1)
    return _figures(answer, max(round(min(tokens, answer.most_sequences)), 1), context)


def prefill_figures(answer: ServingAnswer) -> StepFigures:
    """The typical step of prompts alone: the token budget, or all prompts if they have fewer tokens."""
    inputs = answer.workload.inputs
    tokens = int(min(answer.deployment.engine.token_budget, inputs.sum()))
    each = max(int(min(inputs.mean(), tokens)), 1)
    return _figures(answer, 0, 0, [Prompt(each)] * max(tokens // each, 1))


def _figures(answer: ServingAnswer, sequences: int, context: int, prompts: Sequence[Prompt] = ()) -> StepFigures:
    price, machine = answer.price, answer.deployment.cluster.machine
    found = price.estimates(price.listed(sequences, context, prompts))
    device = sum(each.count * estimate.seconds for each, estimate in found) or 1e-12
    host = price.step_seconds(sequences, context, prompts) - price.device_seconds(sequences, context, prompts)
    half = dense_peak(machine, "bfloat16") or math.inf
    arithmetic = moved = 0.0
    for each, _ in found:
        operator: Any = each.operator
        peak = dense_peak(machine, getattr(operator, "dtype", "")) or half
        arithmetic += each.count * float(getattr(operator, "flops", 0)) / peak
        moved += each.count * float(getattr(operator, "read_bytes", 0) + getattr(operator, "write_bytes", 0))
    # Errors within a family of kernels are the same, those of families independent.
    below = _sums((type(each.operator), each.count * (estimate.seconds - estimate.lower)) for each, estimate in found)
    above = _sums((type(each.operator), each.count * (estimate.upper - estimate.seconds)) for each, estimate in found)
    return StepFigures(
        sequences, context, sum(each.queries for each in prompts), device + host, device, host,
        parts=_sums((each.part, each.count * estimate.seconds) for each, estimate in found),
        limits=_sums((_limit(each, estimate), each.count * estimate.seconds) for each, estimate in found),
        sources=_sums((estimate.source, each.count * estimate.seconds / device) for each, estimate in found),
        bandwidth_share=moved / device / (machine.memory[-1].datasheet or dram_bandwidth(machine)),
        arithmetic_share=arithmetic / device,
        lower=1 - math.hypot(*below.values()) / device,
        upper=1 + math.hypot(*above.values()) / device,
    )  # fmt: skip


def _sums(parts: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Sum of the values of each name, the largest first."""
    sums: dict[Any, float] = defaultdict(float)
    for name, value in parts:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _limit(each: Work, estimate: Estimate) -> str:
    if each.part in ("all-reduce", "all-to-all") or not hasattr(each.operator, "flops"):
        return "interconnect"
    return _LIMITS.get(estimate.bound, "memory bandwidth" if estimate.memory_bound else "kernel latency")


def _interval(mean: float, step: StepFigures, band: float) -> tuple[float, float]:
    """Where ``mean`` lies with :data:`PROBABILITY`: errors of kernels, as far as they are part of the step, and of runs
    are independent.
    """
    share = step.device_seconds / step.seconds
    lower, upper = 1 - share * (1 - max(step.lower, 0.01)), 1 + share * (step.upper - 1)
    return (
        mean * math.exp(-math.hypot(math.log(lower), math.log(band))),
        mean * math.exp(math.hypot(math.log(upper), math.log(band))),
    )


def _overloaded(answer: ServingAnswer, ttft: np.ndarray) -> bool:
    """Whether requests arrive faster than they are served: their wait grows to the end of the run."""
    if answer.workload.arrivals is None or len(ttft) < _LEAST_OF_A_TREND:
        return False
    middle, last = (float(each.mean()) for each in np.array_split(ttft, 3)[1:])
    return last > _GROWS * middle and last > 3 * float(np.quantile(ttft, 0.02))


def _notes(answer: ServingAnswer, analytic: float, overloaded: bool) -> list[str]:
    request, load, model = answer.request, answer.workload, answer.deployment.model
    precision, engine = answer.deployment.precision, answer.deployment.engine
    experts = f", experts {precision.experts}" * model.has_experts
    alone = request.concurrency is None and request.rate is None and request.trace is None
    told = {
        f"weights {precision.weights}{experts}, activations {precision.activations}, cache {precision.kv}": True,
        f"{engine.title}: the newest version that is known; name yours with --engine {engine.name}=VERSION":
            not engine.version,
        f"{engine.title} {engine.version} is taken as NVIDIA's recipes start it behind Dynamo"
        + f": a budget of {engine.token_budget:,} tokens" * (engine.beside_prompt > 0)
        + "; name a later version for its own server": engine.in_dynamo,
        _busy_copies(answer): bool(request.disaggregate),
        f"tokens choose experts by the distribution {request.routing} (--routing)": model.has_experts,
        "one user (--concurrency, --rate or --requests FILE for more)": alone,
        f"{load.unanswered:,} requests of the trace have no answer and are left out": load.unanswered > 0,
        f"requests of up to {load.longest:,} tokens are longer than the {model.longest:,} of max_position_embeddings: "
        "engines take them only if they are told to": load.longest > model.longest,
        f"{analytic:.0%} of the GPU's time is priced by physics alone: no table has these kernels on this GPU":
            analytic > 0.3,
        "overloaded: more requests arrive than are served, so latencies grow with the length of the run": overloaded,
        f"{engine.title} runs {answer.most_sequences} sequences at once; the others wait":
            load.concurrency > answer.most_sequences,
    }  # fmt: skip
    return [text for text, holds in told.items() if holds]


def _busy_copies(answer: ServingAnswer) -> str:
    """How busy both kinds of copies are; those that decode are the first."""
    split, spent, span = split_of(answer.request), answer.run.busy_seconds, float(answer.run.last.max())
    if not split:
        return ""
    decoding, prompts = sum(spent[: split.decode]) / split.decode, sum(spent[split.decode :]) / split.prefill
    return f"copies for prompts compute {prompts / span:.0%} of the time, those for decoding {decoding / span:.0%}"
