"""The models are the published ones: parameters, multiply-accumulates, outputs of torch, seeded weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from costmodel.base.errors import InputError, OutputError
from costmodel.operators.layers import Conv2d, Dense
from fusion.modelzoo import build_model, export
from fusion.relax import import_onnx

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


def nodes_of(mod):
    """Convolutions and dense layers of a module as operators, to count their flops."""
    for binding in mod["main"].body.blocks[0].bindings:
        call = binding.value
        name = getattr(getattr(call, "op", None), "name", "")
        if name == "relax.nn.conv2d":
            attrs, weight = call.attrs, [int(size) for size in call.args[1].ty.shape]
            image = [int(size) for size in call.args[0].ty.shape]
            pair = tuple(map(int, attrs.strides))
            padding = tuple(map(int, attrs.padding))
            yield Conv2d(*image, weight[0], (weight[2], weight[3]), pair, padding, groups=int(attrs.groups))
        elif name == "relax.matmul":
            rows, features = (int(size) for size in call.args[0].ty.shape)
            yield Dense(rows, features, int(call.ty.shape[1]))


# Parameters and multiply-accumulates of one 224 x 224 image: Howard et al. 2017 (table 8), Sandler et al. 2018
# (table 4), He et al. 2016; each rounded as published.
PUBLISHED = {"mobilenet_v1": (4.2e6, 569e6), "mobilenet_v2": (3.5e6, 300e6), "resnet50": (25.6e6, 4.1e9)}


@pytest.mark.parametrize("name", ["mobilenet_v1", "mobilenet_v2"])
def test_full_size_networks_have_the_published_size(name, tmp_path):
    parameters, accumulates = PUBLISHED[name]
    model = build_model(name)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)
    mod = import_onnx(export(name, tmp_path / "m.onnx")).mod
    assert sum(operator.flops for operator in nodes_of(mod)) / 2 == pytest.approx(accumulates, rel=0.02)


def test_resnet50_has_the_published_size():
    model = build_model("resnet50")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED["resnet50"][0], rel=0.01)


@pytest.mark.parametrize(("name", "tf_padding"), [("mobilenet_v1", False), ("mobilenet_v2", True), ("resnet18", False)])
def test_the_file_computes_what_torch_computes(name, tf_padding, tmp_path):
    import torch

    options = {"width": 0.25, "tf_padding": tf_padding, "seed": 3}
    path = export(name, tmp_path / "m.onnx", image_size=48, batch=2, **options)
    image = np.random.default_rng(0).standard_normal((2, 3, 48, 48)).astype(np.float32)
    (actual,) = onnxruntime.InferenceSession(path).run(["logits"], {"pixel_values": image})
    with torch.no_grad():
        expected = build_model(name, **options)(torch.from_numpy(image)).numpy()
    assert np.allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    assert 0.1 < expected.std() < 20  # neither vanished nor exploded
    assert np.abs(expected[0] - expected[1]).max() > 1e-2  # and it depends on the image


def test_batch_norms_are_left_to_the_importer_and_do_something(tmp_path):
    model = onnx.load(export("mobilenet_v1", tmp_path / "m.onnx", image_size=32, width=0.25))
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    statistics = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert len(norms) == 27
    for scale, shift, mean, variance in ([statistics[name] for name in node.input[1:]] for node in norms):
        assert all(np.ptp(values) > 0.01 for values in (scale, shift, mean, variance))


def test_the_seed_decides_the_weights(tmp_path):
    files = [
        export("mobilenet_v1", tmp_path / f"{i}.onnx", image_size=32, width=0.25, seed=s).read_bytes()
        for i, s in enumerate([0, 0, 1])
    ]
    assert files[0] == files[1] != files[2]


def test_the_seed_of_the_caller_is_left_alone():
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model("mobilenet_v1", width=0.25)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg", {}),
        ("mobilenet_v1", {"width": 0}),
        ("mobilenet_v1", {"image_size": 0}),
        ("resnet50", {"tf_padding": True}),
    ],
)
def test_arguments_that_do_not_fit(name, options, tmp_path):
    with pytest.raises(InputError):
        export(name, tmp_path / "m.onnx", **options)


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    with pytest.raises(OutputError, match="nowhere"):
        export("mobilenet_v1", tmp_path / "nowhere" / "m.onnx", image_size=32, width=0.25)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match="taken"):
        export("mobilenet_v1", tmp_path / "taken", image_size=32, width=0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.slow
def test_command_line(tmp_path):
    command = [sys.executable, "-m", "fusion.modelzoo"]
    done = subprocess.run(
        [*command, "mobilenet_v1", "-o", tmp_path / "m.onnx", "--image-size", "32", "--width", "0.25"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "m.onnx").exists(), done.stderr
    failed = subprocess.run([*command, "vgg", "-o", tmp_path / "v"], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and len(failed.stderr.splitlines()) == 1
