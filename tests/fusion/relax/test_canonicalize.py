"""The canonical form, before and after: each rule on a module whose result can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax.op import nn
from tvm.script import relax as R

from fusion.relax.canonical.canonicalize import canonicalize

BATCH_NORM = {"gamma": 2.0, "beta": 1.0, "moving_mean": 3.0, "moving_var": 1.0}  # 2 (x - 3) + 1 = 2 x - 5


def module(body, *shapes, dtype="float32"):
    """``main`` of parameters with ``shapes``; ``body(builder, *parameters)`` returns the result."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{index}", R.Tensor(shape, dtype)) for index, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(body(builder, *params))
        builder.emit_func_output(result)
    return builder.get()


def bindings(mod):
    return [binding for block in mod["main"].body.blocks for binding in block.bindings]


def operators(mod):
    """Names of the calls in program order, without the ``relax.`` in front."""
    calls = [binding.value for binding in bindings(mod) if isinstance(binding.value, relax.Call)]
    return [call.op.name.removeprefix("relax.").removeprefix("nn.") for call in calls]


def call(mod, name, position=0):
    found = [b.value for b in bindings(mod) if isinstance(b.value, relax.Call) and b.value.op.name.endswith(name)]
    return found[position]


def constant(expr):
    return expr.value.numpy()


def const(values, shape=()):
    return relax.const(np.broadcast_to(np.float32(values), shape).copy())


def evaluate(mod, *arrays):
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})  # what is compiled runs once
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return result.numpy() if isinstance(result, tvm.runtime.Tensor) else [field.numpy() for field in result]


