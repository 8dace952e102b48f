"""Host offloading of a rank: the optimizer's state with its update.

Optimizer (ZeRO-Offload, arXiv 2101.06840; Megatron-Core's ``HybridDeviceOptimizer`` with
``overlap_cpu_optimizer_d2h_h2d``): gradients of one part of the model are copied to the host while it updates the
previous part, and the parameters are copied back while it updates the next. FSDP's ``CPUOffloadPolicy``
(torch/distributed/fsdp/_fully_shard): shards are copied to the GPU before every all-gather, gradients to the host after
every reduce-scatter, and the host updates all of them after the last one. DeepSpeed's stage 3 (``offload_optimizer``;
runtime/zero/stage3.py): 16-bit shards stay on the GPU; the host clips gradients, updates and casts all of them after
the last.

Speed of the host: bytes moved, at the lower of the rates of its memory and of one core
(:mod:`e2e.lowering.host_operators`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.operators.device_work import MemoryCopy
from e2e.lowering.host_operators import ADAM_BYTES, CORE_BANDWIDTH, RETURNED_BYTES
from e2e.parallelism.stage_writer import COMPUTE, GATHER, OFFLOAD, REDUCE, RELOAD, StageKernels, StageWriter
from e2e.step.execution_graph import Duration, HostWork

# Bytes of PyTorch's loop over operators (torch/optim/adam.py, ``_single_tensor_adam``): decay 8, first moment
# 12, second 8 and 12, its root 12, division 12, epsilon 8, update 16; newly allocated outputs are read before they are
# written.
LOOP_ADAM_BYTES = 8 + 12 + 8 + 12 + 12 + 12 + 8 + 16
# Addition of a gradient to those of earlier micro-batches.
ADDED_BYTES = 3 * 4
# In-place scaling of a gradient (``unscale_and_clip_grads`` of DeepSpeed).
CLIPPED_BYTES = 2 * 4


@dataclass(frozen=True)
class HostSeconds:
    """Host seconds per parameter, with one busy process per GPU of the node."""

    # Seconds to update a parameter.
    update: float = 0.0
    # Seconds to add a gradient to those of earlier micro-batches.
    add: float = 0.0

    @classmethod
    def of(
        cls, memory_bandwidth: float, fused: bool = True, returned: bool = True, clipped: bool = False
    ) -> HostSeconds:
        """Return the seconds for ``memory_bandwidth`` bytes/s of host memory per GPU.

        ``fused``: Adam is one loop over the parameters; ``returned``: a 16-bit copy of them is returned to the GPU;
        ``clipped``: gradients are clipped on the host.
        """
        moved = (ADAM_BYTES if fused else LOOP_ADAM_BYTES) + (RETURNED_BYTES if returned else 0)
        moved += CLIPPED_BYTES if clipped else 0
        rate = min(memory_bandwidth, CORE_BANDWIDTH)
        return cls(moved / rate, ADDED_BYTES / rate)


def _copy(writer: StageWriter, size: int, back: bool, stream: int | None = None, pinned: bool = True) -> None:
    record = MemoryCopy(size, "host_to_device" if back else "device_to_host", pinned=pinned)
    if stream is None:
        stream = RELOAD if back else OFFLOAD
    writer.kernel("aten::copy_", (record,), stream, "copy")


def _host_work(writer: StageWriter, name: str, seconds: float, event: int) -> None:
    """Make the host wait for ``event`` and work for ``seconds``."""
    rank, call = writer.rank, writer.call(name)
    rank.end_unit()
    rank.synchronize(call, event=event)
    rank.append(HostWork("host", call, Duration(seconds, seconds, seconds, "memory", "analytic")))


@dataclass
class HostAdam:
    """Adam on the host. ``seconds``: host time per parameter. Sizes are bytes of gradients as the backward pass makes
    them.
    """

    writer: StageWriter
    kernels: StageKernels
    seconds: float
    _arriving: tuple[int, int] | None = None  # event of a copy, and its bytes

    def update(self, size: int) -> None:
        """Offload the gradients of one part of the parameters, and update the previous part."""
        if not size:
            return
        rank = self.writer.rank
        rank.after(OFFLOAD, COMPUTE)
        _copy(self.writer, self.kernels.on_the_way(size), back=False)
        arriving = rank.record_event(OFFLOAD), size
        self.finish()
        self._arriving = arriving

    def finish(self) -> None:
        """Update the part that arrived last."""
        if self._arriving is None:
            return
        event, size = self._arriving
        self._arriving = None
        _host_work(self.writer, "optimizer::host_adam", self.seconds * size / self.kernels.element_bytes, event)
        _copy(self.writer, size, back=True)


@dataclass
class HostShards:
    """Shards, their gradients and the optimizer's state on the host.

    Sizes are bytes of shares in the type of the passes. ``stay``: the shards are on the GPU, in that type.
    """

    writer: StageWriter
    kernels: StageKernels
    seconds: HostSeconds
    stay: bool = False

    def fetch(self, shares: Iterable[int]) -> None:
        """Copy the shares of single parameters to the GPU for gathering."""
        for share in () if self.stay else filter(None, shares):
            _copy(self.writer, self.kernels.shard_bytes(share), back=True, stream=GATHER)

    def put(self, shares: Iterable[int], fresh: bool) -> None:
        """Copy the summed gradients of ``shares`` to the host.

        If not ``fresh``: with ``stay``, gradients of earlier micro-batches are copied back and added to; otherwise the
        host waits for each copy, into memory that is not pinned, and adds it (``foreach_reduce``).
        """
        for share in filter(None, shares):
            if self.stay and not fresh:
                _copy(self.writer, self.kernels.shard_bytes(share), back=True, stream=REDUCE)
                self.writer.kernel("aten::add_", (self.kernels.add(share),), REDUCE)
            _copy(self.writer, self.kernels.shard_bytes(share), back=False, stream=REDUCE, pinned=fresh or self.stay)
            if not fresh and not self.stay:
                seconds = self.seconds.add * share / self.kernels.element_bytes
                _host_work(self.writer, "aten::add_", seconds, self.writer.rank.record_event(REDUCE))

    def update(self, size: int) -> None:
        """Update all shares of a rank, ``size`` bytes, after the last gradient."""
        event = self.writer.rank.record_event(REDUCE)
        seconds = self.seconds.update * size / self.kernels.element_bytes
        _host_work(self.writer, "optimizer::host_adam", seconds, event)
        if self.stay:
            _copy(self.writer, size, back=True)
