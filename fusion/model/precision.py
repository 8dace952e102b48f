"""Number type in which each layer of a network is stored; all sums are float32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from costmodel.base.errors import InputError
from costmodel.operators.layers import Operator

if TYPE_CHECKING:
    from fusion.model.conv_graph import Graph
    from schedules.contract.cpu_target import CpuTarget

FLOAT32: Literal["float32"] = "float32"
BFLOAT16: Literal["bfloat16"] = "bfloat16"
INT8: Literal["int8"] = "int8"
# User options; `auto`: bfloat16 where it is worth its error; `int8`: a float model is quantised.
Precision = Literal["float32", "bfloat16", "int8", "auto"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "auto")


def in_dtype(operator: Any, dtype: str) -> Any:
    """``operator`` (one layer) with its tensors in ``dtype``."""
    return operator if operator.dtype == dtype else replace(operator, dtype=dtype)


def layers_covered(graph: Graph, dtype: str, cpu: CpuTarget) -> frozenset[str]:
    """Names of the layers that our kernels compute in ``dtype`` on ``cpu``; quantised layers are excluded."""
    from schedules.kernels.template_table import template_for

    known: dict[Operator, bool] = {}
    for node in graph.nodes:
        if node.operator.dtype == INT8:
            known[node.operator] = False
        if node.operator not in known:
            known[node.operator] = template_for(in_dtype(node.operator, dtype), cpu) is not None
    return frozenset(node.name for node in graph.nodes if known[node.operator])


def stored_in(graph: Graph, names: Collection[str], dtype: str) -> Graph:
    """``graph`` with the layers ``names`` in ``dtype``, others unchanged."""
    nodes = [
        replace(node, operator=in_dtype(node.operator, dtype)) if node.name in names else node for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def require_float(graph: Graph, precision: str) -> None:
    """Raise ``InputError`` if ``precision`` is not float32 and the model is quantised: its file defines the types."""
    quantised = sum(node.operator.dtype == INT8 for node in graph.nodes)
    if precision != FLOAT32 and quantised:
        raise InputError(
            f"--precision {precision}: the model is quantised, {quantised} of its {len(graph.nodes)} layers are "
            "computed in whole numbers as its file says; leave --precision out, or take the float model"
        )


def precision_of(graph: Graph) -> str:
    """Common number type of all layers with weights (without any: of all layers), or ``mixed``.

    Pooling between quantised layers may be float32 (averages), and does not count as mixed.
    """
    layers = [node for node in graph.nodes if node.parameters] or graph.nodes
    found = {node.operator.dtype for node in layers} or {FLOAT32}
    return found.pop() if len(found) == 1 else "mixed"


def layers_in(graph: Graph, dtype: str) -> frozenset[str]:
    """Names of the layers of ``graph`` that are stored in ``dtype``."""
    return frozenset(node.name for node in graph.nodes if node.operator.dtype == dtype)
