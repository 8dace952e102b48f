"""A server of TVM's RPC: read files, run programs, load and time kernels, identify and calibrate its CPU.

The server needs only TVM. Other operations are in ``remote_probe.c``, which is compiled here and uploaded.
"""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, MachineError, MissingDependencyError, Say, TuningError
from costmodel.base.process import core_quota
from costmodel.base.units import whole_number
from costmodel.cpu.calibration import (
    QUICK,
    Cache,
    CpuFacts,
    Microbenchmarks,
    build_program,
    calibrate_with,
    described,
    find_caches,
    find_compiler,
    model_name,
    parse_cpu_list,
)
from costmodel.machines.machine_file import features_of
from costmodel.machines.machine_records import Host, Machine
from schedules.contract.cpu_target import TILE_FLAG, CpuTarget, flags_of, target_with, without_tiles

PROBE = Path(__file__).with_name("remote_probe.c")
_TEXT_BYTES = 2**20
_CONNECT_SECONDS = 5.0


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; raise ``InputError`` for other text."""
    host, _, port = text.rpartition(":")
    number = whole_number(port)
    if not host or not number or number > 65535:
        raise InputError(f"--tracker {text}: expected HOST:PORT, such as localhost:9190")
    return host, number


class Tracker:
    """A tracker and its servers with ``key``. Raises ``InputError`` if it is unreachable or has none."""

    def __init__(self, address: str, key: str) -> None:
        self.address = address
        self.key = key
        host, port = parse_address(address)
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            start = f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {port} --port-end {port + 1}"
            raise InputError(f"--tracker {address}: cannot be reached ({error}); start `{start}`") from error
        from tvm import rpc

        try:
            self._session = rpc.connect_tracker(host, port)
            self.servers = self._count()
        except (RuntimeError, OSError, ValueError) as error:
            raise InputError(
                f"--tracker {address}: is no tracker of TVM's RPC ({error}); "
                "give the address of python -m tvm.exec.rpc_tracker"
            ) from error
        self._lock = threading.Lock()
        if not self.servers:
            server = f"python -m tvm.exec.rpc_server --tracker {address} --key {key}"
            raise InputError(f"--key {key}: the tracker at {address} has no such server free; start `{server}`")

    def connect(self, seconds: float) -> RemoteServer:
        """Open a session with a free server, limited to ``seconds``. Raises ``TuningError`` if there is none."""
        try:
            with self._lock:  # one request at a time
                session = self._session.request(self.key, session_timeout=seconds, max_retry=3)
            return RemoteServer(session)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TuningError(
                f"--key {self.key}: no server of {self.address} answers any more ({reason}); "
                "start it again, and then this command: records are kept"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def _count(self) -> int:
        """Number of free servers."""
        return int(self._session.summary()["queue_info"].get(self.key, {}).get("free", 0))


class RemoteServer:
    """One session. Connection errors are those of the RPC: ``RuntimeError`` and ``OSError``."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.device = session.cpu(0)
        session.upload(bytearray(_probe_library()), "probe.so")
        self._probe = session.load_module("probe.so")

    def read(self, path: str) -> str:
        """Read a text file on the server; empty if it cannot be read."""
        return self._text("probe_read", path)

    def run(self, command: str) -> str:
        """Output of a shell command on the server; empty if it fails."""
        return self._text("probe_run", command)

    def may_use_tiles(self) -> bool:
        """True if the server's operating system permits the tile registers of AMX in this session."""
        return int(self._probe["probe_tiles"]()) == 0

    def tensor(self, array: np.ndarray) -> Any:
        """Copy ``array`` into the server's memory."""
        import tvm

        return tvm.runtime.tensor(array, self.device)

    def copy(self, tensor: Any) -> Any:
        """Copy a tensor on the server, without transferring its values."""
        import tvm

        twin = tvm.runtime.empty(tuple(tensor.shape), str(tensor.dtype), self.device)
        tensor.copyto(twin)
        return twin

    def use_threads(self, threads: int) -> None:
        """Set the number of threads of the session's kernels."""
        big_cores = 1  # as ``tvm::runtime::threading::ThreadGroup::AffinityMode``
        self.session.get_function("runtime.config_threadpool")(big_cores, threads)

    def load_kernel(self, library: bytes, name: str) -> tuple[Any, int]:
        """Load a kernel's library; return its module (to be kept), and the handle for :meth:`seconds`."""
        self.session.upload(bytearray(library), name)
        module = self.session.load_module(name)
        handle = int(self._probe["probe_kernel"](self.tensor(_zero_terminated(f"./{name}"))))
        if not handle:
            raise RuntimeError(f"{name}: the server does not find the kernel that it loaded")
        return module, handle

    def seconds(self, handle: int, calls: int, first: int, rotation: list[tuple[Any, ...]]) -> float:
        """Seconds of ``calls`` consecutive calls on the argument tuples in ``rotation``, from index ``first`` on."""
        flat = [tensor for arguments in rotation for tensor in arguments]
        found = float(self._probe["probe_time"](handle, calls, first, len(rotation[0]), *flat))
        if found < 0:
            raise RuntimeError("a call of the kernel failed")
        return found

    def _text(self, function: str, text: str) -> str:
        import tvm

        out = tvm.runtime.empty((_TEXT_BYTES,), "uint8", self.device)
        used = int(self._probe[function](self.tensor(_zero_terminated(text)), out))
        return bytes(out.numpy()[:used]).decode(errors="replace") if used > 0 else ""


def _zero_terminated(text: str) -> np.ndarray:
    return np.frombuffer(text.encode() + b"\0", np.uint8)


