"""Lowered modules compute what the model computes, on shapes that are not nice, and convert no more than they need."""

# ruff: noqa: E402

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

tvm = pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.model.conv_graph import FusionPlan
from fusion.relax.canonical.canonicalize import canonicalize
from fusion.relax.channel_moves import channel_move
from fusion.relax.kernels.layouts import to_blocked, to_plain
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from schedules.contract.template import block, unblock
from schedules.kernels.template_table import template_for
from tests.case_lists import one_in
from tests.fusion.lowered_models import check, configs_of, conversions, lowered, plan_of
from tests.fusion.relax_models import CPU, assert_close, inputs_of, kernel_names, module, stock

LANES = CPU.lanes


def mobile_net(net, x):
    """Stem, depthwise + pointwise with stride 2, an inverted residual, classifier; 24 and 40 channels."""
    x = net.relu6(net.conv(x, 24, 3, strides=(2, 2)))
    x = net.relu6(net.conv(net.relu6(net.depthwise(x, 3, strides=(2, 2))), 40))
    expanded = net.relu6(net.conv(x, 72))
    x = net(op.add(net.conv(net.relu6(net.depthwise(expanded, 5)), 40), x))
    pooled = net(op.reshape(net(op.mean(x, [2, 3], True)), (int(x.ty.shape[0]), 40)))
    return net(op.add(net(op.matmul(pooled, net.weight(40, 10))), net.constant(10)))


@pytest.mark.parametrize(
    ("shape", "fused"), [pytest.param((1, 3, 17, 15), False, marks=pytest.mark.thorough), ((2, 3, 16, 18), True)]
)
def test_a_mobile_net_has_no_conversion_inside(shape, fused):
    names = check(module(shape, mobile_net), fused)
    assert not conversions(names)
    assert [name for name in names if name.startswith("relax.")] == ["relax.reshape"]
    assert any(name.startswith(("depthwise_pointwise", "pointwise_depthwise")) for name in names) == fused


def test_pairs_of_dense_convolutions_are_one_kernel_each():
    """A bottleneck behind a stem, by direct sums and by Winograd's algorithm, whose weights are laid out otherwise."""

    def body(net, x):
        x = net.relu6(net.conv(net.relu6(net.conv(x, 24, 3, strides=(2, 2))), 40))
        inner = net.relu6(net.conv(net.relu6(net.conv(x, 24)), 24, 3))
        return net(op.add(net.conv(net.relu6(net.conv(inner, 24, 3)), 40), x))

    mod = module((1, 3, 17, 15), body)
    plan = plan_of(mod, True)
    kinds = ["conv-pointwise", "pointwise-conv", "conv-pointwise"]
    assert [group.operator.kind for group in plan.groups] == kinds
    arrays = inputs_of(mod)
    expected = stock(mod, arrays)
    for algorithm in ("", "-winograd-4x4"):
        configs = configs_of(plan)
        for operator in configs:
            template = template_for(operator, CPU)
            wanted = operator.kind + algorithm  # the stem, of stride 2, has one algorithm only
            own = [each for each in template.space(operator, CPU) if template.for_config(each).family == wanted]
            configs[operator] = (own or [configs[operator]])[0]
        result = lower(mod, plan, configs, CPU)
        names = kernel_names(result)
        assert sum(name.startswith(("conv_pointwise", "pointwise_conv")) for name in names) == 3
        assert_close(build_executable(result, CPU)(*arrays), expected)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_learnable_affine_blocks_are_part_of_the_kernels(fused):
    """PP-LCNetV3: a scalar scale and shift behind each activation, read by a depthwise filter with padding."""

    def body(net, x):
        for channels in (24, 40):
            x = net(op.nn.silu(net.conv(x, channels)))
            x = net(op.add(net(op.multiply(x, relax.const(1.5, "float32"))), net.constant(1, channels, 1, 1)))
            x = net.depthwise(x)
        return net.conv(x, 8)

    names = check(module((1, 16, 9, 7), body), fused)
    assert not any(name.startswith(("relax.", "add", "multiply", "fused")) for name in names)
    assert fused == any("depthwise_pointwise" in name or "sliding" in name for name in names)


def residual_net(net, x):
    """A bottleneck with a strided shortcut, max-pooled before, returned with its intermediate."""
    x = net(op.nn.relu(net.conv(x, 20, 7, strides=(2, 2))))
    pooled = net(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)))
    shortcut = net.conv(pooled, 40, 1, strides=(2, 2))
    inner = net(op.nn.relu(net.conv(pooled, 24, 3, strides=(2, 2))))
    return net(op.nn.relu(net(op.add(net.conv(inner, 40), shortcut)))), inner


