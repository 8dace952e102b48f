"""Every GPU's file against the figures of its vendor, and against what its multiprocessors can do.

Figures of NVIDIA's datasheets and architecture whitepapers (dense rates), of the product briefs of A10, A40 and H20,
and, for the sizes of L2 that these leave out, of the CUDA device query.
"""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, load_machine
from costmodel.machines.machine_records import ABOVE_BOOST

NAMES = sorted(path.stem for path in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml"))
_COLUMNS = (
    "sms",
    "mhz",
    "watts",
    "gigabytes",
    "bandwidth",
    "l2",
    "nvlink",
    "float32",
    "tf32",
    "float16",
    "int8",
    "float8",
)
# GB/s of DRAM and of NVLink in one direction, MiB of L2, TFLOP/s; 0: none, or not in the file.
VENDOR = {
    "p100-pcie-16gb": (56, 1303, 250, 16, 732, 4, 0, 9.3, 0, 18.7, 0, 0),
    "p4": (20, 1063, 75, 8, 192, 2, 0, 5.5, 0, 0, 0, 0),
    "v100-pcie-32gb": (80, 1380, 250, 32, 900, 6, 0, 14, 0, 112, 0, 0),
    "v100-sxm2-16gb": (80, 1530, 300, 16, 900, 6, 150, 15.7, 0, 125, 0, 0),
    "v100-sxm2-32gb": (80, 1530, 300, 32, 900, 6, 150, 15.7, 0, 125, 0, 0),
    "t4": (40, 1590, 70, 16, 320, 4, 0, 8.1, 0, 65, 130, 0),
    "rtx-2080-ti": (68, 1545, 250, 11, 616, 5.5, 50, 13.4, 0, 53.8, 0, 0),
    "a100-pcie-40gb": (108, 1410, 250, 40, 1555, 40, 300, 19.5, 156, 312, 624, 0),
    "a100-pcie-80gb": (108, 1410, 300, 80, 1935, 40, 300, 19.5, 156, 312, 624, 0),
    "a100-sxm-40gb": (108, 1410, 400, 40, 1555, 40, 300, 19.5, 156, 312, 624, 0),
    "a100-sxm-80gb": (108, 1410, 400, 80, 2039, 40, 300, 19.5, 156, 312, 624, 0),
    "a10": (72, 1695, 150, 24, 600, 6, 0, 31.2, 62.5, 125, 0, 0),
    "a40": (84, 1740, 300, 48, 696, 6, 56, 37.4, 74.8, 149.7, 0, 0),
    "a6000": (84, 1800, 300, 48, 768, 6, 56, 38.7, 77.4, 154.8, 0, 0),
    "rtx-3090": (82, 1695, 350, 24, 936, 6, 56, 35.6, 35.6, 71, 0, 0),
    "rtx-4090": (128, 2520, 450, 24, 1008, 72, 0, 82.6, 82.6, 165.2, 0, 0),
    "l4": (58, 2040, 72, 24, 300, 48, 0, 30.3, 60, 121, 242, 242),
    "l40s": (142, 2520, 350, 48, 864, 96, 0, 91.6, 183, 362, 733, 733),
    "h100-pcie": (114, 1755, 350, 80, 2039, 50, 300, 51.2, 378, 756, 1513, 1513),
    "h100-sxm": (132, 1980, 700, 80, 3352, 50, 450, 66.9, 494.7, 989.4, 1979, 1979),
    "h100-sxm-96gb": (132, 1980, 500, 96, 2400, 50, 450, 66.9, 494.7, 989.4, 1979, 1979),
    "gh200": (132, 1980, 900, 96, 4000, 50, 450, 66.9, 494.7, 989.4, 1979, 1979),
    "gh200-144gb": (132, 1980, 900, 144, 4900, 50, 450, 66.9, 494.7, 989.4, 1979, 1979),
    "h200-sxm": (132, 1980, 700, 141, 4800, 50, 450, 66.9, 494.7, 989.4, 1979, 1979),
    "h20": (78, 1980, 400, 96, 4000, 60, 450, 44, 74, 148, 296, 296),
    "b200-sxm": (148, 1965, 1000, 180, 8000, 126, 900, 75, 1125, 2250, 4500, 4500),
    "b200-sxm-simumax": (148, 1965, 1000, 180, 8000, 126, 900, 75, 1125, 2250, 4500, 4500),
    "b300-sxm": (148, 1965, 1100, 270, 8000, 126, 900, 75, 1125, 2250, 150, 4500),
    "gb200": (148, 1965, 1200, 186, 8000, 126, 900, 80, 1250, 2500, 5000, 5000),
    "gb300": (148, 1965, 1400, 278, 8000, 126, 900, 83, 1250, 2500, 167, 5000),
    "rtx-5090": (170, 2407, 575, 32, 1792, 96, 0, 104.8, 104.8, 209.5, 0, 0),
    "rtx-pro-6000": (188, 2617, 600, 96, 1792, 128, 0, 126, 251.9, 503.8, 0, 0),
    "rtx-pro-6000-max-q": (188, 2280, 300, 96, 1792, 128, 0, 109.7, 219.5, 438.9, 0, 0),
}  # fmt: skip
# Dense FLOP of FP16 products with FP32 sums per multiprocessor and cycle. Of GeForce half of what the chip has.
TENSOR = {"volta": 1024, "turing": 1024, "hopper": 4096, "blackwell": 8192, "ada": 1024, "blackwell-rtx": 1024}
GEFORCE = ("rtx-2080-ti", "rtx-3090", "rtx-4090", "rtx-5090")
# Datasheets whose rates are at another clock than the boost clock beside them (H100: 1,830 and 1,620 MHz; B200; GB200
# and GB300: of their higher limit), or cut by licence (H20).
_SLOWER = {
    "h100-sxm": 1830 / 1980,
    "gh200": 1830 / 1980,
    "gh200-144gb": 1830 / 1980,
    "h100-sxm-96gb": 1830 / 1980,
    "h200-sxm": 1830 / 1980,
    "h100-pcie": 1620 / 1755,
}
_SLOWER |= {"b200-sxm": 1855 / 1965, "b200-sxm-simumax": 1855 / 1965, "b300-sxm": 1855 / 1965}
_SLOWER |= {"gb200": 2062 / 1965, "gb300": 2062 / 1965, "h20": 148 / 632.6}


def test_the_table_has_every_packaged_gpu():
    assert sorted(VENDOR) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_the_vendor_says(name):
    machine, told = load_machine(name), dict(zip(_COLUMNS, VENDOR[name], strict=True))
    chip, (l2, dram) = machine.chip(), machine.memory
    assert (chip.sm_count, chip.power_watts) == (told["sms"], told["watts"])
    assert chip.clock_hz == pytest.approx(told["mhz"] * 1e6, rel=1e-3)
    # Capacities: the number on the box in GiB, of which drivers show 94 to 100 %, for every card alike.
    assert dram.capacity_bytes == told["gigabytes"] * 2**30
    assert l2.capacity_bytes == pytest.approx(told["l2"] * 2**20, rel=0.1)
    assert dram.datasheet == pytest.approx(told["bandwidth"] * 1e9, rel=5e-3)
    nvlink = machine.link("nvlink")
    assert (nvlink.datasheet if nvlink else 0) == pytest.approx(told["nvlink"] * 1e9, rel=0.01)
    for dtype in ("float32", "tf32", "float16", "int8", "float8"):
        rate = machine.compute.get(dtype)
        assert (rate.datasheet if rate else 0) == pytest.approx(told[dtype] * 1e12, rel=5e-3), dtype


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_faster_than_the_datasheet(name):
    machine = load_machine(name)
    most = ABOVE_BOOST if name in GEFORCE else 1.0
    assert machine.half_rate == (name in GEFORCE and name != "rtx-2080-ti")
    for dtype, rate in machine.compute.items():
        assert rate.sustained.at(1) <= rate.short_load <= most * rate.datasheet, dtype
    assert machine.memory[-1].bandwidth.at(1) < machine.memory[-1].datasheet
    assert all(link.bandwidth < link.datasheet for link in machine.links)


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_those_of_the_multiprocessors(name):
    machine = load_machine(name)
    chip, rates = machine.chip(), {dtype: rate.datasheet for dtype, rate in machine.compute.items()}
    cycles = chip.sm_count * chip.clock_hz
    # H20's is more than its multiprocessors do at any clock that they have, GB300's is at a higher clock.
    lanes = {"h20": 44 / 39.5, "gb300": 1.1}.get(name, 1.0)
    assert rates["float32"] == pytest.approx(2 * chip.lanes * cycles * lanes, rel=0.08)
    if chip.architecture == "pascal":
        return
    ampere = 2048 if chip.lanes == 64 else 1024
    unit = TENSOR.get(chip.architecture, ampere) / (2 if name in GEFORCE else 1)
    assert rates["float16"] == pytest.approx(unit * cycles * _SLOWER.get(name, 1.0), rel=0.02)
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    half = machine.compute["float16"].short_load
    if name != "b200-sxm-simumax":  # whose BF16 products alone were measured
        assert machine.compute.get("bfloat16", machine.compute["float16"]).short_load == pytest.approx(half, rel=0.04)
    assert rates.get("tf32", rates["float16"] / 2) == pytest.approx(rates["float16"] / 2, rel=0.02)
    assert rates.get("float8", 2 * rates["float16"]) == pytest.approx(2 * rates["float16"], rel=0.02)


def test_gb200_stays_inside_of_nvlink_up_to_72():
    inside, beyond = load_cluster("gb200", 72), load_cluster("gb200", 144)
    assert (inside.nodes, inside.gpus_per_node, beyond.nodes) == (1, 72, 2)
    assert load_cluster("gb300", 144).network.datasheet == 2 * beyond.network.datasheet == 100e9
    assert load_cluster("b300-sxm", 16).network.datasheet == 100e9


def test_one_card_of_ethernet_a_node_unless_more_are_asked_for():
    one, eight = (
        load_cluster("h100-sxm", 16, network="ethernet-10g"),
        load_cluster("h100-sxm", 16, network="ethernet-10g:8"),
    )
    assert (one.network_cards, eight.network_cards) == (1, 8)
    assert one.network_text == "ethernet-10g:1 (1 x 10 Gb/s a node, 1.25 Gb/s per GPU)"
    assert load_cluster("h100-sxm", 16).network_text == "infiniband-ndr:8 (8 x 400 Gb/s a node, 400 Gb/s per GPU)"
    assert load_cluster("h100-sxm", 8).network_text == ""
    assert dataclasses.replace(one, network_cards=8).node_bandwidth() == eight.node_bandwidth()
