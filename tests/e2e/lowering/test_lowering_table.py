"""What each family of operators becomes. One operator per case, sizes small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from costmodel.gpu import gpu_cost_model
from costmodel.gpu.fitted import packaged_machine
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    OptimizerStep,
    Pooling,
    RadixSort,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from e2e.lowering import unknown_operators
from e2e.lowering.families.convolutions import copied_bytes
from e2e.lowering.families.optimizer_operators import list_launches
from e2e.lowering.families.work import Context, size_bytes
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, Value
from e2e.step.options import SeenGpu, StepOptions, Tf32Switches


def t(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None, number: int = 0) -> Tensor:
    """A tensor on the GPU; equal numbers share memory."""
    return Tensor(number, number, shape, dtype, "cuda:0", stride)


def out(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> Tensor:
    return t(*shape, dtype=dtype, stride=stride, number=99)


def records(name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], **options: Any) -> list[Any]:
    trace = OperatorTrace((OperatorCall(0, name, None, 0, inputs, outputs),))
    return [record for task in lower(trace, StepOptions(**options)).tasks for record in task.operators]


def test_products_and_their_layouts():
    assert records("aten::mm", (t(8, 4), t(4, 6)), (out(8, 6),)) == [Gemm(1, 8, 6, 4)]
    by_transpose = t(4, 6, stride=(1, 4))
    assert records("aten::mm", (t(8, 4), by_transpose), (out(8, 6),)) == [Gemm(1, 8, 6, 4, transpose_b=True)]
    assert records("aten::bmm", (t(5, 8, 4, stride=(32, 1, 8)), t(5, 4, 6)), (out(5, 8, 6),)) == [
        Gemm(5, 8, 6, 4, transpose_a=True)
    ]
    assert records("aten::addmm", (t(6), t(8, 4), t(4, 6)), (out(8, 6),)) == [Gemm(1, 8, 6, 4, bias=True)]
    assert records("aten::matmul", (t(2, 8, 4), t(4, 6)), (out(2, 8, 6),)) == [Gemm(1, 16, 6, 4)]


def test_tf32_is_for_float32_products_alone():
    assert records("aten::mm", (t(8, 4), t(4, 6)), (out(8, 6),), dtype="tf32") == [Gemm(1, 8, 6, 4, "tf32")]
    half = (t(8, 4, dtype="float16"), t(4, 6, dtype="float16"))
    assert records("aten::mm", half, (out(8, 6, dtype="float16"),), dtype="tf32") == [Gemm(1, 8, 6, 4, "float16")]
    assert records("aten::add", (t(8), t(8), 1), (out(8),), dtype="tf32")[0].dtype == "float32"


def test_a_few_sought_elements_are_compared_with_all():
    data, sought = t(4, 1024, dtype="int64"), t(3, dtype="int64", number=1)
    fill, compare, found, copy = records("aten::isin", (data, sought), (out(4, 1024, dtype="bool"),))
    assert [fill.kind, compare.kind, copy.kind] == ["fill", "eq", "copy"]
    assert (fill.elements, compare.elements, copy.elements) == (4096, 3 * 4096, 4096)
    assert found == Reduction("any", 3 * 4096, 4096, "bool")
    many = OperatorCall(0, "aten::isin", None, 0, (data, t(1024, dtype="int64", number=1)), (out(4, 1024),))
    assert unknown_operators(lower(OperatorTrace((many,)), StepOptions())) == {"aten::isin": 1}


def test_convolution_and_its_gradients():
    forward = Conv2d(2, 3, 16, 16, 8, (3, 3), (2, 2), (1, 1, 1, 1))
    data, weight = t(2, 3, 16, 16), t(8, 3, 3, 3)
    arguments = (data, weight, (1, 1), (2, 2), (1, 1), 1, False, False, True)
    assert records("aten::cudnn_convolution", arguments, (out(2, 8, 8, 8),)) == [forward]
    gradient = t(2, 8, 8, 8)
    tail: tuple[Value, ...] = ((8,), (2, 2), (1, 1), (1, 1), False, (0, 0), 1)
    wanted = (gradient, data, weight, *tail, (True, True, True))
    assert records("aten::convolution_backward", wanted, (out(2, 3, 16, 16),)) == [
        ConvolutionBackward(forward, "data"),
        ConvolutionBackward(forward, "weight"),
        Reduction("sum", 2 * 8 * 8 * 8, 8, one_by_one=True),
    ]
    first_layer = (gradient, data, weight, (0,), *tail[1:], (False, True, False))
    assert records("aten::convolution_backward", first_layer, (None, out(8, 3, 3, 3))) == [
        ConvolutionBackward(forward, "weight")
    ]


def test_convolutions_of_one_and_three_dimensions_keep_their_flops():
    line = records("aten::conv1d", (t(2, 4, 32), t(8, 4, 5), None, (1,), (2,), (1,), 1), (out(2, 8, 32),))
    assert line[0].flops == 2 * 2 * 8 * 32 * 4 * 5
    cube = records("aten::conv3d", (t(1, 4, 8, 8, 8), t(6, 4, 3, 3, 3), None, 1, 1, 1, 1), (out(1, 6, 8, 8, 8),))
    assert cube[0].flops == 2 * 6 * 8 * 8 * 8 * 4 * 27


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_convolution_over_volumes_moves_each_plane_once(steps, groups):
    side = 8 // steps
    made = out(2, 8, side, side, side)
    inputs = (t(2, 8, 8, 8, 8), t(8, 8 // groups, 3, 3, 3), None, steps, 1, 1, groups)
    (record,) = records("aten::conv3d", inputs, (made,))
    assert record.input_bytes == 4 * 2 * 8 * 8**3 and record.output_bytes == 4 * 2 * 8 * side**3
    assert record.weight_bytes == 4 * 8 * 8 // groups * 27
    assert record.is_depthwise == (groups == 8)


def test_the_maximum_of_a_window_comes_with_its_place():
    image, result = t(2, 3, 8, 8, dtype="float16"), out(2, 3, 4, 4, dtype="float16")
    (forward,) = records("aten::max_pool2d_with_indices", (image, (2, 2)), (result, out(2, 3, 4, 4, dtype="int64")))
    assert (forward.read_bytes, forward.write_bytes) == (2 * 6 * 64, (2 + 8) * 6 * 16)
    (average,) = records("aten::avg_pool2d", (image, (2, 2)), (result,))
    assert average.write_bytes == 2 * 6 * 16
    backward = records("aten::max_pool2d_with_indices_backward", (result, image, (2, 2)), (t(2, 3, 8, 8),))[-1]
    assert (backward.read_bytes, backward.write_bytes) == (forward.write_bytes, forward.read_bytes)


def test_group_norm_takes_moments_then_factors_then_scales():
    picture = t(4, 8, 5, 6)
    call = (picture, t(8), t(8), 4, 8, 30, 2, 1e-5)
    moments, factors, scaled = records("aten::native_group_norm", call, (out(4, 8, 5, 6), out(4, 2), out(4, 2)))
    assert (moments.kind, moments.elements, moments.outputs) == ("moments", 4 * 240, 2 * 8)
    assert factors.elements == 4 * 8 and (scaled.elements, scaled.inputs) == (4 * 240, 1)
    last = t(4, 8, 5, 6, stride=(240, 1, 48, 8))
    assert isinstance(records("aten::native_group_norm", (last, *call[1:]), (out(4, 8, 5, 6),))[0], Rearrangement)
    backward = (picture, picture, t(4, 2), t(4, 2), t(8), 4, 8, 30, 2, (True, True, True))
    made = records("aten::native_group_norm_backward", backward, (out(4, 8, 5, 6), out(8), out(8)))
    large = [each for each in made if each.read_bytes >= 2 * 4 * 4 * 240]
    assert [type(each).__name__ for each in large] == ["Reduction", "Elementwise"]


@pytest.mark.parametrize(
    ("length", "passes", "grown"),
    [(400, 1, 1), (4096, 1, 1), (16384, 2, 1), (131, 2, 512 / 131), (8191, 4, 16384 / 8191)],
)
def test_fourier_transforms_pass_over_their_data(length, passes, grown):
    spectrum = out(6, length // 2 + 1, dtype="complex64")
    found = records("aten::_fft_r2c", (t(6, length), (1,), 0, True), (spectrum,))
    assert len(found) == passes
    assert found[0].read_bytes == pytest.approx(max(6 * length * 4, 6 * (length // 2 + 1) * 8) * grown, rel=1e-3)
    first = records("aten::_fft_r2c", (t(length, 6), (0,), 1, True), (out(length // 2 + 1, 6, dtype="complex64"),))
    assert isinstance(first[0], Rearrangement) and first[-1].kind == "mul"


def test_transposed_convolution_is_a_data_gradient():
    inputs = (t(1, 8, 4, 4), t(8, 3, 2, 2), (0, 0), (0, 0), (2, 2), (1, 1), 1, False, False, True)
    (record,) = records("aten::cudnn_convolution_transpose", inputs, (out(1, 3, 8, 8),))
    assert record == ConvolutionBackward(Conv2d(1, 3, 8, 8, 8, (2, 2), (2, 2)), "data")


def test_normalisations():
    data = t(4, 16, 32)
    assert records("aten::native_layer_norm", (data, (32,), t(32), t(32), 1e-5), (out(4, 16, 32),)) == [
        Normalization("layer_norm", 64, 32)
    ]
    backward = (t(4, 16, 32), data, (32,), t(64), t(64), t(32), t(32), (True, True, True))
    assert records("aten::native_layer_norm_backward", backward, (out(4, 16, 32), out(32), out(32))) == [
        Normalization("layer_norm", 64, 32, direction="backward"),
        Reduction("norm_parameters", 2 * 64 * 32, 64, contiguous=False),
    ]
    picture = t(2, 8, 4, 4)
    norm = (picture, t(8), t(8), t(8), t(8), False, 0.1, 1e-5)
    assert records("aten::cudnn_batch_norm", norm, (out(2, 8, 4, 4),)) == [
        Normalization("batch_norm", 32, 8, training=False)
    ]
    # Instance norm is batch norm of one picture; volumes have few channels too.
    for shape in ((1, 16, 4, 4), (2, 8, 4, 4, 4)):
        norm = (t(*shape), *(t(shape[1]) for _ in range(4)), True, 0.1, 1e-5)
        (record,) = records("aten::cudnn_batch_norm", norm, (out(*shape),))
        assert isinstance(record, Normalization) and record.apart


def test_softmax_over_any_dimension():
    assert records("aten::_softmax", (t(2, 3, 5), -1, False), (out(2, 3, 5),)) == [Softmax(6, 5)]
    # Along an inner dimension CUDA runs another kernel, which reads its operand once each for maximum, sum and result.
    inner = records("aten::_softmax", (t(2, 3, 5), 1, False), (out(2, 3, 5),))
    assert inner == [Elementwise("spatial_softmax", 30, inputs=3, chained=9, column=3)]
    # A softmax that clears rows without a finite score has four more kernels; its gradient begins with a product.
    assert [type(each) for each in records("aten::_safe_softmax", (t(6, 5), -1), (out(6, 5),))] == [
        Softmax, Elementwise, Reduction, Elementwise, Elementwise,
    ]  # fmt: skip
    gradient = records("aten::_softmax_backward_data", (t(6, 5), t(6, 5), 1, "float32"), (out(6, 5),))
    assert gradient == [Elementwise("mul", 30, inputs=2), Softmax(6, 5, direction="backward")]
    backward = (t(6, 5), t(6, 5), 1, "float32")
    assert records("aten::_log_softmax_backward_data", backward, (out(6, 5),)) == [
        Softmax(6, 5, direction="backward", kind="log_softmax")
    ]


def test_a_scan_along_an_outer_dimension_walks_columns():
    (inner,) = records("aten::cumsum", (t(4, 6), 1), (out(4, 6),))
    (outer,) = records("aten::cumsum", (t(4, 6), 0), (out(4, 6),))
    assert (inner.chained, outer.chained, outer.column) == (0, 8, 4)


def test_elementwise_with_broadcast_and_types():
    (added,) = records("aten::add", (t(4, 8), t(8), 1), (out(4, 8),))
    assert added == Elementwise("add", 32, 1, 1, 8, one_by_one=True)
    assert records("aten::mul", (t(4, 8), 2.0), (out(4, 8),)) == [Elementwise("mul", 32)]
    expanded = t(4, 8, stride=(0, 1))
    assert records("aten::mul", (t(4, 8), expanded), (out(4, 8),)) == [Elementwise("mul", 32, 1, 1, 8, one_by_one=True)]
    assert records("aten::gt", (t(8), 0), (out(8, dtype="bool"),)) == [Elementwise("gt", 8, output_dtype="bool")]
    # One byte of the mask and four of each side are read for an element.
    assert records("aten::where", (t(8, dtype="bool"), t(8), t(8)), (out(8),))[0].read_bytes == 8 * (1 + 4 + 4)
    assert records("aten::gelu_", (t(8),), (t(8),)) == [Elementwise("gelu", 8)]
    assert records("aten::threshold_backward", (t(8), t(8), 0), (out(8),)) == [Elementwise("relu_backward", 8, 2)]
    assert records("aten::zeros", ((8,),), (out(8),)) == [Elementwise("fill", 8, 0)]


@pytest.mark.parametrize(
    ("given", "one_by_one"),
    [
        ((t(4, 8), t(4, 8)), False),
        ((t(4, 8, stride=(1, 4)), t(4, 8)), True),  # another order than the output
        ((t(4, 8, stride=(16, 1)), t(4, 8, stride=(16, 1))), True),  # with gaps
        ((t(4, 8), t(4, 8, dtype="bfloat16")), True),  # converted
        ((t(4, 8), t(4, 8, dtype="bool")), False),
    ],
)
def test_operands_are_read_in_vectors_or_one_by_one(given: tuple[Tensor, Tensor], one_by_one: bool):
    (record,) = records("aten::mul", given, (out(4, 8),))
    assert record.one_by_one is one_by_one


def test_casts_to_narrow_numbers_are_read_in_vectors():
    for source, target, one_by_one in (("float32", "bfloat16", False), ("bfloat16", "float32", True)):
        (cast,) = records("aten::_to_copy", (t(8, dtype=source),), (out(8, dtype=target),))
        assert cast.one_by_one is one_by_one
    half = Elementwise("mul", 2**26, 1, 1, 8, "bfloat16")
    model = gpu_cost_model(packaged_machine("a100-sxm-80gb"))
    vectors, apart = (each.seconds for each in model.estimate([half, replace(half, one_by_one=True)]))
    assert 1.2 * vectors < apart < 3 * vectors


@pytest.mark.parametrize(("dtype", "mask"), [("float32", 16), ("float16", 32)])
def test_dropout_writes_its_mask_too(dtype: str, mask: int):
    arguments = (t(64, dtype=dtype), 0.1, True)
    (record,) = records("aten::native_dropout", arguments, (out(64, dtype=dtype), out(64, dtype="bool")))
    assert record == Elementwise("dropout", 64, 1, 1, mask, dtype)
    width = 4 if dtype == "float32" else 2
    assert record.read_bytes + record.write_bytes == 64 * (2 * width + 1)


def test_copies_move_only_what_views_do_not():
    packed = (out(4, 8, stride=(8, 1)),)
    assert records("aten::clone", (t(4, 8, stride=(8, 1)),), packed) == [MemoryCopy(128)]
    assert records("aten::clone", (t(4, 8, stride=(1, 4)),), packed) == [Rearrangement("transpose", 32, 1)]
    heads, tokens = (2, 3, 4, 8), (96, 8, 24, 1)
    assert records("aten::clone", (t(*heads, stride=tokens),), (out(*heads, stride=(96, 32, 8, 1)),)) == [
        Rearrangement("transpose", 192, 8)
    ]
    assert records("aten::_to_copy", (t(8),), (out(8, dtype="float16"),)) == [
        Elementwise("cast", 8, output_dtype="float16")
    ]
    assert records("aten::contiguous", (t(4, 8),), (t(4, 8),)) == []
    assert records("aten::transpose", (t(4, 8), 0, 1), (t(8, 4, stride=(1, 8)),)) == []


def test_data_movement():
    assert records("aten::cat", ((t(4, 2), t(4, 6)), 1), (out(4, 8),)) == [Rearrangement("concat", 32, 2, inputs=2)]
    # Parts with gaps, such as halves of rows, are copied element by element.
    half = t(4, 2, stride=(4, 1))
    assert records("aten::cat", ((half, t(4, 6)), 1), (out(4, 8),)) == [
        Rearrangement("strided_concat", 32, 2, inputs=2)
    ]
    blocks = (t(2, 2), t(3, 3, number=1))
    assert records("aten::block_diag", (blocks,), (out(5, 5),)) == [
        Elementwise("fill", 25, 0, 1, 0, "float32"), *(Elementwise("copy", size, 1, 1) for size in (4, 9))
    ]  # fmt: skip
    index = t(5, dtype="int64")
    assert records("aten::index_select", (t(9, 8), 0, index), (out(5, 8),)) == [Rearrangement("gather", 40, 8)]
    assert records("aten::gather", (t(9, 8), 1, t(9, 2, dtype="int64")), (out(9, 2),)) == [
        Rearrangement("gather", 18, source_elements=72)
    ]
    assert records("aten::tril", (t(4, 4), 0), (out(4, 4),)) == [Rearrangement("tril", 16, 4)]
    scattered = (t(9, 8), 0, t(5, 8, dtype="int64"), t(5, 8))
    assert records("aten::scatter_add_", scattered, (t(9, 8),)) == [Rearrangement("scatter", 40)]
    assert len(records("aten::scatter_add", scattered, (out(9, 8),))) == 2


@pytest.mark.parametrize(("count", "sorts"), [(3072, 0), (3073, 1)])
def test_embedding_and_its_dense_gradient(count: int, sorts: int):
    table, indices = t(100, 8), t(count, dtype="int64")
    forward = EmbeddingLookup(100, 8, count, count)
    assert records("aten::embedding", (table, indices, -1, False, False), (out(count, 8),)) == [forward]
    given, made = (t(count, 8), indices, 100, -1, False), (out(100, 8),)
    backward = records("aten::embedding_dense_backward", given, made)
    assert launches("aten::embedding_dense_backward", given, made) == (1 + 21 + 9 if sorts else 1 + 1)
    assert backward[0] == Elementwise("fill", 800, 0)
    assert [r for r in backward if isinstance(r, RadixSort)] == [RadixSort(count, 64)] * sorts
    assert backward[-1] == EmbeddingLookup(100, 8, count, count, direction="backward")
    hopper = records("aten::embedding_dense_backward", given, made, seen_gpu=SeenGpu(capability=(9, 0)))
    assert not any(isinstance(each, RadixSort) for each in hopper)  # up to 4,096


def test_embedding_bag():
    arguments = (t(100, 8), t(40, dtype="int64"), t(10, dtype="int64"), False, 0, False, None)
    assert records("aten::_embedding_bag", arguments, (out(10, 8),)) == [EmbeddingLookup(100, 8, 40, 10)]
    single = (t(100, 8), t(10, dtype="int64"), t(10, dtype="int64"), False, 2, False, None)
    maximum = EmbeddingLookup(100, 8, 10, 10, kernel="embedding_bag", mode="max")
    assert records("aten::_embedding_bag", single, (out(10, 8),)) == [maximum]


@pytest.mark.parametrize(("count", "sorting"), [(2304, 2), (2305, 21)])
def test_gradient_of_bags_sorts_all_bits(count: int, sorting: int):
    given = (t(10, 8), t(count, dtype="int32"), t(count, dtype="int32"), t(10), t(0), 100, False, 0, None)
    clear, sort, sums = records("aten::_embedding_bag_dense_backward", given, (out(100, 8),))
    assert sort == RadixSort(count, 32, 8) and clear == Elementwise("fill", 800, 0)
    assert sums == EmbeddingLookup(100, 8, count, 10, direction="backward")
    assert launches("aten::_embedding_bag_dense_backward", given, (out(100, 8),)) == 1 + sorting + 9


def test_reductions_and_what_they_keep():
    assert records("aten::sum", (t(4, 8), (0,), True), (out(1, 8),)) == [Reduction("sum", 32, 8, contiguous=False)]
    assert records("aten::sum", (t(4, 8), (1,), False), (out(4),)) == [Reduction("sum", 32, 4)]
    assert records("aten::mean", (t(4, 8),), (out(),)) == [Reduction("mean", 32, 1)]
    assert records("aten::sum", (t(4, 4, 8), (0, 2), False), (out(4),)) == [Reduction("sum", 128, 4, one_by_one=True)]
    assert records("aten::sum", (t(4, 4, 8), (0, 1), False), (out(8),)) == [Reduction("sum", 128, 8, contiguous=False)]
    assert records("aten::sum", (t(4, 1, 8), (0, 2), True), (out(1, 1, 1),)) == [Reduction("sum", 32, 1)]
    columns = t(4, 8, 9, stride=(72, 1, 8))  # rows follow each other in memory
    assert records("aten::sum", (columns, (0, 2), False), (out(8),)) == [Reduction("sum", 288, 8, contiguous=False)]
    assert records("aten::max", (t(4, 8), t(4, 8)), (out(4, 8),)) == [Elementwise("max", 32, 2)]


def test_losses():
    target = t(16, dtype="int64")
    assert records("aten::nll_loss_forward", (t(16, 10), target, None, 1, -100), (out(), out())) == [
        Loss("nll", 16, 10)
    ]
    assert records("aten::mse_loss", (t(8), t(8), 1), (out(),)) == [Loss("mse", 8, 1), Reduction("mean", 8, 1)]
    assert len(records("aten::binary_cross_entropy_with_logits", (t(8), t(8)), (out(),))) == 5


@pytest.mark.parametrize(("reduction", "kernels"), [(0, 1), (1, 2), (2, 1)])
def test_the_gradient_of_a_mean_of_binary_losses_is_divided_afterwards(reduction: int, kernels: int):
    given = (t(), t(8), t(8), None, reduction)
    assert len(records("aten::binary_cross_entropy_backward", given, (out(8),))) == kernels


def test_pooling():
    arguments = (t(1, 4, 8, 8), (3, 3), (2, 2), (1, 1), (1, 1), False)
    pooled = Pooling("max", 1, 4, 8, 8, 4, 4, (3, 3))
    assert records("aten::max_pool2d_with_indices", arguments, (out(1, 4, 4, 4),)) == [pooled]
    backward = records("aten::max_pool2d_with_indices_backward", (t(1, 4, 4, 4), *arguments), (out(1, 4, 8, 8),))
    assert backward == [MemoryCopy(1024, "memset"), Pooling("max", 1, 4, 8, 8, 4, 4, (3, 3), direction="backward")]
    average = records("aten::_adaptive_avg_pool2d", (t(1, 4, 8, 8), (2, 2)), (out(1, 4, 2, 2),))
    assert average == [Pooling("average", 1, 4, 8, 8, 2, 2, (4, 4))]


def test_fused_attention_and_its_backward_which_is_priced_as_a_whole():
    query, key = t(2, 8, 16, 32, dtype="float16"), t(2, 4, 24, 32, dtype="float16")
    result = out(2, 8, 16, 32, dtype="float16")
    name = "aten::_scaled_dot_product_flash_attention"
    # More keys than queries under a causal mask: a rank of context parallelism, with its share of the triangle.
    shared = Attention(2, 8, 16, 24, 32, 4, causal=True, kernel="flash", placed="spread")
    assert records(name, (query, key, key, 0.0, True), (result,)) == [shared]
    assert records(name, (query, key, key, 0.1, True), (result,)) == [replace(shared, dropout=True)]
    tail = (result, None, None, None, 16, 24, 0.0, False, None, None)
    backward = records(f"{name}_backward", (query, query, key, key, *tail), (result, result, result))
    assert [record.direction for record in backward] == ["backward"]
    assert launches(f"{name}_backward", (query, query, key, key, *tail), (result, result, result)) == 3


def test_a_mask_is_read_and_a_named_kernel_is_taken_where_it_can():
    query = t(2, 8, 16, 32, dtype="float16")
    result = out(2, 8, 16, 32, dtype="float16")
    plain, masked = (query, query, query, None, False), (query, query, query, t(2, 8, 16, 16, dtype="float16"), False)
    name = "aten::_scaled_dot_product_efficient_attention"
    assert [each.kernel for each in records(name, plain, (result,))] == ["efficient"]
    (biased,) = records(name, masked, (result,))
    assert biased.mask and biased.kernel == "efficient"
    kernels = [records(name, each, (result,), attention="flash3")[0].kernel for each in (plain, masked)]
    assert kernels == ["flash3", "sdpa"]


def test_attention_of_a_library_has_its_window_and_sinks():
    query, key = t(2, 8, 16, 32, dtype="bfloat16"), t(2, 4, 16, 32, dtype="bfloat16")
    result = out(2, 8, 16, 32, dtype="bfloat16")
    how = (t(8, dtype="bfloat16"), True, 4, 0.0)
    (forward,) = records("attention::fused", (query, key, key, *how), (result,))
    assert (forward.window, forward.sinks, forward.causal, forward.pairs) == (4, True, True, 1 + 2 + 3 + 13 * 4)
    # One kernel: published times of a backward hold the sums before it and the conversion after it.
    (backward,) = records("attention::fused_backward", (query, query, key, key, *how), (result, result, result))
    assert backward == replace(forward, direction="backward")


# --- launches -------------------------------------------------------------------------------------


def launches(name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], **options: Any) -> int:
    return len(lower(OperatorTrace((OperatorCall(0, name, None, 0, inputs, outputs),)), StepOptions(**options)).tasks)


@pytest.mark.parametrize(
    ("channels", "plane", "window", "steps", "forward", "backward"),
    [
        (64, 56, 3, 1, 4, 4 + 5),  # copies to NHWC and back
        (64, 56, 1, 1, 1, 1 + 2),  # a product of whole images
        (64, 7, 1, 1, 3, 3 + 4),  # whose rows are no whole vectors
        (64, 56, 1, 2, 3, 3 + 4),
        (3, 56, 3, 1, 1, 1 + 2),  # too few products for tensor cores
    ],
)
def test_convolutions_on_hopper_copy_their_operands(
    channels: int, plane: int, window: int, steps: int, forward: int, backward: int
):
    hopper = {"seen_gpu": SeenGpu(capability=(9, 0)), "tf32": Tf32Switches(convolutions=True)}
    data, weight = t(8, channels, plane, plane), t(64, channels, window, window)
    result = out(8, 64, -(-plane // steps), -(-plane // steps))
    how = ((steps, steps), (window // 2, window // 2), (1, 1))
    name, given = "aten::cudnn_convolution", (data, weight, how[1], how[0], how[2], 1)
    assert launches(name, given, (result,), **hopper) == forward
    assert launches(name, given, (result,)) == launches(name, given, (result,), **hopper, compile=True) == 1
    assert launches(name, given, (result,), seen_gpu=SeenGpu(capability=(9, 0))) == 1  # FP32, without tensor cores
    copied = copied_bytes(OperatorCall(0, name, None, 0, given, (result,)), Context(StepOptions(**hopper)))
    assert copied == (sum(map(size_bytes, (data, weight, result))) if forward > 1 else 0)
    gradients = (result, data, weight, (0,), *how, False, (0, 0), 1, (True, True, False))
    assert launches("aten::convolution_backward", gradients, (data, weight), **hopper) == backward
    tasks = lower(OperatorTrace((OperatorCall(0, name, None, 0, given, (result,)),)), StepOptions(**hopper)).tasks
    assert sum(task.duration is None for task in tasks) == 1  # one time, that of all
    assert all(task.duration.seconds == 0 for task in tasks if task.duration is not None)


@pytest.mark.parametrize(
    ("shape", "result", "count"),
    [((4096, 768), (768,), 2), ((512, 768), (768,), 1), ((8, 1 << 18), (8,), 2), ((4096, 768), (4096,), 1)],
)
def test_counters_of_outputs_that_blocks_share_are_cleared(shape: tuple, result: tuple, count: int):
    assert launches("aten::sum", (t(*shape),), (out(*result),)) == count


# --- optimizers -----------------------------------------------------------------------------------


def parameters(*sizes: int) -> tuple[Tensor, ...]:
    return tuple(t(size, number=place) for place, size in enumerate(sizes))


def test_launches_are_cut_by_tensors_and_by_blocks():
    assert list(list_launches(parameters(10, 20, 30), 2)) == [(30, 2), (30, 1)]
    chunk = 65536
    assert list(list_launches(parameters(chunk * 330), 64)) == [(chunk * 320, 1), (chunk * 10, 1)]
    assert list(list_launches(parameters(chunk * 319, 3 * chunk, 7), 64)) == [(chunk * 320, 2), (2 * chunk + 7, 2)]
    assert list(list_launches(parameters(0, 5), 64)) == [(5, 1)]
    assert not list(list_launches((), 64))


def test_launches_of_a_recorded_optimizer():
    """Per step of the profile of 21 layers of 1024 x 1024 on one GPU: two kernels."""
    sizes = [size for _ in range(21) for size in (1024 * 1024, 1024)]
    assert len(list(list_launches(parameters(*sizes), 64))) == 2


def test_foreach_reads_and_writes_by_its_lists():
    group = parameters(10, 20)
    (record,) = records("aten::_foreach_addcdiv_", (group, group, group, (1.0, 2.0)), ())
    assert record == OptimizerStep("foreach_addcdiv", 30, 2, 3, 1)
    (record,) = records("aten::_foreach_sqrt", (group,), (group,))
    assert record == OptimizerStep("foreach_sqrt", 30, 2, 1, 1)
    on_host = tuple(Tensor(n, n, (), "float32", "cpu") for n in range(3))
    assert records("aten::_foreach_add_", (on_host, 1.0), ()) == []


def test_fused_optimizers_move_what_they_need():
    group, steps = parameters(10, 20), tuple(t(number=place + 50) for place in range(2))
    (record,) = records("aten::_fused_adamw_", (group, group, group, group, (), steps), ())
    assert record == OptimizerStep("adamw", 30, 2, 4, 3)
    (record,) = records("aten::_fused_sgd_", (group, group, ()), ())
    assert record == OptimizerStep("sgd", 30, 2, 2, 1)
    (record,) = records("aten::_fused_sgd_", (group, group, group), ())
    assert record == OptimizerStep("sgd", 30, 2, 3, 2)


def test_what_is_resampled_is_read_whole_however_much_larger_it_is():
    """The gradient of 8 x 8 points is read for the 4 x 4 that it came from, as ever smaller results read all of it."""
    for name in ("upsample_bilinear2d_backward", "upsample_bicubic2d", "_upsample_nearest_exact2d_backward"):
        (record,) = records(f"aten::{name}", (t(1, 1, 8, 8),), (out(1, 1, 4, 4),))
        assert (record.read_bytes, record.write_bytes) == (4 * 64, 4 * 16), name
    (record,) = records("aten::upsample_trilinear3d", (t(1, 1, 2, 2, 2),), (out(1, 1, 4, 4, 4),))
    assert (record.read_bytes, record.write_bytes) == (4 * 8, 4 * 64)


def test_a_scan_that_gives_places_writes_them_too():
    places = Tensor(98, 98, (4, 8), "int64", "cuda:0")
    (record,) = records("aten::cummax", (t(4, 8), 1), (out(4, 8), places))
    assert record.read_bytes + record.write_bytes == 4 * 32 * 2 + 8 * 32


def test_rows_of_an_expanded_index_move_together():
    """As graph networks write it: ``index[:, None].expand(-1, features)``."""
    index = t(100, 16, dtype="int64", stride=(1, 0), number=1)
    (gathered,) = records("aten::gather", (t(50, 16), 0, index), (out(100, 16),))
    assert (gathered.kind, gathered.elements, gathered.inner) == ("gather", 1600, 16)
    (single,) = records("aten::gather", (t(50, 16), 0, t(100, 16, dtype="int64", number=1)), (out(100, 16),))
    assert single.inner == 1
    (scattered,) = records("aten::scatter_add_", (t(50, 16), 0, index, t(100, 16, number=2)), (t(50, 16),))
    assert (scattered.kind, scattered.inner) == ("scatter", 16)


def test_a_triangular_solve_is_half_a_product():
    found = records("aten::linalg_solve_triangular", (t(5, 8, 8), t(5, 8, 6)), (out(5, 8, 6),))
    assert found == [Gemm(5, 8, 6, 4)]


def test_weights_of_unit_norm_are_read_twice():
    found = records("aten::_weight_norm_interface", (t(8, 4), t(8, 1)), (out(8, 4), out(8, 1)))
    assert found == [Elementwise("weight_norm", 32, 2, 1)]
    backward = records("aten::_weight_norm_interface_backward", (t(8, 4), t(8, 4), t(8, 1), t(8)), (out(8, 4), out(8)))
    assert backward == [Elementwise("weight_norm", 32, 4, 1)]
