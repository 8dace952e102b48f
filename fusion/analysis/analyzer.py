"""Roofline analysis of the fusion sites of a model, with reasons in words, and of the whole network in every
precision; nothing is tuned or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from costmodel.base.errors import InputError, Say
from costmodel.cost_model import CostModel
from costmodel.cpu.roofline import RooflineModel, RooflineReport, has_dense_window
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d, Operator, conv_kind
from fusion.analysis.target_machine import this_cpu
from fusion.model.conv_graph import (
    BFLOAT16,
    FLOAT32,
    INT8,
    FusionPlan,
    Site,
    find_sites,
    layers_covered,
    layers_in,
    precision_of,
    require_float,
    select,
    stored_in,
    unfused_seconds,
)

if TYPE_CHECKING:
    from fusion.model.conv_graph import Graph, Node
    from schedules.contract.cpu_target import CpuTarget


# Do not mention a term that changes the time by less than this fraction.
NEGLIGIBLE = 0.02
NOT_TUNED = "not tuned, since nothing is saved even if memory and arithmetic do not overlap"


@dataclass(frozen=True)
class LayerCost:
    """Time of the kernels of one arm (fused or unfused) as a sum of terms in seconds."""

    core_seconds: float
    # Memory time not hidden by arithmetic.
    memory_seconds: float
    region_seconds: float
    recomputation: float
    # Memory level and size of the tensor between the convolutions.
    intermediate_level: str
    intermediate_bytes: float
    # True if one of the convolutions uses Winograd's algorithm.
    winograd: bool = False
    # True if the tile of a fused kernel and its weights exceed every core-private cache.
    spills: bool = False

    @classmethod
    def of(cls, reports: Sequence[RooflineReport]) -> LayerCost:
        """Sum of the reports of one fused kernel, or of the kernels it would replace."""
        fused = len(reports) == 1
        between = "intermediate" if fused else "output"
        inside = [traffic for traffic in reports[0].traffic if traffic.tensor == between]
        return cls(
            core_seconds=sum(report.core_seconds for report in reports),
            memory_seconds=sum(max(report.memory_seconds - report.core_seconds, 0.0) for report in reports),
            region_seconds=sum(report.region_seconds for report in reports),
            recomputation=reports[0].recomputation if fused else 1.0,
            intermediate_level=inside[0].level,
            intermediate_bytes=sum(traffic.size_bytes for traffic in inside),
            winograd=any(report.winograd_outputs for report in reports),
            spills=fused and reports[0].spills,
        )


def explain_decision(
    unfused: LayerCost, fused: LayerCost, unfused_seconds: float, fused_seconds: float, chosen: bool, rival: str | None
) -> str:
    """One sentence: time saved or lost by fusing, the terms responsible, and the site chosen instead, if any."""
    change = fused_seconds / unfused_seconds - 1.0
    gains, losses = _terms(unfused, fused, unfused_seconds)
    if change >= 0:
        verdict = "no gain" if change < NEGLIGIBLE else f"{change:.0%} slower fused"
        return f"{verdict}: {'; '.join(losses or ['memory is not what limits these kernels'])}"
    share = f"{-change:.0%}" if -change >= NEGLIGIBLE else f"less than {NEGLIGIBLE:.0%}"
    text = f"{share} faster fused: {'; '.join(gains or ['arithmetic and memory overlap better in one kernel'])}"
    if losses:
        text += f"; against it, {'; '.join(losses)}"
    if not chosen and rival is not None:
        text += f"; but it overlaps {rival}, which saves more over the whole chain"
    return text


def _terms(unfused: LayerCost, fused: LayerCost, scale: float) -> tuple[list[str], list[str]]:
    """Descriptions of the terms that decrease and of those that increase, largest first."""
    named = [
        (unfused.memory_seconds - fused.memory_seconds, _memory_text(unfused, fused)),
        (unfused.core_seconds - fused.core_seconds, _core_text(unfused, fused)),
        (unfused.region_seconds - fused.region_seconds, _region_text(unfused, fused)),
    ]
    named.sort(key=lambda term: -abs(term[0]))
    gains = [text for saved, text in named if saved > NEGLIGIBLE * scale]
    losses = [text for saved, text in named if saved < -NEGLIGIBLE * scale]
    return gains, losses


def _memory_text(unfused: LayerCost, fused: LayerCost) -> str:
    size = format_bytes(unfused.intermediate_bytes)
    where = f"the {size} intermediate stays in {fused.intermediate_level}"
    if fused.intermediate_level != unfused.intermediate_level:
        where += f" instead of {unfused.intermediate_level}"
    return f"{where} (time waiting for memory {_change(unfused.memory_seconds, fused.memory_seconds)})"


def _core_text(unfused: LayerCost, fused: LayerCost) -> str:
    times = _change(unfused.core_seconds, fused.core_seconds)
    if fused.winograd and fused.spills and fused.core_seconds > unfused.core_seconds:
        return f"tiles and weights fit no core's own cache, which Winograd's transforms go through ({times})"
    if unfused.winograd and not fused.winograd and fused.core_seconds > unfused.core_seconds:
        return f"apart, Winograd's algorithm saves multiplications, one kernel for both computes direct sums ({times})"
    if fused.core_seconds > unfused.core_seconds and fused.recomputation > 1.0 + NEGLIGIBLE:
        return f"the halo of the tiles re-computes {fused.recomputation - 1:.0%} of the arithmetic ({times})"
    return f"threads share the work {'worse' if fused.core_seconds > unfused.core_seconds else 'better'} ({times})"


def _region_text(unfused: LayerCost, fused: LayerCost) -> str:
    return f"fewer parallel regions ({_change(unfused.region_seconds, fused.region_seconds)})"


def _change(before: float, after: float) -> str:
    return f"{before * 1e6:.1f} to {after * 1e6:.1f} us"


def format_bytes(size: float) -> str:
    """Format a size with one decimal in the largest unit that fits, e.g. ``1.5 MiB``."""
    for unit, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


# Number types of layers, most exact first.
PRECISE_TYPES = (FLOAT32, BFLOAT16, INT8)
# Accuracy of predicted gains: networks of docs/benchmarks.md, sites of docs/limits.md.
WORTH_OF_GAINS = (
    "gains are what the roofline predicts, without an interval. Measured in 15 tuned networks that fused something, "
    "fusion alone made them 1.06 times as fast (0.98 to 1.27); whether a site gains was told right for 68 to 79 % of "
    "sites, little more often than by fusing always (57 against 55 % on one machine, 86 against 96 % on another)"
)


@dataclass(frozen=True)
class PrecisionOutlook:
    """Prediction for a network with some layers in ``precision``, the others in float32."""

    precision: str
    # Number of layers in ``precision``.
    layers: int
    sites: int
    sites_fused: int
    # Sustained rate of the machine in flop/s.
    peak_flops: float
    unfused_seconds: float
    fused_seconds: float
    # Flop per byte that kernels read or write.
    unfused_intensity: float
    fused_intensity: float
    # Reason for the lack of kernels in this precision, or None.
    missing: str | None = None

    @property
    def gain(self) -> float:
        """Speedup by fusion."""
        return self.unfused_seconds / self.fused_seconds if self.fused_seconds else 1.0


def outlooks(graph: Graph, machine: Machine, cpu: CpuTarget) -> tuple[PrecisionOutlook, ...]:
    """Outlooks for every precision that the machine has a compute rate for."""
    return tuple(_outlook(graph, machine, cpu, dtype) for dtype in PRECISE_TYPES if dtype in machine.compute)


def in_precision(graph: Graph, dtype: str, cpu: CpuTarget) -> Graph:
    """``graph`` with every layer in ``dtype`` that our kernels support in it."""
    return stored_in(graph, layers_covered(graph, dtype, cpu), dtype)


def _outlook(graph: Graph, machine: Machine, cpu: CpuTarget, dtype: str) -> PrecisionOutlook:
    stored = in_precision(graph, dtype, cpu)
    sites = find_sites(stored, cpu)
    apart = [node.operator for node in stored.nodes]
    everything = list(dict.fromkeys([*apart, *(site.operator for site in sites)]))
    size = float(sum(operator.weight_bytes + operator.output_bytes for operator in apart))
    estimates = RooflineModel(machine, cpu.threads, size).estimate(everything)
    seconds = {operator: found.seconds for operator, found in zip(everything, estimates, strict=True)}
    plan = select(stored, sites, seconds)
    fused = [group.operator for group in plan.groups]
    return PrecisionOutlook(
        precision=dtype,
        layers=sum(node.operator.dtype == dtype for node in stored.nodes),
        sites=len(sites),
        sites_fused=sum(group.is_fused for group in plan.groups),
        peak_flops=machine.peak_flops(dtype, cpu.threads),
        unfused_seconds=sum(seconds[operator] for operator in apart),
        fused_seconds=sum(seconds[operator] for operator in fused),
        unfused_intensity=_intensity(apart),
        fused_intensity=_intensity(fused),
        missing=None if dtype == FLOAT32 else cpu.lacks(dtype),
    )


def _intensity(operators: Sequence[Operator]) -> float:
    size = sum(each.input_bytes + each.weight_bytes + each.output_bytes + each.residual_bytes for each in operators)
    return sum(each.flops for each in operators) / size if size else 0.0


Explain = Callable[[Operator], RooflineReport]
# A site loses clearly if its predicted fused time is above this multiple of the unfused time.
LOSES_CLEARLY = 1.15


@dataclass(frozen=True)
class LayerReport:
    """One convolution of a site. Shapes are NCHW."""

    name: str
    kind: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dilation: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class TensorPlace:
    """Memory level of a tensor with separate kernels and in the fused kernel."""

    tensor: str
    size_bytes: float
    unfused_level: str
    fused_level: str


@dataclass(frozen=True)
class SiteReport:
    """One fusion site; seconds are predicted, intensities in flop/B."""

    name: str
    kind: str
    layers: tuple[LayerReport, ...]
    flops: int
    unfused_intensity: float
    fused_intensity: float
    tensors: tuple[TensorPlace, ...]
    # Computed flops divided by required flops.
    recomputation: float
    unfused_seconds: float
    fused_seconds: float
    unfused_bounds: tuple[str, ...]
    fused_bound: str
    # True if part of the fastest predicted cover of the whole chain.
    fuse: bool
    # Explanation of the decision in words.
    reason: str
    # True if ``tune`` never measures it (:func:`is_hopeless`).
    hopeless: bool = False

    @property
    def loses_clearly(self) -> bool:
        """True if the predicted loss of fusing is larger than the usual prediction error."""
        return self.fused_seconds > LOSES_CLEARLY * self.unfused_seconds


@dataclass(frozen=True)
class OtherOperator:
    """A call without a template kernel, compiled by TVM. ``operator``: e.g. ``relax.nn.softmax``; ``reason``: why."""

    name: str
    operator: str
    reason: str = ""


@dataclass(frozen=True)
class NetworkAnalysis:
    """Analysis of a model: all sites in program order, number of template kernels, other operators."""

    machine: str
    threads: int
    sites: tuple[SiteReport, ...]
    kernels: int
    others: tuple[OtherOperator, ...]
    # Number type of its layers.
    precision: str = "float32"
    # Predictions for the whole network in each number type.
    precisions: tuple[PrecisionOutlook, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, as documented for ``--json``."""
        return asdict(self)


