"""Which other settings a step could have: one :class:`Change` each, as a request that differs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from costmodel.machines.machine_records import Machine
from e2e.explain.prediction import Prediction
from e2e.parallelism.spec import ParallelSpec, text_of
from e2e.sources.asked.option_table import BUILT_IN, CONFIGURATION, PARALLEL, RANKS_OF_SCRIPT, SCRIPT, SHARDED, TRACE
from e2e.sources.asked.request import ConfigurationOptions, PredictRequest
from e2e.step.choices import Dtype

# Sources whose step is built anew for every request; of recorded runs nothing but the GPU can be changed.
_MODELS = (BUILT_IN, CONFIGURATION, PARALLEL)
_ONE_GPU = (BUILT_IN, CONFIGURATION, SCRIPT, TRACE)
_SIZED = (*_MODELS, SCRIPT, RANKS_OF_SCRIPT)
# Times as many samples that are tried.
_LARGER = (2, 4)


@dataclass(frozen=True)
class Change:
    """``change``: as on the command line; ``needs``: what it takes, in words; ``apply``: makes the other request.
    ``kind``: of two of one kind only one can be chosen.
    """

    kind: str
    change: str
    needs: str
    apply: Callable[[PredictRequest], PredictRequest]


def batch_of(request: PredictRequest, prediction: Prediction, source: str) -> int | None:
    """Samples per GPU and micro-batch of ``request`` where another number can be asked; ``None`` where not."""
    if source not in _SIZED or prediction.throughput is None:
        return None
    if source in (SCRIPT, RANKS_OF_SCRIPT):
        return prediction.throughput.batch_size
    return request.workload.samples


def with_batch(request: PredictRequest, size: int) -> PredictRequest:
    """``request`` for another number of samples per GPU and micro-batch."""
    return replace(request, workload=replace(request.workload, batch_size=size))


def batch_change(size: int) -> Change:
    """Another number of samples per GPU and micro-batch."""
    needs = "another global batch (or fewer micro-batches) and the learning rate that goes with it"
    return Change("batch", f"--batch-size {size}", needs, lambda request: with_batch(request, size))


def possible_changes(request: PredictRequest, prediction: Prediction, source: str, machine: Machine) -> list[Change]:
    """Settings that ``request`` does not have and that ``source`` can have; which of them help is not asked here."""
    found = [
        *_number_types(request.configuration, prediction, source, machine),
        *_kernels(request, prediction, source),
        *(_parallel(request.configuration.parallel, request.workload.samples) if source == PARALLEL else ()),
    ]
    size = batch_of(request, prediction, source)
    if size is not None and prediction.fits is not False:
        found += [batch_change(size * factor) for factor in _LARGER]
    return found


def _configured(kind: str, change: str, needs: str, **values: object) -> Change:
    """A change of the configuration alone."""

    def apply(request: PredictRequest) -> PredictRequest:
        return replace(request, configuration=replace(request.configuration, **values))  # type: ignore[arg-type]

    return Change(kind, change, needs, apply)


def _number_types(
    asked: ConfigurationOptions, prediction: Prediction, source: str, machine: Machine
) -> Iterator[Change]:
    used = prediction.utilisation
    in_32_bits = used is None or not used.peak_flops_per_second or "float32" in used.peak_flops_per_second
    if asked.number_type == "float32" and "tf32" in machine.compute and in_32_bits:
        needs = 'torch.set_float32_matmul_precision("high"): products keep 10 bits of their mantissa'
        yield _configured("dtype", "--dtype tf32", needs, dtype="tf32")
    if asked.number_type not in ("float32", "tf32") or source not in _MODELS or asked.precision is not None:
        return
    half: Dtype = "bfloat16" if "bfloat16" in machine.compute else "float16"
    if half in machine.compute:
        scaled = "" if half == "bfloat16" else " and a loss scaler"
        needs = f"weights and activations in 16 bits{scaled}; compare the loss of a short run"
        yield _configured("dtype", f"--dtype {half}", needs, dtype=half)


def _kernels(request: PredictRequest, prediction: Prediction, source: str) -> Iterator[Change]:
    asked, rate = request.configuration, prediction.throughput
    sequences = rate is not None and rate.sequence_length is not None
    if source in _MODELS and sequences and asked.attention in (None, "eager", "math"):
        needs = 'attn_implementation="sdpa" (scaled_dot_product_attention), no attention weights as output'
        yield _configured("attention", "--attention flash", needs, attention="flash")
    if source == BUILT_IN and rate is not None and not sequences and asked.layout == "contiguous":
        needs = "model and images .to(memory_format=torch.channels_last)"
        if not (request.workload.model or "").startswith("dlrm"):
            yield _configured("layout", "--layout channels-last", needs, layout="channels-last")
    if not asked.compiled and source in (*_ONE_GPU, PARALLEL):
        needs = "torch.compile of the model; shapes that stay the same, or it compiles again"
        yield _configured("compile", "--compile", needs, compiled=True)
    trains = request.workload.mode == "train" and source in _SIZED
    default = any(each.option == "--optimizer" and each.value.startswith("foreach") for each in prediction.asked)
    if trains and asked.optimizer is None and (default or source in (SCRIPT, RANKS_OF_SCRIPT)):
        yield _configured("optimizer", "--optimizer fused", "fused=True of the optimizer", optimizer="fused")
    if not asked.cuda_graph and source in (*_ONE_GPU, RANKS_OF_SCRIPT, SHARDED):
        needs = "torch.cuda.graph around the step: fixed shapes, no values read by the host, capturable=True of AdamW"
        yield _configured("graph", "--cuda-graph", needs, cuda_graph=True)


def _parallel(spec: ParallelSpec | None, batch: int) -> Iterator[Change]:
    """Another way to spread the same model over as many GPUs."""
    if spec is None:
        return
    for kind, needs, other, size in _spreads(spec, batch):
        text = f"--parallel {text_of(other)}" + ("" if size == batch else f" --batch-size {size}")

        def apply(
            request: PredictRequest, other: ParallelSpec = other, size: int = size, batch: int = batch
        ) -> PredictRequest:
            changed = replace(request, configuration=replace(request.configuration, parallel=other))
            return changed if size == batch else with_batch(changed, size)

        yield Change(kind, text, needs, apply)


def _spreads(spec: ParallelSpec, batch: int) -> Iterator[tuple[str, str, ParallelSpec, int]]:
    """Kind of change, what it needs, the spec, and samples of one micro-batch."""
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
    """Half the degree ``name`` and twice the replicas; with half the micro-batches, or samples in each, so that a step
    sees as many samples. Where neither divides it sees twice as many.
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