def same_values(mod, *shapes, tolerance=1e-5):
    """Whether the canonical module computes what ``mod`` computes, on random inputs."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype(np.float32) * 4 for shape in shapes]
    expected, actual = evaluate(mod, *arrays), evaluate(canonicalize(mod), *arrays)
    return np.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def becomes(expected, body, *shapes, tolerance=1e-5):
    """The canonical module, which has the operators ``expected`` and computes what ``body`` does."""
    mod = module(body, *shapes)
    result = canonicalize(mod)
    assert operators(result) == expected
    assert same_values(mod, *shapes, tolerance=tolerance)
    return result


def batch_norm(data, channels, axis=1, training=False, **values):
    statistics = [const(value, (channels,)) for value in {**BATCH_NORM, **values}.values()]
    return relax.TupleGetItem(nn.batch_norm(data, *statistics, axis=axis, epsilon=0.0, training=training), 0)


def conv(data, out_channels=4, in_channels=4, kernel=1, weight=1.0, **attributes):
    return nn.conv2d(data, const(weight, (out_channels, in_channels, kernel, kernel)), **attributes)


IMAGE = (1, 4, 5, 5)


class TestFoldingIntoConvolutions:
    def test_a_batch_norm_becomes_weight_and_bias(self):
        mod = canonicalize(module(lambda b, x: batch_norm(b.emit(conv(x)), 4), IMAGE))
        assert operators(mod) == ["conv2d", "add"]
        assert np.array_equal(constant(call(mod, "conv2d").args[1]), np.full((4, 4, 1, 1), 2.0))
        assert np.array_equal(constant(call(mod, "add").args[1]), np.full((1, 4, 1, 1), -5.0))

    def test_a_batch_norm_after_a_bias_scales_the_bias_too(self):
        def body(builder, x):
            return batch_norm(builder.emit(relax.op.add(conv(x), const(10.0, (1, 4, 1, 1)))), 4)

        mod = canonicalize(module(body, IMAGE))
        assert operators(mod) == ["conv2d", "add"]
        assert np.array_equal(constant(call(mod, "add").args[1]), np.full((1, 4, 1, 1), 2 * 10.0 - 5))

    def test_per_channel_values_reach_their_own_channel_of_a_depthwise_convolution(self):
        scale = relax.const(np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1))
        mod = canonicalize(module(lambda b, x: relax.op.multiply(conv(x, 4, 1, 3, groups=4), scale), IMAGE))
        assert operators(mod) == ["conv2d"]
        assert [float(channel[0, 0, 0]) for channel in constant(call(mod, "conv2d").args[1])] == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("operator", "weight", "bias"),
        [(relax.op.multiply, 2, 12), (relax.op.divide, 0.5, 3), (relax.op.add, 1, 8), (relax.op.subtract, 1, 4)],
    )
    def test_a_scalar_after_convolution_and_bias(self, operator, weight, bias):
        def body(builder, x):
            return operator(builder.emit(relax.op.add(conv(x), const(6.0, (1, 4, 1, 1)))), const(2.0))

        mod = canonicalize(module(body, IMAGE))
        assert operators(mod) == ["conv2d", "add"]
        assert np.array_equal(constant(call(mod, "conv2d").args[1]), np.full((4, 4, 1, 1), weight))
        assert np.array_equal(constant(call(mod, "add").args[1]), np.full((1, 4, 1, 1), bias))

    @pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (1, 1, 1, 1)])
    def test_a_bias_of_any_spelling_has_one_shape_and_stands_right(self, shape):
        mod = canonicalize(module(lambda b, x: relax.op.add(const(3.0, shape), conv(x)), IMAGE))
        bias = call(mod, "add").args[1]
        assert operators(mod) == ["conv2d", "add"]
        assert np.array_equal(constant(bias), np.full((1, 4, 1, 1), 3.0))

    def test_a_convolution_with_another_reader_keeps_its_weight(self):
        def body(builder, x):
            y = builder.emit(conv(x))
            return relax.op.add(builder.emit(batch_norm(y, 4)), y)

        becomes(["conv2d", "multiply", "add", "add"], body, IMAGE)

    def test_a_convolution_that_is_an_output_as_well_keeps_its_weight(self):
        def body(builder, x):
            y = builder.emit(conv(x))
            return relax.Tuple([builder.emit(relax.op.multiply(y, const(2.0))), y])

        assert operators(canonicalize(module(body, IMAGE))) == ["conv2d", "multiply"]

    def test_a_constant_image_is_no_bias(self):
        mod = canonicalize(module(lambda b, x: relax.op.multiply(conv(x), const(2.0, IMAGE)), IMAGE))
        assert operators(mod) == ["conv2d", "multiply"]

    def test_a_constant_that_widens_the_result_is_no_bias(self):
        mod = canonicalize(module(lambda b, x: relax.op.add(conv(x), const(2.0, (3, 4, 1, 1))), IMAGE))
        assert constant(call(mod, "add").args[1]).shape == (3, 4, 1, 1)

    @pytest.mark.parametrize("operator", ["add", "multiply", "subtract", "divide"])
    def test_one_channel_that_a_constant_makes_several_keeps_its_weight(self, operator):
        values = relax.const(np.arange(1.0, 6.0, dtype=np.float32).reshape(1, 5, 1, 1))
        mod = canonicalize(module(lambda b, x: getattr(relax.op, operator)(conv(x, out_channels=1), values), IMAGE))
        assert operators(mod) == ["conv2d", "add" if operator == "subtract" else operator]
        assert int(mod["main"].ret_ty.shape[1]) == 5

    def test_a_constant_of_higher_rank_is_no_scale(self):
        mod = canonicalize(module(lambda b, x: relax.op.multiply(conv(x), const(2.0, (1,) * 5)), IMAGE))
        assert operators(mod) == ["conv2d", "multiply"]
        assert [int(size) for size in mod["main"].ret_ty.shape] == [1, *IMAGE]

    def test_the_batch_norm_of_another_axis_is_not_folded(self):
        becomes(["conv2d", "multiply", "add"], lambda b, x: batch_norm(b.emit(conv(x)), 5, axis=3), IMAGE)

    def test_a_batch_norm_before_the_convolution_is_one_product_and_one_sum(self):
        mod = canonicalize(module(lambda b, x: conv(nn.relu(b.emit(batch_norm(x, 4)))), IMAGE))
        assert operators(mod) == ["multiply", "add", "relu", "conv2d"]
        assert constant(call(mod, "multiply").args[1]).shape == (1, 4, 1, 1)

    def test_a_batch_norm_in_training_is_left_alone(self):
        mod = canonicalize(module(lambda b, x: batch_norm(b.emit(conv(x)), 4, training=True), IMAGE))
        assert operators(mod) == ["conv2d", "batch_norm"]

    def test_parameters_that_are_not_bound_are_left_alone(self):
        mod = module(lambda b, x, w: relax.op.multiply(nn.conv2d(x, w), const(2.0)), IMAGE, (4, 4, 1, 1))
        assert operators(canonicalize(mod)) == ["conv2d", "multiply"]

    def test_a_dense_layer(self):
        """torch: x W^T + b, then a scale of 2; W (3, 4) of ones becomes a constant (4, 3) of twos."""

        def body(builder, x):
            product = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(const(1.0, (3, 4))))))
            return relax.op.multiply(builder.emit(relax.op.add(const(5.0, (1, 3)), product)), const(2.0))

        mod = canonicalize(module(body, (2, 4)))
        assert operators(mod) == ["matmul", "add"]
        assert np.array_equal(constant(call(mod, "matmul").args[1]), np.full((4, 3), 2.0))
        assert np.array_equal(constant(call(mod, "add").args[1]), np.full((3,), 10.0))


class TestFoldingIntoTheNextLayer:
    """What stands between an activation and a convolution: relu(x), 2 relu(x) - 5, then the weights."""

    @staticmethod
    def scaled(builder, x, layer, scale=2.0, shift=-5.0, shape=()):
        product = builder.emit(relax.op.multiply(nn.relu(x), const(scale, shape)))
        return layer(builder.emit(relax.op.add(product, const(shift, shape))))

    @pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1)])
    def test_scale_and_shift_become_weight_and_bias(self, shape):
        """Each of 4 channels adds its weight of 3 times -5: -60 in all."""
        result = becomes(
            ["relu", "conv2d", "add"], lambda b, x: self.scaled(b, x, lambda y: conv(y, weight=3.0), shape=shape), IMAGE
        )
        assert np.array_equal(constant(call(result, "conv2d").args[1]), np.full((4, 4, 1, 1), 6.0))
        assert np.array_equal(constant(call(result, "add").args[1]), np.full((1, 4, 1, 1), -60.0))

    def test_the_bias_that_was_there_and_a_batch_norm_behind_are_one_bias(self):
        def layer(y):
            return batch_norm(relax.op.add(conv(y), const(10.0, (1, 4, 1, 1))), 4)

        becomes(["relu", "conv2d", "add"], lambda b, x: self.scaled(b, x, layer), IMAGE)

    def test_padding_is_zero_and_not_the_shift(self):
        mod = module(lambda b, x: self.scaled(b, x, lambda y: conv(y, kernel=3, padding=1)), IMAGE)
        assert operators(canonicalize(mod)) == ["relu", "multiply", "add", "conv2d"]

    def test_a_scale_alone_is_folded_whatever_the_padding(self):
        def body(builder, x):
            return conv(builder.emit(relax.op.multiply(nn.relu(x), const(2.0))), kernel=3, padding=1)

        becomes(["relu", "conv2d"], body, IMAGE)

    def test_a_shift_of_what_was_padded_before_is_folded_and_then_the_pad(self):
        def body(builder, x):
            return self.scaled(builder, builder.emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])), lambda y: conv(y, kernel=3))

        becomes(["pad", "relu", "conv2d", "add"], body, IMAGE, tolerance=1e-4)

    @pytest.mark.parametrize("groups", [2, 4])
    def test_groups_read_the_values_of_their_own_channels(self, groups):
        values = relax.const(np.arange(1.0, 5.0, dtype=np.float32).reshape(1, 4, 1, 1))

        def body(builder, x):
            y = builder.emit(relax.op.add(nn.relu(x), values))
            y = builder.emit(relax.op.multiply(y, values))
            return conv(y, 8, 4 // groups, 3, groups=groups)

        result = becomes(["relu", "conv2d", "add"], body, IMAGE)
        assert constant(call(result, "conv2d").args[1])[:, 0, 0, 0].tolist() == (
            [1, 1, 1, 1, 3, 3, 3, 3] if groups == 2 else [1, 1, 2, 2, 3, 3, 4, 4]
        )

    def test_a_batch_norm_before_the_convolution(self):
        becomes(["conv2d", "add"], lambda b, x: conv(b.emit(batch_norm(x, 4)), kernel=3), IMAGE)

    def test_a_product(self):
        result = becomes(
            ["relu", "matmul", "add"],
            lambda b, x: self.scaled(b, x, lambda y: relax.op.matmul(y, const(3.0, (4, 2)))),
            (2, 4),
        )
        assert np.array_equal(constant(call(result, "add").args[1]), np.full((2,), -60.0))

    def test_what_something_else_reads_is_not_computed_twice(self):
        def body(builder, x):
            y = builder.emit(relax.op.multiply(nn.relu(x), const(2.0)))
            return relax.Tuple([builder.emit(conv(y)), y])

        assert operators(canonicalize(module(body, IMAGE))) == ["relu", "multiply", "conv2d"]

    def test_the_bias_of_a_layer_stays_with_it(self):
        def body(builder, x):
            return conv(builder.emit(relax.op.add(conv(x), const(10.0, (1, 4, 1, 1)))))

        assert operators(canonicalize(module(body, IMAGE))) == ["conv2d", "add", "conv2d"]

    def test_the_layer_keeps_its_name(self):
        def body(builder, x):
            y = builder.emit(relax.op.add(nn.relu(x), const(1.0)), "shifted")
            return builder.emit(nn.relu(builder.emit(conv(y), "layer")))

        names = [binding.var.name for binding in bindings(canonicalize(module(body, IMAGE)))]
        assert names[1:3] == ["layer", "layer_bias"]


class TestBranches:
    """Sums of branches that start at one tensor."""

    def test_a_block_of_repvgg_in_training_form_is_one_convolution(self):
        """3x3 of 1, 1x1 of 3 and the batch norm 2 x - 5: 1 everywhere, 4 in the middle, 6 where input meets output."""

        def body(builder, x):
            total = builder.emit(relax.op.add(conv(x, kernel=3, padding=1), conv(x, weight=3.0)))
            return nn.relu(builder.emit(relax.op.add(total, builder.emit(batch_norm(x, 4)))))

        result = becomes(["conv2d", "add", "relu"], body, IMAGE)
        weight = constant(call(result, "conv2d").args[1])
        assert np.array_equal(weight[:, :, 1, 1], np.full((4, 4), 4.0) + 2 * np.eye(4))
        assert np.array_equal(weight[:, :, 0, 2], np.ones((4, 4)))
        assert np.array_equal(constant(call(result, "add").args[1]), np.full((1, 4, 1, 1), -5.0))

    @pytest.mark.parametrize("stride", [1, 2])
    def test_depthwise_branches_of_mobileone(self, stride):
        def branch(x, kernel, weight):
            padding = kernel // 2
            y = conv(x, 4, 1, kernel, weight, groups=4, padding=padding, strides=stride)
            return relax.op.add(y, const(weight, (1, 4, 1, 1)))

        result = becomes(["conv2d", "add"], lambda b, x: relax.op.add(branch(x, 1, 3.0), branch(x, 5, 2.0)), IMAGE)
        assert constant(call(result, "conv2d").args[1])[0, 0, 1:4, 2].tolist() == [2.0, 5.0, 2.0]

    def test_the_identity_of_a_grouped_convolution(self):
        def body(builder, x):
            return relax.op.add(builder.emit(batch_norm(x, 4)), conv(x, 4, 2, 3, groups=2, padding=1))

        becomes(["conv2d", "add"], body, IMAGE)

    @pytest.mark.parametrize(
        "other",
        [
            lambda x: conv(nn.relu(x)),
            lambda x: nn.relu(conv(x)),
            lambda x: conv(x, 4, 1, 1, groups=4),
            lambda x: conv(x, kernel=3, padding=2, dilation=2),
            lambda x: conv(x, kernel=3, padding=(0, 2, 2, 0)),
        ],
    )
    def test_other_branches_stay_apart(self, other):
        mod = module(lambda b, x: relax.op.add(b.emit(conv(x, kernel=3, padding=1)), b.emit(other(x))), IMAGE)
        assert operators(canonicalize(mod)).count("conv2d") == 2
        assert same_values(mod, IMAGE)

    def test_a_branch_that_something_else_reads_stays(self):
        def body(builder, x):
            y = builder.emit(conv(x))
            return relax.Tuple([builder.emit(relax.op.add(y, conv(x, weight=3.0))), y])

        assert operators(canonicalize(module(body, IMAGE))).count("conv2d") == 2

    def test_a_plain_residual_stays_a_residual(self):
        mod = module(lambda b, x: relax.op.add(conv(x), x), IMAGE)
        assert operators(canonicalize(mod)) == ["conv2d", "add"]

    def test_a_gate_with_a_bypass_is_one_product(self):
        def body(builder, x, gate):
            return relax.op.add(x, builder.emit(relax.op.multiply(relax.op.sigmoid(gate), x)))

        becomes(["sigmoid", "add", "multiply"], body, IMAGE, (1, 4, 1, 1))

    def test_a_global_response_norm_is_one_gate_and_a_shift(self):
        """ConvNeXt V2: ``x + (x n w + b)`` with a factor ``n`` for each channel, made of sums of squares."""

        def body(b, x):
            root = b.emit(relax.op.sqrt(b.emit(relax.op.sum(b.emit(relax.op.power(x, const(2.0))), [2, 3], True))))
            scaled = b.emit(relax.op.multiply(b.emit(relax.op.multiply(x, root)), const(0.5, (1, 4, 1, 1))))
            return b.emit(relax.op.add(b.emit(relax.op.add(scaled, const(0.25, (1, 4, 1, 1)))), x))

        mod = module(body, IMAGE)
        small = ["multiply", "mean", "multiply", "sqrt", "multiply", "add"]
        assert operators(canonicalize(mod)) == [*small, "multiply", "add"]
        assert same_values(mod, IMAGE, tolerance=1e-4)

    def test_a_gate_of_full_size_stays(self):
        mod = module(lambda b, x, y: relax.op.add(x, b.emit(relax.op.multiply(x, y))), IMAGE, IMAGE)
        assert operators(canonicalize(mod)) == ["multiply", "add"]


class TestConvolutionsSideBySide:
    """Split along the channels, a convolution on each part, concatenated again; and what follows a concatenation."""

    SHAPE = (1, 9, 7, 6)

    @staticmethod
    def parts(x, sizes):
        split = relax.op.split(x, list(np.cumsum(sizes)[:-1]), axis=1)
        return [relax.TupleGetItem(split, index) for index in range(len(sizes))]

    @staticmethod
    def weight(*shape):
        return relax.const(np.random.default_rng(shape[-1]).standard_normal(shape).astype(np.float32))

    def mixed(self, x, strides=1, order=(0, 1, 2)):
        windows = [
            nn.conv2d(part, self.weight(3, 1, size, size), strides=strides, padding=size // 2, groups=3)
            for part, size in zip(self.parts(x, (3, 3, 3)), (3, 5, 1), strict=True)
        ]
        return relax.op.concat([windows[position] for position in order], axis=1)

    @pytest.mark.parametrize("strides", [1, 2])
    def test_mixed_depthwise_windows_are_one_layer_with_the_largest(self, strides):
        canonical = becomes(
            ["conv2d", "add", "relu"],
            lambda b, x: nn.relu(batch_norm(self.mixed(x, strides), 9)),
            self.SHAPE,
            tolerance=1e-4,
        )
        layer = call(canonical, "conv2d")
        assert layer.attrs.groups == 9 and constant(layer.args[1]).shape == (9, 1, 5, 5)

    def test_an_activation_in_every_part_comes_after_the_one_layer(self):
        def body(b, x):
            return relax.op.concat(
                [nn.relu(nn.conv2d(part, self.weight(2, 3, 3, 3), padding=1)) for part in self.parts(x, (3, 3, 3))],
                axis=1,
            )

        canonical = becomes(["conv2d", "relu"], body, self.SHAPE, tolerance=1e-4)
        assert call(canonical, "conv2d").attrs.groups == 3

    def test_parts_in_another_order_stay_apart(self):
        mod = module(lambda b, x: self.mixed(x, order=(1, 0, 2)), self.SHAPE)
        assert operators(canonicalize(mod)).count("conv2d") == 3

    def test_zeros_beyond_the_limit_are_not_worth_it(self):
        def body(b, x):
            first, second = self.parts(x, (8, 1))
            small = nn.conv2d(first, self.weight(8, 1, 1, 1), groups=8)
            return relax.op.concat([small, nn.conv2d(second, self.weight(1, 1, 5, 5), padding=2)], axis=1)

        assert operators(canonicalize(module(body, self.SHAPE))).count("conv2d") == 2

    def test_convolutions_of_one_tensor_with_one_window_are_one(self):
        def body(b, x):
            parts = [nn.conv2d(x, self.weight(count, 9, 3, 3), padding=1) for count in (4, 6)]
            return relax.op.concat(parts, axis=1)

        becomes(["conv2d"], body, self.SHAPE, tolerance=1e-4)

    def test_a_part_with_another_reader_stays(self):
        def body(b, x):
            parts = [b.emit(nn.conv2d(x, self.weight(count, 9, 3, 3), padding=1)) for count in (4, 6)]
            return b.emit(relax.Tuple([relax.op.concat(parts, axis=1), parts[0]]))

        assert operators(canonicalize(module(body, self.SHAPE))).count("conv2d") == 2

    def test_a_batch_norm_and_an_activation_after_other_convolutions_go_into_each(self):
        def body(b, x):
            parts = [nn.conv2d(x, self.weight(4, 9, size, size), padding=size // 2) for size in (1, 5)]
            joined = relax.op.concat(parts, axis=1)
            return nn.silu(relax.op.add(relax.op.multiply(joined, const(3.0, (1, 8, 1, 1))), const(2.0, (8, 1, 1))))

        mod = module(body, self.SHAPE)
        found = operators(canonicalize(mod))
        assert sorted(found[:-1]) == ["add", "add", "conv2d", "conv2d", "silu", "silu"] and found[-1] == "concat"
        assert same_values(mod, self.SHAPE, tolerance=1e-4)

    def test_what_follows_a_concatenation_of_other_things_stays_one_call(self):
        def body(b, x):
            parts = [nn.conv2d(x, self.weight(4, 9, 1, 1)), nn.max_pool2d(x, (3, 3), padding=(1, 1))]
            return nn.relu(relax.op.concat(parts, axis=1))

        assert operators(canonicalize(module(body, self.SHAPE)))[-2:] == ["concat", "relu"]


@settings(max_examples=6, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 6]),
    stride=st.integers(1, 2),
    pad=st.tuples(*[st.integers(0, 2)] * 4),
    steps=st.lists(st.sampled_from(["bn", "scale", "shift", "divide", "relu"]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_chains_compute_what_they_computed(groups, stride, pad, steps, seed):
    generator = np.random.default_rng(seed)
    channels = 6

    def values(low, high):
        return relax.const(generator.uniform(low, high, (1, channels, 1, 1)).astype(np.float32))

    def body(builder, x):
        widths = [0, 0, 0, 0, *pad]
        weight = generator.standard_normal((channels, 6 // groups, 3, 3)).astype(np.float32)
        y = builder.emit(nn.conv2d(nn.pad(x, widths), relax.const(weight), strides=stride, groups=groups))
        for step in steps:
            if step == "bn":
                statistics = [relax.const(generator.uniform(0.5, 2, channels).astype(np.float32)) for _ in range(4)]
                y = builder.emit(relax.TupleGetItem(nn.batch_norm(y, *statistics, axis=1, training=False), 0))
            elif step == "relu":
                y = builder.emit(nn.relu(y))
            else:
                operator = {"scale": relax.op.multiply, "shift": relax.op.add, "divide": relax.op.divide}[step]
                y = builder.emit(operator(y, values(0.5, 2)))
        return y

    mod = module(body, (1, 6, 7, 8))
    assert "pad" not in operators(canonicalize(mod))
    assert same_values(mod, (1, 6, 7, 8), tolerance=1e-4)


def hard_swishes():
    three, six, sixth, half = const(3.0), const(6.0), const(1 / 6), const(0.5)
    add, multiply, divide, clip = relax.op.add, relax.op.multiply, relax.op.divide, relax.op.clip
    return {
        "onnx": lambda x: multiply(x, divide(clip(add(x, three), 0, 6), six)),
        "product first": lambda x: divide(multiply(x, clip(add(x, three), 0, 6)), six),
        "sixth of x": lambda x: multiply(divide(x, six), clip(add(x, three), 0, 6)),
        "gate left": lambda x: multiply(multiply(clip(add(three, x), 0, 6), sixth), x),
        "slope": lambda x: multiply(x, clip(add(multiply(x, sixth), half), 0, 1)),
        "relu6": lambda x: multiply(multiply(x, nn.relu6(add(x, three))), sixth),
    }


def gelus():
    add, multiply, divide, erf = relax.op.add, relax.op.multiply, relax.op.divide, relax.op.erf
    one, half, root = const(1.0), const(0.5), const(2**0.5)
    return {
        "torch": lambda x: multiply(multiply(x, add(erf(divide(x, root)), one)), half),
        "half first": lambda x: multiply(multiply(half, x), add(one, erf(multiply(x, const(0.5**0.5))))),
        "half of the gate": lambda x: multiply(multiply(add(erf(divide(x, root)), one), half), x),
    }


class TestActivations:
    @pytest.mark.parametrize("name", gelus())
    def test_every_spelling_of_gelu(self, name):
        becomes(["gelu", "matmul"], lambda b, x: b.emit(relax.op.matmul(gelus()[name](x), const(1.0, (4, 4)))), (2, 4))

    def test_another_slope_or_factor_is_no_gelu(self):
        multiply, erf, one = relax.op.multiply, relax.op.erf, const(1.0)

        def body(builder, x):
            wrong_slope = multiply(multiply(x, relax.op.add(erf(x), one)), const(0.5))
            wrong_factor = multiply(x, relax.op.add(erf(multiply(x, const(0.5**0.5))), one))
            return relax.op.add(builder.emit(wrong_slope), builder.emit(wrong_factor))

        assert "gelu" not in operators(canonicalize(module(body, (2, 4))))

    @pytest.mark.parametrize("spelling", hard_swishes())
    def test_hard_swish(self, spelling):
        after = becomes(["add", "clip", "multiply", "multiply"], lambda b, x: hard_swishes()[spelling](x), (2, 7))
        product = call(after, "multiply", 1)
        assert product.args[0].same_as(after["main"].params[0])
        assert constant(call(after, "add").args[1]) == 3.0
        assert constant(call(after, "multiply").args[1]) == pytest.approx(1 / 6)

    @pytest.mark.parametrize(
        "body",
        [
            lambda x: nn.relu6(x),
            lambda x: relax.op.minimum(relax.op.maximum(x, const(0.0)), const(6.0)),
            lambda x: relax.op.maximum(const(0.0), relax.op.minimum(x, const(6.0))),
            lambda x: relax.op.minimum(nn.relu(x), const(6.0)),
            lambda x: relax.op.clip(nn.relu(x), -1, 6),
            lambda x: nn.relu(relax.op.clip(x, -2, 6)),
        ],
    )
    def test_relu6(self, body):
        after = becomes(["clip"], lambda b, x: body(x), (2, 7))
        assert [float(bound.value) for bound in call(after, "clip").args[1:]] == [0, 6]

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (lambda x: relax.op.clip(x, 0, np.inf), ["relu"]),
            (lambda x: relax.op.maximum(x, const(0.0)), ["relu"]),
            (lambda x: nn.relu(nn.relu(x)), ["relu"]),
            (lambda x: relax.op.multiply(relax.op.sigmoid(x), x), ["silu"]),
            (lambda x: relax.op.clip(x, -np.inf, np.inf), []),
            (lambda x: relax.op.clip(relax.op.clip(x, 0, 1), 2, 3), ["clip", "clip"]),
            (lambda x: relax.op.maximum(x, const(1.0, (7,))), ["maximum"]),
            (lambda x: relax.op.clip(relax.op.add(relax.op.multiply(x, const(0.2)), const(0.5)), 0, 1),
             ["multiply", "add", "clip"]),
        ],
    )  # fmt: skip
    def test_others(self, body, expected):
        becomes(expected, lambda b, x: body(x), (2, 7))

    @pytest.mark.parametrize(
        ("exponent", "expected"),
        [(1.0, []), (2.0, ["multiply"]), (3.0, ["multiply", "multiply"]), (0.5, ["sqrt"]), (1.5, ["power"])],
    )
    def test_powers_that_are_products_or_roots(self, exponent, expected):
        def body(b, x):
            return b.emit(relax.op.power(b.emit(relax.op.abs(x)), const(exponent)))

        becomes(["abs", *expected], body, IMAGE)

    def test_a_sigmoid_that_is_read_elsewhere_is_not_computed_twice(self):
        def body(builder, x):
            gate = builder.emit(relax.op.sigmoid(x))
            return relax.Tuple([builder.emit(relax.op.multiply(x, gate)), gate])

        assert operators(canonicalize(module(body, (2, 7)))) == ["sigmoid", "multiply"]

    def test_integers_are_not_clipped_as_real_numbers(self):
        mod = module(lambda b, x: relax.op.maximum(x, relax.const(0, "int32")), (2, 7), dtype="int32")
        assert operators(canonicalize(mod)) == ["maximum"]


class TestPadding:
    def test_it_joins_the_padding_of_the_convolution(self):
        after = becomes(
            ["conv2d"], lambda b, x: conv(nn.pad(x, [0, 0, 0, 0, 1, 2, 3, 4]), kernel=3, padding=(5, 6, 7, 8)), IMAGE
        )
        assert [int(width) for width in call(after, "conv2d").attrs.padding] == [5 + 1, 6 + 3, 7 + 2, 8 + 4]

    @pytest.mark.parametrize(
        "pad",
        [
            lambda x: nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "constant", 2.0),
            lambda x: nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "reflect"),
            lambda x: nn.pad(x, [0, 1, 0, 0, 1, 1, 1, 1]),
        ],
    )
    def test_it_stays_where_a_convolution_cannot_do_it(self, pad):
        assert operators(canonicalize(module(lambda b, x: conv(pad(x)), IMAGE))) == ["pad", "conv2d"]

    def test_a_pad_of_nothing_is_removed(self):
        assert operators(canonicalize(module(lambda b, x: nn.relu(nn.pad(x, [0] * 8)), IMAGE))) == ["relu"]

    @pytest.mark.parametrize(
        ("before", "value", "folded"),
        [(nn.relu, 0.0, True), (nn.relu6, 0.0, True), (relax.op.tanh, 0.0, False), (relax.op.tanh, -np.inf, True)],
    )
    def test_a_maximum_ignores_pads_that_cannot_win(self, before, value, folded):
        def body(builder, x):
            return nn.max_pool2d(nn.pad(before(x), [0, 0, 0, 0, 0, 1, 0, 1], "constant", value), (3, 3), (2, 2))

        mod = module(body, IMAGE)
        assert ("pad" in operators(canonicalize(mod))) != folded
        assert same_values(mod, IMAGE)

    def test_a_pool_keeps_its_own_padding_too(self):
        mod = module(lambda b, x: nn.max_pool2d(nn.pad(nn.relu(x), [0] * 7 + [1]), (3, 3), (2, 2), (1, 0, 0, 1)), IMAGE)
        after = canonicalize(mod)
        assert [int(width) for width in call(after, "max_pool2d").attrs.padding] == [1, 0, 0, 2]
        assert same_values(mod, IMAGE)

    def test_a_maximum_of_padding_alone_stays(self):
        """Windows of one pixel over the pad itself yield the pad's zero, which a pool would never see."""
        mod = module(lambda b, x: nn.max_pool2d(nn.pad(nn.relu(x), [0] * 5 + [1, 0, 0]), (1, 1), (2, 2)), IMAGE)
        assert "pad" in operators(canonicalize(mod))

    def test_an_average_counts_the_pads_before_it(self):
        becomes(["avg_pool2d"], lambda b, x: nn.avg_pool2d(nn.pad(x, [0] * 4 + [1] * 4), (3, 3), (2, 2)), IMAGE)

    def test_an_average_that_leaves_its_own_padding_out_keeps_the_pad(self):
        mod = module(lambda b, x: nn.avg_pool2d(nn.pad(x, [0] * 4 + [1] * 4), (3, 3), (2, 2), (1, 1)), IMAGE)
        assert operators(canonicalize(mod)) == ["pad", "avg_pool2d"]


