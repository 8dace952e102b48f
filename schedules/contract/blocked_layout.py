"""Blocked activation layout: NCHW <-> (N, ceil(C/V), H, W, V)."""

from __future__ import annotations

import numpy as np


def blocks(channels: int, lanes: int) -> int:
    """Number of channel blocks that hold ``channels``."""
    return -(-channels // lanes)


def blocked_shape(shape: tuple[int, ...], lanes: int) -> tuple[int, int, int, int, int]:
    """Blocked shape of an NCHW shape."""
    batch, channels, height, width = shape
    return (batch, blocks(channels, lanes), height, width, lanes)


def block(array: np.ndarray, lanes: int) -> np.ndarray:
    """Convert NCHW to blocked; lanes beyond the channels are zero."""
    batch, channels, height, width = array.shape
    count = blocks(channels, lanes)
    padded = np.zeros((batch, count * lanes, height, width), array.dtype)
    padded[:, :channels] = array
    return np.ascontiguousarray(padded.reshape(batch, count, lanes, height, width).transpose(0, 1, 3, 4, 2))


def unblock(array: np.ndarray, channels: int) -> np.ndarray:
    """Convert blocked to NCHW with the first ``channels`` channels."""
    batch, count, height, width, lanes = array.shape
    plain = array.transpose(0, 1, 4, 2, 3).reshape(batch, count * lanes, height, width)
    return np.ascontiguousarray(plain[:, :channels])
