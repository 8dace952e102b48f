"""Tests for quantised ONNX models: the model, the share of its layers, and the file that it was made from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.relax.onnx.onnx_file import all_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# Layers with most of the arithmetic of a network, by the names of ONNX and of ONNX Runtime's optimiser: in floating
# point, and in integers.
FLOAT_LAYERS = frozenset(
    {"Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
)
INTEGER_LAYERS = frozenset(
    {"QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"DynamicQuantizeMatMul"}
)
_ORIGIN = "fusion.quantized_from"
_STEPS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


def is_quantised(graph: GraphProto) -> bool:
    """True if some value of ``graph`` or its sub-graphs is rounded to integers, or some layer is computed
    in integers.
    """
    return any(node.op_type in _STEPS or node.op_type in INTEGER_LAYERS for node in all_nodes(graph))


def integer_share(nodes: Iterable[NodeProto]) -> tuple[int, int]:
    """Return the numbers of integer layers and of all layers in a graph optimised by ONNX Runtime."""
    kinds = [node.op_type for node in nodes]
    integers = sum(kind in INTEGER_LAYERS for kind in kinds)
    return integers, integers + sum(kind in FLOAT_LAYERS for kind in kinds)


def quantised_share(graph: GraphProto) -> tuple[int, int]:
    """Return the numbers of quantised layers and of all layers in the graph of a file: integer layers count, and float
    layers with data and weights that are both dequantised.
    """
    restored = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    layers = [node for node in graph.node if node.op_type in FLOAT_LAYERS or node.op_type in INTEGER_LAYERS]
    quantised = (node.op_type in INTEGER_LAYERS or restored.issuperset(node.input[:2]) for node in layers)
    return sum(quantised), len(layers)


def quantized_path(model: Path) -> Path:
    """Return the default path of the quantised file of ``model``: ``python -m fusion quantize`` writes it, and other
    commands look for it there.
    """
    return model.with_name(f"{model.stem}-int8.onnx")


def set_origin(quantised: ModelProto, digest: str) -> None:
    """Record in ``quantised`` the SHA-256 of the file that it was made from."""
    for entry in [each for each in quantised.metadata_props if each.key == _ORIGIN]:
        quantised.metadata_props.remove(entry)
    entry = quantised.metadata_props.add()
    entry.key, entry.value = _ORIGIN, digest


def origin_of(model: ModelProto) -> str | None:
    """Return the SHA-256 of the file that ``model`` was quantised from; None if another tool made it."""
    return next((entry.value for entry in model.metadata_props if entry.key == _ORIGIN), None)
