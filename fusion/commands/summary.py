"""``summary.json``: what tuning found, predicted and measured beside each other."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Operator
from fusion.analysis.analyzer import NetworkAnalysis, OtherOperator, SiteReport
from fusion.comparing.layer_table import LayerTable
from fusion.comparing.output_errors import OutputErrors, errors_json
from fusion.model.candidates import Site
from fusion.model.selection import FusionPlan, unfused_seconds
from fusion.model.tensor_info import TensorInfo
from fusion.search.network_tuning import CurvePoint, TunedKernels
from schedules.contract.cpu_target import CpuTarget

_VERSIONED = ("apache-tvm", "onnx", "onnxruntime", "numpy", "fusion-costmodel")


@dataclass(frozen=True)
class TuningEffort:
    """What tuning cost. ``trials``: kernels measured in this run; ``wall_seconds``: of the whole command."""

    trials: int
    failures: int
    wall_seconds: float
    interrupted: bool


def site_rows(
    analysis: NetworkAnalysis, sites: Sequence[Site], tuned: TunedKernels, selected: FusionPlan, shipped: FusionPlan
) -> list[dict[str, Any]]:
    """One row per site. ``selected``: by measured kernels; ``shipped``: what the model runs."""
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
    """In words, from the measurements."""
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
    *,
    model: str,
    inputs: Sequence[TensorInfo],
    machine: Machine,
    cpu: CpuTarget,
    sites: Sequence[Mapping[str, Any]],
    latency: Mapping[str, float | None],
    finals: Mapping[str, Any],
    check: Mapping[str, Any],
    errors: OutputErrors | None,
    memory: Mapping[str, Mapping[str, int | None]],
    others: Sequence[OtherOperator],
    notes: Sequence[str],
    effort: TuningEffort,
    precision: Mapping[str, Any] | None = None,
    peers: Mapping[str, Mapping[str, Any]] | None = None,
    layers: LayerTable | None = None,
    network: Mapping[str, Any] | None = None,
    curve: Sequence[CurvePoint] = (),
) -> dict[str, Any]:
    """The JSON document; ``errors``: against ONNX Runtime on random inputs (``None``: nothing was run).

    ``memory``: bytes by network: planned activations, weights and tile buffers of ours, and what a process of each took
    more when it first ran. ``finals``: networks that were timed in turns at the end; ``check``: what the outputs were
    compared with. ``peers``: other engines that were asked for, how they run and how exact they are. ``precision``: in
    which number types layers are stored, and what that costs. ``layers``: by which layers another engine is faster.
    ``network``: what is shipped, layer by layer (:mod:`fusion.commands.network_record`); ``curve``: of the tuning.
    """
    return {
        "model": model,
        "inputs": [{**asdict(info), "shape": list(info.shape)} for info in inputs],
        "latency_seconds": dict(latency),
        "finals": dict(finals),
        "check": dict(check),
        "peers": {name: dict(row) for name, row in (peers or {}).items()},
        "layers": None if layers is None else asdict(layers),
        "sites": list(sites),
        **errors_json(errors),
        "precision": dict(precision or {"shipped": "float32"}),
        "memory": {name: dict(row) for name, row in memory.items()},
        "other_operators": [asdict(other) for other in others],
        "network": None if network is None else dict(network),
        "tuning_curve": [asdict(point) for point in curve],
        "notes": list(notes),
        "machine": {
            "name": machine.name,
            "description": machine.description,
            "mcpu": cpu.mcpu,
            "features": list(cpu.features),
            "threads": cpu.threads,
        },
        "versions": versions(),
        **asdict(effort),
    }


def profiles_document(summaries: Mapping[str, Mapping[str, Any]], wall_seconds: float) -> dict[str, Any]:
    """The JSON document of a build for several input shapes; ``summaries``: that of each profile by its folder."""
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
    """Python and the packages that decide the result."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
