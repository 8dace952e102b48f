"""How a model is spread: what shares memory saves it, what overlaps is no slower, slower links are no faster."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.relations.relation_rows import (
    Relation,
    as_it_is,
    both,
    clearly_less_memory,
    clearly_slower,
    graphed,
    held,
    no_faster,
    no_less_memory,
    no_more_memory,
    no_slower,
    roughly,
    same_flops,
    several,
    spread,
    times,
    to,
)

more = both(no_faster, no_less_memory)
PIPELINE = {"config": "llama-4-layers", "gpu": ("h100-sxm", "a100-sxm-80gb"), "batch_size": (1, 4)}
pipelines = several(
    parallel=("pp=4,dp=2,micro-batches=4", "pp=2,fsdp=4,zero=1,micro-batches=4", "pp=2,tp=2,dp=2,micro-batches=4"),
    **PIPELINE,
)
deep = several(parallel=("pp=4,dp=2,micro-batches=4", "pp=2,dp=4,micro-batches=4"), **PIPELINE)
tensor = several(
    parallel=("tp=4,sp=yes,dp=2", "tp=8,sp=yes"), config="llama-wide", batch_size=(2, 4), sequence_length=2048
)
shards = several(parallel=("fsdp=8", "fsdp=4,dp=2", "fsdp=4,tp=2"))
experts = several(config="mixtral", parallel=("fsdp=8,ep=8", "dp=8,ep=4"))
nodes = several(gpus=16, gpu=("h100-sxm", "a100-sxm-80gb"), nodes=2, parallel=("fsdp=16", "dp=16", "tp=8,dp=2"))


def recompute(*ways):
    return tuple(spread(recompute=each) for each in ways)


def graphed_with(**keys):
    return lambda options: spread(**keys)(graphed(options))


def per_gpu(before, after):
    """No more samples a second and GPU."""
    one, other = (found.throughput.samples_per_second / found.gpus for found in (before, after))
    return other <= one * (1 + 1e-6)


def passes_per_gpu(before, after):
    one, other = (found.iteration_seconds - found.optimizer_seconds for found in (before, after))
    return other >= one * (1 - 1e-6)


def on(gpus, parallel):
    return to(gpus=gpus, parallel=parallel)


def less_bubble(before, after):
    """Of all ranks."""
    one, other = (sum(rank.bubble_seconds * rank.multiplicity for rank in found.ranks) for found in (before, after))
    return other <= one * (1 + 1e-6)


def recomputed(before, after):
    """What is computed again moves what is executed, not what the model has."""
    executed = [found.utilisation.executed_flops for found in (before, after)]
    return same_flops(before, after) and executed[1] >= executed[0]


SHARING = [
    Relation(
        "recomputation takes longer and less memory",
        shards,
        recompute("none", "selective", "full"),
        both(no_faster, no_more_memory),
    ),
    Relation(
        "recomputed operators are between none and whole layers",
        several(parallel=("fsdp=8", "dp=8")),
        recompute("none", "operators", "full"),
        both(no_faster, no_more_memory),
    ),
    Relation(
        "recomputing fewer layers is no slower, and takes no less memory",
        shards,
        (spread(recompute="full"), spread(recompute="full", recompute_every=2), as_it_is),
        both(no_slower, no_less_memory),
    ),
    Relation("recomputation leaves the FLOPs of the model", shards, recompute("none", "selective", "full"), recomputed),
    Relation(
        "ZeRO 2 takes no more memory than ZeRO 1",
        several(parallel=("fsdp=8,micro-batches=2", "fsdp=4,dp=2,micro-batches=2")),
        (spread(zero=1), spread(zero=2)),
        no_more_memory,
    ),
    # Of two layers all parameters are gathered at once, beside their shards: it takes more of them.
    Relation(
        "ZeRO 3 takes less memory than ZeRO 2",
        several(config="llama-6-layers", parallel=("fsdp=8,micro-batches=2", "fsdp=4,dp=2,micro-batches=2")),
        (spread(zero=2), spread(zero=3)),
        no_more_memory,
    ),
    Relation(
        "shared states take less memory than replicas",
        several(),
        (to(parallel="dp=8"), to(parallel="fsdp=8,zero=1")),
        no_more_memory,
    ),
    Relation(
        "ZeRO 2 is no faster than ZeRO 1",
        several(parallel=("fsdp=8,micro-batches=4", "fsdp=4,dp=2,micro-batches=2")),
        (spread(zero=1), spread(zero=2)),
        no_faster,
    ),
    Relation(
        "more shards take less memory each",
        several(batch_size=1),
        tuple(on(each, f"fsdp={each}") for each in (2, 8, 512)),
        no_more_memory,
    ),
    Relation(
        "shards of many take clearly less memory than replicas",
        several(parallel="dp=8", batch_size=1),
        (as_it_is, to(parallel="fsdp=8")),
        clearly_less_memory,
    ),
    Relation(
        "more ranks for a layer take less memory each",
        several(parallel="tp=1"),
        tuple(on(each, f"tp={each}") for each in (1, 2, 4)),
        no_more_memory,
    ),
    # One alone reduces no gradients, so that it has no buckets beside them.
    Relation(
        "more ranks for a sequence take less memory each",
        several(config="llama", sequence_length=4096),
        tuple(on(each, f"cp={each}") for each in (2, 4, 8)),
        no_more_memory,
    ),
    Relation(
        "more stages take less memory on the fullest",
        several(config="llama-4-layers"),
        tuple(on(each, f"pp={each},micro-batches=4") for each in (1, 2, 4)),
        no_more_memory,
    ),
    Relation(
        "gradients summed in FP32 are no faster",
        several(parallel=("fsdp=8", "dp=8", "fsdp=8,zero=1")),
        (spread(reduce_dtype="same"), spread(reduce_dtype="float32")),
        no_faster,
    ),
    Relation(
        "FP32 masters take more memory",
        several(parallel=("fsdp=8", "dp=8", "tp=2,dp=4")),
        (spread(master_weights="no"), spread(master_weights="yes")),
        no_less_memory,
    ),
    Relation(
        "states on the host take less memory",
        several(parallel=("fsdp=8,zero=1", "fsdp=8,zero=2")),
        (as_it_is, spread(offload_optimizer=0.5), spread(offload_optimizer=1)),
        both(no_faster, no_more_memory),
    ),
]
TIME = [
    Relation(
        "more GPUs process no more samples each",
        several(),
        tuple(on(each, f"dp={each}") for each in (1, 2, 8, 64)),
        per_gpu,
    ),
    # Each has less to update, for it holds less.
    Relation(
        "more shards process no more samples each, but for the optimizer",
        several(),
        tuple(on(each, f"fsdp={each}") for each in (2, 8, 64)),
        passes_per_gpu,
    ),
    Relation(
        "more ranks for a layer compute no more tokens each",
        several(config="llama"),
        tuple(on(each, f"tp={each}") for each in (1, 2, 4, 8)),
        per_gpu,
    ),
    # A call for every bucket where there was one for all.
    Relation(
        "reducing gradients beside the backward pass is no slower where the GPU rules",
        several(parallel=("dp=8", "tp=2,dp=4", "fsdp=8,zero=1")),
        (graphed_with(overlap="no"), graphed),
        no_slower,
    ),
    Relation(
        "gathering parameters beside the forward pass is no slower where the GPU rules",
        several(parallel=("fsdp=8,zero=1", "fsdp=8,zero=2")),
        (graphed_with(overlap_gather="no"), graphed_with(overlap_gather="yes")),
        no_slower,
    ),
    Relation(
        "gathering ahead is no slower", shards, (spread(prefetch=0), spread(prefetch=1), spread(prefetch=2)), no_slower
    ),
    Relation(
        "products beside transfers of tensor parallelism are no slower where the GPU rules",
        tensor,
        (graphed, graphed_with(tp_overlap="yes")),
        no_slower,
    ),
    Relation(
        "activations split along the sequence take no more memory",
        several(parallel=("tp=4,dp=2", "tp=2,dp=4")),
        (spread(sp="no"), spread(sp="yes")),
        no_more_memory,
    ),
    Relation(
        "interleaved stages are no slower where the GPU rules",
        several(parallel=("pp=2,dp=4,micro-batches=4", "pp=2,tp=2,dp=2,micro-batches=4"), **PIPELINE),
        (graphed, graphed_with(schedule="interleaved")),
        both(no_slower, less_bubble),
    ),
    Relation(
        "all forward passes first hold more and are no faster",
        deep,
        (as_it_is, spread(schedule="gpipe")),
        both(roughly(no_faster, 0.01), no_less_memory),
    ),
    Relation(
        "more micro-batches of the same step leave less bubble",
        pipelines,
        (as_it_is, lambda options: times("batch_size", 2)(options)),
        no_faster,
    ),
    Relation(
        "slower networks are no faster",
        nodes,
        tuple(
            to(network=each)
            for each in (
                "infiniband-xdr",
                "infiniband-hdr",
                "ethernet-100g",
                "ethernet-10g",
            )
        ),
        no_faster,
    ),
    Relation(
        "a network that is much slower makes the step clearly longer",
        several(gpus=16, gpu=("h100-sxm", "a100-sxm-80gb"), nodes=2, parallel=("fsdp=16", "dp=16"), config="llama"),
        (to(network="infiniband-xdr"), to(network="ethernet-10g")),
        partial(clearly_slower, factor=2.0),
    ),
    Relation(
        "more nodes for the same GPUs are no faster",
        several(gpus=8, gpu=("h100-sxm", "a100-sxm-80gb"), parallel=("fsdp=8", "dp=8", "tp=2,dp=4")),
        (to(nodes=1), to(nodes=2), to(nodes=4)),
        no_faster,
    ),
    Relation(
        "fewer cards a node are no faster",
        nodes,
        tuple(to(network=f"infiniband-hdr:{each}") for each in (8, 4, 1)),
        no_faster,
    ),
    Relation(
        "GPUs that differ more are no faster",
        several(),
        tuple(to(speed_spread=each) for each in (0, 0.02, 0.1)),
        no_faster,
    ),
    Relation(
        "uneven routing is no faster, whatever is dropped",
        experts,
        (to(routing="balanced"), to(routing="power-law=1.05"), to(routing="power-law=1.5")),
        no_faster,
    ),
    Relation(
        "what is dropped is not computed", experts, (to(routing="power-law=1.2"), to(routing="capacity=1.0")), no_slower
    ),
    Relation(
        "no routing moves the FLOPs of a model",
        experts,
        (to(routing="balanced"), to(routing="power-law=1.2"), to(routing="capacity=1.0")),
        same_flops,
    ),
    Relation(
        "tokens sent once a rank are no slower than a row for every expert",
        experts,
        (as_it_is, spread(ep_dispatch="deepep")),
        no_slower,
    ),
    Relation(
        "tokens that travel beside computation are no slower",
        experts,
        (spread(micro_batches=2), spread(micro_batches=2, ep_overlap="yes")),
        no_slower,
    ),
    Relation(
        "however it is spread, a model has the same FLOPs",
        several(config="llama"),
        tuple(
            to(parallel=each)
            for each in (
                "dp=8",
                "fsdp=8",
                "tp=2,dp=4",
                "pp=2,dp=4,micro-batches=2",
                "tp=2,pp=2,dp=2,micro-batches=2",
                "cp=2,dp=4",
            )
        ),
        same_flops,
    ),
]


test_sharing, test_sharing_thoroughly = held(SHARING)
test_time, test_time_thoroughly = held(TIME)


def test_ranks_that_do_the_same_take_the_same_time():
    from tests.e2e.relations.relation_rows import answer

    for parallel in ("dp=8", "tp=2,dp=4", "fsdp=8"):
        setting = {"config": "llama", "gpu": "h100-sxm", "gpus": 8, "batch_size": 1, "sequence_length": 1024}
        found = answer(setting | {"parallel": parallel})
        assert sum(rank.multiplicity for rank in found.ranks) == 8
        assert max(r.compute_seconds for r in found.ranks) == pytest.approx(min(r.compute_seconds for r in found.ranks))
