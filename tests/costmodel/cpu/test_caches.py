from __future__ import annotations

import pytest

from costmodel.cpu import calibration
from costmodel.cpu.calibration import find_caches, parse_cpu_list, parse_size


def write_cache(root, index, level, kind, size, shared):
    directory = root / "cpu0" / "cache" / f"index{index}"
    directory.mkdir(parents=True)
    for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
        (directory / name).write_text(f"{text}\n")


def test_caches_of_a_two_core_cpu_with_two_threads_a_core(tmp_path):
    write_cache(tmp_path, 0, 1, "Data", "48K", "0,2")
    write_cache(tmp_path, 1, 1, "Instruction", "32K", "0,2")
    write_cache(tmp_path, 2, 2, "Unified", "2M", "0,2")
    write_cache(tmp_path, 3, 3, "Unified", "36864K", "0-3")
    (tmp_path / "cpu0" / "topology").mkdir()
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_text("0,2\n")
    found = find_caches(tmp_path)
    assert [(cache.name, cache.capacity_bytes, cache.shared) for cache in found] == [
        ("L1", 48 * 1024, False),
        ("L2", 2 * 1024**2, False),
        ("L3", 36 * 1024**2, True),
    ]


def test_a_second_level_shared_by_a_cluster_of_cores(tmp_path):
    write_cache(tmp_path, 0, 1, "Data", "64K", "0")
    write_cache(tmp_path, 1, 2, "Unified", "4M", "0-3")
    assert [cache.shared for cache in find_caches(tmp_path)] == [False, True]


def test_an_unreadable_entry_is_left_out(tmp_path):
    write_cache(tmp_path, 0, 1, "Data", "48K", "0")
    write_cache(tmp_path, 1, 2, "Unified", "?", "0")
    assert [cache.name for cache in find_caches(tmp_path)] == ["L1"]


def test_where_the_system_has_no_files_getconf_is_asked(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "getconf"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ncase $1 in *1_D*) echo 32768;; *2_*) echo 1048576;; *) echo undefined;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(calibration, "SYSFS", tmp_path)
    assert [(each.name, each.capacity_bytes, each.shared) for each in find_caches(tmp_path)] == [
        ("L1", 32768, False), ("L2", 1048576, False),
    ]  # fmt: skip
    program.unlink()
    assert find_caches(tmp_path) == ()


@pytest.mark.parametrize(("text", "size"), [("48K", 49152), ("2M\n", 2**21), ("512", 512)])
def test_sizes(text, size):
    assert parse_size(text) == size


def test_cpu_lists():
    assert parse_cpu_list("0-2,8\n") == {0, 1, 2, 8}
