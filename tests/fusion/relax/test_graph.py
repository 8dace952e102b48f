"""What becomes a node, what belongs to its epilogue, and what is left to others."""

# ruff: noqa: E402

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from costmodel.base.errors import ModelError
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Epilogue, Pool2d
from fusion.relax.extract import extract_graph
from tests.fusion.relax_models import Net, module

IMAGE = (2, 8, 9, 7)


def graph_of(body, shape=IMAGE, *more, dtype="float32"):
    return extract_graph(module(shape, body, *more, dtype=dtype))


def only_node(body, shape=IMAGE, *more):
    graph = graph_of(body, shape, *more)
    assert len(graph.nodes) == 1, graph.nodes
    return graph.nodes[0]


def scalar(value: float) -> relax.Expr:
    return relax.const(np.float32(value))


# --- convolutions --------------------------------------------------------------------------------


def test_a_convolution_takes_shape_stride_padding_dilation_and_groups_from_relax():
    node = only_node(
        lambda net, x: net(
            op.nn.conv2d(x, net.weight(12, 4, 3, 5), strides=(2, 1), padding=(1, 2, 3, 4), dilation=(2, 1), groups=2)
        )
    )
    assert node.operator == Conv2d(2, 8, 9, 7, 12, (3, 5), (2, 1), (1, 2, 3, 4), (2, 1), 2, Epilogue())
    assert node.parameters[0].weight.shape == (12, 4, 3, 5) and node.parameters[0].bias is None
    assert node.output == node.covered[-1] and node.residual is None


def test_depthwise_with_bias_and_relu6_is_one_node_named_after_the_convolution():
    node = only_node(lambda net, x: net.relu6(net.depthwise(x, name="stem")))
    assert node.name == "stem" and node.operator.is_depthwise
    assert node.operator.epilogue == Epilogue(bias=True, activation="relu6")
    assert node.parameters[0].bias.shape == (8,) and len(node.covered) == 3


SIXTH = 1.0 / 6.0


def tanh_argument(net, v):
    """What the approximation of GELU takes the hyperbolic tangent of."""
    cube = net(op.multiply(net(op.power(v, scalar(3.0))), scalar(0.044715)))
    return net(op.multiply(net(op.add(v, cube)), scalar((2.0 / np.pi) ** 0.5)))


SPELLINGS = {
    "relu": [lambda net, v: op.nn.relu(v), lambda net, v: op.maximum(v, scalar(0))],
    "relu6": [
        lambda net, v: op.clip(v, 0, 6),
        lambda net, v: op.minimum(net(op.maximum(v, scalar(0))), scalar(6)),
        lambda net, v: op.maximum(scalar(0), net(op.minimum(scalar(6), v))),
        lambda net, v: op.clip(net(op.nn.relu(v)), -1, 6),
    ],
    "sigmoid": [
        lambda net, v: op.sigmoid(v),
        lambda net, v: op.divide(scalar(1), net(op.add(net(op.exp(net(op.negative(v)))), scalar(1)))),
    ],
    "silu": [
        lambda net, v: op.nn.silu(v),
        lambda net, v: op.multiply(v, net(op.sigmoid(v))),
        lambda net, v: op.multiply(net(op.sigmoid(v)), v),
    ],
    "gelu": [
        lambda net, v: op.nn.gelu(v),
        lambda net, v: op.multiply(
            net(op.multiply(v, scalar(0.5))),
            net(op.add(net(op.erf(net(op.divide(v, scalar(2**0.5))))), scalar(1.0))),
        ),
    ],
    "gelu_tanh": [
        lambda net, v: op.nn.gelu_tanh(v),
        lambda net, v: op.multiply(
            net(op.multiply(v, scalar(0.5))), net(op.add(net(op.tanh(tanh_argument(net, v))), scalar(1.0)))
        ),
    ],
    "hard_sigmoid": [
        lambda net, v: op.multiply(net(op.clip(net(op.add(v, scalar(3))), 0, 6)), scalar(SIXTH)),
        lambda net, v: op.clip(net(op.add(net(op.multiply(v, scalar(SIXTH))), scalar(0.5))), 0, 1),
    ],
    "hard_swish": [
        lambda net, v: op.multiply(v, net(op.multiply(net(op.clip(net(op.add(v, scalar(3))), 0, 6)), scalar(SIXTH)))),
        lambda net, v: op.divide(net(op.multiply(v, net(op.clip(net(op.add(v, scalar(3))), 0, 6)))), scalar(6)),
        lambda net, v: op.multiply(
            net(op.multiply(v, scalar(SIXTH))), net(op.minimum(net(op.nn.relu(net(op.add(v, scalar(3))))), scalar(6)))
        ),
    ],
}