class TestPooling:
    @pytest.mark.parametrize(
        "pool",
        [
            lambda x: nn.adaptive_avg_pool2d(x, (1, 1)),
            lambda x: nn.avg_pool2d(x, (5, 5)),
            lambda x: nn.avg_pool2d(x, (64, 64), (64, 64), ceil_mode=True),
            lambda x: nn.avg_pool2d(x, (9, 9), padding=(2, 2, 2, 2)),
            lambda x: relax.op.mean(x, [-1, -2], keepdims=True),
        ],
    )
    def test_a_global_average_is_a_mean(self, pool):
        after = becomes(["mean"], lambda b, x: pool(x), IMAGE)
        assert [int(axis) for axis in call(after, "mean").attrs.axis] == [2, 3] and call(after, "mean").attrs.keepdims

    def test_a_mean_that_drops_dimensions_reshapes_afterwards(self):
        assert operators(canonicalize(module(lambda b, x: relax.op.mean(x, [2, 3]), IMAGE))) == ["mean", "reshape"]

    def test_a_mean_over_channels_is_another_thing(self):
        assert operators(canonicalize(module(lambda b, x: relax.op.mean(x, [1]), IMAGE))) == ["mean"]

    def test_padding_in_the_average_makes_it_no_mean(self):
        mod = module(lambda b, x: nn.avg_pool2d(x, (9, 9), padding=(2, 2, 2, 2), count_include_pad=True), IMAGE)
        assert operators(canonicalize(mod)) == ["avg_pool2d"]

    @pytest.mark.parametrize("pool", [nn.max_pool2d, nn.avg_pool2d])
    @pytest.mark.parametrize("padding", [(0, 0), (1, 0, 0, 1)])
    def test_ceil_mode_is_padding_after_the_image(self, pool, padding):
        mod = module(lambda b, x: pool(x, (2, 2), (2, 2), padding, ceil_mode=True), IMAGE)
        after = canonicalize(mod)
        assert len(operators(after)) == 1 and not call(after, "pool2d").attrs.ceil_mode
        assert same_values(mod, IMAGE)


