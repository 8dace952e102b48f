"""What bfloat16 costs is known before anything is built: layer by layer, and for the whole under a budget."""

# ruff: noqa: E402

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

ml_dtypes = pytest.importorskip("ml_dtypes")
pytest.importorskip("tvm")

from costmodel.base.errors import TuningError
from fusion.acceptance.error_budget import (
    GIVEN_OUT,
    BudgetExceeded,
    BudgetInputs,
    RoundedLimit,
    choose_layers,
    sensitivities,
)
from fusion.acceptance.output_check import TOLERANCE, DoubleModel, prepare_check
from fusion.acceptance.rounded_layers import rounded_runs, switched_model
from fusion.comparing.output_errors import error_inputs, probes
from fusion.model.conv_graph import layers_in, stored_in
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.relax.onnx.model_file import load_model
from fusion.relax.onnx.preparation import prepare

DELICATE = "delicate"


def network(path: Path, **changed: np.ndarray) -> Path:
    """Six layers, of which ``delicate`` is: its weights are large and cancel, what is left is in their last digits.

    ``changed``: other values of weights by name.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) * np.sqrt(2.0 / np.prod(shape[1:]))

    cancelling = np.zeros((12, 24, 1, 1))
    for row in range(12):
        cancelling[row, row], cancelling[row, row + 12] = 1000.3, -1000.0
    weights = {
        "stem.w": normal(12, 3, 3, 3),
        "delicate.w": cancelling,
        "wide.w": normal(40, 12, 1, 1),
        "wide.b": rng.normal(size=40),
        "dw.w": normal(40, 1, 3, 3),
        "narrow.w": normal(16, 40, 1, 1),
        "fc.w": normal(10, 16),
    } | changed
    nodes = [
        helper.make_node("Conv", ["x", "stem.w"], ["stem"], name="stem", pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["stem"], ["stem.act"], name="stem_act"),
        helper.make_node("Concat", ["stem.act", "stem.act"], ["twice"], name="twice", axis=1),
        helper.make_node("Conv", ["twice", "delicate.w"], ["delicate"], name=DELICATE),
        helper.make_node("Conv", ["delicate", "wide.w", "wide.b"], ["wide"], name="wide"),
        helper.make_node("Relu", ["wide"], ["wide.act"], name="wide_act"),
        helper.make_node("Conv", ["wide.act", "dw.w"], ["dw"], name="dw", pads=[1] * 4, group=40),
        helper.make_node("Relu", ["dw"], ["dw.act"], name="dw_act"),
        helper.make_node("Conv", ["dw.act", "narrow.w"], ["narrow"], name="narrow"),
        helper.make_node("GlobalAveragePool", ["narrow"], ["pooled"], name="pooled"),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "fc.w"], ["y"], name="fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(Model, its graph, runs with rounded layers)."""
    folder = tmp_path_factory.mktemp("rounded")
    path = network(folder / "net.onnx")
    model = import_onnx(path)
    graph = extract_graph(model.mod)
    switched = switched_model(prepare(path, load_model(path), None), graph)
    with rounded_runs(switched, model.inputs, model.outputs, 1, folder) as runs:
        yield model, graph, runs


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_every_layer_with_weights_has_a_switch(loaded):
    _, graph, runs = loaded
    assert set(runs.layers) == {node.name for node in graph.nodes if node.parameters}
    assert len(runs.layers) == 6 and DELICATE in runs.layers


