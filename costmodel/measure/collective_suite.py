"""The collectives suite: every kind among groups of the ranks started by ``torchrun``, a row per kind and size.

Ranks agree on every case over a separate host group: whether time is left, and the number of calls per sample. A
sample is a sequence of back-to-back calls of torch.distributed, queued behind a spinning kernel, after two calls that
align the ranks.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, Say
from costmodel.measure.device import CPU_BYTES, provenance, synchronize
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget
from costmodel.operators.any_operator import to_record
from costmodel.operators.collective_transfer import CollectiveKind, CollectiveTransfer
from costmodel.operators.layers import element_bytes

TORCH = True


@dataclass(frozen=True)
class RankGroup:
    """Group of ranks. ``ranks``: global numbers of the members, on ``nodes`` nodes. ``handle``: torch's process
    group.
    """

    ranks: tuple[int, ...]
    nodes: int
    handle: Any = None


def sendable(transfer: CollectiveTransfer, dtype: str) -> CollectiveTransfer | None:
    """``transfer`` with its size rounded down so that the ranks can divide it into elements of ``dtype``; ``None`` if
    empty.
    """
    parts = transfer.ranks if transfer.kind in ("reduce_scatter", "all_to_all") else 1
    unit = parts * element_bytes(dtype)
    size = transfer.size_bytes // unit * unit
    return None if size <= 0 else CollectiveTransfer(transfer.kind, size, transfer.ranks, transfer.nodes)


def make_call(transfer: CollectiveTransfer, group: RankGroup, rank: int, dtype: str, device: Any) -> Callable[[], Any]:
    """Function by which rank ``rank`` takes part. Uses zeros: sums of random values would overflow after some
    repetitions.
    """
    import torch
    import torch.distributed as dist

    torch_dtype, width = getattr(torch, dtype), element_bytes(dtype)
    place, count, handle = group.ranks.index(rank), len(group.ranks), group.handle
    elements = max(1, int(transfer.size_bytes) // width)

    def tensor(length: int) -> Any:
        return torch.zeros(length, dtype=torch_dtype, device=device)

    own = tensor(elements)
    if transfer.kind == "all_reduce":
        return lambda: dist.all_reduce(own, group=handle)
    if transfer.kind == "all_gather":
        gathered = tensor(elements * count)
        return lambda: dist.all_gather_into_tensor(gathered, own, group=handle)
    if transfer.kind == "reduce_scatter":
        part = tensor(elements // count)
        return lambda: dist.reduce_scatter_tensor(part, own, group=handle)
    if transfer.kind == "all_to_all":
        output = tensor(elements)
        return lambda: dist.all_to_all_single(output, own, group=handle)
    if transfer.kind == "broadcast":
        return lambda: dist.broadcast(own, src=group.ranks[0], group=handle)
    if transfer.kind == "reduce":
        return lambda: dist.reduce(own, dst=group.ranks[0], group=handle)
    if place == 0:
        return lambda: dist.send(own, dst=group.ranks[-1], group=handle)
    return lambda: dist.recv(own, src=group.ranks[0], group=handle)


COLUMNS = ("operator", "median_s", "minimum_s", "calls", "dtype", "nccl", "error")
KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
)
SMALLEST_BYTES, LARGEST_BYTES = 512, 512 << 20
SAMPLES, MOST_CALLS, SAMPLE_SECONDS = 5, 50, 5e-3
_ALIGNING_CALLS, _SPIN_HERTZ = 2, 2e9
_PATIENCE = datetime.timedelta(minutes=3)
_COMMAND = "torchrun --nproc-per-node N -m costmodel measure --suite collectives -o FOLDER"


@dataclass(frozen=True)
class _World:
    """Ranks of the run. ``control``: host group by which the ranks agree. ``device``: this rank's own."""

    rank: int
    size: int
    per_node: int
    device: Any
    control: Any

    def agree(self, value: Any) -> Any:
        """Value of rank 0, on all ranks."""
        import torch.distributed as dist

        said = [value]
        dist.broadcast_object_list(said, src=0, group=self.control)
        return said[0]

    def collect(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank."""
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.control)
        return said


def measure_collectives(device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say) -> Path:
    """Write ``output/collectives.csv`` and ``.json`` on rank 0; returns the former. Rows are flushed at once.

    ``InputError`` outside torchrun, and on every rank if rank 0 cannot write.
    """
    import torch.distributed as dist

    # Renamed functions: torch 2.13 has both names, older versions only the old ones.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    world = _join(device)
    try:
        groups = _make_groups(world)
        table = _open_table(world, output, resume)
        budget.restart()
        try:
            measured = _measure_all(world, groups, table, budget, report)
        finally:
            if table is not None:
                table.__exit__(None, None, None)
        if world.rank == 0:
            report(f"{measured} collectives measured in {budget.elapsed:.0f} s; {output / 'collectives.csv'}")
    finally:
        dist.destroy_process_group()
    return output / "collectives.csv"


def _join(device: Any) -> _World:
    import torch
    import torch.distributed as dist

    try:
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except (KeyError, ValueError):
        raise InputError(f"--suite collectives: runs in several processes; start it by `{_COMMAND}`") from None
    if size < 2:
        raise InputError(f"--suite collectives: one rank has nobody to talk to; start several by `{_COMMAND}`")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise InputError(f"--suite collectives: rank {rank} has no GPU; start one process per GPU")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    control = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    return _World(rank, size, per_node, device, control)


def groups_of(size: int, per_node: int) -> list[RankGroup]:
    """Groups whose collectives are measured: 2, 4, 8 ... ranks of the first node, then all ranks of 2, 4 ... nodes, and
    one rank of each node. Includes the full number of ranks if it is no power of two.
    """
    nodes = size // per_node
    first = [tuple(range(count)) for count in _doubling(min(per_node, size))]
    groups = [RankGroup(ranks, 1) for ranks in first]
    for count in _doubling(nodes):
        groups.append(RankGroup(tuple(range(count * per_node)), count))
        if per_node > 1:
            groups.append(RankGroup(tuple(range(0, count * per_node, per_node)), count))
    return groups


def _doubling(largest: int) -> list[int]:
    counts = [2**power for power in range(1, largest.bit_length()) if 2**power <= largest]
    return counts if largest < 2 or largest in counts else [*counts, largest]


def cases(groups: list[RankGroup], dtype: str, largest_bytes: int) -> Iterator[tuple[CollectiveTransfer, RankGroup]]:
    """Every kind among every group, first sizes in powers of four, then those between them: a suite that runs out of
    time has covered the whole range. Send and receive use two ranks.
    """
    powers = range(SMALLEST_BYTES.bit_length() - 1, largest_bytes.bit_length())
    for power in [*powers[::2], *powers[1::2]]:
        for kind in KINDS:
            for group in groups:
                ranks = len(group.ranks)
                whole = 2.0**power / (ranks if kind == "all_gather" else 1)
                known = sendable(CollectiveTransfer(kind, whole, ranks, group.nodes), dtype)
                if known is not None and (kind != "send_recv" or ranks == 2):
                    yield known, group


def _make_groups(world: _World) -> list[RankGroup]:
    import torch.distributed as dist

    known = groups_of(world.size, world.per_node)
    return [dataclasses.replace(each, handle=dist.new_group(list(each.ranks), timeout=_PATIENCE)) for each in known]


def _open_table(world: _World, output: Path, resume: bool) -> Table | None:
    """Open the table on rank 0; an error of rank 0 is raised on all ranks."""
    table, problem = None, ""
    if world.rank == 0:
        origin = provenance(world.device) | {"ranks": world.size, "ranks_per_node": world.per_node}
        try:
            table = Table(output, "collectives", COLUMNS, origin, resume)
        except Exception as error:
            problem = str(error)
    problem = world.agree(problem)
    if problem:
        raise InputError(problem)
    return table


def _measure_all(world: _World, groups: list[RankGroup], table: Table | None, budget: TimeBudget, report: Say) -> int:
    dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    largest = LARGEST_BYTES if world.device.type == "cuda" else CPU_BYTES // 4
    done = {row["operator"] for row in table.rows} if table is not None else set()
    progress = SuiteProgress(budget, report)
    for transfer, group in cases(groups, dtype, largest):
        text = json.dumps(to_record(transfer), separators=(",", ":"))
        wanted = world.agree("stop" if not budget.left() else "known" if text in done else "go")
        if wanted == "stop":
            break
        if wanted == "go":
            row = _measure(transfer, group, dtype, world)
            if table is not None:
                table.add(operator=text, dtype=dtype, nccl=_nccl(world.device), **row)
                progress.step(text)
    return progress.done


def _measure(transfer: CollectiveTransfer, group: RankGroup, dtype: str, world: _World) -> dict[str, Any]:
    """Row of one case, with the slowest rank's times; errors of torch become the row's error."""
    call, problem = None, ""
    if world.rank in group.ranks:
        try:
            call = make_call(transfer, group, world.rank, dtype, world.device)
        except Exception as error:
            problem = _line(error)
    if any(problems := world.collect(problem)):
        return {"error": next(each for each in problems if each)}
    once, problem = _attempt(lambda: _once(call, world.device), call)
    if any(problems := [each[1] for each in world.collect((once, problem))]):
        return {"error": next(each for each in problems if each)}
    longest = max(each for each in world.collect(once) if each is not None)
    calls = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / longest)))
    samples, problem = _attempt(lambda: [_sample(call, calls, world.device) for _ in range(SAMPLES)], call)
    said = world.collect((samples, problem))
    if any(each[1] for each in said):
        return {"error": next(each[1] for each in said if each[1])}
    slowest = [max(times) for times in zip(*(each[0] for each in said if each[0] is not None), strict=True)]
    return {"median_s": f"{statistics.median(slowest):.4e}", "minimum_s": f"{min(slowest):.4e}", "calls": calls}


def _attempt(measure: Callable[[], Any], call: Any) -> tuple[Any, str]:
    """Result of ``measure`` and an error text; ``None`` and "" for a rank that takes no part."""
    if call is None:
        return None, ""
    try:
        return measure(), ""
    except Exception as error:
        return None, _line(error)


def _once(call: Any, device: Any) -> float:
    """Seconds of a call, after one that sets up connections."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-7)


def _sample(call: Any, calls: int, device: Any) -> float:
    """Seconds per call of ``calls`` back-to-back calls."""
    if device.type != "cuda":
        for _ in range(_ALIGNING_CALLS):
            call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # A launch of torch.distributed takes the host some 30 us: spin while all of them are queued.
    torch.cuda._sleep(int(5e-5 * (calls + _ALIGNING_CALLS) * _SPIN_HERTZ))
    for _ in range(_ALIGNING_CALLS):
        call()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / calls


def _nccl(device: Any) -> str:
    """NCCL version; empty on a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _line(error: Exception) -> str:
    return (" ".join(str(error).splitlines()[:1]) or type(error).__name__)[:160]
