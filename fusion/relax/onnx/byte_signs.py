"""Conversion of int8 tensors to uint8 tensors with a zero point 128 higher: both represent the same values."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.onnx.quantised_tensors import MOVES, SHIFTED, QuantisedTensors, is_move

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def remove_signs(model: ModelProto, resized: Collection[str] = ()) -> bool:
    """Convert int8 tensors that are quantised and read in ``model`` (in place); return True if it changed. Zero points
    must be present (:func:`with_zero_points`). ``resized``: outputs of Resize nodes that
    read bytes directly and truncate; the kernels that compute them truncate towards the original zero.
    """
    signs = _Signs(QuantisedTensors(model), resized)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            signs.remove(node)
    return signs.found


class _Signs:
    def __init__(self, tensors: QuantisedTensors, resized: Collection[str]) -> None:
        self.found = False
        self._tensors = tensors
        self._resized = resized

    def remove(self, node: NodeProto) -> None:
        """Convert the tensors that hold the bytes of the QuantizeLinear ``node``."""
        for end in self._ends(node):
            self._shift(end)

    def _ends(self, node: NodeProto) -> list[NodeProto]:
        """Return the quantising and dequantising nodes of the tensors that hold the bytes of ``node``; empty if any
        other node reads or writes one of them, or they are unsigned.
        """
        tensors, ends = self._tensors, []
        waiting, seen = [node.output[0]], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = tensors.made_by.get(name)
            if maker is None or name in tensors.results:
                return []
            for each in (maker, *tensors.readers[name]):
                if each.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    found = tensors.quantisation(each)
                    if found is None or found[1].dtype != np.int8:
                        return []
                    ends.append(each)
                elif each.op_type in MOVES or is_move(each) or each.output[0] in self._resized:
                    waiting += each.input if each.op_type == "Concat" else each.input[:1]
                    waiting.append(each.output[0])
                else:
                    return []
        return ends

    def _shift(self, node: NodeProto) -> None:
        from onnx import numpy_helper

        zero = self._tensors.constants[node.input[2]]
        if zero.dtype == np.uint8:
            return
        self.found = True
        name = f"{node.input[2]}{SHIFTED}"
        if name not in self._tensors.constants:
            shifted = (zero.astype(np.int16) + 128).astype(np.uint8)
            self._tensors.constants[name] = shifted
            self._tensors.graph.initializer.append(numpy_helper.from_array(shifted, name))
        node.input[2] = name
        for each in [each for each in node.attribute if each.name == "output_dtype"]:
            node.attribute.remove(each)  # the zero point determines the type
