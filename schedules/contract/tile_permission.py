"""Permission of the operating system to use the tile registers of AMX, requested once per process.

Linux saves these 8 KiB only for processes that request it. Libraries with kernels that use tiles request it when loaded
(:data:`LIBRARY_REQUEST`), from Python, a server of TVM's RPC, or a C++ program. :func:`tiles_refused` requests it for
kernels that run where they are compiled, and tells whether it is granted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import lru_cache

# Linux on x86-64: system call, request code, and component of the thread state.
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
_WRITE = 1
_MESSAGE = "this library needs the tile registers of AMX, which the CPU or the operating system refuses"
_REASONS = {
    errno.EINVAL: "the CPU or the kernel (Linux 5.16 and later) does not know them",
    errno.EOPNOTSUPP: "the CPU or the kernel (Linux 5.16 and later) does not know them",
    errno.ENOSPC: "a thread has an alternate signal stack that is too small for them",
    errno.EPERM: "not permitted",
    errno.ENOSYS: "a sandbox refuses the system call",
}
_LIBRARY_SYMBOL = "fusion_request_tiles"


@lru_cache(maxsize=1)
def tiles_refused() -> str | None:
    """Request the tile registers for this process and its later forks; return the reason of a refusal, or None.

    Harmless on CPUs without tiles, where the request is refused.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return "the tile registers of AMX are asked for on Linux on x86-64 alone"
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if libc.syscall(*(ctypes.c_long(each) for each in arguments)) == 0:
        return None
    code = ctypes.get_errno()
    return f"the operating system refuses the tile registers of AMX: {_REASONS.get(code, os.strerror(code))}"


def _assembly() -> str:
    """Assembly of a function that requests the tiles when a library is loaded, once per library.

    On refusal it prints a message to standard error (the first tile instruction would end the process with SIGILL).
    """
    group = f"{_LIBRARY_SYMBOL},comdat"
    lines = (
        f".ifndef {_LIBRARY_SYMBOL}",
        f'.pushsection .text.{_LIBRARY_SYMBOL},"axG",@progbits,{group}',
        f".weak {_LIBRARY_SYMBOL}",
        f".hidden {_LIBRARY_SYMBOL}",
        f".type {_LIBRARY_SYMBOL},@function",
        f"{_LIBRARY_SYMBOL}:",
        f"movl ${_ARCH_PRCTL}, %eax",
        f"movl ${_REQUEST_PERMISSION}, %edi",
        f"movl ${_TILE_DATA}, %esi",
        "syscall",
        "testq %rax, %rax",
        "jz 1f",
        f"movl ${_WRITE}, %eax",
        "movl $2, %edi",
        "leaq 2f(%rip), %rsi",
        f"movl ${len(_MESSAGE) + 1}, %edx",
        "syscall",
        "1: ret",
        f'2: .ascii "{_MESSAGE}\\n"',
        ".popsection",
        f'.pushsection .init_array,"awG",@init_array,{group}',
        ".p2align 3",
        f".quad {_LIBRARY_SYMBOL}",
        ".popsection",
        ".endif",
    )
    return "\n".join(f'module asm "{_escaped(line)}"' for line in lines)


def _escaped(line: str) -> str:
    """Escape quotes and backslashes for LLVM IR."""
    return line.replace("\\", "\\5C").replace('"', "\\22")


# LLVM IR that a library with tile instructions needs, linked into the module of each of its kernels.
LIBRARY_REQUEST = _assembly()
