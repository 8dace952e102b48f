"""Where recorded traces are, and small ones made by hand. Times in microseconds, as in the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.data.data_folder import data_folder

DATA = data_folder() / "traces"
LINEAR = "linear_2080Ti/linear_kineto.json.gz"
LINEAR_ET = "linear_2080Ti/linear_et.json.gz"
RESNET_V100 = "resnet50_V100/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
RESNET_A100 = "resnet50_A100_ddp/nccl_data.json.gz"
DLRM = "dlrm_8xV100/dlrm_kineto.tar.gz"
DLRM_ET = "dlrm_8xV100/dlrm_pytorch_et.tar.gz"
MAIN, AUTOGRAD = 100, 101


def recorded(name: str) -> Path:
    """A real trace, or a skip that says why there is none."""
    path = DATA / name
    if not path.exists() and not any(str(part).endswith(".tar.gz") and part.is_file() for part in path.parents):
        pytest.skip(f"the public traces are not here ({DATA})")
    return path


class Profile:
    """Builds a profile event by event."""

    def __init__(self, **header: Any) -> None:
        self._header = header
        self.events: list[dict[str, Any]] = []
        self._next = 1

    def host(self, category: str, name: str, start: float, duration: float, thread: int = MAIN, **args: Any) -> None:
        self._add(category, name, MAIN, thread, start, duration, args)

    def operator(self, name: str, start: float, duration: float, thread: int = MAIN, **args: Any) -> None:
        self.host("cpu_op", name, start, duration, thread, **{"External id": len(self.events) + 1, **args})

    def launch(
        self,
        start: float,
        duration: float,
        kernel: float,
        seconds: float,
        stream: int = 7,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        name: str = "kernel",
        category: str = "kernel",
    ) -> int:
        """A launch call and its kernel at ``kernel``; returns the correlation id."""
        number = self.runtime(call, start, duration, thread)
        args = {"correlation": number, "stream": stream, "device": 0}
        self._add(category, name, 0, stream, kernel, seconds, args)
        return number

    def runtime(self, name: str, start: float, duration: float, thread: int = MAIN) -> int:
        number = self._next
        self._next += 1
        self.host("cuda_runtime", name, start, duration, thread, correlation=number)
        return number

    def sync(self, kind: str, correlation: int, **args: Any) -> None:
        self._add("cuda_sync", kind, 0, -1, 0, 0, {"cuda_sync_kind": kind, "correlation": correlation, **args})

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({**self._header, "traceEvents": self.events}))
        return path

    def _add(
        self, category: str, name: str, pid: int, tid: int, start: float, duration: float, args: dict[str, Any]
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}
        self.events.append({**event, "args": args})
