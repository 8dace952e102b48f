"""What is refused before anything is evaluated or tuned, and in how many words."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.base.errors import ModelError
from fusion.relax import import_onnx

ONES = np.ones((4, 3, 3, 3), np.float32)


def save(path, nodes, shape=(1, 3, 16, 16), weights=None, output=None):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


def conv(**attributes):
    return [helper.make_node("Conv", ["x", "w"], ["y"], name="stem", **attributes)]


def refused(path, shapes=None):
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        import_onnx(path, shapes)
    assert time.monotonic() - started < 60
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["w", "b"])
def test_weights_must_be_numbers(tmp_path, value, name):
    weights = {"w": ONES.copy(), "b": np.ones(4, np.float32)}
    weights[name].reshape(-1)[1] = value
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="stem")]
    text = refused(save(tmp_path / "m.onnx", nodes, weights=weights))
    assert f"weights '{name}' of Conv 'stem': 1 of {weights[name].size} are NaN or infinite" in text


def test_infinite_bounds_are_no_weights(tmp_path):
    nodes = [helper.make_node("Clip", ["x", "low", "high"], ["y"], name="clip")]
    weights = {"low": np.array(0, np.float32), "high": np.array(np.inf, np.float32)}
    assert import_onnx(save(tmp_path / "m.onnx", nodes, weights=weights)).outputs


@pytest.mark.parametrize(
    ("nodes", "weights", "words"),
    [
        (
            conv(kernel_shape=[5, 5]),
            {"w": ONES},
            "Conv 'stem': kernel_shape is 5x5, but its weights 'w' hold kernels of 3x3",
        ),
        (conv(auto_pad="FOO"), {"w": ONES}, "Conv 'stem': auto_pad is 'FOO'; there are NOTSET, SAME_UPPER"),
        (conv(), {"w": np.ones((4, 3, 0, 3), np.float32)}, "Conv 'stem': kernel of 0x3; every size must be at least 1"),
        (conv(strides=[0, 1]), {"w": ONES}, "Conv 'stem': strides of 0x1"),
        (
            [helper.make_node("MaxPool", ["x"], ["y"], name="pool", kernel_shape=[0, 2])],
            {},
            "MaxPool 'pool': kernel of 0x2",
        ),
    ],
)
def test_windows_that_make_no_sense_name_the_node(tmp_path, nodes, weights, words):
    assert words in refused(save(tmp_path / "m.onnx", nodes, weights=weights))


def test_huge_tensors_are_refused_by_size(tmp_path):
    text = refused(save(tmp_path / "tall.onnx", conv(), (1, 3, 2**31, 16), {"w": ONES}))
    assert "tensor 'x' is 1x3x2147483648x16" in text and "at most 268,435,456 (1 GiB in FP32)" in text
    text = refused(save(tmp_path / "padded.onnx", conv(pads=[10**6] * 4), weights={"w": ONES}))
    assert "tensor 'y' of Conv 'stem' is 1x4x2000014x2000014" in text
    text = refused(save(tmp_path / "high.onnx", conv(pads=[10**6, 0, 10**6, 0]), weights={"w": ONES}))
    assert "images of at most 65,536 rows or columns" in text
    path = save(tmp_path / "open.onnx", conv(), (1, 3, "h", "w"), {"w": ONES})
    assert "299,999,940,000,003 elements" in refused(path, {"x": (1, 3, 9999999, 9999999)})


def test_an_expand_of_gigabytes_is_not_evaluated(tmp_path):
    nodes = [
        helper.make_node("Expand", ["one", "shape"], ["big"], name="expand"),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    weights = {"one": np.ones(1, np.float32), "shape": np.array([2_000_000_000], np.int64)}
    assert "of Expand 'expand' is 2000000000" in refused(save(tmp_path / "m.onnx", nodes, weights=weights))


def test_real_sizes_pass(tmp_path):
    path = save(tmp_path / "m.onnx", conv(pads=[1] * 4), (1, 3, 1080, 1920), {"w": ONES})
    assert import_onnx(path).outputs[0].shape == (1, 4, 1080, 1920)
    assert onnx.load(path).graph.node