@lru_cache(maxsize=1)
def _probe_library() -> bytes:
    """Compile ``remote_probe.c`` into a library for any x86-64 CPU."""
    import tvm_ffi

    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="probe-") as directory:
        library = Path(directory) / "probe.so"
        includes = [f"-I{tvm_ffi.libinfo.find_include_path()}", f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}"]
        command = [
            *compiler,
            "-std=gnu11",
            "-O2",
            "-fPIC",
            "-shared",
            *includes,
            str(PROBE),
            "-o",
            str(library),
            "-ldl",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise MissingDependencyError(
                f"the C compiler {compiler[0]!r} cannot build {PROBE.name}: {reason}; install another one, or set CC"
            )
        return library.read_bytes()


_CACHES = 8  # upper bound of the number of cache indices of a CPU
_CACHE_FILES = ("type", "level", "size", "shared_cpu_list")
_QUOTAS = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")


def remote_facts(server: RemoteServer) -> tuple[CpuFacts, frozenset[str]]:
    """CPU description from the server's operating system, and all CPU flags, without AMX if the system refuses it.

    Raises ``MachineError`` if it is not x86-64.
    """
    cpuinfo = server.read("/proc/cpuinfo")
    flags = flags_of(cpuinfo)
    if "lm" not in flags:  # "long mode"
        raise MachineError(
            "kernels are generated for x86-64 CPUs: a server of the tracker has another one; give it a key of its own"
        )
    if TILE_FLAG in flags and not server.may_use_tiles():
        flags = without_tiles(flags)
    with tempfile.TemporaryDirectory(prefix="remote-") as directory:
        root = Path(directory)
        caches = _caches(server, root)
        threads = _cores(server, root)
    available = re.search(r"^MemAvailable:\s+(\d+) kB", server.read("/proc/meminfo"), re.MULTILINE)
    host = Host("x86_64", features_of(cpuinfo), threads)
    memory = None if available is None else 1024 * int(available.group(1))
    return CpuFacts(model_name(cpuinfo) or "CPU of a server", host, caches, memory), flags


def remote_target(facts: CpuFacts, flags: frozenset[str], threads: int | None) -> CpuTarget:
    """Target description of the server's CPU."""
    sizes = {cache.level: cache.capacity_bytes for cache in facts.caches}
    return target_with(flags, threads or facts.host.threads, sizes.get(1, 32 * 1024), sizes.get(2, 1024 * 1024))


def calibrate_remote(server: RemoteServer, facts: CpuFacts, cpu: CpuTarget, say: Say) -> Machine:
    """Machine model of the server, measured quickly with the microbenchmarks of ``python -m costmodel calibrate``.

    They are compiled here for its CPU.
    """
    with tempfile.TemporaryDirectory(prefix="remote-") as directory:
        say("compiling the microbenchmarks")
        machine_flags = ((f"-march={cpu.mcpu}", "-static"), (f"-march={cpu.mcpu}",), ())
        program, compiler = build_program(Path(directory), machine_flags)
        server.session.upload(str(program), program.name)
    command = f"./{program.name}"
    server.run(f"chmod +x {command}")
    here = described(Path(command), compiler, server.run(f"{command} list"))
    fields = {name: getattr(here, name) for name in Microbenchmarks.__dataclass_fields__}
    return calibrate_with(_RemoteMicrobenchmarks(server, fields), cpu.threads, QUICK, say, facts)


class _RemoteMicrobenchmarks(Microbenchmarks):
    """The microbenchmark program on a server."""

    def __init__(self, server: RemoteServer, fields: dict[str, object]) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        object.__setattr__(self, "_server", server)

    def printed(self, *arguments: str) -> str:
        return self._server.run(" ".join(["timeout", "60", f"./{self.program}", *arguments]))  # type: ignore[attr-defined]


def _caches(server: RemoteServer, root: Path) -> list[Cache]:
    """Caches of the server's first CPU, from a local copy of its system files."""
    for index in range(_CACHES):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        if not server.read(f"{folder}/type"):
            break
        for name in _CACHE_FILES:
            _mirror(server, root, f"{folder}/{name}")
    _mirror(server, root, "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    # Never those of this machine: the files must have been found on the server.
    caches = find_caches(root / "sys/devices/system/cpu") if (root / "sys").is_dir() else ()
    return [replace(cache, origin=cache.origin.replace(str(root), "")) for cache in caches]


def _cores(server: RemoteServer, root: Path) -> int:
    """Number of usable cores, counted as by :func:`costmodel.base.process.usable_cores` for this process."""
    allowed = re.search(r"^Cpus_allowed_list:\s*(.*)$", server.read("/proc/self/status"), re.MULTILINE)
    cores = 1 if allowed is None else len(parse_cpu_list(allowed.group(1)))
    groups = _mirror(server, root, "/proc/self/cgroup")
    inner = {PurePosixPath("/")} | {PurePosixPath(line.split(":", 2)[-1]) for line in groups.splitlines() if line}
    for path in {each for group in inner for each in (group, *group.parents)}:
        for mount in ("", "/cpu", "/unified", "/cpu,cpuacct"):
            for name in _QUOTAS:
                _mirror(server, root, f"/sys/fs/cgroup{mount}{path}/{name}".replace("//", "/"))
    quota = core_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _mirror(server: RemoteServer, root: Path, path: str) -> str:
    """Read a file on the server and copy it below ``root``; empty if there is none."""
    text = server.read(path)
    if text:
        copy = root / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    return text