class ReadModel(NamedTuple):
    """A model and its analysis target; ``notes``: messages about the model."""

    graph: Graph
    machine: Machine
    cpu: CpuTarget
    notes: tuple[str, ...] = ()


def read_graph(
    model: Path,
    shapes: Mapping[str, tuple[int, ...]],
    machine: str | None,
    threads: int | None,
    say: Say,
    batch: int | None = None,
    precision: str = FLOAT32,
) -> ReadModel:
    """Read an ONNX file and describe this CPU and the machine model used for predictions.

    Raises ``InputError`` if the CPU lacks ``precision``, or if the model is quantised.
    """
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.model_file import require_loaded
    from fusion.relax.onnx.quantised_model import float_layer_notes

    target = this_cpu(machine, threads, say)
    cpu = target.cpu
    if precision != FLOAT32 and (reason := cpu.lacks(precision)) is not None:
        raise InputError(f"--precision {precision}: {reason}; choose --precision float32")
    imported = import_onnx(model, shapes, batch, cpu.lacks(INT8) is None)
    require_loaded(model)
    graph = extract_graph(imported.mod)
    require_float(graph, precision)
    return ReadModel(graph, target.machine, cpu, tuple(float_layer_notes(imported.in_floats)))


def analyze_in(
    precision: str, graph: Graph, machine: Machine, cpu: CpuTarget, notes: tuple[str, ...] = ()
) -> NetworkAnalysis:
    """Analyse ``graph`` with its layers in ``precision``; quantised models keep their own precision."""
    if layers_in(graph, INT8):
        found = replace(analyze(graph, machine, cpu), precision=precision_of(graph))
    else:
        whole = analyze(in_precision(graph, precision, cpu), machine, cpu)
        found = replace(whole, precision=precision, precisions=outlooks(graph, machine, cpu))
    return _with_notes(found, notes)