def test_branches_and_several_results():
    names = check(module((2, 3, 29, 21), residual_net))
    # Only the two results are brought back into the framework's layout.
    assert [name.rstrip("0123456789") for name in conversions(names)] == ["to_plain", "to_plain"]


@pytest.mark.parametrize("channels", [2 * LANES, 24])
def test_squeeze_and_excite_runs_on_blocked_tensors(channels):
    def body(net, x):
        x = net(op.nn.silu(net.depthwise(net.conv(x, channels), 3)))
        squeezed = net(op.nn.relu(net.conv(net(op.mean(x, [2, 3], True)), 8)))
        gate = net(op.sigmoid(net.conv(squeezed, channels)))
        scaled = net(op.multiply(x, gate))
        return net(op.mean(net.conv(scaled, 16), [2, 3], True))

    names = check(module((2, 3, 17, 14), body))
    # Global pooling gives a plain (N, C, 1, 1): whole blocks are the same bytes, others are converted, one pixel each.
    assert len(conversions(names)) == (0 if channels % LANES == 0 else 1)
    assert "relax.multiply" not in names
    assert sum(name.startswith("prologue_pointwise") for name in names) == 1


@pytest.mark.parametrize(("size", "seed"), [((17, 14), 0), ((9, 9), 1)])
def test_a_depthwise_convolution_leaves_the_sums_of_a_global_average(size, seed):
    """Whole and broken bands of rows; the average is read twice, the image by the gated convolution."""

    def body(net, x):
        x = net(op.nn.silu(net.depthwise(net.conv(x, 40), 3)))
        average = net(op.mean(x, [2, 3], True))
        gate = net(op.sigmoid(net.conv(net(op.nn.relu(net.conv(average, 8))), 40)))
        return net.conv(net(op.multiply(x, gate)), 16), average

    names = check(module((2, 3, *size), body), seed=seed)
    assert sum(name.startswith("depthwise_summed") for name in names) == 1
    assert "average_of_sums" in names and not any(name.startswith("pool2d") for name in names)


def test_other_pools_and_writers_keep_kernels_of_their_own():
    """A maximum, windows, and an average of what a 1x1 convolution writes."""

    def body(net, x):
        x = net.depthwise(net.conv(x, 24))
        return (
            net(op.max(x, [2, 3], True)),
            net(op.nn.avg_pool2d(x, (2, 2))),
            net(op.mean(net.conv(x, 8), [2, 3], True)),
        )

    names = check(module((1, 8, 9, 7), body))
    assert not any("sum" in name for name in names)
    assert sum(name.startswith("pool2d") for name in names) == 3


def test_a_scaled_image_that_something_else_reads_is_made():
    def body(net, x):
        scaled = net(op.multiply(x, net(op.sigmoid(net(op.mean(x, [2, 3], True))))))
        return net(op.add(net.conv(scaled, 24), net(op.nn.relu(scaled))))

    names = check(module((1, 24, 9, 7), body))
    assert "relax.multiply" in names and not any(name.startswith("prologue") for name in names)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_block_of_convnext_is_all_kernels(fused):
    """Depthwise, channel norm, 1x1, GELU, 1x1, residual; the two 1x1 are one kernel where they may be fused."""

    def body(net, x):
        x = net.conv(x, 24, 3)
        norm = op.nn.layer_norm(net.depthwise(x, 7), net.constant(24), net.constant(24), axes=[1], epsilon=1e-6)
        inner = net.conv(net(op.nn.gelu(net.conv(net(norm), 96))), 24)
        return net(op.mean(net(op.add(x, inner)), [2, 3], True))

    names = check(module((1, 8, 10, 9), body), fused)
    assert not any(name.startswith("relax.") for name in names)
    assert sum(name.startswith("channel_norm") for name in names) == 1
    assert any(name.startswith("pointwise_pointwise") for name in names) == fused


def test_element_wise_operators_between_convolutions_stay_blocked():
    def body(net, x):
        left, right = net.conv(x, 24), net.conv(x, 24, 3)
        value = net(op.tanh(net(op.multiply(left, right))))
        value = net(op.subtract(net(op.maximum(value, net.constant(1, 24, 1, 1))), net.constant(1, 1, 9, 7)))
        return net(op.mean(net.conv(net(op.multiply(value, relax.const(np.float32(0.5)))), 8), [2, 3], True))

    assert not conversions(check(module((1, 3, 9, 7), body)))


