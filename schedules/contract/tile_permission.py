"""Whether this process may use AMX: Linux lends the 8 KiB of tile registers only to processes that ask for them.

``arch_prctl(2)``, ``ARCH_GET_XCOMP_SUPP`` and ``ARCH_REQ_XCOMP_PERM`` (Linux 5.16; Documentation/arch/x86/xstate.rst).
"""

from __future__ import annotations

import ctypes
import platform
from typing import Literal

TilePermission = Literal["granted", "refused", "unknown to the kernel"]
_SYS_ARCH_PRCTL = 158  # of x86-64
_GET_SUPPORTED, _REQUEST = 0x1021, 0x1023
_TILE_DATA = 18  # number of the state component


def request_tiles() -> TilePermission:
    """Asks for the tiles, for this process and its threads from now on."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "unknown to the kernel"
    libc = ctypes.CDLL(None, use_errno=True)
    supported = ctypes.c_uint64(0)
    if libc.syscall(_SYS_ARCH_PRCTL, _GET_SUPPORTED, ctypes.byref(supported)):
        return "unknown to the kernel"
    if not supported.value >> _TILE_DATA & 1:
        return "unknown to the kernel"
    return "granted" if libc.syscall(_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0 else "refused"
