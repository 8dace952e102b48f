"""Steps from ``--model`` and ``--model-config``: on one GPU, spread over many, or with sharded embedding tables.

Sweeps use those of ``--parallel`` too; sharded tables are ``--model dlrm --config tables.yaml --sharding plan.json``.

Single-GPU steps of any operator trace are made here too, with notes on the assumptions of a captured step: data that a
capture lacks, and kernels that a library would provide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.machines.cluster import Cluster, load_gpu, single_gpu
from costmodel.operators.experts import BALANCED
from e2e.capture.meta_results import ASSUMED, EVEN_COUNTS
from e2e.capture.models.catalog import build, build_from_file
from e2e.capture.models.stacks import stack_of
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower_step
from e2e.parallelism import ParallelGraph, build_parallel_graph
from e2e.parallelism.rewrites import Condenser
from e2e.parallelism.spec import require_consistent
from e2e.price.speed_band import OLDER_NOTE, band_of
from e2e.sources.prepared_step import (
    Batch,
    PreparedStep,
    cluster_of,
    on_machine,
    placed_values,
    step_options,
    step_setting,
)
from e2e.sources.requests import Model, Request, ShardedTables, SpreadModel
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches
from e2e.whatif.traced_rank import TracedRank

# Prefix of the call names of e2e/capture/linear_attention.py.
_FUSED = "scan::"
# Parts of module paths in Transformers -> layer type, and the library that fuses it. Other models use some of these
# names, too; the intended ones have a learned decay rate, -exp(A_log).
_UNFUSED = {
    "mixer": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "mamba": ("the selective scan of a Mamba layer", "mamba_ssm and causal_conv1d"),
    "linear_attn": ("linear attention (gated delta rule)", "flash-linear-attention"),
    "forget_gate": ("linear attention (Kimi's delta rule)", "flash-linear-attention"),
}


def assumptions(traces: Sequence[OperatorTrace], routed: bool = False, selected: float = 1.0) -> list[str]:
    """Return a line for each assumption made in ``traces``. ``routed``: an option says how tokens are routed;
    ``selected``: share that selections find.
    """
    calls = [call for trace in traces for call in trace.calls]
    found: list[str] = []
    selections = sum(call.name == ASSUMED and call.attributes.get("assumed") is True for call in calls)
    if selections:
        share = "all that they could" if selected == 1 else f"{100 * selected:.3g}% of what they could (--selected)"
        advice = "; where fewer are usual, --selected says which share, or write x[:k] with a usual k"
        found.append(
            f"{selections} selections by data (boolean masks, nonzero, unique, NMS) are taken to find {share}"
            f"{advice if selected == 1 else ''}"
        )
    counts = sum(call.name in EVEN_COUNTS and call.attributes.get("assumed") is True for call in calls)
    if counts and not routed:
        which = "counts of data (bincount, histc, sums of masks)"
        found.append(f"{counts} {which} are taken to be even, such as tokens of each expert")
    return [*found, *_linear_attention(calls)]


def _linear_attention(calls: Sequence[OperatorCall]) -> list[str]:
    """Warn if recurrent layers run as single operators, or as kernels whose gradients were never measured."""
    fused = [call.name for call in calls if call.name.startswith(_FUSED)]
    if fused:
        backward = sum(name.endswith("_backward") for name in fused)
        if not backward:
            return []
        return [
            f"{backward} gradients of linear attention and its convolutions have no table: those of the gated delta "
            "rule are priced as published, others from their forward kernels"
        ]
    found: dict[str, int] = {}
    modules = Counter(call.module for call in calls)
    decaying = _decaying(calls)
    for part, (what, library) in _UNFUSED.items():
        named = {module for module in decaying if part in module.split(".")}
        launches = sum(modules[module] for module in modules if _within(module, named))
        line = f"{what} runs in single PyTorch operators ({{}} calls), as without {library}"
        found[line] = found.get(line, 0) + launches
    return [
        f"{line.format(count)}; --linear-attention fused is how it runs with these"
        for line, count in found.items()
        if count
    ]


def _decaying(calls: Sequence[OperatorCall]) -> set[str]:
    """Return the modules that negate an exponential that they computed: the decay of a recurrence."""
    found: set[str] = set()
    exponentials: set[tuple[str, int]] = set()
    for call in calls:
        if call.name == "aten::exp":
            exponentials.update((call.module, each.id) for each in call.outputs if isinstance(each, Tensor))
        elif call.name == "aten::neg" and isinstance(data := call.inputs[0], Tensor):
            found.update({call.module} if (call.module, data.id) in exponentials else ())
    return found


def _within(module: str, others: set[str]) -> bool:
    """True if ``module`` is one of ``others`` or a part of one."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in others for end in range(len(parts)))


