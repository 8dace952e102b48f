"""Kernels of a stage that no capture has: around the collectives of gradients and of sharded parameters."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.operators.device_work import Elementwise, Rearrangement, Reduction
from e2e.parallelism.spec import ParallelSpec

SIZES = {2: "bfloat16", 4: "float32"}
NARROW = "float8"
MASTER = "float32"
MASTER_BYTES = 4


@dataclass(frozen=True)
class StageKernels:
    """Sizes are bytes of parameters or gradients of the model's own type, of ``element_bytes`` each."""

    spec: ParallelSpec
    element_bytes: int

    @property
    def dtype(self) -> str:
        """Of parameters and gradients in the passes."""
        return SIZES[self.element_bytes]

    @property
    def reduced_dtype(self) -> str:
        """Of gradients that are summed over ranks."""
        return MASTER if self.spec.reduce_dtype == "float32" else self.dtype

    @property
    def share_dtype(self) -> str:
        """Of the share of summed gradients that a rank keeps: FSDP gives them the type of its shards."""
        return MASTER if self.spec.sharded_masters else self.reduced_dtype

    def shard_bytes(self, size: int) -> int:
        """Bytes of a share as the optimizer of ``zero=3`` has it, of parameters or summed gradients."""
        wide = self.spec.sharded_masters and self.dtype != MASTER
        return size * MASTER_BYTES // self.element_bytes if wide else size

    def on_the_way(self, size: int) -> int:
        """Bytes of gradients of ``size`` bytes between ranks."""
        return size * MASTER_BYTES // self.element_bytes if self.reduced_dtype == MASTER else size

    def move(self, kind: str, size: int) -> Rearrangement:
        """Parameters or gradients from place to place."""
        elements = self._elements(size)
        return Rearrangement(kind, elements, elements, self.dtype)

    def shards_cast(self, size: int) -> Elementwise:
        """Shards of ``size`` bytes into a buffer that is gathered in 8 bits (``fsdp_pre_all_gather`` of torchao)."""
        return self._cast(size, MASTER if self.spec.sharded_masters else self.dtype, NARROW)

    def shards_searched(self, size: int) -> Reduction:
        """The largest values of shards of ``size`` bytes, which the scales of 8 bits are made of."""
        dtype = MASTER if self.spec.sharded_masters else self.dtype
        return Reduction("max", self._elements(size), 1, dtype)

    def shards_in(self, size: int) -> Rearrangement | Elementwise:
        """Shards of ``size`` bytes into the buffer that is gathered; of FP32 masters in the type of the passes."""
        if self.spec.sharded_masters and self.dtype != MASTER:
            return self._cast(size, MASTER, self.dtype)
        return self.move("concat", size)

    def gradients_in(self, kind: str, size: int) -> Rearrangement | Elementwise:
        """Gradients into the buffer that is reduced: moved (``concat``) or divided by the number of ranks (``mul``)."""
        if kind == "concat" and self.reduced_dtype == self.dtype:
            return self.move(kind, size)
        return self._cast(size, self.dtype, self.reduced_dtype, "mul" if kind == "mul" else "to")

    def gradients_out(self, size: int) -> Rearrangement | Elementwise:
        """Summed gradients out of the buffer."""
        if self.reduced_dtype == self.dtype:
            return self.move("copy", size)
        return self._cast(size, self.reduced_dtype, self.dtype)

    def share_to_master(self, size: int) -> Elementwise | None:
        """A share of gradients in the type of the FP32 shard, where it was summed in another one."""
        return (
            None if self.share_dtype == self.reduced_dtype else self._cast(size, self.reduced_dtype, self.share_dtype)
        )

    def norm(self, size: int) -> Reduction:
        """The norm of shares of summed gradients of ``size`` bytes: one number for every 64k of them, then one."""
        return Reduction("norm", self._elements(size), 1, self.share_dtype)

    def scaled(self, size: int) -> Elementwise:
        """Shares of summed gradients times one number, in place."""
        return Elementwise("mul", self._elements(size), 1, 1, 0, self.share_dtype)

    def add(self, size: int) -> Elementwise:
        """A share of gradients to that of earlier passes."""
        return Elementwise("add", self._elements(size), 2, 1, 0, self.share_dtype)

    def _cast(self, size: int, dtype: str, output: str, kind: str = "to") -> Elementwise:
        output = "" if output == dtype else output
        return Elementwise(kind, self._elements(size), 1, 1, 0, dtype, output)

    def _elements(self, size: int) -> int:
        return max(size // self.element_bytes, 1)
