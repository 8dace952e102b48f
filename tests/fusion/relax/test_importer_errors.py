"""Bad input: each fault is one line that names the file, of the right class, and nothing else happens."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.base.errors import InputError, ModelError, ProjectError, UnsupportedOperatorError
from fusion.relax import import_onnx
from fusion.relax.onnx.refusals import raise_unsupported


def make_model(nodes=None, shape=(1, 3, 8, 8), opset=17, domains=(), constants=None):
    """``y = conv(x, w)`` unless nodes are given; ``w`` is (2, 3, 1, 1), unless there are other ``constants``."""
    weight = numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w")
    graph = helper.make_graph(
        nodes or [helper.make_node("Conv", ["x", "w"], ["y"], name="stem")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight] if constants is None else constants,
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9 if opset < 21 else 10)


def refused(path, error=ModelError, shapes=None):
    """The message of the refusal, checked to be one line about this file."""
    with pytest.raises(ProjectError) as caught:
        import_onnx(path, shapes)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert message.startswith(str(path)) and "\n" not in message
    return message


def saved(model, path):
    onnx.save(model, path)
    return path


class TestFiles:
    def test_missing(self, tmp_path):
        assert "no such file" in refused(tmp_path / "m.onnx")

    def test_directory(self, tmp_path):
        assert "directory" in refused(tmp_path)

    def test_empty(self, tmp_path):
        (tmp_path / "m.onnx").touch()
        assert "empty" in refused(tmp_path / "m.onnx")

    @pytest.mark.parametrize("data", [b"hello, world\n" * 50, b"PK\x03\x04" + bytes(200), b"\x80\x04", bytes(9)])
    def test_not_onnx(self, tmp_path, data):
        (tmp_path / "m.onnx").write_bytes(data)
        assert "not an ONNX model" in refused(tmp_path / "m.onnx")

    def test_truncated_anywhere(self, tmp_path):
        data = make_model().SerializeToString()
        for length in range(1, len(data), 7):
            (tmp_path / "m.onnx").write_bytes(data[:length])
            refused(tmp_path / "m.onnx")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_unreadable(self, tmp_path):
        path = saved(make_model(), tmp_path / "m.onnx")
        path.chmod(0)
        assert "cannot be read" in refused(path)

    def test_nodes_in_any_order(self, tmp_path):
        """Casts that a tool appended: ONNX Runtime takes them as well."""
        nodes = [
            helper.make_node("Relu", ["c"], ["y"]),
            helper.make_node("Conv", ["a", "w"], ["c"]),
            helper.make_node("Abs", ["x"], ["a"]),
        ]
        assert import_onnx(saved(make_model(nodes), tmp_path / "m.onnx")).outputs[0].shape == (1, 2, 8, 8)

    def test_nodes_in_a_circle(self, tmp_path):
        nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Add", ["a", "x"], ["b"])]
        nodes.append(helper.make_node("Identity", ["b"], ["y"]))
        refused(saved(make_model(nodes), tmp_path / "m.onnx"))

    def test_graph_that_reads_what_nothing_writes(self, tmp_path):
        path = saved(make_model([helper.make_node("Relu", ["nowhere"], ["y"])]), tmp_path / "m.onnx")
        assert "nowhere" in refused(path)


class TestGraphs:
    def test_an_input_that_holds_no_numbers(self, tmp_path):
        model = make_model()
        model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.STRING, (1,)))
        assert "input 'label' holds strings" in refused(saved(model, tmp_path / "m.onnx"))

    def test_weights_of_four_bits(self, tmp_path):
        weight = helper.make_tensor("w4", TensorProto.INT4, (4, 2), [1, -2, 3, -4, 5, -6, 7, -8])
        scale = helper.make_tensor("s", TensorProto.FLOAT, (), [0.1])
        nodes = [
            helper.make_node("DequantizeLinear", ["w4", "s"], ["w"]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ]
        message = refused(saved(make_model(nodes, (3, 4), 21, constants=[weight, scale]), tmp_path / "m.onnx"))
        assert "tensor 'w4' is of INT4, values of 4 bits" in message

    @pytest.mark.parametrize("axis", [0, 1])
    def test_scales_of_blocks(self, tmp_path, axis):
        """Between quantised activations too, where the layer would be one of whole numbers."""
        scales = (2, 4) if axis == 0 else (4, 2)
        constants = [
            helper.make_tensor("w8", TensorProto.INT8, (4, 4), [1] * 16),
            helper.make_tensor("s", TensorProto.FLOAT, scales, [0.1] * 8),
            helper.make_tensor("z", TensorProto.INT8, scales, [0] * 8),
            helper.make_tensor("one", TensorProto.FLOAT, (), [0.1]),
            helper.make_tensor("middle", TensorProto.UINT8, (), [128]),
        ]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "one", "middle"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "one", "middle"], ["d"]),
            helper.make_node("DequantizeLinear", ["w8", "s", "z"], ["w"], "scaled", axis=axis, block_size=2),
            helper.make_node("MatMul", ["d", "w"], ["m"]),
            helper.make_node("QuantizeLinear", ["m", "one", "middle"], ["y8"]),
            helper.make_node("DequantizeLinear", ["y8", "one", "middle"], ["y"]),
        ]
        path = saved(make_model(nodes, (3, 4), 21, constants=constants), tmp_path / "m.onnx")
        message = refused(path, UnsupportedOperatorError)
        assert "node 'scaled'" in message and "blocked quantization" in message

    def test_an_output_that_is_a_sequence(self, tmp_path):
        model = make_model([helper.make_node("SplitToSequence", ["x"], ["y"], axis=1)])
        del model.graph.output[:]
        tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
        model.graph.output.append(helper.make_value_info("y", helper.make_sequence_type_proto(tensor)))
        assert "sequence" in refused(saved(model, tmp_path / "m.onnx"))


class TestOperators:
    @pytest.mark.parametrize("opset", [1, 6, 999])
    def test_opset(self, tmp_path, opset):
        path = saved(make_model(opset=opset), tmp_path / "m.onnx")
        message = refused(path, UnsupportedOperatorError)
        assert f"opset {opset} " in message and "opset 17" in message

    def test_no_opset(self, tmp_path):
        model = make_model()
        del model.opset_import[:]
        assert "opset" in refused(saved(model, tmp_path / "m.onnx"))

    def test_every_unsupported_operator_is_listed_once(self, tmp_path):
        """Unknown ones, those of other domains and standard ones without a converter, in one message."""
        nodes = [
            helper.make_node("Det", ["x"], ["d"], name="det_1"),
            helper.make_node("Mystery", ["x"], ["a"], name="mystery_1", domain="com.example"),
            *[helper.make_node("Other", ["a"], [f"b{i}"], name=f"other_{i}", domain="com.example") for i in range(5)],
            helper.make_node("Relu", ["b0"], ["y"]),
        ]
        path = saved(make_model(nodes, domains=("com.example",)), tmp_path / "m.onnx")
        message = refused(path, UnsupportedOperatorError)
        assert "com.example.Mystery (mystery_1)" in message
        assert "com.example.Other (other_0, other_1, other_2 and 2 more)" in message
        assert message.count("Mystery") == 1 and "Det (det_1)" in message and "Relu" not in message

    def test_the_name_of_a_supported_operator_in_another_domain(self, tmp_path):
        nodes = [helper.make_node("Relu", ["x"], ["y"], name="theirs", domain="com.example")]
        path = saved(make_model(nodes, domains=("com.example",)), tmp_path / "m.onnx")
        assert "com.example.Relu (theirs)" in refused(path, UnsupportedOperatorError)

    def test_the_part_before_them_can_be_cut_out_as_the_message_says(self, tmp_path):
        """What it names is what the rest reads of that part: here two tensors, of one input alone."""
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Mystery", ["r"], ["m"], name="mystery", domain="com.example"),
            helper.make_node("Add", ["m", "c"], ["a"]),
            helper.make_node("Add", ["a", "z"], ["y"]),
        ]
        model = make_model(nodes, domains=("com.example",))
        model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, (1, 2, 8, 8)))
        path = saved(model, tmp_path / "m.onnx")
        message = refused(path, UnsupportedOperatorError)
        assert message.endswith(f"onnx.utils.extract_model('{path}', 'part.onnx', ['x'], ['r', 'c'])")
        onnx.utils.extract_model(str(path), str(tmp_path / "part.onnx"), ["x"], ["r", "c"], check_model=False)
        part = import_onnx(tmp_path / "part.onnx")
        assert [info.name for info in part.outputs] == ["r", "c"]

    @pytest.mark.parametrize(
        ("kinds", "advice"),
        [
            ([("QLinearConv", ""), ("QLinearAdd", "com.microsoft")], "from before it was quantised"),
            ([("FusedConv", "com.microsoft"), ("BiasGelu", "com.microsoft")], "from before its optimiser rewrote it"),
            ([("FusedConv", "com.microsoft"), ("Det", "")], None),
        ],
    )
    def test_where_another_file_is_to_be_tuned_it_is_said(self, tmp_path, kinds, advice):
        first, second = kinds
        nodes = [
            helper.make_node(first[0], ["x"], ["a"], domain=first[1]),
            helper.make_node(second[0], ["a"], ["y"], domain=second[1]),
        ]
        model = make_model(nodes, domains=("com.microsoft",))
        original = raise_unsupported_message(model.graph)
        assert (advice in original) if advice else original.endswith(")")

    def test_nothing_is_cut_out_where_no_layer_comes_before_them(self, tmp_path):
        nodes = [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Det", ["r"], ["y"]),
        ]
        model = make_model(nodes)
        assert "extract_model" not in refused(saved(model, tmp_path / "m.onnx"), UnsupportedOperatorError)

    def test_results_that_nothing_reads_are_no_obstacle(self, tmp_path):
        """Exporters name masks and indices all the same."""
        nodes = [
            helper.make_node("MaxPool", ["x"], ["p", "indices"], kernel_shape=[2, 2]),
            helper.make_node("Dropout", ["p"], ["y", "mask"]),
        ]
        assert import_onnx(saved(make_model(nodes), tmp_path / "m.onnx")).outputs[0].shape == (1, 3, 7, 7)

    def test_random_numbers_are_no_inference(self, tmp_path):
        nodes = [helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")]
        message = refused(saved(make_model(nodes), tmp_path / "m.onnx"), UnsupportedOperatorError)
        assert "RandomNormalLike (noise)" in message

    def test_training_is_no_inference(self, tmp_path):
        nodes = [
            helper.make_node("Constant", [], ["c"], value_floats=[1.0, 1.0, 1.0]),
            helper.make_node("BatchNormalization", ["x", *"cccc"], ["y", "m", "v"], name="bn", training_mode=1),
        ]
        message = refused(saved(make_model(nodes), tmp_path / "m.onnx"), UnsupportedOperatorError)
        assert "bn" in message and "training" in message

    def test_second_output_of_a_pool(self, tmp_path, capfd):
        nodes = [
            helper.make_node("MaxPool", ["x"], ["p", "i"], name="pool", kernel_shape=[2, 2]),
            helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
        ]
        assert "pool" in refused(saved(make_model(nodes), tmp_path / "m.onnx"), UnsupportedOperatorError)
        gc.collect()
        assert capfd.readouterr() == ("", "")  # the command line prints the message, and that alone


def raise_unsupported_message(graph):
    with pytest.raises(UnsupportedOperatorError) as caught:
        raise_unsupported(Path("m.onnx"), graph, graph)
    return str(caught.value)


class TestShapes:
    def test_a_dynamic_input_needs_a_shape(self, tmp_path):
        path = saved(make_model(shape=("batch", 3, "h", "w")), tmp_path / "m.onnx")
        message = refused(path, InputError)
        assert "(batch, 3, h, w)" in message and message.endswith("--shape x=1,3,224,224")
        assert import_onnx(path, {"x": (1, 3, 224, 224)}).outputs[0].shape == (1, 2, 224, 224)

    def test_the_example_is_an_image_however_its_channels_lie(self, tmp_path):
        path = saved(make_model(shape=("n", "h", "w", 3)), tmp_path / "m.onnx")
        assert refused(path, InputError).endswith("--shape x=1,224,224,3")

    def test_every_dynamic_input_is_in_the_message(self, tmp_path):
        model = make_model()
        model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.INT64, ("n", 77)))
        model.graph.input.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, (None,)))
        message = refused(saved(model, tmp_path / "m.onnx"), InputError)
        assert message.endswith("--shape z=1,77 --shape u=1")

    def test_unknown_name(self, tmp_path):
        path = saved(make_model(), tmp_path / "m.onnx")
        assert "no input 'image'; the inputs are x" in refused(path, InputError, {"image": (1, 3, 8, 8)})

    @pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8), (1, 3, 0, 8), (1, 3, -8, 8)])
    def test_shape_that_does_not_fit(self, tmp_path, shape):
        path = saved(make_model(shape=(1, 3, "h", "w")), tmp_path / "m.onnx")
        assert "'x'" in refused(path, InputError, {"x": shape})

    def test_shape_that_an_operator_refuses(self, tmp_path):
        """The channels follow from the weight alone."""
        path = saved(make_model(shape=("n", "c", "h", "w")), tmp_path / "m.onnx")
        with pytest.raises(ModelError, match="m.onnx"):
            import_onnx(path, {"x": (1, 7, 8, 8)})

    def test_boxes_that_remain(self, tmp_path):
        """As many as the data have: what comes before is named."""
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Reshape", ["c", "rows"], ["boxes"]),
            helper.make_node("ReduceMax", ["boxes", "last"], ["scores"], keepdims=0),
            helper.make_node("Unsqueeze", ["scores", "one"], ["s"]),
            helper.make_node("NonMaxSuppression", ["boxes", "s"], ["y"]),
        ]
        model = make_model(nodes, opset=18)
        for name, values in {"rows": [1, -1, 4], "last": [2], "one": [1]}.items():
            model.graph.initializer.append(numpy_helper.from_array(np.int64(values), name))
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
        message = refused(saved(model, tmp_path / "m.onnx"))
        assert message.endswith("'part.onnx', ['x'], ['boxes', 's'])")

    def test_output_that_depends_on_the_data(self, tmp_path):
        nodes = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Cast", ["n"], ["y"], to=1)]
        path = saved(make_model(nodes), tmp_path / "m.onnx")
        with pytest.raises(ModelError, match="m.onnx"):
            import_onnx(path)


class TestExternalData:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "model"
        folder.mkdir()
        return folder

    def model(self, folder, location, **entries):
        model = make_model()
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **entries}.items():
            tensor.external_data.add(key=key, value=str(value))
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        return folder / "m.onnx"

    def test_good(self, folder):
        (folder / "data").mkdir()
        (folder / "data" / "w.bin").write_bytes(bytes(8) + np.full(6, 2.5, np.float32).tobytes())
        mod = import_onnx(self.model(folder, "data/w.bin", offset=8, length=24)).mod
        assert "2.5" in mod.script(show_meta=True) or np.all(weight(mod) == 2.5)

    def test_missing(self, folder):
        assert "'w.bin' is missing" in refused(self.model(folder, "w.bin"))

    @pytest.mark.parametrize("location", ["../w.bin", "data/../../w.bin", "/etc/passwd", "..\\w.bin", "", "a\0b"])
    def test_outside_the_folder(self, folder, location):
        (folder.parent / "w.bin").write_bytes(bytes(24))
        (folder / "data").mkdir()
        assert "external data location" in refused(self.model(folder, location))

    @pytest.mark.parametrize("linked", ["w.bin", "data"])
    def test_symbolic_links(self, folder, linked):
        outside = folder.parent / "outside"
        outside.mkdir()
        (outside / "w.bin").write_bytes(bytes(24))
        (folder / linked).symlink_to(outside / "w.bin" if linked == "w.bin" else outside)
        location = "w.bin" if linked == "w.bin" else "data/w.bin"
        assert "symbolic link" in refused(self.model(folder, location))

    @pytest.mark.parametrize(
        ("size", "entries"),
        [(20, {}), (24, {"offset": 4}), (24, {"length": 20}), (24, {"offset": -4}), (24, {"offset": "x"})],
    )
    def test_wrong_extent(self, folder, size, entries):
        (folder / "w.bin").write_bytes(bytes(size))
        assert "external data" in refused(self.model(folder, "w.bin", **entries))

    def test_not_a_regular_file(self, folder):
        os.mkfifo(folder / "w.bin")
        assert "regular file" in refused(self.model(folder, "w.bin"))


class TestWeights:
    def test_raw_data_of_the_wrong_size(self, tmp_path):
        model = make_model()
        model.graph.initializer[0].raw_data = bytes(20)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        message = refused(tmp_path / "m.onnx")
        assert "'w'" in message and "20 bytes" in message and "(2, 3, 1, 1)" in message

    def test_too_few_values(self, tmp_path):
        model = make_model()
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.float_data.extend([1.0] * 5)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        assert "'w'" in refused(tmp_path / "m.onnx")

    @pytest.mark.parametrize("change", [{"data_type": 99}, {"data_type": 0}, {"dims": [-2, 3, 1, 1]}])
    def test_impossible_type_or_shape(self, tmp_path, change):
        model = make_model()
        tensor = model.graph.initializer[0]
        if "dims" in change:
            del tensor.dims[:]
            tensor.dims.extend(change["dims"])
        else:
            tensor.data_type = change["data_type"]
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        assert "'w'" in refused(tmp_path / "m.onnx")


def weight(mod):
    """The constant of the only convolution."""
    return mod["main"].body.blocks[0].bindings[0].value.args[1].value.numpy()


@pytest.mark.parametrize(
    ("data", "weight", "word"),
    [
        (TensorProto.FLOAT, np.float64, "float64 is not supported; export the model in float32"),
        (TensorProto.FLOAT, np.int8, "int8 is not supported"),
        (TensorProto.UINT8, np.float32, "uint8 is not supported; put a Cast to float32 before the layer"),
    ],
)
def test_layers_of_other_types_than_float_are_refused_in_plain_words(tmp_path, data, weight, word):
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], "layer")],
        "net",
        [helper.make_tensor_value_info("x", data, (1, 3, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones((4, 3, 3, 3), weight), "w")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(UnsupportedOperatorError, match=word) as caught:
        import_onnx(path)
    assert "'layer'" in str(caught.value) and "R.nn" not in str(caught.value)


@pytest.mark.parametrize("kind", [TensorProto.UNDEFINED, 99])
def test_inputs_of_no_known_type_are_refused_by_name(tmp_path, kind):
    model = make_model()
    model.graph.input[0].type.tensor_type.elem_type = kind
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert f"input 'x' has the unknown type {kind}; export the model again" in refused(tmp_path / "m.onnx")


def test_sparse_weights_are_refused_by_name(tmp_path):
    model = make_model(constants=[])
    sparse = model.graph.sparse_initializer.add(dims=[2, 3, 1, 1])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([5]), "at"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert "weights 'w' are stored sparse, which is not supported; export them dense" in refused(tmp_path / "m.onnx")


def test_graphs_are_not_compared_reader_by_reader(tmp_path, monkeypatch):
    """As onnxslim does between its rounds: one tensor that 10,000 nodes read took 12 s."""
    from onnxslim.third_party.onnx_graphsurgeon.ir.graph import Graph

    def compared(left, right):
        raise AssertionError("graphs are compared")

    monkeypatch.setattr(Graph, "__eq__", compared)
    nodes = [helper.make_node("Add", [f"t{each - 1}" if each else "x", "x"], [f"t{each}"]) for each in range(3)]
    nodes.append(helper.make_node("Conv", ["t2", "w"], ["y"], name="stem"))
    assert import_onnx(saved(make_model(nodes), tmp_path / "m.onnx")).outputs[0].shape == (1, 2, 8, 8)