# Models whose parameters exceed the GPU's memory more often than this are rejected before the capture.
MOST_TIMES_MEMORY = 100.0


# Note on a model's inference over whole sequences.
FORWARD_ALONE = "the step is one forward pass over all its tokens (prefill), without a cache of earlier ones"


def _forward_note(cached: int | None, length: int | None) -> str:
    """Note on a model's inference: whole sequences, or decoding with a cache."""
    if cached is None:
        return FORWARD_ALONE
    tokens = length or 1
    return f"the step decodes {tokens} token{'s' if tokens > 1 else ''} of each sequence behind {cached} in a cache"


def _taken_values(options: StepOptions, samples: int, length: int | None, optimizer: str) -> dict[str, str]:
    """Return the defaults that a built-in model or a configuration used, by option.

    ``length``: tokens of a sample (``None``: no sequences); ``optimizer``: its class, empty without one.
    """
    taken = {"--batch-size": str(samples)}
    if length is None:
        taken["--layout"] = f"{options.layout} (NCHW)"
    else:
        meaning = "products and softmax apart" if options.form in ("eager", "math") else "fused"
        taken |= {"--sequence-length": str(length), "--attention": f"{options.form} ({meaning})"}
        taken["--stack"] = "the library's modules as they are"
    if optimizer:
        taken["--optimizer"] = f"{options.optimizer} ({optimizer})"
    return taken


def prepare_single(request: Model) -> PreparedStep:
    """Prepare the step of a built-in model or of a Hugging Face configuration file, captured without a GPU."""
    cluster = single_gpu(load_gpu(request.gpu))  # invalid GPUs are reported before a capture
    options = step_options(request, attention=request.attention or "eager")
    make: Any = build if request.model is not None else build_from_file
    model: CapturedWorkload = make(request.named, request.samples, request.sequence_length, options)
    require_size(model, cluster)
    trace = capture(model, options)
    step = single_step(trace, cluster, request, options)
    batch = None if model.samples is None else Batch(model.samples, model.sequence_length)
    taken = _taken_values(options, request.samples, model.sequence_length, model.optimizer)
    forward = options.inference and model.sequence_length is not None
    notes = [_forward_note(request.cache_length, request.sequence_length)] if forward else step.notes
    return replace(
        step, warnings=[*step.warnings, *assumptions([trace], routed=True)], batch=batch, taken=taken, notes=notes
    )


def single_step(
    trace: OperatorTrace, cluster: Cluster, request: Request, options: StepOptions, own: Tf32Switches = NO_TF32
) -> PreparedStep:
    """Prepare the step of ``trace`` with ``options`` on the GPU of ``cluster``. ``own``: TF32 switches of a script."""
    machine = cluster.machine
    lowering, architecture = on_machine(options, machine, own), machine.chip().architecture
    lowered = lower_step(trace, lowering, architecture)
    traced = {trace.rank: TracedRank(trace, lowering)}
    balanced = None
    if lowering.routing != BALANCED:
        balanced = lower_step(trace, replace(lowering, routing=BALANCED), architecture).graph
    older = stack_of(options.stack).older_libraries
    return PreparedStep(
        lowered.graph, step_setting(request, machine, options), cluster, lowered.memory, lowered.warnings,
        traced=traced, balanced=balanced, band=band_of(machine, older_libraries=older),
    )  # fmt: skip