def mish(net, v):
    """As PyTorch exports it at opset 17: softplus as TVM spells it, without overflow."""
    rest = net(op.log(net(op.add(scalar(1), net(op.exp(net(op.negative(net(op.abs(v))))))))))
    return op.multiply(v, net(op.tanh(net(op.add(net(op.nn.relu(v)), rest)))))


def elu(net, v):
    """As TVM spells ONNX's."""
    below = net(op.multiply(scalar(-1), net(op.nn.relu(net(op.subtract(scalar(1), net(op.exp(v))))))))
    return op.add(below, net(op.nn.relu(v)))


def selu(net, v):
    """Scale and slope as ONNX has them."""
    below = net(op.subtract(net(op.exp(net(op.minimum(v, scalar(0))))), scalar(1)))
    above = net(op.add(net(op.nn.relu(v)), net(op.multiply(scalar(1.67326319217681884765625), below))))
    return op.multiply(scalar(1.05070102214813232421875), above)


SPELLINGS |= {
    "selu": [selu],
    "softplus": [lambda net, v: op.nn.softplus(v)],
    "tanh": [lambda net, v: op.tanh(v)],
    "mish": [mish, lambda net, v: op.multiply(v, net(op.tanh(net(op.nn.softplus(v)))))],
    "elu": [elu],
    "quick_gelu": [lambda net, v: op.multiply(v, net(op.sigmoid(net(op.multiply(v, scalar(1.702))))))],
}


@pytest.mark.parametrize(
    ("name", "spelling"), [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings]
)
def test_every_spelling_of_an_activation_is_absorbed(name, spelling):
    node = only_node(lambda net, x: net(spelling(net, net.conv(x, 12))))
    assert node.operator.epilogue == Epilogue(bias=True, activation=name)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda net, v: op.nn.leakyrelu(v, 0.1),
        lambda net, v: op.maximum(v, net(op.multiply(v, scalar(0.1)))),
    ],
)
def test_a_leaky_relu_is_absorbed_with_its_slope(spelling):
    node = only_node(lambda net, x: net(spelling(net, net.conv(x, 12))))
    assert node.operator.epilogue == Epilogue(bias=True, activation="leaky_relu", slope=0.1)


def test_an_elu_is_absorbed_with_its_slope():
    def body(net, x):
        value = net.conv(x, 12)
        below = net(op.subtract(net(op.exp(net(op.minimum(value, scalar(0))))), scalar(1)))
        return net(op.add(net(op.nn.relu(value)), net(op.multiply(scalar(0.7), below))))

    assert only_node(body).operator.epilogue == Epilogue(bias=True, activation="elu", slope=0.7)


@pytest.mark.parametrize("name", ["hard_sigmoid", "hard_swish"])
def test_hard_activations_are_absorbed_with_their_slope(name):
    """0.2 is ONNX's default of HardSigmoid, and Paddle's."""

    def body(net, x):
        value = net.conv(x, 12)
        gate = net(op.clip(net(op.add(net(op.multiply(value, scalar(0.2))), scalar(0.5))), 0, 1))
        return gate if name == "hard_sigmoid" else net(op.multiply(value, gate))

    assert only_node(body).operator.epilogue == Epilogue(bias=True, activation=name, slope=0.2)


