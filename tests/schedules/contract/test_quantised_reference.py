"""Layers in whole numbers against ONNX Runtime's quantised operators: the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.operators.layers import Conv2d, Dense, Epilogue
from schedules.contract.operator_reference import reference
from schedules.contract.template import Parameters, QuantisedAddition, Requantisation
from tests.onnx_sessions import exact_session

onnxruntime = pytest.importorskip("onnxruntime")
helper = pytest.importorskip("onnx").helper

SCALES = {"x": 0.037, "y": 0.113, "r": 0.081, "z": 0.127}


def _run(node, arrays, result_shape):
    """What ONNX Runtime computes for a node of bytes."""
    from onnx import TensorProto, numpy_helper

    data, *others = [name for name in node.input if name]
    kind = TensorProto.UINT8 if arrays[data].dtype == np.uint8 else TensorProto.INT8
    inputs = [helper.make_tensor_value_info(data, kind, arrays[data].shape)]
    constants = [numpy_helper.from_array(arrays[name], name) for name in dict.fromkeys(others) if name != data]
    output = helper.make_tensor_value_info(node.output[0], kind, result_shape)
    graph = helper.make_graph([node], "one", inputs, [output], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = exact_session(model.SerializeToString())
    return session.run(None, {data: arrays[data]})[0]


def _with_sign(array, offset):
    """Bytes less ``offset``, as bytes with a sign; anything else as it is."""
    if not offset or array.dtype != np.uint8:
        return array
    return (array.astype(np.int16) - offset).astype(np.int8)


CONVS = {
    "1x1": Conv2d(2, 24, 7, 9, 20, (1, 1)),
    "3x3, padded": Conv2d(1, 17, 9, 9, 20, (3, 3), padding=(1, 1, 1, 1)),
    "7x7, stride 2": Conv2d(1, 3, 21, 23, 8, (7, 7), stride=(2, 2), padding=(3, 3, 3, 3)),
    "one-sided padding": Conv2d(1, 5, 8, 8, 9, (3, 3), stride=(2, 2), padding=(0, 0, 1, 1)),
    "depthwise": Conv2d(1, 33, 9, 8, 33, (3, 3), padding=(1, 1, 1, 1), groups=33),
    "dilated": Conv2d(1, 6, 12, 12, 6, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "groups": Conv2d(1, 12, 9, 9, 18, (3, 3), padding=(1, 1, 1, 1), groups=3),
}


def _quantised(conv, generator, per_channel):
    """(arrays of QLinearConv, parameters) of random whole numbers."""
    from dataclasses import replace

    conv = replace(conv, dtype="int8", epilogue=Epilogue(bias=True))
    outputs = conv.out_channels
    data = generator.integers(0, 256, conv.input_shape).astype(np.uint8)
    weight = generator.integers(-127, 128, conv.weight_shape).astype(np.int8)
    weight_scale = (generator.uniform(0.5, 1.5, outputs if per_channel else 1) * 0.01).astype(np.float32)
    bias = generator.integers(-3000, 3000, outputs).astype(np.int32)
    # So that both ends of the bytes are reached.
    spread = SCALES["x"] * 0.01 * 74**2 * np.sqrt(np.prod(conv.weight_shape[1:])) / 120
    arrays = {
        "x": data, "xs": np.float32(SCALES["x"]), "xz": np.uint8(119), "w": weight,
        "ws": weight_scale if per_channel else weight_scale[0],
        "wz": np.zeros(outputs, np.int8) if per_channel else np.int8(0),
        "ys": np.float32(spread), "yz": np.uint8(131), "b": bias,
    }  # fmt: skip
    multiplier = np.broadcast_to(np.float32(SCALES["x"]) * weight_scale / np.float32(spread), (outputs,))
    parameters = Parameters(weight, bias, requantisation=Requantisation(multiplier, input_zero=119, zero=131))
    return conv, {name: np.asarray(array) for name, array in arrays.items()}, parameters


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", CONVS)
def test_convolutions_have_the_bytes_of_onnx_runtime(name, per_channel):
    conv, arrays, parameters = _quantised(CONVS[name], np.random.default_rng(0), per_channel)
    node = helper.make_node(
        "QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["y"],
        strides=conv.stride, pads=conv.padding, dilations=conv.dilation, group=conv.groups, kernel_shape=conv.kernel,
    )  # fmt: skip
    theirs = _run(node, arrays, conv.output_shape)
    ours = reference(conv, arrays["x"].astype(np.float32), [parameters])
    assert theirs.min() == 0 and theirs.max() == 255
    np.testing.assert_array_equal(ours.astype(np.uint8), theirs)


def test_products_have_the_bytes_of_onnx_runtime():
    generator = np.random.default_rng(1)
    layer = Dense(5, 67, 41, Epilogue(bias=True), dtype="int8")
    data = generator.integers(0, 256, layer.input_shape).astype(np.uint8)
    weight = generator.integers(-127, 128, layer.weight_shape).astype(np.int8)
    arrays = {
        "x": data, "xs": np.float32(0.02), "xz": np.uint8(101), "w": weight.T.copy(), "ws": np.float32(0.01),
        "wz": np.int8(0), "ys": np.float32(0.13), "yz": np.uint8(120),
    }  # fmt: skip
    node = helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])
    theirs = _run(node, {name: np.asarray(array) for name, array in arrays.items()}, layer.output_shape)
    multiplier = np.full(41, np.float32(0.02) * np.float32(0.01) / np.float32(0.13), np.float32)
    parameters = Parameters(
        weight, np.zeros(41, np.int32), requantisation=Requantisation(multiplier, input_zero=101, zero=120)
    )
    np.testing.assert_array_equal(reference(layer, data.astype(np.float32), [parameters]).astype(np.uint8), theirs)


@pytest.mark.parametrize("signed", [False, True])
def test_a_residual_is_added_as_onnx_runtime_adds_it(signed):
    """QLinearAdd behind QLinearConv: the convolution's own result is rounded in between."""
    generator = np.random.default_rng(2)
    conv, arrays, parameters = _quantised(CONVS["3x3, padded"], generator, True)
    own = reference(conv, arrays["x"].astype(np.float32), [parameters]).astype(np.uint8)
    residual = generator.integers(0, 256, conv.output_shape).astype(np.uint8)
    scales = np.array([0.113, 0.081, 0.127], np.float32)
    given = {
        "own": own, "a": scales[0], "az": np.uint8(131), "residual": residual, "b": scales[1], "bz": np.uint8(77),
        "c": scales[2], "cz": np.uint8(110),
    }  # fmt: skip
    node = helper.make_node(
        "QLinearAdd", ["own", "a", "az", "residual", "b", "bz", "c", "cz"], ["y"], domain="com.microsoft"
    )
    offset = 128 if signed else 0
    theirs = _run(
        node, {name: _with_sign(np.asarray(array), offset) for name, array in given.items()}, conv.output_shape
    )
    theirs = (theirs.astype(np.int16) + offset).astype(np.uint8)
    ratios = scales[0] / scales[2], scales[1] / scales[2]
    fixed = np.float32(110 - offset) - (ratios[0] * np.float32(131 - offset) + ratios[1] * np.float32(77 - offset))
    addition = QuantisedAddition(0, 255, 131, float(ratios[0]), float(ratios[1]), float(fixed), offset)
    added = Requantisation(parameters.requantisation.multiplier, input_zero=119, zero=offset, addition=addition)
    from dataclasses import replace

    operator = replace(conv, epilogue=Epilogue(bias=True, residual="before_activation"))
    ours = reference(
        operator, arrays["x"].astype(np.float32), [replace(parameters, requantisation=added)],
        residual.astype(np.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(ours.astype(np.uint8), theirs)
