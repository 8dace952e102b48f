"""The operating system's permission for AMX: asked once, and what follows where it is refused."""

from __future__ import annotations

import warnings

import pytest

from schedules.contract import cpu_target
from schedules.contract import cpu_target as tile_permission
from schedules.contract.cpu_target import host_target, without_tiles

XEON = frozenset((
    "sse4_2", "avx2", "fma", "f16c", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
))  # fmt: skip


@pytest.fixture
def xeon(monkeypatch):
    monkeypatch.setattr(cpu_target, "cpu_flags", lambda: XEON)


def test_a_cpu_with_amx_has_it_where_it_is_granted(xeon, monkeypatch):
    monkeypatch.setattr(cpu_target, "tiles_refused", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu = host_target(2)
    assert cpu.mcpu == "sapphirerapids" and cpu.tile_products == ("bfloat16", "int8")


def test_where_it_is_refused_kernels_are_those_of_the_cpu_before(xeon, monkeypatch):
    monkeypatch.setattr(cpu_target, "tiles_refused", lambda: "a sandbox refuses the system call")
    with pytest.warns(UserWarning, match="without AMX: a sandbox refuses"):
        cpu = host_target(2)
    assert cpu.mcpu == "cooperlake" and cpu.tile_products == () and "bfloat16" in cpu.dot_products
    assert not any(feature.startswith("amx") for feature in cpu.features)


def test_a_cpu_without_amx_is_not_asked(monkeypatch):
    monkeypatch.setattr(cpu_target, "cpu_flags", lambda: without_tiles(XEON))
    monkeypatch.setattr(cpu_target, "tiles_refused", lambda: pytest.fail("asked"))
    assert host_target(2).mcpu == "cooperlake"


def test_the_answer_is_a_sentence_and_the_same_twice():
    answer = tile_permission.tiles_refused()
    assert answer is tile_permission.tiles_refused()
    assert answer is None or answer.startswith("the ")