class TestShapes:
    @pytest.mark.parametrize(
        ("body", "shape", "expected"),
        [
            (lambda x: relax.op.squeeze(x, [2, 3]), (1, 4, 1, 1), ["reshape"]),
            (lambda x: relax.op.expand_dims(relax.op.flatten(x), 0), (1, 4, 1, 1), ["reshape"]),
            (lambda x: relax.op.reshape(relax.op.reshape(x, (2, 2)), (1, 4, 1, 1)), (1, 4, 1, 1), []),
            (lambda x: relax.op.permute_dims(x, [0, 2, 3, 1]), (1, 4, 1, 1), ["reshape"]),
            (lambda x: relax.op.permute_dims(x, [0, 2, 3, 1]), (1, 4, 2, 1), ["permute_dims"]),
            (lambda x: relax.op.astype(x, "float32"), (2,), []),
            (lambda x: relax.op.concat([x], 0), (2,), []),
            (lambda x: relax.TupleGetItem(nn.dropout(x, 0.5), 0), (2,), []),
        ],
    )
    def test_one_reshape_or_nothing(self, body, shape, expected):
        mod = canonicalize(module(lambda b, x: body(x), shape))
        assert operators(mod) == expected


class TestTypes:
    @pytest.mark.parametrize("dtype", ["int64", "float64"])
    def test_constants_of_64_bits_keep_them(self, dtype):
        values = relax.const(np.arange(6).astype(dtype).reshape(2, 3), dtype)
        body = lambda b, x: relax.op.add(x, relax.op.reshape(relax.op.permute_dims(values), (2, 3)))  # noqa: E731
        mod = canonicalize(module(body, (2, 3), dtype=dtype))
        assert constant(call(mod, "add").args[1]).dtype == dtype

    def test_a_look_up_beyond_the_table_is_bounded(self):
        """TVM's default reads memory that is not the table's."""
        table = relax.const(np.arange(8, dtype=np.float32).reshape(4, 2))
        mod = canonicalize(module(lambda b, x: relax.op.take(table, x, axis=0), (3,), dtype="int64"))
        found = evaluate(mod, np.array([1, 4, 1 << 40]))
        np.testing.assert_array_equal(found, [[2, 3], [6, 7], [6, 7]])


