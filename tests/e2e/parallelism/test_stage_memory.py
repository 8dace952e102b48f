"""What a rank holds: stages of made parts, whose bytes can be counted on fingers, replayed through the allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.parallelism import ParallelSpec, parse_parallel
from e2e.parallelism.parallel_graph import layer_counts, part_names
from e2e.parallelism.part_memory import MemoryEvent, PartMemory, memory_of_parts
from e2e.parallelism.pieces import FIRST, LAST, Name, Part, Pieces
from e2e.parallelism.pipeline import in_flight, passes, stage_parts, warm_up
from e2e.parallelism.stage import StagePlan, write_stage
from e2e.parallelism.stage_memory import (
    GATHERED,
    PASSES,
    REDUCED,
    WORKSPACE_BYTES,
    KeptWeights,
    _Replay,
    kept_weights,
    stage_memory,
)
from e2e.step.memory import AllocationReplay, MemoryUsage
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor

MIB = 1 << 20
LAYER = 64 * MIB
LAYERS = 12
# Of a layer: 2 MiB are given, 4 made by attention, 4 by the rest; a checkpoint keeps 6 of a product that are freed.
GIVEN, CORE, REST, PRODUCT, WORK = range(5)
MEMORY = PartMemory(
    (
        MemoryEvent(GIVEN, 2 * MIB),
        MemoryEvent(PRODUCT, 6 * MIB),
        MemoryEvent(CORE, 4 * MIB),
        MemoryEvent(PRODUCT, 0),
        MemoryEvent(REST, 4 * MIB),
    ),
    (
        MemoryEvent(WORK, 16 * MIB),
        MemoryEvent(9, LAYER, gradient=True),
        MemoryEvent(WORK, 0),
        *(MemoryEvent(storage, 0) for storage in (REST, CORE, GIVEN)),
    ),
    frozenset({GIVEN}),
    frozenset({CORE}),
    frozenset({PRODUCT}),
)


def plans(spec: ParallelSpec, layers: int = LAYERS, memory: Mapping[Name, PartMemory] | None = None) -> list[StagePlan]:
    """Stages of layers of one FP32 parameter; nothing is before and behind them."""
    parts: dict[Name, Part] = {FIRST: Part(), LAST: Part(), **dict.fromkeys(range(3), Part())}
    pieces = Pieces(parts, parts, parts, parts, {}, memory=memory or dict.fromkeys(range(3), MEMORY))
    sizes: dict[Name, tuple[int, ...]] = {FIRST: (), LAST: (), **dict.fromkeys(range(3), (LAYER,))}
    counts = layer_counts(spec, layers, "toy")
    return [
        StagePlan(
            spec, stage, layers, pieces, tuple(part_names(counts, part) for part in stage_parts(spec, stage)), sizes, 4,
            2 * MIB, 0, (),
        )
        for stage in range(spec.pp)
    ]  # fmt: skip


def usage(spec: ParallelSpec, stage: int = 0, keeping: KeptWeights | None = None) -> MemoryUsage:
    return stage_memory(plans(spec)[stage], keeping or KeptWeights())


def held(spec: ParallelSpec, stage: int = 0) -> int:
    """In use at most, of a step of two micro-batches or more."""
    return usage(replace(spec, micro_batches=max(spec.micro_batches, 2)), stage).allocated_bytes


def test_a_step_holds_weights_gradients_moments_activations_and_what_one_layer_works_with() -> None:
    """The fullest moment: the second micro-batch's last layer has its gradient, which is yet to be added."""
    found = usage(ParallelSpec(micro_batches=2))
    assert found.breakdown == {
        "parameters": LAYERS * LAYER,
        "gradients": LAYERS * LAYER,
        "optimizer_state": 2 * LAYERS * LAYER,
        "inputs": 0,
        "activations": LAYERS * 10 * MIB,
        "cache": 0,
        "temporary": 16 * MIB + LAYER,
        "buffers": WORKSPACE_BYTES,
        "reserve": found.peak_bytes - found.allocated_bytes,
    }
    assert found.operator == "backward" and sum(found.breakdown.values()) == found.peak_bytes


