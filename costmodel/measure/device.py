"""Device under measurement: torch's handle, its memory and the provenance of measurements."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
import sys
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
