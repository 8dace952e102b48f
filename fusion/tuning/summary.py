"""``summary.json``: predictions and measurements of tuning, and the shipped network as data."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Operator, Pool2d, conv_kind
from fusion.analysis.analyzer import NetworkAnalysis, SiteReport, network_bytes, window_text
from fusion.comparing.layer_table import LayerTable
from fusion.comparing.output_errors import OutputErrors, errors_json
from fusion.model.conv_graph import FusionPlan, Graph, Site, precision_of, unfused_seconds
from fusion.tuning.network import Network
from fusion.tuning.network_tuning import TunedKernels

if TYPE_CHECKING:
    from tvm import relax

Layer = Conv2d | Pool2d | Dense | ChannelNorm

_VERSIONED = ("apache-tvm", "onnx", "onnxruntime", "numpy", "fusion-costmodel")


def site_rows(
    analysis: NetworkAnalysis, sites: Sequence[Site], tuned: TunedKernels, selected: FusionPlan, shipped: FusionPlan
) -> list[dict[str, Any]]:
    """One row per site. ``selected``: plan by measured kernels; ``shipped``: plan of the shipped model."""
    seconds = tuned.comparable_seconds()
    return [
        _site_row(report, site, tuned, seconds, selected, shipped)
        for report, site in zip(analysis.sites, sites, strict=True)
    ]


def _site_row(
    report: SiteReport,
    site: Site,
    tuned: TunedKernels,
    seconds: Mapping[Operator, float],
    selected: FusionPlan,
    shipped: FusionPlan,
) -> dict[str, Any]:
    fused, unfused = seconds.get(site.operator), unfused_seconds(site, seconds)
    return {
        "name": site.name,
        "kind": site.kind,
        "layers": [asdict(layer) for layer in report.layers],
        "flops": report.flops,
        "unfused_intensity": report.unfused_intensity,
        "fused_intensity": report.fused_intensity,
        "predicted": {
            "unfused_seconds": report.unfused_seconds,
            "fused_seconds": report.fused_seconds,
            "bound": report.fused_bound,
            "fuse": report.fuse,
            "reason": report.reason,
        },
        "measured": {
            "unfused_seconds": unfused,
            "fused_seconds": fused,
            "in_network": tuned.rehearsed is not None and site.operator in tuned.rehearsed.seconds,
        },
        "fuse": selected.fuses(site),
        "fused_in_model": shipped.fuses(site),
        "decision": f"kept apart: {report.reason}"
        if report.hopeless and fused is None
        else _decision(fused, unfused, selected.fuses(site), shipped.fuses(site)),
    }


def _decision(fused: float | None, unfused: float | None, selected: bool, shipped: bool) -> str:
    """Decision in words, from the measurements."""
    if fused is None or unfused is None:
        if shipped:
            return "fused: predicted to be faster: not all of its kernels have been measured"
        return "kept apart: not all of its kernels have been measured, and no records of them say that it pays"
    if fused >= unfused:
        slower = f"fused it took {fused / unfused:.2f} times as long"
        return f"fused: {slower} by itself, the network is faster" if shipped else f"kept apart: {slower}"
    gain = f"{unfused / fused:.2f} times faster fused"
    if not selected:
        return f"kept apart: {gain}, but another choice is faster for the whole chain"
    if not shipped:
        return f"kept apart: {gain} by itself, but the whole network was not faster with fusion"
    return f"fused: {gain}"


def document(
    network: Network,
    tuned: TunedKernels,
    *,
    selected: FusionPlan,
    shipped: FusionPlan,
    seconds: Mapping[Operator, float],
    latency: Mapping[str, float | None],
    finals: Mapping[str, Any],
    check: Mapping[str, Any],
    memory: Mapping[str, Mapping[str, int | None]],
    precision: Mapping[str, Any],
    notes: Sequence[str],
    wall_seconds: float,
    errors: OutputErrors | None = None,
    peers: Mapping[str, Mapping[str, Any]] | None = None,
    layers: LayerTable | None = None,
) -> dict[str, Any]:
    """JSON document of a build of ``network``.

    - ``selected``: plan by measured kernels; ``shipped``: plan of the shipped model; ``seconds``: of its kernels
    - ``finals``: networks timed in alternation at the end
    - ``check``: reference of the outputs, and result
    - ``memory``: bytes by network: planned activations, weights and tile buffers of ours, and the memory growth of each
      process at its first run
    - ``precision``: errors of number types other than float32
    - ``errors``: against ONNX Runtime on random inputs (None: nothing was run)
    - ``peers``: other requested engines, with their modes and errors
    - ``layers``: layers in which another engine is faster
    """
    machine, cpu = network.machine, network.cpu
    return {
        "model": str(network.request.model),
        "inputs": [{**asdict(info), "shape": list(info.shape)} for info in network.model.inputs],
        "latency_seconds": dict(latency),
        "finals": dict(finals),
        "check": dict(check),
        "peers": {name: dict(row) for name, row in (peers or {}).items()},
        "layers": None if layers is None else asdict(layers),
        "sites": site_rows(network.analysis, network.sites, tuned, selected, shipped),
        **errors_json(errors),
        "precision": {"shipped": precision_of(network.graph), **precision},
        "memory": {name: dict(row) for name, row in memory.items()},
        "other_operators": [asdict(other) for other in network.analysis.others],
        "network": network_record(network.graph, shipped, seconds, machine, cpu.threads),
        "tuning_curve": [asdict(point) for point in tuned.curve],
        "notes": list(notes),
        "machine": {
            "name": machine.name,
            "description": machine.description,
            "mcpu": cpu.mcpu,
            "features": list(cpu.features),
            "threads": cpu.threads,
        },
        "versions": versions(),
        "trials": tuned.trials,
        "failures": tuned.failures,
        "wall_seconds": wall_seconds,
        "interrupted": tuned.interrupted,
    }


def profiles_document(summaries: Mapping[str, Mapping[str, Any]], wall_seconds: float) -> dict[str, Any]:
    """JSON document of a build for several input shapes; ``summaries``: folder -> summary of the profile."""
    each = list(summaries.values())
    return {
        "model": each[0]["model"],
        "profiles": [{"folder": folder, **summary} for folder, summary in summaries.items()],
        "trials": sum(summary["trials"] for summary in each),
        "failures": sum(summary["failures"] for summary in each),
        "wall_seconds": wall_seconds,
        "interrupted": any(summary["interrupted"] for summary in each),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the result."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def network_record(
    graph: Graph, plan: FusionPlan, seconds: Mapping[Operator, float], machine: Machine, threads: int
) -> dict[str, Any]:
    """Shipped network as data.

    - ``layers``: in program order, each with the names of the layers it reads; a layer without a template has no
      ``kernel``, and its ``kind`` is TVM's operator
    - ``kernels``: of ``plan``, with measured ``seconds`` (or None) and the roofline's prediction
    - ``ceilings``: flop/s by dtype, bytes/s by level
    """
    roofline = RooflineModel(machine, threads, network_bytes(graph))
    reads = _reads(graph)
    place = {node.name: number for number, group in enumerate(plan.groups) for node in group.nodes}
    layers: dict[str, dict[str, Any]] = {
        node.name: {
            "name": node.name,
            "kind": layer_kind(node.operator),
            "told": layer_text(node.operator),
            "reads": reads[node.name],
            "kernel": place[node.name],
        }
        for node in graph.nodes
    }
    for other in graph.others:
        layers[other.name] = {"name": other.name, "kind": other.operator, "told": "", "reads": reads[other.name]}
    kernels: list[dict[str, Any]] = []
    for group in plan.groups:
        report = roofline.explain(group.operator)
        kernels.append(
            {
                "layers": [node.name for node in group.nodes],
                "seconds": seconds.get(group.operator),
                "predicted_seconds": report.seconds,
                "bound": report.bound,
                "flops": group.operator.flops,
                "intensity": report.arithmetic_intensity,
                "dtype": getattr(group.operator, "dtype", "float32"),
            }
        )
    dtypes = dict.fromkeys(str(kernel["dtype"]) for kernel in kernels)
    return {
        "layers": [layers[name] for name in _in_order(reads)],
        "kernels": kernels,
        "ceilings": {
            "flops": {dtype: machine.peak_flops(dtype, threads) for dtype in dtypes if dtype in machine.compute},
            "bandwidths": {level.name: level.bandwidth.at(threads) for level in machine.memory},
        },
    }


def layer_kind(operator: Layer) -> str:
    """Kind of a layer: ``depthwise``, ``pointwise``, ``conv``, ``pool``, ``dense``, ``norm`` ..."""
    if isinstance(operator, Conv2d):
        return conv_kind(operator)
    return {Pool2d: "pool", Dense: "dense", ChannelNorm: "norm"}[type(operator)]


def layer_text(operator: Layer) -> str:
    """Window and output, such as ``3x3/2 -> 32x112x112``; a batch of one is left out."""
    window = ""
    if isinstance(operator, Conv2d | Pool2d):
        window = window_text(operator.kernel, operator.stride, getattr(operator, "dilation", (1, 1)))
    shape = getattr(operator, "output_shape", None)
    if shape is None:
        return window
    sizes = shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
    return f"{window} -> {'x'.join(map(str, sizes))}".strip()


def _reads(graph: Graph) -> dict[str, list[str]]:
    """Layer -> names of the layers whose results it reads, also through variables outside layers."""
    owner: dict[relax.Var, str] = {var: node.name for node in graph.nodes for var in node.covered}
    owner.update({other.output: other.name for other in graph.others})

    def reached(var: relax.Var, seen: set[relax.Var]) -> Iterator[str]:
        for reader in graph.readers.get(var, ()):
            if reader in owner:
                yield owner[reader]
            elif reader not in seen:
                seen.add(reader)
                yield from reached(reader, seen)

    reads: dict[str, list[str]] = {name: [] for name in owner.values()}
    results = [(node.name, node.output) for node in graph.nodes]
    for name, var in [*results, *((other.name, other.output) for other in graph.others)]:
        for reader in reached(var, set()):
            if reader != name and name not in reads[reader]:
                reads[reader].append(name)
    return reads


def _in_order(reads: Mapping[str, Sequence[str]]) -> list[str]:
    """Names in topological order, otherwise in the given order."""
    found: dict[str, None] = {}
    for name in reads:
        waiting = [name]
        while waiting:
            missing = [source for source in reads[waiting[-1]] if source not in found and source not in waiting]
            if missing:
                waiting.extend(missing)
            else:
                found[waiting.pop()] = None
    return list(found)
