"""Gradients of weights that accumulate in place: which products add."""

from __future__ import annotations

from dataclasses import replace

from costmodel.operators.device_work import Elementwise, Gemm, ScaledGemm
from e2e.parallelism.pieces import Item, Part, Pieces, Ready, Work
from e2e.parallelism.rewrites import added_in_place
from e2e.step.execution_graph import Duration
from tests.e2e.parallelism.test_parallel_stage import NO_TIME


def kernel(operator: Gemm | Elementwise) -> Work:
    return Work("k", "kernel", (operator,), 0, Duration.measured(1.0), NO_TIME)


# 4 tokens, weights of 8 x 16 in 2 bytes each.
INPUT, WEIGHT = kernel(Gemm(1, 4, 8, 16)), kernel(Gemm(1, 8, 16, 4))
READY = Ready(8 * 16 * 2)


def products_that_add(items: tuple[Item, ...]) -> list[bool]:
    pieces = Pieces({}, {0: Part(items)}, {}, {}, {})
    changed = added_in_place(pieces, 2, "float32")
    assert changed.accumulate == changed.backward, "every pass adds"
    works = (item for item in changed.backward[0].items if isinstance(item, Work))
    return [any(getattr(each, "accumulates", False) for each in work.operators) for work in works]


def test_products_of_weights_gradients_add_to_what_is_there() -> None:
    norm = kernel(Elementwise("mul", 32))
    assert products_that_add((INPUT, WEIGHT, READY, norm, Ready(2 * 16))) == [False, True, False]
    eight = replace(WEIGHT, operators=(ScaledGemm(8, 16, 4),), call=7)
    assert products_that_add((INPUT, eight, READY)) == [False, True]


def test_those_of_all_experts_are_one_gradient() -> None:
    """Two experts of 8 x 16 weights, of which one call makes the gradients; the other product has as many elements."""
    experts = replace(WEIGHT, call=3)
    other = replace(kernel(Gemm(1, 16, 16, 4)), call=4)
    assert products_that_add((experts, experts, other, Ready(2 * 16 * 16))) == [False, False, True]
    assert products_that_add((other, experts, experts, Ready(2 * 16 * 16))) == [False, True, True]
