"""Networks that are written channels-last, with transpositions around every convolution: none of them is left."""

from __future__ import annotations

import pytest

pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.relax.canonical.canonicalize import canonicalize
from tests.fusion.relax_models import assert_close, inputs_of, module, stock

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
SHAPE = (2, 6, 7, 4)


def calls(mod) -> list[str]:
    """The operators of ``mod`` in order, without what only changes a shape."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    names = [value.op.name.removeprefix("relax.") for value in values if isinstance(value, relax.Call)]
    return [name.removeprefix("nn.") for name in names if name != "relax.reshape"]


def canonical(mod) -> list[str]:
    """The operators of the canonical form, which computes what ``mod`` does."""
    result = canonicalize(mod)
    arrays = inputs_of(mod)
    assert_close(stock(result, arrays), stock(mod, arrays))
    return [name for name in calls(result) if name != "reshape"]


def conv(net, x, out, kernel=1, **attributes):
    """A convolution of an NHWC image as exporters from TensorFlow write one, its bias channels-last."""
    first = net(op.permute_dims(x, FIRST))
    result = net.conv(first, out, kernel, bias=False, **attributes)
    return net(op.add(net(op.permute_dims(result, LAST)), net.constant(out)))


def swish(net, x):
    return net(op.multiply(x, net(op.sigmoid(x))))


def hard_swish(net, x):
    gate = net(op.minimum(net(op.maximum(net(op.add(x, relax.const(3.0))), relax.const(0.0))), relax.const(6.0)))
    return net(op.multiply(net(op.multiply(x, gate)), relax.const(1 / 6)))


@pytest.mark.parametrize("activation", [pytest.param(swish, marks=pytest.mark.thorough), hard_swish])
def test_a_block_with_squeeze_and_excite(activation):
    """What reads a transposed tensor twice, and a gate of (N, 1, 1, C) that is made of means and two convolutions."""

    def body(net, x):
        x = activation(net, conv(net, x, 8, 3))
        y = activation(net, conv(net, x, 8, 5, groups=8))
        gate = activation(net, conv(net, net(op.mean(y, [1, 2], True)), 4))
        y = net(op.multiply(y, net(op.sigmoid(conv(net, gate, 8)))))
        return net(op.mean(net(op.add(x, conv(net, y, 8))), [1, 2]))

    names = canonical(module(SHAPE, body))
    assert names.count("permute_dims") == 1, "but the input itself"
    assert names.count("conv2d") == 5 and "clip" in names or "silu" in names


def test_a_layer_that_two_read_is_computed_once():
    """Its scale, channels-last, may not go into the weights of what something else reads too."""

    def body(net, x):
        y = net(op.permute_dims(net.conv(net(op.permute_dims(x, FIRST)), 8, bias=False), LAST))
        scaled = net(op.multiply(y, net.constant(8)))
        return conv(net, net(op.add(net(op.nn.relu(y)), net(op.tanh(scaled)))), 4)

    assert canonical(module(SHAPE, body)).count("conv2d") == 2


def test_pads_belong_to_the_convolution_behind_them():
    """Of the input, which is scaled first, and of a layer."""

    def body(net, x):
        x = net(op.subtract(net(op.multiply(x, relax.const(0.5))), net.constant(4)))
        x = conv(net, net(op.nn.pad(x, [0, 0, 0, 1, 0, 1, 0, 0])), 8, 3, strides=(2, 2), padding=(0,) * 4)
        x = net(op.nn.relu(net(op.nn.pad(x, [0, 0, 1, 2, 0, 1, 0, 0]))))
        return conv(net, x, 8, 3, padding=(0,) * 4)

    names = canonical(module(SHAPE, body))
    assert names.count("permute_dims") == 2, "the input, and the result"
    assert names.index("permute_dims") == 0 and "pad" in names, "a pad stays behind a bias and before an activation"


def test_branches_are_concatenated_sliced_and_split():
    def body(net, x):
        a, b = conv(net, x, 8), conv(net, x, 6, 3)
        joined = net(op.concat([a, b], axis=3))
        parts = net(op.split(joined, [4, 10], axis=-1))
        middle, last = net(relax.TupleGetItem(parts, 1)), net(relax.TupleGetItem(parts, 2))
        cropped = net(op.strided_slice(middle, [1, 2], [0, 1], [6, 7], [2, 1]))
        cropped = conv(net, net(op.nn.leakyrelu(cropped, 0.1)), 4)
        return cropped, conv(net, net(op.nn.prelu(last, net.constant(4), axis=3)), 4)

    names = canonical(module(SHAPE, body))
    assert names.count("permute_dims") == 4, "the input for each branch, and both results"


def test_attention_over_pixels_and_extremes_of_channels():
    """A factor for each pixel has one channel: it lies alike in both layouts."""

    def body(net, x):
        x = net(op.permute_dims(net.conv(net(op.permute_dims(x, FIRST)), 8), LAST))
        both = net(op.concat([net(op.max(x, 3, True)), net(op.mean(x, [3], True))], axis=3))
        x = net(op.multiply(x, net(op.sigmoid(conv(net, both, 1, 3)))))
        return conv(net, x, 4)

    assert canonical(module(SHAPE, body)).count("permute_dims") == 2


def test_what_is_no_image_stays_channels_last():
    """A sum with a tensor that nobody transposed would only move the transposition."""

    def body(net, x, y):
        x = net(op.permute_dims(net.conv(net(op.permute_dims(x, FIRST)), 4), LAST))
        return net(op.reshape(net(op.add(x, y)), (2, 42, 4)))

    assert canonical(module(SHAPE, body, SHAPE))[-2:] == ["permute_dims", "add"]
