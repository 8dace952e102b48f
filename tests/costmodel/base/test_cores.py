"""Cores in containers, on file trees as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.base.process import core_quota, threads_to_use, usable_cores
from costmodel.machines.machine_file import usable_threads
from schedules.contract.cpu_target import host_target


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


DOCKER = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
NESTED = {
    "proc/self/cgroup": "0::/system.slice/job.service\n",
    "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
    "sys/fs/cgroup/system.slice/job.service/cpu.max": "max 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "5:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n0::/docker/1f\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = {**VERSION_1, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [(DOCKER, 1.5), (NESTED, 3.0), (VERSION_1, 4.0), (UNLIMITED, None), ({}, None), ({"proc/self/cgroup": "?"}, None)],
    ids=["docker", "nested", "version 1", "unlimited", "not Linux", "unreadable"],
)
def test_the_narrowest_quota_above_the_process_counts(tmp_path, files, quota):
    assert core_quota(tree(tmp_path, files)) == quota


def test_whole_cores_of_the_quota_but_at_least_one_and_never_more_than_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tree(tmp_path / "a", DOCKER)) == 1
    assert usable_cores(tree(tmp_path / "b", VERSION_1)) == 4
    assert usable_cores(tree(tmp_path / "c", UNLIMITED)) == 8
    small = {**DOCKER, "sys/fs/cgroup/cpu.max": "20000 100000"}
    assert usable_cores(tree(tmp_path / "d", small)) == 1
    large = {**DOCKER, "sys/fs/cgroup/cpu.max": "6400000 100000"}
    assert usable_cores(tree(tmp_path / "e", large)) == 8


def test_kernels_and_calibration_take_no_more_threads_than_the_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("costmodel.base.process.core_quota", lambda root: 3.7)
    assert usable_threads() == host_target().threads == 3
    assert host_target(5).threads == 5


def test_threads_without_cores_are_refused_and_never_the_default(monkeypatch):
    monkeypatch.setattr("costmodel.base.process.usable_cores", lambda: 4)
    assert [threads_to_use(asked, 8) for asked in (None, 1, 4)] == [4, 1, 4]
    assert threads_to_use(None, 2) == 2
    with pytest.raises(InputError, match="--threads 5: this process may use 4 cores"):
        threads_to_use(5, 2)
