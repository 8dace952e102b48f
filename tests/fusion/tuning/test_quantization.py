"""``python -m fusion quantize`` on small networks: what is written, its errors, and every refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from costmodel.base.errors import InputError, ModelError
from fusion.commands.cli import app
from fusion.relax.onnx.quantised_model import (
    METHODS,
    QuantizationOptions,
    is_quantised,
    origin_of,
    quantised_share,
    quantized_path,
)
from fusion.tuning.quantization import quantize_model, render_quantized
from tests.onnx_sessions import exact_session

SHAPE = (3, 16, 16)


def write_network(path: Path, batch: int | str = 1) -> Path:
    """3x3 with ReLU -> depthwise 3x3 -> 1x1 -> global average -> dense."""
    rng = np.random.default_rng(0)
    weights = {
        "stem.w": rng.normal(size=(8, 3, 3, 3)) / 5,
        "dw.w": rng.normal(size=(8, 1, 3, 3)) / 3 * np.geomspace(0.05, 5, 8).reshape(8, 1, 1, 1),
        "pw.w": rng.normal(size=(16, 8, 1, 1)) / 3,
        "pw.b": rng.normal(size=(16,)),
        "fc.w": rng.normal(size=(10, 16)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "stem.w"], ["stem"], name="stem", pads=[1] * 4),
        helper.make_node("Relu", ["stem"], ["active"]),
        helper.make_node("Conv", ["active", "dw.w"], ["dw"], name="dw", group=8, pads=[1] * 4),
        helper.make_node("Conv", ["dw", "pw.w", "pw.b"], ["pw"], name="pw"),
        helper.make_node("GlobalAveragePool", ["pw"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "fc.w"], ["logits"], name="fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *SHAPE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def write_samples(path: Path, count: int = 10, **changes) -> Path:
    samples = np.random.default_rng(1).normal(size=(count, *SHAPE)).astype(np.float32)
    np.savez(path, **{"x": samples, **changes})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds ``net.onnx`` and ``data.npz``."""
    path = tmp_path_factory.mktemp("quantize")
    write_network(path / "net.onnx")
    write_samples(path / "data.npz")
    return path


def outputs_of(model: Path, x: np.ndarray) -> np.ndarray:
    return exact_session(str(model)).run(None, {"x": x})[0]


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_the_file_runs_and_its_errors_are_those_that_are_told(folder, tmp_path, form):
    target = tmp_path / "out.onnx"
    options = QuantizationOptions(format=form, per_channel=True)
    summary = quantize_model(folder / "net.onnx", target, folder / "data.npz", options=options)
    assert (summary.calibrated, summary.held_out) == (8, 2) and summary.errors.compared_inputs == 2
    model = onnx.load(target)
    kinds = {node.op_type for node in model.graph.node}
    assert ("QLinearConv" in kinds) == (form == "qoperator") and is_quantised(model.graph)
    assert (summary.quantised_layers, summary.layers) == quantised_share(model.graph) == (4, 4)
    held_out = np.load(folder / "data.npz")["x"][[4, 9]]
    relative = []
    for sample in held_out[:, None]:
        ours, theirs = outputs_of(target, sample), outputs_of(folder / "net.onnx", sample)
        relative.append(np.abs(ours - theirs).max() / np.abs(theirs).max())
    assert summary.errors.max_relative_error == pytest.approx(max(relative), rel=1e-3)
    assert 0 < summary.errors.max_relative_error < 0.1 and summary.errors.cosine > 0.99