def test_a_parametric_relu_is_absorbed_with_its_slopes():
    slopes = relax.const(np.linspace(-0.5, 1.5, 12, dtype=np.float32))
    node = only_node(lambda net, x: net(op.nn.prelu(net.conv(x, 12), slopes, axis=1)))
    assert node.operator.epilogue == Epilogue(bias=True, activation="prelu")
    assert np.array_equal(node.parameters[0].slopes, np.linspace(-0.5, 1.5, 12, dtype=np.float32))
    one = relax.const(np.array([0.25], np.float32))
    node = only_node(lambda net, x: net(op.nn.prelu(net.conv(x, 12), one, axis=3)))
    assert node.operator.epilogue == Epilogue(bias=True, activation="leaky_relu", slope=0.25)


def test_slopes_along_the_columns_are_not_those_of_channels():
    graph = graph_of(lambda net, x: net(op.nn.prelu(net.conv(x, 7), net.constant(7), axis=3)))
    assert graph.nodes[0].operator.epilogue == Epilogue(bias=True) and len(graph.others) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda net, v: op.clip(v, 0, 5.999),
        lambda net, v: op.clip(net(op.add(net(op.multiply(v, scalar(0.2))), scalar(0.4))), 0, 1),
        lambda net, v: op.multiply(v, net(op.sigmoid(net(op.multiply(v, scalar(1.7)))))),
        lambda net, v: op.nn.leakyrelu(v, 1.5),
        lambda net, v: op.tanh(net(op.multiply(v, scalar(1.001)))),
    ],
)
def test_a_function_that_is_close_to_an_activation_is_not_absorbed(other):
    graph = graph_of(lambda net, x: net(other(net, net.conv(x, 12))))
    assert graph.nodes[0].operator.epilogue == Epilogue(bias=True)
    assert graph.others


def test_a_layer_norm_over_channels_is_a_node_and_one_over_columns_is_not():
    def norm(axis, size):
        weight, bias = (relax.const(np.full(size, value, np.float32)) for value in (2.0, 1.0))
        return lambda net, x: net(op.nn.layer_norm(net.conv(x, 12), weight, bias, axes=[axis], epsilon=1e-6))

    graph = graph_of(norm(1, 12))
    assert isinstance(graph.nodes[1].operator, ChannelNorm)
    assert graph.nodes[1].operator.epsilon == pytest.approx(1e-6)
    assert np.array_equal(graph.nodes[1].parameters[0].weight, np.full(12, 2.0))
    columns = graph.nodes[1].operator.width
    assert [other.operator for other in graph_of(norm(3, columns)).others] == ["relax.nn.layer_norm"]


def test_a_scale_and_a_shift_behind_the_activation_belong_to_the_convolution():
    """hard-swish, then 2 (x + 1) - 3 = 2 x - 1, as PP-LCNetV3 writes it with scalars."""

    def body(net, x):
        value = net(op.nn.silu(net.conv(x, 8)))
        value = net(op.multiply(net(op.add(scalar(1.0), value)), scalar(2.0)))
        return net(op.subtract(value, scalar(3.0)))

    node = only_node(body)
    assert node.operator.epilogue == Epilogue(True, "silu", affine=True)
    assert np.array_equal(node.parameters[0].scale, np.full(8, 2.0))
    assert np.array_equal(node.parameters[0].shift, np.full(8, -1.0))


def test_a_scale_has_the_values_of_its_channels_and_a_residual_may_follow():
    factors = relax.const(np.arange(8, dtype=np.float32).reshape(8, 1, 1))

    def body(net, x):
        return net(op.add(net(op.multiply(net(op.nn.relu(net.conv(x, 8))), factors)), x))

    node = only_node(body)
    assert node.operator.epilogue == Epilogue(True, "relu", "after_activation", affine=True)
    assert np.array_equal(node.parameters[0].scale, np.arange(8))
    assert np.array_equal(node.parameters[0].shift, np.zeros(8))


