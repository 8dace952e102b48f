"""Operations on a server of TVM's RPC: read files, run programs, load and time kernels.

The server needs only TVM. Other operations are in ``remote_probe.c``, which is compiled here and uploaded.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError, TuningError
from costmodel.base.units import whole_number
from costmodel.cpu.microbenchmark import find_compiler

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
