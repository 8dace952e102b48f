"""A layer that is off by 1 % is found in every network; what rounding does is not, however saturated the output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from costmodel.base.errors import TuningError
from fusion.acceptance.output_check import (
    HALF_TOLERANCE,
    TOLERANCE,
    DoubleModel,
    Expected,
    NoReference,
    OutputCheck,
    deviation,
    lost_values,
    output_step,
    prepare_check,
)
from fusion.comparing.output_errors import PATTERNS, broken_inputs, probes
from fusion.model.build_folder import TensorInfo
from fusion.tuning.network_check import expose

LAYERS = ("Conv", "Gemm", "MatMul")


class Builder:
    """Writes a network layer by layer; weights keep the variance of the activations."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.nodes, self.weights, self.count = np.random.default_rng(seed), [], {}, 0

    def emit(self, operator, *inputs, **attributes):
        self.count += 1
        self.nodes.append(helper.make_node(operator, list(inputs), [f"t{self.count}"], f"n{self.count}", **attributes))
        return f"t{self.count}"

    def weight(self, array):
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(array, np.float32)
        return name

    def conv(self, x, inputs, outputs, size=1, groups=1, gain=2.0, shift=0.1):
        fan = inputs // groups * size * size
        weight = self.rng.normal(size=(outputs, inputs // groups, size, size)) * np.sqrt(gain / fan)
        names = self.weight(weight), self.weight(shift * self.rng.normal(size=outputs))
        return self.emit("Conv", x, *names, group=groups, pads=[size // 2] * 4)

    def dense(self, x, inputs, outputs):
        return self.emit("Gemm", x, self.weight(self.rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)))

    def model(self, output, shape=(1, 3, 16, 16)):
        self.nodes[-1].output[0] = output
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def inverted_residuals():
    b = Builder()
    x = b.emit("Relu", b.conv("x", 3, 8, 3))
    for _ in range(2):
        y = b.emit("Relu", b.conv(x, 8, 32))
        y = b.emit("Relu", b.conv(y, 32, 32, 3, groups=32))
        x = b.emit("Add", x, b.conv(y, 32, 8, gain=1.0))
    pooled = b.emit("Flatten", b.emit("GlobalAveragePool", x))
    b.emit("Softmax", b.dense(pooled, 8, 10))
    return b.model("y")


def squeeze_and_excitation():
    b = Builder(1)
    x = b.emit("HardSwish", b.conv("x", 3, 16, 3))
    gate = b.emit("Relu", b.conv(b.emit("GlobalAveragePool", x), 16, 4))
    gate = b.emit("HardSigmoid", b.conv(gate, 4, 16), alpha=1 / 6, beta=0.5)
    x = b.emit("Mul", x, gate)
    x = b.emit("Mul", x, b.emit("Sigmoid", x))
    b.conv(x, 16, 4)
    return b.model("y")


def saturated(shift):
    """A map of text, as a detector writes it: nothing anywhere, 1e-5 of a sigmoid."""
    b = Builder(2)
    x = b.emit("Relu", b.conv("x", 3, 16, 3))
    x = b.emit("Relu", b.conv(x, 16, 16, 3, groups=16))
    x = b.conv(x, 16, 1, gain=0.1)
    b.emit("Sigmoid", b.emit("Add", x, b.weight(shift)))
    return b.model("y")


def boxes_and_scores():
    """In one output; boxes are a thousand times larger than scores."""
    b = Builder(4)
    x = b.emit("Relu", b.conv("x", 3, 16, 3))
    large = b.emit("Mul", b.conv(x, 16, 4), b.weight(1000.0))
    scores = b.emit("Sigmoid", b.conv(x, 16, 8))
    b.emit("Concat", large, scores, axis=1)
    return b.model("y")


NETWORKS = {
    "inverted residuals": inverted_residuals,
    "squeeze and excitation": squeeze_and_excitation,
    "sigmoid at 1e-5": lambda: saturated(-11.0),
    "sigmoid at 1": lambda: saturated(17.0),
    "boxes and scores": boxes_and_scores,
}


def runtime(model: onnx.ModelProto, **options):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    for name, value in options.items():
        setattr(settings, name, value)
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True))


def check_of(model: onnx.ModelProto) -> OutputCheck:
    shape = tuple(size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim)
    inputs, interface = [TensorInfo("x", shape, "float32")], (TensorInfo("y", (), "float32"),)
    return prepare_check(
        Path("m.onnx"), lambda: DoubleModel(model), probes(inputs), runtime(model), TOLERANCE, interface
    )


@pytest.fixture(scope="module", params=NETWORKS, ids=lambda name: name.replace(" ", "-"))
def network(request):
    """The model as it is checked (what saturates exposed), and its check."""
    model = NETWORKS[request.param]()
    model = expose(model) or model
    return model, check_of(model)


def computed(check, model, **options):
    run = runtime(model, **options)
    return [run(expected.inputs) for expected in check.expected]


def test_what_rounding_does_passes(network):
    """ONNX Runtime without its optimisations rounds in other places."""
    model, check = network
    assert check.unchecked is None and len(check.expected) == 1 + len(PATTERNS)
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert check.require("tuned", computed(check, model)).share < 0.5
    assert check.require("tuned", computed(check, model, graph_optimization_level=level)).share < 0.5


@pytest.mark.parametrize("error", ["scale", "random"])
def test_one_percent_in_any_layer_fails(network, error):
    model, check = network
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type not in LAYERS:
            continue
        tensor = weights[node.input[1]]
        before = tensor.SerializeToString()
        values = numpy_helper.to_array(tensor)
        factor = 1.01 if error == "scale" else 1 + 0.01 * np.random.default_rng(0).choice([-1, 1], values.shape)
        tensor.CopyFrom(numpy_helper.from_array((values * factor).astype(np.float32), tensor.name))
        outputs = computed(check, model)
        tensor.ParseFromString(before)
        with pytest.raises(TuningError, match="m.onnx: outputs of the tuned network are wrong"):
            check.require("tuned", outputs)


def test_one_wrong_pixel_of_many_fails(network):
    model, check = network
    outputs = computed(check, model)
    values = outputs[0]["y"].reshape(-1)
    scale = check.expected[0].rounding["y"].reshape(-1)
    values[3] += 200 * max(scale[3], 1e-7 * abs(values[3]))
    outputs[0]["y"] = values.reshape(outputs[0]["y"].shape)
    with pytest.raises(TuningError, match="'y'.*random input"):
        check.require("tuned", outputs)


@pytest.mark.parametrize("wrong", [np.full((1, 4), np.nan), np.zeros((1, 5)), None])
def test_missing_misshapen_and_undefined_outputs_are_infinitely_wrong(wrong):
    assert deviation(wrong, np.zeros((1, 4)), np.ones((1, 4)), 1e-7)[0] == np.inf


def test_results_that_nothing_reads_need_no_reference():
    """Indices of a pool, which exporters name all the same."""
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[2, 2])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 1, 2, 2))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = DoubleModel(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert model.run({"x": np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)})["y"] == 3


