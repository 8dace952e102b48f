"""The layers that real engines tell of a network of three, and the table of them that ``compare`` makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fusion.comparing.compare import compare_command
from fusion.comparing.engine import ENGINES, TUNED, EngineWorkload, LayerTime, Unavailable
from fusion.comparing.engine_worker import Worker
from fusion.comparing.layer_table import graph_node, join_layers
from fusion.comparing.timing import Sampling
from fusion.model.build_folder import MANIFEST, MODEL, Artifact, make_manifest, read_artifact, write_artifact
from fusion.model.named_arrays import random_arrays
from fusion.report.console_report import print_comparison
from schedules.contract.cpu_target import host_target
from schedules.kernels.template_table import template_for

onnx = pytest.importorskip("onnx")
pytest.importorskip("tvm")
QUICK = Sampling(rounds=3, seconds=0.01, calls=3, warmup=1)
ROWS = {"/stem/Conv /stem/Relu", "/next/Conv /Add", "/pool"}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution with its activation, one with an addition, and a pooling that is the output."""
    helper, random = onnx.helper, np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(random.standard_normal(shape).astype("float32"), name)
        for name, shape in (("w0", (16, 3, 3, 3)), ("w1", (16, 16, 3, 3)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "/stem/Conv", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "/stem/Relu"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "/next/Conv", pads=[1] * 4),
        helper.make_node("Add", ["c", "b"], ["d"], "/Add"),
        helper.make_node("GlobalAveragePool", ["d"], ["y"], "/pool"),
    ]
    kind = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", kind, [1, 3, 32, 32])]
    outputs = [helper.make_tensor_value_info("y", kind, [1, 16, 1, 1])]
    graph = helper.make_graph(nodes, "three", inputs, outputs, weights)
    path = tmp_path_factory.mktemp("three") / "three.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def build(network: Path) -> Artifact:
    """Compiled without a search: the first configuration of every kernel."""
    import tvm

    from fusion.model.conv_graph import unfused_plan
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.tuning.network_check import build_network

    model, cpu = import_onnx(network, {}), host_target(1)
    graph = extract_graph(model.mod, "main")
    configs = {}
    for node in graph.nodes:
        template = template_for(node.operator, cpu)
        assert template is not None
        configs[node.operator] = template.space(node.operator, cpu)[0]
    compiled = build_network(network, model, unfused_plan(graph), configs, cpu, None)
    manifest = make_manifest(network, model.inputs, model.outputs, cpu, tvm.__version__)
    return write_artifact(network.parent / "build", manifest, {MODEL: compiled}, {})


def layers_of(engine: str, build: Artifact) -> list[LayerTime]:
    """What the engine tells, in a process of its own as in a comparison."""
    if (missing := ENGINES[engine].missing()) is not None:
        pytest.skip(missing)
    manifest = build.manifest
    model = Path(manifest.model_path)
    workload = EngineWorkload(
        model, manifest.model_sha256, manifest.inputs, manifest.outputs, 1, build.directory, build.cache
    )
    inputs = random_arrays(manifest.inputs)
    with Worker(ENGINES[engine], 1) as worker:
        worker.prepare(workload, 300)
        worker.bind(inputs)
        return worker.layers(inputs, 0.01)


def test_a_manifest_names_the_layers_of_the_kernels_in_their_order(build: Artifact):
    names = read_artifact(build.directory).manifest.layers[MODEL]
    assert names[0] == "stem_Relu" and names[-1] == "result 0"
    assert "Add" in names


@pytest.mark.parametrize("engine", [TUNED, "onnxruntime", "openvino"])
def test_an_engine_tells_the_time_of_every_layer(engine: str, build: Artifact):
    """Beside a made-up profile of one kernel for each row."""
    model = onnx.load(build.manifest.model_path)
    nodes = [
        graph_node(node.name, node.op_type, node.input, node.output, index)
        for index, node in enumerate(model.graph.node)
    ]
    layers = layers_of(engine, build)
    assert all(0 <= layer.seconds < 1 for layer in layers) and any(layer.seconds for layer in layers)
    whole = [LayerTime(tuple(row.split()), 1.0, "made up") for row in ROWS]
    ours, theirs = (layers, whole) if engine == TUNED else (whole, layers)
    table = join_layers(engine, nodes, ours, theirs, 1.0, 1.0)
    rows = {" ".join(row.layers): row.ours_seconds if engine == TUNED else row.theirs_seconds for row in table.rows}
    if engine == "openvino":  # what it fuses differs by CPU: then a row holds several of them
        assert sorted(" ".join(rows).split()) == sorted(" ".join(ROWS).split())
    else:
        assert set(rows) == ROWS
    assert all(seconds is not None for seconds in rows.values())


def test_a_build_without_names_says_what_to_do(build: Artifact, tmp_path: Path):
    older = shutil.copytree(build.directory, tmp_path / "older")
    manifest = json.loads((older / MANIFEST).read_text())
    del manifest["layers"]
    (older / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Unavailable, match="no names of layers; tune the model again"):
        layers_of(TUNED, read_artifact(older))


def test_compare_tells_the_layers_when_asked(build: Artifact, capsys: pytest.CaptureFixture):
    pytest.importorskip("onnxruntime")
    found = compare_command(build.directory, ["onnxruntime"], sampling=QUICK, threads=1, layers=True)
    assert found.layers is not None and found.layers_missing == ()
    assert {" ".join(row.layers) for row in found.layers.rows} == ROWS
    differences = [row.lost_seconds for row in (*found.layers.rows, found.layers.others)]
    rows = {row.engine: row.median_seconds for row in found.rows}
    assert sum(differences) == pytest.approx(rows["tuned"] - rows["onnxruntime"])
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["layers"]["engine"] == "onnxruntime"
    print_comparison(found)
    told = capsys.readouterr().out
    assert "by layer," in told and "scaled to the network's median" in told
