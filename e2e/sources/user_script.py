"""Steps from ``--script``: the user's own step, on one GPU or on ``--gpus`` GPUs: DDP, FSDP2, tensor parallel ..."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from costmodel.base.errors import ModelError
from costmodel.machines.cluster import Cluster, load_gpu, single_gpu
from costmodel.machines.machine_records import Machine
from costmodel.operators.experts import BALANCED
from e2e.capture.distributed.distributed_capture import DistributedCapture, capture_distributed
from e2e.capture.script import Fallback, capture_script, kept, load_script, own_process, taken_names, tf32_switches
from e2e.lowering.lower_trace import lower_ranks
from e2e.price.speed_band import band_of
from e2e.sources.built_in_model import assumptions, require_size, single_step
from e2e.sources.prepared_step import (
    Batch,
    PreparedStep,
    cluster_of,
    on_machine,
    placed_values,
    step_options,
    step_setting,
)
from e2e.sources.requests import Program, Script, ScriptJob
from e2e.step.operator_trace import OperatorTrace, has_own_samples
from e2e.step.options import Dtype, SeenGpu, StepOptions, Tf32Switches
from e2e.whatif.traced_rank import TracedRank

_OWN: Mapping[str, str] = {
    "--mode": "the script's own",
    "--attention": "flash (the kernel that PyTorch takes)",
}


def prepare(request: Script) -> PreparedStep:
    """Prepare the step of a script of one process on one GPU, compiled if requested."""
    cluster = single_gpu(load_gpu(request.gpu))
    options = _options(request, cluster.machine)

    def captured() -> tuple[OperatorTrace, tuple[int | None, int | None], Tf32Switches]:
        with own_process():
            loaded = load_script(request.script, options, **_parameters(request))
            require_size(loaded, cluster)
            return capture_script(loaded, options), (loaded.samples, loaded.sequence_length), tf32_switches()

    trace, sizes, switches = kept(_key(request, options), captured)
    step = single_step(trace, cluster, request, options, switches)
    batch = _batch(*sizes, [trace], 1)
    warnings = [*step.warnings, *_unused(request), *assumptions([trace], selected=options.selected)]
    return replace(step, warnings=warnings, batch=batch, taken=_taken(*sizes, switches.on(cluster.machine)))


def prepare_ranks(request: ScriptJob) -> PreparedStep:
    """Prepare the step of a script of ``gpus`` processes; identical ranks are captured once."""
    gpus = request.gpus
    cluster = cluster_of(request, gpus)
    capturing = _options(request, cluster.machine)

    def capture() -> DistributedCapture:
        return capture_distributed(
            request.script,
            gpus,
            capturing,
            parameters=_parameters(request),
            gpus_per_node=cluster.gpus_per_node,
            ranks=request.ranks or None,
            accept=lambda workload: require_size(workload, cluster),
        )

    captured = kept(_key(request, capturing), capture)
    sizes = (captured.samples, captured.sequence_length)
    return step_of_ranks(
        request,
        captured,
        on_machine(capturing, cluster.machine, captured.switches),
        cluster,
        warnings=_unused(request),
        taken=_taken(*sizes, captured.switches.on(cluster.machine)),
    )


def step_of_ranks(
    request: ScriptJob | Program,
    captured: DistributedCapture,
    options: StepOptions,
    cluster: Cluster,
    *,
    taken: Mapping[str, str],
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> PreparedStep:
    """Return the step of captured ranks, lowered with ``options`` and priced on ``cluster``."""
    traces, machine = captured.traces, cluster.machine
    band = band_of(machine)
    if band is not None and isinstance(request, Program):
        band = band.of_program()
    fewer, more = None, _passes_left_out(captured)
    if more:
        once = replace(captured, traces=tuple(trace.without_pass() for trace in traces))
        fewer = step_of_ranks(request, once, options, cluster, taken=taken)
    lowered = lower_ranks(traces, captured.multiplicity, captured.source, options, machine.chip().architecture)
    return PreparedStep(
        lowered.graph,
        step_setting(request, machine, options),
        cluster,
        lowered.memory,
        [*lowered.warnings, *warnings, *assumptions(traces, selected=options.selected)],
        notes,
        speed_spread=request.speed_spread,
        band=band,
        batch=_batch(captured.samples, captured.sequence_length, traces, cluster.gpus),
        taken={**taken, **placed_values(cluster)},
        traced={trace.rank: TracedRank(trace, options) for trace in traces},
        fewer=fewer,
        more_passes=more,
    )


def _passes_left_out(captured: DistributedCapture) -> int:
    """Return how many equal passes of accumulated gradients the captured steps do not have."""
    numbers = {trace.repeated.more if trace.repeated else 0 for trace in captured.traces}
    if len(numbers) > 1:
        raise ModelError(f"{captured.source}: ranks accumulate different numbers of equal passes; let all do the same")
    return numbers.pop()


def _options(request: Script | ScriptJob, machine: Machine) -> StepOptions:
    """Return the capture options, with PyTorch's default of fused attention; the script sees ``machine``."""
    return step_options(request, attention=request.attention or "flash", seen_gpu=seen_gpu(machine))


