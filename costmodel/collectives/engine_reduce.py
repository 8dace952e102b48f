"""All-reduces by serving engines' own kernels inside a node: peers' memory is read over the links, without NCCL.

One kernel, after the start and a flag between the ranks (vLLM's ``custom_all_reduce.cuh``, which SGLang shares, and
TensorRT-LLM's ``allreduce`` plugin):

- one-shot: every rank reads the whole message of each other rank, (n - 1) x bytes;
- two-shot: every rank adds one n-th of all messages, then reads the other sums, 2 (n - 1) / n x bytes, with a second
  flag.

Engines take the faster one by size and hand large messages to NCCL, whose time is the upper limit here. Starts, flags
and the shares of the links' rate that loads reach are fitted per engine and architecture to tables of its kernels in
CUDA graphs (``python -m lab.fit collectives``). On an architecture without tables those of Hopper hold, starts and
flags slower or faster with the clock. Without links between all ranks (PCIe among more than two) engines use NCCL.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.output_files import write_whole
from costmodel.collectives.physics import slowness
from costmodel.machines.cluster import Cluster
from costmodel.machines.record_file import read_record
from costmodel.operators.collective_transfer import CollectiveTransfer, volume_factor

FILE = Path(__file__).parent.parent / "calibration" / "engine_reduces.json"
# Architecture whose constants hold where none were fitted.
REFERENCE = "hopper"


@dataclass(frozen=True)
class EngineReduce:
    """Constants of one engine's all-reduce on one architecture; times at the clock of H100."""

    # Seconds of the kernel and its flags among two ranks.
    start: float
    # Seconds that each doubling of the ranks adds.
    doubling: float
    # Seconds of the second flag of the two-shot kernel.
    second: float
    # Shares of the links' rate.
    one_shot: float
    two_shot: float
    # Half-width, in logarithms, of the interval that holds 80 % of the rows of a GPU left out of the fit.
    margin: float = 0.2

    def seconds(self, transfer: CollectiveTransfer, cluster: Cluster) -> float:
        """Seconds of ``transfer``, an all-reduce among at least two ranks of one node of ``cluster``."""
        ranks, size = transfer.ranks, transfer.size_bytes
        rate = cluster.intra_node.bandwidth * cluster.usable_share(ranks) / transfer.sharing
        start = slowness(cluster) * (self.start + self.doubling * math.log2(ranks / 2))
        one = start + (ranks - 1) * size / (rate * self.one_shot)
        two = (
            start + slowness(cluster) * self.second + volume_factor("all_reduce", ranks) * size / (rate * self.two_shot)
        )
        return min(one, two)


@dataclass(frozen=True)
class _File:
    provenance: Mapping[str, Any]
    # By engine, then by architecture.
    engines: Mapping[str, Mapping[str, EngineReduce]]


@lru_cache(maxsize=1)
def engine_reduces() -> Mapping[str, Mapping[str, EngineReduce]]:
    """Shipped constants by engine and architecture; ``InputError`` names a corrupt file."""
    return read_record(FILE, _File, "install the package again").engines


def write_engine_reduces(
    engines: Mapping[str, Mapping[str, EngineReduce]], provenance: Mapping[str, Any], path: Path = FILE
) -> Path:
    """Write constants to ``path``; ``OutputError`` on failure."""
    known = {
        engine: {name: dataclasses.asdict(each) for name, each in sorted(members.items())}
        for engine, members in sorted(engines.items())
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"provenance": dict(provenance), "engines": known}, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    engine_reduces.cache_clear()
    return path


def reduce_of(transfer: CollectiveTransfer, cluster: Cluster) -> tuple[EngineReduce, bool] | None:
    """Constants for ``transfer``, and whether they were fitted on this architecture; ``None`` where its engine leaves
    it to NCCL: across nodes, and through the host among more than two ranks.
    """
    if transfer.engine not in engine_reduces():
        raise InputError(f"all-reduce of {transfer.engine}: choose one of {', '.join(engine_reduces())}")
    if transfer.ranks < 2 or transfer.nodes > 1 or (cluster.topology in ("host", "pairs") and transfer.ranks > 2):
        return None
    members = engine_reduces()[transfer.engine]
    own = members.get(cluster.machine.chip().architecture)
    return (own, True) if own else (members[REFERENCE], False)
