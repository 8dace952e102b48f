"""ONNX files into canonical Relax: what comes out, and that it computes what ONNX Runtime computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from fusion.model.named_arrays import random_arrays
from fusion.relax import import_onnx
from fusion.relax.extract import extract_graph

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def node(operator, inputs, outputs, **attributes):
    return helper.make_node(operator, inputs, outputs, name=f"/net/{outputs[0]}/{operator}", **attributes)


def save(path, nodes, inputs, outputs, weights=None, opset=17, **model):
    """An ONNX file; ``inputs`` name -> shape, ``outputs`` names, ``weights`` name -> array."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()],
    )
    version = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=version, **{"ir_version": 9, **model}), path)
    return path


def operators(mod):
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    return [call.op.name.removeprefix("relax.").removeprefix("nn.") for call in calls]


def evaluate(model, feeds):
    executable = tvm.compile(model.mod, tvm.target.Target({"kind": "llvm"}))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(feeds[info.name]) for info in model.inputs])
    arrays = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return {info.name: array.numpy() for info, array in zip(model.outputs, arrays, strict=True)}


def assert_as_onnx_runtime(path, shapes=None, tolerance=1e-5):
    """The imported model against ONNX Runtime on random inputs, relative to the largest output value."""
    model = import_onnx(path, shapes)
    feeds = random_arrays(model.inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    expected = dict(zip([info.name for info in model.outputs], session.run(None, feeds), strict=True))
    for name, actual in evaluate(model, feeds).items():
        assert actual.dtype == expected[name].dtype
        assert actual.shape == expected[name].shape, name
        scale = max(np.abs(expected[name]).max(), 1e-6)
        assert np.abs(actual - expected[name]).max() <= tolerance * scale, name
    return model


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory):
    pytest.importorskip("transformers")
    from fusion.modelzoo import export

    return export("mobilenet_v2", tmp_path_factory.mktemp("zoo") / "v2.onnx", image_size=32, width=0.25)


@pytest.fixture(scope="module")
def imported(mobilenet):
    return import_onnx(mobilenet)


class TestMobileNetV2:
    def test_it_computes_what_onnx_runtime_computes(self, mobilenet):
        assert_as_onnx_runtime(mobilenet)

    @pytest.mark.thorough
    def test_pads_of_tensorflow_padding_become_padding(self, tmp_path):
        """Stride 2 on an even image pads below and right only; stride 1 pads all around."""
        pytest.importorskip("transformers")
        from fusion.modelzoo import export

        path = export("mobilenet_v1", tmp_path / "v1.onnx", image_size=32, width=0.25, tf_padding=True)
        assert "Pad" in {node.op_type for node in onnx.load(path).graph.node}
        model = assert_as_onnx_runtime(path)
        assert "pad" not in operators(model.mod)
        calls = [b.value for b in model.mod["main"].body.blocks[0].bindings]
        paddings = [tuple(map(int, c.attrs.padding)) for c in calls if c.op.name == "relax.nn.conv2d"]
        assert paddings[:2] == [(0, 0, 1, 1), (1, 1, 1, 1)]


