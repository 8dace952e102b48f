"""Kernels of packages and of programs: products that Triton kernels compute, weights and states in 4 and 8 bits."""

from __future__ import annotations

import pytest

from costmodel.operators.device_work import Gemm, ScaledGemm
from e2e.lowering.lower_trace import lower, lowering_warnings
from e2e.step.execution_graph import RankGraph
from e2e.step.operator_trace import PRODUCTS, OperatorCall, OperatorTrace, Tensor, Value


def tensor(number: int, *shape: int, dtype: str = "bfloat16") -> Tensor:
    return Tensor(number, number, shape, dtype, "cuda:0")


def lowered(name: str, *inputs: Value, outputs: tuple[Tensor, ...] = (), **attributes: Value) -> RankGraph:
    call = OperatorCall(0, name, None, 0, inputs, outputs, attributes=attributes)
    return lower(OperatorTrace((call,)))


@pytest.mark.parametrize(
    ("shapes", "product"),
    [
        ([(64, 32), (32, 16), (64, 16)], (1, 64, 16, 32)),
        ([(64, 32), (16, 32), (64, 16)], (1, 64, 16, 32)),
        ([(4, 64, 32), (4, 64, 64)], (4, 64, 64, 32)),  # a matrix by its own transpose
        ([(64, 32), (7,), (64,)], None),
        ([(2, 8, 128, 64)] * 4, None),  # attention
    ],
)
def test_the_product_of_a_triton_kernel_is_found_by_its_tensors(
    shapes: list[tuple[int, ...]], product: tuple[int, ...] | None
):
    given = [tensor(place, *shape) for place, shape in enumerate(shapes)]
    graph = lowered("triton::kernel", *given, **{PRODUCTS: True})
    (record,) = graph.tasks[0].operators
    if product is None:
        assert not isinstance(record, Gemm)
        (line,) = lowering_warnings(graph)
        assert "multiply matrices of extents not known here" in line and "triton::kernel (1)" in line
    else:
        assert isinstance(record, Gemm) and (record.batch, record.m, record.n, record.k) == product
        assert not lowering_warnings(graph)


def test_weights_in_4_bits_are_expanded_before_their_product():
    codes, scales = tensor(1, 64 * 32 // 2, 1, dtype="uint8"), tensor(2, 32, dtype="float32")
    given, output = tensor(0, 128, 32), tensor(3, 128, 64)
    graph = lowered("bitsandbytes::gemm_4bit", given, codes, (64, 32), scales, 64, "nf4", outputs=(output,))
    expanded, product = (task.operators[0] for task in graph.tasks)
    moved = expanded.read_bytes + expanded.write_bytes  # type: ignore[union-attr]
    assert moved == 64 * 32 * 2 + 64 * 32 // 2 + 4 * 32
    assert isinstance(product, Gemm) and (product.m, product.n, product.k) == (128, 64, 32)


def test_products_in_integers_are_scaled_afterwards():
    rows, weight = tensor(0, 2, 64, 32, dtype="int8"), tensor(1, 16, 32, dtype="int8")
    scales = tensor(2, 128, dtype="float32"), tensor(3, 16, dtype="float32")
    graph = lowered("bitsandbytes::int8_scaled_mm", rows, weight, *scales, outputs=(tensor(4, 2, 64, 16),))
    product, scaled = (task.operators[0] for task in graph.tasks)
    assert isinstance(product, ScaledGemm) and (product.m, product.n, product.k) == (128, 16, 32)
    assert scaled.write_bytes == 2 * 128 * 16  # type: ignore[union-attr]
