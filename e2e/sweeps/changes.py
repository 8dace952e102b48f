"""Other possible settings of a step: one :class:`Change` each, as a modified request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from e2e.explain.prediction import Prediction
from e2e.parallelism.spec import ParallelSpec, text_of
from e2e.sources.known_requests import Model, Script, ScriptJob, SpreadModel, Trace
from e2e.sources.request import Request
from e2e.sources.request_parts import gpu_machine
from e2e.step.choices import Dtype

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
    machine = gpu_machine(getattr(request, "gpu", ""))
    used, dtype = prediction.utilisation, getattr(request, "dtype", None) or "float32"
    in_32_bits = used is None or not used.peak_flops_per_second or "float32" in used.peak_flops_per_second
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
    if isinstance(request, Modelled | Script | Trace) and not request.compile:
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
    if spec.pp > 1 and spec.schedule == "1f1b":
        needs = "gradients of weights computed apart (zero-bubble pipeline schedule)"
        yield "schedule", needs, replace(spec, schedule="zero-bubble"), batch
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
