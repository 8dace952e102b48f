"""Layers of a quantised model that are computed in floats, and the reasons, in texts that many layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.onnx.onnx_quantised import FLOAT_LAYERS, is_quantised
from fusion.relax.onnx.quantised_tensors import QuantisedTensors

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FLOAT_DATA = "their data are floats"
WIDE_DATA = "their data are of 16 bits, and products of whole numbers take 8"
OTHER_SCALES = "the scale of their data is no constant, or not one for all"
COMPUTED = "both of their factors are computed"
FLOAT_WEIGHTS = "their weights are floats"
OTHER_WEIGHTS = "their weights are not of 8 bits with a scale for each output"
NOT_IMAGES = "their data are no images"
NOT_ROUNDED = "their results are not rounded to bytes before something else reads them"
OTHER_FORM = "their sums may grow too large, or their form has no kernel in whole numbers"
_NAMED = 3


@dataclass(frozen=True)
class FloatLayer:
    """Name of the node of a layer, and the reason why it is computed in floats."""

    name: str
    reason: str


def layers_in_floats(model: ModelProto) -> tuple[FloatLayer, ...]:
    """Return the float layers of a quantised ``model`` after the search for integer layers
    (:func:`fusion.relax.onnx.integer_layers.with_integer_layers`); empty for any other model.
    """
    if not is_quantised(model.graph):
        return ()
    tensors = QuantisedTensors(model)
    shapes = tensors.shapes()
    layers = (node for node in model.graph.node if node.op_type in FLOAT_LAYERS)
    return tuple(FloatLayer(node.name, _reason(tensors, shapes, node)) for node in layers)


def told_in_floats(layers: Sequence[FloatLayer]) -> list[str]:
    """Return a sentence for each reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(layer.reason, []).append(layer.name)
    rows = sorted(found.items(), key=lambda row: -len(row[1]))
    before = "layers of the quantised model in floats"
    return [f"{before}, {len(names)}: {reason} ({_some(names)})" for reason, names in rows]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _reason(tensors: QuantisedTensors, shapes: dict[str, tuple[int, ...]], node: NodeProto) -> str:
    data, weight = tensors.made_by.get(node.input[0]), tensors.made_by.get(node.input[1])
    if data is None or data.op_type != "DequantizeLinear":
        return FLOAT_DATA
    step = tensors.quantisation(data)
    if step is None or step[0].size != 1:
        return OTHER_SCALES
    if step[1].dtype.itemsize > 1:
        return WIDE_DATA
    if tensors.constants.get(node.input[1]) is not None:
        return FLOAT_WEIGHTS
    if weight is None or weight.op_type != "DequantizeLinear" or weight.input[0] not in tensors.constants:
        return COMPUTED
    held, values = tensors.dequantised(node.input[1]), tensors.constants[weight.input[0]]
    if held is None or values.dtype not in (np.int8, np.uint8):
        return OTHER_WEIGHTS
    if "Conv" in node.op_type and len(shapes.get(node.input[0], (0,) * 4)) != 4:
        return NOT_IMAGES
    if tensors.rounded_behind(node.output[0]) is None:
        return NOT_ROUNDED
    return OTHER_FORM