def test_the_command_writes_beside_the_model_and_prints_json(folder, tmp_path):
    model = write_network(tmp_path / "net.onnx", batch="n")
    words = ["quantize", model, "--calibration", folder / "data.npz", "--per-channel", "--symmetric", "--json"]
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["output"] == str(quantized_path(model)) == str(tmp_path / "net-int8.onnx")
    assert document["top1_agreement"] in (0.0, 0.5, 1.0) and document["quantised_layers"] == 4
    assert "calibrated with 8 of 8" in result.stderr
    written = onnx.load(quantized_path(model))
    assert origin_of(written) is not None
    assert written.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"  # still open
    steps = [node for node in written.graph.node if node.op_type == "QuantizeLinear"]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    zeros = [constants[node.input[2]] for node in steps]
    assert all(zero.dtype == np.int8 and not zero.any() for zero in zeros)  # symmetric
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_per_channel_scales_are_as_many_as_channels_and_more_exact(folder, tmp_path):
    errors = {}
    for per_channel in (False, True):
        target = tmp_path / f"{per_channel}.onnx"
        options = QuantizationOptions(per_channel=per_channel)
        summary = quantize_model(folder / "net.onnx", target, folder / "data.npz", options=options)
        errors[per_channel] = summary.errors.mean_relative_error
        scales = [each for each in onnx.load(target).graph.initializer if "scale" in each.name]
        sizes = {numpy_helper.to_array(scale).size for scale in scales}
        assert (8 in sizes) == per_channel
    assert errors[True] < errors[False]  # channels of the depthwise layer differ by a hundred


def test_an_excluded_node_stays_in_floating_point(folder, tmp_path):
    options = QuantizationOptions(exclude=("dw",))
    summary = quantize_model(folder / "net.onnx", tmp_path / "o.onnx", folder / "data.npz", options=options)
    assert (summary.quantised_layers, summary.layers) == (3, 4)
    with pytest.raises(InputError, match="--exclude nothing: no such node; its nodes are .*dw"):
        quantize_model(
            folder / "net.onnx",
            tmp_path / "p.onnx",
            folder / "data.npz",
            options=QuantizationOptions(exclude=("nothing",)),
        )
    everything = QuantizationOptions(exclude=tuple(node.name or node.output[0] for node in nodes_of(folder)))
    with pytest.raises(InputError, match="nothing in it can be quantised"):
        quantize_model(folder / "net.onnx", tmp_path / "p.onnx", folder / "data.npz", options=everything)
    assert not (tmp_path / "p.onnx").exists()


