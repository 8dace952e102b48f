"""Stages on a toy machine: a layer takes 1 s forward and 2 s backward, messages take nothing. Mental arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from e2e.parallelism import ParallelSpec, parse_parallel
from e2e.parallelism.parallel_graph import layer_counts, part_names
from e2e.parallelism.pieces import FIRST, LAST, Name, Part, Pieces, Ready, Work
from e2e.parallelism.pipeline import Command, commands, in_flight, passes, stage_parts
from e2e.parallelism.stage import StagePlan, write_stage
from e2e.parallelism.stage_writer import SHARDS
from e2e.price.collective_pricing import price_collectives
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import Duration, ExecutionGraph

NO_TIME = Duration.measured(0.0)
LAYER_BYTES = 1000
INTERLEAVED = "pp=2,micro-batches=2,schedule=interleaved"


class Transfers(CostModel):
    """Every transfer takes ``seconds``; other operators nothing."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        return [Estimate(self.seconds, self.seconds, self.seconds, "link", {}, "fitted") for _ in operators]


class Bytes(CostModel):
    """Transfers and kernels take ``seconds`` a byte or element."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        each = [self.seconds * getattr(one, "size_bytes", getattr(one, "elements", 0)) for one in operators]
        return [Estimate(seconds, seconds, seconds, "link", {}, "fitted") for seconds in each]


class NoHost:
    level = 1.0

    def seconds(self, kind: Any, name: str, records: float | None = None) -> float:
        return 0.0


class OneNode:
    name, gpus_per_node, nodes, node_gpus, network_cards = "toy", 8, 1, 8, 1


def part(seconds: float, gradient: int = 0) -> Part:
    work = Work("work", "kernel", (), None, Duration.measured(seconds), NO_TIME)
    return Part((work, Ready(gradient)) if gradient else (work,))


def toy_pieces() -> Pieces:
    """Before and after the layers there is nothing to do."""

    def parts(layer: Part) -> dict[Name, Part]:
        return {FIRST: Part(), LAST: Part(), **dict.fromkeys(range(3), layer)}

    backward = parts(part(2.0, gradient=LAYER_BYTES))
    return Pieces(parts(part(1.0)), backward, backward, parts(part(0.5)), {})


def toy_plans(spec: ParallelSpec, layers: int) -> list[StagePlan]:
    sizes: dict[Name, tuple[int, ...]] = {FIRST: (), LAST: (), **dict.fromkeys(range(3), (LAYER_BYTES,))}
    plans = []
    for stage in range(spec.pp):
        counts = layer_counts(spec, layers, "toy")
        chunks = tuple(part_names(counts, part) for part in stage_parts(spec, stage))
        plans.append(StagePlan(spec, stage, layers, toy_pieces(), chunks, sizes, 4, 2, 0, ()))
    return plans


@pytest.mark.parametrize("text", ["dp=4", "fsdp=4", "fsdp=2,zero=1,pp=2,micro-batches=2", "tp=2,pp=2,dp=2"])
def test_clipping_costs_a_norm_of_all_ranks_and_a_multiplication(text: str) -> None:
    """Twice through the gradients that a rank owns, and a number from everybody who owns others."""
    spec = parse_parallel(text)
    clipped, plain = ([write_stage(plan) for plan in toy_plans(replace(spec, clip=clip), 4)] for clip in (True, False))
    for more, less in zip(clipped, plain, strict=True):
        assert not any("norm of" in _group(task) for task in less.tasks)
        owners = {rank for task in more.tasks if "norm of" in _group(task) for rank in task.collective.ranks}
        shared = spec.shards if spec.sharing else 1
        assert len(owners) == (0 if shared == spec.tp == spec.pp == 1 else shared + spec.tp + spec.pp - 2)
        owned = LAYER_BYTES * (4 // spec.pp) // shared // 4
        work = {task.name: task.operators[0] for task in more.tasks if task.name.startswith("aten::_foreach")}
        assert {name: each.elements for name, each in work.items()} == {
            "aten::_foreach_norm": owned, "aten::_foreach_mul_": owned,
        }  # fmt: skip


def _group(task: Any) -> str:
    return "" if task.collective is None else str(task.collective.group)


def toy_graph(spec: ParallelSpec, layers: int, transfer: float = 0.0) -> ExecutionGraph:
    ranks = tuple(write_stage(plan) for plan in toy_plans(spec, layers))
    graph = ExecutionGraph(ranks, {rank.rank: spec.replicas * spec.tp for rank in ranks}, "toy")
    priced = price_collectives(graph, OneNode(), Transfers(transfer))
    return price(priced, Transfers(), NoHost())


def step(spec: ParallelSpec, layers: int, transfer: float = 0.0) -> float:
    return simulate(toy_graph(spec, layers, transfer)).step_seconds


@st.composite
def shared_gradients(draw: st.DrawFn) -> ParallelSpec:
    """Replicas or shards whose gradients are reduced in buckets of about one, two or all layers."""
    fsdp = draw(st.sampled_from((1, 2)))
    return ParallelSpec(
        dp=draw(st.sampled_from((1, 2) if fsdp > 1 else (2, 4))), fsdp=fsdp,
        zero=draw(st.sampled_from((1, 2) if fsdp > 1 else (3,))),
        pp=draw(st.sampled_from((1, 2))), micro_batches=draw(st.sampled_from((2, 4))),
        bucket_mb=draw(st.sampled_from((LAYER_BYTES, 2 * LAYER_BYTES, 10**9))) / 2**20,
    )  # fmt: skip


@given(shared_gradients(), st.sampled_from((0.0, 1e-4, 1e-3, 1e-1)), st.sampled_from((0.0, 1e-4, 1e-2)))
@settings(max_examples=40, deadline=None)
def test_reducing_during_the_backward_pass_is_never_slower_than_behind_it(
    spec: ParallelSpec, transfer: float, copy: float
) -> None:
    def seconds(spec: ParallelSpec) -> float:
        ranks = tuple(write_stage(plan) for plan in toy_plans(spec, 4))
        graph = ExecutionGraph(ranks, {rank.rank: spec.replicas * spec.tp for rank in ranks}, "toy")
        priced = price_collectives(graph, OneNode(), Bytes(transfer))
        return simulate(price(priced, Bytes(copy), NoHost())).step_seconds

    assert seconds(spec) <= seconds(replace(spec, overlap=False)) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_bubble_is_p_minus_1_of_m_plus_p_minus_1(schedule: Any, stages: int, count: int) -> None:
    """Narayanan et al., arXiv 2104.04473, section 2.2.1: 3 s a layer, two layers a stage."""
    seconds = step(ParallelSpec(pp=stages, micro_batches=count, schedule=schedule), 2 * stages)
    busy = count * 2 * 3.0
    assert seconds == pytest.approx((count + stages - 1) * 6.0)
    assert 1 - busy / seconds == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize(("stages", "parts", "count"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (2, 3, 2)])
def test_interleaving_divides_the_bubble(stages: int, parts: int, count: int) -> None:
    """Each stage idles (p - 1) (F + B) / v, in seconds of the whole stage's passes."""
    spec = ParallelSpec(pp=stages, micro_batches=count, schedule="interleaved", virtual_stages=parts)
    passes_of_stage = parts * 3.0
    assert step(spec, stages * parts) == pytest.approx(count * passes_of_stage + (stages - 1) * passes_of_stage / parts)


