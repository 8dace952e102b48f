"""Checks of every tool's ``doctor``: installed packages against declared versions, cores, folders, a compiler.

Each tool lists its checks beside its command (``fusion/commands/doctor.py``, ``e2e/commands/doctor.py``). A check
reports its finding and, if there is a problem, advice. Nothing is changed: files written to test a folder are removed
again.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Literal

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from costmodel.base.command_line import DISTRIBUTION, version_line
from costmodel.base.errors import ProjectError
from costmodel.base.process import core_quota, usable_cores
from costmodel.base.units import whole_number
from costmodel.machines.machine_file import user_directory

State = Literal["ok", "note", "broken"]
_THREADS = ("OMP_NUM_THREADS", "TVM_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LEAST_DISK, _LITTLE_DISK = 100 << 20, 2 << 30
_LITTLE_MEMORY = 4 << 30
_IMPORT_SECONDS = 180.0


@dataclass(frozen=True)
class Finding:
    """Result of one check. State ``note``: works, with a remark; ``advice``: suggested action."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class BadPair:
    """Versions known to be incompatible: mapping from distribution to condition (``==0.1.15``)."""

    versions: Mapping[str, str]
    what: str
    advice: str


Check = Callable[[], Iterable[Finding]]


def report(tool: str, checks: Sequence[Check], as_json: bool) -> None:
    """Run the checks, print their findings, and exit with status 1 if anything is broken."""
    findings = [each for check in checks for each in _guarded(check)]
    broken = [each for each in findings if each.state == "broken"]
    if as_json:
        print(json.dumps({"tool": tool, "ok": not broken, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        print(version_line())
        for each in findings:
            print(f"{each.state:7}{each.name:28}{each.found}")
            if each.advice:
                print(f"{'':7}{'':28}-> {each.advice}")
        print(f"{len(broken)} of {len(findings)} are broken" if broken else "nothing is broken")
    if broken:
        raise typer.Exit(1)


def packages(required: str, optional: Mapping[str, str], pairs: Sequence[BadPair]) -> list[Finding]:
    """Findings on the packages of the project and its extra ``required``, and on missing packages of the ``optional``
    extras (extra -> purpose).
    """
    found = [Finding("Python", *_python())]
    for extra in ("", required):
        found += [_declared(each, extra) for each in declared(extra)]
    for extra, purpose in optional.items():
        missing = [each.name for each in declared(extra) if installed(each.name) is None]
        if missing:
            lacking = f"not installed: {', '.join(missing)} ({purpose})"
            found.append(Finding(f"extra {extra}", "note", lacking, f"pip install '{DISTRIBUTION}[{extra}]'"))
    found += [Finding(" + ".join(pair.versions), "broken", pair.what, pair.advice) for pair in pairs if _holds(pair)]
    return found


def modules_once(names: Iterable[str]) -> list[Finding]:
    """Findings on modules provided by several installed distributions, whose files overwrite each other."""
    owners = metadata.packages_distributions()
    found = []
    for name in names:
        distributions = sorted(set(owners.get(name, ())))
        if len(distributions) > 1:
            advice = f"pip uninstall {' '.join(distributions)}, then install the one that is wanted"
            found.append(Finding(f"module {name}", "broken", f"brought by {' and '.join(distributions)}", advice))
    return found


def imports(modules: Mapping[str, str], advice: str) -> list[Finding]:
    """Findings on whether each module (name -> distribution) that is installed can be imported, each in a separate
    process, which a broken library may crash.
    """
    return [_import(name, advice) for name, distribution in modules.items() if installed(distribution)]


def cores() -> list[Finding]:
    """Findings on cores: present, usable, granted by the container, and requested by environment variables."""
    there, usable, quota = os.cpu_count() or 1, usable_cores(), core_quota()
    told = f"{usable} of {there} usable"
    if quota is None:
        found = [Finding("cores", "ok", told)]
    elif quota < 1:
        advice = "give the container one core or more: threads wait for each other between periods of its quota"
        found = [Finding("cores", "note", f"{told}; the control group grants the time of {quota:.2g}", advice)]
    else:
        found = [Finding("cores", "ok", f"{told}; the control group grants the time of {quota:.3g}")]
    for name in _THREADS:
        value = os.environ.get(name)
        threads = whole_number(value or "")
        if value is not None and (threads is None or threads > usable):
            what = f"{value}, but {usable} cores are usable"
            found.append(Finding(name, "note", what, f"unset {name}, or set it to at most {usable}"))
    return found


def memory() -> list[Finding]:
    """Finding on available memory."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = _memory_limit()
    least = available if limit is None else min(available, limit)
    told = f"{least / 2**30:.1f} GiB available" + ("" if limit is None else f" (limit {limit / 2**30:.1f} GiB)")
    if least < _LITTLE_MEMORY:
        return [Finding("memory", "note", told, "large models need more: 4 GiB or more are comfortable")]
    return [Finding("memory", "ok", told)]


def folder(name: str, path: Path) -> Finding:
    """Finding on whether ``path`` can be written or created."""
    parent = next((each for each in (path, *path.parents) if each.exists()), path)
    try:
        if not parent.is_dir():
            raise NotADirectoryError(20, "is in the way: not a folder")
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
        free = shutil.disk_usage(parent).free
    except OSError as error:
        where = path if parent == path else f"{path} (in {parent})"
        advice = f"make it writable, or choose another folder ({name.partition(' ')[2] or 'with an option'})"
        return Finding(name, "broken", f"{where}: cannot be written ({error.strerror})", advice)
    told = f"{path}, {free / 2**30:.1f} GiB free"
    if free < _LEAST_DISK:
        return Finding(name, "broken", told, "free some space: results would be cut short")
    return Finding(name, "note" if free < _LITTLE_DISK else "ok", told)


def folders() -> Iterator[Finding]:
    """Findings on the folders that both tools write to."""
    yield folder("machines COSTMODEL_MACHINES", user_directory())
    yield folder("temporary TMPDIR", Path(tempfile.gettempdir()))
    yield folder("working folder", Path.cwd())


def compiler(command: Sequence[str] | None, name: str, install: str) -> Finding:
    """Finding on whether ``command`` builds a loadable library, as tuned kernels require."""
    if command is None:
        return Finding(name, "broken", "none found", install)
    shown = " ".join(command)
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-") as place:
            source, library = Path(place, "f.c"), Path(place, "f.so")
            source.write_text("int answer(void) { return 42; }\n")
            words = [*command, "-x", "c", "-shared", "-fPIC", "-o", str(library), str(source)]
            ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            if ran.returncode:
                reason = (ran.stderr.strip().splitlines() or ["no message"])[0]
                return Finding(name, "broken", f"{shown} fails: {reason}", install)
            if ctypes.CDLL(str(library)).answer() != 42:
                return Finding(name, "broken", f"{shown}: what it makes computes wrong results", install)
    except (OSError, subprocess.TimeoutExpired) as error:
        advice = "set TMPDIR to a folder from which code may be run" if "map" in str(error) else install
        return Finding(name, "broken", f"{shown}: {error}", advice)
    return Finding(name, "ok", shown)


def shipped(name: str, files: Iterable[Path]) -> Finding:
    """Finding on whether files shipped with the package exist and are not empty."""
    present = [path for path in files if path.is_file() and path.stat().st_size]
    if present:
        return Finding(name, "ok", f"{len(present)} files")
    again = f"pip install --force-reinstall {DISTRIBUTION}"
    return Finding(name, "broken", "missing: the installation is not whole", again)


def declared(extra: str) -> list[Requirement]:
    """Dependencies that ``pyproject.toml`` declares for ``extra`` (empty: for all), from installed metadata or the
    checkout.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = _lines_of_checkout()
    found = [Requirement(line) for line in lines]
    needed = [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    return needed if not extra else [each for each in needed if each not in declared("")]


def installed(name: str) -> str | None:
    """Installed version of the distribution ``name``, or ``None``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, condition: SpecifierSet | str) -> bool:
    """True if ``version`` meets a condition such as ``>=2.4,<3``."""
    return SpecifierSet(str(condition)).contains(version, prereleases=True)


def _guarded(check: Check) -> list[Finding]:
    """Run a check; turn its failure into a finding, so that the other checks still run."""
    try:
        return list(check())
    except (ProjectError, OSError) as error:
        return [Finding(getattr(check, "__name__", "check").replace("_", " "), "broken", str(error))]


def _python() -> tuple[State, str, str]:
    return "ok", f"{sys.version.split()[0]}, {sys.executable}", ""


def _declared(each: Requirement, extra: str) -> Finding:
    version, wanted = installed(each.name), each.specifier
    install = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
    if version is None:
        return Finding(each.name, "broken", "not installed", install)
    if satisfies(version, wanted):
        return Finding(each.name, "ok", version)
    exactly = f"pip install '{each}'"
    if any(part.operator in ("==", ">=") and not part.contains(version, prereleases=True) for part in wanted):
        return Finding(each.name, "broken", f"{version}, needed is {wanted}", exactly)
    return Finding(each.name, "note", f"{version}, newer than what was tested ({wanted})", exactly)


def _holds(pair: BadPair) -> bool:
    versions = {name: installed(name) for name in pair.versions}
    return all(version is not None and satisfies(version, pair.versions[name]) for name, version in versions.items())


def _import(name: str, advice: str) -> Finding:
    title = f"import {name}"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(title, "broken", f"has not ended after {_IMPORT_SECONDS:.0f} s", advice)
    if ran.returncode == 0:
        return Finding(title, "ok", "works")
    lines = ran.stderr.strip().splitlines()
    reason = lines[-1] if lines else f"the process ended with status {ran.returncode}"
    return Finding(title, "broken", reason[:300], advice)


def _memory_limit() -> int | None:
    """Memory limit of the container's control group in bytes, or ``None``."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _lines_of_checkout() -> list[str]:
    """Dependencies in metadata format from the ``pyproject.toml`` beside the packages; empty if it does not exist."""
    import tomllib

    try:
        path = Path(__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, ValueError):
        return []
    extras = project.get("optional-dependencies", {})
    marked = ([f'{line}; extra == "{extra}"' for line in lines] for extra, lines in extras.items())
    return [*project["dependencies"], *chain.from_iterable(marked)]
