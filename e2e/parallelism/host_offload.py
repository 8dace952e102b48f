"""What a rank puts on the host: activations of layers, and the optimizer's state, which is updated there.

Activations (Transformer Engine's ``get_cpu_offload_context`` as Megatron-Core's ``cpu_offloading_num_layers`` has it,
torchtune's ``OffloadActivations``): what a layer leaves for its backward pass is copied to pinned memory beside the
next layer, which must not end before: then the memory is free. It comes back beside the backward pass of the layer
behind it. Optimizer (ZeRO-Offload, arXiv 2101.06840; Megatron-Core's ``HybridDeviceOptimizer`` with
``overlap_cpu_optimizer_d2h_h2d``): gradients of a part of the model are copied to the host while it updates the part
before, and the parameters back while it updates the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from costmodel.operators.device_work import MemoryCopy
from e2e.parallelism.layers.pieces import Name
from e2e.parallelism.stage_kernels import StageKernels
from e2e.parallelism.stage_writer import COMPUTE, OFFLOAD, RELOAD, StageWriter
from e2e.step.execution_graph import Duration, HostWork

# Bytes of the host's memory that Adam moves for a parameter, all in FP32: gradient, weight and two moments are read;
# the last three are written, and the 16-bit copy that goes back. A store moves its line twice, for it is read first.
ADAM_READ_BYTES = 4 * 4
ADAM_WRITTEN_BYTES = 3 * 4 + 2
ADAM_BYTES = ADAM_READ_BYTES + 2 * ADAM_WRITTEN_BYTES


def host_adam_seconds(memory_bandwidth: float) -> float:
    """What the host takes for one parameter: its memory decides, of which each GPU has ``memory_bandwidth`` bytes/s."""
    return ADAM_BYTES / memory_bandwidth


def _copy(writer: StageWriter, size: int, back: bool) -> None:
    record = MemoryCopy(size, "host_to_device" if back else "device_to_host", pinned=True)
    writer.kernel("aten::copy_", (record,), RELOAD if back else OFFLOAD, "copy")


@dataclass
class ActivationOffload:
    """``sizes``: bytes that the layers to be offloaded leave for their backward passes."""

    writer: StageWriter
    sizes: Mapping[Name, int]
    _before: int | None = None  # event of the copy that the end of the next layer waits for
    _left: dict[Name, int] = field(default_factory=dict)
    _coming: dict[Name, int] = field(default_factory=dict)

    def send(self, name: Name) -> None:
        """The forward pass through part ``name`` has been written."""
        rank = self.writer.rank
        if self._before is not None:
            rank.wait_event(self._before, COMPUTE)
            self._before = None
        if self.sizes.get(name):
            rank.after(OFFLOAD, COMPUTE)
            _copy(self.writer, self.sizes[name], back=False)
            self._before = self._left[name] = rank.record_event(OFFLOAD)

    def fetch(self, name: Name, following: Iterable[Name]) -> None:
        """The backward pass through part ``name`` comes next, after it that of ``following``."""
        self._ask(name)
        if name in self._coming:
            self.writer.rank.wait_event(self._coming.pop(name), COMPUTE)
        for each in following:
            self._ask(each)

    def _ask(self, name: Name) -> None:
        rank = self.writer.rank
        if name not in self._left:
            return
        rank.wait_event(self._left.pop(name), RELOAD)
        rank.after(RELOAD, COMPUTE)  # the memory is that of what has run
        _copy(self.writer, self.sizes[name], back=True)
        self._coming[name] = rank.record_event(RELOAD)


@dataclass
class HostAdam:
    """``seconds``: of the host for one parameter. Sizes are bytes of gradients as the backward pass makes them."""

    writer: StageWriter
    kernels: StageKernels
    seconds: float
    _arriving: tuple[int, int] | None = None  # event of a copy, and the bytes that it brings

    def update(self, size: int) -> None:
        """One part of the parameters: its gradients set out, the part before is updated."""
        if not size:
            return
        rank = self.writer.rank
        rank.after(OFFLOAD, COMPUTE)
        _copy(self.writer, self.kernels.on_the_way(size), back=False)
        arriving = rank.record_event(OFFLOAD), size
        self.finish()
        self._arriving = arriving

    def finish(self) -> None:
        """Updates what has arrived last."""
        if self._arriving is None:
            return
        event, size = self._arriving
        self._arriving = None
        rank, call = self.writer.rank, self.writer.call("optimizer::host_adam")
        rank.end_unit()
        rank.synchronize(call, event=event)
        seconds = self.seconds * size / self.kernels.element_bytes
        rank.append(HostWork("host", call, Duration(seconds, seconds, seconds, "memory", "analytic")))
        _copy(self.writer, size, back=True)
