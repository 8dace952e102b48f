"""Quantised files as other tools write them: what of them becomes whole numbers, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
sys.path.insert(0, str(Path(__file__).parents[1]))

from quantised_models import QuantisedGraph, ours, theirs

from costmodel.base.errors import UnsupportedOperatorError
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx

SHAPE = (1, 16, 4, 8)


@pytest.fixture
def data():
    return (np.random.default_rng(4).standard_normal(SHAPE) * 3).astype(np.float32)


def in_floats(path):
    """Operators that compute in floats, but for quantising inputs and dequantising results."""
    graph = extract_graph(import_onnx(path).mod)
    found = [node.name for node in graph.nodes if node.operator.dtype == "float32"]
    return found + [
        other.name
        for other in graph.others
        if "float32" in str(other.output.ty.dtype) and other.operator != "relax.dequantize"
    ]


BIASES = {
    "of floats": lambda g: g.constant(np.linspace(-3, 3, 24).astype(np.float32), "bias"),
    "of 32 bits in units of the sums": lambda g: in_units(g, 0.05 * 0.01),
    "of 32 bits in other units": lambda g: in_units(g, 0.0013),
}


def in_units(graph, scale):
    graph.constant(np.arange(-1200, 1200, 100).astype(np.int32), "bias")
    graph.constant(np.float32(scale), "bias_scale")
    return graph.add("DequantizeLinear", "bias", "bias_scale", name="bias_d")


@pytest.mark.parametrize("bias", BIASES)
def test_biases_of_any_unit(bias, data, tmp_path):
    graph = QuantisedGraph()
    value = graph.add("Conv", graph.step("x", 0.05, 118), graph.weights(24, 16), BIASES[bias](graph), name="conv")
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.2, 100), (1, 24, 4, 8))
    assert in_floats(path) == []
    # Where ONNX Runtime leaves the layer in floats, a sum may lie between two bytes.
    np.testing.assert_allclose(ours(path, data), theirs(path, data), atol=0.2001)
    assert np.mean(ours(path, data) != theirs(path, data)) < 0.002


def test_weights_that_are_rounded_when_they_are_read(data, tmp_path):
    """A file from training holds floats, and rounds them to bytes of a scale for every output."""
    graph = QuantisedGraph(signed=True)
    generator = np.random.default_rng(6)
    graph.constant((generator.standard_normal((24, 16, 1, 1)) * 0.2).astype(np.float32), "w")
    graph.constant(np.linspace(0.004, 0.009, 24).astype(np.float32), "w_scale")
    graph.constant(np.zeros(24, np.int8), "w_zero")
    held = graph.add("QuantizeLinear", "w", "w_scale", "w_zero", name="w_q", axis=0)
    weight = graph.add("DequantizeLinear", held, "w_scale", "w_zero", name="w_d", axis=0)
    value = graph.add("Conv", graph.step("x", 0.05, 128), weight, name="conv")
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.05, 128), (1, 24, 4, 8))
    assert in_floats(path) == []
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_steps_at_the_inputs_of_layers_alone(data, tmp_path):
    """Pooling between a layer and where its result is rounded, a view between bytes and the layer that reads them."""
    graph = QuantisedGraph()
    value = graph.add("Conv", graph.step("x", 0.05, 118), graph.weights(24, 16, 3), pads=[1] * 4, name="conv")
    pooled = graph.add("MaxPool", graph.add("Relu", value), kernel_shape=[2, 2], strides=[2, 2])
    flat = graph.add("Flatten", graph.step(pooled, 0.2, 0))
    result = graph.add("Gemm", flat, graph.weights(10, 192, 0, "v"), transB=1, name="dense")
    path = graph.save(tmp_path / "q.onnx", graph.step(result, 1.5, 130), (1, 10))
    assert in_floats(path) == []
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


@pytest.mark.parametrize("opset", [10, 11, 13, 17, 19, 21])
def test_opsets(opset, data, tmp_path):
    graph = QuantisedGraph()
    value = graph.add("Relu", graph.add("Conv", graph.step("x", 0.05, 118), graph.weights(24, 16), name="conv"))
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.05, 0), (1, 24, 4, 8), opset)
    assert in_floats(path) == []
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_matrix_products(data, tmp_path):
    """MatMul, whose weights are not transposed, with a scale for every output."""
    graph = QuantisedGraph()
    generator = np.random.default_rng(8)
    graph.constant(generator.integers(-127, 128, (8, 20)).astype(np.int8), "w")
    graph.constant(np.linspace(0.01, 0.03, 20).astype(np.float32), "w_scale")
    graph.constant(np.zeros(20, np.int8), "w_zero")
    weight = graph.add("DequantizeLinear", "w", "w_scale", "w_zero", name="w_d", axis=1)
    value = graph.add("MatMul", graph.step("x", 0.05, 118), weight, name="product")
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.1, 125), (1, 16, 4, 20))
    assert in_floats(path) == []
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def dynamic(graph):
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    graph.constant(np.ones((24, 16, 1, 1), np.int8), "w")
    sums = graph.add("ConvInteger", held, "w", zero, name="sums")
    return graph.add("Mul", graph.add("Cast", sums, to=1), scale)


def blocks(graph):
    graph.constant(np.ones((24, 16), np.int8), "w")
    graph.constant(np.ones((24, 2), np.float32), "w_scale")
    weight = graph.add("DequantizeLinear", "w", "w_scale", name="w_d", axis=1, block_size=8)
    shape = graph.constant(np.array([24, 16, 1, 1]), "shape")
    return graph.add("Conv", "x", graph.add("Reshape", weight, shape))


@pytest.mark.parametrize(("make", "named"), [(dynamic, "ConvInteger"), (dynamic, "DynamicQuantizeLinear")])
def test_scales_that_are_found_while_it_runs_are_refused(make, named, tmp_path):
    graph = QuantisedGraph()
    path = graph.save(tmp_path / "q.onnx", make(graph), (1, 24, 4, 8), 17)
    with pytest.raises(UnsupportedOperatorError) as error:
        import_onnx(path)
    assert named in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    assert "QDQ" in str(error.value)
