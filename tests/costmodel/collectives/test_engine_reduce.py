"""All-reduces by engines' own kernels: one-shot, two-shot, NCCL above."""

from functools import lru_cache

import pytest

from costmodel.base.errors import InputError
from costmodel.collectives import collective_cost_model
from costmodel.collectives.engine_reduce import EngineReduce, reduce_of
from costmodel.cost_model import CostModel
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer


@lru_cache
def _model(machine: str) -> CostModel:
    return collective_cost_model(load_cluster(machine, 8))


def _seconds(machine: str, size: float, engine: str, ranks: int = 8) -> float:
    return _model(machine).estimate([CollectiveTransfer("all_reduce", size, ranks, engine=engine)])[0].seconds


def test_small_messages_take_one_shot_and_larger_ones_two() -> None:
    cluster = load_cluster("h100-sxm", 8)
    rate = cluster.intra_node.bandwidth
    kernel = EngineReduce(start=1.0, doubling=1.0, second=10.0, one_shot=1.0, two_shot=1.0)
    # 8 ranks: a start and two further doublings; 7 messages, or 10 s more and 1.75 messages.
    assert kernel.seconds(CollectiveTransfer("all_reduce", rate, 8), cluster) == pytest.approx(3 + 7)
    assert kernel.seconds(CollectiveTransfer("all_reduce", 4 * rate, 8), cluster) == pytest.approx(3 + 10 + 7)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("machine", ["h100-sxm", "h200-sxm", "a100-sxm-80gb", "b200-sxm", "h20"])
def test_times_rise_with_the_size_up_to_those_of_nccl(machine: str, engine: str) -> None:
    sizes = [2.0**place for place in range(8, 31)]
    found = [_seconds(machine, size, engine) for size in sizes]
    library = [_seconds(machine, size, "") for size in sizes]
    assert found == sorted(found)
    assert all(own <= other for own, other in zip(found, library, strict=True))
    assert found[0] < 0.7 * library[0]
    assert found[-1] == library[-1]


def test_through_the_host_more_than_two_ranks_use_nccl() -> None:
    assert reduce_of(CollectiveTransfer("all_reduce", 8.0, 4, engine="vllm"), load_cluster("l40s", 8)) is None
    assert _seconds("l40s", 1024, "vllm", 4) == _seconds("l40s", 1024, "", 4)
    assert _seconds("l40s", 1024, "vllm", 2) < _seconds("l40s", 1024, "", 2)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="all-reduce of lmdeploy: choose one of sglang, trtllm, vllm"):
        _seconds("h100-sxm", 8.0, "lmdeploy")
    with pytest.raises(ValueError, match="engine is for all_reduce only"):
        CollectiveTransfer("all_gather", 8.0, 2, engine="vllm")
