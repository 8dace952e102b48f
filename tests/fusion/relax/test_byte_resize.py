"""Bytes between the pixels of an image, with ONNX Runtime's bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
import tvm

from fusion.relax.extract import extract_graph
from fusion.relax.integer_calls import ByteResize, Quantisation, compute_resize, resize_factors
from fusion.relax.kernels.bytes import byte_resize_kernel
from fusion.relax.onnx.importer import import_onnx
from fusion.tuning.network_check import rounds_otherwise
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import compile_kernel
from schedules.contract.template import block, unblock
from tests.fusion.quantised_models import CPU, EMULATED, HOST, QuantisedGraph, ours, theirs

SHAPE = (1, 24, 9, 7)
FORMS = {
    "twice as large": ("half_pixel", {"scales": (2.0, 2.0)}, (18, 14)),
    "by no whole number": ("asymmetric", {"scales": (1.5, 2.6)}, (13, 18)),
    "corners that stay, smaller": ("align_corners", {"sizes": (5, 16)}, (5, 16)),
    "to a single row": ("pytorch_half_pixel", {"sizes": (1, 20)}, (1, 20)),
}


def with_resize(graph, value, form, mode="linear"):
    coordinates, extents, _ = FORMS[form]
    if "scales" in extents:
        given = ["", graph.constant(np.array([1, 1, *extents["scales"]], np.float32), "scales")]
    else:
        given = ["", "", graph.constant(np.array([*SHAPE[:2], *extents["sizes"]], np.int64), "sizes")]
    return graph.add("Resize", value, *given, mode=mode, coordinate_transformation_mode=coordinates)


def every_byte(scale=0.05003, zero=118):
    steps = np.random.default_rng(3).permutation(np.arange(np.prod(SHAPE)) % 256).reshape(SHAPE)
    return ((steps - zero) * np.float32(scale)).astype(np.float32)


def operators(path):
    return [other.operator for other in extract_graph(import_onnx(path).mod).others]


@pytest.mark.parametrize("form", FORMS)
def test_between_steps_floats_are_weighed_and_rounded(form, tmp_path):
    """Halves and quarters of steps lie on ties now and then: each rounding on the way decides."""
    signed, after = form == "by no whole number", 0.05003 if form == "twice as large" else 0.0411
    graph = QuantisedGraph(signed)
    value = graph.add("Relu", with_resize(graph, graph.step("x", 0.05003, 118), form))
    path = graph.save(tmp_path / "q.onnx", graph.step(value, after, 118), (*SHAPE[:2], *FORMS[form][2]), data=SHAPE)
    found = operators(path)
    assert "byte_resize" in found and "relax.image.resize2d" not in found and "relax.nn.relu" not in found
    assert not rounds_otherwise(extract_graph(import_onnx(path).mod))
    np.testing.assert_array_equal(ours(path, every_byte()), theirs(path, every_byte()))


@pytest.mark.parametrize("signed", [False, True])
def test_bytes_that_are_read_as_they_are_are_cut_off(signed, tmp_path):
    """As files of quantised operators have it: towards zero, which of bytes with a sign is none of their bounds."""
    graph = QuantisedGraph(signed)
    x = graph.step("x", 0.05003, 100)
    value = with_resize(graph, f"{x[:-2]}_q", "twice as large")
    held = [f"{x[:-2]}{end}" for end in ("_scale", "_zero")]
    result = graph.add("DequantizeLinear", value, *held, name="result")
    path = graph.save(tmp_path / "q.onnx", result, (*SHAPE[:2], 18, 14), data=SHAPE)
    assert operators(path).count("byte_resize") == 1
    np.testing.assert_array_equal(ours(path, every_byte(zero=100)), theirs(path, every_byte(zero=100)))


def test_bytes_between_pixels_where_layers_are_in_floats(tmp_path):
    graph = QuantisedGraph()
    x = graph.step("x", 0.05003, 100)
    held = [f"{x[:-2]}{end}" for end in ("_q", "_scale", "_zero")]
    value = with_resize(graph, held[0], "twice as large")
    result = graph.add("DequantizeLinear", value, *held[1:], name="result")
    path = graph.save(tmp_path / "q.onnx", result, (*SHAPE[:2], 18, 14), data=SHAPE)
    avx2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 1024 * 1024)
    found = ours(path, every_byte(zero=100), cpu=avx2)
    # A sum that is a whole number but for its last digit is cut off to that or to the one below.
    assert np.abs(found - theirs(path, every_byte(zero=100))).max() <= 0.0501


@pytest.mark.parametrize(("signed", "options"), [(True, {"coordinate_transformation_mode": "half_pixel_symmetric"}),
                                                 (False, {"antialias": 1})])  # fmt: skip
def test_forms_without_a_kernel_of_bytes_are_cut_off_and_rounded_as_there(signed, options, tmp_path):
    """Towards the zero of bytes with a sign, which keep it therefore; to nearest behind a filter."""
    graph = QuantisedGraph(signed)
    x = graph.step("x", 0.05003, 100)
    held = [f"{x[:-2]}{end}" for end in ("_q", "_scale", "_zero")]
    sizes = graph.constant(np.array([*SHAPE[:2], 5, 6], np.int64), "sizes")
    value = graph.add("Resize", held[0], "", "", sizes, mode="linear", **options)
    result = graph.add("DequantizeLinear", value, *held[1:], name="result")
    path = graph.save(tmp_path / "q.onnx", result, (*SHAPE[:2], 5, 6), data=SHAPE, opset=19)
    difference = np.abs(ours(path, every_byte(zero=100)) - theirs(path, every_byte(zero=100)))
    # The last digit of a sum decides now and then; with the filter an image between the axes is rounded there too.
    assert difference.max() <= 0.0501 and (difference > 0).mean() < 0.25


@pytest.mark.parametrize("cut_off", [False, True])
def test_the_kernel_computes_what_is_specified(cut_off):
    step = ByteResize(SHAPE, (20, 5), (20 / 9, 5 / 7), "half_pixel", cut_off)
    before, after = (Quantisation(np.float32(scale), 120, high=high) for scale, high in ((0.05, 255), (0.033, 240)))
    factors = resize_factors(*(Quantisation(np.float32(1), 128),) * 2) if cut_off else resize_factors(before, after)
    data = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
    blocked = block(data, CPU.lanes)
    result = np.zeros((1, 2, 20, 5, CPU.lanes), np.uint8)
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(each)) for each in (blocked, *step.tables(), factors, result)]
    compile_kernel(byte_resize_kernel(step, CPU), replace(CPU, mcpu=HOST.mcpu), EMULATED)(*tensors)
    np.testing.assert_array_equal(unblock(tensors[-1].numpy(), SHAPE[1]), compute_resize(data, step, factors))
