"""ONNX operators converted to PyTorch (by onnx2fx, simplified by us) against ONNX Runtime, and the ATen functions that
are left of a model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx2fx")

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from fusion.comparing.engine import Unavailable
from fusion.comparing.torch_graph import convert_to_torch, fold_batch_norms

IMAGE = (1, 4, 7, 9)


def constant(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def save(path: Path, nodes: list, shape: tuple, constants: dict, outputs: int = 1, opset: int = 18) -> Path:
    """A model of input ``x`` and outputs ``y0``, ``y1``, ... ."""
    ends = [helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, None) for index in range(outputs)]
    start = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [start], ends, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def check(path: Path, shape: tuple, fold: bool = False) -> torch.fx.GraphModule:
    """Converted and original agree on random input; returns the converted module."""
    x = constant(*shape, seed=0)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})
    module = convert_to_torch(path, {"x": x}, [output.name for output in session.get_outputs()])
    module = fold_batch_norms(module) if fold else module
    with torch.no_grad():
        actual = module(torch.from_numpy(x))
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-5, atol=2e-6)
    return module


def calls(module: torch.fx.GraphModule) -> list[str]:
    """Names of the ATen functions that the module calls, in order."""
    return [node.target.__name__.split(".")[0] for node in module.graph.nodes if node.op == "call_function"]


# operator, attributes, constants after x, shape of x, opset
CASES = {
    "AveragePool, uneven pads": (
        "AveragePool",
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]},
        [],
        IMAGE,
        18,
    ),
    "AveragePool, ceil": ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, [], IMAGE, 19),
    "BatchNormalization": (
        "BatchNormalization",
        {"epsilon": 0.01},
        [constant(4), constant(4, seed=2), constant(4, seed=3), abs(constant(4, seed=4))],
        IMAGE,
        18,
    ),
    "Clip, ReLU6": ("Clip", {}, [number(0), number(6)], IMAGE, 18),
    "Clip": ("Clip", {}, [number(-0.5), number(0.25)], IMAGE, 18),
    "Clip, attributes": ("Clip", {"min": -0.5, "max": 0.5}, [], IMAGE, 6),
    "Clip, one side": ("Clip", {}, [number(0.1)], IMAGE, 18),
    "Conv, stride, uneven pads": (
        "Conv",
        {"pads": [0, 0, 1, 1], "strides": [2, 2]},
        [constant(6, 4, 3, 3)],
        IMAGE,
        18,
    ),
    "Conv, depthwise": ("Conv", {"group": 4, "pads": [2, 2, 2, 2]}, [constant(4, 1, 5, 5)], IMAGE, 18),
    "Conv, SAME_UPPER": ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, [constant(6, 4, 2, 4)], IMAGE, 18),
    "Conv, SAME_LOWER": ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, [constant(6, 4, 2, 4)], IMAGE, 18),
    "Conv, VALID": ("Conv", {"auto_pad": "VALID"}, [constant(6, 4, 3, 3)], IMAGE, 18),
    "Dropout": ("Dropout", {}, [], IMAGE, 18),
    "Gather, scalar": ("Gather", {"axis": 2}, [np.array(3)], IMAGE, 18),
    "Gemm": ("Gemm", {"transB": 1}, [constant(3, 5), constant(3)], (2, 5), 18),
    "Gemm, scaled": ("Gemm", {"transA": 1, "alpha": 0.5, "beta": 2.0}, [constant(2, 3), constant(5, 3)], (2, 5), 18),
    "HardSwish": ("HardSwish", {}, [], IMAGE, 18),
    "Max": ("Max", {}, [constant(9), number(0.2)], IMAGE, 18),
    "MaxPool, uneven pads": ("MaxPool", {"kernel_shape": [3, 3], "pads": [0, 0, 2, 1]}, [], IMAGE, 18),
    "Mul": ("Mul", {}, [constant(1, 4, 1, 1)], IMAGE, 18),
    "Pad, axes": ("Pad", {}, [ints(1, 2), number(0.0), ints(3)], IMAGE, 18),
    "Pad, reflect": ("Pad", {"mode": "reflect"}, [ints(0, 0, 1, 2, 0, 0, 2, 1)], IMAGE, 18),
    "Pad, attributes": ("Pad", {"pads": [0, 0, 1, 0, 0, 0, 0, 1], "value": 0.25}, [], IMAGE, 2),
    "Reshape": ("Reshape", {}, [ints(0, 2, -1)], IMAGE, 18),
    "Resize, linear": (
        "Resize",
        {"mode": "linear"},
        [np.array([], np.float32), np.array([1, 1, 2, 2], np.float32)],
        IMAGE,
        18,
    ),
    "Slice, to the start": ("Slice", {}, [ints(-1), ints(-1000), ints(2), ints(-1)], IMAGE, 18),
    "Softmax, before opset 13": ("Softmax", {"axis": 2}, [], IMAGE, 9),
    "Squeeze, all": ("Squeeze", {}, [], IMAGE, 18),
}


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str, tmp_path: Path):
    kind, attributes, operands, shape, opset = CASES[name]
    constants = {f"c{index}": array for index, array in enumerate(operands)}
    node = helper.make_node(kind, ["x", *constants], ["y0"], **attributes)
    module = check(save(tmp_path / "m.onnx", [node], shape, constants, opset=opset), shape)
    assert calls(module) or kind in ("Identity", "Dropout")


def test_split_and_concat(tmp_path: Path):
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=3),
        helper.make_node("Split", ["x"], ["c", "d"], axis=1),
        helper.make_node("Concat", ["b", "a"], ["y0"], axis=3),
        helper.make_node("Concat", ["d", "c"], ["y1"], axis=-3),
    ]
    check(save(tmp_path / "m.onnx", nodes, IMAGE, {"sizes": ints(2, 7)}, outputs=2, opset=13), IMAGE)


def test_shape_arithmetic_is_computed_at_conversion(tmp_path: Path):
    """Reshape to (x.shape[0], 4 * 7 // 8 * 4, -1) with Shape, Gather, Div, Mul, Concat and ConstantOfShape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"]),
        helper.make_node("Gather", ["shape", "middle"], ["pair"]),
        helper.make_node("Gather", ["pair", "first"], ["channels"]),
        helper.make_node("Mul", ["channels", "seven"], ["many"]),
        helper.make_node("Div", ["many", "eight"], ["three"]),  # integers: 28 / 8 is 3
        helper.make_node("Mul", ["three", "four"], ["twelve"]),
        helper.make_node("Concat", ["batch", "twelve", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["z"]),
        helper.make_node("ConstantOfShape", ["target2"], ["ones"], value=helper.make_tensor("v", 1, [1], [1.5])),
        helper.make_node("Add", ["z", "ones"], ["y0"]),
    ]
    constants = {
        "first": ints(0),
        "middle": ints(1, 2),
        "seven": ints(7),
        "eight": ints(8),
        "four": ints(4),
        "rest": ints(-1),
    }
    module = check(save(tmp_path / "m.onnx", nodes, IMAGE, {**constants, "target2": ints(1, 12, 21)}), IMAGE)
    assert calls(module) == ["reshape", "add"]


def test_batch_norms_disappear_into_the_convolution_they_alone_follow(tmp_path: Path):
    norm = ["scale", "shift", "mean", "variance"]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], group=2),
        helper.make_node("BatchNormalization", ["a", *norm], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"]),
        helper.make_node("BatchNormalization", ["c", *norm], ["d"]),
        helper.make_node("Add", ["c", "d"], ["y0"]),  # c has a second user: its norm must stay
    ]
    constants = {
        "w1": constant(4, 2, 3, 3),
        "b1": constant(4),
        "w2": constant(4, 4, 1, 1),
        **{name: abs(constant(4, seed=place)) for place, name in enumerate(norm)},
    }
    path = save(tmp_path / "m.onnx", nodes, IMAGE, constants)
    assert calls(check(path, IMAGE)).count("batch_norm") == 2
    assert calls(check(path, IMAGE, fold=True)).count("batch_norm") == 1


