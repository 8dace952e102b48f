"""Layer norm of short rows and transposing copies in FP16: which kernels they are, their cost before any factor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.family import InvertedShares
from costmodel.gpu.families.memory_bound import MemoryBound
from costmodel.gpu.families.normalization import HalfRows, NormRows, half_class, is_half_work
from costmodel.gpu.families.rates import kernel_floor, l2_bandwidth
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Normalization, Rearrangement

CARD = load_machine("rtx-3090")
NORM = Normalization("layer_norm", 64 * 3136, 384, "float16")
COPY = Rearrangement("transpose", 64 * 384 * 3136, 1, "float16")
PLAIN = HalfRows(InvertedShares({}, 0.0, {}))


def test_only_short_rows_and_single_elements_in_fp16_forward_are_meant() -> None:
    assert is_half_work(NORM) and is_half_work(COPY)
    others = [
        replace(NORM, dtype="bfloat16"),
        replace(NORM, dtype="float32"),
        replace(NORM, columns=1025),
        replace(NORM, direction="backward"),
        replace(NORM, kind="rms_norm"),
        replace(COPY, dtype="bfloat16"),
        replace(COPY, inner=32),
        replace(COPY, kind="concat"),
    ]
    assert not any(map(is_half_work, others))


def test_a_copy_fetches_a_sector_for_every_element_where_l2_is_slower_than_memory() -> None:
    sectors = COPY.elements * 32 / l2_bandwidth(CARD) + kernel_floor(CARD)
    analysis = PLAIN.analyse([NORM, COPY, NORM], CARD)
    assert analysis.seconds[1] == pytest.approx(sectors)
    assert analysis.bound(1) == "memory:L2"
    assert sectors > MemoryBound().analyse([COPY], CARD).seconds[0]
    assert analysis.seconds[[0, 2]] == pytest.approx(NormRows().analyse([NORM, NORM], CARD).seconds)


def test_factors_are_those_of_their_classes_and_prices_come_from_here() -> None:
    floor = kernel_floor(CARD)
    shares = InvertedShares({half_class(NORM): 0.5, half_class(COPY): 2.0}, 0.1, {})
    plain, scaled = (family.analyse([NORM, COPY], CARD).seconds - floor for family in (PLAIN, HalfRows(shares)))
    assert scaled == pytest.approx(plain * [0.5, 2.0])
    priced = [each.seconds for each in gpu_cost_model(CARD).estimate([NORM, COPY])]
    assert priced == pytest.approx(HalfRows().analyse([NORM, COPY], CARD).seconds)