def test_order_of_two_stages() -> None:
    spec = ParallelSpec(pp=2, micro_batches=3)
    names = [[f"{each.direction[0]}{each.micro_batch}" for each in passes(spec, stage)] for stage in range(2)]
    assert names == [["f0", "f1", "b0", "f2", "b1", "b2"], ["f0", "b0", "f1", "b1", "f2", "b2"]]
    assert commands(spec, 1)[:3] == (
        Command("forward", 0, message="receive"),
        Command("forward", 0),
        Command("backward", 0),
    )


def test_every_message_has_both_ends() -> None:
    for spec in (
        ParallelSpec(pp=4, micro_batches=4),
        ParallelSpec(pp=2, micro_batches=4, schedule="interleaved", virtual_stages=3),
    ):
        ends: dict[tuple[str, int], list[str]] = {}
        for rank in toy_graph(spec, 12).ranks:
            for task in rank.tasks:
                if task.collective is not None and task.collective.kind in ("send", "recv"):
                    ends.setdefault((task.collective.group, task.collective.sequence), []).append(task.collective.kind)
        assert all(sorted(kinds) == ["recv", "send"] for kinds in ends.values())
        assert len(ends) == 2 * spec.micro_batches * (spec.stages - 1)


@pytest.mark.parametrize(
    ("text", "layers", "counts"),
    [
        ("pp=4", 8, (2, 2, 2, 2)),
        ("pp=4,first-layers=1,last-layers=1", 6, (1, 2, 2, 1)),
        ("pp=4,last-layers=0", 6, (2, 2, 2, 0)),
        ("pp=2,first-layers=3,last-layers=5", 8, (3, 5)),
        # As Llama 3 405B: the embedding and the head have a part of their own.
        (
            "pp=2,schedule=interleaved,virtual-stages=4,first-layers=0,last-layers=0,micro-batches=2",
            6,
            (0, *[1] * 6, 0),
        ),
    ],
)
def test_ends_may_have_fewer_layers(text: str, layers: int, counts: tuple[int, ...]) -> None:
    assert layer_counts(parse_parallel(text), layers, "toy") == counts
    names = [name for part in range(len(counts)) for name in part_names(counts, part)]
    assert names == [FIRST, *range(layers), LAST]