def require_size(model: CapturedWorkload, cluster: Cluster) -> None:
    """Raise ``InputError`` for a model far too large for one GPU of ``cluster``, which takes minutes to capture.

    Only the GPU's own part of sharded parameters counts.
    """
    whole = model.module.parameters()
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in whole]  # local part of a DTensor
    held = sum(each.numel() * each.element_size() for each in parts)
    times = held / cluster.machine.memory[-1].capacity_bytes
    if times > MOST_TIMES_MEMORY:
        count = sum(each.numel() for each in parts)
        several = cluster.gpus > 1
        advice = "shard them (fully_shard)" if several else "spread it with --gpus and --parallel"
        raise InputError(
            f"{model.name}: {count / 1e12:.3g} T parameters{' of one rank' if several else ''} take {held / 2**40:.3g} "
            f"TiB, {times:.0f} times the memory of one {cluster.machine.name}; {advice}, or correct its sizes"
        )


IN_PIECES = (
    "tp-overlap=yes launches products in {tp} pieces, each beside a transfer: a step that waits for the host takes "
    "longer with it than without"
)


def prepare_spread(request: SpreadModel, captures: Path | None = None) -> PreparedStep:
    """Prepare one training step, or one forward pass, of all ranks. ``captures``: cache folder of captured layers."""
    spec = request.parallel
    if spec is None:
        raise InputError(f"{request.named}: say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8")
    require_consistent(spec, request.gpus)
    cluster = cluster_of(request, spec.world_size)
    step = step_options(request)
    setting = step_setting(request, cluster.machine, step)

    def of(step: StepOptions) -> ParallelGraph:
        return build_parallel_graph(
            request.named, spec, step, captures=captures, condenser=Condenser(setting.overheads),
            node_gpus=cluster.gpus_per_node, host_bandwidth=cluster.host_bandwidth,
        )  # fmt: skip

    built = of(step)
    balanced = None if step.routing == BALANCED else of(replace(step, routing=BALANCED)).graph
    older = stack_of(step.stack).older_libraries
    band = band_of(cluster.machine, older_libraries=older)
    notes = [
        *([FORWARD_ALONE] if step.inference else []),
        *([OLDER_NOTE] if older and band is not None else []),
        *([IN_PIECES.format(tp=spec.tp)] if spec.tp_overlap else []),
    ]
    made_of = f"batch size {request.samples} x {spec.micro_batches} micro-batches x {spec.replicas} replicas"
    return PreparedStep(
        built.graph,
        setting,
        cluster,
        built.memory,
        built.warnings,
        speed_spread=request.speed_spread,
        band=band,
        notes=notes,
        balanced=balanced,
        batch=Batch(built.samples, built.sequence_length, made_of),
        taken=_taken_values(step, request.samples, built.sequence_length, "AdamW" if request.mode == "train" else "")
        | placed_values(cluster),
    )


def prepare_sharded(request: ShardedTables) -> PreparedStep:
    """Capture the dense part and add the table kernels of every rank."""
    from e2e.sharding.sharded_step import sharded_dlrm  # loads the planner, which other models do not need

    gpus, options = request.gpus, step_options(request)
    cluster = cluster_of(request, gpus)
    built = sharded_dlrm(request.sharding, request.tables, cluster, request.batch_size, options)
    return PreparedStep(
        built.graph,
        step_setting(request, cluster.machine, options),
        cluster,
        built.memory,
        built.warnings,
        speed_spread=request.speed_spread,
        batch=Batch(built.samples, made_of=f"{built.samples // gpus} on each of {gpus} GPUs"),
        taken={"--batch-size": f"{built.samples // gpus} (the plan's)"} | placed_values(cluster),
    )
