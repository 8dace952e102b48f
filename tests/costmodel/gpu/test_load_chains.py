"""Kernels whose threads wait for one load after the other: chains worked out by hand, and times measured on H200."""

from __future__ import annotations

import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.load_chains import busy_multiprocessors, chain_seconds, handing_seconds
from costmodel.gpu.families.rates import kernel_floor, latency
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Elementwise, Loss, OptimizerStep, Rearrangement, Reduction

H200 = load_machine("h200-sxm")
NEAR, FAR = (latency(H200, level) for level in (0, 1))
EVERYTHING = 1e12  # all in L2


def chain(operator: object) -> float:
    return chain_seconds(operator, H200, EVERYTHING)


def test_a_reduction_of_rows_gives_a_warp_to_each_row_and_adds_four_values_at_a_time():
    # 2,048 values over 32 threads are 64 each: 16 rounds; 128 blocks of 16 rows run at once.
    assert chain(Reduction("sum", 2048 * 2048, 2048)) == pytest.approx(16 * 1.6 * NEAR)
    # In 16 bits eight values at a time.
    assert chain(Reduction("sum", 2048 * 2048, 2048, "bfloat16")) == pytest.approx(8 * 1.6 * NEAR)


def test_few_columns_of_many_rows_are_shared_by_blocks_that_hand_over_their_parts():
    # 4,096 rows: four threads of a block are 1,024 values apart, 64 blocks of 16 values each: four rounds, and the last
    # block adds 64 parts by four rows of threads.
    columns = Reduction("sum", 4096 * 768, 768, contiguous=False)
    assert chain(columns) == pytest.approx(4 * 1.6 * NEAR)
    assert handing_seconds(columns, H200) == pytest.approx(16 * 1.6 * NEAR + 5 * FAR + kernel_floor(H200))
    # Too few rows to be shared: 16 rows of threads, 241 values each.
    few = Reduction("sum", 3849 * 32, 32, contiguous=False)
    assert chain(few) == pytest.approx(61 * 1.6 * NEAR) and handing_seconds(few, H200) == 0


def test_a_sum_over_several_dimensions_finds_the_place_of_every_value():
    """A bias' gradient on H200 (overheads-convolutions.json.gz): one block of 16 sums, 10.4 us and a launch."""
    apart = Reduction("sum", 8 * 16 * 256, 16, one_by_one=True)
    assert busy_multiprocessors(apart, H200) == 1
    (found,) = gpu_cost_model(H200).estimate([apart])
    assert found.seconds == pytest.approx(11.4e-6, rel=0.1)
    issue = 8 * 16 * 256 * 35 / (64 * H200.chip().clock_hz)
    assert found.seconds > issue + kernel_floor(H200)
    # Blocks enough for all multiprocessors share the work; rows of 16 bits are not loaded twice as many at a time.
    large = Reduction("sum", 64 * 256 * 3136, 256, "bfloat16", one_by_one=True)
    assert busy_multiprocessors(large, H200) == 132
    assert chain(large) >= chain(Reduction("sum", 64 * 256 * 3136, 256, "float32"))


def test_kernels_of_their_own_are_no_reductions_of_this_kind():
    assert chain(Reduction("moments", 1 << 20, 2)) == 0
    assert chain(Elementwise("add", 1 << 20)) == 0


def test_a_scan_walks_its_columns():
    walked = Elementwise("scan", 4 * 512 * 768, chained=2 * 512, column=512)
    assert chain(walked) == pytest.approx(1024 * NEAR)
    # Twice as many columns as threads of the chip take twice as long.
    threads = H200.chip().sm_count * H200.chip().max_threads
    assert chain(Elementwise("scan", 2 * threads * 512, chained=512, column=512)) == pytest.approx(1024 * NEAR)


def test_a_multi_tensor_kernel_takes_as_long_as_a_chunk():
    # One tensor of a chunk, and ten of them, are 32 steps of 2,048 elements.
    step = FAR + 2048 * 10 / (128 * H200.chip().clock_hz)
    for tensors in (1, 10):
        assert chain(OptimizerStep("foreach_mul", tensors * 65536, tensors, 1, 1)) == pytest.approx(32 * step)


def test_one_block_picks_the_scores_of_all_labels():
    assert chain(Loss("nll", 700, 10)) == pytest.approx(22 * 1.6 * NEAR)  # 32 threads
    assert chain(Loss("nll", 4096, 10)) == pytest.approx(16 * 1.6 * NEAR)  # 256 threads
    cold = chain_seconds(Loss("nll", 4096, 50257), H200, 0.0)
    assert cold == pytest.approx(16 * 1.6 * FAR)


@pytest.mark.parametrize(
    ("operator", "measured"),
    [
        (Reduction("sum", 18191168, 64, "float16", contiguous=False), 69.2e-6),
        (Reduction("norm", 85442, 34, "bfloat16", contiguous=False), 11.3e-6),
        (Reduction("norm", 8485248, 1163, "bfloat16"), 13.0e-6),
        (Reduction("norm_parameters", 2 * 4096 * 768, 2 * 768, contiguous=False), 17.7e-6),
        (OptimizerStep("adam", 1011345, 5, 4, 3), 40.4e-6),
        (OptimizerStep("adamw", 52968, 6, 4, 3), 9.5e-6),
        (Reduction("sum", 100352 * 384, 384, contiguous=False), 103e-6),
        (Reduction("sum", 4096 * 768, 768, "bfloat16", contiguous=False), 15.4e-6),
        (Elementwise("scan", 4 * 512 * 768, chained=1024, column=512), 139e-6),
        (Rearrangement("gather", 26768688, source_elements=26768688), 129.6e-6),
        (Rearrangement("gather", 1118170, source_elements=1118170), 6.6e-6),
    ],
)
def test_times_of_h200(operator, measured):
    (found,) = gpu_cost_model(H200).estimate([operator])
    assert found.seconds == pytest.approx(measured, rel=0.25)