# nodes from x (1, 4, 7, 9) to y0 beside what a native PyTorch model would call
TIDY = {
    "equal pads, and pads of nothing": (
        [
            helper.make_node("Pad", ["x", "both"], ["a"]),
            helper.make_node("Conv", ["a", "w"], ["b"], pads=[0, 1, 0, 1]),
            helper.make_node("Pad", ["b", "none"], ["c"]),
            helper.make_node("Conv", ["c", "w"], ["y0"], auto_pad="VALID"),
        ],
        ["conv2d", "conv2d"],
    ),
    "pads that a convolution has no setting for": (
        [helper.make_node("Pad", ["x", "uneven"], ["a"]), helper.make_node("Conv", ["a", "w"], ["y0"])],
        ["pad", "conv2d"],
    ),
    "pads with another number than zero": (
        [helper.make_node("Pad", ["x", "both", "one"], ["a"]), helper.make_node("Conv", ["a", "w"], ["y0"])],
        ["pad", "conv2d"],
    ),
    "pads that somebody else reads": (
        [
            helper.make_node("Pad", ["x", "both"], ["a"]),
            helper.make_node("Conv", ["a", "w"], ["b"], auto_pad="SAME_UPPER"),
            helper.make_node("Add", ["a", "b"], ["y0"]),
        ],
        ["pad", "conv2d", "add"],
    ),
    "SAME": ([helper.make_node("Conv", ["x", "w"], ["y0"], auto_pad="SAME_UPPER")], ["conv2d"]),
    "limits": ([helper.make_node("Clip", ["x", "zero", "six"], ["y0"])], ["clamp"]),
    "a factor of 1": (
        [helper.make_node("Flatten", ["x"], ["a"]), helper.make_node("Gemm", ["a", "dense"], ["y0"], alpha=1.0)],
        ["reshape", "matmul"],
    ),
    "other factors": (
        [
            helper.make_node("Flatten", ["x"], ["a"]),
            helper.make_node("Gemm", ["a", "dense"], ["b"], alpha=0.5),
            helper.make_node("Mul", ["b", "one"], ["y0"]),
        ],
        ["reshape", "matmul", "mul", "mul"],
    ),
    "constants": (
        [helper.make_node("Exp", ["one"], ["e"]), helper.make_node("Mul", ["x", "e"], ["y0"])],
        ["mul"],
    ),
}


