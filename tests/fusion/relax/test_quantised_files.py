"""Quantised files as other tools write them: what of them becomes whole numbers, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
sys.path.insert(0, str(Path(__file__).parents[1]))

from quantised_models import CPU, QuantisedGraph, ours, theirs

from costmodel.base.errors import UnsupportedOperatorError
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from schedules.contract.cpu_target import CpuTarget

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


def test_scales_that_are_found_while_it_runs_are_refused_for_convolutions(tmp_path):
    graph = QuantisedGraph()
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    graph.constant(np.ones((24, 16, 1, 1), np.int8), "w")
    sums = graph.add("ConvInteger", held, "w", zero, name="sums")
    result = graph.add("Mul", graph.add("Cast", sums, to=1), scale)
    path = graph.save(tmp_path / "q.onnx", result, (1, 24, 4, 8))
    with pytest.raises(UnsupportedOperatorError) as error:
        import_onnx(path)
    assert str(error.value).startswith(f"{path}: unsupported operators: ConvInteger (sums)")
    assert "QDQ" in str(error.value) and "\n" not in str(error.value)


def test_products_whose_scales_are_found_while_it_runs_are_taken(data, tmp_path):
    graph = QuantisedGraph()
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    graph.constant(np.random.default_rng(0).integers(-127, 128, (8, 20)).astype(np.int8), "w")
    sums = graph.add("MatMulInteger", held, "w", zero, name="sums")
    path = graph.save(tmp_path / "q.onnx", graph.add("Mul", graph.add("Cast", sums, to=1), scale), (1, 16, 4, 20))
    np.testing.assert_allclose(ours(path, data), theirs(path, data), rtol=1e-6)


@pytest.mark.parametrize("kind", ["depthwise", "dense"])
def test_on_a_cpu_without_instructions_for_bytes(kind, data, tmp_path):
    """Layers are computed in floats there, between rounding to bytes: a sum between two bytes may become either."""
    graph = QuantisedGraph()
    x = graph.step("x", 0.05003, 118)
    options = {"group": 16} if kind == "depthwise" else {}
    weight = graph.weights(16, 1 if options else 16, 3)
    value = graph.add("Conv", x, weight, graph.constant(np.zeros(16, np.float32), "b"), pads=[1] * 4, **options)
    value = graph.step(graph.add("Relu", value), 0.0407, 0)
    path = graph.save(tmp_path / "q.onnx", graph.step(graph.add("HardSwish", value), 0.0391, 4), SHAPE)
    avx2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 1024 * 1024)
    for cpu in (avx2, replace(CPU, mcpu="skylake-avx512", features=("avx512f",))):
        assert cpu.lacks("int8") is not None
        found, expected = ours(path, data, cpu=cpu), ours(path, data)
        assert np.abs(found - expected).max() < 0.0392 and np.mean(found != expected) < 0.01
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))