class TestPass:
    def test_a_second_time_changes_nothing(self):
        def body(builder, x):
            y = builder.emit(hard_swishes()["onnx"](builder.emit(batch_norm(builder.emit(conv(x)), 4))))
            return relax.op.squeeze(relax.op.mean(y, [2, 3]), [0])

        once = canonicalize(module(body, IMAGE))
        tvm.ir.assert_structural_equal(canonicalize(once), once)

    def test_variables_keep_their_names(self):
        def body(builder, x):
            y = builder.emit(conv(x), "stem_conv")
            return builder.emit(nn.relu(builder.emit(batch_norm(y, 4), "stem_norm")), "stem_relu")

        names = [binding.var.name for binding in bindings(canonicalize(module(body, IMAGE)))]
        assert names[:2] == ["stem_conv", "stem_norm"]

    def test_every_relax_function_is_rewritten_and_others_are_kept(self):
        mod = module(lambda b, x: nn.relu6(x), IMAGE)
        lowered = relax.transform.LegalizeOps()(module(lambda b, x: relax.op.exp(x), IMAGE))
        mod.update(
            tvm.IRModule(
                {
                    "other": mod["main"].with_attr("global_symbol", "other"),
                    "tir_exp": lowered["tir_exp"].with_attr("global_symbol", "tir_exp"),
                }
            )
        )
        after = canonicalize(mod)
        assert {variable.name_hint for variable in after.functions} == {"main", "other", "tir_exp"}
        assert after["other"].body.blocks[0].bindings[0].value.op.name == "relax.clip"

    def test_attributes_of_functions_are_kept(self):
        mod = module(lambda b, x: nn.relu6(x), IMAGE)
        mod["main"] = mod["main"].with_attr("num_input", 1)
        assert int(canonicalize(mod)["main"].attrs["num_input"]) == 1