def test_an_operand_with_one_channel_for_all_is_broadcast_over_the_lanes():
    def body(net, x):
        value = net.conv(x, 24)
        attention = net(op.sigmoid(net(op.mean(value, [1], True))))
        return net(op.mean(net.conv(net(op.multiply(value, attention)), 8), [2, 3], True))

    names = check(module((2, 3, 9, 7), body))
    assert len(conversions(names)) == 1  # the mean over channels reads plain


def test_operators_that_could_make_unused_lanes_infinite_read_plain_tensors():
    """Zero divided by zero in a lane beyond the channels, times a zero weight, would be NaN in every result."""

    channels = LANES + LANES // 2

    def body(net, x):
        first = net(op.nn.relu(net.conv(x, channels)))
        second = net(op.maximum(net.conv(x, channels), relax.const(np.ones((1, channels, 1, 1), np.float32))))
        return net(op.mean(net.conv(net(op.divide(first, second)), 8), [2, 3], True))

    assert len(conversions(check(module((1, 3, 9, 7), body)))) == 3


@pytest.mark.parametrize("parts", [(LANES, 2 * LANES, 24), (24, LANES)])
def test_channels_are_concatenated_blocked(parts):
    def body(net, x):
        joined = net(op.concat([net.conv(x, part) for part in parts], axis=1))
        return net(op.mean(net.conv(joined, 8), [2, 3], True))

    names = check(module((2, 3, 9, 7), body))
    assert not conversions(names) and "channel_move" in names