@pytest.mark.parametrize(
    "tail",
    [
        lambda net, v: op.subtract(scalar(3.0), v),
        lambda net, v: op.multiply(v, net.constant(1, 8, 9, 7)),
        lambda net, v: op.multiply(v, v),
    ],
)
def test_what_is_no_constant_of_a_channel_is_no_scale(tail):
    graph = graph_of(lambda net, x: net(tail(net, net(op.nn.relu(net.conv(x, 8))))))
    assert graph.nodes[0].operator.epilogue == Epilogue(True, "relu")
    assert len(graph.others) == 1


def test_what_stands_behind_a_residual_of_the_second_kind_stays_outside():
    graph = graph_of(lambda net, x: net(op.multiply(net(op.add(net(op.nn.relu(net.conv(x, 8))), x)), scalar(2.0))))
    assert graph.nodes[0].operator.epilogue == Epilogue(True, "relu", "after_activation")
    assert [other.operator for other in graph.others] == ["relax.multiply"]


def test_a_dense_layer_has_no_scale_behind_its_activation():
    def body(net, x):
        return net(op.multiply(net(op.nn.relu(net(op.matmul(x, net.weight(4, 8))))), scalar(2.0)))

    graph = graph_of(body, (3, 4))
    assert graph.nodes[0].operator.epilogue == Epilogue(activation="relu")


def test_residual_before_and_after_the_activation():
    before = only_node(lambda net, x: net(op.nn.relu(net(op.add(net.conv(x, 8), x)))))
    assert before.operator.epilogue == Epilogue(True, "relu", "before_activation")
    after = only_node(lambda net, x: net(op.add(x, net.relu6(net.conv(x, 8)))))
    assert after.operator.epilogue == Epilogue(True, "relu6", "after_activation")
    assert before.residual.name == after.residual.name == "x0"


def test_a_second_residual_is_left_outside():
    graph = graph_of(lambda net, x: net(op.add(net(op.add(net.conv(x, 8), x)), x)))
    assert graph.nodes[0].operator.epilogue.residual == "before_activation"
    assert [other.operator for other in graph.others] == ["relax.add"]


def test_a_value_that_something_else_reads_ends_the_epilogue():
    def body(net, x):
        biased = net.conv(x, 8)
        return net(op.add(net(op.nn.relu(biased)), net(op.tanh(biased))))

    graph = graph_of(body)
    assert graph.nodes[0].operator.epilogue == Epilogue(bias=True)
    assert len(graph.others) == 3


def test_a_returned_value_ends_the_epilogue():
    def body(net, x):
        biased = net.conv(x, 8)
        return biased, net(op.nn.relu(biased))

    assert graph_of(body).nodes[0].operator.epilogue == Epilogue(bias=True)


def test_the_sum_of_two_convolutions_belongs_to_the_later_one():
    graph = graph_of(lambda net, x: net(op.add(net.conv(x, 8, name="a"), net.conv(x, 8, 3, name="b"))))
    first, second = graph.nodes
    assert (first.name, first.operator.epilogue.residual) == ("a", None)
    assert (second.name, second.operator.epilogue.residual) == ("b", "before_activation")
    assert second.residual == first.output


def test_a_convolution_added_to_itself_is_not_its_own_residual():
    def body(net, x):
        value = net.conv(x, 8)
        return net(op.add(value, value))

    assert graph_of(body).nodes[0].operator.epilogue == Epilogue(bias=True)


def test_a_broadcast_operand_is_no_residual():
    graph = graph_of(lambda net, x, y: net(op.add(net.conv(x, 8), y)), IMAGE, (2, 8, 1, 1))
    assert graph.nodes[0].operator.epilogue == Epilogue(bias=True)


