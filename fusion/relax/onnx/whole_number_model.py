"""Quantised model in the form that ONNX Runtime computes in integers wherever it can, for comparisons.

ONNX Runtime leaves these in floats: layers of signed bytes with several readers of their data, layers with a move
between DequantizeLinear and the data or weights, transposed convolutions, values that two steps round, and means over
pixels that are written as ReduceMean. The rounded result of such a layer sometimes differs by one byte, and in a deep
network the difference grows: quantised networks do not damp it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fusion.relax.onnx.byte_signs import remove_signs
from fusion.relax.onnx.byte_steps import is_over_pixels
from fusion.relax.onnx.moved_steps import bring_steps_to_layers, share_equal_steps, transpose_weights
from fusion.relax.onnx.onnx_file import opset_of
from fusion.relax.onnx.quantised_tensors import QuantisedTensors
from fusion.relax.onnx.transposed_layers import split_transposed
from fusion.relax.onnx.zero_points import with_zero_points

if TYPE_CHECKING:
    from onnx import ModelProto

# First opset in which the axes of Squeeze are an input.
_AXES_AS_INPUT = 13


def in_whole_numbers(model: ModelProto) -> ModelProto | None:
    """Return an equivalent copy with unsigned bytes, one quantisation step next to each layer, transposed convolutions
    as phases, and GlobalAveragePool for means over pixels; None if ``model`` already has this form.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(with_zero_points(model))
    # All of them, in order, whatever the earlier ones changed.
    changes = [share_equal_steps(copy), transpose_weights(copy), bring_steps_to_layers(copy), split_transposed(copy)]
    changes += [remove_signs(copy), _pool_means(copy)]
    return copy if any(changes) else None


def _pool_means(model: ModelProto) -> bool:
    """Replace means over pixels in ``model`` (in place) by GlobalAveragePool; return True if it changed."""
    from onnx import helper, numpy_helper, shape_inference

    shapes = QuantisedTensors(shape_inference.infer_shapes(model)).shapes()
    tensors, found = QuantisedTensors(model), False
    for index, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "ReduceMean" or tensors.data(node.input[0]) is None:
            continue
        if len(shapes.get(node.input[0], ())) != 4 or not is_over_pixels(tensors, node):
            continue
        kept = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
        if not kept and opset_of(model) < _AXES_AS_INPUT:
            continue
        found, output = True, node.output[0]
        if not kept:
            axes = numpy_helper.from_array(np.array([2, 3], np.int64), f"{output}_axes")
            model.graph.initializer.append(axes)
            node.output[0] = f"{output}_pixel"
            squeezed = helper.make_node("Squeeze", [node.output[0], axes.name], [output], f"{output}_squeezed")
            model.graph.node.insert(index + 1, squeezed)
        node.op_type = "GlobalAveragePool"
        del node.input[1:], node.attribute[:]
    return found
