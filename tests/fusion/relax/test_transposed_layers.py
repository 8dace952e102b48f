"""Transposed convolutions of quantised models: whole numbers, phase by phase."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
from costmodel.operators.layers import Conv2d
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.relax.onnx.quantised_rewrites import in_whole_numbers
from tests.case_lists import one_in
from tests.fusion.quantised_models import QuantisedGraph, ours, theirs

SHAPE = (1, 16, 6, 5)
# Kernel, attributes, rows and columns of the result, convolutions.
FORMS = {
    "as large as the stride": (2, {"strides": [2, 2]}, (12, 10), 1),
    "twice the stride": (4, {"strides": [2, 2], "pads": [1, 1, 1, 1]}, (12, 10), 4),
    "cut off behind": (3, {"strides": [2, 2], "pads": [1, 1, 1, 1]}, (11, 9), 4),
    "in groups": (2, {"strides": [2, 2], "group": 2}, (12, 10), 4),
    "of the size that is said": (4, {"strides": [2, 2], "output_shape": [11, 9], "auto_pad": "SAME_UPPER"}, (11, 9), 4),
    "stride one": (3, {"strides": [1, 1], "pads": [1, 1, 1, 1]}, (6, 5), 1),
}


def transposed(graph, form, per_channel=False, bias=True):
    kernel, attributes, _, _ = FORMS[form]
    outputs, generator = 12, np.random.default_rng(kernel)
    groups = attributes.get("group", 1)
    graph.constant(generator.integers(-127, 128, (16, outputs // groups, kernel, kernel)).astype(np.int8), "w")
    scale = np.linspace(0.004, 0.009, outputs // groups).astype(np.float32) if per_channel else np.float32(0.0061)
    graph.constant(scale, "w_scale")
    graph.constant(np.zeros(np.shape(scale), np.int8), "w_zero")
    options = {"axis": 1} if per_channel else {}
    given = [graph.step("x", 0.05, 128), graph.add("DequantizeLinear", "w", "w_scale", "w_zero", name="w_d", **options)]
    if bias:
        graph.constant(generator.integers(-9000, 9000, outputs).astype(np.int32), "b")
        of_sums = np.tile(scale, groups) if per_channel else scale
        graph.constant((np.float32(0.05) * of_sums).astype(np.float32), "b_scale")
        axis = {"axis": 0} if per_channel else {}
        given.append(graph.add("DequantizeLinear", "b", "b_scale", name="b_d", **axis))
    return graph.add("ConvTranspose", *given, name="transposed", **attributes)


def compared(path, tmp_path):
    """Ours, and what ONNX Runtime computes in floats and in whole numbers."""
    data = (np.random.default_rng(5).standard_normal(SHAPE) * 3).astype(np.float32)
    equal = in_whole_numbers(onnx.load(path))
    assert equal is not None and not any(node.op_type == "ConvTranspose" for node in equal.graph.node)
    onnx.save(equal, tmp_path / "equal.onnx")
    return ours(path, data), theirs(path, data), theirs(tmp_path / "equal.onnx", data)


@pytest.mark.parametrize("form", one_in(2, FORMS))
def test_each_phase_is_a_convolution_in_whole_numbers(form, tmp_path):
    graph = QuantisedGraph(signed=form == "twice the stride")
    *_, result, convolutions = FORMS[form]
    last = graph.step(transposed(graph, form, per_channel=form != "cut off behind"), 0.31, 120)
    path = graph.save(tmp_path / "q.onnx", last, (1, 12, *result), data=SHAPE)
    imported = import_onnx(path)
    layers = [node.operator for node in extract_graph(imported.mod).nodes]
    assert [type(each) for each in layers] == [Conv2d] * convolutions and {each.dtype for each in layers} == {"int8"}
    assert imported.in_floats == ()
    found, floats, whole = compared(path, tmp_path)
    np.testing.assert_array_equal(found, whole)
    assert np.mean(found != floats) < 0.002 and np.abs(found - floats).max() < 0.311


@pytest.mark.parametrize("activation", ["PRelu", "LeakyRelu", "Clip"])
def test_activations_are_computed_before_the_phases_are_put_in_place(activation, tmp_path):
    graph, form = QuantisedGraph(), "as large as the stride"
    value = transposed(graph, form, bias=activation != "Clip")
    if activation == "PRelu":
        slopes = np.linspace(-0.2, 1.4, 12, dtype=np.float32).reshape(1, 12, 1, 1)
        value = graph.add("PRelu", value, graph.constant(slopes, "slopes"))
    elif activation == "Clip":
        value = graph.add("Clip", value, graph.constant(np.float32(0), "low"), graph.constant(np.float32(6), "high"))
    else:
        value = graph.add("LeakyRelu", value, alpha=0.2)
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.24, 60), (1, 12, 12, 10), data=SHAPE)
    (layer,) = extract_graph(import_onnx(path).mod).nodes
    assert layer.operator.dtype == "int8" and layer.name == "transposed"
    found, floats, whole = compared(path, tmp_path)
    # ONNX Runtime sums floats before an activation that does not cut off.
    assert np.mean(found != whole) < 0.002 and np.abs(found - whole).max() < 0.241
    assert activation != "Clip" or np.array_equal(found, whole)
    assert np.mean(found != floats) < 0.002


def test_slopes_of_pixels_stay_where_pixels_are_in_place(tmp_path):
    graph = QuantisedGraph()
    slopes = graph.constant(np.linspace(-0.2, 1.4, 10, dtype=np.float32).reshape(1, 1, 10), "slopes")
    value = graph.add("PRelu", transposed(graph, "twice the stride"), slopes)
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.31, 120), (1, 12, 12, 10), data=SHAPE)
    (layer,) = import_onnx(path).in_floats
    assert layer.name == "transposed" and "form" in layer.reason


def test_what_stays_in_floats_is_told(tmp_path):
    """A result that two read, one of them as floats."""
    graph = QuantisedGraph()
    value = transposed(graph, "as large as the stride")
    total = graph.add("Add", graph.step(value, 0.31, 120), value)
    path = graph.save(tmp_path / "q.onnx", total, (1, 12, 12, 10), data=SHAPE)
    (layer,) = import_onnx(path).in_floats
    assert layer.name == "transposed" and "not rounded" in layer.reason
