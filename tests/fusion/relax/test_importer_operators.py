"""Every operator form whose conversion is ours, against ONNX Runtime: many outputs of one model, compiled once."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from fusion.relax import import_onnx

IMAGE = (2, 4, 7, 8)


def compare(tmp_path, nodes, weights=None, opset=17, shape=IMAGE):
    """Import a model whose outputs are the nodes' first outputs, compare them all; returns the Relax module."""
    nodes = [helper.make_node(kind, inputs, [f"y{i}"], **attrs) for i, (kind, inputs, attrs) in enumerate(nodes)]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 3
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": data})
    mod = import_onnx(path).mod
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})  # what is compiled runs once
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(data))
    actual = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    for node, theirs, ours in zip(nodes, expected, actual, strict=True):
        assert ours.numpy().shape == theirs.shape, node
        assert np.allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-4), node
    return mod


def operators(mod):
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [value.op.name.removeprefix("relax.") for value in values if isinstance(value, relax.Call)]


def test_convolutions(tmp_path):
    generator = np.random.default_rng(1)
    weights = {
        "w": generator.standard_normal((6, 4, 3, 3)).astype(np.float32),
        "even": generator.standard_normal((6, 4, 2, 4)).astype(np.float32),
        "grouped": generator.standard_normal((6, 2, 3, 3)).astype(np.float32),
        "b": generator.standard_normal(6).astype(np.float32),
    }
    nodes = [("Conv", ["x", "w", "b"], {}), ("Conv", ["x", "w"], {"pads": [1, 0, 2, 1], "strides": [2, 1]})]
    nodes += [("Conv", ["x", "w"], {"dilations": [2, 1]}), ("Conv", ["x", "grouped", "b"], {"group": 2})]
    nodes += [
        ("Conv", ["x", weight, "b"], {"auto_pad": mode, "strides": [stride, stride]})
        for weight, mode, stride in itertools.product(("w", "even"), ("SAME_UPPER", "SAME_LOWER", "VALID"), (1, 3))
    ]
    mod = compare(tmp_path, nodes, weights)
    assert set(operators(mod)) == {"nn.conv2d", "add"}


