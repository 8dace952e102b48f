"""Quantised files as other tools write them: what of them becomes whole numbers, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
from costmodel.base.errors import UnsupportedOperatorError
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.relax.onnx.quantised_model import (
    FLOAT_DATA,
    FLOAT_WEIGHTS,
    NOT_ROUNDED,
    WIDE_DATA,
    FloatLayer,
    float_layer_notes,
)
from fusion.relax.onnx.quantised_rewrites import in_whole_numbers
from schedules.contract.cpu_target import CpuTarget
from tests.fusion.quantised_models import CPU, QuantisedGraph, ours, theirs

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


@pytest.mark.parametrize("opset", [10, 13, 21])
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


def dynamic(graph, weight, zero=""):
    """A convolution whose scale and zero point are found while it runs."""
    held, scale, data_zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    given = [held, weight, data_zero, *([zero] if zero else [])]
    sums = graph.add("ConvInteger", *given, name="sums", pads=[1] * 4)
    return graph.add("Mul", graph.add("Cast", sums, to=1), scale)


def test_convolutions_whose_scales_are_found_while_it_runs_are_computed_in_floats(data, tmp_path):
    graph = QuantisedGraph()
    weight = graph.constant(np.random.default_rng(0).integers(0, 256, (24, 16, 3, 3)).astype(np.uint8), "w")
    result = dynamic(graph, weight, graph.constant(np.uint8(131), "w_zero"))
    path = graph.save(tmp_path / "q.onnx", result, (1, 24, 4, 8))
    imported = import_onnx(path)
    (layer,) = extract_graph(imported.mod).nodes
    assert layer.operator.dtype == "float32"
    assert [(each.name, each.reason) for each in imported.in_floats] == [("sums", "their data are floats")]
    np.testing.assert_allclose(ours(path, data), theirs(path, data), rtol=1e-6)


def test_sums_of_dynamic_scales_are_whole_where_they_are_read_as_such(tmp_path):
    """In spite of a kernel that multiplies by fractions; weights are in a node here, not beside the nodes."""
    graph, shape = QuantisedGraph(), (1, 64, 16, 16)
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    weight = np.random.default_rng(0).integers(-128, 128, (64, 64, 3, 3)).astype(np.int8)
    weight = graph.add("Constant", value=onnx.numpy_helper.from_array(weight), name="w")
    sums = graph.add("ConvInteger", held, weight, zero, name="sums", pads=[1] * 4)
    result = graph.add("Cast", graph.add("Add", sums, graph.constant(np.int32(-3), "bias")), to=1)
    path = graph.save(tmp_path / "q.onnx", result, shape, data=shape)
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_convolutions_of_computed_weights_and_such_scales_are_refused(tmp_path):
    graph = QuantisedGraph()
    copies = graph.add("Tile", "x", graph.constant(np.array([24, 1, 1, 1]), "n"))
    weight = graph.add("Cast", graph.add("Round", copies), to=3)
    path = graph.save(tmp_path / "q.onnx", dynamic(graph, weight), (1, 24, None, None))
    with pytest.raises(UnsupportedOperatorError) as error:
        import_onnx(path)
    assert str(error.value).startswith(f"{path}: unsupported operators: ConvInteger (sums)")
    assert "QDQ" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("zeros", [(), (8,), (4, 1, 8)])
def test_products_of_such_scales_have_a_zero_point_for_each_output(zeros, data, tmp_path):
    graph, generator = QuantisedGraph(), np.random.default_rng(0)
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    weight = graph.constant(generator.integers(0, 256, (4, 8, 8)[3 - max(2, len(zeros)) :]).astype(np.uint8), "w")
    weight_zero = graph.constant(generator.integers(90, 160, zeros).astype(np.uint8), "w_zero")
    turned = graph.add("Transpose", held, perm=[0, 2, 1, 3])
    sums = graph.add("MatMulInteger", turned, weight, zero, weight_zero, name="sums")
    result = graph.add("Mul", graph.add("Cast", sums, to=1), scale)
    path = graph.save(tmp_path / "q.onnx", result, (1, 4, 16, 8))
    np.testing.assert_allclose(ours(path, data), theirs(path, data), rtol=1e-6)


def test_products_whose_scales_are_found_while_it_runs_are_taken(data, tmp_path):
    graph = QuantisedGraph()
    held, scale, zero = graph.add("DynamicQuantizeLinear", "x", name="dynamic", outputs=3)
    graph.constant(np.random.default_rng(0).integers(-127, 128, (8, 20)).astype(np.int8), "w")
    sums = graph.add("MatMulInteger", held, "w", zero, name="sums")
    path = graph.save(tmp_path / "q.onnx", graph.add("Mul", graph.add("Cast", sums, to=1), scale), (1, 16, 4, 20))
    np.testing.assert_allclose(ours(path, data), theirs(path, data), rtol=1e-6)


@pytest.mark.parametrize("kind", ["window", "product", "groups", "no zero point", "least zero point"])
def test_weights_that_take_nine_bits(kind, data, tmp_path):
    """Less a zero point of 150: channels with a weight below -128 are read twice, where there are no groups. Of a zero
    point of 0, or of -128 with a sign: one with a weight of 255 is read three times.
    """
    graph = QuantisedGraph()
    groups = 2 if kind == "groups" else 1
    shape = (16, 20) if kind == "product" else (24, 16 // groups, 3, 3)
    values = np.random.default_rng(2).integers(30, 256, shape).astype(np.uint8)
    of_channels, zero, copies = values if kind == "product" else np.moveaxis(values, 1, 0), np.uint8(150), 2
    of_channels[[3, 7]] = 3
    if kind.endswith("zero point"):
        values[:] = np.minimum(values, 100)
        of_channels[3, 0], of_channels[7, 0], zero, copies = 200, 255, np.uint8(0), 3
    if kind == "least zero point":
        values, zero = (values.astype(np.int16) - 128).astype(np.int8), np.int8(-128)
    for array, name in ((values, "w"), (np.float32(0.01), "w_scale"), (zero, "w_zero")):
        graph.constant(array, name)
    weight = graph.add("DequantizeLinear", "w", "w_scale", "w_zero", name="w_d")
    x = graph.step("x", 0.05, 118)
    if kind == "product":
        value = graph.add("MatMul", graph.add("Transpose", x, perm=[0, 2, 3, 1]), weight, name="layer")
        result = (1, 4, 8, 20)
    else:
        value, result = graph.add("Conv", x, weight, pads=[1] * 4, group=groups, name="layer"), (1, 24, 4, 8)
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.4, 120), result)
    if kind == "groups":
        assert [each.name for each in import_onnx(path).in_floats] == ["layer"]
        return
    (layer,) = extract_graph(import_onnx(path).mod).nodes
    channels = layer.operator.in_features if kind == "product" else layer.operator.in_channels
    assert layer.operator.dtype == "int8" and channels == 16 + copies
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_that_are_transposed_behind_their_step(per_channel, data, tmp_path):
    """As training holds them, (out, in), in floats that a QuantizeLinear rounds."""
    graph, generator = QuantisedGraph(), np.random.default_rng(0)
    scale = np.linspace(0.004, 0.009, 20).astype(np.float32) if per_channel else np.float32(0.006)
    given = [graph.constant(scale, "scale"), graph.constant(np.zeros(scale.shape, np.int8), "zero")]
    graph.constant((generator.standard_normal((20, 8)) * 0.3).astype(np.float32), "w")
    weight = graph.add("QuantizeLinear", "w", *given, axis=0)
    weight = graph.add("Transpose", graph.add("DequantizeLinear", weight, *given, axis=0), perm=[1, 0])
    value = graph.add("MatMul", graph.step("x", 0.05, 118), weight, name="layer")
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.1, 120), (1, 16, 4, 20))
    (layer,) = extract_graph(import_onnx(path).mod).nodes
    assert layer.operator.dtype == "int8" and import_onnx(path).in_floats == ()
    onnx.save(in_whole_numbers(onnx.load(path)), tmp_path / "equal.onnx")
    np.testing.assert_array_equal(ours(path, data), theirs(tmp_path / "equal.onnx", data))


def test_a_result_that_two_steps_round_alike_is_rounded_once(data, tmp_path):
    """As tools write it that give every reader a step of its own."""
    graph = QuantisedGraph(signed=True)
    value = graph.add("Conv", graph.step("x", 0.05, 118), graph.weights(16, 16), name="conv")
    first, second = graph.step(value, 0.21, 130), graph.step(value, 0.21, 130)
    later = graph.step(graph.add("Conv", second, graph.weights(16, 16, 1, "v"), name="later"), 0.4, 120)
    path = graph.save(tmp_path / "q.onnx", graph.step(graph.add("Add", first, later), 0.5, 120), (1, 16, 4, 8))
    assert in_floats(path) == [] and import_onnx(path).in_floats == ()
    equal = in_whole_numbers(onnx.load(path))
    onnx.save(equal, tmp_path / "equal.onnx")
    np.testing.assert_array_equal(ours(path, data), theirs(tmp_path / "equal.onnx", data))


def test_why_layers_are_in_floats_is_told(tmp_path):
    """Data of 16 bits, weights of floats, data of floats, a result that is read as floats."""
    graph = QuantisedGraph()
    graph.constant(np.float32(0.001), "wide_scale")
    graph.constant(np.uint16(30000), "wide_zero")
    wide = graph.add("QuantizeLinear", "x", "wide_scale", "wide_zero", name="wide_q")
    wide = graph.add("DequantizeLinear", wide, "wide_scale", "wide_zero", name="wide")
    floats = graph.constant(np.full((16, 16, 1, 1), 0.01, np.float32), "floats")
    narrow = graph.step("x", 0.05, 118)
    parts = [
        graph.add("Conv", wide, graph.weights(16, 16, 1, "a"), name="of 16 bits"),
        graph.add("Conv", narrow, floats, name="of floats"),
        graph.add("Conv", "x", graph.weights(16, 16, 1, "b"), name="conv of floats"),
        graph.add("Conv", narrow, graph.weights(16, 16, 1, "c"), name="not rounded"),
    ]
    path = graph.save(tmp_path / "q.onnx", graph.add("Sum", *parts), (1, 16, 4, 8), opset=21)
    found = import_onnx(path).in_floats
    reasons = {each.name: each.reason for each in found}
    assert reasons == {
        "of 16 bits": WIDE_DATA, "of floats": FLOAT_WEIGHTS, "conv of floats": FLOAT_DATA, "not rounded": NOT_ROUNDED
    }  # fmt: skip
    told = float_layer_notes([*found, FloatLayer("another", WIDE_DATA)])
    assert told[0] == f"layers of the quantised model in floats, 2: {WIDE_DATA} (of 16 bits, another)"
    assert import_onnx(path, whole_numbers=False).in_floats == ()


def test_steps_of_onnx_runtimes_own_alone(data, tmp_path):
    """As its quantiser writes them for 16 bits before opset 21."""
    graph, own = QuantisedGraph(), {"domain": "com.microsoft"}
    given = [graph.constant(np.float32(0.001), "scale"), graph.constant(np.uint16(30000), "zero")]
    value = graph.add("DequantizeLinear", graph.add("QuantizeLinear", "x", *given, **own), *given, **own)
    path = graph.save(tmp_path / "q.onnx", graph.add("Conv", value, graph.weights(24, 16), name="layer"), (1, 24, 4, 8))
    assert [each.reason for each in import_onnx(path).in_floats] == [WIDE_DATA]
    np.testing.assert_allclose(ours(path, data), theirs(path, data), rtol=1e-4, atol=1e-5)


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
    expected = ours(path, data)
    for cpu in (avx2, replace(CPU, mcpu="skylake-avx512", features=("avx512f",))):
        assert cpu.lacks("int8") is not None
        found = ours(path, data, cpu=cpu)
        assert np.abs(found - expected).max() < 0.0392 and np.mean(found != expected) < 0.01
    np.testing.assert_array_equal(expected, theirs(path, data))
