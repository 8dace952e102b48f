"""Networks with layers stored in bfloat16: exact where all values have few digits, as near as rounding else."""

# ruff: noqa: E402

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.case_lists import one_in

tvm = pytest.importorskip("tvm")
ml_dtypes = pytest.importorskip("ml_dtypes")
from tvm import relax
from tvm.relax import op

from fusion.model.conv_graph import BFLOAT16, layers_in, precision_of
from fusion.relax.kernels.layouts import blocked_to_rows, rows_to_blocked, to_blocked, to_plain
from fusion.relax.kernels.reductions import GroupNorm2d, channel_statistics, group_norm, statistics_shape
from schedules.contract.kernel_compilation import compile_kernel
from schedules.contract.template import block, unblock
from tests.fusion.bfloat16_models import CPU, EMULATED, HOST, casts, compiled, lowered, rounded_graph, whole_numbers
from tests.fusion.relax_models import inputs_of, kernel_names, module, stock

LANES = CPU.lanes
DTYPES = ("float32", BFLOAT16)


class Whole:
    """Layers with few small whole numbers as weights, so that no sum needs more than the 8 digits of bfloat16."""

    def __init__(self, net) -> None:
        self.net = net
        self.random = np.random.default_rng(3)

    def weight(self, *shape: int):
        """Two ones, one of them negative perhaps, for every output."""
        array = np.zeros(shape, np.float32)
        flat = array.reshape(shape[0], -1)
        for row in flat:
            row[self.random.integers(flat.shape[1], size=2)] = self.random.choice([-1.0, 1.0], 2)
        return relax.const(array)

    def conv(self, x, out: int, kernel: int = 1, name: str = "", groups: int = 1, **attributes):
        attributes.setdefault("padding", (kernel // 2,) * 4)
        channels = int(x.ty.shape[1])
        weight = self.weight(out, channels // groups, kernel, kernel)
        result = self.net(op.nn.conv2d(x, weight, groups=groups, **attributes), name)
        bias = self.random.integers(-2, 3, (1, out, 1, 1)).astype(np.float32)
        return self.net(op.add(result, relax.const(bias)))

    def small(self, x):
        """From 0 to 6."""
        return self.net(op.clip(x, 0, 6))


def mobile(net, x):
    """Odd channels: a stem, a strided depthwise pair, an inverted residual, a classifier of the maximum."""
    whole = Whole(net)
    x = whole.small(whole.conv(x, 24, 3, "stem", strides=(2, 2)))
    x = whole.small(whole.conv(whole.small(whole.conv(x, 24, 3, "dw", groups=24, strides=(2, 2))), 37, 1, "pw"))
    inner = whole.small(whole.conv(x, 72, 1, "expand"))
    inner = whole.small(whole.conv(inner, 72, 5, "dw5", groups=72))
    x = net(op.add(whole.conv(inner, 37, 1, "project"), x))
    pooled = net(op.reshape(net(op.max(x, [2, 3], True)), (int(x.ty.shape[0]), 37)))
    return net(op.matmul(pooled, relax.const(np.eye(37, 10, dtype=np.float32))), "fc")


def residual(net, x):
    """Two results, one of them from the middle; a pooled branch and a strided shortcut."""
    whole = Whole(net)
    x = whole.small(whole.conv(x, 20, 7, "stem", strides=(2, 2)))
    pooled = net(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)))
    shortcut = whole.conv(pooled, 40, 1, "shortcut", strides=(2, 2))
    inner = whole.small(whole.conv(pooled, 24, 3, "inner", strides=(2, 2)))
    return net(op.nn.relu(net(op.add(whole.conv(inner, 40, 1, "outer"), shortcut)))), inner


def shuffled(net, x):
    """Channels split, shuffled and concatenated; an image twice as large; what no template computes."""
    whole = Whole(net)
    x = whole.small(whole.conv(x, 44, 1, "first"))
    parts = net(op.split(x, [12], axis=1))
    left, right = net(relax.TupleGetItem(parts, 0)), net(relax.TupleGetItem(parts, 1))
    x = net(op.concat([whole.small(whole.conv(right, 20, 3, "branch")), left], axis=1))
    height, width = int(x.ty.shape[2]), int(x.ty.shape[3])
    apart = net(op.reshape(x, (1, 4, 8, height, width)))
    x = net(op.reshape(net(op.permute_dims(apart, [0, 2, 1, 3, 4])), (1, 32, height, width)))
    large = net(op.image.resize2d(x, (2 * height, 2 * width), method="nearest_neighbor", rounding_method="floor",
                                  coordinate_transformation_mode="asymmetric"))  # fmt: skip
    large = net(op.maximum(net(op.negative(large)), net(op.multiply(large, relax.const(0.5, "float32")))))
    return whole.conv(large, 9, 3, "last")


NETWORKS = {
    "mobile": ((1, 3, 17, 15), mobile),
    "mobile, two images": ((2, 3, 16, 18), mobile),
    "residual": ((2, 3, 29, 21), residual),
    "shuffled": ((1, 18, 5, 7), shuffled),
}


@pytest.mark.parametrize(
    ("name", "fused"),
    one_in(
        2,
        [
            ("mobile", True),
            ("mobile, two images", True),
            ("residual", True),
            ("residual", False),
            ("shuffled", False),
            ("shuffled", True),
        ],
    ),  # fmt: skip
)
def test_whole_numbers_are_computed_exactly(name, fused):
    """In bfloat16 from end to end; inputs and results are of float32."""
    mod = module(*NETWORKS[name])
    result = lowered(mod, fused)
    relax.analysis.well_formed(result)
    arrays = whole_numbers(mod)
    for ours, expected in zip(compiled(result)(*arrays), stock(mod, arrays), strict=True):
        assert ours.dtype == np.float32 and np.abs(expected).max() > 1
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("keep", [("stem", "fc", "pw"), ("dw", "expand", "dw5", "project")])
def test_layers_that_stay_in_float32_are_between_conversions(keep):
    mod = module((1, 3, 17, 15), mobile)
    graph = rounded_graph(mod, keep)
    assert precision_of(graph) == "mixed" and not any(
        part in each for part in keep for each in layers_in(graph, BFLOAT16)
    )
    arrays = whole_numbers(mod)
    np.testing.assert_array_equal(compiled(lowered(mod, keep=keep))(*arrays)[0], stock(mod, arrays)[0])


def test_between_kernels_of_one_number_type_nothing_is_converted():
    names = kernel_names(result := lowered(module((1, 3, 17, 15), mobile)))
    assert not [name for name in names if name.startswith(("to_blocked", "to_plain"))]
    assert len(casts(result)) == 2  # the image, and what the classifier gives


def test_a_tensor_is_converted_once_for_all_that_read_it():
    def body(net, x):
        whole = Whole(net)
        x = whole.small(whole.conv(x, 24, 3, "stem"))
        return net(op.add(whole.conv(x, 40, 1, "one"), whole.conv(x, 40, 3, "other")))

    assert len(casts(lowered(module((1, 16, 9, 9), body), keep=("stem",)))) == 1
    assert len(casts(lowered(module((1, 16, 9, 9), body), keep=("one", "other")))) == 1


def test_values_between_kernels_have_8_digits():
    """Rounded once where they are stored, summed in float32: nearer than two roundings, further than none."""

    def body(net, x):
        return net.conv(net.relu6(net.conv(x, 40, 3)), 24)

    mod = module((1, 16, 9, 7), body)
    arrays = inputs_of(mod)
    ours, expected = compiled(lowered(mod))(*arrays)[0], stock(mod, arrays)[0]
    error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
    assert 2.0**-11 < error < 2.0**-7
    np.testing.assert_array_equal(ours, ours.astype(ml_dtypes.bfloat16).astype(np.float32))


# --- kernels of layouts ----------------------------------------------------------------------------


def run(function, *arrays: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    output = np.full(shape, 7, numpy_type(dtype))
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, output)]
    cpu = CPU if not EMULATED else HOST
    compile_kernel(function, cpu, emulated=EMULATED)(*tensors)
    return tensors[-1].numpy()


