"""Export of plans as TorchRec's ``ShardingPlan``: its serialised document, and the object.

TorchRec makes one exchange per kind of placement. If a plan cuts tables by columns, whole tables are exported as
``column_wise`` with one block, so that both share one exchange, as the plan was priced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import MissingDependencyError, OutputError
from costmodel.base.whole_file import write_whole
from e2e.sharding.plan import PlannedTable, TablePlan

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

# Path of the EmbeddingBagCollection in a model (default: that of torchrec.models.dlrm.DLRM).
MODULE = "sparse_arch.embedding_bag_collection"
DENSE, FUSED = "dense", "fused"
_TYPES = {
    "table-wise": "table_wise",
    "column-wise": "column_wise",
    "row-wise": "row_wise",
    "data-parallel": "data_parallel",
}


def torchrec_record(plan: TablePlan, module: str = MODULE, device: str = "cuda") -> dict[str, Any]:
    """Return the output of ``ShardingPlan._serialize``: module -> table -> sharding type, kernel, ranks, shards.

    ``device``: ``cuda``, or ``cpu`` to try a plan without GPUs.
    """
    columns = any(table.placement.kind == "column-wise" for table in plan.tables)
    tables = {table.placement.table: _table(table, plan, columns, device) for table in plan.tables}
    return {"plan": {module: tables}}


def save_torchrec(plan: TablePlan, path: Path, module: str = MODULE) -> None:
    """Write :func:`torchrec_record`; raises ``OutputError`` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(torchrec_record(plan, module), indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def torchrec_plan(plan: TablePlan, module: str = MODULE, device: str = "cuda") -> ShardingPlan:
    """Return the object for ``DistributedModelParallel(plan=...)``.

    Raises ``MissingDependencyError`` without TorchRec.
    """
    try:
        from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
    except ImportError as error:
        raise MissingDependencyError(
            f"TorchRec cannot be imported ({error}); pip install '.[torchrec]', or use --torchrec FILE"
        ) from None
    record = torchrec_record(plan, module, device)
    modules = {}
    for name, tables in record["plan"].items():
        found = EmbeddingModuleShardingPlan()
        for table, entry in tables.items():
            shards = [ShardMetadata(**shard) for shard in entry.get("shards", [])]
            found[table] = ParameterSharding(
                sharding_type=entry["sharding_type"],
                compute_kernel=entry["compute_kernel"],
                ranks=entry["ranks"],
                sharding_spec=EnumerableShardingSpec(shards) if shards else None,
            )
        modules[name] = found
    return ShardingPlan(modules)


def _table(table: PlannedTable, plan: TablePlan, columns: bool, device: str) -> dict[str, Any]:
    kind = table.placement.kind
    copies = kind == "data-parallel"
    name = _TYPES["column-wise"] if columns and kind == "table-wise" else _TYPES[kind]
    entry: dict[str, Any] = {
        "sharding_type": name,
        "compute_kernel": DENSE if copies else FUSED,
        "ranks": list(table.placement.ranks),
    }
    if not copies:
        entry["shards"] = list(_shards(table, plan, device))
    return entry


def _shards(table: PlannedTable, plan: TablePlan, device: str) -> Iterator[dict[str, Any]]:
    """Yield the shards; blocks of rows are ceil(rows / ranks) long, as in TorchRec; the last may be short or empty."""
    ranks = table.placement.ranks
    rows, columns = table.rows, table.dim
    if table.placement.kind == "row-wise":
        rows = -(-table.rows // len(ranks))
    if table.placement.kind == "column-wise":
        columns = table.dim // len(ranks)
    for place, rank in enumerate(ranks):
        row = min(place * rows, table.rows) if table.placement.kind == "row-wise" else 0
        local = rank % (plan.gpus // plan.nodes)
        column = place * columns if table.placement.kind == "column-wise" else 0
        yield {
            "shard_offsets": [row, column],
            "shard_sizes": [min(rows, table.rows - row), columns],
            "placement": f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/cuda:{local}",
        }
