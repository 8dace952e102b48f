"""Models of 16 bits are computed in 32, between casts of their inputs and outputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.operators.layers import Conv2d
from fusion.relax import import_onnx
from fusion.relax.extract import extract_graph
from fusion.relax.machine_code import build_executable
from fusion.relax.onnx.preparation import computed_in_single, holds_half
from schedules.contract.cpu_target import host_target

HALF = TensorProto.FLOAT16


def half_model(path):
    """Two convolutions; the first one's result is an output too, and so is the input itself by way of an identity."""
    generator = np.random.default_rng(0)
    weights = {"v": generator.standard_normal((8, 3, 3, 3)) / 5, "w": generator.standard_normal((4, 8, 1, 1)) / 3}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float16([0.5]))),
        helper.make_node("Mul", ["r", "k"], ["m"]),
        helper.make_node("Conv", ["m", "w"], ["y"]),
        helper.make_node("Cast", ["y"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Identity", ["x"], ["same"]),
    ]
    graph = helper.make_graph(
        nodes,
        "half",
        [helper.make_tensor_value_info("x", HALF, (1, 3, 10, 10))],
        [helper.make_tensor_value_info(name, HALF, None) for name in ("c", "y", "same")]
        + [helper.make_tensor_value_info("wide", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value.astype(np.float16), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_layers_are_kernels_and_the_interface_keeps_its_types(tmp_path):
    path = half_model(tmp_path / "half.onnx")
    model = import_onnx(path)
    assert [info.dtype for info in model.inputs] == ["float16"]
    assert [info.dtype for info in model.outputs] == ["float16"] * 3 + ["float32"]
    assert sum(isinstance(node.operator, Conv2d) for node in extract_graph(model.mod).nodes) == 2
    x = np.random.default_rng(1).standard_normal((1, 3, 10, 10)).astype(np.float16)
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    for ours, theirs in zip(build_executable(model.mod, host_target(1))(x), expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=1e-2, atol=1e-2)


def test_a_model_without_16_bits_is_the_same_object(tmp_path):
    model = onnx.load(half_model(tmp_path / "half.onnx"))
    single = computed_in_single(model)
    assert holds_half(model.graph) and single is not model
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(single, strict_mode=True), full_check=True)
    plain = onnx.ModelProto()
    plain.graph.node.append(helper.make_node("Relu", ["x"], ["y"]))
    assert computed_in_single(plain) is plain


@pytest.mark.parametrize("inside", [True, False])
def test_halves_in_branches_are_seen(inside):
    kind = HALF if inside else TensorProto.DOUBLE
    branch = helper.make_graph([helper.make_node("Cast", ["x"], ["b"], to=kind)], "branch", [], [])
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], "g", [], []
    )
    assert holds_half(graph) == inside
    single = computed_in_single(helper.make_model(graph)).graph.node[0].attribute[0].g.node[0]
    assert single.attribute[0].i == (TensorProto.FLOAT if inside else kind)