def test_of_one_micro_batch_gradients_come_as_activations_go() -> None:
    found = usage(ParallelSpec())
    assert found.breakdown["gradients"] == LAYERS * LAYER and found.breakdown["activations"] <= 10 * MIB


def test_recomputation_keeps_what_it_says() -> None:
    """One layer's activations are there again while it runs again."""
    none = held(ParallelSpec())
    assert none - held(ParallelSpec(recompute="selective")) == (LAYERS - 1) * 4 * MIB
    assert none - held(ParallelSpec(recompute="full")) == (LAYERS - 1) * 8 * MIB
    every_other = held(ParallelSpec(recompute="full", recompute_every=2))
    assert held(ParallelSpec(recompute="full")) < every_other < none
    # The product's result, which an eager layer frees at once, is kept beside the layer's input.
    assert none - held(ParallelSpec(recompute="operators")) == (LAYERS - 1) * (8 - 6) * MIB


def test_the_share_of_the_state_on_the_host_is_not_on_the_gpu() -> None:
    state = [usage(ParallelSpec(offloaded_state=share)).breakdown["optimizer_state"] for share in (0.0, 0.25, 1.0)]
    assert state == [2 * LAYERS * LAYER, 2 * LAYERS * LAYER * 3 // 4, 0]


def test_earlier_stages_hold_more_micro_batches() -> None:
    early = ParallelSpec(pp=4, micro_batches=8)
    assert held(early) - held(early, 3) == 3 * 3 * 10 * MIB
    # Fullest is GPipe when the first micro-batch has left its gradients and gone.
    assert held(replace(early, schedule="gpipe")) - held(early) == (7 - 4) * 3 * 10 * MIB
    assert held(replace(early, micro_batches=64)) == held(early)


def test_fsdp_gathers_into_a_buffer_and_reduces_from_one() -> None:
    """In the backward pass a layer is whole, the next one's buffer is filled, and gradients of a layer are summed."""
    spec = parse_parallel("fsdp=4,micro-batches=2")
    found = usage(spec)
    assert found.breakdown["parameters"] == LAYERS * LAYER // 4
    assert found.breakdown["gradients"] == LAYERS * LAYER // 4
    assert found.breakdown["buffers"] == WORKSPACE_BYTES + 3 * LAYER
    ahead = usage(replace(spec, prefetch=3))
    assert ahead.breakdown["buffers"] == WORKSPACE_BYTES + 5 * LAYER


def bf16(text: str, **more: Any) -> MemoryUsage:
    """Layers of so many bytes of 16-bit parameters."""
    spec = parse_parallel(f"{text},micro-batches=2")
    return stage_memory(replace(plans(spec)[0], element_bytes=2, **more), kept_weights(spec, 2))


def test_fp32_gradients_and_masters() -> None:
    plain, wide = bf16("fsdp=4"), bf16("fsdp=4,reduce-dtype=float32")
    assert wide.breakdown["gradients"] == 2 * plain.breakdown["gradients"]
    assert wide.breakdown["buffers"] == plain.breakdown["buffers"] + LAYER
    masters = bf16("fsdp=4,master-weights=yes")
    assert masters.breakdown["parameters"] == 2 * LAYERS * LAYER // 4
    assert masters.breakdown["optimizer_state"] == 4 * LAYERS * LAYER // 4
    assert bf16("dp=4").breakdown["buffers"] == WORKSPACE_BYTES + LAYERS * LAYER  # DistributedDataParallel's buckets


def test_megatron_accumulates_in_one_buffer_and_keeps_one_empty_gradient_of_a_shape() -> None:
    spec = parse_parallel("fsdp=4,zero=1,micro-batches=2,master-weights=yes")
    found = stage_memory(
        replace(plans(spec)[0], element_bytes=2), KeptWeights(1.0, 2.0, 6.0, buckets=False, accumulates=True)
    )
    assert found.breakdown["gradients"] == 2 * LAYERS * LAYER
    assert found.breakdown["optimizer_state"] == 6 * LAYERS * LAYER // 4
    assert found.breakdown["buffers"] == 2 * WORKSPACE_BYTES + LAYER
    assert found.breakdown["temporary"] == 16 * MIB


def test_the_optimizer_may_need_more_than_the_backward_pass() -> None:
    (plan,) = plans(ParallelSpec(micro_batches=2))
    found = stage_memory(replace(plan, optimizer_bytes=8192 * MIB), KeptWeights())
    assert found.operator == "optimizer"
    assert found.allocated_bytes == 4 * LAYERS * LAYER + WORKSPACE_BYTES + 8192 * MIB


@pytest.mark.parametrize("recompute", ["none", "operators", "full"])
def test_many_events_are_put_together_without_losing_bytes(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = usage(ParallelSpec(micro_batches=2, recompute=recompute))
    monkeypatch.setattr("e2e.parallelism.stage_memory.MANY_EVENTS", 0)
    coarse = usage(ParallelSpec(micro_batches=2, recompute=recompute))
    assert coarse.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.002)


def with_cast_weights(size: int) -> PartMemory:
    """As MEMORY, with the two copies of a weight in 8 bits: one that is freed, one that the backward pass reads."""
    copies = tuple(MemoryEvent(storage, size, cast_weight=True) for storage in (20, 21))
    first, last = (replace(event, size=0) for event in copies)
    return replace(MEMORY, forward=(*copies, *MEMORY.forward, first), backward=(*MEMORY.backward, last))


@pytest.mark.parametrize("many", [200_000, 0], ids=["every event", "put together"])
@pytest.mark.parametrize("text", ["micro-batches=2", "pp=4,micro-batches=8", "pp=2,micro-batches=8,schedule=gpipe"])
def test_weights_in_8_bits_are_there_once_whatever_is_in_flight(
    text: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("e2e.parallelism.stage_memory.MANY_EVENTS", many)
    spec = parse_parallel(text)
    memory: dict[Name, PartMemory] = dict.fromkeys(range(3), with_cast_weights(8 * MIB))
    before, after = (
        stage_memory(plans(spec, memory=each)[0], KeptWeights()).allocated_bytes for each in (None, memory)
    )
    assert after - before == 2 * 8 * MIB * LAYERS // spec.pp


def test_parameters_of_the_distributed_optimizer_are_their_copies_in_8_bits() -> None:
    memory: dict[Name, PartMemory] = dict.fromkeys(range(3), with_cast_weights(8 * MIB))
    spec = parse_parallel("fsdp=2,zero=1,master-weights=yes,micro-batches=2")
    keeping = KeptWeights(accumulates=True)
    before, after = (stage_memory(plans(spec, memory=each)[0], keeping).allocated_bytes for each in (None, memory))
    assert after == before


def test_weights_in_8_bits_of_gathered_layers_are_not_kept() -> None:
    memory: dict[Name, PartMemory] = dict.fromkeys(range(3), with_cast_weights(MIB))
    spec = parse_parallel("fsdp=4,micro-batches=2")
    before, after = (
        stage_memory(plans(spec, memory=each)[0], KeptWeights()).allocated_bytes for each in (None, memory)
    )
    assert after - before <= (LAYERS + 1) * MIB


def test_a_smaller_gpu_costs_the_reserve_first() -> None:
    found = usage(ParallelSpec(micro_batches=2))
    assert found.breakdown["reserve"] > 0
    tight = found.within(found.allocated_bytes + MIB)
    assert tight.breakdown["reserve"] == MIB and tight.peak_bytes == found.allocated_bytes + MIB
    assert found.within(1).peak_bytes == found.allocated_bytes and found.within(1 << 50) is found


def tensor(number: int, blocks: int = 1) -> Tensor:
    return Tensor(number, number, (128 * blocks,), "float32", "cuda:0")


def test_parts_hand_on_what_others_free() -> None:
    """Layer 0 makes 1, of which layer 1 makes 2 and 3 and whose backward pass frees 1; 3 is freed at once. A name that
    Python holds too long is freed where it was used last."""
    weight = tensor(0)
    calls = (
        OperatorCall(0, "a", None, 0, (weight,), (tensor(1, 4),), "forward"),
        OperatorCall(1, "b", None, 0, (tensor(1, 4),), (tensor(2, 2),), "forward"),
        OperatorCall(2, "c", None, 0, (tensor(2, 2),), (tensor(3),), "forward"),
        OperatorCall(
            3, "d", None, 0, (tensor(2, 2), tensor(1, 4)), (tensor(4, 3),), "backward", attributes={"freed": (3,)}
        ),
        OperatorCall(4, "e", None, 0, (tensor(4, 3), weight), (tensor(5),), "backward", attributes={"freed": (1, 2)}),
        OperatorCall(5, "end", None, 0, (), (), "backward", attributes={"freed": (4, 5)}),
    )
    keys: dict[int, tuple[int, bool, Name]] = {
        0: (0, False, 0), 1: (0, False, 1), 2: (0, False, 1), 3: (0, True, 1), 4: (0, True, 0), 5: (0, True, 0),
    }  # fmt: skip
    found = memory_of_parts(OperatorTrace(calls), keys)
    assert found[0].left == {}
    assert sorted(found[1].left.values()) == [2 * 512, 4 * 512]
    (given,) = found[1].given
    assert found[1].left[given] == 4 * 512
    for memory in found.values():
        sizes: dict[int, int] = {}
        for event in (*memory.forward, *memory.backward):
            if event.size:
                sizes[event.storage] = event.size
            else:
                del sizes[event.storage]
        assert sizes == {}, "every part frees what it allocates"
    assert 2 not in {event.storage for event in memory_of_parts(OperatorTrace(calls), keys, never_made={2})[1].forward}


def test_gradients_are_summed_from_memory_of_the_passes_into_that_of_the_reduction() -> None:
    """``foreach_reduce`` allocates its input before it changes to the stream of the reduction."""
    spec = parse_parallel("fsdp=4,micro-batches=2")
    (plan,) = plans(spec)
    replay, streams = _Replay(plan, KeptWeights(), dict.fromkeys(plan.names, MEMORY)), {}

    def noting(key: Any, size: float, role: Any, stream: int = PASSES) -> None:
        streams[key[0] if isinstance(key, tuple) else key] = stream
        AllocationReplay.take(replay, key, size, role, stream)

    replay.take = noting  # type: ignore[method-assign]
    replay.step(passes(spec, 0), first=True)
    assert (streams["reduced"], streams["share of gradients"], streams["gathering"]) == (PASSES, REDUCED, GATHERED)
    assert all(key[0] != "gathering" for key in replay.blocks if isinstance(key, tuple)), "nor is a buffer left over"


def test_the_last_layer_stays_whole_where_the_stack_keeps_it() -> None:
    (plan,) = plans(parse_parallel("fsdp=4"))
    gathers = [
        sum(task.collective is not None and task.collective.kind == "all_gather" for task in write_stage(each).tasks)
        for each in (plan, replace(plan, keeps_last=True))
    ]
    assert gathers == [2 * LAYERS, 2 * LAYERS - 1]
    assert held_by(plan, keeps_last=True) >= held_by(plan)


def held_by(plan: StagePlan, **more: Any) -> int:
    return stage_memory(replace(plan, **more), KeptWeights()).allocated_bytes


@pytest.mark.parametrize(("stage", "more"), [(0, 4 * (2 + 2)), (1, 4 * 2 - 2)])
def test_stages_of_pytorch_have_buffers_for_every_micro_batch(stage: int, more: int) -> None:
    """The first stage receives gradients and keeps what it has given; the last one computes in what it received."""
    spec = parse_parallel("pp=2,micro-batches=4")
    plain, buffered = (usage(spec, stage, KeptWeights(pipelining=each)).allocated_bytes for each in (False, True))
    assert buffered - plain == more * MIB


def test_stages_of_fsdp_hold_whole_gradients_of_one_part_at_a_time() -> None:
    """Two parts of three layers, two micro-batches: all forward, then all backward passes of the later part, whose
    gradients are shares and whose parameters are gone when the other part begins."""
    spec = parse_parallel("pp=2,fsdp=4,zero=1,schedule=interleaved,virtual-stages=2,micro-batches=2")
    plain, stages = (usage(spec, 0, KeptWeights(pipelining=each)) for each in (False, True))
    assert plain.breakdown["gradients"] == 6 * LAYER
    assert stages.breakdown["gradients"] in (3 * LAYER, 3 * LAYER + 3 * LAYER // 4)
    # The shards of one that has no masters are there throughout.
    assert stages.breakdown["parameters"] == 6 * LAYER // 4


def test_shards_on_the_host_leave_layers_and_activations() -> None:
    found = usage(parse_parallel("fsdp=4,micro-batches=2,offload-optimizer=1"))
    assert [found.breakdown[role] for role in ("parameters", "gradients", "optimizer_state")] == [0, 0, 0]
    here = usage(parse_parallel("fsdp=4,micro-batches=2"))
    assert here.allocated_bytes - found.allocated_bytes >= 4 * LAYERS * LAYER // 4 - LAYER


def test_interleaved_stages_begin_with_backward_passes_before_all_forward_ones() -> None:
    """Also with as many micro-batches as ranks: the last stage waits for one round of its first part alone."""
    spec = parse_parallel("pp=4,schedule=interleaved,virtual-stages=2,micro-batches=4")
    assert [warm_up(spec, stage) for stage in range(4)] == [8, 8, 6, 4]
    assert [in_flight(spec, stage) for stage in range(4)] == [8, 8, 7, 5]


@st.composite
def drawn_specs(draw: st.DrawFn) -> ParallelSpec:
    """Ways to train the toy model with something shared."""
    pp = draw(st.sampled_from((1, 2, 4)))
    schedule = draw(st.sampled_from(("1f1b",) if pp == 1 else ("1f1b", "gpipe", "interleaved")))
    passes = draw(st.sampled_from((4, 8) if schedule == "interleaved" else (1, 2, 4, 8)))
    return ParallelSpec(
        fsdp=draw(st.sampled_from((2, 4, 8))), pp=pp, schedule=schedule, micro_batches=passes,
        virtual_stages=3 if schedule == "interleaved" else 1, zero=draw(st.sampled_from((1, 2, 3))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))), master_weights=draw(st.booleans()),
        reduce_dtype=draw(st.sampled_from(("same", "float32"))),
    )  # fmt: skip


def of_every_stage(spec: ParallelSpec, layers: int = LAYERS) -> list[int]:
    """In use at most on every stage, of BF16 parameters."""
    return [stage_memory(plan, kept_weights(spec, 2)).allocated_bytes for plan in plans(spec, layers)]


def never_less(larger: ParallelSpec, smaller: ParallelSpec, layers: int = LAYERS) -> bool:
    """Whether every stage of ``larger``, of so many layers, holds as much as that of ``smaller``."""
    pairs = zip(of_every_stage(larger, layers), of_every_stage(smaller), strict=True)
    return all(more >= less for more, less in pairs)


@given(drawn_specs())
@settings(max_examples=25, deadline=None)
def test_more_of_a_step_never_takes_less_memory_and_more_sharing_or_recomputation_never_more(
    spec: ParallelSpec,
) -> None:
    assert never_less(spec, spec, layers=2 * LAYERS)
    assert never_less(replace(spec, micro_batches=2 * spec.micro_batches), spec)
    assert never_less(spec, replace(spec, fsdp=2 * spec.fsdp))
    assert never_less(replace(spec, zero=1), replace(spec, zero=2))
    none, selective, full = (replace(spec, recompute=each) for each in ("none", "selective", "full"))
    assert never_less(none, selective) and never_less(selective, full)


@given(drawn_specs(), st.sampled_from((0, 1, 16)))
@settings(max_examples=20, deadline=None)
def test_zero_2_reserves_no_more_than_zero_1(spec: ParallelSpec, losses: int) -> None:
    """Also where most is in use before there is a gradient: while the loss of ``losses`` GiB is computed."""
    loss = PartMemory((MemoryEvent(0, losses << 30),), (MemoryEvent(0, 0),), frozenset())
    memory: dict[Name, PartMemory] = {LAST: loss if losses else PartMemory(), **dict.fromkeys(range(3), MEMORY)}
    one, two = (
        [stage_memory(plan, kept_weights(each, 2)).peak_bytes for plan in plans(each, memory=memory)]
        for each in (replace(spec, zero=1), replace(spec, zero=2))
    )
    assert all(less <= more for less, more in zip(two, one, strict=True))
