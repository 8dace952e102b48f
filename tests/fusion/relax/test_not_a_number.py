"""NaN and infinity go through a compiled network as through ONNX Runtime: where it has NaN, ours are not numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("tvm")
from fusion.model.conv_graph import BFLOAT16, cover, find_sites, stored_in
from fusion.relax import import_onnx
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from schedules.kernels.template_table import template_for
from tests.fusion.relax_models import CPU

CHANNELS = 24
IMAGE = (1, CHANNELS, 9, 7)
# What every activation, pooling and bound is written as in ONNX: (operator, further inputs, attributes).
UNARY = {
    "relu": ("Relu", [], {}),
    "relu6": ("Clip", ["zero", "six"], {}),
    "clip": ("Clip", ["-two", "six"], {}),
    "floor": ("Clip", ["-two"], {}),
    "roof": ("Clip", ["", "six"], {}),
    "max": ("Max", ["zero"], {}),
    "min": ("Min", ["six"], {}),
    "leaky": ("LeakyRelu", [], {"alpha": 0.1}),
    "prelu": ("PRelu", ["slopes"], {}),
    "elu": ("Elu", [], {}),
    "selu": ("Selu", [], {}),
    "hard_sigmoid": ("HardSigmoid", [], {}),
    "hard_swish": ("HardSwish", [], {}),
    "sigmoid": ("Sigmoid", [], {}),
    "tanh": ("Tanh", [], {}),
    "softplus": ("Softplus", [], {}),
    "softsign": ("Softsign", [], {}),
    "mish": ("Mish", [], {}),
    "gelu": ("Gelu", [], {}),
    "gelu_tanh": ("Gelu", [], {"approximate": "tanh"}),
    "erf": ("Erf", [], {}),
    "exp": ("Exp", [], {}),
    "sqrt": ("Sqrt", [], {}),
    "abs": ("Abs", [], {}),
    "softmax": ("Softmax", [], {"axis": 1}),
    "mean": ("ReduceMean", [], {"keepdims": 1}),
    "global_average": ("GlobalAveragePool", [], {}),
    "average_pool": ("AveragePool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max_pool": ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
}
# Where in a window of a largest value NaN lies decides in ONNX Runtime, too, whether it is kept: all of it is NaN here.
BY_PLACE = ("max_pool",)
# One of each way in which a kernel computes: bounds, slopes, polynomials, exponentials, windows.
IN_KERNELS = ("relu6", "floor", "max", "prelu", "hard_swish", "sigmoid", "gelu", "softmax", "average_pool", "max_pool")
IN_BFLOAT16 = ("relu6", "leaky", "hard_swish", "tanh", "softmax", "max_pool")
TWO = {"larger": "Max", "smaller": "Min"}
CONSTANTS = {
    "zero": np.float32(0),
    "six": np.float32(6),
    "-two": np.float32(-2),
    "slopes": np.linspace(0.1, 2, CHANNELS, dtype=np.float32).reshape(-1, 1, 1),
}


def _weights(*shape):
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return values / np.float32(np.sqrt(np.prod(shape[1:])))


def _model(tmp_path, nodes, outputs, weights):
    names = ("x", "other")
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, IMAGE) for name in names],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in {**CONSTANTS, **weights}.items()],
    )
    path = tmp_path / "m.onnx"
    opset = [helper.make_opsetid("", 22)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def _bare(tmp_path):
    """Every operator by itself on the image, and those of two images."""
    nodes = [helper.make_node(kind, ["x", *more], [name], **attrs) for name, (kind, more, attrs) in UNARY.items()]
    nodes += [helper.make_node(kind, ["x", "other"], [name]) for name, kind in TWO.items()]
    return _model(tmp_path, nodes, [*UNARY, *TWO], {})


def _behind_layers(tmp_path, operators=tuple(UNARY)):
    """Each of ``operators`` behind a convolution, a depthwise one behind that; so that pairs can be fused, with bounds
    in between.
    """
    nodes, outputs = [], []
    weights = {"w": _weights(CHANNELS, CHANNELS, 1, 1), "d": _weights(CHANNELS, 1, 3, 3)}
    for name in operators:
        kind, more, attrs = UNARY[name]
        made = [f"{name}_{step}" for step in ("a", "b", "c")]
        nodes += [
            helper.make_node("Conv", ["x", "w"], [made[0]]),
            helper.make_node(kind, [made[0], *more], [made[1]], **attrs),
        ]
        if name not in ("softmax", "mean", "global_average", "max_pool", "average_pool"):
            nodes.append(
                helper.make_node("Conv", [made[1], "d"], [made[2]], group=CHANNELS, kernel_shape=[3, 3], pads=[1] * 4)
            )
            nodes.append(helper.make_node(kind, [made[2], *more], [name], **attrs))
        else:
            nodes.append(helper.make_node("Identity", [made[1]], [name]))
        outputs.append(name)
    return _model(tmp_path, nodes, outputs, weights)


def _built(path, dtype, fused):
    model = import_onnx(path)
    graph = extract_graph(model.mod)
    if dtype != "float32":
        graph = stored_in(graph, {node.name for node in graph.nodes}, dtype)
    sites, taken = find_sites(graph, CPU), set()
    chosen = []
    for site in sites if fused else ():
        names = {node.name for node in site.nodes}
        if not names & taken:
            chosen.append(site)
            taken |= names
    assert not fused or chosen
    plan = cover(graph, chosen)
    configs = {
        operator: template_for(operator, CPU).space(operator, CPU)[0]
        for operator in plan.operators
        if template_for(operator, CPU) is not None
    }
    return model, build_executable(lower(model.mod, plan, configs, CPU), CPU)


def _images(value):
    """An image with ``value`` in one row of windows, and one of nothing else."""
    image = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    image[:, :, 3:6] = value
    return {"a part": image, "all": np.full(IMAGE, value, np.float32)}


def assert_alike(path, model, executable, exact=False):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    other = np.random.default_rng(1).standard_normal(IMAGE).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        for where, image in _images(value).items():
            for x, y in ((image, other), (other, image)):
                given = {"x": x, "other": y}
                theirs = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
                ours = executable(*(given[info.name] for info in model.inputs))
                for name, expected, actual in zip(names, theirs, ours, strict=True):
                    if name in BY_PLACE and where != "all":
                        continue
                    said = f"{name} with {value} in {where}"
                    # An infinity times nothing is NaN in one order of sums and not in another.
                    assert not np.isfinite(actual[np.isnan(expected)]).any(), said
                    if np.isnan(value):
                        assert np.isnan(actual[np.isnan(expected)]).all(), said
                    if exact and name not in BY_PLACE:
                        assert not np.isnan(actual[~np.isnan(expected)]).any(), said
                        infinite = np.isinf(expected)
                        assert np.array_equal(actual[infinite], expected[infinite]), said


def test_operators_by_themselves(tmp_path):
    path = _bare(tmp_path)
    assert_alike(path, *_built(path, "float32", fused=False), exact=True)


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [
        pytest.param("float32", False, marks=pytest.mark.thorough),  # of all operators
        ("float32", True),
        pytest.param(BFLOAT16, False, marks=pytest.mark.skipif(CPU.lacks(BFLOAT16) is not None, reason="no bfloat16")),
    ],
)
def test_operators_behind_layers_and_in_fused_kernels(tmp_path, dtype, fused):
    operators = IN_BFLOAT16 if dtype == BFLOAT16 else IN_KERNELS if fused else tuple(UNARY)
    path = _behind_layers(tmp_path, operators)
    assert_alike(path, *_built(path, dtype, fused))