def _with_notes(found: NetworkAnalysis, notes: tuple[str, ...]) -> NetworkAnalysis:
    """``found`` with ``notes``, and a note on the accuracy of predicted gains if any site is to be fused."""
    promised = any(site.fuse for site in found.sites)
    return replace(found, notes=(*notes, *([WORTH_OF_GAINS] if promised else [])))


def by_precision(graph: Graph, machine: Machine, cpu: CpuTarget, notes: tuple[str, ...] = ()) -> list[NetworkAnalysis]:
    """Analyses in every precision supported by ``machine`` and ``cpu``; for a quantised model in its own only."""
    if layers_in(graph, INT8):
        return [analyze_in(INT8, graph, machine, cpu, notes)]
    usable = (dtype for dtype in PRECISE_TYPES if dtype in machine.compute and cpu.lacks(dtype) is None)
    found = [replace(analyze(in_precision(graph, each, cpu), machine, cpu), precision=each) for each in usable]
    return [_with_notes(each, notes) for each in found]


def analyze(graph: Graph, machine: Machine, cpu: CpuTarget, cost_model: CostModel | None = None) -> NetworkAnalysis:
    """Predict every site of ``graph`` fused and unfused on ``cpu.threads`` threads of ``machine``.

    ``cost_model`` predicts the seconds (default: the roofline); levels, bounds and intensities are the roofline's.
    """
    roofline = RooflineModel(machine, cpu.threads, network_bytes(graph))
    sites = find_sites(graph, cpu)
    seconds = predict_seconds(sites, cost_model or roofline)
    explain = cache(roofline.explain)
    tunable = [site for site in sites if not is_hopeless(site, seconds, explain)]
    plan = select(graph, tunable, seconds)
    hopeless = {site.name for site in sites} - {site.name for site in tunable}
    rivals = {node.name: site.name for site in tunable if plan.fuses(site) for node in site.nodes}
    reports = tuple(_report(site, hopeless, rivals, plan, seconds, explain) for site in sites)
    others = tuple(OtherOperator(other.name, other.operator, other.reason) for other in graph.others)
    return NetworkAnalysis(machine.name, cpu.threads, reports, len(graph.nodes), others)


