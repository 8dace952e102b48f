"""An ONNX graph as a ``torch.fx.GraphModule`` of plain ``torch.nn.functional`` calls.

Each ONNX operator becomes the call a PyTorch user would have written, so that eager, TorchScript and Inductor see an
ordinary model. Whatever depends on constants and static shapes alone is computed here and becomes a constant.
Operator semantics: https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from fusion.engines.base import Unavailable

Operand = Any  # a Value, or a number, a tuple, None: what a torch function takes


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: ``example`` is the value for the example inputs, the value itself if ``node`` is None."""

    example: torch.Tensor
    node: torch.fx.Node | None = None


class Builder:
    """Builds an fx graph while computing every value on example inputs."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.buffers = torch.nn.Module()
        self._buffer_nodes: dict[int, torch.fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # keeps the ids above unique

    def input(self, name: str, example: torch.Tensor) -> Value:
        """A placeholder."""
        return Value(example, self.graph.placeholder(name))

    def call(self, function: Callable[..., Any], *args: Operand, **kwargs: Operand) -> Value:
        """Apply ``function``; computed at once, leaving no node, if no argument depends on an input."""
        leaves: list[Any] = []
        torch.fx.node.map_aggregate((args, kwargs), leaves.append)
        values = [leaf for leaf in leaves if isinstance(leaf, Value)]
        example = function(*_examples(args), **_examples(kwargs))
        if all(value.node is None for value in values):
            return Value(example)
        arguments, keywords = torch.fx.node.map_aggregate((args, kwargs), self._operand)
        return Value(example, self.graph.call_function(function, arguments, keywords))

    def finish(self, outputs: Sequence[Value]) -> torch.fx.GraphModule:
        """The module; it returns a tuple."""
        self.graph.output(tuple(self._operand(value) for value in outputs))
        self.graph.lint()
        return torch.fx.GraphModule(self.buffers, self.graph).eval()

    def _operand(self, operand: Operand) -> Any:
        if not isinstance(operand, Value):
            return operand
        return operand.node if operand.node is not None else self._buffer(operand.example)

    def _buffer(self, tensor: torch.Tensor) -> torch.fx.Node:
        key = id(tensor)
        if key not in self._buffer_nodes:
            name = f"constant_{len(self._buffer_nodes)}"
            self.buffers.register_buffer(name, tensor)
            self._alive.append(tensor)
            self._buffer_nodes[key] = self.graph.get_attr(name)
        return self._buffer_nodes[key]


@dataclass(frozen=True)
class Call:
    """One ONNX node under conversion: its operands (absent optional ones are ``None``) and attributes."""

    builder: Builder
    operator: str
    inputs: list[Value | None]
    attributes: Mapping[str, Any]
    outputs: int
    opset: int

    def __getitem__(self, index: int) -> Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def ints(self, index: int, attribute: str) -> list[int] | None:
        """Integers from an attribute (old opsets) or from a constant input (new ones)."""
        if attribute in self.attributes:
            return list(self.attributes[attribute])
        value = self[index]
        return None if value is None else [int(item) for item in self.constant(value).reshape(-1).tolist()]

    def number(self, index: int, attribute: str, default: float) -> float:
        """A number from an attribute or a constant input."""
        value = self[index]
        return float(self.attributes.get(attribute, default) if value is None else self.constant(value).item())

    def constant(self, value: Value) -> torch.Tensor:
        """The value of an operand that PyTorch wants at compile time."""
        if value.node is not None:
            raise Unavailable(f"ONNX operator {self.operator}: an operand must be constant for PyTorch")
        return value.example


Converter = Callable[[Call], Value | Sequence[Value]]


def convert(path: Path, examples: Mapping[str, np.ndarray], outputs: Sequence[str]) -> torch.fx.GraphModule:
    """Convert the model of ``path`` for the shapes of ``examples``; the module takes them in order, returns a tuple.

    Raises ``Unavailable`` naming the first operator that has no conversion.
    """
    from fusion.engines.torch_operators import CONVERTERS

    model = onnx.load(str(path))
    opset = max(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    builder = Builder()
    values: dict[str, Value | None] = {"": None}
    for tensor in model.graph.initializer:
        values[tensor.name] = Value(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
    for index, (name, array) in enumerate(examples.items()):
        values[name] = builder.input(f"input_{index}", torch.from_numpy(np.array(array)))
    with torch.inference_mode(False), torch.no_grad():
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx") or node.op_type not in CONVERTERS:
                raise Unavailable(f"no conversion of ONNX operator {node.op_type} to PyTorch")
            operands = [values[name] for name in node.input]
            call = Call(builder, node.op_type, operands, _attributes(node), len(node.output), opset)
            results = CONVERTERS[node.op_type](call)
            produced = [results] if isinstance(results, Value) else list(results)
            values.update(zip(node.output, produced, strict=False))
    missing = [name for name in outputs if values.get(name) is None]
    if missing:
        raise Unavailable(f"output '{missing[0]}' was not converted to PyTorch")
    return builder.finish([value for name in outputs if (value := values[name]) is not None])


def split_results(builder: Builder, parts: Value, count: int) -> list[Value]:
    """The elements of a call that returns several tensors."""
    return [builder.call(operator.getitem, parts, index) for index in range(count)]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _examples(operands: Any) -> Any:
    return torch.fx.node.map_aggregate(operands, lambda leaf: leaf.example if isinstance(leaf, Value) else leaf)