def test_a_module_from_torch_export():
    torch = pytest.importorskip("torch")
    from tvm.relax.frontend.torch import from_exported_program

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 8, 3, stride=2, bias=False)
            self.norm = torch.nn.BatchNorm2d(8)
            self.depthwise = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.activation = torch.nn.Hardtanh(0.0, 6.0)
            self.classifier = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 5))

        def forward(self, x):
            functional = torch.nn.functional
            x = functional.relu6(self.norm(self.stem(functional.pad(x, (0, 1, 0, 1)))))
            x = functional.hardswish(x + self.activation(self.norm(self.depthwise(x))))
            x = functional.silu(x * functional.hardsigmoid(functional.adaptive_avg_pool2d(x, 1)))
            return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    torch.manual_seed(0)
    network = Network()
    for statistics in (network.norm.running_mean, network.norm.running_var, network.norm.weight):
        torch.nn.init.uniform_(statistics, 0.5, 1.5)
    image = torch.randn(1, 3, 15, 15)
    network.eval()
    program = torch.export.export(network, (image,)).run_decompositions()
    after = canonicalize(from_exported_program(program, unwrap_unit_return_tuple=True))
    assert sorted(set(operators(after))) == ["add", "clip", "conv2d", "matmul", "mean", "multiply", "reshape", "silu"]
    assert operators(after)[:3] == ["conv2d", "add", "clip"]
    expected = network(image).detach().numpy()
    assert np.allclose(evaluate(after, image.numpy()), expected, atol=1e-5)