def network_bytes(graph: Graph) -> float:
    """Bytes of all weights and activations: memory traffic of a run between two uses of a weight."""
    return float(sum(node.operator.weight_bytes + node.operator.output_bytes for node in graph.nodes))


def predict_seconds(sites: Sequence[Site], cost_model: CostModel) -> dict[Operator, float]:
    """Predicted seconds of every site's kernel and of the kernels it replaces."""
    operators: dict[Operator, None] = {}
    for site in sites:
        operators.update(dict.fromkeys([*(node.operator for node in site.nodes), site.operator]))
    estimates = cost_model.estimate(list(operators))
    return {operator: estimate.seconds for operator, estimate in zip(operators, estimates, strict=True)}


def is_hopeless(site: Site, seconds: Mapping[Operator, float], explain: Explain) -> bool:
    """True if ``site`` is a pair of dense convolutions whose fusion is not predicted to save 2 %.

    Both bounds must agree: full overlap of memory and arithmetic, and no overlap. A ResNet has dozens of such pairs;
    sites of other kinds are left out under a time limit alone, if they lose clearly. ``seconds``: predictions for its
    kernel and for those it replaces; ``explain``: the roofline.
    """
    if not has_dense_window(site.operator):
        return False
    apart, serial = unfused_seconds(site, seconds), sum(explain(node.operator).serial_seconds for node in site.nodes)
    assert apart is not None, "every kernel has a prediction"
    bounds = ((seconds[site.operator], apart), (explain(site.operator).serial_seconds, serial))
    return all(fused > (1 - NEGLIGIBLE) * unfused for fused, unfused in bounds)


