"""A tracker of TVM's RPC and two measuring servers of the key ``tiny``: a program that prints the port and ends with
stdin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KEY = "tiny"


@contextlib.contextmanager
def running_servers() -> Iterator[str]:
    """This file as a process; the tracker's address once both servers are free."""
    from tvm import rpc

    with subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd=Path(__file__).resolve().parents[2],
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            session = rpc.connect_tracker("127.0.0.1", port)
            deadline = time.monotonic() + 60
            while session.summary()["queue_info"].get(KEY, {}).get("free", 0) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            session.close()
            yield f"127.0.0.1:{port}"
        finally:
            process.communicate(timeout=30)


def serve() -> None:
    """A process for each server, because a server changes its folder; forked before there is any thread."""
    from tvm.rpc import server, tracker

    from schedules.measuring import remote_server

    remote_server.register()
    children = []
    for first_port in (9400, 9500):  # ranges of their own: two that search at the same time may find the same port
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            port = int(os.read(receiving, 16))
            server.PopenRPCServerState(
                "127.0.0.1", first_port, first_port + 100, tracker_addr=("127.0.0.1", port), key=KEY, silent=True
            )  # fmt: skip
            signal.pause()
        children.append((child, sending))
    found = tracker.PopenTrackerServerState("127.0.0.1", 9300, 9400, silent=True)
    for _, sending in children:
        os.write(sending, str(found.port).encode())
    print(found.port, flush=True)
    sys.stdin.read()
    for child, _ in children:
        os.kill(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    serve()