def scaled_norm(b, data, axis, square):
    """A layer norm as exporters take it apart, with scale 2 and shift 1 along ``axis``."""
    shape = [1] * 4
    shape[axis] = 4
    difference = b.emit(relax.op.subtract(data, relax.op.mean(data, axis=[axis], keepdims=True)))
    variance = relax.op.mean(square(difference), axis=[axis], keepdims=True)
    unit = relax.op.divide(difference, relax.op.sqrt(relax.op.add(variance, const(1e-6))))
    return relax.op.add(relax.op.multiply(unit, const(2.0, shape)), const(1.0, shape))


class TestLayerNorms:
    SQUARES = {
        "power": lambda d: relax.op.power(d, const(2.0)),
        "product": lambda d: relax.op.multiply(d, d),
        "square": relax.op.square,
    }

    @pytest.mark.parametrize("square", SQUARES)
    @pytest.mark.parametrize("axis", [1, 3])
    def test_one_that_was_taken_apart_is_one_call(self, axis, square):
        mod = module(lambda b, x: b.emit(scaled_norm(b, x, axis, self.SQUARES[square])), (1, 4, 5, 4))
        assert operators(canonicalize(mod)) == ["layer_norm"]
        norm = call(canonicalize(mod), "layer_norm")
        assert [int(each) for each in norm.attrs.axes] == [axis]
        assert float(norm.attrs.epsilon) == pytest.approx(1e-6)
        assert same_values(mod, (1, 4, 5, 4), tolerance=1e-4)

    def test_the_square_of_something_else_is_no_variance(self):
        mod = module(lambda b, x: b.emit(scaled_norm(b, x, 3, lambda d: relax.op.multiply(d, x))), (1, 4, 5, 4))
        assert "layer_norm" not in operators(canonicalize(mod))

    def test_a_scale_that_is_read_elsewhere_stays(self):
        def body(b, x):
            norm = b.emit(nn.layer_norm(x, const(1.0, (4,)), const(0.0, (4,)), axes=[-1]))
            return b.emit(relax.op.add(norm, b.emit(relax.op.multiply(norm, const(2.0)))))

        assert operators(canonicalize(module(body, (1, 4, 5, 4)))) == ["layer_norm", "multiply", "add"]


