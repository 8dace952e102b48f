"""Gradients of weights apart: which items they are, and the schedule that fills bubbles with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.operators.device_work import Elementwise, Gemm, ScaledGemm
from e2e.parallelism import ParallelSpec, parse_parallel
from e2e.parallelism.pieces import FIRST, LAST, Item, Part, Pieces, Ready, Work
from e2e.parallelism.pipeline import in_flight, passes
from e2e.parallelism.rewrites import added_in_place, apart, split
from e2e.parallelism.stage import write_stage
from e2e.price.collective_pricing import price_collectives
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Duration, ExecutionGraph, HostWork
from tests.e2e.parallelism.test_parallel_stage import NO_TIME, NoHost, OneNode, Transfers, part, toy_plans


def kernel(operator: Gemm | Elementwise) -> Work:
    return Work("k", "kernel", (operator,), 0, Duration.measured(1.0), NO_TIME)


# 4 tokens, weights of 8 x 16 in 2 bytes each.
INPUT, WEIGHT = kernel(Gemm(1, 4, 8, 16)), kernel(Gemm(1, 8, 16, 4))
READY = Ready(8 * 16 * 2)


def test_the_product_of_the_weights_size_is_moved_with_its_gradient() -> None:
    norm = kernel(Elementwise("mul", 32))
    items: tuple[Item, ...] = (WEIGHT, INPUT, READY, norm, Ready(2 * 16))
    assert split(items, 2) == ((INPUT, norm), (HostWork("T5", 0), WEIGHT, READY, Ready(2 * 16)))
    # The order of the two does not matter.
    assert split((INPUT, WEIGHT, READY), 2) == ((INPUT,), (HostWork("T5", 0), WEIGHT, READY))


def test_the_sum_with_earlier_gradients_is_moved_too() -> None:
    add = kernel(Elementwise("add", 128, 2))
    kept, moved = split((INPUT, WEIGHT, add, READY), 2)
    assert kept == (INPUT,) and [item for item in moved if isinstance(item, Work)] == [WEIGHT, add]


def test_of_two_alike_products_each_gradient_takes_one() -> None:
    square = kernel(Gemm(1, 4, 4, 4))
    kept, moved = split((square, square, Ready(32), square, square, Ready(32)), 2)
    assert len(kept) == 2 and sum(isinstance(item, Work) for item in moved) == 2


def test_order_of_three_stages() -> None:
    spec = ParallelSpec(pp=3, micro_batches=4, schedule="zero-bubble")
    order = [" ".join(f"{each.direction[0]}{each.micro_batch}" for each in passes(spec, stage)) for stage in range(3)]
    assert order == [
        "f0 f1 f2 b0 w0 f3 b1 w1 b2 w2 b3 w3",
        "f0 f1 b0 f2 b1 w0 f3 b2 w1 b3 w2 w3",
        "f0 b0 f1 b1 f2 b2 w0 f3 b3 w1 w2 w3",
    ]
    assert [in_flight(spec, stage) for stage in range(3)] == [3, 3, 3]


def seconds(spec: ParallelSpec, layers: int) -> float:
    """A layer takes 1 s forward, 1 s for the gradient of its input and 1 s for that of its weights."""
    ranks = []
    for plan in toy_plans(spec, layers):
        ends = {FIRST: Part(), LAST: Part()}
        whole = {**ends, **dict.fromkeys(range(3), Part((INPUT, WEIGHT, READY)))}
        pieces = replace(plan.pieces, backward=whole, accumulate=whole)
        pieces = apart(pieces, 2) if spec.splits_backward else pieces
        ranks.append(write_stage(replace(plan, pieces=pieces)))
    graph = ExecutionGraph(tuple(ranks), {rank.rank: 1 for rank in ranks}, "toy")
    return simulate(price(price_collectives(graph, OneNode(), Transfers()), Transfers(), NoHost())).step_seconds


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 12)])
def test_the_bubble_is_a_third(stages: int, count: int) -> None:
    """(p - 1) (F + B - W) instead of (p - 1) (F + B + W): Qi et al., arXiv 2401.10241, table 2."""
    plain = seconds(ParallelSpec(pp=stages, micro_batches=count), stages)
    assert plain == pytest.approx(3 * count + 3 * (stages - 1))
    split_up = seconds(ParallelSpec(pp=stages, micro_batches=count, schedule="zero-bubble"), stages)
    assert split_up == pytest.approx(3 * count + (stages - 1))


@pytest.mark.parametrize("text", ["dp=2", "fsdp=2", "fsdp=2,zero=1", "fsdp=2,zero=2"])
def test_gradients_meet_as_often_as_without(text: str) -> None:
    def meetings(schedule: str) -> list[list[tuple[str, int]]]:
        spec = parse_parallel(f"{text},pp=2,micro-batches=3,schedule={schedule}")
        found = []
        for plan in toy_plans(spec, 4):
            pieces = plan.pieces
            if spec.splits_backward:
                weights = {name: Part((Ready(1000),)) for name in range(3)} | {FIRST: Part(), LAST: Part()}
                backward = {name: part(2.0) for name in range(3)} | {FIRST: Part(), LAST: Part()}
                pieces = replace(pieces, backward=backward, accumulate=backward, weights=weights, added_weights=weights)
            tasks = write_stage(replace(plan, pieces=pieces)).tasks
            met = [task.collective for task in tasks if task.collective is not None]
            found.append(sorted((each.kind, each.size_bytes) for each in met if each.kind not in ("send", "recv")))
        return found

    assert meetings("zero-bubble") == meetings("1f1b")


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