def test_a_layer_that_onnx_runtime_merges_into_another_is_excluded_by_either_name(tmp_path):
    """A product and the sum behind it become one Gemm."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(16, 10)), "b": rng.normal(size=(10,)), "v": rng.normal(size=(10, 10))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        helper.make_node("Add", ["a", "b"], ["c"], name="sum"),
        helper.make_node("MatMul", ["c", "v"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = tmp_path / "dense.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), model)
    assert quantize_model(model, tmp_path / "o.onnx", random=True).quantised_layers == 2
    for name in ("product", "sum"):
        options = QuantizationOptions(exclude=(name,))
        summary = quantize_model(model, tmp_path / "o.onnx", random=True, options=options)
        assert (summary.quantised_layers, summary.layers) == (1, 2)


def test_a_model_without_layers_and_an_old_one_that_cannot_be_converted_are_refused(tmp_path):
    def write(name: str, nodes, weights, opset: int) -> Path:
        graph = helper.make_graph(
            nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value.astype(np.float32), key) for key, value in weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.save(model, tmp_path / f"{name}.onnx")
        return tmp_path / f"{name}.onnx"

    plain = write("plain", [helper.make_node("Exp", ["x"], ["y"])], {}, 17)
    for method in METHODS:
        with pytest.raises(InputError, match="plain.onnx: nothing in it can be quantised"):
            quantize_model(plain, tmp_path / "o.onnx", random=True, options=QuantizationOptions(method=method))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Upsample", ["a", "s"], ["y"], mode="nearest"),
    ]
    old = write("old", nodes, {"w": np.ones((4, 3, 3, 3)), "s": np.array([1, 1, 2, 2])}, 9)
    with pytest.raises(ModelError, match=r"old\.onnx: ONNX Runtime cannot quantise it: .*export .* with opset 17"):
        quantize_model(old, tmp_path / "o.onnx", random=True)


def nodes_of(folder: Path):
    return onnx.load(folder / "net.onnx").graph.node


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_calibration_works_symmetric_or_not(folder, tmp_path, method):
    for symmetric in (False, True):
        options = QuantizationOptions(method=method, symmetric=symmetric)
        summary = quantize_model(folder / "net.onnx", tmp_path / "o.onnx", folder / "data.npz", options=options)
        assert summary.errors.max_relative_error < 0.3


def test_random_calibration_is_asked_for_by_name(folder, tmp_path):
    summary = quantize_model(folder / "net.onnx", tmp_path / "o.onnx", random=True)
    assert summary.calibration == "random numbers" and summary.held_out == 2
    model = write_network(tmp_path / "open.onnx", batch="n")
    shapes = {"x": (2, *SHAPE)}
    assert quantize_model(model, tmp_path / "p.onnx", random=True, shapes=shapes).quantised_layers == 4
    line = refused("quantize", model, "--random", "-o", tmp_path / "q.onnx", "--shape", f"x={10**9},3,16,16")
    assert "input 'x' of 1000000000,3,16,16 has 768,000,000,000 elements" in line


@pytest.mark.parametrize(("samples", "held_out"), [(1, 0), (5, 1), (11, 2)])
def test_errors_are_told_on_samples_that_were_not_calibrated_with_and_of_one_alone_that_is_said(
    folder, tmp_path, samples, held_out
):
    data = write_samples(tmp_path / "few.npz", samples)
    summary = quantize_model(folder / "net.onnx", tmp_path / "o.onnx", data)
    assert (summary.calibrated, summary.held_out) == (samples - held_out, held_out)
    assert summary.errors.compared_inputs == (held_out or samples)
    assert ("one sample alone" in render_quantized(summary)) == (held_out == 0)


@pytest.mark.parametrize("values", [np.ones(6), np.arange(6.0)])
def test_samples_of_one_number_are_refused(folder, tmp_path, values):
    flat = np.broadcast_to(values.astype(np.float32).reshape(-1, 1, 1, 1), (6, *SHAPE))
    data = write_samples(tmp_path / "flat.npz", x=flat)
    line = refused("quantize", folder / "net.onnx", "-o", tmp_path / "o.onnx", "--calibration", data)
    assert "flat.npz: input 'x' is one number all over each sample" in line
    assert not (tmp_path / "o.onnx").exists()


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def test_refusals_are_one_line_and_leave_nothing(folder, tmp_path):
    model, data = write_network(tmp_path / "net.onnx"), folder / "data.npz"
    target = ["-o", tmp_path / "new.onnx"]
    line = refused("quantize", model, *target)
    assert "--calibration DATA.npz with 'x' float32 (samples, 3, 16, 16)" in line and "--random" in line
    assert "give one of the two" in refused("quantize", model, *target, "--calibration", data, "--random")
    assert "--format tflite: there are qdq, qoperator" in refused("quantize", model, *target, "--format", "tflite")
    line = refused("quantize", model, *target, "--calibration", data, "--method", "guess")
    assert "--method guess: there are minmax, entropy, percentile" in line
    assert "gone.npz" in refused("quantize", model, *target, "--calibration", tmp_path / "gone.npz")
    assert "--shape is for --random" in refused(
        "quantize", model, *target, "--calibration", data, "--shape", "x=1,3,16,16"
    )
    assert "is the model itself" in refused("quantize", model, "-o", model, "--calibration", data)
    assert "is a directory" in refused("quantize", model, "-o", tmp_path, "--calibration", data)
    nowhere = tmp_path / "no" / "where.onnx"
    assert "there is no folder" in refused("quantize", model, "-o", nowhere, "--calibration", data)
    nan = write_samples(tmp_path / "nan.npz", x=np.full((4, *SHAPE), np.nan, np.float32))
    assert "nan.npz: input 'x' holds NaN" in refused("quantize", model, *target, "--calibration", nan)
    assert not (tmp_path / "new.onnx").exists()


def test_a_quantised_model_is_not_quantised_again(folder, tmp_path):
    quantize_model(folder / "net.onnx", tmp_path / "once.onnx", folder / "data.npz")
    with pytest.raises(ModelError, match="once.onnx: is quantised already"):
        quantize_model(tmp_path / "once.onnx", tmp_path / "twice.onnx", folder / "data.npz")


def test_a_failure_while_writing_keeps_the_file_that_was_there(folder, tmp_path, monkeypatch):
    target = tmp_path / "kept.onnx"
    target.write_bytes(b"before")

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fusion.tuning.quantization.write_whole", full)
    words = ["quantize", folder / "net.onnx", "-o", target, "--calibration", folder / "data.npz"]
    assert "kept.onnx: cannot be written: No space left on device" in refused(*words)
    assert target.read_bytes() == b"before"