def test_biases_add_up_and_a_subtraction_is_a_negative_bias():
    def body(net, x):
        value = net.conv(x, 8, bias=False)
        value = net(op.add(relax.const(np.full((8, 1, 1), 5, np.float32)), value))
        return net(op.subtract(value, scalar(2)))

    node = only_node(body)
    np.testing.assert_allclose(node.parameters[0].bias, np.full(8, 3.0))


def test_a_constant_that_varies_over_pixels_is_no_bias():
    graph = graph_of(lambda net, x: net(op.add(net.conv(x, 8, bias=False), net.constant(1, 8, 9, 7))))
    assert graph.nodes[0].operator.epilogue == Epilogue()


# --- dense layers and pools ----------------------------------------------------------------------


def test_dense_layers_take_leading_dimensions_as_rows():
    def body(net, x):
        return net(op.nn.relu(net(op.add(net(op.matmul(x, net.weight(6, 4))), net.constant(4)))))

    node = only_node(body, (2, 3, 6))
    assert node.operator == Dense(6, 6, 4, Epilogue(True, "relu"))
    assert node.parameters[0].weight.shape == (4, 6)


def test_a_transposed_constant_is_a_weight():
    def body(net, x):
        weight = relax.const(np.arange(12, dtype=np.float32).reshape(2, 6))
        return net(op.matmul(x, net(op.permute_dims(weight))))

    node = only_node(body, (3, 6))
    np.testing.assert_array_equal(node.parameters[0].weight, np.arange(12, dtype=np.float32).reshape(2, 6))


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (lambda x: op.mean(x, [2, 3], True), Pool2d("average", *IMAGE, (9, 7))),
        (lambda x: op.mean(x, [-1, -2], False), Pool2d("average", *IMAGE, (9, 7))),
        (lambda x: op.max(x, [2, 3], True), Pool2d("max", *IMAGE, (9, 7))),
        (lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)), Pool2d("average", *IMAGE, (9, 7))),
        (
            lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
            Pool2d("max", *IMAGE, (3, 3), (2, 2), (1, 1, 1, 1)),
        ),
        (
            lambda x: op.nn.avg_pool2d(x, (2, 2), (2, 2), count_include_pad=True),
            Pool2d("average", *IMAGE, (2, 2), (2, 2), (0, 0, 0, 0), True),
        ),
        # 9 x 7 in windows of 2: with ceil_mode a fifth row and a fourth column look one pixel beyond the border.
        (
            lambda x: op.nn.max_pool2d(x, (2, 2), (2, 2), ceil_mode=True),
            Pool2d("max", *IMAGE, (2, 2), (2, 2), (0, 0, 1, 1)),
        ),
    ],
)
def test_pools(pool, expected):
    assert only_node(lambda net, x: net(pool(x))).operator == expected


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: op.mean(x, [1], True),
        lambda x: op.mean(x, [1, 2, 3], True),
        lambda x: op.nn.adaptive_avg_pool2d(x, (2, 2)),
        lambda x: op.nn.max_pool2d(x, (2, 2), dilation=(2, 2)),
        lambda x: op.nn.avg_pool2d(x, (2, 2), (2, 2), ceil_mode=True, count_include_pad=True),
        lambda x: op.nn.avg_pool2d(x, (2, 2), (2, 2), padding=(2, 2)),
    ],
)
def test_pools_of_another_kind_are_left_to_others(pool):
    graph = graph_of(lambda net, x: net(pool(x)))
    assert not graph.nodes and len(graph.others) == 1


# --- everything else -----------------------------------------------------------------------------


