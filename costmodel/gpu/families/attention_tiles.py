"""Tiling of fused attention: tiles of queries x keys, the blocks that process them, and tiles skipped by a mask.

Forward, a block owns some queries of a head and iterates over the keys visible to them; backward, it owns some keys.
Tiles without visible scores are skipped, partly visible ones are computed whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from costmodel.operators.attention import Attention, CausalPlace, seen_keys

# Head dimensions supported by kernels; others are padded (flash-attention, csrc: hdim32 ... hdim256; FlashMLA: 576 of
# keys, 512 of values).
_WIDTHS = (32, 64, 96, 128, 192, 256, 512, 576)
# Least rows of queries of a tensor-core instruction, four warps together.
_LEAST_ROWS = 64


@dataclass(frozen=True)
class TileSize:
    """Queries and keys of a tile, by padded head dimension."""

    queries: Mapping[int, int]
    keys: Mapping[int, int]

    def __post_init__(self) -> None:
        if set(self.queries) != set(self.keys):
            raise ValueError(f"tiles of queries for {sorted(self.queries)}, of keys for {sorted(self.keys)}")

    def of(self, width: int) -> tuple[int, int]:
        """Queries and keys of a tile for head dimension ``width``; beyond the widest known one, those of the widest."""
        known = max(self.queries) if width > max(self.queries) else min(each for each in self.queries if each >= width)
        return self.queries[known], self.keys[known]


# flash-attention csrc (flash_fwd_launch_template.h, hopper/tile_size.h, flash_bwd_launch_template.h), FlashMLA's
# (BLOCK_SIZE_M and PAGE_BLOCK_SIZE of 64, csrc/sm90/decode) and PyTorch's
# mem_eff_attention (kernel_forward.h); cuDNN does not say, Triton's tutorial kernel has 128 x 64. Backward the second
# FlashAttention fits 64 x 64 better than the 64 x 128 of its source (H100 0.2 % against 2.0, A100 2.8 against 4.2).
FORWARD_TILES: dict[str, TileSize] = {
    "flash1": TileSize({64: 128, 128: 128}, {64: 128, 128: 128}),
    "flash2": TileSize({64: 128, 128: 128, 256: 128}, {64: 128, 128: 64, 256: 64}),
    "flash3": TileSize({64: 192, 128: 128, 256: 128}, {64: 128, 128: 128, 256: 80}),
    "flash4": TileSize({256: 256}, {256: 128}),  # two tiles of 128 queries, alternating
    "cudnn": TileSize({256: 128}, {256: 128}),
    "efficient": TileSize({64: 64, 256: 32}, {64: 64, 256: 128}),
    "flash3-fp8": TileSize({64: 192, 128: 128, 256: 128}, {64: 160, 128: 192, 256: 128}),
    "mla": TileSize({576: 64}, {576: 64}),
}
# Two alternating tiles of queries, as in datacenter Blackwell's kernels (times of SimuMax's B200 do not fall below 16
# heads of 4,096 queries).
_BLACKWELL_TILES = {"cudnn": TileSize({256: 256}, {256: 128})}
BACKWARD_TILES: dict[str, TileSize] = {
    "flash1": TileSize({64: 128, 128: 128}, {64: 128, 128: 128}),
    "flash2": TileSize({64: 128, 256: 64}, {64: 128, 256: 64}),
    "flash3": TileSize({64: 128, 128: 80, 256: 64}, {64: 128, 128: 128, 256: 80}),
    "flash4": TileSize({256: 128}, {256: 128}),
    "cudnn": TileSize({256: 64}, {256: 128}),
    "efficient": TileSize({256: 64}, {256: 64}),
}


@dataclass(frozen=True)
class TiledWork:
    """Tiles and blocks of one attention operator."""

    # Thread blocks of the whole operator.
    blocks: float
    # Tiles of all blocks, and of the longest block.
    tiles: float
    longest: float
    # Queries and keys of a tile.
    shape: tuple[int, int]
    # True if all blocks take equally long.
    equal: bool
    # Rows of queries in a block, grouped heads together.
    rows: float
    # Number of blocks that share the keys of the same queries.
    splits: int = 1


def padded(width: int) -> int:
    """Head dimension that is computed for ``width``."""
    return next((each for each in _WIDTHS if each >= width), -(-width // 256) * 256)


def tiled(operator: Attention, kernel: str, sms: int, generation: str) -> TiledWork:
    """Work of ``operator`` in tiles of ``kernel`` on a chip of ``sms`` multiprocessors of ``generation``."""
    width = padded(max(operator.widths))
    forward = operator.direction == "forward"
    sizes = FORWARD_TILES if forward else BACKWARD_TILES
    if forward and generation == "blackwell":
        sizes = FORWARD_TILES | _BLACKWELL_TILES
    shape = sizes[kernel].of(width)
    if forward:
        group = operator.heads // operator.kv_heads
        rows = operator.query_length * (group if operator.phase == "decode" else 1)
        shape = (min(shape[0], -(-rows // _LEAST_ROWS) * _LEAST_ROWS), shape[1])
    if operator.phase == "decode":
        # TensorRT-LLM's latent attention before Hopper processes the keys of a sequence in one block (its times on A100
        # and L40S do not grow from 1 to 32 sequences).
        return _split(operator, shape, 1 if kernel == "mla" and generation in ("ampere", "ada") else sms)
    parts = [
        _cut(*piece, operator.causal, operator.window, operator.placed, shape, forward) for piece in operator.pieces
    ]
    heads = operator.batch * operator.heads
    equal = len(set(operator.pieces)) == 1 and parts[0][1] == parts[0][0] * parts[0][2]
    blocks, tiles = (heads * sum(part[place] for part in parts) for place in (0, 1))
    rows = min(operator.query_length, shape[0])
    return TiledWork(blocks, tiles, max(part[2] for part in parts), shape, equal, rows)


def _split(operator: Attention, shape: tuple[int, int], sms: int) -> TiledWork:
    """Work of decode: one block per key-value head, sequence and tile of queries, or more if multiprocessors are left
    over.
    """
    queries = operator.query_length * operator.heads // operator.kv_heads
    pairs = operator.batch * operator.kv_heads * -(-queries // shape[0])
    seen = operator.window if 0 < operator.window < operator.key_length else operator.key_length
    tiles = -(-seen // shape[1])
    splits = int(np.clip(sms // pairs, 1, tiles))
    return TiledWork(pairs * splits, pairs * tiles, -(-tiles // splits), shape, True, queries, splits)


@lru_cache(maxsize=65536)
def _cut(
    queries: int, keys: int, causal: bool, window: int, placed: CausalPlace, shape: tuple[int, int], forward: bool
) -> tuple[int, float, float]:
    """Blocks, tiles and the largest number of tiles of a block, for one sequence and head."""
    if placed == "spread" and causal and keys > queries:
        blocks, tiles, longest = _cut(keys, keys, causal, window, "end", shape, forward)
        return max(blocks * queries // keys, 1), tiles * queries / keys, longest
    starts = np.arange(0, queries, shape[0])
    ends = np.minimum(starts + shape[0], queries) - 1
    first, _ = seen_keys(starts, queries, keys, causal, window, placed)
    _, last = seen_keys(ends, queries, keys, causal, window, placed)
    low, high = first // shape[1], -(-last // shape[1])
    if forward:
        count = np.maximum(high - low, 1)
        return len(count), float(count.sum()), float(count.max())
    columns = -(-keys // shape[1])
    change = np.zeros(columns + 1)
    seen = high > low
    np.add.at(change, low[seen], 1)
    np.add.at(change, high[seen], -1)
    count = np.maximum(np.cumsum(change)[:columns], 1)
    return columns, float(count.sum()), float(count.max())
