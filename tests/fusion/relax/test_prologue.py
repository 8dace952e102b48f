"""What stands before a convolution: found, done as its kernel reads its input, and right; else left alone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from costmodel.operators.layers import Conv2d, Prologue
from fusion.relax.extract import extract_graph
from tests.fusion.lowered_models import check
from tests.fusion.relax_models import CPU, module


def norm(net, x):
    """What is left of a batch norm."""
    channels = int(x.ty.shape[1])
    return net(op.add(net(op.multiply(x, net.constant(1, channels, 1, 1))), net.constant(1, channels, 1, 1)))


def pooled(net, x):
    """Nothing that follows a pool belongs to its kernel."""
    return net(op.nn.max_pool2d(x, (3, 3), padding=(1, 1)))


def convolutions(mod):
    return [node for node in extract_graph(mod).nodes if isinstance(node.operator, Conv2d)]


def element_wise(names):
    return [name for name in names if name.startswith(("relax.", "multiply", "add", "fused"))]


@pytest.mark.parametrize(
    ("channels", "options"), [(24, {"kernel": 1}), (9, {"kernel": 3, "strides": (2, 2)}), (24, {"kernel": 5})]
)
def test_a_batch_norm_and_a_relu_are_done_as_the_input_is_read(channels, options):
    mod = module(
        (2, channels, 13, 11), lambda net, x: net.conv(net(op.nn.relu(norm(net, pooled(net, x)))), 40, **options)
    )
    assert not element_wise(check(mod))
    (node,) = convolutions(mod)
    assert node.operator.prologue == Prologue(affine=True, activation="relu")
    assert node.parameters[0].input_scale.shape == node.parameters[0].input_shift.shape == (channels,)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (lambda net, x: net(op.nn.silu(x)), Prologue(False, "silu")),
        (lambda net, x: net(op.nn.leakyrelu(x, 0.1)), Prologue(False, "leaky_relu", 0.1)),
        (lambda net, x: net(op.add(x, net.constant(24, 1, 1))), Prologue(True)),
        (
            lambda net, x: net(
                op.multiply(x, net(op.clip(net(op.add(net(op.multiply(x, relax.const(0.2))), relax.const(0.5))), 0, 1)))
            ),
            Prologue(False, "hard_swish", 0.2),
        ),
    ],
)
def test_other_prologues(spelling, expected):
    mod = module((1, 24, 9, 7), lambda net, x: net.conv(spelling(net, pooled(net, x)), 16, 3))
    assert not element_wise(check(mod))
    assert convolutions(mod)[0].operator.prologue == expected


def test_a_dense_block():
    """Each layer reads all before it through a norm of its own; the concatenations stay, nothing else."""

    def body(net, x):
        for _ in range(3):
            inner = net.conv(net(op.nn.relu(norm(net, x))), 24)
            x = net(op.concat([x, net.conv(net(op.nn.relu(inner)), 16, 3)], axis=1))
        return net(op.mean(net.conv(net(op.nn.relu(norm(net, x))), 16), [2, 3], True))

    mod = module((1, 32, 9, 8), body)
    names = check(mod)
    assert not element_wise(names)
    assert sum(name.startswith("channel_move") for name in names) == 3
    assert sum(node.operator.prologue is not None for node in convolutions(mod)) == 4


def test_a_pre_activated_residual_block_prepares_its_input_for_both_branches():
    def body(net, x):
        x = pooled(net, x)
        before = net(op.nn.relu(norm(net, x)))
        shortcut = net.conv(before, 40, 1, strides=(2, 2))
        inner = net(op.nn.relu(net.conv(before, 24)))
        return net(op.add(net.conv(inner, 40, 3, strides=(2, 2)), shortcut))

    mod = module((1, 24, 12, 10), body)
    assert not element_wise(check(mod))
    assert [node.operator.prologue is not None for node in convolutions(mod)].count(True) == 2


def test_an_activation_behind_a_gate():
    """ReXNet. Channels that fill no whole blocks: those that do need a reshape behind the mean, which costs nothing."""
    channels = CPU.lanes + CPU.lanes // 2

    def body(net, x):
        x = net.depthwise(net.conv(x, channels))
        gate = net(op.sigmoid(net.conv(net(op.mean(x, [2, 3], True)), channels)))
        return net.conv(net(op.clip(net(op.multiply(x, gate)), 0, 6)), 16)

    mod = module((2, 16, 9, 7), body)
    names = check(mod)
    assert not element_wise(names) and sum(name.startswith("prologue_pointwise") for name in names) == 1
    last = convolutions(mod)[-1].operator
    assert last.gated and last.prologue == Prologue(False, "relu6")


def test_what_the_kernel_before_does_for_nothing_is_left_to_it():
    mod = module((1, 24, 9, 7), lambda net, x: net.conv(net(op.nn.relu(net.conv(x, 24))), 16, 3))
    assert [node.operator.prologue for node in convolutions(mod)] == [None, None]
    assert convolutions(mod)[0].operator.epilogue.activation == "relu"


@pytest.mark.parametrize(
    "readers",
    [
        lambda net, v: (net.conv(v, 16), net(op.nn.max_pool2d(v, (3, 3)))),  # the tensor itself is wanted
        lambda net, v: (net.conv(v, 16), v),
        lambda net, v: (net.conv(v, 16), net.depthwise(v)),
        lambda net, v: (net.conv(v, 16), net.conv(v, 24), net.conv(v, 8)),  # it would be prepared three times
    ],
)
def test_a_prepared_tensor_that_others_read_is_made(readers):
    mod = module((1, 24, 9, 7), lambda net, x: readers(net, net(op.nn.relu(norm(net, pooled(net, x))))))
    assert all(node.operator.prologue is None for node in convolutions(mod))


def test_a_gate_that_one_of_two_readers_could_take_is_made_for_both():
    def body(net, x, gate):
        value = net(op.nn.relu(net(op.multiply(pooled(net, x), gate))))
        return net.conv(value, 16), net.conv(value, 16, 3)

    mod = module((1, 24, 9, 7), body, (1, 24, 1, 1))
    assert all(not node.operator.gated and node.operator.prologue is None for node in convolutions(mod))
    check(mod)


def test_factors_that_vary_along_the_image_are_no_prologue():
    def body(net, x):
        return net.conv(net(op.multiply(pooled(net, x), net.constant(1, 24, 9, 7))), 16)

    assert convolutions(module((1, 24, 9, 7), body))[0].operator.prologue is None


def test_a_prologue_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="does nothing"):
        Prologue()
    with pytest.raises(ValueError, match="unknown activation"):
        Prologue(activation="cubic")
    with pytest.raises(ValueError, match="slopes"):
        Prologue(activation="prelu")


def test_constants_of_a_prologue_are_traffic():
    plain = Conv2d(1, 24, 9, 7, 40, (1, 1))
    assert Conv2d(1, 24, 9, 7, 40, (1, 1), prologue=Prologue(True)).weight_bytes == plain.weight_bytes + 2 * 24 * 4
    assert np.prod(plain.weight_shape) * 4 == plain.weight_bytes
