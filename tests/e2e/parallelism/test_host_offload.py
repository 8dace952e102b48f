"""Optimizer state on the host: when it travels and what the GPU waits for, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from costmodel.base.errors import InputError
from costmodel.machines.cluster import load_cluster
from costmodel.operators.device_work import MemoryCopy
from e2e.parallelism import ParallelGraph, ParallelSpec
from e2e.parallelism.host_offload import (
    ADAM_BYTES,
    ADDED_BYTES,
    CLIPPED_BYTES,
    CORE_BANDWIDTH,
    LOOP_ADAM_BYTES,
    RETURNED_BYTES,
    HostAdam,
    HostSeconds,
)
from e2e.parallelism.stage_writer import StageKernels, StageWriter
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Duration, ExecutionGraph, HostWork, Launch, RankWriter, Synchronize
from e2e.step.options import StepOptions
from tests.e2e.parallelism.small_models import spread_model

LAYERS, WIDTH, LENGTH, BATCH = 4, 64, 32, 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}
# Of a layer: queries and results, keys and values, gate, up and down, two norms.
LAYER_PARAMETERS = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 128 + 2 * WIDTH


def drawn(write: Callable[[StageWriter], None], seconds: Callable[[str, int], float]) -> float:
    """Seconds of what ``write`` writes, where tasks take ``seconds(name, stream)`` and the host nothing of its own."""
    writer = StageWriter(RankWriter(0), {})
    write(writer)
    rank = writer.rank.finish()
    nothing = Duration.measured(0.0)

    def priced(action: Any) -> Any:
        if isinstance(action, HostWork | Launch | Synchronize) and action.duration is None:
            return replace(action, duration=nothing)
        return action

    tasks = tuple(replace(task, duration=Duration.measured(seconds(task.name, task.stream))) for task in rank.tasks)
    threads = {name: tuple(priced(action) for action in actions) for name, actions in rank.threads.items()}
    return simulate(ExecutionGraph((replace(rank, tasks=tasks, threads=threads),), {0: 1})).step_seconds


@pytest.mark.parametrize(
    ("adam", "whole"),
    [
        (2.0, 1 + 3 * 2 + 1),  # the first copy there, the last back, the host in between
        (0.25, 3 * 1 + 0.25 + 1),  # three copies there, one after the other
    ],
)
def test_the_host_updates_one_part_while_the_next_is_on_its_way(adam: float, whole: float) -> None:
    def write(writer: StageWriter) -> None:
        host = HostAdam(writer, StageKernels(ParallelSpec(), 2), adam / 100)
        for _ in range(3):
            host.update(200)  # bytes of 100 gradients
        host.finish()
        writer.rank.after(0, 21)
        writer.kernel("next", ())

    assert drawn(write, lambda name, stream: 0.0 if name == "next" else 1.0) == pytest.approx(whole)


def test_the_host_takes_what_its_memory_or_one_core_takes() -> None:
    """Gradient, weight, moments read; weight, moments written; a 16-bit copy is made and copied once more."""
    assert (ADAM_BYTES, RETURNED_BYTES, ADDED_BYTES) == (28, 14, 12)
    slow = HostSeconds.of(1e9)
    assert slow.update == pytest.approx(42e-9) and slow.add == pytest.approx(12e-9)
    assert HostSeconds.of(1e9, returned=False).update == pytest.approx(28e-9)
    assert HostSeconds.of(1e9, fused=False, returned=False).update == pytest.approx(LOOP_ADAM_BYTES * 1e-9)
    assert HostSeconds.of(1e12).update == pytest.approx(42 / CORE_BANDWIDTH), "a process has one thread"
    node, one = (load_cluster("dgx-h100", gpus).host_bandwidth for gpus in (8, 1))
    assert node is not None and one == pytest.approx(8 * node)
    assert load_cluster("rtx-4090", 1).host_bandwidth is None


def spread(text: str, bandwidth: float | None = 1e9, **more: Any) -> ParallelGraph:
    step = StepOptions(**{"batch_size": BATCH, "sequence_length": LENGTH, "dtype": "bfloat16", **more})
    return spread_model(LLAMA, text, step, host_bandwidth=bandwidth)


def copies(built: ParallelGraph, kind: str) -> list[int]:
    operators = [each for task in built.graph.ranks[0].tasks for each in task.operators]
    found = [each for each in operators if isinstance(each, MemoryCopy) and each.kind == kind]
    return [each.size_bytes for each in found if each.pinned]


def host_seconds(built: ParallelGraph) -> float:
    actions = [each for each in built.graph.ranks[0].actions() if isinstance(each, HostWork)]
    return sum(each.duration.seconds for each in actions if each.kind == "host" and each.duration is not None)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_go_to_the_host_and_parameters_come_back(share: float) -> None:
    parameters = LAYERS * LAYER_PARAMETERS + (2 * 512 + 1) * WIDTH
    built = spread(f"offload-optimizer={share:g},master-weights=yes")
    assert sum(copies(built, "device_to_host")) == sum(copies(built, "host_to_device")) == parameters * 2 * share
    assert host_seconds(built) == pytest.approx(parameters * share * (ADAM_BYTES + RETURNED_BYTES) / 1e9)
    rank = built.graph.ranks[0]
    left = [task for task in rank.tasks if task.call is not None and rank.calls[task.call].phase == "optimizer"]
    assert any(task.kind != "copy" for task in left) == (share < 1), "what is left runs on the GPU"


def test_ranks_that_share_the_state_update_their_share() -> None:
    whole, shared = (
        host_seconds(spread(f"{text},offload-optimizer=1,master-weights=yes")) for text in ("dp=4", "fsdp=4,zero=1")
    )
    assert shared == pytest.approx(whole / 4, rel=1e-3)
    summed = spread("fsdp=4,zero=1,offload-optimizer=1,master-weights=yes,reduce-dtype=float32")
    assert sum(copies(summed, "device_to_host")) == 2 * sum(copies(summed, "host_to_device")), "FP32 gradients"


def sizes_of(built: ParallelGraph, kind: str) -> int:
    """Bytes that a rank puts into its collectives of this kind."""
    collectives = [task.collective for task in built.graph.ranks[0].tasks if task.collective is not None]
    return sum(each.size_bytes for each in collectives if each.kind == kind)


def test_shards_on_the_host_come_for_every_gather_and_take_their_gradients_back() -> None:
    """``CPUOffloadPolicy``: FP32 shards, gathered in 16 bits; what is summed in 16 bits is put there in FP32."""
    text = "fsdp=4,offload-optimizer=1,master-weights=yes"
    parameters = LAYERS * LAYER_PARAMETERS + (2 * 512 + 1) * WIDTH
    built = spread(text)
    assert sum(copies(built, "host_to_device")) == 2 * sizes_of(built, "all_gather") > 1.5 * parameters * 4 / 4
    assert sum(copies(built, "device_to_host")) == 2 * sizes_of(built, "reduce_scatter") / 4 == parameters * 4 / 4
    assert host_seconds(built) == pytest.approx(parameters / 4 * LOOP_ADAM_BYTES / 1e9)
    fused = spread(text, stack="torchtitan")
    assert host_seconds(fused) == pytest.approx(parameters / 4 * ADAM_BYTES / 1e9)
    usage = built.memory[0].breakdown
    assert usage["parameters"] == usage["gradients"] == usage["optimizer_state"] == 0
    twice = spread(f"{text},micro-batches=2")
    added = host_seconds(twice) - host_seconds(built)
    assert added == pytest.approx(parameters / 4 * ADDED_BYTES / 1e9), "gradients of the second are added on the host"
    assert not any(task.name == "aten::add_" and task.stream == 2 for task in twice.graph.ranks[0].tasks), (
        "and nowhere else"
    )


def test_deepspeed_puts_the_optimizer_alone_on_the_host() -> None:
    """``offload_optimizer`` of its stage 3: nothing is fetched for a gather, FP32 gradients go out, 16-bit shards come
    back once; the host clips, updates and casts."""
    text = "fsdp=4,offload-optimizer=1,master-weights=yes"
    share = (LAYERS * LAYER_PARAMETERS + (2 * 512 + 1) * WIDTH) // 4
    built = spread(text, stack="liger")
    assert sum(copies(built, "host_to_device")) == share * 2
    assert sum(copies(built, "device_to_host")) == share * 4
    assert host_seconds(built) == pytest.approx(share * (ADAM_BYTES + RETURNED_BYTES + CLIPPED_BYTES) / 1e9)
    unclipped = spread(f"{text},clip=no", stack="liger")
    assert host_seconds(unclipped) == pytest.approx(share * (ADAM_BYTES + RETURNED_BYTES) / 1e9)
    usage = built.memory[0].breakdown
    assert usage["gradients"] == usage["optimizer_state"] == 0 and usage["parameters"] >= share * 2
    twice = spread(f"{text},micro-batches=2", stack="liger")
    assert host_seconds(twice) == host_seconds(built), "the GPU adds gradients of the second"
    assert sum(copies(twice, "host_to_device")) == share * (2 + 4)


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        (
            "fsdp=4,offload-optimizer=0.5,master-weights=yes",
            {},
            "offload-optimizer=1 is for zero=3, which puts shards, gradients and state on the host or none",
        ),
        ("offload-optimizer=1", {}, "offload-optimizer updates FP32 weights on the host; add master-weights=yes"),
        ("offload-optimizer=1", {"mode": "inference"}, "offload-optimizer is about gradients and optimizer state"),
    ],
)
def test_what_cannot_be_offloaded_is_said(text: str, more: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        spread(text, **more)


def test_a_host_of_unknown_memory_is_refused() -> None:
    with pytest.raises(InputError, match="how fast the host's memory is, is not known of this machine"):
        spread("offload-optimizer=1,master-weights=yes", None)
