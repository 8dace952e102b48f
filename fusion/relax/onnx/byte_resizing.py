"""Linear resizing of byte images, found in an ONNX graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.byte_resize import COORDINATES, ByteResize
from fusion.relax.onnx.quantised_tensors import QuantisedTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnx import ModelProto, NodeProto


def linear_resize(
    tensors: QuantisedTensors, shapes: Mapping[str, tuple[int, ...]], node: NodeProto, cut_off: bool
) -> ByteResize | None:
    """Return the Resize ``node`` of mode ``linear`` of an NCHW image as a :class:`ByteResize`; None for any other node,
    and for forms that it does not cover. ``cut_off``: the node reads bytes directly and truncates.
    """
    given = {each.name: each for each in node.attribute}
    shape, result = shapes.get(node.input[0], ()), shapes.get(node.output[0], ())
    if not _is_linear(node) or len(shape) != 4 or len(result) != 4 or 0 in (*shape, *result):
        return None
    coordinates = given["coordinate_transformation_mode"].s if "coordinate_transformation_mode" in given else None
    name = "half_pixel" if coordinates is None else coordinates.decode()
    stretched = given["keep_aspect_ratio_policy"].s == b"stretch" if "keep_aspect_ratio_policy" in given else True
    filtered = "antialias" in given and given["antialias"].i
    if name not in COORDINATES or filtered or not stretched or shape[:2] != result[:2]:
        return None
    scales = _scales(tensors, node, shape, result)
    if scales is None or scales[0] != 1.0 or scales[1] != 1.0:
        return None
    batch, channels, height, width = shape
    image = (batch, channels, height, width)
    return ByteResize(image, (result[2], result[3]), (float(scales[2]), float(scales[3])), name, cut_off)


def linear_resizes(model: ModelProto) -> frozenset[str]:
    """Return the outputs of Resize nodes that read bytes directly and have a :class:`ByteResize`."""
    from onnx import shape_inference

    if not any(map(_is_linear, model.graph.node)):
        return frozenset()
    tensors = QuantisedTensors(shape_inference.infer_shapes(model))
    shapes, nodes = tensors.shapes(), tensors.graph.node
    return frozenset(each.output[0] for each in nodes if linear_resize(tensors, shapes, each, cut_off=True) is not None)


def _is_linear(node: NodeProto) -> bool:
    """True if ``node`` is a Resize of mode ``linear``."""
    return node.op_type == "Resize" and any(each.name == "mode" and each.s == b"linear" for each in node.attribute)


def _scales(
    tensors: QuantisedTensors, node: NodeProto, shape: tuple[int, ...], result: tuple[int, ...]
) -> np.ndarray | None:
    """Return the scales along the four axes, FP32: from the file, or the ratios of the sizes if it states sizes; else
    None.
    """
    if len(node.input) < 3:
        return None
    if not node.input[2] or (node.input[2] in tensors.constants and not tensors.constants[node.input[2]].size):
        return np.array(result, np.float32) / np.array(shape, np.float32)
    scales = tensors.constants.get(node.input[2])
    if scales is None:
        return None
    found = np.ones(4, np.float32)
    axes = next((list(each.ints) for each in node.attribute if each.name == "axes"), [0, 1, 2, 3])
    found[axes] = scales.astype(np.float32)
    return found
