"""Advice on a predicted step: other settings that help, and the largest batch whose memory fits.

Other settings are predicted one after another. Each is a :class:`Change`, a modified request. The largest batch
needs only memory estimates, no pricing or simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from costmodel.base.errors import ProjectError
from costmodel.machines.cluster import load_gpu
from e2e.explain.prediction import (
    TOGETHER,
    WORTH_TELLING,
    Advice,
    Alternative,
    LargestBatch,
    Prediction,
    sort_alternatives,
)
from e2e.explain.predictor import PredictionResult
from e2e.parallelism.spec import ParallelSpec, text_of
from e2e.sources.predict_request import predict_request
from e2e.sources.requests import Model, Program, Recording, Request, Script, ScriptJob, SpreadModel, Trace
from e2e.step.memory_room import largest_fitting
from e2e.step.options import Dtype

Modelled = Model | SpreadModel
Scripted = Script | ScriptJob
# Factors by which larger batches are tried.
_LARGER = (2, 4)


@dataclass(frozen=True)
class Change:
    """One change of a request."""

    # Only one of several changes of a kind can be chosen.
    kind: str
    # Text of the change, as on the command line.
    change: str
    # Requirements, in words.
    needs: str
    # Function that makes the changed request.
    apply: Callable[[Request], Request]


def batch_of(request: Request, prediction: Prediction) -> int | None:
    """Samples per GPU and micro-batch of ``request``, ``None`` if they cannot be changed."""
    if prediction.throughput is None:
        return None
    if isinstance(request, Scripted):
        return prediction.throughput.batch_size
    return request.samples if isinstance(request, Modelled) else None


def with_batch(request: Request, size: int) -> Request:
    """Return ``request`` with another number of samples per GPU and micro-batch."""
    return _with(request, batch_size=size)


def _with(request: Request, **values: Any) -> Request:
    return replace(request, **values)


def batch_change(size: int) -> Change:
    """Return the change to another number of samples per GPU and micro-batch."""
    needs = "another global batch (or fewer micro-batches) and the learning rate that goes with it"
    return Change("batch", f"--batch-size {size}", needs, lambda request: with_batch(request, size))


def possible_changes(request: Request, prediction: Prediction) -> list[Change]:
    """Return all settings that ``request`` could have instead of its own, helpful or not."""
    found = [*_number_types(request, prediction), *_kernels(request, prediction)]
    if isinstance(request, SpreadModel) and request.parallel is not None:
        found += _parallel(request.parallel, request.samples)
    size = batch_of(request, prediction)
    if size is not None and prediction.fits is not False:
        found += [batch_change(size * factor) for factor in _LARGER]
    return found


def _configured(kind: str, change: str, needs: str, **values: object) -> Change:
    """Return a change of some options."""
    return Change(kind, change, needs, lambda request: _with(request, **values))


def _number_types(request: Request, prediction: Prediction) -> Iterator[Change]:
    machine = load_gpu(getattr(request, "gpu", ""))
    used, dtype = prediction.utilisation, getattr(request, "dtype", None) or "float32"
    in_32_bits = used is None or not used.peak_flops_per_second or "float32" in used.peak_flops_per_second
    if not hasattr(request, "dtype"):  # a program sets its own
        return
    if dtype == "float32" and "tf32" in machine.compute and in_32_bits:
        needs = 'torch.set_float32_matmul_precision("high"): products keep 10 bits of their mantissa'
        yield _configured("dtype", "--dtype tf32", needs, dtype="tf32")
    if dtype not in ("float32", "tf32") or not isinstance(request, Modelled) or request.precision is not None:
        return
    half: Dtype = "bfloat16" if "bfloat16" in machine.compute else "float16"
    if half in machine.compute:
        scaled = "" if half == "bfloat16" else " and a loss scaler"
        needs = f"weights and activations in 16 bits{scaled}; compare the loss of a short run"
        yield _configured("dtype", f"--dtype {half}", needs, dtype=half)


def _kernels(request: Request, prediction: Prediction) -> Iterator[Change]:
    rate = prediction.throughput
    sequences = rate is not None and rate.sequence_length is not None
    if isinstance(request, Modelled) and sequences and request.attention in (None, "eager", "math"):
        needs = 'attn_implementation="sdpa" (scaled_dot_product_attention), no attention weights as output'
        yield _configured("attention", "--attention flash", needs, attention="flash")
    if isinstance(request, Model) and request.model and rate is not None and not sequences:
        needs = "model and images .to(memory_format=torch.channels_last)"
        if request.layout == "contiguous" and not request.model.startswith("dlrm"):
            yield _configured("layout", "--layout channels-last", needs, layout="channels-last")
    if isinstance(request, Modelled | Script | Program | Trace) and not request.compile:
        needs = "torch.compile of the model; shapes that stay the same, or it compiles again"
        yield _configured("compile", "--compile", needs, compile=True)
    default = any(each.option == "--optimizer" and each.value.startswith("foreach") for each in prediction.asked)
    trained = isinstance(request, Modelled | Scripted) and request.mode == "train" and request.optimizer is None
    if trained and (default or isinstance(request, Scripted)):
        yield _configured("optimizer", "--optimizer fused", "fused=True of the optimizer", optimizer="fused")
    if not request.cuda_graph and not isinstance(request, SpreadModel):
        needs = "torch.cuda.graph around the step: fixed shapes, no values read by the host, capturable=True of AdamW"
        yield _configured("graph", "--cuda-graph", needs, cuda_graph=True)


def _parallel(spec: ParallelSpec, batch: int) -> Iterator[Change]:
    """Yield other ways to spread the same model over as many GPUs."""
    for kind, needs, other, size in _spreads(spec, batch):
        text = f"--parallel {text_of(other)}" + ("" if size == batch else f" --batch-size {size}")
        sizes = {} if size == batch else {"batch_size": size}
        yield _configured(kind, text, needs, parallel=other, **sizes)


def _spreads(spec: ParallelSpec, batch: int) -> Iterator[tuple[str, str, ParallelSpec, int]]:
    """Yield kind of change, requirements, spec, and samples of one micro-batch."""
    if spec.recompute == "none":
        yield "recompute", "less memory, for a larger batch", replace(spec, recompute="full"), batch
    else:
        yield "recompute", "more memory", replace(spec, recompute="none", recompute_every=1), batch
    if spec.sharing == 3:
        yield (
            "zero",
            "gradients and optimizer state shared, parameters whole: more memory",
            replace(spec, zero=2),
            batch,
        )
        yield (
            "zero",
            "the gathers of two layers ahead: memory for both",
            replace(spec, prefetch=spec.prefetch + 1),
            batch,
        )
    elif spec.sharing and not spec.overlap_gather:
        yield "zero", "parameters gathered beside the forward pass", replace(spec, overlap_gather=True), batch
    elif spec.dp > 1 and not spec.sharing and not spec.overlap:
        yield "overlap", "gradients reduced beside the backward pass (DDP)", replace(spec, overlap=True), batch
    if spec.tp > 1 and not spec.sequence_parallel:
        yield "tp", "sequence parallelism of the tensor-parallel ranks", replace(spec, sequence_parallel=True), batch
    elif spec.sequence_parallel and not spec.tp_overlap:
        needs = "tensor-parallel communication cut into pieces beside products (async TP, user buffers)"
        yield "tp", needs, replace(spec, tp_overlap=True), batch
    for name in ("tp", "pp"):
        degree = getattr(spec, name)
        if degree % 2 == 0:
            other, size = _halved(spec, batch, name)
            yield "degrees", f"half of {name}, twice the replicas: more memory per GPU", other, size
    if spec.pp > 1 and batch % 2 == 0:
        other = replace(spec, micro_batches=2 * spec.micro_batches)
        yield "micro-batches", "the same batch in smaller micro-batches", other, batch // 2


def _halved(spec: ParallelSpec, batch: int, name: str) -> tuple[ParallelSpec, int]:
    """Return ``spec`` with half the degree ``name`` and twice the replicas, and the samples of one micro-batch.

    Micro-batches, or the samples in each, are halved so that a step has as many samples; if neither divides, it has
    twice as many.
    """
    shared = "fsdp" if spec.sharing else "dp"
    values: dict[str, int] = {name: getattr(spec, name) // 2, shared: 2 * getattr(spec, shared)}
    if spec.micro_batches % 2 == 0:
        values["micro_batches"] = spec.micro_batches // 2
    elif batch % 2 == 0:
        batch //= 2
    other = replace(spec, **values)  # type: ignore[arg-type]
    if other.tp == 1:
        other = replace(other, sequence_parallel=False, tp_overlap=False)
    if other.pp == 1:
        other = replace(other, schedule="1f1b", virtual_stages=1, first_layers=None, last_layers=None)
    return other, batch


# Most batches that are tried. Memory is nearly linear in the batch: interpolation of two of them is off by a few
# samples, which the remaining tries find.
TRIES = 14
# Largest batch of practical use on one GPU.
LARGEST = 1 << 20
# Largest factor of an extrapolation while only one bound is known.
_FARTHEST = 64
# Factor of the next batch after two that need the same memory.
_FLAT = 8
# Width below which the search bisects: there memory grows in blocks.
_NEAR = 16
Point = tuple[int, int]


def largest_batch(
    needed: Callable[[int], int], capacity: int, known: Point, stop: Callable[[], bool] = lambda: False
) -> LargestBatch | None:
    """Search for the largest batch that fits.

    ``needed``: function from a batch to its bytes on the fullest GPU; ``known``: a batch and its bytes; ``stop``: ends
    the search. ``None``: no batch was known to fit by then, though a smaller one may.
    """
    search = _Search(capacity)
    search.learn(known)
    for _ in range(TRIES):
        batch = search.next_batch()
        if batch is None or stop():
            break
        search.learn((batch, needed(batch)))
    if search.fitting is None:
        assert search.failing is not None
        return LargestBatch(0, search.failing[1]) if search.failing[0] == 1 else None
    return LargestBatch(*search.fitting, at_least=search.failing is None or search.width > 1)


@dataclass
class _Search:
    """State of the search: root finding by regula falsi."""

    capacity: int
    # Largest batch that is known to fit.
    fitting: Point | None = None
    # Smallest batch that is known not to fit.
    failing: Point | None = None
    # The latest point; `before`: the one before it.
    last: Point | None = None
    before: Point | None = None
    # Distance of both bounds from `capacity`; that of a bound that does not move is halved each time (Illinois
    # algorithm), so that the other one moves too.
    room: float = 0.0
    excess: float = 0.0

    def learn(self, point: Point) -> None:
        """Add a batch and its bytes."""
        fits = point[1] <= self.capacity
        again = self.last is not None and (self.last[1] <= self.capacity) == fits
        if fits:
            self.fitting, self.room = point, float(self.capacity - point[1])
            self.excess /= 2 if again else 1
        else:
            self.failing, self.excess = point, float(point[1] - self.capacity)
            self.room /= 2 if again else 1
        self.before, self.last = self.last, point

    @property
    def low(self) -> int:
        """Lower limit of the search: no batch up to this one needs to be tried."""
        return self.fitting[0] if self.fitting else 0

    @property
    def high(self) -> int:
        """Upper limit of the search: no batch from this one on needs to be tried."""
        return self.failing[0] if self.failing else LARGEST + 1

    @property
    def width(self) -> int:
        """Distance between the batches that fit and do not; 1: they are neighbours."""
        return self.high - self.low

    def next_batch(self) -> int | None:
        """Return the next batch to try, ``None`` if none is left.

        Interpolates to the capacity between both bounds, or extrapolates through the last two points while only one is
        known; after the first point the batch is doubled or halved.
        """
        assert self.last is not None
        if self.width <= 1 or self.low >= LARGEST:
            return None
        if self.fitting and self.failing:
            share = self.room / (self.room + self.excess) if self.width > _NEAR else 0.5
            batch = self.low + int(self.width * share)
        elif self.fitting:
            batch = min(self._extended((2 if self.before is None else _FLAT) * self.low), _FARTHEST * self.low)
        else:
            batch = max(self._extended(self.high // 2), self.high // _FARTHEST)
        return min(max(batch, self.low + 1), self.high - 1, LARGEST)

    def _extended(self, otherwise: int) -> int:
        """Extrapolate through the last two points; return ``otherwise`` if their line does not rise."""
        if self.before is None or self.last is None:
            return otherwise
        rise, run = self.last[1] - self.before[1], self.last[0] - self.before[0]
        if rise * run <= 0:
            return otherwise
        return self.last[0] + (self.capacity - self.last[1]) * run // rise


# Time after which no further setting is started.
SECONDS = 180.0
# Time limit of the search for the largest batch.
SEARCH_SECONDS = 60.0
_OUT_OF_TIME = f"{SECONDS:.0f} s were over"
_STOPPED = "stopped with Ctrl-C"
Say = Callable[[str], object]


def advise(request: Request, answer: PredictionResult, say: Say) -> PredictionResult:
    """Return ``answer`` to ``request`` with advice. ``say``: callback with one line per setting.

    Ctrl-C stops the search and keeps its results so far.
    """
    request = request.with_defaults()
    if isinstance(request, Recording):
        stopped = "a recorded run has its settings; only --retarget changes anything"
        return _advised(answer, Advice((), stopped=stopped))
    advisor = _Advisor(request, answer.prediction, say)
    return _advised(answer, advisor.advice())


def _advised(answer: PredictionResult, advice: Advice) -> PredictionResult:
    return replace(answer, prediction=replace(answer.prediction, advice=advice))


@dataclass
class _Advisor:
    request: Request
    now: Prediction
    say: Say
    begun: float = field(default_factory=time.monotonic)
    alternatives: list[Alternative] = field(default_factory=list)
    largest: LargestBatch | None = None

    def advice(self) -> Advice:
        """Predict all changes, then the combination of those that help."""
        changes = possible_changes(self.request, self.now)
        stopped = ""
        try:
            self.largest = self._largest_batch()
            changes = self._that_may_fit(changes)
            for place, change in enumerate(changes, 1):
                if self._late():
                    stopped = _OUT_OF_TIME
                    break
                self._try(change, f"{place} of {len(changes)}")
            self._try_together(changes)
        except KeyboardInterrupt:
            stopped = _STOPPED
        done = {each.change for each in self.alternatives}
        left = [each.change for each in changes if each.change not in done]
        return Advice(sort_alternatives(self.alternatives), self.largest, left, stopped)

    def _late(self) -> bool:
        return time.monotonic() - self.begun > SECONDS

    def _try(self, change: Change, place: str) -> Alternative:
        found = self._predicted(change)
        self.alternatives.append(found)
        if found.iteration_seconds is None:
            result = found.problem
        else:
            fits = ", does not fit" if found.fits is False else ""
            result = f"{found.iteration_seconds * 1e3:.3f} ms, {found.gain or 0.0:.2f}x per sample{fits}"
        self.say(f"advice, {place}: {change.change}: {result} ({time.monotonic() - self.begun:.0f} s)")
        return found

    def _predicted(self, change: Change) -> Alternative:
        try:
            other = predict_request(replace(change.apply(self.request), what_if=())).prediction
        except ProjectError as error:
            return Alternative(change.change, change.needs, problem=" ".join(str(error).split()), kind=change.kind)
        return Alternative(
            change.change,
            change.needs,
            other.iteration_seconds,
            None if other.throughput is None else other.throughput.samples,
            _seconds_per_sample(self.now) / _seconds_per_sample(other),
            other.peak_memory_bytes,
            other.fits,
            kind=change.kind,
        )

    def _largest_batch(self) -> LargestBatch | None:
        """Search for the largest batch; ``None`` if the batch cannot be changed or the memory is unknown."""
        batch = batch_of(self.request, self.now)
        sizes = [rank.allocated_bytes for rank in self.now.ranks if rank.allocated_bytes is not None]
        if batch is None or not sizes:
            return None

        def needed(size: int) -> int:
            step = with_batch(self.request, size).prepare()
            found = max(usage.allocated_bytes for usage in step.memory.values())
            seconds = time.monotonic() - self.begun
            self.say(f"advice, batch size {size}: {found / 2**30:.1f} GiB ({seconds:.0f} s)")
            return found

        try:
            return largest_batch(
                needed,
                largest_fitting(self.now.memory_room_bytes),
                (batch, max(sizes)),
                lambda: time.monotonic() - self.begun > SEARCH_SECONDS,
            )
        except ProjectError as error:
            self.say(f"advice, largest batch: {' '.join(str(error).split())}")
            return None

    def _that_may_fit(self, changes: list[Change]) -> list[Change]:
        """Return ``changes`` without batches that do not fit, and with the largest one that does."""
        batch = batch_of(self.request, self.now)
        if self.largest is None or batch is None:
            return changes
        largest = self.largest.batch_size
        kept = [
            each
            for each in changes
            if each.kind != "batch" or (getattr(each.apply(self.request), "batch_size", None) or 0) <= largest
        ]
        wanted = largest > batch or (self.now.fits is False and largest > 0)
        if wanted and all(each.change != batch_change(largest).change for each in kept):
            kept.append(batch_change(largest))
        return kept

    def _try_together(self, changes: Sequence[Change]) -> None:
        """Predict the best helping change of each kind together, with the same batch.

        Changes that do not help alone are then added one after another where they help.
        """
        by_text = {each.change: each for each in changes}
        helping: dict[str, Change] = {}
        others: dict[str, Change] = {}
        for alternative in sort_alternatives(self.alternatives):
            change = by_text[alternative.change]
            if change.kind != "batch" and not alternative.problem:
                # Each --parallel change is relative to the requested spec, so only one can be chosen.
                kind = "spread" if change.change.startswith("--parallel") else change.kind
                (helping if alternative.helps else others).setdefault(kind, change)
        if not helping:
            return
        chosen = list(helping.values())
        best = self._try(_all_of(chosen), TOGETHER) if len(chosen) > 1 and not self._late() else None
        known = best or next(each for each in self.alternatives if each.change == chosen[0].change)
        gain = known.gain or 1.0
        for kind, change in others.items():
            if kind in helping or kind == "spread" or self._late():
                continue
            more = self._try(_all_of([*chosen, change]), TOGETHER)
            if more.helps and (more.gain or 0.0) >= gain * WORTH_TELLING:
                chosen, gain = [*chosen, change], more.gain or gain


def _all_of(changes: Sequence[Change]) -> Change:
    def apply(request: Request) -> Request:
        for each in changes:
            request = each.apply(request)
        return request

    return Change(TOGETHER, " ".join(each.change for each in changes), "all of these", apply)


def _seconds_per_sample(prediction: Prediction) -> float:
    """Seconds per sample; of a step with an unknown number of samples its time, since the number does not change."""
    samples = 1 if prediction.throughput is None else prediction.throughput.samples
    return prediction.iteration_seconds / samples
