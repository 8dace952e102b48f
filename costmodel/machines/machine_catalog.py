"""Lookup of machine files: a path, the user's directory, or those shipped with the package."""

from __future__ import annotations

import difflib
import os
import platform
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml

from costmodel.base.cores import usable_cores
from costmodel.base.errors import MachineError
from costmodel.base.user_folders import user_folder
from costmodel.machines.machine_file import read_machine
from costmodel.machines.machine_records import Host, Machine

PACKAGED_DIRECTORY = Path(__file__).parent
HOST_NAME = "host"
_SUFFIXES = (".yaml", ".yml")
_FEATURES = r"(avx|amx|sse4|asimd|sve).*|fma|f16c|fphp|i8mm|bf16|sme2?"


def user_directory() -> Path:
    """Folder of the user's machines: ``$COSTMODEL_MACHINES``, else ``$XDG_CONFIG_HOME/costmodel/machines``, else
    ``~/.config/costmodel/machines``.
    """
    override = os.environ.get("COSTMODEL_MACHINES")
    if override:
        return Path(override)
    return user_folder("XDG_CONFIG_HOME", ".config") / "machines"


def machine_files() -> dict[str, Path]:
    """Files of all machines known by name; the user's files override packaged ones of the same name."""
    packaged = [path for kind in ("cpu", "gpu") for path in sorted((PACKAGED_DIRECTORY / kind).glob("*.yaml"))]
    user = sorted(path for path in _listed(user_directory()) if path.suffix in _SUFFIXES)
    return {path.stem: path for path in [*packaged, *user]}


def driver_names() -> dict[str, str]:
    """Machine names by lower-case GPU name of the driver, for GPUs whose driver name does not identify the machine."""
    rows = yaml.safe_load((PACKAGED_DIRECTORY / "gpu_names.yaml").read_text(encoding="utf-8"))
    return {row["name"].lower(): row["machine"] for row in rows}


def load_machine(name_or_path: str | Path, kind: Literal["cpu", "gpu"] | None = None) -> Machine:
    """Load the machine of a file path, of a name in :func:`machine_files`, or of a unique prefix of one (``h200``).
    ``kind``: kind that the caller can use, for suggestions of names.

    Raises :class:`MachineError` for an unknown name (suggesting the nearest names) or a malformed file.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or os.sep in text or text.endswith(_SUFFIXES):
        return read_machine(Path(name_or_path))
    files = machine_files()
    if text in files:
        return read_machine(files[text])
    longer = longer_names(text, files)
    if len(longer) == 1:
        return read_machine(files[longer[0]])
    if longer:
        raise MachineError(f"machine {text!r} may be {', '.join(longer)}; name one of them")
    if text == HOST_NAME:
        raise MachineError("machine 'host' is not calibrated yet: run `python -m costmodel calibrate`")
    other = {"cpu": "gpu", "gpu": "cpu"}.get(kind or "")
    usable = sorted(name for name, path in files.items() if path.parent != PACKAGED_DIRECTORY / str(other))
    raise MachineError(f"unknown machine {text!r}; {offered(text, usable)}`python -m costmodel machines` lists all")


def offered(text: str, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question; empty if none is near."""
    near = difflib.get_close_matches(text.lower(), list(names), n=3)
    return f"did you mean {', '.join(near)}? " if near else ""


def longer_names(text: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that continue ``text`` with a hyphen, such as ``h100-sxm`` for ``h100``, but do not continue
    another of them.
    """
    found = sorted(name for name in names if name.startswith(f"{text}-"))
    return [name for name in found if not any(name.startswith(f"{other}-") for other in found)]


def host_machine(threads: int | None = None) -> Machine | None:
    """Machine that `calibrate` measured on this CPU, or ``None``.

    A file measured on another CPU, or on fewer threads than ``threads`` (default: the cores this process may use), is
    ignored with a ``UserWarning``.
    """
    path = machine_files().get(HOST_NAME)
    if path is None:
        return None
    machine = read_machine(path)
    reason = _stale(machine, host_identity(), threads)
    if reason is None:
        return machine
    warnings.warn(f"{path}: {reason}; run `python -m costmodel calibrate`", stacklevel=2)
    return None


def host_identity() -> Host:
    """Architecture, instruction-set features and usable cores of the CPU this process runs on."""
    return Host(platform.machine(), cpu_features(), usable_threads())


def usable_threads() -> int:
    """Number of cores this process may use."""
    return usable_cores()


def cpu_features() -> tuple[str, ...]:
    """Vector and matrix features reported by the kernel (x86 ``flags``, ARM ``Features``); empty if unavailable."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    return features_of(text)


def features_of(cpuinfo: str) -> tuple[str, ...]:
    """Vector and matrix features in the text of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = match.group(1).split() if match else []
    return tuple(sorted(flag for flag in flags if re.fullmatch(_FEATURES, flag)))


def _stale(machine: Machine, host: Host, threads: int | None) -> str | None:
    measured = machine.host
    if measured is None:
        return "does not say on which CPU it was measured"
    if (measured.architecture, set(measured.features)) != (host.architecture, set(host.features)):
        return "was measured on another CPU"
    wanted = threads or host.threads
    if machine.max_threads < wanted:
        return f"was measured on {machine.max_threads} threads only, {wanted} wanted"
    return None


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise MachineError(
            f"{directory}: cannot be listed ({error.strerror}); check its path and permissions"
        ) from None