class TestInterface:
    def test_several_named_inputs_and_outputs(self, tmp_path):
        nodes = [node("Add", ["b.1", "a/x"], ["sum:0"]), node("Relu", ["sum:0"], ["7"])]
        path = save(tmp_path / "m.onnx", nodes, {"a/x": (2, 3), "b.1": (3,)}, ["7", "sum:0"])
        model = assert_as_onnx_runtime(path)
        assert [info.name for info in model.inputs] == ["a/x", "b.1"]
        assert [info.name for info in model.outputs] == ["7", "sum:0"]
        assert [info.shape for info in model.outputs] == [(2, 3), (2, 3)]

    def test_an_input_that_nothing_reads_stays_an_input(self, tmp_path):
        path = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"unused": (5,), "x": (2, 3)}, ["y"])
        model = assert_as_onnx_runtime(path)
        assert [info.name for info in model.inputs] == ["unused", "x"]
        assert len(model.mod["main"].params) == 2

    def test_outputs_that_are_inputs_constants_or_repeated(self, tmp_path):
        nodes = [node("Identity", ["x"], ["same"]), node("Relu", ["x"], ["y"]), node("Identity", ["y"], ["z"])]
        nodes.append(node("Mul", ["c", "c"], ["constant"]))
        weights = {"c": np.float32([1, 2])}
        path = save(tmp_path / "m.onnx", nodes, {"x": (2, 3)}, ["same", "y", "z", "constant"], weights)
        assert len(assert_as_onnx_runtime(path).outputs) == 4

    def test_weights_listed_among_the_inputs_are_no_inputs(self, tmp_path):
        """Files of IR version 3 must list them."""
        weights = {"w": np.ones((2, 3), np.float32)}
        path = save(tmp_path / "m.onnx", [node("Add", ["x", "w"], ["y"])], {"w": (2, 3), "x": (2, 3)}, ["y"], weights)
        assert [info.name for info in assert_as_onnx_runtime(path).inputs] == ["x"]

    def test_other_types_than_float32(self, tmp_path):
        graph = helper.make_graph(
            [node("Cast", ["i"], ["f"], to=TensorProto.FLOAT16), node("Where", ["b", "f", "h"], ["y"])],
            "net",
            [
                helper.make_tensor_value_info("i", TensorProto.INT64, (4,)),
                helper.make_tensor_value_info("b", TensorProto.BOOL, (4,)),
                helper.make_tensor_value_info("h", TensorProto.FLOAT16, (4,)),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT16, (4,))],
        )
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
        model = assert_as_onnx_runtime(tmp_path / "m.onnx")
        assert [info.dtype for info in model.inputs] == ["int64", "bool", "float16"]

    def test_nameless_nodes_are_named_after_their_output(self, tmp_path):
        nodes = [helper.make_node("Relu", ["x"], ["stem/relu:0"]), helper.make_node("Neg", ["stem/relu:0"], ["y"])]
        model = import_onnx(save(tmp_path / "m.onnx", nodes, {"x": (2, 3)}, ["y"]))
        assert model.mod["main"].body.blocks[0].bindings[0].var.name == "stem_relu_0"

    def test_a_dynamic_model_takes_its_shapes_from_the_user(self, tmp_path):
        """Flatten and the classifier's rows follow from the batch."""
        weights = {"w": np.ones((12, 5), np.float32)}
        nodes = [node("Flatten", ["x"], ["f"]), node("MatMul", ["f", "w"], ["y"])]
        path = save(tmp_path / "m.onnx", nodes, {"x": ("batch", 3, "h", "w")}, ["y"], weights)
        model = assert_as_onnx_runtime(path, {"x": (7, 3, 2, 2)})
        assert [info.shape for info in (*model.inputs, *model.outputs)] == [(7, 3, 2, 2), (7, 5)]

    def test_an_input_of_unknown_rank_takes_any_shape(self, tmp_path):
        path = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], {"x": None}, ["y"])
        assert assert_as_onnx_runtime(path, {"x": (2, 1, 3)}).outputs[0].shape == (2, 1, 3)

    def test_local_functions_are_inlined(self, tmp_path):
        body = [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Neg", ["r"], ["b"])]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
        function = helper.make_function("mine", "NegativeRelu", ["a"], ["b"], body, opsets[:1])
        graph = helper.make_graph(
            [helper.make_node("NegativeRelu", ["x"], ["y"], domain="mine")],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3,))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3,))],
        )
        made = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)
        onnx.save(made, tmp_path / "m.onnx")
        assert operators(assert_as_onnx_runtime(tmp_path / "m.onnx").mod) == ["relu", "negative"]

    def test_external_data_beside_the_model(self, tmp_path):
        weights = {"w": np.ones((12, 500), np.float32)}
        inside = save(tmp_path / "inside.onnx", [node("MatMul", ["x", "w"], ["y"])], {"x": (7, 12)}, ["y"], weights)
        onnx.save(
            onnx.load(inside), tmp_path / "m.onnx", save_as_external_data=True, location="m.weights", size_threshold=0
        )
        assert (tmp_path / "m.onnx").stat().st_size < (tmp_path / "m.weights").stat().st_size
        tvm.ir.assert_structural_equal(import_onnx(tmp_path / "m.onnx").mod, import_onnx(inside).mod)


class TestLightModels:
    """Models of opset 9, whose weights are made by ConstantOfShape and listed among the inputs."""

    @pytest.mark.parametrize(
        ("name", "convolutions"),
        [
            ("squeezenet", 26),
            pytest.param("resnet50", 53, marks=pytest.mark.thorough),
            pytest.param("densenet121", 121, marks=pytest.mark.thorough),
            pytest.param("inception_v2", 69, marks=pytest.mark.thorough),
        ],
    )
    def test_they_import(self, name, convolutions):
        model = import_onnx(LIGHT / f"light_{name}.onnx")
        counts = Counter(operators(model.mod))
        assert counts["conv2d"] == convolutions
        assert not {"batch_norm", "zeros", "full", "dropout"} & set(counts)
        assert [info.shape for info in model.inputs] == [(1, 3, 224, 224)]
        assert int(np.prod(model.outputs[0].shape)) == 1000


def test_numbered_names_are_not_mixed_up(tmp_path):
    """A copy of ``Conv_1`` that the builder numbers is ``Conv_11``, the name of another node."""
    nodes, weights, data = [], {}, "x"
    for number in range(13):
        weights[f"w{number}"] = np.full((2, 2, 1, 1), number + 1, np.float32)
        weights[f"s{number}"] = np.ones(2, np.float32)
        norm = [f"s{number}"] * 4
        nodes += [
            helper.make_node("Conv", [data, f"w{number}"], [f"c{number}"], name=f"Conv.{number}"),
            helper.make_node("BatchNormalization", [f"c{number}", *norm], [f"b{number}"], name=f"Norm.{number}"),
        ]
        data = f"b{number}"
    nodes.append(helper.make_node("Relu", [data], ["y"], name="Relu"))
    mod = import_onnx(save(tmp_path / "m.onnx", nodes, {"x": (1, 2, 4, 4)}, ["y"], weights)).mod
    factor = 1 / np.sqrt(1 + 1e-5)
    layers = {node.name: node.parameters[0].weight.reshape(-1)[0] / factor for node in extract_graph(mod).nodes}
    assert layers == {f"Conv_{number}": pytest.approx(number + 1, rel=1e-5) for number in range(13)}
    assert [node.name for node in extract_graph(mod).nodes] == [f"Conv_{number}" for number in range(13)]
