"""What quantising layers does to the outputs is known without quantising: layer by layer, and as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("tvm")
from fusion.acceptance.rounded_layers import ByteRounding, rounded_runs, switched_model
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.relax.onnx.model_file import load_model
from fusion.relax.onnx.preparation import prepare
from fusion.relax.onnx.quantised_model import QuantizationOptions, float_form, load_float_model, with_followers
from fusion.tuning.quantization import quantize_model
from tests.fusion.quantised_models import INPUT, float_network
from tests.onnx_sessions import exact_session

LAYERS = ("stem", "expand", "depthwise", "project", "window", "dense")


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, *INPUT[1:])).astype(np.float32)


@pytest.fixture(scope="module", params=[False, True], ids=["per tensor", "per channel"])
def loaded(request, tmp_path_factory):
    """(Float file, its quantised file, runs with layers rounded to bytes, names of layers by node)."""
    folder = tmp_path_factory.mktemp("bytes")
    path, target = folder / "float.onnx", folder / "bytes.onnx"
    onnx.save(float_network(), path)
    np.savez(folder / "x.npz", x=pictures(8))
    options = QuantizationOptions(per_channel=request.param)
    quantize_model(path, target, folder / "x.npz", options=options)
    form = folder / "form.onnx"
    form.write_bytes(float_form(path, load_float_model(path)).SerializeToString())
    model = import_onnx(form)
    prepared = prepare(form, load_model(form), None)
    switched = switched_model(prepared, extract_graph(model.mod), rounding=ByteRounding(load_model(target)))
    with rounded_runs(switched, model.inputs, model.outputs, 1, folder) as runs:
        yield path, target, runs, {node: name for name, node in switched.nodes.items()}


def test_what_follows_a_layer_in_float32_is_in_float32(loaded):
    """The addition behind `project`, and the pooling behind that; `window` reads it and is a layer of its own."""
    path, *_ = loaded
    form = float_form(path, load_float_model(path))
    assert with_followers(form, ["project"]) == ("project", "sum", "pool")
    assert with_followers(form, ["window"])[0] == "window" and "dense" not in with_followers(form, ["window"])


def by_onnx_runtime(path: Path, x: np.ndarray) -> np.ndarray:
    session = exact_session(str(path))
    return session.run(None, {"x": x})[0]


def test_every_layer_has_a_switch(loaded):
    _, _, runs, names = loaded
    assert set(names) == set(LAYERS) and set(runs.layers) == set(names.values())


def test_without_a_switch_it_is_the_float_model(loaded):
    path, _, runs, _ = loaded
    x = pictures(1)
    np.testing.assert_allclose(runs.outputs({"x": x}, ())["logits"], by_onnx_runtime(path, x), rtol=1e-4, atol=1e-5)


def test_all_layers_rounded_err_as_the_quantised_model_does(loaded):
    path, target, runs, _ = loaded
    x = pictures(1)
    exact, quantised = by_onnx_runtime(path, x), by_onnx_runtime(target, x)
    ours = runs.outputs({"x": x}, runs.layers)["logits"]
    step = np.diff(np.unique(ours)).min()
    # Biases are not rounded, what is added may not be: some logits are one step of 256 further.
    assert np.mean(np.abs(ours - quantised) < 0.01 * step) >= 0.5
    assert np.abs(ours - quantised).max() < 1.01 * step
    error = np.linalg.norm(quantised - exact)
    assert 0.5 * error < np.linalg.norm(ours - exact) < 2 * error


def test_what_a_layer_stores_are_256_values(loaded):
    """The last layer alone: its logits are whole numbers times a scale."""
    _, _, runs, names = loaded
    x = pictures(1)
    logits = runs.outputs({"x": x}, [names["dense"]])["logits"]
    steps = np.diff(np.unique(logits))
    ratios = steps / steps.min()
    np.testing.assert_allclose(ratios, np.round(ratios), atol=1e-3)
    plain = runs.outputs({"x": x}, ())["logits"]
    assert 0 < np.abs(logits - plain).max() < 0.1 * np.abs(plain).max()