@pytest.mark.parametrize("text", ["pp=3,first-layers=1", "pp=2,first-layers=9", "pp=2,first-layers=3,last-layers=3"])
def test_layers_that_do_not_divide_besides_the_ends(text: str) -> None:
    with pytest.raises(InputError, match=r"toy: 8 layers do not divide .* besides"):
        layer_counts(parse_parallel(text), 8, "toy")


def test_full_recomputation_runs_the_forward_pass_again() -> None:
    """4 s instead of 3 s a layer; selective repeats half of the forward pass."""
    assert step(ParallelSpec(recompute="full", micro_batches=2), 3) == pytest.approx(2 * 3 * 4.0)
    assert step(ParallelSpec(recompute="selective", micro_batches=2), 3) == pytest.approx(2 * 3 * 3.5)


def test_buckets_are_reduced_while_the_backward_pass_goes_on() -> None:
    """Three layers of 1000 bytes, the first bucket closes at 1 MiB: all in one, after the last. Small ones overlap."""
    sizes = [task.collective.size_bytes for task in toy_graph(ParallelSpec(dp=4), 3).ranks[0].tasks if task.collective]
    assert sizes == [3 * LAYER_BYTES]
    assert step(ParallelSpec(dp=4), 3, transfer=1.5) == pytest.approx(9.0 + 1.5)


def test_gradients_of_the_last_micro_batch_alone_are_reduced() -> None:
    graph = toy_graph(ParallelSpec(dp=2, micro_batches=4), 3)
    assert sum(task.collective is not None for task in graph.ranks[0].tasks) == 1


