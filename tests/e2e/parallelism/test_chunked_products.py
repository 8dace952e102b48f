"""Tensor-parallel communication in pieces beside products: by hand, and times of a toy layer by mental arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise, Gemm, ScaledCast, ScaledGemm
from e2e.parallelism.pieces import Item, LayerCollective, Ready, Work
from e2e.parallelism.rewrites import gathered_in_8_bits, overlapped
from e2e.parallelism.stage_writer import StageWriter
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Duration, ExecutionGraph, HostWork, Launch, RankGraph, RankWriter

TP = 4
NOTHING = Duration.measured(0.0)


def product(m: int = 8, call: int = 0) -> Work:
    return Work("aten::mm", "kernel", (Gemm(1, m, 16, 16),), call, None, NOTHING)


def other() -> Work:
    return Work("aten::add", "kernel", (Elementwise("add", 1000),), 0, None, NOTHING)


def gather(early: bool = False) -> LayerCollective:
    return LayerCollective("all_gather", 300, 0, "tp", early)


def scatter(early: bool = False, size: int = 400) -> LayerCollective:
    return LayerCollective("reduce_scatter", size, 0, "tp", early)


def kinds(items: tuple[Item, ...]) -> str:
    """G, R: gather and reduce-scatter, small where early; P: a product; o: another kernel."""
    letters = {"all_gather": "G", "reduce_scatter": "R"}
    found = ""
    for item in items:
        if isinstance(item, LayerCollective):
            found += letters[item.kind].lower() if item.early else letters[item.kind]
        elif isinstance(item, Work):
            found += "P" if isinstance(item.operators[0], Gemm) else "o"
    return found


def seconds(items: tuple[Item, ...], transfer: float, row: float) -> float:
    """100 bytes take ``transfer`` seconds between ranks, a product ``row`` for each of its rows."""
    rank = RankWriter(0)
    rank.call("any")
    for _ in StageWriter(rank, {"tp": (0, 1, 2, 3)}).play(items):
        pass
    graph = rank.finish()

    def priced(task: Any) -> Duration:
        if task.collective is not None:
            return Duration.measured(task.collective.size_bytes / 100 * transfer)
        operator = task.operators[0]
        return Duration.measured(operator.m * row if isinstance(operator, Gemm) else 0.0)

    from dataclasses import replace

    tasks = tuple(replace(task, duration=priced(task)) for task in graph.tasks)
    threads = {
        name: tuple(
            replace(each, duration=NOTHING) if isinstance(each, HostWork | Launch) else each for each in actions
        )
        for name, actions in graph.threads.items()
    }
    whole = RankGraph(0, threads, tasks, graph.calls)
    return simulate(ExecutionGraph((whole,), {0: TP}, "toy")).step_seconds


def test_a_product_begins_with_its_own_piece_while_the_others_arrive() -> None:
    items = (gather(), product(), other())
    assert kinds(overlapped(items, TP)) == "gPgPgPPo"
    # 3 s of transfers, then 8 s of the product; in pieces the first and then the longer of 1 s and 2 s each.
    assert seconds(items, 1.0, 1.0) == pytest.approx(3 + 8)
    assert seconds(overlapped(items, TP), 1.0, 1.0) == pytest.approx(8)
    assert seconds(overlapped(items, TP), 4.0, 1.0) == pytest.approx(3 * 4 + 2)


def test_what_a_product_makes_is_scattered_while_it_goes_on() -> None:
    items = (product(), scatter(), other())
    assert kinds(overlapped(items, TP)) == "PrPrPrPRo"
    assert seconds(items, 1.0, 1.0) == pytest.approx(8 + 4)
    assert seconds(overlapped(items, TP), 1.0, 1.0) == pytest.approx(8 + 1)
    assert seconds(overlapped(items, TP), 4.0, 1.0) == pytest.approx(2 + 4 * 4)


def test_the_backward_pass_of_columns_overlaps_both_in_bulk() -> None:
    items = (gather(early=True), product(), product(), Ready(8), scatter(), other())
    assert kinds(overlapped(items, TP)) == "gPrPo"
    # The gather beside the first product, the scatter beside the second.
    assert seconds(items, 1.0, 1.0) == pytest.approx(8 + 8 + 4)
    assert seconds(overlapped(items, TP), 1.0, 1.0) == pytest.approx(16)
    assert seconds(overlapped(items, TP), 4.0, 1.0) == pytest.approx(3 * 4 + 4 * 4)


def test_gradients_of_rows_arrive_beside_the_first_product_alone() -> None:
    items = (gather(), product(), product(), Ready(8), other())
    assert kinds(overlapped(items, TP)) == "gPgPgPPPo"


def test_bytes_and_work_stay_the_same() -> None:
    items = (gather(), product(), product(), other(), product(), scatter(), gather(early=True), product(), scatter())
    found = overlapped(items, TP)

    def totals(items: tuple[Item, ...]) -> tuple[int, int, int]:
        collectives = [item for item in items if isinstance(item, LayerCollective)]
        by_kind = (
            sum(c.size_bytes for c in collectives if c.kind == kind) for kind in ("all_gather", "reduce_scatter")
        )
        rows = sum(o.m for item in items if isinstance(item, Work) for o in item.operators if isinstance(o, Gemm))
        return (*by_kind, rows)  # type: ignore[return-value]

    assert totals(found) == totals(items)


def test_other_communication_is_left_alone() -> None:
    items = (
        LayerCollective("all_gather", 8, 0, "cp"),
        product(),
        LayerCollective("all_reduce", 8, 0),
        other(),
        gather(),
        other(),
    )
    assert overlapped(items, TP) == items


def scaled(name: str, operator: AnyOperator) -> list[Item]:
    return [HostWork("T2", 0), Work(name, "kernel", (operator,), 0)]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("searched", [True, False])
def test_what_is_gathered_in_8_bits_is_cast_by_its_own_rank_and_goes_beside_the_product(tp: int, searched: bool):
    """Half the bytes, a share of the casts of activations, weights cast as before; products as many and as large."""
    rows, width, columns = 4096, 1024, 512
    given, weight = ScaledCast(rows, width, outputs=2), ScaledCast(columns, width, outputs=2)
    search = [*scaled("amax", replace(given, outputs=0)), *scaled("amax", Elementwise("scale", 1))] if searched else []
    product = scaled("mm", ScaledGemm(rows, columns, width))
    whole = LayerCollective("all_gather", rows * width * 2 // tp, 0)
    items = [whole, *search, *scaled("cast", given), *scaled("cast", weight), *product]
    narrow = gathered_in_8_bits(items, tp)
    (gather,) = (each for each in narrow if isinstance(each, LayerCollective))
    assert gather.size_bytes == whole.size_bytes // 2
    casts = [each.operators[0] for each in narrow if isinstance(each, Work)]
    before = narrow[: narrow.index(gather)]
    assert sum(isinstance(each, Work) for each in before) == len(casts) - 2  # all but the product and a transposition
    found = [each for each in casts if isinstance(each, ScaledCast)]
    assert {each.rows for each in found} == {rows // tp, columns} and found[-1] == weight
    assert gathered_in_8_bits(narrow, tp) == narrow
    beside = overlapped(narrow, tp)
    pieces = [each for each in beside if isinstance(each, LayerCollective)]
    assert len(pieces) == tp - 1 and all(each.early for each in pieces)
    products = [each.operators[0] for each in beside if isinstance(each, Work) and each.name.startswith("mm")]
    assert [each.m for each in products] == [rows // tp] * tp  # type: ignore[union-attr]


def test_gradients_in_8_bits_are_scattered_beside_the_gradient_of_the_weights():
    product = scaled("mm", ScaledGemm(64, 64, 64))
    scatter = LayerCollective("reduce_scatter", 8192, 0)
    found = overlapped([*product, *product, Ready(8192), scatter], 4)
    kinds = [type(each).__name__ for each in found if not isinstance(each, HostWork)]
    assert kinds == ["Work", "LayerCollective", "Work", "Ready"]
