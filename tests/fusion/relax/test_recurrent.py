"""LSTM and GRU: against ONNX Runtime in all directions, and the reference in double precision."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.base.errors import UnsupportedOperatorError
from fusion.acceptance.output_check import DoubleModel
from fusion.relax import import_onnx
from fusion.relax.machine_code import build_executable
from schedules.contract.cpu_target import host_target

STEPS, BATCH, INPUTS = 7, 3, 5
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def save(path, kind, direction="forward", hidden=20, bias=True, states=False, given=(), **attributes):
    """``kind`` with random weights; ``given``: names of inputs in place of missing ones, by position."""
    gates, count = {"LSTM": 4, "GRU": 3}[kind], DIRECTIONS[direction]
    generator = np.random.default_rng(0)
    shapes = {"w": (count, gates * hidden, INPUTS), "r": (count, gates * hidden, hidden)}
    shapes |= {"b": (count, 2 * gates * hidden)} if bias else {}
    inputs = ["x", "w", "r", "b" if bias else "", ""]
    open_states = (["h", "c"] if kind == "LSTM" else ["h"]) if states else []
    inputs += open_states
    for position, name in given:
        inputs += [""] * (position + 1 - len(inputs))
        inputs[position] = name
        shapes[name] = (count, 3 * hidden)
    outputs = ["y", "last", "cell"][: 3 if kind == "LSTM" else 2]
    layer = helper.make_node(kind, inputs, outputs, name="layer", hidden_size=hidden, direction=direction, **attributes)
    graph = helper.make_graph(
        [layer],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (STEPS, BATCH, INPUTS))]
        + [helper.make_tensor_value_info(each, TensorProto.FLOAT, (count, BATCH, hidden)) for each in open_states],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array((generator.standard_normal(shape) / 2).astype(np.float32), name)
            for name, shape in shapes.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def check(path):
    model = import_onnx(path)
    generator = np.random.default_rng(1)
    arrays = {info.name: generator.standard_normal(info.shape).astype(np.float32) for info in model.inputs}
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, arrays)
    double = DoubleModel(onnx.load(path)).run(arrays)
    for info, ours, theirs in zip(
        model.outputs, build_executable(model.mod, host_target(2))(*arrays.values()), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours, double[info.name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_every_direction(tmp_path, kind, direction):
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    check(save(tmp_path / "m.onnx", kind, direction, hidden=20, states=direction != "forward", **more))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_whole_vectors_and_no_bias(tmp_path, kind):
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    check(save(tmp_path / "m.onnx", kind, "bidirectional", hidden=32, bias=False, **more))


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("LSTM", {"given": [(7, "p")]}, "peepholes"),
        ("LSTM", {"input_forget": 1}, "coupled gates"),
        ("LSTM", {"clip": 1.0}, "clip"),
        ("LSTM", {"activations": ["Relu", "Tanh", "Tanh"]}, "activations relu, tanh, tanh"),
        ("GRU", {"linear_before_reset": 0}, "linear_before_reset=0"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path, kind, more, reason):
    path = save(tmp_path / "m.onnx", kind, **more)
    with pytest.raises(UnsupportedOperatorError, match=f"{kind} of node 'layer': .*{reason}"):
        import_onnx(path)
