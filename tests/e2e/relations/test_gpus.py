"""Better GPUs are never slower; the same with more of something: ``tests/costmodel/gpu/test_relations.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.relations.relation_rows import (
    Relation,
    held,
    no_faster,
    no_slower,
    one_gpu,
    roughly,
    to,
)

LARGE = {"config": "llama-wide", "batch_size": 8, "sequence_length": 2048}


# By how much what is moved between clocks may be off.
CLOCKS = 0.005


def on(*gpus):
    return tuple(to(gpu=each) for each in gpus)


GPUS = [
    Relation(
        "cards of data centres in their order",
        one_gpu(dtype="float16"),
        on("t4", "v100-sxm2-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "h100-pcie", "h100-sxm", "h200-sxm", "b200-sxm"),
        no_slower,
    ),
    Relation("consumer cards in their order", one_gpu(), on("rtx-3090", "rtx-4090", "rtx-5090"), no_slower),
    # Products are moved from one card to another at the clock of their analytic time and priced at that of the learned
    # one (docs/limits.md).
    Relation(
        "the later Blackwells are no slower",
        one_gpu(**LARGE),
        on("b200-sxm", "gb200", "gb300"),
        roughly(no_slower, CLOCKS),
    ),
    Relation("B300 is no slower than B200", one_gpu(), on("b200-sxm", "b300-sxm"), no_slower),
    Relation(
        "cards of the bus are no faster than those of the socket",
        one_gpu(dtype="float16"),
        on("h100-sxm", "h100-pcie"),
        no_faster,
    ),
    Relation(
        "A100 of the bus is no faster than that of the socket",
        one_gpu(),
        on("a100-sxm-40gb", "a100-pcie-40gb"),
        no_faster,
    ),
    Relation(
        "V100 of the bus is no faster than that of the socket",
        one_gpu(),
        on("v100-sxm2-32gb", "v100-pcie-32gb"),
        no_faster,
    ),
    Relation("H200 is H100 with more memory", one_gpu(), on("h100-sxm-96gb", "h100-sxm", "h200-sxm"), no_slower),
    Relation("H20 is no faster than H100", one_gpu(), on("h100-sxm", "h20"), no_faster),
    Relation("smaller cards of one generation are no faster", one_gpu(), on("l40s", "l4"), no_faster),
]
test_gpus, test_gpus_thoroughly = held(GPUS)
