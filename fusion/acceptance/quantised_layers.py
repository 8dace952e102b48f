"""Rounds layers of a float model to bytes as a quantised model of it does, each where it is told to.

What quantising any set of layers does to the outputs is so known in the time of some runs, where ONNX Runtime's
quantiser would calibrate for every set anew. Scales and zero points are those of the model with all layers quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion.acceptance.rounded_layers import SWITCHES, WRITTEN, Steps

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_QUANTISE, _RESTORE = "QuantizeLinear", "DequantizeLinear"


class ByteRounding:
    """By the steps around the layers of ``quantised``, whose nodes and tensors are called as those of the float model
    (:func:`fusion.relax.onnx.onnx_quantizer.float_form`); a :class:`fusion.acceptance.rounded_layers.LayerRounding`.
    """

    def __init__(self, quantised: ModelProto) -> None:
        graph = quantised.graph
        self._layers = {node.name: node for node in graph.node}
        self._made = {output: node for node in graph.node for output in node.output}
        # What is stored in bytes, by the name of the tensor before and behind the step there and back: of results of a
        # model the latter has the name that they have in the float one.
        self._stored = {node.input[0]: node for node in graph.node if node.op_type == _QUANTISE}
        for node in graph.node:
            before = self._made.get(node.input[0]) if node.op_type == _RESTORE else None
            if before is not None:
                self._stored[node.output[0]] = before
        self._values = {tensor.name: tensor for tensor in graph.initializer}

    def constants(self) -> list[TensorProto]:
        """Scales and zero points."""
        from onnx import TensorProto

        found = []
        for name in dict.fromkeys(
            name for node in self._layers.values() if node.op_type in (_QUANTISE, _RESTORE) for name in node.input[1:3]
        ):
            if name in self._values:
                copy = TensorProto()
                copy.CopyFrom(self._values[name])
                copy.name = _own(name)
                found.append(copy)
        return found

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        layer = self._layers.get(node.name)
        if layer is None:
            return None
        if number is WRITTEN:
            return self._there_and_back(self._stored.get(tensor))
        step = self._made.get(layer.input[number])
        return self._there_and_back(step if step is not None and step.op_type == _RESTORE else None)

    def _there_and_back(self, step: NodeProto | None) -> Steps | None:
        """To bytes by the scale of ``step`` and back; ``None`` where nothing is rounded, or by no constant."""
        if step is None or any(name not in self._values for name in step.input[1:3]):
            return None
        from onnx import helper

        scale, *zero = (_own(name) for name in step.input[1:3])
        axis = next((attribute.i for attribute in step.attribute if attribute.name == "axis"), None)
        options = {} if axis is None or not self._values[step.input[1]].dims else {"axis": axis}

        def steps(source: str, prefix: str) -> tuple[list[NodeProto], str]:
            stored, restored = f"{prefix}.stored", f"{prefix}.restored"
            return [
                helper.make_node(_QUANTISE, [source, scale, *zero], [stored], stored, **options),
                helper.make_node(_RESTORE, [stored, scale, *zero], [restored], restored, **options),
            ], restored

        return steps


def _own(name: str) -> str:
    return f"{SWITCHES}.{name}"
