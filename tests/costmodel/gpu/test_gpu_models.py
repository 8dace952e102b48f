"""The models of :mod:`costmodel.gpu` by family, and what joins them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from costmodel.base.errors import InputError, MachineError, UnsupportedOperatorError
from costmodel.cost_model import Measurement
from costmodel.gpu import fitted, gpu_cost_model
from costmodel.gpu.fitted import all_fitted, level_transfer, packaged_machine, residuals_for
from costmodel.machines.machine_file import load_machine
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    MemoryCopy,
    Normalization,
    OptimizerStep,
    Pooling,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d, Pool2d
from costmodel.operators.lookups import EmbeddingLookup

CONV = Conv2d(32, 64, 56, 56, 64, (3, 3), padding=(1, 1, 1, 1))
EVERY_TYPE = (
    Gemm(1, 512, 512, 512),
    Gemm(16, 512, 512, 64, "bfloat16"),
    CONV,
    dataclasses.replace(CONV, groups=64),
    dataclasses.replace(CONV, dtype="float16", kernel=(1, 1), padding=(0, 0, 0, 0)),
    ConvolutionBackward(CONV, "data"),
    ConvolutionBackward(CONV, "weight"),
    Elementwise("add", 1 << 20, 2),
    Normalization("layer_norm", 4096, 1024),
    Normalization("batch_norm", 4096, 64, direction="backward"),
    Softmax(4096, 1024, direction="backward"),
    Attention(8, 16, 1024, 1024, 64, 16),
    Reduction("sum", 1 << 20, 1),
    EmbeddingLookup(1000, 64, 4096, 4096),
    EmbeddingLookup(1000, 64, 4096, 512, direction="backward", fused_optimizer="sgd"),
    MemoryCopy(1 << 20, "host_to_device", pinned=True),
    Rearrangement("gather", 1 << 20, inner=4),
    Pooling("max", 32, 64, 112, 112, 56, 56, (3, 3), direction="backward"),
    Pool2d("average", 32, 64, 7, 7, (7, 7)),
    OptimizerStep("adamw", 1 << 20, 10, 4, 3),
    Loss("nll", 4096, 1000),
)

WARM = 0.25  # seconds that DRAM would take for a quarter of the toy GPU's L2


@pytest.fixture
def plain(toy_gpu, tmp_path):
    """The analytic models alone, on the toy GPU."""
    return lambda operator: gpu_cost_model(toy_gpu, tmp_path).estimate([operator])[0]


@pytest.mark.parametrize("name", ["v100-pcie-32gb", "p4", "rtx-2080-ti", "h100-sxm"])
def test_every_operator_has_a_price_with_interval_bound_and_source(name):
    estimates = gpu_cost_model(load_machine(name)).estimate(EVERY_TYPE)
    for operator, estimate in zip(EVERY_TYPE, estimates, strict=True):
        assert 1e-6 < estimate.lower <= estimate.seconds <= estimate.upper < 1, operator
        assert f"{estimate.bound}_seconds" in estimate.breakdown


def test_what_moves_bytes_takes_bytes_over_bandwidth(plain):
    # 3 x 4 B x 1e6 elements / 1e6 B/s, less a quarter of L2
    add = plain(Elementwise("add", 10**6, inputs=2))
    assert add.seconds == pytest.approx(12 - WARM) and add.bound == "memory:DRAM" and add.source == "analytic"
    assert plain(OptimizerStep("adamw", 10**6, 3, reads=4, writes=3)).seconds == pytest.approx(28 - WARM)
    assert plain(Reduction("sum", 10**6, 1)).seconds == pytest.approx(4 - WARM, rel=1e-5)
    assert plain(Reduction("sum", 10**6, 1, contiguous=False)).seconds == pytest.approx(5.2 - WARM, rel=1e-5)
    # a quarter of L2 (1 MB): found there, at 1e7 B/s
    assert plain(Elementwise("copy", 10**4)).seconds == pytest.approx(8e4 / 1e7)


def test_strided_operands_waste_sectors_that_left_the_cache(plain):
    # 12 B an element, and 28 B in vain of each sector of 32 B of one operand once 1 MB of L2 does not keep it
    kept = plain(Elementwise("add", 10**6, inputs=2, strided_elements=10**6, reuse_bytes=10**6))
    lost = plain(Elementwise("add", 10**6, inputs=2, strided_elements=10**6, reuse_bytes=10**6 + 1))
    assert kept.seconds == pytest.approx(12 - WARM)
    assert lost.seconds == pytest.approx(12 + 28 - WARM)


def test_scattered_short_runs_waste_sectors(plain):
    whole = plain(Rearrangement("gather", 10**6, inner=64)).seconds
    assert whole == pytest.approx(8 + 8 / 64 - WARM)  # an index of 8 B for each run
    assert plain(Rearrangement("gather", 10**6, inner=2)).seconds == pytest.approx(4 * 4 + 4 + 4 - WARM)
    # No more is read than there is.
    few = Rearrangement("gather", 10**6, inner=2, source_elements=2 * 10**6)
    assert plain(few).seconds == pytest.approx(2 * 4 + 4 + 4 - WARM)
    assert plain(Rearrangement("transpose", 10**6, inner=1)).seconds == pytest.approx(10 - WARM)


def test_long_rows_are_read_again(plain):
    # 8 SMs with few threads: L2 holds the rows in flight, 0.4 of what is read again costs time
    assert plain(Softmax(1000, 1024)).seconds == pytest.approx(2 * 4.096 - WARM)
    assert plain(Softmax(1000, 2048)).seconds == pytest.approx(2.4 * 8.192 - WARM)


def test_losses_read_what_they_need(plain):
    assert plain(Loss("nll", 1000, 10**5)).seconds < 1e-3 * plain(Loss("cross_entropy", 1000, 10**5)).seconds


def test_copies_cross_the_link_and_pageable_ones_at_half_its_rate(plain):
    assert plain(MemoryCopy(10**5, "host_to_device", pinned=True)).seconds == pytest.approx(1 + 1)
    assert plain(MemoryCopy(10**7, "device_to_host")).seconds == pytest.approx(1 + 200)
    # What is small is staged before it begins.
    assert plain(MemoryCopy(10**5, "device_to_host")).seconds == pytest.approx(1 + 1)
    assert plain(MemoryCopy(10**6, "device_to_device")).seconds == pytest.approx(2 - WARM)
    assert plain(MemoryCopy(10**6, "memset")).seconds == pytest.approx(1 - WARM)


def test_a_thread_of_the_host_copies_pageable_memory_first():
    (found,) = gpu_cost_model(load_machine("h200-sxm")).estimate([MemoryCopy(20870505, "host_to_device")])
    assert found.seconds == pytest.approx(2.96e-3, rel=0.05)  # measured


def test_a_host_on_the_chip_beside_is_reached_by_its_own_link(toy_gpu, tmp_path):
    (pcie,) = (link for link in toy_gpu.links if link.kind == "pcie")
    near = dataclasses.replace(pcie, kind="c2c", bandwidth=4 * pcie.bandwidth)
    model = gpu_cost_model(dataclasses.replace(toy_gpu, links=(*toy_gpu.links, near)), tmp_path)
    (found,) = model.estimate([MemoryCopy(10**5, "device_to_host", pinned=True)])
    assert found.seconds == pytest.approx(1 + 1 / 4)


def test_a_gpu_without_links_says_so(toy_gpu, tmp_path):
    model = gpu_cost_model(dataclasses.replace(toy_gpu, links=()), tmp_path)
    with pytest.raises(MachineError, match="no link for copies .*add links"):
        model.estimate([MemoryCopy(1, "host_to_device")])


def test_winograd_needs_fewer_products_than_implicit_gemm(tmp_path):
    model = gpu_cost_model(load_machine("a100-pcie-40gb"), tmp_path)
    square = Conv2d(8, 256, 28, 28, 256, (3, 3), padding=(1, 1, 1, 1))
    strided = dataclasses.replace(square, stride=(2, 2), height=56, width=56)
    assert square.flops == strided.flops
    products = [each.breakdown["compute_seconds"] for each in model.estimate([square, strided])]
    assert products[0] < 0.5 * products[1]


def test_an_operator_of_another_kind_is_refused():
    with pytest.raises(UnsupportedOperatorError, match="no cost model for operator str"):
        gpu_cost_model(load_machine("t4")).estimate(["conv"])


def test_a_cpu_is_refused(toy):
    with pytest.raises(MachineError, match="is no GPU"):
        gpu_cost_model(toy)


def test_a_packaged_gpu_is_known_by_the_name_of_its_file():
    found = packaged_machine("t4")
    assert found is not None and found.name == "t4"
    assert packaged_machine("x" * 5000) is packaged_machine("../gpu/t4") is None


# --- fitted and analytic ---------------------------------------------------------------------------


def test_sources_say_what_was_measured():
    gemm, bf16 = Gemm(1, 1024, 1024, 1024), Gemm(1, 1024, 1024, 1024, "bfloat16")
    backward = ConvolutionBackward(CONV, "weight")
    expected = {
        "v100-pcie-32gb": ("fitted", "analytic", "analytic"),  # BF16 was not measured there
        "a100-pcie-40gb": ("fitted", "fitted", "analytic"),  # BF16 on a relative, a100-sxm-80gb
        "h100-sxm": ("fitted", "fitted", "analytic"),  # FP32: five published points
        "a100-sxm-40gb": ("fitted", "fitted", "analytic"),  # both on relatives
        "b200-sxm": ("analytic", "analytic", "analytic"),
    }
    for name, sources in expected.items():
        estimates = gpu_cost_model(load_machine(name)).estimate([gemm, bf16, backward])
        assert tuple(each.source for each in estimates) == sources, name


@pytest.mark.parametrize(
    ("gpu", "elements", "least"),
    # The shortest kernel is known to about 0.9 us, of 2.5; where tables are, or kernels are long, that does not count.
    [("h200-sxm", 6433, 1.34), ("h200-sxm", 10**9, 1.0), ("a100-pcie-40gb", 6433, 1.0)],
)
def test_a_short_kernel_is_known_no_better_than_the_shortest(gpu, elements, least):
    (found,) = gpu_cost_model(load_machine(gpu)).estimate([Elementwise("mul", elements, inputs=2)])
    assert (found.upper / found.seconds >= least) and (found.seconds / found.lower >= least)
    assert least > 1 or found.upper / found.seconds < 1.25


def test_a_relative_lends_its_tables_with_a_wider_interval():
    gemm = Gemm(1, 1024, 1024, 1024)
    own, lent = (
        gpu_cost_model(load_machine(name)).estimate([gemm])[0] for name in ("v100-pcie-32gb", "v100-sxm2-16gb")
    )
    assert own.source == lent.source == "fitted"
    assert lent.breakdown["fitted_on"] == "v100-pcie-32gb" and "fitted_on" not in own.breakdown
    assert lent.upper / lent.lower > own.upper / own.lower
    assert lent.seconds < own.seconds  # a faster clock


def test_extrapolation_is_flagged():
    model = gpu_cost_model(load_machine("v100-pcie-32gb"))
    inside, outside = model.estimate([Gemm(1, 1024, 1024, 1024), Gemm(1, 1 << 20, 1 << 14, 1 << 14)])
    assert "extrapolates" not in inside.breakdown and "m" in str(outside.breakdown["extrapolates"])


def test_a_few_points_move_a_gpu_to_its_own_level(tmp_path, toy_gpu):
    model = gpu_cost_model(toy_gpu, tmp_path)
    operators = [Elementwise("add", size) for size in (10**6, 10**7, 10**8)]
    before = [each.seconds for each in model.estimate(operators)]
    model.model_of(operators[0]).fit(
        [Measurement(each, seconds=1.3 * time) for each, time in zip(operators, before, strict=True)]
    )
    after = model.estimate([*operators, Softmax(1000, 1024)])
    assert [each.seconds for each in after[:3]] == pytest.approx([1.3 * time for time in before])
    assert after[0].source == "fitted" and after[3].source == "analytic"
    model.model_of(operators[0]).fit(
        [Measurement(operators[0], seconds=1.0), Measurement(operators[1], seconds=1.0)]
    )  # too few
    assert model.estimate(operators)[0].seconds == pytest.approx(before[0])


def test_a_corrupt_model_file_names_itself(tmp_path):
    (tmp_path / "t4.json").write_text(json.dumps({"format": 1, "families": {"gemm": {}}}))
    with pytest.raises(InputError, match="t4.json: corrupt .*python -m costmodel fit"):
        gpu_cost_model(load_machine("t4"), tmp_path)
    unnamed = {"format": 1, "families": {}, "power_limited": False, "architecture": "turing", "machine": []}
    (tmp_path / "t4.json").write_text(json.dumps(unnamed))
    with pytest.raises(InputError, match="t4.json: corrupt .*machine: "):
        gpu_cost_model(load_machine("t4"), tmp_path)


def test_shipped_models_have_provenance_and_stay_small():
    files = list(fitted.DIRECTORY.glob("*.json"))
    assert sum(path.stat().st_size for path in files) < 3_000_000
    for each in all_fitted().values():
        assert each.provenance["command"] == "python -m costmodel fit"
        named = each.provenance.get("tables", each.provenance.get("points", {}))
        assert all(file["rows"] > 0 and len(file["sha256"]) == 64 for file in named.values()) and named
        assert all(residual.rows > 100 for residual in each.families.values())
        assert all(adaptation.points >= 3 for adaptation in each.adaptations.values())
    assert set(level_transfer().levels["gemm"]) == {"open", "power-limited"}


def test_relatives_share_architecture_and_power_class():
    lenders = {
        name: {family: lender for family, (lender, _) in residuals_for(load_machine(name)).items()}
        for name in ("v100-sxm2-32gb", "a100-sxm-80gb", "rtx-2080-ti", "l4", "b200-sxm")
    }
    assert set(lenders["v100-sxm2-32gb"].values()) == {"v100-pcie-32gb"}
    a100 = lenders["a100-sxm-80gb"]
    assert (a100["gemm-tensor"], a100["gemm"]) == ("a100-sxm-80gb", "a100-pcie-40gb")
    assert a100["convolution"] == "a100-pcie-80gb"  # where convolutions were measured
    assert lenders["rtx-2080-ti"] == lenders["l4"] == lenders["b200-sxm"] == {}


# --- properties ------------------------------------------------------------------------------------


def test_estimates_do_not_depend_on_their_neighbours():
    model = gpu_cost_model(load_machine("t4"))
    together = model.estimate(EVERY_TYPE)
    assert together == [model.estimate([each])[0] for each in EVERY_TYPE]
