"""The FP64 reference against ONNX's own slow operators and against PyTorch's definitions by ONNX Runtime."""

from __future__ import annotations

import time

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from fusion.acceptance.output_check import HALF_UNIT, SINGLE_UNIT, DoubleModel, NoReference, Rounding

RNG = np.random.default_rng(3)


def model(nodes, shape, weights=None, opset=17, outputs=("y",), kind=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def agrees(made, shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})[0]
    actual = DoubleModel(made).run({"x": x})["y"]
    assert actual.dtype == np.float64 and actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "attributes"),
    [
        ((6, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((6, 4, 3, 2), {"pads": [0, 1, 2, 0], "strides": [2, 1], "dilations": [1, 2]}),
        ((6, 2, 3, 3), {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ((6, 2, 3, 3), {"group": 2, "auto_pad": "SAME_LOWER", "strides": [2, 2]}),
        ((4, 1, 5, 5), {"group": 4, "pads": [2, 2, 2, 2]}),
        ((8, 1, 3, 3), {"group": 4, "auto_pad": "VALID"}),
    ],
)
def test_convolutions(weight, attributes):
    weights = {"w": RNG.standard_normal(weight), "b": RNG.standard_normal(weight[0])}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    agrees(model([node], (2, 4, 11, 9), weights), (2, 4, 11, 9))


@pytest.mark.parametrize("opset", [10, 13, 17, 18, 19, 21, 23])
def test_bytes_of_every_opset_are_dequantised(opset):
    """The reference of the ``onnx`` package knows the operator from opset 19 on."""
    steps = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w_q", "w_scale"], ["w"], **({"axis": 0} if opset >= 13 else {})),
        helper.make_node("Conv", ["d", "w"], ["y"]),
    ]
    made = model(steps, (1, 2, 5, 5), {"scale": 0.05}, opset)
    scales = np.array([0.1, 0.2, 0.3], np.float32) if opset >= 13 else np.float32(0.2)
    weight = RNG.integers(-127, 128, (3, 2, 1, 1)).astype(np.int8)
    for array, name in ((np.uint8(118), "zero"), (scales, "w_scale"), (weight, "w_q")):
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    agrees(made, (1, 2, 5, 5))


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_blocks_of_bytes_are_dequantised(axis, zero, dtype):
    """Of five places by twos: the last block is a part of one."""
    weight = RNG.integers(0, 100, (5, 7)).astype(dtype)
    blocked = [-(-size // 2) if place == axis % 2 else size for place, size in enumerate(weight.shape)]
    given = ["w_q", "w_scale", "w_zero"][: 3 if zero else 2]
    steps = [
        helper.make_node("DequantizeLinear", given, ["w"], axis=axis, block_size=2),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    made = model(steps, (3, 5), opset=21)
    arrays = {"w_q": weight, "w_scale": RNG.uniform(0.1, 0.2, blocked).astype(np.float32)}
    arrays["w_zero"] = RNG.integers(0, 50, blocked).astype(dtype)
    made.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in given)
    agrees(made, (3, 5))


def test_biases_of_32_bits_keep_all_of_them():
    """Single precision holds 24."""
    made = model(
        [helper.make_node("DequantizeLinear", ["b", "scale"], ["d"]), helper.make_node("Add", ["x", "d"], ["y"])],
        (1, 2),
        {"scale": 2**-10},
        21,
    )
    made.graph.initializer.append(numpy_helper.from_array(np.array([[2**30 + 1, -(2**30) - 3]], np.int32), "b"))
    found = DoubleModel(made).run({"x": np.zeros((1, 2), np.float32)})["y"]
    np.testing.assert_array_equal(found * 2**10, [[2**30 + 1, -(2**30) - 3]])


def test_large_convolutions_are_gathered_in_parts(monkeypatch):
    monkeypatch.setattr("fusion.acceptance.reference_operators.GATHERED_BYTES", 10_000)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    agrees(model([node], (1, 4, 12, 12), {"w": RNG.standard_normal((5, 4, 3, 3))}), (1, 4, 12, 12))


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [2, 2]},
        {"strides": [2, 2], "pads": [1, 0, 0, 1], "output_padding": [1, 0]},
        {"strides": [2, 2], "output_shape": [13, 13], "auto_pad": "SAME_UPPER"},
        {"group": 2, "dilations": [2, 1]},
    ],
)
def test_transposed_convolutions(attributes):
    weights = {"w": RNG.standard_normal((4, 3, 3, 3))}
    agrees(
        model([helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)], (1, 4, 6, 6), weights), (1, 4, 6, 6)
    )


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
        {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    ],
)
def test_pools(operator, attributes):
    agrees(model([helper.make_node(operator, ["x"], ["y"], **attributes)], (1, 3, 10, 9)), (1, 3, 10, 9))


