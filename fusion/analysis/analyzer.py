"""Roofline analysis of the fusion sites of a model, with reasons; nothing is tuned or measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from costmodel.base.errors import InputError
from costmodel.base.say import Say
from costmodel.cpu.fused_tile import has_dense_window
from costmodel.cpu.roofline import RooflineModel, RooflineReport
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel
from costmodel.operators.layers import Conv2d, Operator, conv_kind
from fusion.analysis.precision_outlook import PRECISE_TYPES, WORTH_OF_GAINS, PrecisionOutlook, in_precision, outlooks
from fusion.analysis.reasons import NEGLIGIBLE, NOT_TUNED, LayerCost, explain_decision
from fusion.analysis.target_machine import this_cpu
from fusion.model.candidates import Site, find_sites
from fusion.model.precision import FLOAT32, INT8, layers_in, precision_of, require_float
from fusion.model.selection import FusionPlan, select, unfused_seconds

if TYPE_CHECKING:
    from fusion.model.conv_graph import Graph, Node
    from schedules.contract.cpu_target import CpuTarget

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


def analyze_model(
    model: Path,
    shapes: Mapping[str, tuple[int, ...]],
    machine: str | None,
    threads: int | None,
    say: Say,
    batch: int | None = None,
    precision: str = FLOAT32,
) -> NetworkAnalysis:
    """Analyse an ONNX file with its layers in ``precision``; quantised models keep their own precision."""
    return analyze_in(precision, *read_graph(model, shapes, machine, threads, say, batch, precision))


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
    from fusion.relax.onnx.float_layers import told_in_floats
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.onnx_file import require_loaded

    target = this_cpu(machine, threads, say)
    cpu = target.cpu
    if precision != FLOAT32 and (reason := cpu.lacks(precision)) is not None:
        raise InputError(f"--precision {precision}: {reason}; choose --precision float32")
    imported = import_onnx(model, shapes, batch, cpu.lacks(INT8) is None)
    require_loaded(model)
    graph = extract_graph(imported.mod)
    require_float(graph, precision)
    return ReadModel(graph, target.machine, cpu, tuple(told_in_floats(imported.in_floats)))


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
    seconds = predict(sites, cost_model or roofline)
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


def predict(sites: Sequence[Site], cost_model: CostModel) -> dict[Operator, float]:
    """Predicted seconds of every site's kernel and of the kernels it replaces."""
    operators: dict[Operator, None] = {}
    for site in sites:
        operators.update(dict.fromkeys([*(node.operator for node in site.nodes), site.operator]))
    estimates = cost_model.estimate(list(operators))
    return {operator: estimate.seconds for operator, estimate in zip(operators, estimates, strict=True)}


def is_hopeless(site: Site, seconds: Mapping[Operator, float], explain: Explain) -> bool:
    """True if ``site`` is a pair of dense convolutions whose fusion saves nothing significant by prediction.

    Both bounds must agree: full overlap of memory and arithmetic, and no overlap. A ResNet has dozens of such pairs;
    sites of other kinds are always measured. ``seconds``: predictions for its kernel and for those it replaces;
    ``explain``: the roofline.
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
