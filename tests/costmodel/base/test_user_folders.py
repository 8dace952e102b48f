"""A user's own folders, also of users without a home."""

from __future__ import annotations

import pwd
from pathlib import Path

from costmodel.base.output_files import NO_HOME, user_folder
from costmodel.machines.machine_file import load_machine, user_directory


def test_a_variable_goes_before_the_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_folder("cache") == Path("/cache/costmodel")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_folder("cache") == Path("/home/me/.cache/costmodel")


def test_who_has_no_home_has_no_machines_of_his_own(monkeypatch):
    def nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "COSTMODEL_MACHINES"):
        monkeypatch.delenv(name, raising=False)
    assert user_folder("cache") == NO_HOME / "cache" / "costmodel"
    assert user_directory() == NO_HOME / "config" / "costmodel" / "machines"
    assert load_machine("t4").kind == "gpu"
