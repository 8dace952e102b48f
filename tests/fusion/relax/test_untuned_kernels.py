"""Kernels that are not tuned, of what no template computes: rows, resizing, group norms; taken in, and right."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.relax import extract
from fusion.relax.canonical.canonicalize import canonicalize
from fusion.relax.extract import extract_graph
from fusion.relax.kernels.resize import Resize2d
from tests.case_lists import one_in
from tests.fusion.lowered_models import check, check_canonical, conversions
from tests.fusion.relax_models import CPU, module


def reasons(mod) -> set[str]:
    return {other.reason for other in extract_graph(mod).others}


# Rows of whole vectors, of parts, shorter than one; enough of them for several tasks, and too few.
@pytest.mark.parametrize("shape", [(2, 70, 64), (3, 37, 49), (1, 1000), (5, 1, 7), (2, 3, 4, 33)])
def test_softmax_along_rows(shape):
    mod = module(shape, lambda net, x: net(op.nn.softmax(net(op.multiply(x, relax.const(9.0))), axis=-1)))
    assert any(name.startswith("row_softmax") for name in check(mod))
    assert extract.ROWS in reasons(mod)


def test_softmax_of_large_values():
    """The maximum is taken off first."""
    check(module((3, 21), lambda net, x: net(op.nn.softmax(net(op.multiply(x, relax.const(1e4))), axis=-1))))


# Columns of whole vectors, of parts, and one part; enough of them for several tasks.
@pytest.mark.parametrize("shape", [(1, 5, 6, 7), (2, 3, 40, 65), (2, 19, 4), (3, 2, 1, 130)])
def test_softmax_along_columns(shape):
    """Over the channels of images, as networks for segmentation end."""
    mod = module(shape, lambda net, x: net(op.nn.softmax(net(op.multiply(x, relax.const(30.0))), axis=1)))
    assert any(name.startswith("column_softmax") for name in check(mod))
    assert extract.ROWS in reasons(mod)


def test_softmax_of_few_columns_stays_as_it_is():
    names = check(module((2, 9, 3), lambda net, x: net(op.nn.softmax(x, axis=1))))
    assert "relax.nn.softmax" in names


@pytest.mark.parametrize("shape", [(2, 70, 64), (3, 37, 49), (1, 768), (9, 6)])
def test_layer_norm_along_rows(shape):
    def body(net, x):
        far = net(op.add(x, relax.const(100.0)))  # a mean that costs digits where squares are summed
        return net(op.nn.layer_norm(far, net.constant(shape[-1]), net.constant(shape[-1]), axes=[-1], epsilon=1e-6))

    assert any(name.startswith("row_norm") for name in check(module(shape, body)))


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 50, 16), (2, 16, 50)), ((1, 4, 49, 24), (1, 4, 24, 49)), ((3, 65, 33), (3, 33, 7)), ((1, 300), (300, 40))],
)
def test_products_of_two_tensors(left, right):
    mod = module(left, lambda net, x, y: net(op.matmul(x, y)), right)
    assert any(name.startswith("batched_product") for name in check(mod))
    assert reasons(mod) == {extract.ROWS}


@pytest.mark.parametrize(
    ("left", "right"), [((2, 4, 5), (2, 5, 4)), ((3, 64, 64), (1, 64, 64)), ((2, 64, 64), (2, 64, 2))]
)
def test_products_that_are_small_or_broadcast_stay_as_they_are(left, right):
    names = check(module(left, lambda net, x, y: net(op.matmul(x, y)), right))
    assert not any(name.startswith("batched_product") for name in names)


def test_attention_of_an_image():
    """As MobileViT and EdgeNeXt have it: channels-last rows of pixels between two convolutions."""

    def body(net, x):
        x = net.conv(x, 48)
        rows = net(op.permute_dims(net(op.reshape(x, (1, 2, 24, 63))), [0, 1, 3, 2]))
        scores = net(op.matmul(rows, net(op.permute_dims(rows, [0, 1, 3, 2]))))
        mixed = net(op.matmul(net(op.nn.softmax(scores, axis=-1)), rows))
        return net.conv(net(op.reshape(net(op.permute_dims(mixed, [0, 1, 3, 2])), (1, 48, 9, 7))), 16)

    names = check(module((1, 16, 9, 7), body))
    assert sum(name.startswith("batched_product") for name in names) == 2
    assert sum(name.startswith("row_softmax") for name in names) == 1


WAYS = [
    ((18, 21), {"coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}),
    ((18, 14), {"coordinate_transformation_mode": "half_pixel", "rounding_method": "round_prefer_floor"}),
    ((12, 5), {"coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}),
    ((5, 20), {"coordinate_transformation_mode": "half_pixel", "rounding_method": "round_prefer_ceil"}),
    ((18, 14), {"coordinate_transformation_mode": "half_pixel", "method": "linear"}),
    ((31, 5), {"coordinate_transformation_mode": "half_pixel", "method": "linear"}),
    ((20, 17), {"coordinate_transformation_mode": "align_corners", "method": "linear"}),
    ((2, 13), {"coordinate_transformation_mode": "align_corners", "method": "linear"}),
    ((27, 4), {"coordinate_transformation_mode": "asymmetric", "method": "linear"}),
    ((3, 14), {"coordinate_transformation_mode": "pytorch_half_pixel", "method": "linear"}),
    ((18, 14), {"coordinate_transformation_mode": "half_pixel", "method": "cubic", "cubic_alpha": -0.75}),
    ((31, 5), {"coordinate_transformation_mode": "align_corners", "method": "cubic", "cubic_alpha": -0.5}),
    ((4, 20), {"coordinate_transformation_mode": "asymmetric", "method": "cubic", "cubic_alpha": -0.75}),
]


def resized(size, way, channels=24, batch=1):
    def body(net, x):
        x = net(op.image.resize2d(net.conv(x, channels), size, layout="NCHW", **{"method": "nearest_neighbor", **way}))
        return net(op.mean(net.conv(x, 16), [2, 3], True))

    return module((batch, 16, 9, 7), body)


@pytest.mark.parametrize(("size", "way"), one_in(2, WAYS))
def test_an_image_is_resized_in_the_blocked_layout(size, way):
    mod = resized(size, way, batch=2)
    names = check(mod)
    assert any(name.startswith("resize") for name in names)
    # One pixel each: what the network is given and what it gives.
    assert len([name for name in conversions(names) if "to_blocked" in name]) == 1
    assert extract.RESIZED in reasons(mod)


@pytest.mark.parametrize(
    "bounds",
    [
        ([2], [1], [8], None),
        ([2, 3], [0, 0], [8, -1], None),
        ([-1], [0], [2**31 - 1], [2]),
        ([3, 2], [1, 0], [7, 9], [3, 2]),
    ],
)
def test_rows_and_columns_are_taken_in_the_blocked_layout(bounds):
    """Crops, and every other pixel."""
    axes, begin, end, step = bounds

    def body(net, x):
        x = net(op.strided_slice(net.conv(x, 24), axes, begin, end, step))
        return net(op.mean(net.conv(x, 16), [2, 3], True))

    mod = module((2, 16, 9, 7), body)
    names = check(mod)
    assert any(name.startswith("slice") for name in names)
    assert len([name for name in conversions(names) if "to_blocked" in name]) == 1
    assert extract.RESIZED in reasons(mod)


def test_positions_that_lie_on_pixels_are_those_pixels():
    """(7 - 1) / (19 - 1) is a third, which no float is: every third position is a pixel nevertheless."""
    positions, weights = Resize2d((1, 1, 7, 7), (19, 19), "linear", "align_corners").taps(0)
    assert np.array_equal(positions[0, ::3], np.arange(7)) and not weights[1, ::3].any()


def test_cubic_weights_are_those_of_keys():
    """Half-way between two pixels (-1, 9, 9, -1) / 16 with alpha -1/2; outside of the image the outermost, or none."""
    positions, weights = Resize2d((1, 1, 4, 4), (8, 8), "cubic", "asymmetric", cubic_alpha=-0.5).taps(0)
    assert positions[:, 3].tolist() == [0, 1, 2, 3] and (16 * weights[:, 3]).tolist() == [-1, 9, 9, -1]
    assert positions[:, 1].tolist() == [0, 0, 1, 2] and weights.sum(axis=0).tolist() == [1.0] * 8
    _, weights = Resize2d((1, 1, 4, 4), (8, 8), "cubic", "asymmetric", "", -0.5, cubic_exclude=True).taps(0)
    assert np.allclose(weights[:, 1], np.array([0, 9, 9, -1]) / 17)


def group_normed(shape, groups, taken_apart):
    """A group norm, whole or as PyTorch exports one at opset 17."""

    def body(net, x):
        x = net.conv(x, shape[1], 3)
        if not taken_apart:
            weights = net.constant(shape[1]), net.constant(shape[1])
            x = net(op.nn.group_norm(x, *weights, groups, channel_axis=1, axes=[2, 3], epsilon=1e-5))
        else:
            ones, zeros = (relax.const(np.full(groups, value, np.float32)) for value in (1.0, 0.0))
            rows = net(op.reshape(x, (shape[0], groups, shape[1] * shape[2] * shape[3] // groups)))
            rows = net(op.nn.group_norm(rows, ones, zeros, groups, channel_axis=1, axes=[2], epsilon=1e-5))
            x = net(op.multiply(net(op.reshape(rows, shape)), net.constant(shape[1], 1, 1)))
            x = net(op.add(x, net.constant(shape[1], 1, 1)))
        return net(op.mean(net.conv(x, 16), [2, 3], True))

    return module((shape[0], 8, *shape[2:]), body)


# Instance norm; groups inside a vector, of one, of two; few pixels and several bands of them.
@pytest.mark.parametrize(
    ("taken_apart", "shape", "groups"),
    [
        (False, (2, 24, 9, 7), 24),
        (True, (1, 20, 33, 21), 5),
        (True, (1, 4 * CPU.lanes, 23, 19), 2),
        (False, (2, 2 * CPU.lanes, 3, 1), 2),
    ],
)
def test_group_norms_run_on_blocked_tensors(shape, groups, taken_apart):
    mod = group_normed(shape, groups, taken_apart)
    names = check_canonical(mod)
    assert {"channel_statistics", "group_norm"} <= {name.rstrip("0123456789") for name in names}
    assert not any(name.startswith(("relax.nn.group_norm", "multiply", "relax.multiply")) for name in names)
    assert extract.NORMALISED in reasons(canonicalize(mod))


def test_groups_that_straddle_vectors_stay_as_they_are():
    names = check_canonical(group_normed((1, 24, 5, 6), 2, False))
    assert not any(name.startswith("channel_statistics") for name in names)


@pytest.mark.parametrize("slopes", [1, 24])
def test_a_parametric_relu_alone_runs_on_blocked_tensors(slopes):
    def body(net, x):
        x = net.conv(x, 24)
        bent = net(op.nn.prelu(x, net.constant(slopes), axis=1 if slopes > 1 else 3))
        return net(op.mean(net.conv(net(op.add(bent, net(op.nn.relu(x)))), 16), [2, 3], True))

    names = check(module((1, 16, 9, 7), body))
    assert not any("prelu" in name for name in names) and len(conversions(names)) == 1


def test_one_dimension_is_an_image_of_one_row():
    """Convolutions with strides, dilations and groups, their norms and activations, a residual, pools, the mean."""

    def body(net, x):
        def conv(x, out, taps, **options):
            weight = net.weight(out, int(x.ty.shape[1]) // options.get("groups", 1), taps)
            x = net(op.nn.conv1d(x, weight, **options))
            return net(op.add(net(op.multiply(x, net.constant(1, out, 1))), net.constant(1, out, 1)))

        x = net(op.nn.relu(conv(x, 24, 7, strides=2, padding=(3, 3))))
        x = net(op.nn.max_pool1d(x, 3, 2, (1, 1)))
        y = conv(net(op.nn.silu(conv(x, 40, 3, padding=(2, 2), dilation=2))), 24, 1)
        x = net(op.add(y, conv(x, 24, 5, padding=(2, 2), groups=24)))
        return net(op.mean(net(op.nn.avg_pool1d(x, 2, 2)), [2]))

    mod = module((2, 16, 65), body)
    names = check_canonical(mod)
    templates = ("conv", "depthwise", "line", "pointwise", "pool", "to_")
    assert {name for name in names if not name.startswith(templates)} <= {"relax.reshape"}
    assert not reasons(canonicalize(mod)) - {extract.MOVES}


def test_a_convolution_of_one_dimension_with_a_computed_filter_stays_as_it_is():
    mod = module((1, 8, 20), lambda net, x, w: net(op.nn.conv1d(x, w)), (4, 8, 3))
    assert "relax.nn.conv1d" in check_canonical(mod)


@pytest.mark.parametrize("crd", [True, False])
def test_what_follows_a_pixel_shuffle_is_done_before_it(crd):
    """Bias, scale and parametric ReLU belong to the convolution then; ONNX's two orders of channels."""

    def body(net, x):
        x = net.conv(x, 4 * 12, 3)
        factors, order = ((12, 2, 2), [0, 1, 4, 2, 5, 3]) if crd else ((2, 2, 12), [0, 3, 4, 1, 5, 2])
        x = net(op.permute_dims(net(op.reshape(x, (1, *factors, 6, 5))), order))
        x = net(op.add(net(op.reshape(x, (1, 12, 12, 10))), net.constant(12, 1, 1)))
        return net.conv(net(op.nn.prelu(x, net.constant(12), axis=1)), 8, 3)

    mod = module((1, 16, 6, 5), body)
    names = check_canonical(mod)
    assert not any("prelu" in name or name.startswith(("relax.add", "add")) for name in names)
    first = extract_graph(canonicalize(mod)).nodes[0]
    assert first.operator.epilogue.activation == "prelu" and first.parameters[0].slopes.shape == (48,)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_an_image_is_padded_with_its_own_pixels_in_the_blocked_layout(mode):
    """As networks for style and super-resolution do, before nearly every convolution."""

    def body(net, x):
        x = net(op.nn.pad(net.conv(x, 24), (0, 0, 0, 0, 1, 2, 3, 0), mode))
        return net(op.mean(net.conv(x, 16, 3, padding=(0, 0, 0, 0)), [2, 3], True))

    mod = module((2, 16, 9, 7), body)
    names = check(mod)
    assert any(name.startswith("mirror_pad") for name in names) and len(conversions(names)) == 1
    assert reasons(mod) == {extract.RESIZED}