def test_padding_is_counted_where_the_model_says_so():
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
    agrees(model([node], (1, 2, 6, 6)), (1, 2, 6, 6))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("transformation", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
def test_resizing(mode, transformation):
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode=mode, coordinate_transformation_mode=transformation)
    agrees(model([node], (1, 2, 5, 7), {"s": [1, 1, 2, 2]}), (1, 2, 5, 7))


@pytest.mark.parametrize("attributes", [{"size": 5}, {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 2.0}])
def test_a_local_response_norm_of_every_channel(attributes):
    agrees(model([helper.make_node("LRN", ["x"], ["y"], **attributes)], (2, 7, 3, 4)), (2, 7, 3, 4))


def test_a_momentum_means_no_training():
    """ONNX's evaluator takes the batch's own statistics then, before opset 14."""
    weights = {name: RNG.random(3) + 0.5 for name in "sbmv"}
    node = helper.make_node("BatchNormalization", ["x", *"sbmv"], ["y"], momentum=0.9)
    agrees(model([node], (2, 3, 4, 4), weights, opset=11), (2, 3, 4, 4))


def test_double_precision_all_the_way():
    nodes = [
        helper.make_node("Constant", [], ["c"], value_float=0.1),
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Erf", ["wide"], ["e"]),
        helper.make_node("Mul", ["e", "c"], ["y"]),
    ]
    from scipy.special import erf

    x = np.array([0.3], np.float32)
    found = DoubleModel(model(nodes, (1,))).run({"x": x})["y"]
    assert found == pytest.approx(erf(float(x[0])) * np.float32(0.1), rel=1e-7)
    assert found.dtype == np.float64


def test_roundings_are_of_the_precision_of_the_model():
    single = model([helper.make_node("Neg", ["x"], ["y"])], (2,))
    half = model([helper.make_node("Neg", ["x"], ["y"])], (2,), kind=TensorProto.FLOAT16)
    assert DoubleModel(single).unit == SINGLE_UNIT and DoubleModel(half).unit == HALF_UNIT


def test_shapes_are_no_values_that_rounding_moves():
    """Floor of a size times 4.0 would fall below the size, were the product disturbed."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "four"], ["m"]),
        helper.make_node("Floor", ["m"], ["l"]),
        helper.make_node("Cast", ["l"], ["i"], to=TensorProto.INT64),
        helper.make_node("ConstantOfShape", ["i"], ["zero"]),
        helper.make_node("ReduceSum", ["zero"], ["total"], keepdims=0),
        helper.make_node("Add", ["x", "total"], ["y"]),
    ]
    made = DoubleModel(model(nodes, (3,), {"four": 4.0}))
    for seed in range(8):
        moved = made.run({"x": np.ones(3, np.float32)}, Rounding(SINGLE_UNIT, seed))
        assert moved["y"].shape == (3,)


def test_roundings_move_what_cancels_more():
    nodes = [helper.make_node("Add", ["x", "big"], ["a"]), helper.make_node("Sub", ["a", "big"], ["y"])]
    made = DoubleModel(model(nodes, (1000,), {"big": 1e4}))
    x = {"x": np.ones(1000, np.float32)}
    moved = made.run(x, Rounding(SINGLE_UNIT, 0))["y"] - made.run(x)["y"]
    assert 3e-4 < np.abs(moved).mean() < 3e-3


@pytest.mark.parametrize("nodes", [[helper.make_node("Foo", ["x"], ["y"], domain="com.me")]])
def test_what_cannot_be_evaluated_is_said(nodes):
    with pytest.raises(NoReference):
        DoubleModel(model(nodes, (2,)))


def test_time_is_limited():
    with pytest.raises(NoReference, match="too long"):
        DoubleModel(model([helper.make_node("Neg", ["x"], ["y"])], (2,))).run(
            {"x": np.ones(2, np.float32)}, deadline=time.monotonic() - 1
        )
