"""Device under measurement: torch's handle, its memory, the timing of calls on it, and failures.

A call is timed by CUDA events over launches queued behind a spinning kernel, or by the wall clock on a CPU. The
spinning kernel keeps the GPU busy while the host queues the launches, so that the two events enclose kernels back to
back: without it, kernels shorter than a launch would be measured at the host's pace. A failed case is an error in its
row, or the end of the suite.
"""

from __future__ import annotations

import datetime
import gc
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodel.base.errors import InputError, MissingDependencyError

TORCH = True
CPU_BYTES = 1 << 22  # on CPU the suites only prove that they run
_GPU_BYTES = 1 << 30
_GPU_SHARE = 16


def open_device(name: str) -> Any:
    """Open the ``torch.device`` ``cpu``, ``cuda`` or ``cuda:N``; ``InputError`` if it does not exist."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("measuring needs torch: pip install torch") from None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: not a device; give cuda, cuda:N or cpu") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name}: only cuda, cuda:N and cpu are measured; name one of these")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InputError(
                f"--device {name}: this torch {torch.__version__} sees {count} CUDA devices; "
                "name one of them, or install a torch built for CUDA"
            )
        torch.cuda.set_device(device.index or 0)
    return device


def largest_tensor_bytes(device: Any) -> int:
    """Bytes of the largest tensor of a case, so that a handful fits the free memory."""
    import torch

    if device.type == "cpu":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info()
    return int(min(free // _GPU_SHARE, _GPU_BYTES))


def provenance(device: Any) -> dict[str, Any]:
    """Provenance of a table: device, driver, CUDA, torch, date, command."""
    import torch

    origin: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m", *_command()]),
        "clocks": "as found, not locked",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        origin |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "sm_count": properties.multi_processor_count,
            "compute_capability": capability,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return origin


def _command() -> list[str]:
    """Command line with the package name instead of the path of its file."""
    from pathlib import Path

    path = Path(sys.argv[0])
    return [path.parent.name if path.name == "__main__.py" else path.name, *sys.argv[1:]]


def _driver() -> str:
    """Driver version by nvidia-smi; empty if unavailable."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


_SPIN_HERTZ = 2e9  # upper bound of cycles per second: too long a spin costs little, too short a one spoils the row
_MOST_LAUNCHES = 100  # a full launch queue (about 1,000 entries) would block the host; a call may launch several


@dataclass(frozen=True)
class TimingEffort:
    """Effort of a timing: ``repeats`` samples, each of calls for ``sample_seconds``, but at most ``call_seconds`` in
    all.
    """

    repeats: int = 7
    sample_seconds: float = 1e-3
    call_seconds: float = 0.15


@dataclass(frozen=True)
class KernelTiming:
    """Seconds of one call: ``median`` and ``minimum`` over ``repeats`` samples of ``calls`` each."""

    median: float
    minimum: float
    repeats: int
    calls: int


def synchronize(device: Any) -> None:
    """Wait for all work of ``device``."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(call: Callable[[], Any], device: Any, effort: TimingEffort) -> KernelTiming:
    """Time ``call`` after two warm-up calls; the second determines the number of calls per sample."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(min(effort.repeats, int(effort.call_seconds / once)), 3)
    calls = max(min(int(effort.sample_seconds / once), _MOST_LAUNCHES), 1)
    sample = _event_sample if device.type == "cuda" else _clock_sample
    samples = [sample(call, calls, host) / calls for _ in range(repeats)]
    return KernelTiming(statistics.median(samples), min(samples), repeats, calls)


def _clock_sample(call: Callable[[], Any], calls: int, host: float) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _event_sample(call: Callable[[], Any], calls: int, host: float) -> float:
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int((1.5 * host * calls + 2e-5) * _SPIN_HERTZ))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


_LONGEST = 160
_CONTEXT_LOST = ("illegal memory access", "device-side assert", "launch failure", "CUDA error: unknown error")


def failure_line(what: object, error: Exception, device: Any) -> str:
    """One line about ``error``; memory is released. ``InputError`` if the CUDA context is lost: every later case would
    fail too.
    """
    text = str(error)
    if any(words in text for words in _CONTEXT_LOST):
        raise InputError(f"{what}: the device failed ({text.splitlines()[0]}); run again with --resume") from None
    release_memory(device)
    return (" ".join(text.splitlines()[:1]) or type(error).__name__)[:_LONGEST]


def release_memory(device: Any) -> None:
    """Return unreferenced memory to ``device``."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