class TestChannelsLast:
    def block(self, b, x, norm):
        """A block of ConvNeXt: depthwise, then norm and two products channels-last, then the residual."""
        depthwise = b.emit(nn.conv2d(x, const(0.1, (4, 1, 7, 7)), padding=3, groups=4))
        last = b.emit(relax.op.permute_dims(depthwise, [0, 2, 3, 1]))
        rows = np.arange(32, dtype=np.float32)
        wide = b.emit(relax.op.matmul(norm(b, last), relax.const(np.sin(rows).reshape(4, 8))))
        wide = b.emit(relax.op.add(wide, relax.const(np.cos(rows[:8]))))
        gate = b.emit(relax.op.erf(b.emit(relax.op.divide(wide, const(2.0**0.5)))))
        half = b.emit(relax.op.multiply(wide, b.emit(relax.op.add(gate, const(1.0)))))
        narrow = b.emit(relax.op.matmul(relax.op.multiply(half, const(0.5)), relax.const(np.cos(rows).reshape(8, 4))))
        scaled = relax.op.multiply(relax.op.add(narrow, const(0.25, (4,))), relax.const(rows[:4]))
        first = b.emit(relax.op.permute_dims(b.emit(scaled), [0, 3, 1, 2]))
        return b.emit(relax.op.add(x, first))

    NORMS = {
        "whole": lambda b, x: b.emit(nn.layer_norm(x, const(2.0, (4,)), const(1.0, (4,)), axes=[-1], epsilon=1e-6)),
        "taken apart": lambda b, x: b.emit(scaled_norm(b, x, 3, lambda d: relax.op.power(d, const(2.0)))),
    }

    @pytest.mark.parametrize("norm", NORMS)
    def test_a_block_of_convnext_needs_no_transposition(self, norm):
        mod = module(lambda b, x: self.block(b, x, self.NORMS[norm]), (1, 4, 9, 8))
        expected = ["conv2d", "layer_norm", "conv2d", "add", "gelu", "conv2d", "add", "add"]
        assert operators(canonicalize(mod)) == expected
        assert [int(axis) for axis in call(canonicalize(mod), "layer_norm").attrs.axes] == [1]
        assert same_values(mod, (1, 4, 9, 8), tolerance=1e-3)

    def test_what_only_the_last_layout_can_compute_stays_behind_the_transposition(self):
        def body(b, x):
            last = b.emit(relax.op.permute_dims(b.emit(nn.relu(x)), [0, 2, 3, 1]))
            return b.emit(relax.op.reshape(b.emit(nn.gelu(last)), (5, 20)))

        becomes(["relu", "gelu", "permute_dims", "reshape"], body, (1, 4, 5, 5))

    def test_a_transposition_that_two_read_is_made_once(self):
        def body(b, x):
            last = b.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
            return b.emit(relax.op.add(b.emit(nn.relu(last)), b.emit(relax.op.tanh(last))))

        mod = module(body, (1, 4, 5, 5))
        assert operators(canonicalize(mod)).count("permute_dims") == 1
        assert same_values(mod, (1, 4, 5, 5))

    def test_the_mean_over_pixels_needs_no_transposition(self):
        def body(b, x):
            last = b.emit(relax.op.permute_dims(x, [0, 2, 3, 1]))
            return b.emit(relax.op.mean(last, axis=[1, 2]))

        becomes(["mean", "reshape"], body, (1, 4, 5, 5))


class TestStacks:
    def test_selective_kernels_are_a_sum_of_gated_tensors(self):
        """SKNet: two branches stacked, weighted by a softmax of their own, and summed; without weights before that."""

        def body(b, x, y, weights):
            apart = [b.emit(relax.op.expand_dims(part, 1)) for part in (x, y)]
            stacked = b.emit(relax.op.concat(apart, axis=1))
            both = b.emit(relax.op.sum(stacked, [1]))
            chosen = b.emit(relax.op.sum(b.emit(relax.op.multiply(stacked, nn.softmax(weights, 1))), [1]))
            return b.emit(relax.op.add(both, chosen))

        shapes = IMAGE, IMAGE, (1, 2, 4, 1, 1)
        mod = module(body, *shapes)
        names = operators(canonicalize(mod))
        assert "concat" not in names and "sum" not in names and names.count("add") == 3
        assert same_values(mod, *shapes)

    def test_split_attention_reads_parts_of_the_channels(self):
        """ResNeSt: parts of a layer's channels."""

        def body(b, x, weights):
            apart = b.emit(relax.op.reshape(x, (1, 2, 4, 5, 5)))
            return b.emit(relax.op.sum(b.emit(relax.op.multiply(apart, weights)), [1], keepdims=True))

        shapes = (1, 8, 5, 5), (1, 2, 4, 1, 1)
        mod = module(body, *shapes)
        names = operators(canonicalize(mod))
        assert names.count("multiply") == 2 and names.count("add") == 1 and "sum" not in names
        assert same_values(mod, *shapes)

    def test_a_pyramid_stacks_along_the_last_axis(self):
        """EfficientDet: a weighted mean of nodes."""

        def body(b, x, y):
            apart = [b.emit(relax.op.expand_dims(part, -1)) for part in (x, y)]
            weights = const(np.float32([0.25, 0.5]), (1, 1, 1, 1, 2))
            weighted = b.emit(relax.op.multiply(b.emit(relax.op.concat(apart, axis=-1)), weights))
            return b.emit(relax.op.mean(weighted, [-1]))

        mod = module(body, IMAGE, IMAGE)
        assert "concat" not in operators(canonicalize(mod))
        assert same_values(mod, IMAGE, IMAGE)

    def test_one_long_axis_stays(self):
        mod = module(lambda b, x: b.emit(relax.op.sum(relax.op.reshape(x, (1, 16, 4, 5, 5)), [1])), (1, 64, 5, 5))
        assert operators(canonicalize(mod)) == ["reshape", "sum"]