def _report(
    site: Site,
    hopeless_sites: Collection[str],
    rivals: Mapping[str, str],
    plan: FusionPlan,
    seconds: Mapping[Operator, float],
    explain: Explain,
) -> SiteReport:
    """Report on one site; ``rivals`` maps a node name to the name of the chosen site that contains it."""
    fused = explain(site.operator)
    unfused = [explain(node.operator) for node in site.nodes]
    unfused_time = unfused_seconds(site, seconds)
    assert unfused_time is not None  # predict covers every node of every site
    fused_time = seconds[site.operator]
    chosen = plan.fuses(site)
    hopeless = site.name in hopeless_sites
    overlapping = (rivals[node.name] for node in site.nodes if node.name in rivals)
    rival = None if chosen or hopeless else next(overlapping, None)
    reason = explain_decision(LayerCost.of(unfused), LayerCost.of([fused]), unfused_time, fused_time, chosen, rival)
    return SiteReport(
        name=site.name,
        kind=site.kind,
        layers=tuple(_layer(node) for node in site.nodes),
        flops=site.operator.flops,
        unfused_intensity=unfused_intensity(site.operator.convs),
        fused_intensity=fused.arithmetic_intensity,
        tensors=_places(site, unfused, fused),
        recomputation=fused.recomputation,
        unfused_seconds=unfused_time,
        fused_seconds=fused_time,
        unfused_bounds=tuple(report.bound for report in unfused),
        fused_bound=fused.bound,
        fuse=chosen,
        reason=f"{reason}; {NOT_TUNED}" if hopeless else reason,
        hopeless=hopeless,
    )


def _layer(node: Node) -> LayerReport:
    conv = node.operator
    assert isinstance(conv, Conv2d)  # sites are chains of convolutions
    shapes = (conv.input_shape, conv.output_shape)
    return LayerReport(node.name, conv_kind(conv), conv.kernel, conv.stride, *shapes, conv.dilation)


def window_text(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int] = (1, 1)) -> str:
    """Window as text: ``3x3``, ``3x3/2`` with stride, ``3x3/1x2`` with a column stride only, ``3x3 d4`` dilated."""
    strided = f"/{_steps(stride)}" if max(stride) > 1 else ""
    return "x".join(map(str, kernel)) + strided + (f" d{_steps(dilation)}" if max(dilation) > 1 else "")


def _steps(along: Sequence[int]) -> str:
    return "x".join(map(str, along)) if len({*along}) > 1 else str(along[0])


def unfused_intensity(convs: Sequence[Conv2d]) -> float:
    """Arithmetic intensity in flop/B if every layer reads its input and writes its output."""
    size = sum(conv.input_bytes + conv.weight_bytes + conv.output_bytes + conv.residual_bytes for conv in convs)
    return sum(conv.flops for conv in convs) / size


def _places(site: Site, unfused: Sequence[RooflineReport], fused: RooflineReport) -> tuple[TensorPlace, ...]:
    """Input, weights, intermediate, residual and output with their memory levels, unfused and fused."""
    first, last = unfused[0].levels, unfused[-1].levels
    operator = site.operator
    weights = " and ".join(dict.fromkeys(report.levels["weights"] for report in unfused))
    places = [
        TensorPlace("input", operator.input_bytes, first["input"], fused.levels["input"]),
        TensorPlace("weights", operator.weight_bytes, weights, fused.levels["weights"]),
        TensorPlace(
            "intermediate",
            sum(conv.output_bytes for conv in site.operator.convs[:-1]),
            first["output"],
            fused.levels["intermediate"],
        ),
    ]
    if operator.residual_bytes:
        places.append(TensorPlace("residual", operator.residual_bytes, last["residual"], fused.levels["residual"]))
    return (*places, TensorPlace("output", operator.output_bytes, last["output"], fused.levels["output"]))
