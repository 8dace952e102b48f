"""How much a step of a script processes: accumulated gradients, ranks with samples of their own, and what is shared."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import e2e
from costmodel.base.errors import InputError
from e2e.capture.script import capture_script, load_script
from e2e.sources import built_in_model
from e2e.step.operator_trace import (
    OperatorCall,
    OperatorTrace,
    Phase,
    Tensor,
    has_own_samples,
)


class Classifier(torch.nn.Module):
    """Called by keyword, returns a mapping, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 4)

    def forward(self, data: Any) -> dict[str, Any]:
        scores = self.layer(data)
        return {"loss": scores.square().mean(), "scores": scores}


def accumulating(batch_size: int = 4) -> Any:
    """Three passes of a whole batch each."""
    model = Classifier().cuda()

    def step() -> None:
        for _ in range(3):
            model(data=torch.randn(batch_size, 64, device="cuda"))["loss"].backward()

    return model, step


def dividing(batch_size: int = 8) -> Any:
    """One batch, in four parts."""
    model = Classifier().cuda()

    def step() -> None:
        for part in torch.randn(batch_size, 64, device="cuda").chunk(4):
            model(part)["loss"].backward()

    return model, step


def two_views(batch_size: int = 4) -> Any:
    """Two forward passes of the same samples, one backward pass."""
    model = Classifier().cuda()

    def step() -> None:
        data = torch.randn(batch_size, 64, device="cuda")
        (model(data)["loss"] + model(data + 1)["loss"]).backward()

    return model, step


def looking(batch_size: int = 4) -> Any:
    """No backward pass."""
    model = Classifier().cuda()
    return model, lambda: model(torch.randn(batch_size, 64, device="cuda"))


@pytest.mark.parametrize(
    ("function", "samples", "made_of"),
    [(accumulating, 12, "3 passes of 4"), (dividing, 8, ""), (two_views, 4, ""), (looking, 4, "")],
)
def test_passes_that_take_a_batch_each_are_counted(function: Any, samples: int, made_of: str) -> None:
    rate = e2e.predict(script=function, gpu="t4").throughput
    assert (rate.samples, rate.made_of) == (samples, made_of)


def test_another_batch_is_that_of_a_pass() -> None:
    as_it_is, larger = e2e.predict(script=accumulating, gpu="t4", what_if="batch=8").what_if
    assert larger.gain_per_sample == pytest.approx(2 * as_it_is.iteration_seconds / larger.iteration_seconds)


def test_a_pass_that_is_computed_again_is_no_pass_more() -> None:
    def checkpointed(batch_size: int = 4) -> Any:
        model = Classifier().cuda()

        def step() -> None:
            data = torch.randn(batch_size, 64, device="cuda", requires_grad=True)
            torch.utils.checkpoint.checkpoint(model, data, use_reentrant=False)["loss"].backward()

        return model, step

    assert [4 in lengths for lengths in capture_script(load_script(checkpointed)).passes] == [True]


def distributed(batch_size: int = 4) -> Any:
    """DDP whose ranks also show the mean of their losses, between two passes."""
    torch.distributed.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(Classifier().cuda())

    def step() -> None:
        for _ in range(2):
            loss = model(torch.randn(batch_size, 64, device="cuda"))["loss"]
            loss.backward()
            torch.distributed.all_reduce(loss.detach())

    return model, step


def test_every_rank_has_a_batch_of_its_own() -> None:
    found = e2e.predict(script=distributed, gpu="h100-sxm", gpus=16)
    assert (found.throughput.samples, found.throughput.made_of) == (128, "2 passes of 4 on each of 16 GPUs")
    assert ("--batch-size", "4 (the script's own)") in [(each.option, each.value) for each in found.asked]


FORWARD, BEHIND = 0, 2


def trace_with(name: str, elements: int, place: int) -> OperatorTrace:
    """A product and its backward pass, with the collective ``name`` of so many elements in front or behind."""
    tensor = Tensor(0, 0, (elements,), "float32", "cuda:0")
    calls: list[tuple[str, Phase, int | None]] = [("aten::mm", "forward", 1), ("MmBackward0", "backward", 1)]
    calls.insert(place, (name, "forward", None))
    return OperatorTrace(
        tuple(
            OperatorCall(number, called, None, 0, (tensor,), (tensor,), phase, sequence)
            for number, (called, phase, sequence) in enumerate(calls)
        )
    )


@pytest.mark.parametrize(
    ("name", "elements", "place", "own"),
    [
        ("c10d::_allgather_base_", 1 << 20, FORWARD, True),  # shards of parameters
        ("c10d::alltoall_base_", 1 << 20, FORWARD, True),  # lookups, tokens to their experts
        ("c10d::allreduce_", 1 << 20, FORWARD, False),  # sums of partial products
        ("_c10d_functional::all_gather_into_tensor", 1 << 20, FORWARD, False),  # activations of DTensor
        ("c10d::send", 1 << 20, FORWARD, False),  # stages of a pipeline
        ("c10d::allreduce_", 1, FORWARD, True),  # a loss to be shown
        ("c10d::allreduce_", 1 << 20, BEHIND, True),  # gradients, by hand
    ],
)
def test_ranks_that_share_samples_are_told_from_those_that_do_not(
    name: str, elements: int, place: int, own: bool
) -> None:
    assert has_own_samples(trace_with(name, elements, place)) is own


def test_what_a_rank_holds_is_limited_and_not_what_its_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of a GPU's memory is the limit here: shards of the model stay below it, the whole does not."""
    monkeypatch.setattr(built_in_model, "MOST_TIMES_MEMORY", 1e-3)

    def sharded(batch_size: int = 4, shard: bool = True) -> Any:
        torch.distributed.init_process_group("nccl")
        with torch.device("meta"):
            model = torch.nn.Linear(4096, 2048, bias=False)  # 32 MiB; the limit on T4 is 16
        if shard:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        return model, lambda: model(torch.randn(batch_size, 4096, device="cuda")).sum().backward()

    assert e2e.predict(script=sharded, gpu="t4", gpus=4).gpus == 4
    with pytest.raises(InputError, match=r"parameters of one rank take .*; shard them \(fully_shard\), or correct"):
        e2e.predict(script=lambda batch_size=4: sharded(batch_size, shard=False), gpu="t4", gpus=4)
