"""Groups of calls that one kernel can replace: chains of element-wise operators, lookups in several tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodel.operators.lookups import EmbeddingLookup, TableLookup
from e2e.lowering.families.embedding_operators import update_work
from e2e.lowering.families.work import Context, DeviceWork, fill
from e2e.lowering.torch_compile import fused_chains
from e2e.step.operator_trace import Tensor
from e2e.whatif.merged_calls import MergedCalls
from e2e.whatif.operators_behind import TracedRank

_BAGS = "embedding_bag"


def fusible_chains(rank: TracedRank, pattern: str) -> list[MergedCalls]:
    """Return chains of at least two calls matching ``pattern``, as ``torch.compile`` would fuse them.

    The fused kernel (:func:`e2e.lowering.torch_compile.fused_chains`) reads each input from outside the chain once and
    writes each output used outside once.
    """
    found = []
    for chain in fused_chains(rank.lowered, rank.trace, rank.single(rank.matching(pattern))):
        name = "what-if::" + chain.name.rpartition("::")[2].removeprefix("triton_")
        work = (DeviceWork(name, (chain.work,)),)
        found.append(MergedCalls(name, chain.calls, chain.calls[-1], work))
    return found


def batched_lookups(rank: TracedRank) -> list[MergedCalls]:
    """Group at least two ``embedding_bag`` lookups with equal bags, width and number type into batched lookups.

    They are computed as by FBGEMM's table-batched operator. Their gradients stay dense; a batched backward pass has the
    launches of FBGEMM's.
    """
    families: dict[object, list[int]] = {}
    for call, tasks in rank.work.items():
        if call not in rank.calls or _BAGS not in rank.calls[call].name or not rank.single((call,)):
            continue
        lookup = _lookup(rank, call)
        if lookup is not None and lookup.tables == 1 and not lookup.mixed and lookup.mode == "sum":
            key = (lookup.direction, lookup.dim, lookup.bags, lookup.dtype, rank.calls[call].name, len(tasks))
            families.setdefault(key, []).append(call)
    return [merged for calls in families.values() for merged in _in_order(rank, calls)]


def _lookup(rank: TracedRank, call: int) -> EmbeddingLookup | None:
    records = [record for task in rank.work[call] for record in task.operators]
    return next((record for record in records if isinstance(record, EmbeddingLookup)), None)


def _in_order(rank: TracedRank, calls: Sequence[int]) -> list[MergedCalls]:
    """Merge the calls into one at a place that keeps data dependencies.

    At the first one if all their inputs are ready there, else at the last one if no result is used before, else only
    those before the first use.
    """
    if len(calls) < 2:
        return []
    places = {call: place for place, call in enumerate(rank.work)}
    between = [each for each in rank.work if places[calls[0]] < places[each] < places[calls[-1]] and each not in calls]
    made = {storage for each in between for storage in rank.writes(each)}
    if not made & {storage for call in calls for storage in rank.reads(call)}:
        return [_merged(rank, calls, calls[0])]
    results: set[int] = set()
    taken: list[int] = []
    rest = list(calls)
    for each in sorted((*between, *calls), key=places.__getitem__):
        if each in calls:
            taken.append(each)
            results |= rank.writes(each)
            rest.remove(each)
        elif results & rank.reads(each):
            break
    found = [_merged(rank, taken, taken[-1])] if len(taken) > 1 else []
    return found + _in_order(rank, rest)


def _merged(rank: TracedRank, calls: Sequence[int], anchor: int) -> MergedCalls:
    lookups = [lookup for call in calls if (lookup := _lookup(rank, call)) is not None]
    first, count = lookups[0], len(lookups)
    if len(set(lookups)) == 1:
        record = replace(first, tables=count, kernel="table_batched")
    else:
        tables = [TableLookup(each.rows, each.dim, each.indices, each.bags, each.dtype) for each in lookups]
        record = EmbeddingLookup.of(tables, first.direction)
    if first.direction == "forward":
        name = f"what-if::{count} batched lookups"
        return MergedCalls(name, tuple(calls), anchor, (DeviceWork(name, (record,)),))
    name = f"what-if::{count} batched lookups backward"
    values = sum(each.rows * each.dim for each in lookups)
    device = next(each.device for each in _tensors(rank, anchor))
    indices = Tensor(-1, -1, (sum(each.indices for each in lookups),), "int64", device)
    cleared = replace(fill(Tensor(-1, -1, (values,), first.dtype, device), "aten::zeros"), auxiliary=False)
    call = replace(rank.calls[anchor], name=name)
    return MergedCalls(name, tuple(calls), anchor, (cleared, *update_work(call, Context(), record, indices, values)))


def _tensors(rank: TracedRank, call: int) -> list[Tensor]:
    return [each for each in rank.calls[call].inputs if isinstance(each, Tensor) and each.device != "cpu"]
