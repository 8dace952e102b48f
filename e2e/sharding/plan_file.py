"""Reader and writer of ``plan.json``, with a strict schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import decoded
from costmodel.base.whole_file import write_whole
from e2e.sharding.plan import PlannedTable, RankLoad, TablePlan
from e2e.sharding.problem.placement import PLACED, PlacementKind, TablePlacement

FORMAT = 1
_Count = Annotated[int, Field(ge=1, strict=True)]
_Size = Annotated[int, Field(ge=0, strict=True)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def save_plan(plan: TablePlan, path: Path) -> None:
    """Write ``plan``; raises ``OutputError`` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plan_record(plan), indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None


def load_plan(path: Path) -> TablePlan:
    """Read the output of :func:`save_plan`; raises ``InputError`` naming the file and the problem."""
    try:
        document = decoded(read_text(path, "record"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make a plan with `python -m e2e shard`") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); make a plan with `python -m e2e shard`") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a plan (a JSON object); make one with `python -m e2e shard`")
    try:
        return _plan(_File.model_validate(document))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        raise InputError(f"{path}: {f'{key}: ' if key else ''}{text}; correct it or make a new plan") from None


def plan_record(plan: TablePlan) -> dict[str, Any]:
    """Return the JSON document."""
    record = asdict(plan)
    record["tables"] = [_table_record(table) for table in plan.tables]
    record["ranks"] = list(record["ranks"])
    return {"format": FORMAT, **record}


def _table_record(table: PlannedTable) -> dict[str, Any]:
    where = table.placement
    return {
        "table": where.table,
        "kind": where.kind,
        "ranks": list(where.ranks),
        "rows": table.rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "optimizer": table.optimizer,
    }


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Table(_Strict):
    table: str
    kind: PlacementKind
    ranks: list[_Size]
    rows: _Count
    dim: _Count
    dtype: str
    optimizer: str

    @model_validator(mode="after")
    def _one_place_each(self) -> _Table:
        if not self.ranks:
            raise ValueError(f"table {self.table}: no ranks; name at least one")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"table {self.table}: a rank twice; name each once")
        if self.kind == "table-wise" and len(self.ranks) != 1:
            raise ValueError(
                f"table {self.table}: table-wise is on one rank, not on {len(self.ranks)}; name one, or cut the table"
            )
        if self.kind == "column-wise" and len(self.ranks) < 2:
            raise ValueError(f"table {self.table}: column-wise needs at least two ranks; on one it is table-wise")
        if self.kind == "column-wise" and self.dim % len(self.ranks):
            raise ValueError(
                f"table {self.table}: {self.dim} columns do not divide into {len(self.ranks)} blocks; "
                "name a number of ranks that divides them"
            )
        return self


class _Rank(_Strict):
    rank: _Size
    tables: _Size
    forward_seconds: _Seconds
    backward_seconds: _Seconds
    received_index_bytes: _Size
    sent_output_bytes: _Size
    memory_bytes: _Size


class _File(_Strict):
    format: Literal[1]
    machine: str
    gpus: _Count
    nodes: _Count
    batch_size: _Count
    tables: list[_Table]
    ranks: list[_Rank]
    generator: str
    step_seconds: _Seconds
    dense_seconds: _Seconds
    bound_seconds: _Seconds
    memory_limit_bytes: _Size
    greedy_seconds: dict[str, _Seconds | None]

    @model_validator(mode="after")
    def _known_ranks(self) -> _File:
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))) or len(self.ranks) != self.gpus:
            raise ValueError(f"ranks are not those of {self.gpus} GPUs, in order; list them from 0 on")
        names = [table.table for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError("a table is placed twice; leave one out")
        for table in self.tables:
            if max(table.ranks) >= self.gpus:
                raise ValueError(
                    f"table {table.table}: rank {max(table.ranks)} of {self.gpus} GPUs; "
                    "ranks count from 0, name smaller ones"
                )
            if table.kind not in PLACED and sorted(table.ranks) != list(range(self.gpus)):
                raise ValueError(f"table {table.table}: {table.kind} needs all {self.gpus} ranks")
        return self


def _plan(file: _File) -> TablePlan:
    tables = tuple(
        PlannedTable(
            TablePlacement(each.table, each.kind, tuple(each.ranks)), each.rows, each.dim, each.dtype, each.optimizer
        )
        for each in file.tables
    )
    ranks = tuple(RankLoad(**each.model_dump()) for each in file.ranks)
    rest = file.model_dump(exclude={"format", "tables", "ranks"})
    return TablePlan(tables=tables, ranks=ranks, **rest)
