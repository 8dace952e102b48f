"""The shipped network as data: layers, which of them one kernel computes, what each takes and could take at best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Operator, Pool2d, conv_kind
from fusion.analysis.analyzer import network_bytes
from fusion.commands.console_report import window_told
from fusion.model.conv_graph import Graph
from fusion.model.selection import FusionPlan

if TYPE_CHECKING:
    from tvm import relax

Layer = Conv2d | Pool2d | Dense | ChannelNorm


def network_record(
    graph: Graph, plan: FusionPlan, seconds: Mapping[Operator, float], machine: Machine, threads: int
) -> dict[str, Any]:
    """``layers`` in program order, each with the names of those that it reads; ``kernels`` of ``plan``, with measured
    ``seconds`` (``None`` where there are none) beside the roofline's; ``ceilings``: flop/s by dtype, bytes/s by level.

    A layer that no template covers has no ``kernel``; ``kind`` is then TVM's operator.
    """
    roofline = RooflineModel(machine, threads, network_bytes(graph))
    reads = _reads(graph)
    place = {node.name: number for number, group in enumerate(plan.groups) for node in group.nodes}
    layers: dict[str, dict[str, Any]] = {
        node.name: {
            "name": node.name,
            "kind": layer_kind(node.operator),
            "told": layer_told(node.operator),
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
    """``depthwise``, ``pointwise``, ``conv``, ``pool``, ``dense``, ``norm`` ..."""
    if isinstance(operator, Conv2d):
        return conv_kind(operator)
    return {Pool2d: "pool", Dense: "dense", ChannelNorm: "norm"}[type(operator)]


def layer_told(operator: Layer) -> str:
    """Window and output, such as ``3x3/2 -> 32x112x112``; the image before its channels is left out where it is one."""
    window = ""
    if isinstance(operator, Conv2d | Pool2d):
        window = window_told(operator.kernel, operator.stride, getattr(operator, "dilation", (1, 1)))
    shape = getattr(operator, "output_shape", None)
    if shape is None:
        return window
    sizes = shape[1:] if len(shape) > 1 and shape[0] == 1 else shape
    return f"{window} -> {'x'.join(map(str, sizes))}".strip()


def _reads(graph: Graph) -> dict[str, list[str]]:
    """Layer -> names of the layers whose results it reads, through variables that belong to none."""
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
    """Names in an order in which each comes behind those that it reads; else as they are given."""
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