def seen_gpu(machine: Machine) -> SeenGpu:
    """Return the GPU properties that a script can query."""
    chip, memory = machine.chip(), machine.memory[-1]
    l2 = next((int(level.capacity_bytes) for level in machine.memory if level.name == "L2"), 0)
    return SeenGpu(f"NVIDIA {machine.name.upper()}", chip.compute_capability, int(memory.usable), chip.sm_count, l2)


def _key(request: Script | ScriptJob, options: StepOptions) -> Hashable:
    """Cache key of a capture: everything that it depends on.

    Options that only affect its price (TF32, graphs, compilers) are left out.

    A function object is identified by the request that holds it: callables need not be hashable.
    """
    script = request.script if isinstance(request.script, str) else f"object {id(request.script)}"
    dtype: Dtype = "float32" if options.dtype == "tf32" else options.dtype
    settled = replace(options, dtype=dtype, compile=False, routing=BALANCED)
    job = (request.gpus, request.nodes, request.ranks) if isinstance(request, ScriptJob) else ()
    return script, settled, request.gpu, job


def _batch(samples: int | None, length: int | None, traces: Sequence[OperatorTrace], gpus: int) -> Batch | None:
    """Return the batch of a step of ``gpus`` ranks whose function was called for ``samples`` of ``length`` tokens.

    With gradient accumulation every pass processes as many samples again; passes over parts of a batch that the script
    divides itself count as one.
    """
    if samples is None or (gpus > 1 and not all(has_own_samples(trace) for trace in traces)):
        return None
    passes = max(1, sum(samples in lengths for lengths in traces[0].passes))
    made_of = [f"{passes} passes of {samples}"] if passes > 1 else [f"{samples}"] if gpus > 1 else []
    if gpus > 1:
        made_of.append(f"on each of {gpus} GPUs")
    return Batch(samples * passes * gpus, length, " ".join(made_of), samples)


def _taken(samples: int | None, length: int | None, switches: Tf32Switches) -> dict[str, str]:
    """Return the script's own values by option. It sets its optimizer and number types itself."""
    sizes = {"--batch-size": samples, "--sequence-length": length}
    told = {option: f"{size} (the script's own)" for option, size in sizes.items() if size is not None}
    return {**_OWN, "--dtype": f"the script's own, {switches.described}", **told}


def _unused(request: Script | ScriptJob) -> list[str]:
    """Warn of given sizes for which the script's function has no parameter."""
    sizes = {"batch_size": request.batch_size, "sequence_length": request.sequence_length}
    given = [name for name, value in sizes.items() if value is not None]
    taken = taken_names(request.script, given)
    return [
        f"--{name.replace('_', '-')}: without effect, the script's function has no parameter {name}"
        for name in given
        if name not in taken
    ]


def _parameters(request: Script | ScriptJob) -> dict[str, Any]:
    """Return the arguments of the script's function; its own defaults where no value is given."""
    size = Fallback(1) if request.batch_size is None else request.batch_size
    return {"batch_size": size, "sequence_length": request.sequence_length}
