"""Steps between bytes: tables, sums and products of two tensors, averages, and moves, with ONNX Runtime's bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")
import tvm

from fusion.relax.extract import extract_graph
from fusion.relax.integer_calls import (
    ByteMean,
    BytePair,
    ByteTable,
    ByteWindow,
    Quantisation,
    addition_factors,
    compute_mean,
    compute_pair,
    compute_window,
    mean_factors,
    product_factors,
    window_factors,
)
from fusion.relax.kernels import bytes
from fusion.relax.onnx.importer import import_onnx
from fusion.relax.onnx.quantised_rewrites import in_whole_numbers
from fusion.tuning import network_check
from schedules.contract.kernel_compilation import compile_kernel
from schedules.contract.template import block, unblock
from tests.fusion.quantised_models import CPU, EMULATED, HOST, QuantisedGraph, ours, theirs

SHAPE = (1, 16, 4, 8)


def quantisation(scale, zero):
    return Quantisation(np.float32(scale), zero)


def called(function, *arrays, emulated=EMULATED):
    """What a kernel writes into the last of ``arrays``."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
    compile_kernel(function, replace(CPU, mcpu=HOST.mcpu), emulated)(*tensors)
    return tensors[-1].numpy()


@pytest.mark.parametrize("count", [5, 32, 77, 70_001])
@pytest.mark.parametrize("emulated", [True, EMULATED])
def test_a_table_is_looked_up(count, emulated):
    generator = np.random.default_rng(count)
    data, table = (generator.integers(0, 256, size).astype(np.uint8) for size in (count, 256))
    if count > 256:
        data[:256] = np.arange(256)
    function = bytes.table_kernel(count, CPU)
    np.testing.assert_array_equal(
        called(function, data, table, np.zeros(count, np.uint8), emulated=emulated), table[data]
    )


@pytest.mark.parametrize("kind", ["add", "multiply"])
@pytest.mark.parametrize("offset", [0, 128])
def test_pairs_of_bytes_are_rounded_as_specified(kind, offset):
    """Every pair of bytes."""
    left, right = (each.reshape(-1).astype(np.uint8) for each in np.meshgrid(np.arange(256), np.arange(256)))
    given = [replace(quantisation(*each), offset=offset) for each in ((0.031, 131), (0.017, 90), (0.04, 100))]
    result = replace(given[2], low=12, high=250)
    factors = {"add": addition_factors, "multiply": product_factors}[kind](given[0], given[1], result)
    expected = compute_pair(kind, left, right, factors)
    assert expected.min() >= 12 and expected.max() <= 250 and len(np.unique(expected)) > 50
    found = called(bytes.pair_kernel(kind, left.size, CPU), left, right, factors, np.zeros_like(left))
    np.testing.assert_array_equal(found, expected)


def test_a_gate_multiplies_every_pixel_of_its_channel():
    generator = np.random.default_rng(2)
    image, gate = (generator.integers(0, 256, (2, 24, *size)).astype(np.uint8) for size in ((5, 7), (1, 1)))
    factors = product_factors(quantisation(0.03, 120), quantisation(0.004, 0), quantisation(0.02, 110))
    function = bytes.gate_kernel(BytePair("multiply", image.shape, True), CPU)
    blocked = block(image, 16)
    found = unblock(called(function, blocked, block(gate, 16), factors, np.zeros_like(blocked)), 24)
    np.testing.assert_array_equal(found, compute_pair("multiply", image, np.broadcast_to(gate, image.shape), factors))


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (3, 6)])
def test_the_mean_of_pixels(size):
    image = np.random.default_rng(3).integers(0, 256, (2, 20, *size)).astype(np.uint8)
    factors = mean_factors(quantisation(0.03, 120), quantisation(0.02, 110), size[0] * size[1])
    expected = compute_mean(image, factors)
    blocked = block(image, 16)
    found = called(
        bytes.mean_kernel(ByteMean(image.shape), CPU), blocked, factors, np.zeros((2, 2, 1, 1, 16), np.uint8)
    )
    np.testing.assert_array_equal(unblock(found, 20), expected)