@pytest.mark.parametrize("name", TIDY)
def test_what_is_called_is_what_a_native_model_would_call(name: str, tmp_path: Path):
    nodes, expected = TIDY[name]
    constants = {
        "w": constant(4, 4, 3, 3),
        "dense": constant(4 * 7 * 9, 3),
        "both": ints(0, 0, 1, 2, 0, 0, 1, 2),
        "none": ints(0, 0, 0, 0, 0, 0, 0, 0),
        "uneven": ints(0, 0, 0, 0, 0, 0, 1, 1),
        "zero": number(0),
        "one": number(1),
        "six": number(6),
    }
    assert calls(check(save(tmp_path / "m.onnx", nodes, IMAGE, constants), IMAGE)) == expected


def test_limits_are_numbers_so_that_onednn_fuses_them(tmp_path: Path):
    nodes = [helper.make_node("Clip", ["x", "zero", "six"], ["y0"])]
    module = check(save(tmp_path / "m.onnx", nodes, IMAGE, {"zero": number(0), "six": number(6)}), IMAGE)
    (clamp,) = (node for node in module.graph.nodes if node.op == "call_function")
    assert clamp.args[1:] == (0.0, 6.0)


def test_inputs_and_outputs_are_in_the_order_asked_for(tmp_path: Path):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)) for name in ("a", "b", "sum", "difference")]
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    graph = helper.make_graph(nodes, "g", ends[:2], ends[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "m.onnx")
    examples = {"b": np.array([1, 2], np.float32), "a": np.array([5, 5], np.float32)}
    module = convert_to_torch(tmp_path / "m.onnx", examples, ["difference", "sum"])
    difference, total = module(*(torch.from_numpy(array) for array in examples.values()))
    assert difference.tolist() == [4, 3] and total.tolist() == [6, 7]


def test_an_unknown_operator_is_named(tmp_path: Path):
    node = helper.make_node("Frobnicate", ["x"], ["y0"], domain="com.example")
    path = save(tmp_path / "m.onnx", [node], IMAGE, {})
    with pytest.raises(Unavailable, match="^onnx2fx .* cannot convert the model to PyTorch: .*Frobnicate.*$"):
        convert_to_torch(path, {"x": constant(*IMAGE)}, ["y0"])


def test_a_shape_that_depends_on_an_input_is_refused(tmp_path: Path):
    nodes = [
        helper.make_node("Cast", ["x"], ["shape"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["c", "shape"], ["y0"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, (1,), {"c": constant(1)})
    with pytest.raises(Unavailable, match="depends on the values of an input"):
        convert_to_torch(path, {"x": np.ones(1, np.float32)}, ["y0"])