def test_a_rounded_layer_reads_and_writes_bfloat16(tmp_path):
    """One convolution of 1x1: what its kernel computes, by hand; and nothing changes where no switch is on."""
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(5, 7, 1, 1)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["sums"], name="layer"),
        helper.make_node("Relu", ["sums"], ["y"], name="act"),
    ]
    graph = helper.make_graph(
        nodes,
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 7, 3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5, 3, 3])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )
    path = tmp_path / "one.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    model = import_onnx(path)
    switched = switched_model(prepare(path, load_model(path), None), extract_graph(model.mod))
    x = rng.normal(size=(1, 7, 3, 3)).astype(np.float32)

    def layer(data: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.maximum(np.einsum("oi,nihw->nohw", weights[:, :, 0, 0], data) + bias[:, None, None], 0.0)

    with rounded_runs(switched, model.inputs, model.outputs, 1, tmp_path) as runs:
        np.testing.assert_allclose(runs.outputs({"x": x}, ())["y"], layer(x, weight), rtol=1e-5, atol=1e-6)
        found = runs.outputs({"x": x}, runs.layers)["y"]
    expected = layer(rounded(x), rounded(weight))
    np.testing.assert_array_equal(found, rounded(found))
    np.testing.assert_allclose(found, expected, rtol=2.0**-8, atol=1e-6)
    assert np.mean(found == rounded(expected)) > 0.9  # a sum near the middle of two may go to either


def test_the_delicate_layer_is_found(loaded):
    model, _, runs = loaded
    measured = BudgetInputs(runs, error_inputs(model.inputs), {"y"})
    found = sensitivities(measured, runs.layers, seconds=5.0)
    others = [error for name, error in found.items() if name != DELICATE]
    assert found[DELICATE] > 0.1 > 5 * max(others) and min(others) > 0


def test_under_a_budget_the_delicate_layer_stays(loaded):
    """All others go: they save time, and their errors are small; and nobody asks for the budget of the delicate one."""
    model, _, runs = loaded
    measured = BudgetInputs(runs, error_inputs(model.inputs), {"y"})
    found = sensitivities(measured, runs.layers, seconds=5.0)
    for limit, left in ((0.05, {DELICATE}), (1e-6, set(runs.layers)), (10.0, set())):
        choice = choose_layers(found, lambda names: 10.0 - len(names), measured.error_of, limit)
        assert set(choice.kept) == left and choice.rounded == set(runs.layers) - left
        assert choice.error <= GIVEN_OUT * limit
        assert [point.layers for point in choice.frontier if point.chosen] == [len(choice.rounded)]
        errors = [point.error for point in choice.frontier]
        assert errors[0] == 0.0 and errors[-1] > 0.1 and choice.frontier[-1].layers == len(runs.layers)


def test_layers_that_save_nothing_stay_whatever_they_cost():
    seconds = {"a": 1.0, "b": -1.0, "c": 1.0}

    def network_seconds(names) -> float:
        return 10.0 - sum(seconds[name] for name in names)

    choice = choose_layers(dict.fromkeys(seconds, 0.001), network_seconds, lambda names: 0.001 * len(names), 1.0)
    assert choice.rounded == {"a", "c"} and choice.kept == ("b",)


def test_a_layer_that_saves_less_than_its_conversions_stays_when_its_neighbours_do():
    """`b` gains beside `a` and loses alone; the budget lets only the cheapest two of three in."""

    def network_seconds(names) -> float:
        return (
            10.0
            - 3.0 * ("c" in names)
            - 1.0 * ("b" in names)
            - 2.0 * ("a" in names)
            + 2.0 * (("b" in names) and "a" not in names)
        )

    errors = {"a": 1.0, "b": 0.001, "c": 0.001}
    choice = choose_layers(errors, network_seconds, lambda names: sum(errors[name] for name in names), 0.01)
    assert choice.rounded == {"c"} and choice.error == pytest.approx(0.001)
    assert [point for point in choice.frontier if point.chosen][0].seconds == 7.0


def test_a_search_that_is_out_of_time_is_within_the_budget_all_the_same():
    """One look at all layers, which are too many; then nobody asks any more: none."""
    asked = []

    def error_of(names) -> float:
        asked.append(len(names))
        return 0.001 * len(names)

    def search(in_time):
        return choose_layers(dict.fromkeys("abcdefgh", 1.0), lambda n: 10.0 - len(n), error_of, 0.005, in_time=in_time)

    assert search(lambda: False).rounded == frozenset() and asked == [8]
    assert len(search(lambda: True).rounded) == 4  # 0.8 of the budget


def test_a_larger_set_that_errs_less_is_found_among_the_points():
    """Two errors cancel in the sixth layer: bisection stops below, the points of the frontier do not."""
    errors = {0: 0.0, 1: 0.001, 2: 0.002, 3: 0.009, 4: 0.009, 5: 0.009, 6: 0.003, 7: 0.009, 8: 0.009}
    search = {"network_seconds": lambda n: 10.0 - len(n), "error_of": lambda n: errors[len(n)], "max_error": 0.005}
    assert len(choose_layers(dict.fromkeys("abcdefgh", 1.0), points=0, **search).rounded) == 2
    assert len(choose_layers(dict.fromkeys("abcdefgh", 1.0), points=4, **search).rounded) == 6


class _Slow:
    """A model of 20 layers that takes so long that there is time for ten runs; every rounded layer errs by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, 0
        monkeypatch.setattr("fusion.acceptance.error_budget.time.monotonic", lambda: self.now)

    def outputs(self, inputs, rounded):
        self.now += 1.0
        self.runs += 1
        return {"y": np.array([[100.0, 10.0 + len(rounded)]], np.float32)}


def test_a_slow_model_is_asked_about_neighbours_together(monkeypatch):
    slow = _Slow(monkeypatch)
    measured = BudgetInputs(slow, {str(i): {} for i in range(40)}, {"y"}, seconds=5.0)
    assert len(measured.names) == 6 and slow.runs == 6  # as many inputs as there was time for
    names = [f"layer{i}" for i in range(20)]
    found = sensitivities(measured, names, seconds=10.0)
    assert list(found) == names and slow.runs - 6 <= 12
    assert found["layer0"] == pytest.approx(0.01) and found["layer19"] > 0.015
    assert measured.fitting(12.0, sets=3) == 4 and measured.fitting(0.1, sets=3) == 2


def test_what_exceeds_the_budget_is_refused_in_one_line(loaded):
    model, _, runs = loaded
    measured = BudgetInputs(runs, error_inputs(model.inputs, pictures=1), {"y"})

    def all_rounded(inputs):
        return runs.outputs(inputs, runs.layers)

    assert RoundedLimit(runs, measured).require(Path("net.onnx"), "fused", all_rounded).max_relative_error > 0.1
    with pytest.raises(BudgetExceeded, match=r"--max-error 0\.01") as caught:
        RoundedLimit(runs, measured, 0.01).require(Path("net.onnx"), "fused", all_rounded)
    assert caught.value.error > 0.1 and "\n" not in str(caught.value)


# --- the check of networks with rounded layers ------------------------------------------------------


@pytest.fixture(scope="module")
def check(loaded, tmp_path_factory):
    model, _, runs = loaded
    path = network(tmp_path_factory.mktemp("check") / "net.onnx")
    names = [name for name in runs.layers if name != DELICATE]
    plain = prepare_check(
        path, lambda: DoubleModel(onnx.load(path)), probes(model.inputs), lambda given: runs.outputs(given, ()),
        TOLERANCE, model.outputs,
    )  # fmt: skip
    return names, plain, plain.with_rounded_layers(lambda inputs: runs.draws(inputs, names))


def test_rounded_layers_pass_their_own_check_and_not_that_of_float32(loaded, check):
    _, _, runs = loaded
    names, plain, loose = check
    # Elsewhere than where movements were drawn: on inputs that differ in their last digits.
    outputs = [runs.outputs({"x": each.inputs["x"] * np.float32(1 + 2**-20)}, names) for each in plain.expected]
    assert plain.verdict(outputs).share > 10
    assert loose.verdict(outputs).share < 1
    assert loose.verdict([runs.outputs(each.inputs, ()) for each in plain.expected]).share < 1


@pytest.mark.parametrize(
    "planted",
    [
        {"wide.b": lambda array: 0 * array},
        {"narrow.w": lambda array: np.roll(array, 1, axis=0)},
        {"dw.w": lambda array: array * (np.arange(9).reshape(3, 3) < 8)},
        {"fc.w": lambda array: 1.2 * array},
        {"stem.w": lambda array: np.where(np.arange(12)[:, None, None, None] == 5, 0.0, array)},
    ],
    ids=["no bias", "channels exchanged", "a tap lost", "20 % off", "a channel lost"],
)
def test_planted_errors_are_found_in_rounded_networks(check, tmp_path, planted):
    """A network with the error, rounded as the right one is."""
    names, _, loose = check
    right = {
        each.name: numpy_helper.to_array(each) for each in onnx.load(network(tmp_path / "a.onnx")).graph.initializer
    }
    path = network(tmp_path / "b.onnx", **{name: change(right[name]) for name, change in planted.items()})
    model = import_onnx(path)
    switched = switched_model(prepare(path, load_model(path), None), extract_graph(model.mod))
    with rounded_runs(switched, model.inputs, model.outputs, 1, tmp_path) as runs:
        outputs = [runs.outputs(each.inputs, names) for each in loose.expected]
    with pytest.raises(TuningError, match="wrong"):
        loose.require("fused", outputs)


def test_layers_keep_their_number_type_in_the_graph(loaded):
    _, graph, _ = loaded
    assert layers_in(stored_in(graph, {DELICATE, "dw"}, "bfloat16"), "bfloat16") == {DELICATE, "dw"}
    assert not layers_in(graph, "bfloat16")