def shuffled(net, x, groups: int):
    batch, channels, height, width = map(int, x.ty.shape)
    apart = net(op.reshape(x, (batch, groups, channels // groups, height, width)))
    return net(op.reshape(net(op.permute_dims(apart, [0, 2, 1, 3, 4])), (batch, channels, height, width)))


def test_a_shuffle_net_moves_its_channels_in_one_kernel_for_each_reader():
    """Concatenation, shuffle and split: what passes a unit unchanged is not copied there."""

    def body(net, x):
        x = net(op.nn.relu(net.conv(x, 20)))
        for _ in range(2):
            passed = net(op.strided_slice(x, [1], [0], [10]))
            taken = net.conv(net(op.nn.relu(net.conv(net(op.strided_slice(x, [1], [10], [20])), 10))), 10)
            x = shuffled(net, net(op.concat([passed, taken], axis=1)), 2)
        return net(op.mean(net.conv(x, 8), [2, 3], True))

    names = check(module((2, 3, 9, 7), body))
    assert not conversions(names)
    assert sum(name.startswith("channel_move") for name in names) == 3  # before the two units, before the last layer
    assert not any(name.startswith("relax.") for name in names)


def test_parts_of_a_split_are_read_blocked():
    def body(net, x):
        parts = net(op.split(net.conv(x, 40), [LANES, 24], axis=1))
        kept = [net(relax.TupleGetItem(parts, index)) for index in range(3)]
        inner = net.conv(net(op.nn.relu(net.conv(kept[1], 12, 3))), 8)
        return net(op.mean(net.conv(net(op.concat([*kept, inner], axis=1)), 8), [2, 3], True))

    names = check(module((1, 3, 9, 7), body))
    assert not conversions(names) and sum(name.startswith("channel_move") for name in names) == 2


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "extra"), one_in(2, [(2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1), (3, 3, 0, 0)])
)
def test_transposed_convolutions_are_convolutions_and_one_move(kernel, stride, padding, extra):
    def body(net, x):
        x = net.conv(x, 24)
        weight = net.weight(24, LANES, kernel, kernel)
        x = net(op.nn.conv2d_transpose(x, weight, strides=stride, padding=padding, output_padding=extra))
        x = net(op.nn.relu(net(op.add(x, net.constant(1, LANES, 1, 1)))))
        return net(op.mean(net.conv(x, 8), [2, 3], True))

    mod = canonicalize(module((1, 3, 5, 4), body))
    names = check(mod)
    assert not conversions(names) and not any(name.startswith("relax.") for name in names)
    assert sum(name.startswith("channel_move") for name in names) == 1


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "groups"),
    one_in(2, [(4, 2, 1, LANES), (4, 2, 1, 2), (3, 1, 1, 2), (4, 1, 0, 1), (3, 1, 1, 1)]),
)
def test_transposed_convolutions_of_groups_and_of_stride_one(kernel, stride, padding, groups):
    """One group for each channel is how an image is doubled bilinearly; stride one begins a generator."""

    def body(net, x):
        x = net.conv(x, LANES)
        weight = net.weight(LANES, LANES // groups, kernel, kernel)
        x = net(op.nn.conv2d_transpose(x, weight, strides=stride, padding=padding, groups=groups))
        x = net(op.nn.relu(net(op.add(x, net.constant(1, LANES, 1, 1)))))
        return net(op.mean(net.conv(x, 8), [2, 3], True))

    mod = canonicalize(module((1, 3, 5, 4), body))
    names = check(mod)
    assert not conversions(names) and not any(name.startswith("relax.") for name in names)
    assert sum(name.startswith("channel_move") for name in names) == (stride > 1)


@pytest.mark.parametrize(("kernel", "stride", "padding"), one_in(2, [(3, 2, 1), (5, 2, 2), (4, 3, 0), (3, 2, 0)]))
def test_of_a_transposed_convolution_that_ends_within_a_stride_the_rest_is_cut_off(kernel, stride, padding):
    def body(net, x):
        x = net(op.nn.conv2d_transpose(net.conv(x, LANES), net.weight(LANES, 24, kernel, kernel), stride, padding))
        return net(op.mean(net.conv(net(op.nn.relu(x)), 8), [2, 3], True))

    names = check(canonicalize(module((1, 3, 5, 4), body)))
    assert not any("conv2d_transpose" in name for name in names) and not conversions(names)
    assert sum(name.startswith(("channel_move", "slice")) for name in names) == 2


def test_a_move_is_not_looked_through_where_its_sources_cannot_be_seen():
    """They live in another dataflow block."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 9, 7), "float32"))
    from tests.fusion.relax_models import Net

    net = Net(builder)
    with builder.function("main", [x]):
        with builder.dataflow():
            joined = builder.emit_output(op.concat([net.conv(x, 24), net.conv(x, 24)], axis=1))
        with builder.dataflow():
            half = net(op.strided_slice(joined, [1], [12], [36]))
            result = builder.emit_output(net.conv(half, 24))
        builder.emit_func_output(result)
    check(builder.get())


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    channels=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    outputs=st.integers(1, 40),
    image=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)),
    factor=st.sampled_from([1, 1, 2, 3]),
    lanes=st.sampled_from([4, 8, 16]),
)
def test_channel_moves_of_any_kind(seed, channels, outputs, image, factor, lanes):
    generator = np.random.default_rng(seed)
    batch, height, width = image
    arrays = [generator.standard_normal((batch, each, height, width), dtype=np.float32) for each in channels]
    source = generator.integers(0, len(arrays), (factor, factor, outputs))
    channel = generator.integers(0, np.array(channels)[source])
    if seed % 2:  # whole blocks that stay together
        source[:], channel = 0, np.broadcast_to(np.arange(outputs) % channels[0], source.shape)
    expected = np.empty((batch, outputs, height * factor, width * factor), np.float32)
    for y, x, c in np.ndindex(factor, factor, outputs):
        expected[:, c, y::factor, x::factor] = arrays[source[y, x, c]][:, channel[y, x, c]]
    function = channel_move([each.shape for each in arrays], np.stack([source, channel], axis=-1), lanes)
    output = tvm.runtime.tensor(np.full(block(expected, lanes).shape, np.nan, np.float32))
    blocked = [tvm.runtime.tensor(block(each, lanes)) for each in arrays]
    tvm.compile(tvm.IRModule({"main": function}), CPU.tvm_target())["main"](*blocked, output)
    np.testing.assert_array_equal(unblock(output.numpy(), outputs), expected)
    assert np.isfinite(output.numpy()).all()


def test_a_tensor_is_converted_once_for_several_readers():
    def body(net, x):
        value = net.conv(x, 24)
        return net(op.nn.softmax(value, axis=1)), net(op.nn.log_softmax(value, axis=1)), net.conv(value, 8)

    names = check(module((1, 3, 9, 7), body))
    assert len([name for name in names if name.startswith("to_plain")]) == 2  # of `value`, and of the last result


def test_pools_dense_layers_and_shapes_that_need_views():
    def body(net, x):
        pooled = net(op.mean(net.conv(x, 24), [2, 3], False))
        rows = net(op.nn.relu(net(op.matmul(net(op.reshape(pooled, (2, 3, 8))), net.weight(8, 20)))))
        return rows, net(op.nn.avg_pool2d(net.conv(x, 20), (3, 3), (2, 2), (1, 1), ceil_mode=True))

    check(module((2, 3, 9, 7), body))


def test_a_result_that_is_read_again_and_an_input_that_is_returned():
    def body(net, x):
        value = net.conv(x, 24)
        return value, net.conv(value, 8), x, value

    check(module((1, 3, 9, 7), body))


def test_functions_without_a_dataflow_block_and_with_two():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 9, 7), "float32"))
    from tests.fusion.relax_models import Net

    net = Net(builder)
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(op.nn.relu(net.conv(x, 24)))
        second = net(op.tanh(net.conv(first, 24, 3)))
        with builder.dataflow():
            third = builder.emit_output(op.add(net.conv(second, 24), first))
        builder.emit_func_output(third)
    check(builder.get())


def test_equal_operators_share_a_kernel_and_equal_constants_one_copy():
    def body(net, x):
        weight, bias = net.weight(24, 24, 1, 1), net.constant(1, 24, 1, 1)
        for _ in range(3):
            x = net(op.add(net(op.nn.conv2d(x, weight)), bias))
        return x

    mod = module((1, 24, 9, 7), body)
    result = lowered(mod)
    assert len([name for name in set(kernel_names(result)) if name.startswith("pointwise")]) == 1
    constants = {
        argument
        for block_ in result["main"].body.blocks
        for binding in block_.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name == "relax.call_tir"
        for argument in binding.value.args[1].fields
        if isinstance(argument, tvm.ir.GenericConst)
    }
    assert len({constant.__hash__() for constant in constants}) == 2


def test_the_original_module_is_not_changed_and_unplanned_nodes_stay():
    mod = module((1, 3, 9, 7), lambda net, x: net.conv(net.conv(x, 24), 8))
    before = mod.script()
    plan = plan_of(mod, fused=False)
    partial = lower(mod, FusionPlan(plan.groups[:1]), configs_of(plan), CPU)
    assert mod.script() == before
    assert kernel_names(partial)[-2:] == ["relax.nn.conv2d", "relax.add"]
    arrays = inputs_of(mod)
    assert_close(build_executable(partial, CPU)(*arrays), stock(mod, arrays))


def test_a_covered_operator_needs_a_configuration():
    mod = module((1, 3, 9, 7), lambda net, x: net.conv(x, 24))
    with pytest.raises(KeyError):
        lower(mod, plan_of(mod, fused=False), {}, CPU)


def test_groups_only_makes_kernels_for_any_pipeline_and_leaves_the_rest():
    def body(net, x):
        x = net(op.erf(net.conv(net.relu6(net.depthwise(net.conv(x, 24))), 40)))
        return net(op.multiply(x, x))

    mod = module((2, 3, 9, 7), body)
    result = lowered(mod, fused=True, groups_only=True)
    assert kernel_names(result)[-2:] == ["relax.erf", "relax.multiply"]
    arrays = inputs_of(mod)
    assert_close(stock(result, arrays), stock(mod, arrays))


@pytest.mark.thorough
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.integers(1, 2),
    channels=st.sampled_from([3, 17, 24, 40]),
    size=st.tuples(st.integers(5, 13), st.integers(5, 13)),
    layers=st.lists(st.sampled_from(["pointwise", "depthwise", "conv", "grouped", "pool", "tanh", "add"]), max_size=4),
    fused=st.booleans(),
)
def test_random_chains(batch, channels, size, layers, fused):
    def body(net, x):
        x = first = net.conv(x, channels)
        for layer in layers:
            if layer == "pointwise":
                x = net(op.nn.silu(net.conv(x, channels)))
            elif layer == "depthwise":
                x = net.relu6(net.depthwise(x))
            elif layer == "conv":
                x = net(op.nn.relu(net.conv(x, channels, 3)))
            elif layer == "grouped":
                x = net.conv(x, channels, 3, groups=2 if channels % 2 == 0 else 1)
            elif layer == "pool":
                x = net(op.nn.avg_pool2d(x, (3, 3), (1, 1), (1, 1)))
            elif layer == "tanh":
                x = net(op.tanh(x))
            else:
                x = net(op.add(x, first))
        return x

    check(module((batch, 3, *size), body), fused)


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)),
    lanes=st.sampled_from([4, 8, 16]),
)
def test_layout_kernels(shape, lanes):
    plain = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    blocked = block(plain, lanes)
    for make, source, expected in ((to_blocked, plain, blocked), (to_plain, blocked, unblock(blocked, shape[1]))):
        mod = tvm.IRModule({"main": make(shape, lanes)})
        output = tvm.runtime.tensor(np.full_like(expected, np.nan))
        tvm.compile(mod, CPU.tvm_target())["main"](tvm.runtime.tensor(source), output)
        np.testing.assert_array_equal(output.numpy(), expected)
