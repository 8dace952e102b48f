"""The text of --parallel: what it means, and which part of it is wrong."""

from __future__ import annotations

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism import ParallelSpec, parse_parallel
from e2e.parallelism.spec import require_consistent, text_of


def test_degrees_and_options() -> None:
    spec = parse_parallel("tp=4, pp=2,dp=2,micro-batches=8,recompute=full,bucket-mb=50,sp=yes", gpus=16)
    assert spec == ParallelSpec(
        dp=2, tp=4, pp=2, micro_batches=8, recompute="full", bucket_mb=50.0, sequence_parallel=True
    )
    assert spec.world_size == 16 and spec.replicas == 2


def test_replicas_fill_up_the_gpus() -> None:
    assert parse_parallel("tp=4,pp=2", gpus=64).dp == 8
    assert parse_parallel("fsdp=64", gpus=64).dp == 1
    assert parse_parallel("pp=2,tp=2").dp == 1


def test_ranks_that_share_sequences_contribute_gradients() -> None:
    spec = parse_parallel("cp=4,tp=2", gpus=16)
    assert (spec.dp, spec.replicas, spec.contributors, spec.sharing, spec.shards, spec.copies) == (2, 2, 8, 0, 1, 8)
    spec = parse_parallel("dp=2,fsdp=2,cp=4")
    assert (spec.world_size, spec.sharing, spec.shards, spec.copies) == (16, 3, 8, 2)
    spec = parse_parallel("dp=2,cp=4,zero=1")
    assert (spec.sharing, spec.shards, spec.copies) == (1, 4, 2)


def test_interleaved_has_two_parts_a_stage_unless_told() -> None:
    assert parse_parallel("pp=2,micro-batches=4,schedule=interleaved").virtual_stages == 2
    assert parse_parallel("pp=2,micro-batches=4,schedule=interleaved,virtual-stages=3").stages == 6


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("tp", "'tp' is no name=value"),
        ("tp=", "'tp=' is no name=value"),
        ("tp=4,,pp=2", "'' is no name=value"),
        ("micro-batch=4", "did you mean micro-batches?"),
        ("wings=4", "known: dp, fsdp"),
        ("tp=0", "tp=0: must be a whole number"),
        ("tp=-2", "tp=-2: must be a whole number"),
        ("tp=2.5", "tp=2.5: must be a whole number"),
        ("tp=two", "tp=two: must be a whole number"),
        ("tp=2,tp=4", "tp is given twice"),
        ("pp=2,schedule=zb", "schedule=zb: choose one of 1f1b, interleaved, gpipe"),
        ("recompute=some", "recompute=some: choose one of"),
        ("fsdp=8,zero=4", "zero=4: choose one of 1, 2, 3"),
        ("bucket-mb=0", "bucket-mb=0: must be more than 0"),
        ("bucket-mb=nan", "bucket-mb=nan"),
        ("offload-optimizer=0", "offload-optimizer=0: must be more than 0 and at most 1"),
        ("offload-optimizer=2", "must be more than 0 and at most 1"),
        ("fsdp=6,offload-optimizer=0.5", "offload-optimizer=1 is for zero=3"),
        ("tp=4", "= 4, but --gpus is 6"),
        ("dp=2,tp=4", "= 8, but --gpus is 6"),
        ("dp=6,sp=yes", "sp=yes needs tp"),
        ("fsdp=6,overlap=no", "overlap=no is for dp"),
        ("dp=6,overlap-gather=yes", "overlap-gather=yes is for zero=1 or 2"),
        ("fsdp=6,zero=1,prefetch=2", "prefetch is for zero=3"),
        ("tp=6,sp=no,tp-overlap=yes", "tp-overlap=yes is for what sp=yes gathers"),
        ("fsdp=6,reduce-dtype=float16", "reduce-dtype=float16: choose one of same, float32"),
        ("pp=6,schedule=dualpipe", "schedule=dualpipe: choose one of 1f1b, interleaved, gpipe"),
        ("dp=6,zero=1", "zero needs ranks to share with"),
        ("dp=6,schedule=gpipe", "schedule needs a pipeline"),
        ("dp=6,first-layers=2", "first-layers and last-layers need a pipeline"),
        ("pp=6,last-layers=-1", "last-layers=-1: must be a whole number, 0 or more"),
        ("cp=4", "= 4, but --gpus is 6"),
        ("pp=2,virtual-stages=2", "virtual-stages needs schedule=interleaved"),
        ("pp=2,micro-batches=3,schedule=interleaved", "multiple of pp=2"),
        ("dp=6,schedule=interleaved", "needs pp and virtual-stages of 2 or more"),
    ],
)
def test_a_bad_part_is_named(text: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_parallel(text, gpus=6)
    message = str(caught.value)
    assert named in message and "\n" not in message and message.startswith("--parallel")


@pytest.mark.parametrize(
    "text",
    [
        "dp=1",
        "dp=2,tp=4,pp=2,micro-batches=8",
        "fsdp=8,tp=2,sp=yes,zero=1,overlap-gather=yes,tp-overlap=yes",
        "fsdp=8,master-weights=yes,reduce-dtype=float32,prefetch=0",
        "pp=4,micro-batches=8,schedule=gpipe",
        "fsdp=8,cp=2,zero=2,overlap=no",
        "dp=2,ep=2,tp=2,sp=yes,recompute=full,master-weights=yes",
        "cp=2,cp-form=a2a,offload-optimizer=0.5",
        "dp=2,ep=4,etp=1,tp=2,sp=yes",
        "pp=2,first-layers=0,last-layers=3,micro-batches=4,schedule=interleaved,virtual-stages=2,bucket-mb=12.5",
    ],
)
def test_a_spec_is_written_as_it_is_read(text: str) -> None:
    assert text_of(parse_parallel(text)) == text


def test_a_spec_that_no_text_said_is_checked_too() -> None:
    require_consistent(ParallelSpec(dp=2, tp=4), 8)
    with pytest.raises(InputError, match="--parallel 'dp=8': dp x fsdp x cp x tp x pp = 8, but --gpus is 4"):
        require_consistent(ParallelSpec(dp=8), 4)
    with pytest.raises(InputError, match="--parallel 'dp=2,schedule=gpipe': schedule needs a pipeline"):
        require_consistent(ParallelSpec(dp=2, schedule="gpipe"))
