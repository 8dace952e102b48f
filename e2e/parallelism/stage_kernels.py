"""Kernels of a stage that are in no capture: around the collectives of gradients and of sharded parameters."""

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
    """Kernels around collectives. Sizes are bytes of parameters or gradients in the model's type, of ``element_bytes``
    each.
    """

    spec: ParallelSpec
    element_bytes: int

    @property
    def dtype(self) -> str:
        """Type of parameters and gradients in the passes."""
        return SIZES[self.element_bytes]

    @property
    def reduced_dtype(self) -> str:
        """Type of gradients that are summed over ranks."""
        return MASTER if self.spec.reduce_dtype == "float32" else self.dtype

    @property
    def share_dtype(self) -> str:
        """Type of the share of summed gradients that a rank keeps: FSDP uses the type of its shards."""
        return MASTER if self.spec.sharded_masters else self.reduced_dtype

    def shard_bytes(self, size: int) -> int:
        """Return the bytes of a share in the type of the ``zero=3`` optimizer, of parameters or summed gradients."""
        wide = self.spec.sharded_masters and self.dtype != MASTER
        return size * MASTER_BYTES // self.element_bytes if wide else size

    def on_the_way(self, size: int) -> int:
        """Return the bytes of gradients of ``size`` bytes as sent between ranks."""
        return size * MASTER_BYTES // self.element_bytes if self.reduced_dtype == MASTER else size

    def move(self, kind: str, size: int) -> Rearrangement:
        """Return a copy of parameters or gradients."""
        elements = self._elements(size)
        return Rearrangement(kind, elements, elements, self.dtype)

    def shards_cast(self, size: int) -> Elementwise:
        """Return the cast of shards of ``size`` bytes into the 8-bit gather buffer (``fsdp_pre_all_gather`` of
        torchao).
        """
        return self._cast(size, MASTER if self.spec.sharded_masters else self.dtype, NARROW)

    def shards_searched(self, size: int) -> Reduction:
        """Return the search for the maxima of shards of ``size`` bytes, for 8-bit scales."""
        dtype = MASTER if self.spec.sharded_masters else self.dtype
        return Reduction("max", self._elements(size), 1, dtype)

    def shards_in(self, size: int) -> Rearrangement | Elementwise:
        """Return the copy of shards of ``size`` bytes into the gather buffer; FP32 masters are cast to the type of the
        passes.
        """
        if self.spec.sharded_masters and self.dtype != MASTER:
            return self._cast(size, MASTER, self.dtype)
        return self.move("concat", size)

    def gradients_in(self, kind: str, size: int) -> Rearrangement | Elementwise:
        """Return the copy of gradients into the reduction buffer: moved (``concat``) or divided by the number of ranks
        (``mul``).
        """
        if kind == "concat" and self.reduced_dtype == self.dtype:
            return self.move(kind, size)
        return self._cast(size, self.dtype, self.reduced_dtype, "mul" if kind == "mul" else "to")

    def gradients_out(self, size: int) -> Rearrangement | Elementwise:
        """Return the copy of summed gradients out of the buffer."""
        if self.reduced_dtype == self.dtype:
            return self.move("copy", size)
        return self._cast(size, self.reduced_dtype, self.dtype)

    def share_to_master(self, size: int) -> Elementwise | None:
        """Return the cast of a share of gradients to the type of the FP32 shard, or None if it was summed in that
        type.
        """
        return (
            None if self.share_dtype == self.reduced_dtype else self._cast(size, self.reduced_dtype, self.share_dtype)
        )

    def norm(self, size: int) -> Reduction:
        """Return the norm of shares of summed gradients of ``size`` bytes: one number per 64k of them, then one."""
        return Reduction("norm", self._elements(size), 1, self.share_dtype)

    def scaled(self, size: int) -> Elementwise:
        """Return the in-place scaling of shares of summed gradients."""
        return Elementwise("mul", self._elements(size), 1, 1, 0, self.share_dtype)

    def add(self, size: int) -> Elementwise:
        """Return the addition of a share of gradients to that of earlier passes."""
        return Elementwise("add", self._elements(size), 2, 1, 0, self.share_dtype)

    def _cast(self, size: int, dtype: str, output: str, kind: str = "to") -> Elementwise:
        output = "" if output == dtype else output
        return Elementwise(kind, self._elements(size), 1, 1, 0, dtype, output)

    def _elements(self, size: int) -> int:
        return max(size // self.element_bytes, 1)