def test_sharded_layers_are_gathered_twice_and_reduced_once() -> None:
    """Per layer and micro-batch two all-gathers of a quarter, one reduce-scatter of the whole; the last layer stays."""
    found = [task.collective for task in toy_graph(ParallelSpec(fsdp=4), 3).ranks[0].tasks if task.collective]
    gathers = [each.size_bytes for each in found if each.kind == "all_gather"]
    scatters = [each.size_bytes for each in found if each.kind == "reduce_scatter"]
    assert gathers == [LAYER_BYTES // 4] * 6
    assert scatters == [LAYER_BYTES] * 3


def test_next_layer_is_gathered_while_one_runs() -> None:
    """Transfers of 0.5 s: only the first gather and the last reduction are exposed beside 9 s of work."""
    assert step(ParallelSpec(fsdp=4), 3, transfer=0.5) == pytest.approx(9.0 + 2 * 0.5)


def test_layers_are_gathered_as_far_ahead_as_asked() -> None:
    """Transfers of 0.5 s. Without prefetch every gather is exposed, but the one of the layer that stays."""
    assert step(ParallelSpec(fsdp=4, prefetch=0), 3, transfer=0.5) == pytest.approx(9.0 + 5 * 0.5 + 0.5)
    # A gather of 1.5 s takes longer than a layer of 1 s: 0.5 s more for each of the next two, whoever is ahead.
    one, two = (step(ParallelSpec(fsdp=4, prefetch=ahead), 3, transfer=1.5) for ahead in (1, 2))
    assert two <= one


def test_gathers_and_scatters_of_a_group_take_turns() -> None:
    """One process group: NCCL runs its collectives one after another."""
    graph = toy_graph(ParallelSpec(fsdp=4), 3)
    assert {task.stream for task in graph.ranks[0].tasks if task.collective} == {SHARDS}
    # Transfers of 2 s: the backward pass of 3 layers gathers two of them and scatters three.
    assert step(ParallelSpec(fsdp=4), 3, transfer=2.0) >= 3 * 2.0 + 5 * 2.0


def test_optimizer_shards_keep_whole_parameters() -> None:
    for zero in (1, 2):
        found = [task.collective for task in toy_graph(ParallelSpec(fsdp=4, zero=zero), 3).ranks[0].tasks]
        assert [(each.kind, each.size_bytes) for each in found if each] == [
            ("reduce_scatter", 3 * LAYER_BYTES),
            ("all_gather", 3 * LAYER_BYTES // 4),
        ]


def test_the_distributed_optimizer_scatters_once_a_step() -> None:
    """Three passes, one reduce-scatter; its share meets that of the other replica."""
    graph = toy_graph(ParallelSpec(dp=2, fsdp=4, zero=1, micro_batches=3), 3)
    found = [task.collective for task in graph.ranks[0].tasks if task.collective]
    assert [(each.kind, each.size_bytes, each.ranks) for each in found] == [
        ("reduce_scatter", 3 * LAYER_BYTES, (0, 1, 2, 3)),
        ("all_reduce", 3 * LAYER_BYTES // 4, (0, 4)),
        ("all_gather", 3 * LAYER_BYTES // 4, (0, 1, 2, 3)),
    ]


def test_parameters_are_gathered_while_the_next_forward_pass_goes_on() -> None:
    """Transfers of 0.5 s: beside 9 s of work one scatter, and one gather at the end or, layer by layer, the first."""
    after = ParallelSpec(fsdp=4, zero=1)
    beside = replace(after, overlap_gather=True)
    assert step(after, 3, transfer=0.5) == pytest.approx(9.0 + 0.5 + 0.5)
    graph = toy_graph(beside, 3, transfer=0.5)
    gathers = [task.collective.size_bytes for task in graph.ranks[0].tasks if task.name == "c10d::_allgather_base_"]  # type: ignore[union-attr]
    assert gathers == [LAYER_BYTES // 4] * 3
    assert simulate_iterations(graph, 4).period_seconds == pytest.approx(9.0 + 0.5 + 0.5)
    assert simulate_iterations(toy_graph(beside, 3, transfer=1.5), 4).period_seconds == pytest.approx(
        9.0 + 1.5 + 2 * 0.5 + 1.5
    )


def test_gradients_may_be_summed_in_fp32() -> None:
    """Of 16-bit gradients twice the bytes meet; shares that are kept are FP32 too."""
    for text, kind in (("dp=4", "all_reduce"), ("fsdp=4", "reduce_scatter"), ("fsdp=4,zero=1", "reduce_scatter")):
        sizes = {}
        for each in (text, f"{text},reduce-dtype=float32"):
            (plan,) = toy_plans(parse_parallel(each), 3)
            tasks = write_stage(replace(plan, element_bytes=2)).tasks
            sizes[each] = sum(
                task.collective.size_bytes for task in tasks if task.collective and task.collective.kind == kind
            )
        assert sizes[f"{text},reduce-dtype=float32"] == 2 * sizes[text] == 2 * 3 * LAYER_BYTES


def test_shards_of_masters_are_cast_on_their_way() -> None:
    """FP32 shards: what is gathered has 2 bytes an element, the kernel before reads 4; a share of gradients is cast."""
    (plan,) = toy_plans(parse_parallel("fsdp=4,master-weights=yes"), 3)
    tasks = write_stage(replace(plan, element_bytes=2)).tasks
    gathers = {task.collective.size_bytes for task in tasks if task.collective and task.collective.kind == "all_gather"}
    assert gathers == {LAYER_BYTES // 4}
    copied = {task.operators[0] for task in tasks if task.name == "fsdp::all_gather_copy_in"}
    assert {(each.read_bytes, each.write_bytes) for each in copied} == {(500, 250)}  # type: ignore[union-attr]
    assert [task.name for task in tasks].count("aten::_to_copy") == 3


def test_gradient_shards_are_summed_in_every_pass_and_over_replicas_once() -> None:
    """ZeRO 2 and 3 keep a quarter of the gradients: three passes, then the share meets that of the other replica."""
    for zero, scatters in ((2, [3 * LAYER_BYTES] * 3), (3, [LAYER_BYTES] * 9)):
        graph = toy_graph(ParallelSpec(dp=2, fsdp=4, zero=zero, micro_batches=3), 3)
        found = [task.collective for task in graph.ranks[0].tasks if task.collective]
        assert [each.size_bytes for each in found if each.kind == "reduce_scatter"] == scatters
        assert {each.ranks for each in found if each.kind == "reduce_scatter"} == {(0, 1, 2, 3)}
        reduced = [each for each in found if each.kind == "all_reduce"]
        assert sum(each.size_bytes for each in reduced) == 3 * LAYER_BYTES // 4
        assert {each.ranks for each in reduced} == {(0, 4)}
        added = [task.name for task in graph.ranks[0].tasks].count("aten::add_")
        assert added == 2 * len(scatters) // 3


def test_only_whole_gradients_are_added_to_those_of_earlier_passes() -> None:
    """4 s a layer instead of 3 s where they are added; a share is added besides, in no time here."""

    def seconds(spec: ParallelSpec) -> float:
        (plan,) = toy_plans(spec, 3)
        slower = dict(plan.pieces.accumulate)
        slower |= {name: part(3.0, gradient=LAYER_BYTES) for name in range(3)}
        pieces = replace(plan.pieces, accumulate=slower)
        rank = write_stage(replace(plan, pieces=pieces))
        graph = ExecutionGraph((rank,), {0: spec.replicas}, "toy")
        return simulate(price(price_collectives(graph, OneNode(), Transfers()), Transfers(), NoHost())).step_seconds

    assert seconds(ParallelSpec(dp=4, micro_batches=2)) == pytest.approx(3 * 3.0 + 3 * 4.0)
    assert seconds(ParallelSpec(fsdp=4, zero=1, micro_batches=2)) == pytest.approx(3 * 3.0 + 3 * 4.0)
    assert seconds(ParallelSpec(fsdp=4, zero=2, micro_batches=2)) == pytest.approx(6 * 3.0)
    assert seconds(ParallelSpec(fsdp=4, micro_batches=2)) == pytest.approx(6 * 3.0)


def test_every_part_of_an_interleaved_stage_reduces_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own last pass: buckets of one layer each, shares of every layer over the replicas."""
    monkeypatch.setattr("e2e.parallelism.stage.FIRST_BUCKET_BYTES", 1)
    spec = ParallelSpec(dp=2, pp=2, micro_batches=4, schedule="interleaved", virtual_stages=2, bucket_mb=1e-9)
    for each, size in ((spec, LAYER_BYTES), (replace(spec, fsdp=2), LAYER_BYTES // 2)):
        for rank in toy_graph(each, 8).ranks:
            sizes = [task.collective.size_bytes for task in rank.tasks if task.name == "c10d::allreduce_"]  # type: ignore[union-attr]
            assert sizes == [size] * 4


def test_shared_embeddings_meet_share_by_share() -> None:
    for spec, size in ((ParallelSpec(pp=2), 4000), (ParallelSpec(pp=2, fsdp=4), 1000)):
        for plan in toy_plans(spec, 2):
            tasks = write_stage(replace(plan, tied_bytes=4000)).tasks
            (met,) = (task.collective for task in tasks if task.collective and task.collective.group == "embedding")
            assert met.size_bytes == size


def test_activations_in_flight() -> None:
    """1F1B keeps as many micro-batches as stages follow, GPipe all of them."""
    early = ParallelSpec(pp=4, micro_batches=8)
    assert [in_flight(early, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(early, schedule="gpipe"), 0) == 8


@pytest.mark.parametrize("text", ["tp=2,pp=2,dp=2", "pp=4,fsdp=2,zero=1,micro-batches=4", "cp=2,tp=2,pp=2"])
def test_all_stages_meet_for_the_norm_and_nobody_waits_for_ever(text: str) -> None:
    spec = parse_parallel(text)
    plain, clipped = (
        simulate(toy_graph(replace(spec, clip=clip), 4, transfer=0.25)).step_seconds for clip in (False, True)
    )
    assert clipped > plain
