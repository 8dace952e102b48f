"""Handling of a failed case: an error in its row, or the end of the suite."""

from __future__ import annotations

import gc
from typing import Any

from costmodel.base.errors import InputError

TORCH = True
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