def numpy_type(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == BFLOAT16 else dtype)


SHAPES = [(1, 2 * LANES, 9, 7), (2, 19, 5, 5), (1, 40, 1, 1), (1, 3, 3, 4)]


@pytest.mark.parametrize(("shape", "source", "target"), one_in(2, itertools.product(SHAPES, DTYPES, DTYPES)))
def test_layouts_and_number_types_change_in_one_kernel(shape, source, target):
    array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(numpy_type(source))
    blocked = block(array, LANES).astype(numpy_type(target))
    made = run(to_blocked(shape, LANES, source, target), array, shape=blocked.shape, dtype=target)
    np.testing.assert_array_equal(made, blocked)
    plain = array.astype(numpy_type(target))
    made = run(to_plain(shape, LANES, source, target), block(array, LANES), shape=shape, dtype=target)
    np.testing.assert_array_equal(made, plain)
    np.testing.assert_array_equal(unblock(blocked, shape[1]), plain)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_read_from_blocked_images_of_any_number_type(shape, source):
    array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(numpy_type(source))
    rows = np.ascontiguousarray(array.reshape(*shape[:2], -1).transpose(0, 2, 1))
    made = run(blocked_to_rows(shape, LANES, source), block(array, LANES), shape=rows.shape, dtype="float32")
    np.testing.assert_array_equal(made, rows.astype(np.float32))
    blocked = block(array.astype(np.float32), LANES)
    made = run(rows_to_blocked(shape, LANES, source), rows, shape=blocked.shape, dtype="float32")
    np.testing.assert_array_equal(made, blocked)


def test_group_norms_of_bfloat16_are_computed_in_float32():
    norm = GroupNorm2d((1, 2 * LANES, 9, 7), 4, 1e-5)
    array = np.random.default_rng(0).standard_normal(norm.shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
    constants = np.stack([np.full((2, LANES), 2.0), np.full((2, LANES), 3.0)]).astype(np.float32)
    data, shape = block(array, LANES), statistics_shape(norm, CPU)
    statistics = run(channel_statistics(norm, CPU, BFLOAT16), data, shape=shape, dtype="float32")
    made = run(group_norm(norm, CPU, BFLOAT16), data, statistics, constants, shape=data.shape, dtype=BFLOAT16)
    grouped = array.astype(np.float64).reshape(1, 4, -1)
    unit = (grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)
    expected = unit.reshape(norm.shape) * 2 + 3
    np.testing.assert_allclose(unblock(made, norm.shape[1]).astype(np.float64), expected, rtol=2.0**-8, atol=1e-4)