def test_a_power_of_integers(tmp_path):
    """TVM has none; with exponents in the graph nothing of it is constant."""
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT32),
        helper.make_node("Abs", ["i"], ["positive"]),
        helper.make_node("Pow", ["i", "positive"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 8)) for name in ("x", "y")]
    path = tmp_path / "m.onnx"
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    data = np.random.default_rng(0).uniform(-6, 6, (4, 8)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": data})
    compiled = tvm.compile(import_onnx(path).mod, tvm.target.Target({"kind": "llvm"}))
    found = relax.VirtualMachine(compiled, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
    assert np.array_equal(found, expected) and expected.min() < -100


def test_transposed_convolutions_of_a_given_output_shape(tmp_path):
    """Smaller than what stride 2 and 3x3 make of 7x8 (15x17), by an even and an odd number, and larger."""
    weights = {"w": np.random.default_rng(1).standard_normal((4, 6, 3, 3)).astype(np.float32)}
    shapes = [[14, 16], [13, 14], [16, 18], [15, 17]]
    nodes = [
        ("ConvTranspose", ["x", "w"], {"strides": [2, 2], "output_shape": shape, "auto_pad": mode})
        for shape, mode in itertools.product(shapes, ("NOTSET", "SAME_UPPER", "SAME_LOWER"))
    ]
    nodes.append(("ConvTranspose", ["x", "w"], {"strides": [2, 2], "pads": [1, 1, 0, 0], "output_padding": [1, 0]}))
    compare(tmp_path, nodes, weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_pools(tmp_path, kind):
    nodes = [
        (kind, ["x"], {"kernel_shape": [k, k], "strides": [s, s], "pads": [p, 0, 0, p], "ceil_mode": ceil})
        for k, s, p, ceil in itertools.product((2, 3), (2, 3), (0, 1), (0, 1))
    ]
    nodes += [
        (kind, ["x"], {"kernel_shape": [k, k], "strides": [s, s], "auto_pad": mode})
        for k, s, mode in itertools.product((2, 3), (1, 2), ("SAME_UPPER", "SAME_LOWER", "VALID"))
    ]
    if kind == "AveragePool":
        nodes += [(kind, ["x"], {**attrs, "count_include_pad": 1}) for _, _, attrs in nodes[:16]]
    compare(tmp_path, nodes, opset=19)


def test_dense_layers(tmp_path):
    generator = np.random.default_rng(1)
    shapes = {"w": (8, 3), "wt": (3, 8), "b": (3,), "row": (1, 3), "s": (1,), "full": (5, 3), "a": (5, 5)}
    weights = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        ("Gemm", ["x", "w"], {}),
        ("Gemm", ["x", "wt", "b"], {"transB": 1}),
        ("Gemm", ["x", "wt", "row"], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
        ("Gemm", ["x", "w", "s"], {"beta": 3.0}),
        ("Gemm", ["x", "w", "full"], {"beta": 0.5}),
        ("Gemm", ["x", "a"], {"transA": 1}),
        ("MatMul", ["x", "w"], {}),
    ]
    mod = compare(tmp_path, nodes, weights, shape=(5, 8))
    assert operators(mod).count("permute_dims") == 1  # x^T alone: no weight is transposed when the model runs


def test_activations(tmp_path):
    weights = {"zero": np.float32(0), "six": np.float32(6), "nan": np.float32(np.nan), "one": np.float32([1])}
    nodes = [
        ("Clip", ["x", "zero", "six"], {}),
        ("Clip", ["x", "zero"], {}),
        ("Clip", ["x", "", "six"], {}),
        ("Clip", ["x"], {}),
        ("Clip", ["x", "nan", "six"], {}),
        ("HardSwish", ["x"], {}),
        ("HardSigmoid", ["x"], {}),
        ("HardSigmoid", ["x"], {"alpha": 1 / 6, "beta": 0.5}),
        ("Sigmoid", ["x"], {}),
        ("LeakyRelu", ["x"], {"alpha": 0.1}),
        ("Elu", ["x"], {}),
        ("Softmax", ["x"], {"axis": 1}),
        ("Max", ["x", "zero"], {}),
        ("Min", ["x", "one", "six"], {}),
        ("Sum", ["x", "x", "one"], {}),
    ]
    mod = compare(tmp_path, nodes, weights)
    assert not [name for name in operators(mod) if name.startswith("call_tir")]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resizing_by_a_scale_that_is_not_the_ratio_of_the_sizes(tmp_path, mode):
    """7 and 8 times 1.3 are 9.1 and 10.4; sizes of some axes, coordinates about the middle, and filtered images."""
    weights = {"s": np.float32([1, 1, 1.3, 1.3]), "half": np.float32([1, 1, 0.45, 0.6]), "two": np.int64([9, 5])}
    ways = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    nodes = [
        ("Resize", ["x", "", scales], {"mode": mode, "coordinate_transformation_mode": way})
        for way, scales in itertools.product(ways, ("s", "half"))
    ]
    nodes.append(("Resize", ["x", "", "", "two"], {"mode": mode, "axes": [2, 3]}))
    if mode != "nearest":
        nodes += [("Resize", ["x", "", scales], {"mode": mode, "antialias": 1}) for scales in ("s", "half")]
        nodes.append(
            ("Resize", ["x", "", "s"], {"mode": mode, "coordinate_transformation_mode": "half_pixel_symmetric"})
        )
    if mode == "cubic":
        nodes.append(("Resize", ["x", "", "half"], {"mode": mode, "exclude_outside": 1, "cubic_coeff_a": -0.5}))
    compare(tmp_path, nodes, weights, opset=19)


@pytest.mark.parametrize("opset", [11, 13])
def test_resizing_channels_last_and_with_empty_scales(tmp_path, opset):
    """TensorFlow's images; PyTorch's exports of opset 11, which name sizes and cannot leave out scales and a region."""
    weights = {
        "last": np.array([1, 2, 1.5, 1], np.float32),
        "first": np.array([2, 4, 11, 5], np.int64),
        "behind": np.array([2, 7, 4, 8], np.int64),
        "none": np.zeros(0, np.float32),
    }
    nodes = [
        ("Resize", ["x", "none", scales, *sizes], {"mode": mode, "coordinate_transformation_mode": way, **more})
        for scales, *sizes in (["last"], ["none", "first"], ["none", "behind"])
        for mode, way, more in (
            ("linear", "align_corners", {}),
            ("nearest", "asymmetric", {"nearest_mode": "floor"}),
        )
    ]
    nodes.append(("Resize", ["x", "none", "none", "first"], {"mode": "cubic", "cubic_coeff_a": -0.5}))
    mod = compare(tmp_path, nodes, weights, opset=opset, shape=(2, 4, 8, 8))
    assert operators(mod).count("image.resize2d") == len(nodes)


def test_a_local_response_norm_is_a_convolution_of_the_squares(tmp_path):
    """With 3/4, which AlexNet and GoogLeNet have, a half and one there is no power to compute."""
    nodes = [
        ("LRN", ["x"], {"size": size, "alpha": 0.3, "beta": beta, "bias": 1.5})
        for size, beta in ((5, 0.75), (1, 0.75), (3, 0.5), (5, 1.0), (3, 0.6), (9, 0.75))
    ]
    mod = compare(tmp_path, nodes, {}, shape=(2, 6, 5, 4))
    assert operators(mod).count("nn.conv2d") == len(nodes) and operators(mod).count("power") == 1


def test_pads(tmp_path):
    weights = {
        "all": np.int64([0, 1, 2, 0, 1, 0, 0, 3]),
        "crop": np.int64([0, 0, -1, 0, 0, 0, -2, 1]),
        "some": np.int64([1, 2, 3, 0]),
        "axes": np.int64([3, -2]),
        "half": np.float32(0.5),
        "around": np.int64([0, 0, 1, 2, 0, 0, 2, 1]),
    }
    nodes = [
        ("Pad", ["x", "all"], {}),
        ("Pad", ["x", "all", "half"], {"mode": "constant"}),
        ("Pad", ["x", "crop"], {}),
        ("Pad", ["x", "some", "", "axes"], {}),
        ("Pad", ["x", "around"], {"mode": "reflect"}),
        ("Pad", ["x", "around"], {"mode": "edge"}),
    ]
    compare(tmp_path, nodes, weights, opset=18)


def test_reductions_and_shapes(tmp_path):
    weights = {"flat": np.int64([0, -1]), "hw": np.int64([2, 3]), "c": np.int64([1]), "split": np.int64([1, 3])}
    nodes = [
        ("GlobalAveragePool", ["x"], {}),
        ("GlobalMaxPool", ["x"], {}),
        ("ReduceMean", ["x", "hw"], {"keepdims": 0}),
        ("ReduceMean", ["x", "hw"], {"keepdims": 1}),
        ("ReduceMean", ["x", "c"], {}),
        ("Flatten", ["x"], {"axis": 2}),
        ("Reshape", ["x", "flat"], {}),
        ("Transpose", ["x"], {"perm": [0, 2, 3, 1]}),
        ("Unsqueeze", ["x", "c"], {}),
        ("Concat", ["x", "x"], {"axis": 1}),
        ("Dropout", ["x"], {}),
    ]
    compare(tmp_path, nodes, weights, opset=18)


def test_old_forms_are_converted(tmp_path):
    """Opset 9: bounds, axes and paddings are attributes; softmax flattens to two dimensions first."""
    weights = {name: np.float32([0.5, 1.0, 1.5, 2.0]) for name in ("scale", "shift", "mean", "variance")}
    nodes = [
        ("Clip", ["x"], {"min": 0.0, "max": 6.0}),
        ("Softmax", ["x"], {"axis": 1}),
        ("Pad", ["x"], {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 2.0}),
        ("Squeeze", ["x"], {"axes": [2]}),
        ("Unsqueeze", ["x"], {"axes": [0]}),
        ("ReduceMean", ["x"], {"axes": [2, 3], "keepdims": 1}),
        ("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], {"epsilon": 1e-3}),
        ("LRN", ["x"], {"size": 3}),
    ]
    mod = compare(tmp_path, nodes, weights, opset=9, shape=(2, 4, 1, 5))
    assert "clip" in operators(mod)
