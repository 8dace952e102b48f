"""Machine files that say only how they differ from another machine."""

from __future__ import annotations

import pytest

from costmodel.base.errors import MachineError
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.power_law import share_at_limit

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
    assert after.burst == before.burst and mine.compute["float32"] == base.compute["float32"].__class__(
        base.compute["float32"].sustained, mine.compute["float32"].origin, base.compute["float32"].datasheet
    )
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
        ("variant_of: h100-sxm\nname: mine\ngpu: {power: fast}\n", "not a variant of h100-sxm"),
        ("variant_of: h100-sxm\nname: mine\nspeed: 3\n", "speed: unknown key"),
    ],
)
def test_mistakes_name_the_file(tmp_path, text, message):
    with pytest.raises(MachineError, match=message):
        load_machine(written(tmp_path, text))
