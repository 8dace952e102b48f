"""Blocks of the cache that prompts with equal beginnings share; those that no sequence uses are evicted, the least
recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Full blocks of prompts by identity: a block's number stands for its tokens and all before it."""

    def __init__(self, block: int) -> None:
        self.block = block  # tokens
        self._users: dict[int, int] = {}  # block -> sequences that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks that nobody holds, least recently used first

    @property
    def held_tokens(self) -> int:
        """Tokens of blocks that sequences hold, each block once."""
        return len(self._users) * self.block

    def held(self, prefix: Sequence[int]) -> int:
        """Tokens of ``prefix`` that other sequences hold already: they need no further room."""
        found = 0
        for each in prefix:
            if each not in self._users:
                break
            found += self.block
        return found

    def hold(self, prefix: Sequence[int]) -> tuple[int, int]:
        """Hold all blocks of ``prefix``; tokens of its beginning that were there, and tokens held."""
        hits, going = 0, True
        for each in prefix:
            going = going and (each in self._users or each in self._idle)
            hits += going
            self._idle.pop(each, None)
            self._users[each] = self._users.get(each, 0) + 1
        return hits * self.block, len(prefix) * self.block

    def release(self, prefix: Sequence[int]) -> None:
        """Give up the blocks of ``prefix``; they stay until their room is needed, the beginning longest."""
        for each in reversed(prefix):
            users = self._users[each] - 1
            if users:
                self._users[each] = users
            else:
                del self._users[each]
                self._idle[each] = None

    def shrink(self, tokens: float) -> None:
        """Evict blocks that nobody holds until at most ``tokens`` are left of them."""
        while self._idle and len(self._idle) * self.block > tokens:
            self._idle.popitem(last=False)