def test_all_zeros_must_be_zeros():
    """A network without biases on an empty image: nothing moves it, and there is no largest value."""
    nothing = np.zeros((2, 3))
    assert deviation(np.zeros((2, 3), np.float32), nothing, nothing, 2.0**-24) == (0.0, 0.0)
    assert deviation(np.full((2, 3), 1e-6, np.float32), nothing, nothing, 2.0**-24)[0] == float("inf")


def test_infinities_must_be_where_the_reference_has_them():
    reference = np.array([np.inf, 1.0])
    assert deviation(np.array([np.inf, 1.0]), reference, np.full(2, 1e-7), 1e-7)[0] == 0
    assert deviation(np.array([1.0, 1.0]), reference, np.full(2, 1e-7), 1e-7)[0] == np.inf


def test_classes_may_differ_where_rounding_decides():
    reference = np.arange(10_000)
    actual = reference.copy()
    actual[:4] += 1
    assert deviation(actual, reference, np.asarray(0.0), 1e-7)[0] < 1
    actual[:40] += 1
    assert deviation(actual, reference, np.asarray(0.0), 1e-7)[0] > 1
    assert deviation(actual, reference, np.asarray(0.004), 1e-7)[0] < 1


def test_without_a_reference_onnx_runtime_is_what_counts():
    model = squeeze_and_excitation()

    def nothing():
        raise NoReference("operator Foo is unknown")

    inputs = probes([TensorInfo("x", (1, 3, 16, 16), "float32")])
    interface = (TensorInfo("y", (), "float32"),)
    check = prepare_check(Path("m.onnx"), nothing, inputs, runtime(model), TOLERANCE, interface)
    assert check.unchecked == "operator Foo is unknown"
    outputs = computed(check, model)
    assert check.require("tuned", outputs).share == 0
    outputs[1]["y"] = outputs[1]["y"] * 1.001
    with pytest.raises(TuningError, match="ONNX Runtime.*image-like"):
        check.require("tuned", outputs)


