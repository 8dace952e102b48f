"""``python -m fusion doctor``: check the requirements of tuning and running here, with advice on problems."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.commands import doctor
from costmodel.commands.doctor import BadPair, Finding
from costmodel.machines.machine_file import HOST_NAME, machine_files
from schedules.contract.cpu_target import cpu_flags, host_target, tiles_refused
from schedules.tuning.shipped_records import RECORDS_FILE, records_directory

_FFI = "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1"
PAIRS = (
    BadPair(
        {"apache-tvm": "==0.27.0.post1", "apache-tvm-ffi": ">=0.1.15"},
        "this TVM does not load with this FFI: they are built for each other",
        _FFI,
    ),
    BadPair(
        # https://github.com/apache/tvm/pull/20094: the return type of a virtual function changed.
        {"apache-tvm": ">=0.26", "apache-tvm-ffi": "<0.1.13.post2"},
        "this FFI is older than the one that TVM was built with: calls fail silently",
        _FFI,
    ),
)
# Minimum disk space of tuning besides copies of the weights: libraries of the compared networks.
_LEAST_ROOM_BYTES, _COPIES = 2**24, 4
# Compilers in the order of TVM's search (tvm.support.cc.get_cc).
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")
# Feature of /proc/cpuinfo -> its use here.
_FEATURES = {
    "avx2": "vectors of 8",
    "avx512f": "vectors of 16",
    "avx512_vnni": "whole numbers: INT8 models",
    "avx512_bf16": "--precision bfloat16 and auto",
}


def doctor_command(as_json: bool) -> None:
    """Print the findings; exit with status 1 if something is broken."""
    checks = [_packages, _imports, _cpu, _tiles, doctor.cores, doctor.memory, _compiler, doctor.folders, _shipped]
    doctor.report("fusion", checks, as_json)


def _packages() -> Iterator[Finding]:
    optional = {"peers": "other engines of compare", "models": "python -m fusion.modelzoo"}
    yield from doctor.packages("fusion", optional, PAIRS)
    yield from doctor.modules_once(("tvm", "tvm_ffi", "onnx", "onnxruntime", "xgboost", "cv2"))


def _imports() -> list[Finding]:
    modules = {"tvm": "apache-tvm", "onnx": "onnx", "onnxruntime": "onnxruntime"}
    return doctor.imports(modules, f"{_FFI}, or pip install --force-reinstall 'fusion-costmodel[fusion]'")


def _cpu() -> Iterator[Finding]:
    if platform.machine() not in ("x86_64", "AMD64"):
        advice = "run on an x86-64 machine"
        yield Finding("CPU", "broken", f"kernels are generated for x86-64 CPUs, this is {platform.machine()}", advice)
        return
    flags, target = cpu_flags(), host_target()
    if not flags:
        advice = "mount /proc: without its features a CPU is taken for the least there is"
        yield Finding("CPU", "note", f"{target.mcpu}: /proc/cpuinfo tells no features", advice)
        return
    yield Finding("CPU", "ok", f"has the instructions of {target.mcpu}, {target.lanes} numbers of FP32 in a vector")
    for feature, purpose in _FEATURES.items():
        known = feature in flags
        yield Finding(feature, "ok" if known else "note", purpose if known else f"not there: no {purpose}")


def _tiles() -> list[Finding]:
    if "amx_tile" not in cpu_flags():
        return [Finding("AMX", "note", "not there: other engines do without it, and so do our kernels")]
    refused = tiles_refused()
    if refused is None:
        return [Finding("AMX", "ok", "there, and this process may use it")]
    advice = "a kernel of 5.16 or later, without a filter of arch_prctl, lends it; narrow dtypes are slower without"
    return [Finding("AMX", "note", f"there, but {refused}", advice)]


def _compiler() -> list[Finding]:
    install = "install a C++ compiler, such as the package g++, or set CXX"
    asked = os.environ.get("CXX") or os.environ.get("CC")
    places = (Path(folder, name) for name in _COMPILERS for folder in os.get_exec_path())
    found = next((str(path) for path in places if path.is_file() and os.access(path, os.X_OK)), None)
    command = asked.split() if asked else [found] if found else None
    return [doctor.compiler(command, "compiler", install)]


def require_tools(model: Path, output: Path) -> None:
    """Raise ``InputError`` if a requirement of tuning is missing: a working compiler, or space for its files."""
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    if not temporary.is_dir():
        raise InputError(f"TMPDIR {temporary}: no such folder; make it, or name another")
    needed = _LEAST_ROOM_BYTES
    with suppress(OSError):  # a missing model is reported when it is read
        needed += _COPIES * model.stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InputError(
            f"files of this process may hold {limit:,} bytes, tuning needs {needed:,}; raise that with `ulimit -f`"
        )
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    for folder in (existing, temporary):
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise InputError(f"{folder}: {free:,} bytes are free, tuning needs {needed:,}; free some")
    for finding in (doctor.folder("temporary TMPDIR", temporary), *_compiler()):
        if finding.state == "broken":
            raise InputError(f"{finding.name}: {finding.found}; {finding.advice}")


def _shipped() -> Iterator[Finding]:
    files = machine_files()
    yield doctor.shipped("machine files", files.values())
    directory = records_directory()
    if os.environ.get("FUSION_RECORDS"):
        yield Finding("records FUSION_RECORDS", "note", f"{directory} instead of the shipped ones")
    else:
        yield doctor.shipped("shipped records", directory.glob(f"*/{RECORDS_FILE}"))
    if HOST_NAME in files:
        yield Finding("calibration", "ok", str(files[HOST_NAME]))
    else:
        advice = "python -m costmodel calibrate (a minute; else measured quickly at first use)"
        yield Finding("calibration", "note", "this CPU is not measured yet", advice)
