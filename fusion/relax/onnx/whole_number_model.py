"""A quantised model in the form that ONNX Runtime computes in whole numbers wherever it can, to be compared with.

It leaves a layer in floats where more than one node reads its data and these are bytes with a sign, or its data or its
weights are moved between DequantizeLinear and the layer, transposed convolutions, what two steps round, and means over
pixels that are written as ReduceMean. What such a layer rounds to lies now and then on the other side of two bytes, and
from there on a network of many layers is another one: a quantised network has no digits that would die out.
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

# Axes of a Squeeze are an input from here on.
_AXES_AS_INPUT = 13


def in_whole_numbers(model: ModelProto) -> ModelProto | None:
    """A copy that stands for the same, of bytes without a sign, with one step next to each layer, transposed
    convolutions by their phases, and with GlobalAveragePool for means over pixels; ``None`` if ``model`` itself is so.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(with_zero_points(model))
    # In turn, whatever those before it found.
    changes = [share_equal_steps(copy), transpose_weights(copy), bring_steps_to_layers(copy), split_transposed(copy)]
    changes += [remove_signs(copy), _pool_means(copy)]
    return copy if any(changes) else None


def _pool_means(model: ModelProto) -> bool:
    """Changes ``model``; says whether there were any."""
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
