"""Recognition of collectives among recorded kernels, with kind, size and group; transfer time over several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.base.errors import InputError
from costmodel.operators.layers import DTYPE_BYTES
from e2e.step.collective_names import ANNOTATION, KERNELS, POINT_TO_POINT, kind_of_short
from e2e.step.execution_graph import Collective
from e2e.traces.formats.profile import CollectiveInfo, DeviceSpan, HostSpan, KinetoTrace

_EVERYONE = "all ranks"


class CollectiveReader:
    """Reader of a rank's collectives, numbered per group in launch order."""

    def __init__(self, kineto: KinetoTrace) -> None:
        self._kineto = kineto
        self._annotations = [span for span in kineto.annotations if span.name.startswith(ANNOTATION)]
        self._next: dict[str, int] = {}

    def read(self, span: DeviceSpan, launch: HostSpan | None, around: Sequence[HostSpan]) -> Collective | None:
        """Return the collective of the device work ``span``, ``None`` for other work.

        ``around``: operators around its launch. NCCL's metadata are taken from the kernel or from those operators;
        profiles without them have an annotation with kind, shape and dtype.
        """
        info = span.collective or next((op.collective for op in around if op.collective is not None), None)
        if not (info is not None and span.kind == "kernel") and not is_collective(span):
            return None
        kind, size = _from_info(info) if info is not None else self._from_annotation(launch)
        group, ranks = self._group(info)
        if kind in POINT_TO_POINT:
            group, ranks = self._pair(kind, group, ranks, None if info is None else info.peer)
        sequence = self._next.get(group, 0)
        self._next[group] = sequence + 1
        return Collective(kind, group, ranks, sequence, size)

    def _group(self, info: CollectiveInfo | None) -> tuple[str, tuple[int, ...]]:
        group = info.group if info is not None and info.group else _EVERYONE
        if info is not None and info.ranks:
            return group, info.ranks
        return group, self._kineto.process_groups.get(group) or tuple(range(self._kineto.world_size))

    def _pair(self, kind: str, group: str, ranks: tuple[int, ...], peer: int | None) -> tuple[str, tuple[int, ...]]:
        """Group of the two ranks of a message; each direction is numbered separately, as NCCL matches them."""
        own = self._kineto.rank
        others = [rank for rank in ranks if rank != own]
        if peer is None and len(others) != 1:
            raise InputError(
                f"{self._kineto.source}: a {kind} in group {group!r} of {len(ranks)} ranks does not tell its peer; "
                "record with a newer PyTorch, whose profiles say 'Dst Rank' and 'Src Rank'"
            )
        other = others[0] if peer is None else peer
        source, target = (own, other) if kind == "send" else (other, own)
        return f"{group}: {source} to {target}", (source, target)

    def _from_annotation(self, launch: HostSpan | None) -> tuple[str, int]:
        if launch is not None:
            for span in self._annotations:
                if span.thread == launch.thread and span.start <= launch.start <= span.end:
                    elements = sum(_elements(shape) for shape in span.shapes)
                    width = DTYPE_BYTES.get(span.dtypes[0], 4) if span.dtypes else 4
                    # The annotation of a message names its ranks: "nccl:send 0->1".
                    name = span.name.removeprefix(ANNOTATION).partition(" ")[0]
                    return kind_of_short(name) or "all_reduce", elements * width
        raise InputError(
            f"{self._kineto.source}: a collective kernel without its kind (no NCCL metadata, no annotation); record "
            "with torch.profiler of 2.0 or newer"
        )


def is_collective(span: DeviceSpan) -> bool:
    """True for NCCL's kernels, recognised by their names."""
    return span.kind == "kernel" and span.name.startswith(KERNELS)


def transfer_seconds(durations: Sequence[float]) -> float:
    """Transfer time of one collective: the shortest of its kernel times on all ranks.

    That is the time of the last rank to arrive.

    All others wait for that rank inside their kernels; the transfer itself takes equally long on all of them.
    """
    return min(durations)


def _from_info(info: CollectiveInfo) -> tuple[str, int]:
    return info.kind, info.input_elements * DTYPE_BYTES.get(info.dtype, 4)


def _elements(shape: object) -> int:
    """Product of a shape; the sum over a list of shapes."""
    if not isinstance(shape, list):
        return 0
    if any(isinstance(part, list) for part in shape):
        return sum(_elements(part) for part in shape)
    product = 1
    for extent in shape:
        product *= int(extent)
    return product
