"""Reports of unsupported operators, all at once, with advice to cut out the part of the model before them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import ModelError, UnsupportedOperatorError
from fusion.relax.onnx.onnx_file import all_nodes, nested_nodes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

RANDOM_OPERATORS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
STANDARD_DOMAINS = ("", "ai.onnx")
# Operators whose result shapes depend on values.
SHAPED_BY_VALUES = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_RUNTIMES_OWN = "com.microsoft"
_QUANTISED = ("QLinear", "QGemm", "QAttention", "ConvInteger", "DynamicQuantize", "MatMulNBits", "MatMulInteger")
# Layers, at least one of which makes a part worth tuning.
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MOST_NAMED = 6


def may_simplify(node: NodeProto) -> bool:
    """True if a library may evaluate the node: not for operators of other domains, nor for random numbers."""
    return node.domain in STANDARD_DOMAINS and node.op_type not in RANDOM_OPERATORS


def raise_unsupported(file: Path, graph: GraphProto, original: GraphProto) -> None:
    """Raise ``UnsupportedOperatorError`` that lists every operator without a converter once, with its nodes, and
    explains how to cut the part before them out of ``original``, the graph of ``file``.
    """
    from fusion.relax.onnx.onnx_frontend import supported_operators

    supported = supported_operators()

    def is_unsupported(node: NodeProto) -> bool:
        return not may_simplify(node) or node.op_type not in supported

    found: dict[str, list[str]] = {}
    for node in filter(is_unsupported, all_nodes(graph)):
        operator = f"{node.domain}.{node.op_type}" if node.domain not in STANDARD_DOMAINS else node.op_type
        found.setdefault(operator, []).append(node.name)
    if found:
        listed = "; ".join(f"{operator} ({_some(nodes)})" for operator, nodes in sorted(found.items()))
        way = part_before(file, graph, original, is_unsupported)
        raise UnsupportedOperatorError(f"{file}: unsupported operators: {listed}{_origin(found)}{way}")


def _origin(operators: Collection[str]) -> str:
    """Return advice on the source of operators that exporters do not write, if all are such: another file should be
    tuned.
    """
    names = [name.removeprefix(f"{_RUNTIMES_OWN}.") for name in operators]
    if all(name.startswith(_QUANTISED) for name in names):
        return (
            "; no kernel computes what is quantised so: tune the model from before it was quantised, or one of QDQ form"
        )
    if all(name.startswith(f"{_RUNTIMES_OWN}.") for name in operators):
        return "; these are ONNX Runtime's own: tune the model from before its optimiser rewrote it"
    return ""


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def part_before(file: Path, graph: GraphProto, original: GraphProto, ends: Callable[[NodeProto], bool]) -> str:
    """Return advice (``; ...``) to cut out of ``file`` the part before the nodes for which ``ends`` is true; empty if
    that part has no layer, or its results have no names in ``original``.
    """
    if not any(map(ends, all_nodes(graph))):
        return ""
    inputs, outputs = _interface_before(graph, ends)
    known = {name for node in original.node for name in node.output}
    if not outputs or not known.issuperset(outputs) or len(outputs) > _MOST_NAMED:
        return ""
    cut = f"onnx.utils.extract_model({str(file)!r}, 'part.onnx', {inputs}, {outputs})"
    return f"; what comes before can be tuned by itself, cut out in Python with {cut}"


def require_known_shapes(file: Path, graph: GraphProto, original: GraphProto) -> None:
    """Raise ``ModelError`` if shapes depend on values; it names the nodes, and explains how to cut out the part before
    them.
    """
    nodes = [f"{node.op_type} ({node.name})" for node in filter(_is_shaped_by_values, all_nodes(graph))]
    if nodes:
        way = part_before(file, graph, original, _is_shaped_by_values)
        raise ModelError(
            f"{file}: how much {_some(nodes)} finds depends on the data; only static shapes are supported{way}"
        )


def _is_shaped_by_values(node: NodeProto) -> bool:
    return node.op_type in SHAPED_BY_VALUES


def _interface_before(graph: GraphProto, ends: Callable[[NodeProto], bool]) -> tuple[list[str], list[str]]:
    """Return inputs and outputs of the part that is computed before the nodes for which ``ends`` is true; empty without
    a layer.

    Outputs are the tensors of the part that those nodes, and all nodes after them, read, and the outputs of ``graph``
    in it.
    """
    weights = {tensor.name for tensor in graph.initializer}
    # Graph inputs that each tensor before those nodes is computed from.
    sources = {value.name: {value.name} for value in graph.input if value.name not in weights}
    computed: set[str] = set()
    wanted: dict[str, None] = {}
    has_layer = False
    for node in graph.node:
        nodes = [node, *nested_nodes(node)]
        inside = {name for each in nodes[1:] for name in each.output}
        read = [name for each in nodes for name in each.input if name and name not in inside]
        if any(map(ends, nodes)) or any(name not in sources and name not in weights for name in read):
            wanted.update((name, None) for name in read if name in computed)
            continue
        origins = {origin for name in read for origin in sources.get(name, ())}
        sources.update((name, origins) for name in node.output)
        computed.update(name for name in node.output if origins)
        has_layer = has_layer or any(each.op_type in _LAYERS for each in nodes)
    wanted.update((value.name, None) for value in graph.output if value.name in computed)
    used = {origin for name in wanted for origin in sources[name]}
    return ([value.name for value in graph.input if value.name in used], list(wanted)) if has_layer else ([], [])