def test_a_reference_that_contradicts_onnx_runtime_is_not_believed():
    model, other = saturated(0.0), saturated(1.0)
    inputs = probes([TensorInfo("x", (1, 3, 16, 16), "float32")])
    interface = (TensorInfo("y", (), "float32"),)
    check = prepare_check(Path("m.onnx"), lambda: DoubleModel(other), inputs, runtime(model), TOLERANCE, interface)
    assert "is not that of double precision" in check.unchecked


def test_what_saturates_is_exposed():
    exposed = expose(saturated(-11.0))
    assert [value.name for value in exposed.graph.output] == ["y", "t6"]
    assert expose(squeeze_and_excitation()) is None


def test_probes_are_of_the_type_of_the_input_and_differ():
    made = probes([TensorInfo("x", (1, 3, 8, 8), "float32"), TensorInfo("i", (4,), "int64")])
    assert [*made] == ["random", *PATTERNS]
    assert all(arrays["x"].dtype == np.float32 and arrays["i"].dtype == np.int64 for arrays in made.values())
    assert len({arrays["x"].tobytes() for arrays in made.values()}) == len(made)
    assert made["image-like"]["x"].min() >= 0 and made["image-like"]["x"].max() <= 1
    for shape in ((), (5,), (2, 3)):
        assert all(pattern(shape).shape == shape for pattern in PATTERNS.values())


@pytest.mark.parametrize(("steps", "right"), [(0, True), (1, True), (2, False)])
def test_outputs_of_quantised_networks_may_be_one_step_off(steps, right):
    """Without a reference in FP64; within the tolerance of floats two steps would be right."""
    theirs = np.array([[-3.0, 0.0, 1.0, 2.0, 90.0]], np.float32) * np.float32(0.25)
    ours = theirs.copy()
    ours[0, 2] += 0.25 * steps
    interface = (TensorInfo("y", theirs.shape, "float32"),)
    expected = (Expected("random", {}, {"y": theirs}, None, {}),)
    check = OutputCheck(Path("m.onnx"), expected, 0.0, interface, HALF_TOLERANCE, "quantised", in_steps=True)
    assert (check.verdict([{"y": ours}]).share <= 1.0) == right
    floats = replace(check, in_steps=False)
    assert floats.verdict([{"y": ours}]).share <= 1.0


def test_outputs_of_many_values_have_no_step():
    assert output_step(np.arange(257, dtype=np.float32)) is None and output_step(np.zeros(3, np.float32)) is None
    assert output_step(np.array([1.0, 0.5, 4.0], np.float32)) == 0.5


def _check_of(outputs):
    """Of a model whose outputs ONNX Runtime computes as ``outputs``, and that has no reference in FP64."""
    interface = tuple(TensorInfo(name, values.shape, "float32") for name, values in outputs.items())
    return OutputCheck(Path("m.onnx"), (Expected("random", {}, outputs, None, {}),), 0.0, interface, unchecked="why")


def test_outputs_without_a_finite_number_are_told():
    nothing = np.full((2, 3), np.nan, np.float32)
    some = np.array([np.nan, 1.0], np.float32)
    (line,) = _check_of({"y": nothing, "z": some}).nothing_finite()
    assert "output 'y' are NaN" in line and "random input" in line
    assert _check_of({"y": nothing}).require("first", [{"y": nothing}]).share <= 1.0


def test_a_model_that_overflows_is_told_as_such_and_a_wrong_build_of_another_is_not():
    infinite, finite = np.array([np.inf, 1.0], np.float32), np.array([1e38, 1.0], np.float32)
    with pytest.raises(TuningError, match="the model itself overflows float32"):
        _check_of({"y": infinite}).require("first", [{"y": finite}])
    with pytest.raises(TuningError, match="outputs of the first network are wrong"):
        _check_of({"y": finite}).require("first", [{"y": infinite}])


def test_nan_that_goes_in_and_does_not_come_out_is_told():
    tensors = [TensorInfo("x", (1, 3, 4, 4), "float32"), TensorInfo("n", (2,), "int64")]
    inputs = broken_inputs(tensors)
    assert {name: int((~np.isfinite(arrays["x"])).sum()) for name, arrays in inputs.items()} == {
        "NaN": 1,
        "infinity": 1,
    }
    assert not broken_inputs(tensors[1:])
    theirs = {"y": np.array([np.nan, 1.0, np.nan], np.float32)}
    assert not lost_values("NaN", {"y": np.full(3, np.nan, np.float32)}, theirs)
    (line,) = lost_values("NaN", {"y": np.array([2.0, 1.0, np.nan], np.float32)}, theirs)
    assert "holds NaN in 2 places, of which 1 hold numbers here" in line