WINDOWS = {
    "2x2": ((2, 2), (2, 2), (0, 0, 0, 0)),
    "3x3 with padding": ((3, 3), (1, 1), (1, 1, 1, 1)),
    "3x2 that reaches beyond the image": ((3, 2), (2, 2), (1, 0, 1, 1)),
}


@pytest.mark.parametrize("counts_padding", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offset", [0, 128])
def test_the_mean_of_windows(window, counts_padding, offset):
    image = np.random.default_rng(3).integers(0, 256, (2, 20, 9, 11)).astype(np.uint8)
    step = ByteWindow(image.shape, *WINDOWS[window], counts_padding)
    given = [replace(quantisation(*each), offset=offset) for each in ((0.0317, 131), (0.0241, 117))]
    factors = window_factors(given[0], replace(given[1], low=12, high=250))
    expected = compute_window(image, step, factors)
    assert len(np.unique(expected)) > 50
    blocked = block(image, 16)
    result = np.zeros((2, 2, *step.result[2:], 16), np.uint8)
    found = called(bytes.window_kernel(step, CPU), blocked, factors, result)
    np.testing.assert_array_equal(unblock(found, 20), expected)


def test_a_table_for_each_channel():
    generator = np.random.default_rng(4)
    image, tables = (generator.integers(0, 256, shape).astype(np.uint8) for shape in ((2, 20, 5, 7), (20, 256)))
    blocked, packed = block(image, 16), bytes.pack_channel_tables(tables, 16)
    function = bytes.channel_table_kernel(ByteTable(image.shape, True), CPU)
    found = unblock(called(function, blocked, packed, np.zeros_like(blocked)), 20)
    np.testing.assert_array_equal(found, tables[np.arange(20)[:, None, None], image])


def every_byte(scale=0.05, zero=118, shape=SHAPE):
    """Values that become each of the 256 bytes."""
    steps = np.resize(np.arange(256), np.prod(shape)).reshape(shape)
    return ((steps - zero) * scale).astype(np.float32)


def kinds(path):
    """Operators of the network that compute in floats, but for those that quantise its inputs and its results."""
    graph = extract_graph(import_onnx(path).mod)
    others = [other.operator for other in graph.others if "quantize" not in other.operator]
    return others, [node.operator.dtype for node in graph.nodes], graph


CHAINS = {
    "Relu": lambda g, x: g.add("Relu", x),
    "Clip": lambda g, x: g.add("Clip", x, g.constant(np.float32(-1.0), "low"), g.constant(np.float32(2.5), "high")),
    "LeakyRelu": lambda g, x: g.add("LeakyRelu", x, alpha=0.1),
    "PRelu": lambda g, x: g.add("PRelu", x, g.constant(np.array([0.25], np.float32), "slope")),
    "Sigmoid": lambda g, x: g.add("Sigmoid", x),
    "HardSigmoid": lambda g, x: g.add("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    "HardSwish": lambda g, x: g.add("HardSwish", x),
    "Tanh": lambda g, x: g.add("Tanh", x),
    "Elu": lambda g, x: g.add("Elu", x, alpha=1.0),
    "Softplus": lambda g, x: g.add("Softplus", x),
    "another scale": lambda g, x: x,
    "a number": lambda g, x: g.add("Mul", x, g.constant(np.float32(0.7), "number")),
    "two": lambda g, x: g.add("Tanh", g.add("Relu", x)),
    "SiLU in floats": lambda g, x: g.add("Mul", x, g.add("Sigmoid", x)),
    "SiLU with bytes between": lambda g, x: g.add("Mul", x, g.step(g.add("Sigmoid", x), 1 / 255, 0)),
}


@pytest.mark.parametrize(("chain", "signed"), one_in(3, itertools.product(CHAINS, (False, True))))
def test_what_depends_on_one_byte_is_a_table(chain, signed, tmp_path):
    graph = QuantisedGraph(signed)
    result = graph.step(CHAINS[chain](graph, graph.step("x", 0.05, 118)), 0.031, 77)
    path = graph.save(tmp_path / "q.onnx", result, SHAPE)
    assert kinds(path)[:2] == (["byte_table"], [])
    found = ours(path, every_byte())
    assert len(np.unique(found)) > 20
    np.testing.assert_array_equal(found, theirs(path, every_byte()))


def per_channel(seed, shape=(16, 1, 1), scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def held_in_bytes(graph, name, shape, scale, zero):
    """A constant of bytes, back in floats."""
    kind, least = (np.int8, -128) if graph.signed else (np.uint8, 0)
    values = np.random.default_rng(7).integers(least, least + 256, shape).astype(kind)
    given = [
        graph.constant(values, name),
        graph.constant(np.float32(scale), f"{name}_scale"),
        graph.constant(kind(zero + least), f"{name}_zero"),
    ]
    return graph.add("DequantizeLinear", *given, name=f"{name}_d")


def batch_norm(graph, x):
    given = [graph.constant(per_channel(seed, 16), f"norm_{seed}") for seed in (1, 2, 3)]
    variance = graph.constant(np.abs(per_channel(4, 16)) + np.float32(0.2), "variance")
    return graph.add("BatchNormalization", x, *given, variance)


OF_CHANNELS = {
    "PRelu": lambda g, x: g.add("PRelu", x, g.constant(per_channel(1, scale=0.3), "slopes")),
    "Add": lambda g, x: g.add("Add", x, g.constant(per_channel(1), "numbers")),
    "Mul": lambda g, x: g.add("Mul", g.constant(per_channel(1, (1, 16, 1, 1)), "numbers"), x),
    "a number that is added": lambda g, x: g.add("Add", x, g.constant(np.float32(0.37), "number")),
    "bytes that are added": lambda g, x: g.add("Add", x, held_in_bytes(g, "numbers", (1, 16, 1, 1), 0.0213, 117)),
    "added to bytes": lambda g, x: g.add("Add", held_in_bytes(g, "numbers", (1, 16, 1, 1), 0.0213, 117), x),
    "times bytes": lambda g, x: g.add("Mul", x, held_in_bytes(g, "numbers", (16, 1, 1), 0.0081, 61)),
    "a byte that is added": lambda g, x: g.add("Add", x, held_in_bytes(g, "number", (), 0.0213, 117)),
    "times a byte": lambda g, x: g.add("Mul", held_in_bytes(g, "number", (1,), 0.0081, 61), x),
    "BatchNormalization": batch_norm,
    "several": lambda g, x: g.add("Relu", g.add("Add", batch_norm(g, x), g.constant(per_channel(5), "numbers"))),
    "bytes between": lambda g, x: g.add(
        "PRelu", g.step(g.add("Mul", x, g.constant(per_channel(1), "numbers")), 0.04, 121),
        g.constant(per_channel(2, scale=0.3), "slopes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "signed"),
    one_in(2, [*((chain, False) for chain in OF_CHANNELS), ("PRelu", True), ("bytes that are added", True)]),
)
def test_what_depends_on_a_byte_and_its_channel_is_a_table_for_each(chain, signed, tmp_path):
    graph = QuantisedGraph(signed)
    shape = (1, 16, 16, 16)
    x = graph.step("x", 0.05003, 118)
    result = graph.step(OF_CHANNELS[chain](graph, x), 0.03117, 77)
    path = graph.save(tmp_path / "q.onnx", result, shape, data=shape)
    assert kinds(path)[:2] == (["byte_table"], [])
    data = every_byte(0.05003, shape=shape)
    found = ours(path, data)
    assert len(np.unique(found)) > 20
    np.testing.assert_array_equal(found, theirs(path, data))


AVERAGES = {
    "2x2": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "3x3": {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1]},
    "3x3 with a stride": {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0]},
    "the same size": {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    "reaching beyond": {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    "reaching beyond, with padding": {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 0, 1], "ceil_mode": 1},
    "the whole image": {"kernel_shape": [16, 18]},
}


def average_cases():
    """Every window as steps around floats; as operators of bytes, without and with a sign, one of them."""
    forms = ["steps", "operator", "operator with signs"]
    return [
        (window, counted, form)
        for window in AVERAGES
        for counted in (0, 1)
        for form in (forms if window == "3x3" else forms[:1])
    ]


@pytest.mark.parametrize(("window", "counted", "form"), one_in(3, average_cases()))
def test_windows_are_averaged_as_bytes(window, counted, form, tmp_path):
    graph = QuantisedGraph(signed=form == "operator with signs")
    shape, options = (1, 24, 16, 18), {**AVERAGES[window], "count_include_pad": counted}
    x = graph.step("x", 0.05003, 118)
    if form == "steps":
        result = graph.step(graph.add("AveragePool", x, **options), 0.03117, 77)
    else:
        graph.constant(np.float32(0.03117), "r_scale")
        graph.constant(np.int8(-51) if graph.signed else np.uint8(77), "r_zero")
        held = [f"{x[:-2]}{end}" for end in ("_q", "_scale", "_zero")]
        made = graph.add("QLinearAveragePool", *held, "r_scale", "r_zero", domain="com.microsoft", **options)
        result = graph.add("DequantizeLinear", made, "r_scale", "r_zero", name="result")
    path = graph.save(tmp_path / "q.onnx", result, (1, 24, None, None), data=shape)
    others, layers, _ = kinds(path)
    assert others == ["byte_mean" if window == "the whole image" else "byte_window"] and not layers
    data = (np.random.default_rng(1).integers(-140, 140, shape) * 0.05).astype(np.float32)
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def two_tensors(graph):
    """Two tensors of bytes of other scales, which are no tables of one another: the second is the first upside down."""
    x = graph.step("x", 0.05003, 118)
    order = graph.constant(np.arange(SHAPE[2])[::-1].astype(np.int64).copy(), "order")
    y = graph.step(graph.add("Gather", "x", order, axis=2), 0.04117, 140)
    return x, y


@pytest.mark.parametrize(("operator", "signed"), [("Add", False), ("Mul", True)])
def test_two_tensors_of_bytes(operator, signed, tmp_path):
    graph = QuantisedGraph(signed)
    value = graph.add("Relu", graph.add(operator, *two_tensors(graph)))
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.07129, 40), SHAPE)
    found, data = kinds(path)[2], every_byte()
    assert [each.operator for each in found.others].count("byte_pair") == 1
    assert {"relax.add", "relax.multiply", "relax.nn.relu"}.isdisjoint(each.operator for each in found.others)
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


@pytest.mark.parametrize(("operator", "signed"), [("QLinearAdd", True), ("QLinearMul", False)])
def test_every_pair_of_bytes_of_quantised_operators(operator, signed, tmp_path):
    """Those of bytes with a sign are added as such: FP32 rounds these sums otherwise."""
    graph = QuantisedGraph(signed)
    shape = (1, 16, 64, 64)
    x = graph.step("x", 0.05003, 118)
    order = graph.constant(np.random.default_rng(0).permutation(64), "order")
    y = graph.step(graph.add("Gather", "x", order, axis=2), 0.04117, 140)
    held = [f"{name[:-2]}{end}" for name in (x, y) for end in ("_q", "_scale", "_zero")]
    graph.constant(np.float32(0.07129 if operator == "QLinearAdd" else 0.21), "r_scale")
    graph.constant(np.int8(-60) if signed else np.uint8(68), "r_zero")
    made = graph.add(operator, *held, "r_scale", "r_zero", name="pair", domain="com.microsoft")
    result = graph.add("DequantizeLinear", made, "r_scale", "r_zero", name="result")
    path = graph.save(tmp_path / "q.onnx", result, shape, data=shape)
    data = (np.random.default_rng(1).integers(-140, 140, shape) * 0.05).astype(np.float32)
    assert [other.operator for other in kinds(path)[2].others].count("byte_pair") == 1
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_bytes_with_a_sign_that_several_layers_read(tmp_path):
    """ONNX Runtime computes these layers in floats, but in whole numbers once the bytes have lost their sign."""
    graph = QuantisedGraph(signed=True)
    shape = (1, 16, 16, 16)
    x = graph.step("x", 0.05003, 128)
    first, second = (
        graph.step(graph.add("Conv", x, graph.weights(16 + i, 16, 3, f"w{i}"), pads=[1] * 4), 0.41, 128) for i in (0, 8)
    )
    path = graph.save(tmp_path / "q.onnx", graph.add("Concat", first, second, axis=1), (1, 40, 16, 16), data=shape)
    assert set(kinds(path)[1]) == {"int8"}
    equal = in_whole_numbers(onnx.load(path))
    assert equal is not None and in_whole_numbers(equal) is None
    onnx.save(equal, tmp_path / "equal.onnx")
    job, subject = SimpleNamespace(graph=kinds(path)[2]), SimpleNamespace(path=path)
    checked = network_check._in_whole_numbers(job, subject, onnx.load(path), tmp_path)
    assert checked.read_bytes() == (tmp_path / "equal.onnx").read_bytes()
    data = np.random.default_rng(2).standard_normal(shape).astype(np.float32) * 3
    np.testing.assert_array_equal(ours(path, data), theirs(tmp_path / "equal.onnx", data))


@pytest.mark.parametrize("kept", [True, False])
def test_means_that_are_written_as_reductions(kept, tmp_path):
    """ONNX Runtime sums floats for these, and bytes for pooling: over an image of ties, ours are those of pooling."""
    shape = (1, 32, 8, 8)
    graph = QuantisedGraph()
    mean = graph.add("ReduceMean", graph.step("x", 0.05003, 118), axes=[2, 3], keepdims=int(kept))
    result, made = graph.step(mean, 0.05003 / 2, 118), (1, 32, 1, 1) if kept else (1, 32)
    path = graph.save(tmp_path / "q.onnx", result, made, data=shape)
    equal = in_whole_numbers(onnx.load(path))
    assert [node.op_type for node in equal.graph.node].count("GlobalAveragePool") == 1
    onnx.save(equal, tmp_path / "equal.onnx")
    steps = np.full((32, 64), 140)
    steps[:, :16] += 1 + 2 * np.arange(32)[:, None]  # a mean of k + 1/4 steps, which is two and a half of the result
    data = ((steps - 118) * np.float32(0.05003)).reshape(shape).astype(np.float32)
    np.testing.assert_array_equal(ours(path, data), theirs(tmp_path / "equal.onnx", data))


@pytest.mark.parametrize(("operator", "signed"), [("GlobalAveragePool", True), ("ReduceMean", False)])
def test_an_excitation_stays_in_bytes(operator, signed, tmp_path):
    """The mean of the pixels, an activation of it, and every pixel times that."""
    graph = QuantisedGraph(signed)
    x = graph.step("x", 0.05, 118)
    options = {"axes": [2, 3], "keepdims": 1} if operator == "ReduceMean" else {}
    mean = graph.step(graph.add(operator, x, **options), 0.02, 120)
    gate = graph.step(graph.add("HardSigmoid", mean), 1 / 255, 0)
    path = graph.save(tmp_path / "q.onnx", graph.step(graph.add("Mul", gate, x), 0.04129, 111), SHAPE)
    others, layers, _ = kinds(path)
    assert others == ["byte_mean", "byte_table", "byte_pair"] and not layers
    data = np.random.default_rng(5).standard_normal(SHAPE).astype(np.float32) * 3
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_parts_of_other_scales_are_joined_as_bytes(tmp_path):
    graph = QuantisedGraph()
    x, y = two_tensors(graph)
    joined = graph.step(graph.add("Concat", x, y, x, axis=1), 0.05003, 118)
    path = graph.save(tmp_path / "q.onnx", joined, (1, 48, 4, 8))
    others = kinds(path)[0]
    assert others.count("byte_table") == 1 and others.count("relax.concat") == 1
    np.testing.assert_array_equal(ours(path, every_byte()), theirs(path, every_byte()))


MOVES = {
    "MaxPool": (lambda g, x: g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), (1, 16, 2, 4)),
    "Resize": (
        lambda g, x: g.add(
            "Resize", x, "", g.constant(np.array([1, 1, 2, 2], np.float32), "scales"), mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        ),
        (1, 16, 8, 16),
    ),
    "Slice": (
        lambda g, x: g.add(
            "Slice", x, g.constant(np.array([4]), "starts"), g.constant(np.array([12]), "ends"),
            g.constant(np.array([1]), "axes"),
        ),
        (1, 8, 4, 8),
    ),
    "DepthToSpace": (lambda g, x: g.add("DepthToSpace", x, blocksize=2), (1, 4, 8, 16)),
}  # fmt: skip


@pytest.mark.parametrize(("move", "scale"), list(zip(MOVES, itertools.cycle((0.05, 0.06)), strict=False)))
def test_moves_are_done_on_bytes(move, scale, tmp_path):
    """Where the scale is another behind them too."""
    make, shape = MOVES[move]
    graph = QuantisedGraph()
    path = graph.save(tmp_path / "q.onnx", graph.step(make(graph, graph.step("x", 0.05, 118)), scale, 118), shape)
    graph = extract_graph(import_onnx(path).mod)
    floats = [other.operator for other in graph.others if "float32" in str(other.output.ty.dtype)]
    assert floats == ["relax.dequantize"]
    np.testing.assert_array_equal(ours(path, every_byte()), theirs(path, every_byte()))


PADS = {
    "zeros": ([0, 0, 1, 2, 0, 0, 0, 1], 0.0, {}),
    "a number": ([0, 0, 1, 0, 0, 0, 2, 1], -1.7, {}),
    "channels": ([0, 3, 0, 0, 0, 2, 0, 0], 0.0, {}),
    "reflected": ([0, 0, 1, 2, 0, 0, 1, 1], 0.0, {"mode": "reflect"}),
    "replicated": ([0, 0, 1, 2, 0, 0, 1, 1], 0.0, {"mode": "edge"}),
}


@pytest.mark.parametrize(("kind", "scale"), list(zip(PADS, itertools.cycle((0.06, 0.05)), strict=False)))
def test_padding_is_of_bytes(kind, scale, tmp_path):
    widths, value, options = PADS[kind]
    graph = QuantisedGraph(signed=kind == "a number")
    given = [graph.constant(np.array(widths), "pads"), graph.constant(np.float32(value), "value")]
    padded = graph.add("Pad", graph.step("x", 0.05, 118), *given, **options)
    shape = (np.array(SHAPE) + np.array(widths).reshape(2, 4).sum(axis=0)).tolist()
    path = graph.save(tmp_path / "q.onnx", graph.step(padded, scale, 118), shape)
    found = extract_graph(import_onnx(path).mod)
    floats = [other.operator for other in found.others if "float32" in str(other.output.ty.dtype)]
    assert floats == ["relax.dequantize"]
    np.testing.assert_array_equal(ours(path, every_byte()), theirs(path, every_byte()))


@pytest.mark.parametrize(("steps_between", "axes"), [(False, True), (True, False)])
def test_padding_with_zeros_before_a_convolution_is_that_of_the_convolution(steps_between, axes, tmp_path):
    graph = QuantisedGraph()
    shape = (1, 16, 8, 8)
    widths = [1, 0, 2, 1] if axes else [0, 0, 1, 0, 0, 0, 2, 1]
    given = [graph.constant(np.array(widths), "pads"), graph.constant(np.float32(0), "value")]
    given += [graph.constant(np.array([2, 3]), "axes")] if axes else []
    padded = graph.add("Pad", graph.step("x", 0.05003, 118), *given)
    if steps_between:
        padded = graph.step(padded, 0.05003, 118)
    value = graph.add("Conv", padded, graph.weights(24, 16, 3), pads=[0, 1, 1, 0])
    path = graph.save(tmp_path / "q.onnx", graph.step(value, 0.31, 121), (1, 24, 10, 8), opset=18, data=shape)
    others, layers, found = kinds(path)
    assert others == [] and layers == ["int8"] and found.nodes[0].operator.padding == (1, 1, 3, 1)
    data = every_byte(0.05003, shape=shape)
    equal = in_whole_numbers(onnx.load(path))
    assert (equal is None) == steps_between
    if equal is not None:  # ONNX Runtime sums floats in the file as it is
        assert (np.abs(ours(path, data) - theirs(path, data)) > 1e-3).mean() < 1e-3
        onnx.save(equal, tmp_path / "equal.onnx")
    np.testing.assert_array_equal(ours(path, data), theirs(path if equal is None else tmp_path / "equal.onnx", data))


@pytest.mark.parametrize(("mode", "otherwise"), [("nearest", False), ("linear", False), ("cubic", True)])
def test_what_onnx_runtime_may_round_otherwise_is_known(mode, otherwise, tmp_path):
    """Between four pixels along each axis floats are resized, in another order of the sums."""
    graph = QuantisedGraph()
    x = graph.step(graph.add("Conv", graph.step("x", 0.05, 118), graph.weights(16, 16)), 0.3, 118)
    larger = graph.add("Resize", x, "", graph.constant(np.array([1, 1, 2, 2], np.float32), "scales"), mode=mode)
    path = graph.save(tmp_path / "q.onnx", graph.step(larger, 0.3, 118), (1, 16, 8, 16))
    assert network_check.rounds_otherwise(kinds(path)[2]) is otherwise


def test_an_activation_behind_bytes_that_cuts_off_belongs_to_the_layer(tmp_path):
    """As files of symmetric quantisation have it: a convolution to bytes, Relu of these to bytes of the same scale."""
    graph = QuantisedGraph(signed=True)
    value = graph.add("Conv", graph.step("x", 0.05, 128), graph.weights(24, 16), name="conv")
    result = graph.step(graph.add("Relu", graph.step(value, 0.08, 128)), 0.08, 128)
    path = graph.save(tmp_path / "q.onnx", result, (1, 24, 4, 8))
    others, layers, found = kinds(path)
    assert others == [] and layers == ["int8"]
    assert found.nodes[0].parameters[0].requantisation.low == 128
    data = every_byte()
    expected = theirs(path, data)
    assert expected.min() == 0.0 and expected.max() > 1.0
    np.testing.assert_array_equal(ours(path, data), expected)


def test_an_activation_stays_apart_where_something_else_reads_the_bytes_before_it(tmp_path):
    graph = QuantisedGraph()
    before = graph.step(graph.add("Conv", graph.step("x", 0.05, 128), graph.weights(24, 16), name="conv"), 0.08, 128)
    after = graph.step(graph.add("Relu", before), 0.08, 128)
    path = graph.save(
        tmp_path / "q.onnx", graph.step(graph.add("Concat", before, after, axis=1), 0.08, 128), (1, 48, 4, 8)
    )
    others, layers, found = kinds(path)
    assert others.count("byte_table") == 1 and found.nodes[0].parameters[0].requantisation.low == 0
    np.testing.assert_array_equal(ours(path, every_byte()), theirs(path, every_byte()))


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_adds_its_result_as_first_or_second_operand(first, tmp_path):
    """Which of the two products FP32 rounds by itself shows in single bytes of a million."""
    shape = (1, 16, 64, 64)
    graph = QuantisedGraph()
    x = graph.step("x", 0.05003, 118)
    conv = graph.step(graph.add("Conv", x, graph.weights(16, 16), name="conv"), 0.0831, 121)
    total = graph.add("Add", *((conv, x) if first else (x, conv)))
    path = graph.save(tmp_path / "q.onnx", graph.step(total, 0.0917, 117), shape, data=shape)
    (node,) = kinds(path)[2].nodes
    assert node.parameters[0].requantisation.addition.own_last is first
    data = every_byte(shape=shape) + np.random.default_rng(0).integers(-20, 20, shape).astype(np.float32)
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))


def test_ties_are_rounded_to_even_when_floats_become_bytes(tmp_path):
    graph = QuantisedGraph()
    path = graph.save(tmp_path / "q.onnx", graph.step("x", 0.5, 10), SHAPE)
    data = (np.arange(512).reshape(SHAPE) * 0.25 - 4.0).astype(np.float32)
    np.testing.assert_array_equal(ours(path, data), theirs(path, data))
    np.testing.assert_array_equal(ours(path, data)[0, 0, 0, :3], [-4.0, -4.0, -3.5])
