"""Quantised ONNX files: which layers become whole numbers, and that networks of them have ONNX Runtime's bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
import onnx
from onnx import helper, numpy_helper

from costmodel.operators.layers import Conv2d, Dense, Epilogue, Pool2d
from fusion.model.conv_graph import INT8, precision_of
from fusion.relax.extract import QUANTISED, extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.tuning.network_check import rounds_otherwise
from schedules.contract.operator_reference import _conv2d
from tests.fusion.quantised_models import INPUT, QuantisedGraph, ours, quantised, theirs

FORMS = {
    "QDQ": {},
    "QDQ, per channel": {"per_channel": True},
    "QDQ, bytes with a sign": {"signed": True, "per_channel": True},
    "operators": {"operators": True},
    "operators, per channel": {"operators": True, "per_channel": True},
}


def layers(graph):
    return [node for node in graph.nodes if isinstance(node.operator, Conv2d | Dense)]


@pytest.fixture
def data():
    return np.random.default_rng(7).standard_normal(INPUT).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_every_layer_becomes_whole_numbers(form, tmp_path):
    graph = extract_graph(import_onnx(quantised(tmp_path / "q.onnx", **FORMS[form])).mod)
    assert [(node.name.split("_")[0], node.operator.dtype) for node in layers(graph)] == [
        (name, "int8") for name in ("stem", "expand", "depthwise", "project", "window", "dense")
    ]
    (project,) = (node for node in graph.nodes if node.name.startswith("project"))
    assert project.residual is not None and project.operator.epilogue.residual == "before_activation"
    kinds = {node.operator.kind: node.operator.dtype for node in graph.nodes if isinstance(node.operator, Pool2d)}
    assert kinds["max"] == "int8"
    assert {other.reason for other in graph.others if "quantize" in other.operator} == {QUANTISED}


@pytest.mark.parametrize("form", ["QDQ", "operators, per channel"])
def test_the_network_has_the_bytes_of_onnx_runtime(form, tmp_path, data):
    path = quantised(tmp_path / "q.onnx", **FORMS[form])
    expected = theirs(path, data)
    assert len(np.unique(expected)) > 8
    np.testing.assert_array_equal(ours(path, data), expected)


def test_fused_layers_round_as_they_would_alone(tmp_path, data):
    path = quantised(tmp_path / "q.onnx", per_channel=True)
    np.testing.assert_array_equal(ours(path, data, fused=True), theirs(path, data))


def test_layers_without_a_kernel_of_ours_have_the_same_bytes(tmp_path, data):
    """One reads what the one before it makes: TVM must not fuse their functions."""
    path = quantised(tmp_path / "q.onnx", per_channel=True)
    np.testing.assert_array_equal(ours(path, data, covered=False), theirs(path, data))


def test_for_a_cpu_without_kernels_of_bytes_layers_stay_in_floats(tmp_path):
    path = quantised(tmp_path / "q.onnx", per_channel=True)
    graph = extract_graph(import_onnx(path, whole_numbers=False).mod)
    assert {node.operator.dtype for node in graph.nodes} == {"float32"} == {precision_of(graph)}


def test_pooling_in_floats_does_not_make_a_quantised_network_mixed(tmp_path):
    """A largest value that is written as a reduction."""
    net = QuantisedGraph()
    value = net.step(net.add("Conv", net.step("x", 0.05, 118), net.weights(24, 16), name="conv"), 0.2, 100)
    pooled = net.step(net.add("ReduceMax", value, axes=[2, 3], keepdims=1), 0.2, 100)
    graph = extract_graph(import_onnx(net.save(tmp_path / "q.onnx", pooled, (1, 24, 1, 1))).mod)
    assert [node.operator.dtype for node in graph.nodes] == ["int8", "float32"]
    assert precision_of(graph) == INT8


SLOPES = np.linspace(-0.2, 1.4, 32).astype(np.float32).reshape(32, 1, 1)
ACTIVATIONS = {
    "silu": lambda net, x: net.add("Mul", x, net.add("Sigmoid", x)),
    "hard_swish": lambda net, x: net.add("HardSwish", x),
    "hard_swish in parts": lambda net, x: net.add("Mul", net.add("HardSigmoid", x, alpha=1 / 6, beta=0.5), x),
    "sigmoid": lambda net, x: net.add("Sigmoid", x),
    "leaky_relu": lambda net, x: net.add("LeakyRelu", x, alpha=0.1),
    "gelu": lambda net, x: net.add(
        "Mul", net.add("Mul", x, net.constant(np.float32(0.5), "half")),
        net.add("Add", net.add("Erf", net.add("Div", x, net.constant(np.float32(2**0.5), "root"))),
                net.constant(np.float32(1), "one")),
    ),
    "mish": lambda net, x: net.add("Mul", x, net.add("Tanh", net.add("Softplus", x))),
    "prelu": lambda net, x: net.add("PRelu", x, net.constant(SLOPES, "slopes")),
}  # fmt: skip
# Results are in steps of 1/40 around 100.
EXACT = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "leaky_relu": lambda x: np.where(x < 0, np.float32(0.1) * x, x),
    "gelu": lambda x: x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / 2**0.5)))(x),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "prelu": lambda x: np.where(x < 0, SLOPES * x, x),
}


@pytest.mark.parametrize(
    ("activation", "kind"),
    [
        ("silu", "window"),
        ("hard_swish", "depthwise"),
        ("leaky_relu", "pointwise"),
        ("prelu", "pointwise"),
        *(
            pytest.param(each, "pointwise", marks=pytest.mark.thorough)
            for each in ACTIVATIONS
            if each not in ("leaky_relu", "prelu")
        ),
    ],
)
def test_an_activation_before_the_only_rounding_is_part_of_the_layer(activation, kind, tmp_path):
    """ONNX Runtime sums floats there: equal but for values half-way between two bytes, as is what FP64 makes of it."""
    net, shape = QuantisedGraph(), (1, 32, 12, 12)
    groups, size = (32 if kind == "depthwise" else 1), (1 if kind == "pointwise" else 3)
    spread = {"pointwise": 0.0012, "window": 0.0004, "depthwise": 0.002}[kind]
    weights = net.weights(32, 32 // groups, size, scale=spread)
    value = net.add("Conv", net.step("x", 0.05, 118), weights, group=groups, pads=[size // 2] * 4, name="conv")
    path = net.save(tmp_path / "q.onnx", net.step(ACTIVATIONS[activation](net, value), 0.025, 100), shape, data=shape)
    graph = extract_graph(import_onnx(path).mod)
    name = activation.removesuffix(" in parts")
    assert [(node.operator.dtype, node.operator.epilogue.activation) for node in graph.nodes] == [("int8", name)]
    assert not [other for other in graph.others if "quantize" not in other.operator]
    assert rounds_otherwise(graph)
    steps = np.random.default_rng(0).integers(0, 256, shape)
    data = ((steps - 118) * 0.05).astype(np.float32)
    found, expected = ours(path, data), theirs(path, data)
    assert (found != ours(path, data, covered=False)).mean() < 1e-3
    off = np.abs(found - expected) / np.float32(0.025)
    assert off.max() < 1.01 and (off > 0.5).mean() < 1e-3
    held = next(numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer if each.name == "w")
    conv = replace(graph.nodes[0].operator, epilogue=Epilogue(), dtype="float32")
    sums = _conv2d(conv, (steps - 118).astype(np.float64), held.astype(np.float64))
    sums *= np.float64(np.float32(0.05)) * np.float64(np.float32(spread))
    exact = np.clip(EXACT[name](sums) / np.float64(np.float32(0.025)), -100, 155)
    assert len(np.unique(found)) > 40
    assert np.abs(found / np.float32(0.025) - exact).max() < 0.501


@pytest.mark.parametrize(("slope", "activation"), [(0.2, "leaky_relu"), (1.25, "prelu"), (-0.3, "prelu")])
def test_one_slope_of_all_channels_is_part_of_the_layer_whatever_it_is(slope, activation, tmp_path):
    net, shape = QuantisedGraph(), (1, 32, 12, 12)
    value = net.add("Conv", net.step("x", 0.05, 118), net.weights(32, 32), name="conv")
    value = net.add("PRelu", value, net.constant(np.array([slope], np.float32), "slope"))
    path = net.save(tmp_path / "q.onnx", net.step(value, 0.2, 100), shape, data=shape)
    (node,) = extract_graph(import_onnx(path).mod).nodes
    assert (node.operator.dtype, node.operator.epilogue.activation) == ("int8", activation)
    slopes = node.parameters[0].slopes
    assert slopes is None if activation == "leaky_relu" else slopes.tolist() == [np.float32(slope)] * 32


def without_zero_points(path, opset):
    """A convolution from bytes with a sign to such, whose zero points are left out; max pooling behind it."""
    generator = np.random.default_rng(3)
    arrays = {
        "sx": np.float32(0.02),
        "sw": np.float32(0.002),
        "sy": np.float32(0.05),
        "zero": np.int8(0),
        "w": generator.integers(-127, 128, (16, 3, 3, 3)).astype(np.int8),
    }
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]

    def steps(value, scale):
        """``output_dtype`` says so since opset 21, before a zero point of the first of the two steps alone."""
        given, options = ([], {"output_dtype": onnx.TensorProto.INT8}) if opset >= 21 else (["zero"], {})
        return [
            helper.make_node("QuantizeLinear", [value, scale, *given], [f"{value}_q"], **options),
            helper.make_node("DequantizeLinear", [f"{value}_q", scale], [f"{value}_d"]),
        ]

    nodes = [
        *steps("x", "sx"),
        helper.make_node("DequantizeLinear", ["w", "sw"], ["w_d"]),
        helper.make_node("Conv", ["x_d", "w_d"], ["c"], "conv", pads=[1] * 4),
        *steps("c", "sy"),
        helper.make_node("MaxPool", ["c_d"], ["m"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        *steps("m", "sy"),
    ]
    given = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, INPUT)]
    result = [helper.make_tensor_value_info("m_d", onnx.TensorProto.FLOAT, (1, 16, 12, 12))]
    graph = helper.make_graph(nodes, "signed", given, result, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


@pytest.mark.parametrize("opset", [17, 21])
def test_zero_points_that_are_left_out_have_the_type_of_the_bytes(opset, tmp_path, data):
    path = without_zero_points(tmp_path / "q.onnx", opset)
    expected = theirs(path, data)
    assert expected.min() < 0 < expected.max()
    assert {node.operator.dtype for node in extract_graph(import_onnx(path).mod).nodes} == {INT8}
    np.testing.assert_array_equal(ours(path, data), expected)


def test_a_wrong_weight_is_seen_in_the_outputs(tmp_path, data):
    path = quantised(tmp_path / "q.onnx")
    expected = theirs(path, data)
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name.startswith("project.w") and len(each.dims) == 4)
    weight = numpy_helper.to_array(tensor).copy()
    weight[:, 0] = 127
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    onnx.save(model, path)
    assert np.any(ours(path, data) != expected)


def test_layers_whose_weights_take_nine_bits_are_of_whole_numbers(tmp_path):
    """Weights without a sign whose zero point is far from the middle; ``test_quantised_files.py`` compares results."""
    path = quantised(tmp_path / "q.onnx")
    model = onnx.load(path)
    node = next(each for each in model.graph.node if each.op_type == "DequantizeLinear" and "window.w" in each.input[0])
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = numpy_helper.to_array(tensors[node.input[0]]).astype(np.int16)
    values = (weight + 128).clip(0, 255).astype(np.uint8)
    tensors[node.input[0]].CopyFrom(numpy_helper.from_array(values, node.input[0]))
    tensors[node.input[2]].CopyFrom(numpy_helper.from_array(np.uint8(20), node.input[2]))
    onnx.save(model, path)
    graph = extract_graph(import_onnx(path).mod)
    found = {node.name.split("_")[0]: node.operator.dtype for node in layers(graph)}
    assert found == dict.fromkeys(("stem", "expand", "depthwise", "project", "dense", "window"), "int8")


def test_weights_without_a_sign_are_taken_where_they_fit(tmp_path):
    path = quantised(tmp_path / "q.onnx", unsigned_weights=True)
    graph = extract_graph(import_onnx(path).mod)
    for node in layers(graph):
        if node.operator.dtype == "int8":
            assert node.parameters[0].weight.dtype == np.int8


def test_a_sum_that_something_else_reads_is_not_part_of_a_layer(tmp_path):
    """Then its summand is stored, and the addition is a kernel of its own."""
    path = quantised(tmp_path / "q.onnx")
    model = onnx.load(path)
    project = next(each for each in model.graph.node if each.op_type == "QuantizeLinear" and "project" in each.input[0])
    dequantised = next(each for each in model.graph.node if each.input[0] == project.output[0])
    model.graph.output.append(helper.make_tensor_value_info(dequantised.output[0], 1, (1, 16, 12, 12)))
    onnx.save(model, path)
    graph = extract_graph(import_onnx(path).mod)
    (node,) = (each for each in graph.nodes if each.name.startswith("project"))
    assert node.residual is None and node.operator.dtype == "int8"
    assert any(other.operator == "byte_pair" for other in graph.others)