def test_what_no_template_covers_is_listed():
    def body(net: Net, x, weight):
        variable = net(op.nn.conv2d(x, weight), "variable_weight")
        return net(op.nn.softmax(variable, axis=1), "softmax")

    graph = graph_of(body, IMAGE, (4, 8, 1, 1))
    assert not graph.nodes
    assert [(other.name, other.operator) for other in graph.others] == [
        ("variable_weight", "relax.nn.conv2d"),
        ("softmax", "relax.nn.softmax"),
    ]


@pytest.mark.parametrize(
    ("body", "operator", "reason"),
    [
        (lambda net, x: op.cumsum(x, axis=1), "cumsum", "no template computes it"),
        (lambda net, x: op.reshape(x, (2, 504)), "reshape", "moves values"),
        (lambda net, x: op.nn.conv2d(x, x), "nn.conv2d", "its weight is no constant"),
        (
            lambda net, x: op.nn.conv2d(x, net.weight(4, 7, 1, 1), data_layout="NHWC"),
            "nn.conv2d",
            "its layout, rank or window has no template",
        ),
        (lambda net, x: op.add(x, x), "add", "follows no layer that has an epilogue"),
        (lambda net, x: op.erf(net.conv(x, 8)), "erf", "no epilogue has this form"),
        (
            lambda net, x: op.multiply(net.conv(x, 8), net(op.mean(x, [2, 3], keepdims=True))),
            "multiply",
            "an operand has another shape than the result",
        ),
        (lambda net, x: op.astype(x, "float16"), "astype", "no template computes it"),
        (lambda net, x: op.nn.relu(net(op.astype(x, "float16"))), "nn.relu", "it is not of float32"),
    ],
)
def test_why_an_operator_is_in_no_kernel(body, operator, reason):
    shape = (2, 2, 1, 1) if reason == "its weight is no constant" else (2, 8, 9, 7)
    other = graph_of(lambda net, x: net(body(net, x)), shape).others[-1]
    assert (other.operator, other.reason) == (f"relax.{operator}", reason)


def test_a_second_reader_is_the_reason():
    def body(net, x):
        value = net.conv(x, 8)
        return net(op.nn.relu(value)), value

    (other,) = graph_of(body).others
    assert other.reason == "something else reads the layer before it"


def test_other_layouts_and_types_are_left_to_others():
    nhwc = graph_of(lambda net, x: net(op.nn.conv2d(x, net.weight(4, 7, 1, 1), data_layout="NHWC")))
    assert not nhwc.nodes
    half = graph_of(
        lambda net, x: net(op.nn.conv2d(x, relax.const(np.ones((4, 8, 1, 1), np.float16)))), dtype="float16"
    )
    assert not half.nodes


def test_a_symbolic_batch_is_left_to_others():
    builder = relax.BlockBuilder()
    batch = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((batch, 8, 4, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            net = Net(builder)
            output = builder.emit_output(op.nn.conv2d(x, net.weight(4, 8, 1, 1)))
        builder.emit_func_output(output)
    graph = extract_graph(builder.get())
    assert not graph.nodes
    assert graph.others[0].reason == "its shape is not known while compiling"


def test_uses_are_counted_once_per_reading_and_per_result():
    def body(net, x):
        value = net.conv(x, 8)
        return net(op.add(value, value)), value

    graph = graph_of(body)
    (node,) = graph.nodes
    # Twice in the addition and once in the tuple that is returned.
    assert graph.use_counts()[node.output] == 3
    assert graph.use_counts()[node.data] == 1


def test_nodes_stand_in_program_order_with_unique_names():
    def body(net, x):
        for _ in range(3):
            x = net.conv(x, 8)
        return x

    names = [node.name for node in graph_of(body).nodes]
    assert len(set(names)) == 3


def test_extraction_changes_nothing_and_names_a_missing_function():
    mod = module(IMAGE, lambda net, x: net.relu6(net.conv(x, 8)))
    before = mod.script()
    extract_graph(mod)
    assert mod.script() == before
    with pytest.raises(ModelError, match="no Relax function 'absent'; it has main"):
        extract_graph(mod, "absent")
