"""Sequences and volumes: convolutions along one axis and three become those of images, and compute the same."""

# ruff: noqa: E402

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.relax.canonical.canonicalize import canonicalize
from fusion.relax.extract import extract_graph
from tests.fusion.relax_models import Net, assert_close, inputs_of, module, stock

SEQUENCE = (2, 6, 20)
VOLUME = (1, 4, 5, 6, 7)


def names(mod) -> list[str]:
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [value.op.name.removeprefix("relax.") for value in values if isinstance(value, relax.Call)]


def canonical(mod):
    """The canonical module, which computes what ``mod`` does."""
    found, arrays = canonicalize(mod), inputs_of(mod)
    assert_close(stock(found, arrays), stock(mod, arrays), 1e-3)
    return found


def channels(net: Net, count: int, rank: int) -> relax.Expr:
    return net.constant(1, count, *(1,) * (rank - 2))


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"strides": 2, "padding": (3, 1)},
        {"dilation": 3, "padding": 2},
        {"groups": 2},
        {"groups": 6},
    ],
)
def test_a_convolution_of_a_sequence_with_all_that_follows_is_one_kernel(attributes):
    def body(net, x):
        conv = op.nn.conv1d(x, net.weight(12, 6 // attributes.get("groups", 1), 3), **attributes)
        return op.nn.relu(net(op.add(net(conv), channels(net, 12, 3))))

    found = canonical(module(SEQUENCE, body))
    assert names(found) == ["reshape", "nn.conv2d", "add", "nn.relu", "reshape"]
    (node,) = extract_graph(found).nodes
    assert (
        node.operator.kernel == (1, 3) and node.operator.epilogue.bias and node.operator.epilogue.activation == "relu"
    )


def test_a_long_window_stands_upright():
    """Taps of a row are unrolled, rows are a loop."""
    found = canonical(module((1, 1, 300), lambda net, x: op.nn.conv1d(x, net.weight(8, 1, 100), strides=[50])))
    (node,) = extract_graph(found).nodes
    assert node.operator.kernel == (100, 1) and node.operator.stride == (50, 1)


def test_so_does_one_that_an_exporter_wrote_for_an_image_of_one_row():
    def body(net, x):
        conv = net(op.nn.conv2d(x, net.weight(8, 2, 1, 64), strides=[1, 16], padding=(0, 5, 0, 7)))
        return op.nn.relu(net(op.add(conv, channels(net, 8, 4))))

    found = canonical(module((1, 2, 1, 300), body))
    (node,) = extract_graph(found).nodes
    assert node.operator.kernel == (64, 1) and node.operator.padding == (5, 0, 7, 0)
    assert node.operator.epilogue.activation == "relu" and names(found)[-1] == "reshape"


def test_a_batch_norm_a_residual_and_the_next_layer_of_a_sequence_need_nothing_in_between():
    def body(net, x):
        first = net(op.nn.relu(net(op.nn.conv1d(x, net.weight(6, 6, 3), padding=1))))
        statistics = [net.constant(6), net.constant(6), net.constant(6), relax.const(np.ones(6, np.float32))]
        second = net(op.nn.conv1d(first, net.weight(6, 6, 5), padding=2))
        normal = net(relax.TupleGetItem(net(op.nn.batch_norm(second, *statistics, axis=1, training=False)), 0))
        return net(op.nn.relu(net(op.add(normal, first))))

    found = canonical(module(SEQUENCE, body))
    assert names(found) == ["reshape", "nn.conv2d", "nn.relu", "nn.conv2d", "add", "add", "nn.relu", "reshape"]
    assert [node.operator.epilogue.residual for node in extract_graph(found).nodes] == [None, "before_activation"]


def test_the_input_itself_is_a_residual():
    def body(net, x):
        return op.add(x, net(op.nn.conv1d(x, net.weight(6, 6, 3), padding=1)))

    assert extract_graph(canonical(module(SEQUENCE, body))).nodes[0].residual is not None


@pytest.mark.parametrize("pool", [op.nn.max_pool1d, op.nn.avg_pool1d])
@pytest.mark.parametrize("more", [{}, {"strides": 2, "padding": 1}, {"strides": 3, "ceil_mode": True}])
def test_pools_of_sequences(pool, more):
    def body(net, x):
        return pool(net(op.nn.relu(net(op.nn.conv1d(x, net.weight(6, 6, 3))))), pool_size=3, **more)

    found = canonical(module(SEQUENCE, body))
    assert len(extract_graph(found).nodes) == 2 and names(found)[-1] == "reshape"


def test_pads_means_gates_and_concatenations_of_sequences():
    def body(net, x):
        padded = net(op.nn.pad(x, [0, 0, 0, 0, 4, 0]))
        conv = net(op.nn.conv1d(padded, net.weight(8, 6, 5)))
        gate = net(op.sigmoid(net(op.mean(conv, axis=[2], keepdims=True))))
        gated = net(op.multiply(conv, gate))
        return op.concat([gated, conv], axis=1)

    found = canonical(module(SEQUENCE, body))
    assert names(found)[:2] == ["reshape", "nn.conv2d"]  # the pad is that of the convolution
    assert names(found)[-2:] == ["concat", "reshape"] and names(found).count("reshape") == 2


def test_what_is_no_view_of_an_image_stays_as_it_is():
    """Rows of a matrix product, reshaped: a sum with them is none of an image."""

    def body(net, x):
        rows = net(op.matmul(net(op.reshape(x, (2, 6, 4, 5))), net.weight(5, 5)))
        return op.add(net(op.reshape(rows, SEQUENCE)), x)

    assert names(canonical(module(SEQUENCE, body)))[-2:] == ["reshape", "add"]


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((3, 3, 3), {}),
        ((3, 3, 3), {"padding": (1, 1, 1, 1, 1, 1), "strides": (2, 1, 2)}),
        ((2, 3, 1), {"dilation": (2, 1, 1), "padding": (1, 0, 0, 0, 2, 0), "groups": 2}),
        ((1, 3, 3), {"padding": (0, 1, 1, 0, 1, 1)}),
        ((1, 1, 1), {"strides": (2, 2, 2)}),
        ((3, 1, 1), {"padding": (1, 0, 0, 1, 0, 0), "strides": (2, 1, 1)}),
        ((5, 6, 7), {}),
    ],
)
def test_a_convolution_of_a_volume_is_one_of_frames(kernel, attributes):
    def body(net, x):
        weight = net.weight(6, 4 // attributes.get("groups", 1), *kernel)
        conv = net(op.nn.conv3d(x, weight, **attributes))
        return op.nn.relu(net(op.add(conv, channels(net, 6, 5))))

    found = canonical(module(VOLUME, body))
    (node,) = extract_graph(found).nodes
    assert node.operator.epilogue.bias and node.operator.epilogue.activation == "relu"
    assert node.operator.kernel == ((3, 1) if kernel == (3, 1, 1) else kernel[1:])


def test_batches_of_volumes_and_layers_in_a_row():
    """R(2+1)D: frames, then rows of frames; between two of frames nothing is moved."""

    def body(net, x):
        conv = net(op.nn.conv3d(x, net.weight(5, 3, 1, 3, 3), padding=(0, 1, 1, 0, 1, 1)))
        conv = net(op.nn.conv3d(net(op.nn.relu(conv)), net.weight(4, 5, 1, 3, 3), padding=(0, 1, 1, 0, 1, 1)))
        return op.nn.conv3d(net(op.nn.relu(conv)), net.weight(6, 4, 3, 1, 1), padding=(1, 0, 0, 1, 0, 0))

    found = canonical(module((2, 3, 4, 6, 6), body))
    assert len(extract_graph(found).nodes) == 3
    before = names(found)[: names(found).index("nn.conv2d")]
    between = names(found)[names(found).index("nn.conv2d") + 1 :]
    assert before == ["permute_dims", "reshape"] and between[:2] == ["nn.relu", "nn.conv2d"]


@pytest.mark.parametrize("stride", [1, 2])
def test_frames_stay_where_they_are_from_layer_to_layer(stride):
    """Of a single volume: all kinds of windows, depthwise ones tap by tap, a gate, a residual, a pool and the mean."""

    def body(net, x):
        def conv(x, out, *window, **options):
            options.setdefault("padding", tuple(size // 2 for size in window) * 2)
            weight = net.weight(out, int(x.ty.shape[1]) // options.get("groups", 1), *window)
            return net(op.add(net(op.nn.conv3d(x, weight, **options)), channels(net, out, 5)))

        x = net(op.nn.relu(conv(x, 8, 1, 3, 3)))
        y = conv(net(op.nn.relu(conv(x, 12, 1, 1, 1))), 12, 3, 3, 3, groups=12, strides=(stride, 1, 1))
        y = net(op.multiply(y, net(op.sigmoid(conv(net(op.mean(y, [2, 3, 4], True)), 12, 1, 1, 1)))))
        y = conv(net(op.nn.silu(y)), 8, 1, 1, 1)
        x = net(op.add(x, y)) if stride == 1 else y
        x = net(op.nn.max_pool3d(conv(x, 8, 3, 3, 3), (2, 2, 2), (2, 2, 2), (1, 0, 1, 1, 1, 0)))
        return net(op.mean(conv(x, 8, 3, 1, 1), [2, 3, 4]))

    found = canonical(module(VOLUME, body))
    assert names(found).count("permute_dims") == 1 and names(found).index("permute_dims") == 0
    assert "nn.conv3d" not in names(found) and "nn.max_pool3d" not in names(found)
