"""Is an ONNX model quantised, which of its layers are, and of which file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.relax.onnx.onnx_file import all_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# Layers that do a network's arithmetic, as ONNX and ONNX Runtime's optimiser name them: in floating point, and in
# integers.
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
    """Whether some value of ``graph`` or its sub-graphs is rounded to integers, or some layer computed in them."""
    return any(node.op_type in _STEPS or node.op_type in INTEGER_LAYERS for node in all_nodes(graph))


def integer_share(nodes: Iterable[NodeProto]) -> tuple[int, int]:
    """Layers computed in integers, and all layers, of a graph as ONNX Runtime's optimiser left it."""
    kinds = [node.op_type for node in nodes]
    integers = sum(kind in INTEGER_LAYERS for kind in kinds)
    return integers, integers + sum(kind in FLOAT_LAYERS for kind in kinds)


def quantised_share(graph: GraphProto) -> tuple[int, int]:
    """Quantised layers and all layers of a graph as a file holds it: those of integers, and those of floating point
    whose data and weights both come out of integers.
    """
    restored = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    layers = [node for node in graph.node if node.op_type in FLOAT_LAYERS or node.op_type in INTEGER_LAYERS]
    quantised = (node.op_type in INTEGER_LAYERS or restored.issuperset(node.input[:2]) for node in layers)
    return sum(quantised), len(layers)


def quantized_path(model: Path) -> Path:
    """Where ``python -m fusion quantize`` writes the quantised file of ``model`` unless told, and where it is looked
    for.
    """
    return model.with_name(f"{model.stem}-int8.onnx")


def set_origin(quantised: ModelProto, digest: str) -> None:
    """Notes in ``quantised`` the SHA-256 of the file that it was made from."""
    for entry in [each for each in quantised.metadata_props if each.key == _ORIGIN]:
        quantised.metadata_props.remove(entry)
    entry = quantised.metadata_props.add()
    entry.key, entry.value = _ORIGIN, digest


def origin_of(model: ModelProto) -> str | None:
    """The SHA-256 of the file that ``model`` was quantised from; ``None`` if another tool made it."""
    return next((entry.value for entry in model.metadata_props if entry.key == _ORIGIN), None)
