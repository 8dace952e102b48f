"""``--batch``: a static model for another batch computes of each sample what it computed before."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Host
from fusion.analysis.target_machine import other_cpu_warning
from fusion.relax import import_onnx
from fusion.relax.onnx.preparation import static_model

RNG = np.random.default_rng(5)
SHAPES = {
    "rows": [1, 2, 64],  # fixed batch, tokens
    "flat": [1, -1],
    "merged": [2, 64],  # rows of all samples in one matrix
    "free": [-1, 128],
    "copied": [0, 128],
}


def write(path, shape, inputs=(1, 8, 4, 4), after=None):
    """1x1 convolution, then a reshape to ``shape`` and back to one row per sample."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Reshape", ["c", "shape"], ["r"], name="reshape"),
        helper.make_node("Relu", ["r"], ["a"], name="relu"),
        *(after or [helper.make_node("Reshape", ["a", "back"], ["y"], name="back")]),
    ]
    weights = {
        "w": RNG.standard_normal((8, 8, 1, 1)).astype(np.float32),
        "shape": np.array(shape, np.int64),
        "back": np.array([inputs[0] if inputs[0] != "n" else 1, 128], np.int64),
        "fixed": np.ones((3, 128), np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("before", [1, 2])
def test_every_sample_computes_what_it_did(tmp_path, shape, before):
    first = [shape[0] * before if shape[0] > 0 else shape[0], *shape[1:]]
    path = write(tmp_path / "m.onnx", first, (before, 8, 4, 4))
    single, several = static_model(path, None), static_model(path, None, 6)
    x = RNG.standard_normal((6, 8, 4, 4)).astype(np.float32)
    apart = np.concatenate([run(single, x[start : start + before]) for start in range(0, 6, before)])
    np.testing.assert_allclose(run(several, x), apart, rtol=1e-5, atol=1e-6)


def test_our_network_for_a_batch_computes_what_onnxruntime_does(tmp_path):
    from fusion.relax.machine_code import build_executable
    from schedules.contract.cpu_target import host_target

    path = write(tmp_path / "m.onnx", SHAPES["rows"])
    model = import_onnx(path, None, 4)
    assert model.inputs[0].shape == (4, 8, 4, 4) and model.outputs[0].shape == (4, 128)
    x = RNG.standard_normal((4, 8, 4, 4)).astype(np.float32)
    apart = np.concatenate([run(static_model(path, None), x[index : index + 1]) for index in range(4)])
    np.testing.assert_allclose(build_executable(model.mod, host_target(1))(x)[0], apart, rtol=1e-4, atol=1e-5)


def test_an_open_batch_is_closed(tmp_path):
    path = write(tmp_path / "m.onnx", [-1, 128], ("n", 8, 4, 4), [helper.make_node("Neg", ["a"], ["y"])])
    assert import_onnx(path, None, 3).outputs[0].shape == (3, 128)
    for leading in (1, 3):  # a shape for one sample, or for all
        assert import_onnx(path, {"x": (leading, 8, 4, 4)}, 3).outputs[0].shape == (3, 128)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([helper.make_node("Add", ["a", "fixed"], ["y"])], "--batch: the shapes inside do not fit it"),
        ([helper.make_node("ReduceSum", ["a"], ["y"], keepdims=1)], "does not lead with the samples"),
    ],
)
def test_what_cannot_be_rewritten_is_one_line(tmp_path, after, words):
    """A constant of three rows; a sum over the samples."""
    path = write(tmp_path / "m.onnx", [3, 128], (3, 8, 4, 4), after)
    with pytest.raises(InputError) as caught:
        import_onnx(path, None, 5)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_shape_of_another_batch_tells_the_option(tmp_path):
    path = write(tmp_path / "m.onnx", SHAPES["rows"])
    with pytest.raises(InputError, match="--batch 8 rewrites a model for another batch"):
        import_onnx(path, {"x": (8, 8, 4, 4)})
    with pytest.raises(InputError) as caught:
        import_onnx(path, {"x": (1, 8, 5, 4)})
    assert "--batch" not in str(caught.value)


class Named:
    """What is asked of a machine."""

    def __init__(self, host):
        self.name, self.host = "far", host


def test_a_machine_that_is_another_cpu_is_said():
    here = Host("x86_64", ("avx2", "fma"), 2)
    assert other_cpu_warning(Named(None), here) is None
    assert other_cpu_warning(Named(Host("x86_64", ("fma", "avx2"), 64)), here) is None
    text = other_cpu_warning(Named(Host("x86_64", ("avx2", "fma", "avx512f"), 2)), here)
    assert text.startswith("far describes another CPU (this one lacks avx512f): kernels are built for this CPU")
    assert "it lacks fma" in other_cpu_warning(Named(Host("x86_64", ("avx2",), 2)), here)
    assert "aarch64, not x86_64" in other_cpu_warning(Named(Host("aarch64", ("avx2", "fma"), 2)), here)
