"""How much more memory a process takes when an engine first runs: its arena, as the operating system sees it.

Engines do not tell their arenas alike (ONNX Runtime and OpenVINO not at all from Python), so that all are asked the
same: by how much the peak of the resident memory exceeds what was resident when the model was loaded.
"""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): VmHWM becomes what is resident now


def start_of_growth() -> int | None:
    """Bytes that are resident now, from where peaks count anew; ``None`` where the system does not tell.

    What was freed goes back to the system first: an arena taken from there would not be seen.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return None
    return _bytes("VmRSS")


def peak_growth(start: int) -> int | None:
    """Bytes by which the resident memory has been larger than ``start`` at most."""
    peak = _bytes("VmHWM")
    return None if peak is None else max(0, peak - start)


def _bytes(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found.group(1))
