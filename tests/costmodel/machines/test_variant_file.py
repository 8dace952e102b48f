"""Machine files that say only how they differ from another machine."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from costmodel.base.errors import MachineError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import load_machine
from costmodel.machines.power_law import share_at_limit
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax

VARIANT = """
variant_of: h100-sxm
name: mine
memory:
  - {name: DRAM, datasheet: 2400 GB/s}
gpu: {power: 500 W}
"""


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_less_power_and_bandwidth_follow_from_the_machine_named(tmp_path):
    base, mine = load_machine("h100-sxm"), load_machine(written(tmp_path, VARIANT))
    before, after = base.compute["bfloat16"], mine.compute["bfloat16"]
    assert after.burst == before.burst and after.datasheet == before.datasheet
    share = share_at_limit(before.sustained.at(1) / before.burst, 700, 500)
    assert after.sustained.at(1) == pytest.approx(before.burst * share, rel=1e-3)
    assert mine.memory[-1].bandwidth.at(1) == pytest.approx(base.memory[-1].bandwidth.at(1) * 2400 / 3352, rel=1e-3)
    assert mine.memory[-1].latency_seconds == base.memory[-1].latency_seconds and mine.links == base.links


@pytest.mark.parametrize(
    ("memory", "usable"),
    [
        ("datasheet: 2400 GB/s", 81009),
        ("capacity: 160 GiB", 2 * 81009),
        ("capacity: 160 GiB, usable: 150000 MiB", 150000),
    ],
)
def test_usable_memory_keeps_its_share_of_the_capacity(tmp_path, memory, usable):
    text = f"variant_of: h100-sxm\nname: mine\nmemory: [{{name: DRAM, {memory}}}]\n"
    mine = load_machine(written(tmp_path, text))
    assert mine.memory[-1].usable == pytest.approx(usable * 2**20, rel=1e-3)


def test_products_of_8_bits_slow_down_with_the_power_limit_too(tmp_path):
    """GH200, the same chip with 900 W, reaches 1,535 TFLOP/s (links/max_achievable_matmul.csv of the data folder)."""
    base, mine = load_machine("h100-sxm"), load_machine(written(tmp_path, VARIANT))
    assert mine.compute["float8"].sustained.at(1) == pytest.approx(1400e12 * share_at_limit(1.0, 700, 500), rel=1e-3)
    assert mine.compute["float8"].burst == base.compute["float8"].burst == base.compute["float8"].sustained.at(1)
    assert 1400e12 / share_at_limit(1.0, 900, 700) == pytest.approx(1535e12, rel=0.03)


def test_what_is_said_stays(tmp_path):
    text = (
        VARIANT + "compute: {bfloat16: {sustained: 600 TFLOP/s, burst: 800 TFLOP/s}, float16: {burst: 800 TFLOP/s}}\n"
    )
    mine = load_machine(written(tmp_path, text))
    assert mine.compute["bfloat16"].sustained.at(1) == 600e12 and mine.compute["bfloat16"].burst == 800e12
    assert mine.compute["float16"].sustained.at(1) < 700e12


def test_half_the_multiprocessors_at_half_the_power_keep_their_clock(tmp_path):
    base = load_machine("h100-sxm").compute["bfloat16"]
    text = "variant_of: h100-sxm\nname: mine\ngpu: {sm_count: 66, power: 350 W}\n"
    half = load_machine(written(tmp_path, text)).compute["bfloat16"]
    assert half.burst == pytest.approx(base.burst / 2)
    assert half.sustained.at(1) == pytest.approx(base.sustained.at(1) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variant_of: h1000\nname: mine\n", "variant_of: no machine file 'h1000'"),
        ("variant_of: gb200\nname: mine\n", "gb200 is a variant itself"),
        ("variant_of: h100-sxm\nname: mine\ngpu: {power: 100 W}\n", "100 W are not more than the 168 W"),
        ("variant_of: h100-sxm\nname: mine\ngpu: {power: fast}\n", "gpu.power: 'fast' is not a quantity"),
        ("variant_of: h100-sxm\nname: mine\nspeed: 3\n", "speed: unknown key"),
    ],
)
def test_mistakes_name_the_file(tmp_path, text, message):
    with pytest.raises(MachineError, match=message):
        load_machine(written(tmp_path, text))


def follows(tmp_path, base, **said):
    path = tmp_path / f"{base}-{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump({"variant_of": base, "name": "mine", **said}))
    return load_machine(path)


BASES = ("h100-sxm", "a100-pcie-40gb", "b200-sxm", "rtx-4090", "rtx-pro-6000", "t4")
OPERATORS = (
    Gemm(1, 4096, 4096, 4096, "float16"),
    Gemm(1, 128, 4096, 8192, "float16"),
    Gemm(16, 512, 512, 64, "float32"),
    Elementwise("add", 1 << 24, 2, 1, dtype="float16"),
    Softmax(1 << 14, 2048, "float16"),
    Normalization("layer_norm", 8192, 4096, "float16"),
)


@pytest.mark.parametrize("base", BASES)
def test_a_variant_that_says_nothing_is_its_base(tmp_path, base):
    there, mine = load_machine(base), follows(tmp_path, base)
    assert dataclasses.replace(mine, name=base) == there
    one, other = (gpu_cost_model(each).estimate(OPERATORS) for each in (there, mine))
    assert one == other
    cluster = load_cluster(mine, 8)
    name = "mine-node" if "-node" in cluster.name else cluster.name  # no file has it
    assert cluster == dataclasses.replace(load_cluster(there, 8), machine=mine, name=name)


FACTORS = (0.75, 1.0, 1.5)


@pytest.mark.parametrize(
    ("base", "factor"),
    [
        pytest.param(base, factor, marks=() if place % 3 == kind else pytest.mark.thorough)
        for place, base in enumerate(BASES)
        for kind, factor in enumerate(FACTORS)
    ],
)
def test_more_of_anything_is_never_slower(tmp_path, base, factor):
    """Against the same variant with 4 % less: of power, multiprocessors, clock, bandwidth, the rates of a datasheet."""
    machine = load_machine(base)
    chip, dram = machine.chip(), machine.memory[-1]
    changes = {
        "power": lambda x: {"gpu": {"power": f"{chip.power_watts * x} W"}},
        "SMs": lambda x: {"gpu": {"sm_count": round(chip.sm_count * x)}},
        "clock": lambda x: {"gpu": {"clock": f"{chip.clock_hz * x} Hz"}},
        "DRAM": lambda x: {"memory": [{"name": "DRAM", "datasheet": f"{dram.datasheet * x} B/s"}]},
        "rate": lambda x: {
            "compute": {k: {"datasheet": f"{v.datasheet * x} FLOP/s"} for k, v in machine.compute.items()}
        },
    }
    for name, change in changes.items():
        less, more = (follows(tmp_path, base, **change(factor * each)) for each in (0.96, 1.0))
        for dtype in machine.compute:
            for rate in ("sustained", "short_load"):
                low, high = (getattr(each.compute[dtype], rate) for each in (less, more))
                low, high = (each if isinstance(each, float) else each.at(1) for each in (low, high))
                assert low <= high * (1 + 1e-9), (name, dtype, rate)
        slow, fast = (gpu_cost_model(each).estimate(OPERATORS) for each in (less, more))
        for operator, before, after in zip(OPERATORS, slow, fast, strict=True):
            # Tiles fill the last wave more or less, and what is learned of shapes is asked at the multiprocessors and
            # clock at hand, by trees that step.
            steps = name == "SMs" or (name == "clock" and after.source == "analytic")
            most = 1.04 if steps else 1 + 1e-9
            assert after.seconds <= before.seconds * most, (name, operator)


def test_a_datasheet_rate_counts_as_h20_shows(tmp_path):
    told = {"bfloat16": {"datasheet": "148 TFLOP/s", "origin": "NVIDIA H20 datasheet"}}
    memory = [{"name": "DRAM", "capacity": "96 GiB", "datasheet": "4000 GB/s"}]
    mine = follows(tmp_path, "h100-sxm", compute=told, memory=memory, gpu={"sm_count": 78, "power": "400 W"})
    shipped, base = load_machine("h20"), load_machine("h100-sxm")
    for machine in (mine, shipped):
        for dtype, peak in (("bfloat16", 148e12), ("float16", 148e12), ("tf32", 74e12), ("float8", 296e12)):
            rate, there = machine.compute[dtype], base.compute[dtype]
            assert rate.datasheet == pytest.approx(peak, rel=1e-3)
            assert rate.short_load / rate.datasheet == pytest.approx(there.short_load / there.datasheet, rel=1e-3)
            # So slow a chip meets no power limit.
            assert rate.sustained.at(1) == pytest.approx(rate.short_load)
    one = gpu_cost_model(mine).estimate([Gemm(1, 8192, 8192, 8192, "bfloat16")])[0]
    assert 2 * 8192**3 / one.seconds == pytest.approx(139e12, rel=0.25)


def test_a_power_limit_counts_where_no_burst_is_known(tmp_path):
    rtx = load_machine("rtx-4090").compute["float16"].sustained.at(1)
    rates = [follows(tmp_path, "rtx-4090", gpu={"power": f"{watts} W"}).compute["float16"] for watts in (450, 360, 270)]
    assert [rate.sustained.at(1) / rtx for rate in rates] == [1.0, 1.0, pytest.approx(0.90, abs=0.03)]
    base, less = load_machine("a100-pcie-40gb"), follows(tmp_path, "a100-pcie-40gb", gpu={"power": "200 W"})
    assert less.compute["bfloat16"].sustained.at(1) < 0.95 * base.compute["bfloat16"].sustained.at(1)
    max_q, full = load_machine("rtx-pro-6000-max-q"), load_machine("rtx-pro-6000")
    assert max_q.compute["bfloat16"].sustained.at(1) < 0.8 * full.compute["bfloat16"].sustained.at(1)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"compute": {"bfloat16": {"sustained": "1200 TFLOP/s"}}},
            "bfloat16.sustained: 1.2 PFLOP/s is more than the data",
        ),
        (
            {"compute": {"bfloat16": {"datasheet": "148 TFLOP/s", "burst": "900 TFLOP/s"}}},
            "bfloat16.sustained: 900 TFLOP/s is more",
        ),
        ({"memory": [{"name": "DRAM", "bandwidth": "4 TB/s"}]}, "memory.DRAM.bandwidth: more than its datasheet"),
        ({"memory": [{"name": "DRAM", "datasheet": "912 TB/s"}]}, "is more than any has .100 TB/s."),
        ({"gpu": {"power": "1 GW"}}, "gpu.power: '1 GW' is more than any has"),
        ({"gpu": {"sm_count": 0}}, "gpu.sm_count"),
        ({"gpu": {"sm_count": float("inf")}}, "gpu.sm_count"),
        ({"gpu": {"power": float("inf")}}, "gpu.power: inf has no unit"),
        ({"name": "../../evil"}, "name: '../../evil' is no name"),
        ({"name": ".hidden"}, "is no name"),
    ],
)
def test_what_no_machine_is_is_refused(tmp_path, said, message):
    with pytest.raises(MachineError, match=message):
        follows(tmp_path, "h100-sxm", **said)