@pytest.mark.parametrize(
    ("channels", "flat"), [(2 * CPU.lanes, True), (2 * CPU.lanes + 5, False), (CPU.lanes // 2 + 1, True)]
)
def test_rows_of_pixels_and_blocked_images_are_copies_of_each_other(channels, flat):
    """From a convolution to tokens and back (PVT, MobileViT): nothing is transposed."""

    def body(net, x):
        x = net.conv(x, channels)
        if flat:
            rows = net(op.permute_dims(net(op.reshape(x, (2, channels, 77))), [0, 2, 1]))
            rows = net(op.nn.softmax(rows, axis=-1))
            x = net(op.reshape(net(op.permute_dims(rows, [0, 2, 1])), (2, channels, 7, 11)))
        else:
            rows = net(op.exp(net(op.permute_dims(x, [0, 2, 3, 1]))))
            x = net(op.permute_dims(rows, [0, 3, 1, 2]))
        return net(op.mean(net.conv(x, 24), [2, 3], True))

    names = check(module((2, 16, 7, 11), body))
    assert sum(name.startswith("blocked_to_rows") for name in names) == 1
    assert sum(name.startswith("rows_to_blocked") for name in names) == 1
    assert "relax.permute_dims" not in names and len(conversions(names)) == 1


def test_other_transpositions_stay_as_they_are():
    """Columns before rows; rows of which no convolution reads the image."""

    def body(net, x):
        x = net.conv(x, 24)
        turned = net(op.permute_dims(x, [0, 3, 2, 1]))
        other = net(op.reshape(net(op.permute_dims(net(op.reshape(x, (1, 12, 154))), [0, 2, 1])), (1, 12, 14, 11)))
        return turned, net.conv(other, 8)

    names = check(module((1, 16, 7, 11), body))
    assert not any("rows" in name for name in names)


@pytest.mark.parametrize("half", [CPU.lanes, CPU.lanes + 3])
def test_a_gate_reads_the_halves_of_a_layer_where_they_lie(half):
    """Gated linear units: whole blocks of channels are no copy, others are one kernel."""

    def body(net, x):
        x = net.conv(x, 2 * half)
        parts = [net(op.strided_slice(x, [1], [first], [first + half])) for first in (0, half)]
        return net(op.mean(net.conv(net(op.multiply(parts[0], net(op.sigmoid(parts[1])))), 16), [2, 3], True))

    names = check(module((2, 16, 9, 7), body))
    assert len(conversions(names)) == 1
    assert any(name.startswith("channel_move") for name in names) == bool(half % CPU.lanes)


def test_channels_that_are_looked_up_are_moved():
    """As networks do that learned which channels a group reads."""
    order = np.random.default_rng(0).permutation(40)[:24]

    def body(net, x):
        x = net(op.take(net.conv(x, 40), relax.const(order, "int64"), axis=1))
        return net(op.mean(net.conv(x, 16, groups=4), [2, 3], True))

    mod = module((2, 16, 9, 7), body)
    names = check(mod)
    assert any(name.startswith("channel_move") for name in names) and len(conversions(names)) == 1
    assert extract.CHANNELS in reasons(mod)


@pytest.mark.parametrize("channels", [CPU.lanes, 24])
def test_zeros_around_an_image_and_behind_its_channels(channels):
    """Where no convolution can take them in; beyond the last channel only whole blocks can follow."""

    def body(net, x):
        x = net.conv(x, channels)
        wide = net(op.nn.pad(x, (0, 0, 0, 20, 1, 0, 2, 1)))
        return net(op.mean(net.conv(net(op.nn.silu(wide)), 16), [2, 3], True)), net.conv(x, 8)

    names = check(module((2, 16, 9, 7), body))
    assert len([name for name in conversions(names) if "to_blocked" in name]) == (2 if channels % CPU.lanes else 1)


@pytest.mark.parametrize(
    ("weight", "options"),
    [((6, 8, 3, 3), {"padding": (1, 0, 1, 2), "strides": (2, 1)}), ((6, 4, 2, 3), {"groups": 2, "dilation": (2, 1)})],
)
def test_convolutions_with_computed_weights_are_products(weight, options):
    """Two images that share their weights; weights that other layers make, cross-correlation, pointwise ones."""

    def body(net, x, w):
        return net(op.nn.conv2d(net(op.nn.relu(x)), net(op.multiply(w, relax.const(0.5))), **options))

    names = check_canonical(module((2, 8, 17, 15), body, weight))
    assert not any("conv2d" in name for name in names)


def test_a_convolution_that_is_subtracted_is_added():
    """Complex convolutions: the sum of two is what a kernel computes behind its own."""

    def body(net, x, y):
        return net.conv(net(op.subtract(net.conv(x, 24, 3), net.conv(y, 24, 3))), 8)

    names = check_canonical(module((1, 16, 9, 7), body, (1, 16, 9, 7)))
    assert not any(name.startswith(("subtract", "relax.subtract", "add", "relax.add")) for name in names)


def test_a_gate_that_was_expanded_is_a_gate():
    """Written with ``expand_as``: the factors are repeated for every pixel before the product."""

    def body(net, x):
        x = net.conv(x, 24, 3)
        gate = net(op.sigmoid(net.conv(net(op.mean(x, [2, 3], True)), 24)))
        return net.conv(net(op.multiply(x, net(op.broadcast_to(gate, (1, 24, 9, 7))))), 8)

    mod = module((1, 16, 9, 7), body)
    check_canonical(mod)
    assert extract_graph(canonicalize(mod)).nodes[-1].operator.gated


def test_a_transposed_convolution_of_a_sequence_and_what_reads_it():
    """Vocoders: a bias, then several branches; phases become columns of a blocked image."""

    def body(net, x):
        x = net(op.nn.conv1d_transpose(x, net.constant(16, 24, 8), strides=4, padding=(2, 2)))
        x = net(op.add(x, net.constant(1, 24, 1)))
        parts = []
        for taps in (3, 5):
            pads = [0, 0, 0, 0, taps // 2, taps // 2]
            wide = net(op.nn.pad(net(op.nn.leakyrelu(x, 0.1)), pads, "reflect"))
            parts.append(net(op.nn.conv1d(wide, net.weight(24, 24, taps))))
        return net(op.nn.conv1d(net(op.add(*parts)), net.weight(4, 24, 1)))

    names = check_canonical(module((1, 16, 19), body))
    kept = {name.rstrip("0123456789") for name in names if name.startswith("relax.")}
    assert kept <= {"relax.reshape", "relax.nn.leakyrelu"}, names
    assert any(name.startswith("mirror_pad") for name in names)
    assert any(name.startswith("channel_move") for name in names)
