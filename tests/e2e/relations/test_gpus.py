"""Better GPUs are never slower, whether they are other ones or the same with more of something."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.relations.relation_rows import (
    CARDS,
    Relation,
    as_it_is,
    both,
    card,
    clearly_slower,
    held,
    no_faster,
    no_slower,
    no_surer,
    one_gpu,
    roughly,
    same,
    several,
    to,
)

# Whose clock sinks under load: those with a `burst` rate, and T4's own.
LIMITED = ("h100-sxm", "a100-sxm-80gb", "h200-sxm", "b200-sxm", "rtx-4090", "l4", "l40s")
LARGE = {"config": "llama-wide", "batch_size": 8, "sequence_length": 2048}
FITS = ("fits", "may not fit", "does not fit")


# By how much what is moved between clocks may be off.
CLOCKS = 0.005


def on(*gpus):
    return tuple(to(gpu=each) for each in gpus)


def fits_no_worse(before, after):
    return FITS.index(after.memory_verdict) <= FITS.index(before.memory_verdict)


def rates(machine, factor):
    """Datasheet rates of the tensor cores' 16 bits."""
    said = {
        name: {"datasheet": f"{rate.datasheet * factor / 1e12} TFLOP/s", "origin": "a test"}
        for name, rate in machine.compute.items()
        if name in ("bfloat16", "float16")
    }
    return said


def memory(machine, factor=1.0, capacity=1.0):
    dram = machine.memory[-1]
    return [
        {
            "name": "DRAM",
            "datasheet": f"{dram.datasheet * factor / 1e9} GB/s",
            "capacity": f"{dram.capacity_bytes * capacity / 2**20} MiB",
        }
    ]


def chip(machine, power=1.0, multiprocessors=1.0):
    found = machine.chip()
    return {"power": f"{found.power_watts * power} W", "sm_count": round(found.sm_count * multiprocessors)}


def with_power(factor):
    return card(gpu=partial(chip, power=factor))


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
VARIANTS = [
    Relation("a renamed card is the card", one_gpu(), (as_it_is, card()), same),
    Relation(
        "eight renamed cards are the eight cards", several(gpu=("h100-sxm", "a100-sxm-80gb")), (as_it_is, card()), same
    ),
    Relation(
        "more bandwidth is no slower",
        one_gpu(gpu=CARDS),
        (as_it_is, card(memory=partial(memory, factor=1.5))),
        no_slower,
    ),
    Relation(
        "more multiprocessors at their power are no slower",
        one_gpu(),
        (as_it_is, card(gpu=partial(chip, power=1.2, multiprocessors=1.2))),
        no_slower,
    ),
    Relation(
        "more power is no slower", one_gpu(), (with_power(0.7), as_it_is, with_power(1.5)), roughly(no_slower, CLOCKS)
    ),
    Relation(
        "a lower power limit slows large products",
        one_gpu(gpu=LIMITED, **LARGE),
        (as_it_is, with_power(0.6)),
        partial(clearly_slower, factor=1.02),
    ),
    Relation(
        "lower datasheet rates slow large products",
        one_gpu(gpu=LIMITED, **LARGE),
        (as_it_is, card(compute=partial(rates, factor=0.5))),
        partial(clearly_slower, factor=1.3),
    ),
    Relation(
        "more memory takes as long and fits no worse",
        one_gpu(batch_size=(2, 8, 32, 128)),
        (as_it_is, card(memory=partial(memory, capacity=1.5))),
        both(roughly(no_faster, 1e-6), no_slower, fits_no_worse),
    ),
    Relation(
        "a card that nobody measured is no surer",
        one_gpu(gpu=("h100-sxm", "a100-sxm-80gb", "l40s"), **LARGE),
        (as_it_is, card(gpu=partial(chip, power=0.8, multiprocessors=0.8))),
        no_surer,
    ),
]

test_gpus, test_gpus_thoroughly = held(GPUS)
test_variants, test_variants_thoroughly = held(VARIANTS)
