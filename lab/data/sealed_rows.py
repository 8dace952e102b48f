"""Rows of published measurements that stay unseen until a release is validated, drawn by hash.

The draw was made on 2026-11-23, before the work on version 1.1 began: one job in four of each table named in
:data:`KEYS`. Models are made and fitted without these rows; `validate` uses them once, at the end, and reports this
beside the figure. A job that occurs several times in a table (other releases, other precisions) is drawn as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

_SEED = "2026-11-23"
_ONE_IN = 4
Row = Mapping[str, str]


def _whole_step(row: Row) -> str:
    family = row["source"].split()[0]
    model = row["model"].split("(")[0].split(" BF16")[0].split(" FP8")[0].strip()
    model = model.replace("Grok1", "Grok 1").replace(" Dev", "")  # one model under three names
    return "|".join((family, model, row["gpu"], row["n_gpus"], row["seq"]))


# By the path within the data: the key that identifies a row's job.
KEYS: Mapping[str, Callable[[Row], str]] = {
    "whole_step/llm_training_kinds.csv": _whole_step,
    "megatron_golden/a100.csv.gz": lambda row: row["case"],
    "liger/kernels.csv.gz": lambda row: f"{row['kernel_name']}|{row['gpu_name']}",
    "scripts/published.csv": lambda row: f"{row['repo']}|{row['gpu']}|{row['config']}",
}


def is_sealed(table: str, row: Row) -> bool:
    """True if ``row`` of ``table`` (a key of :data:`KEYS`; columns by name) is excluded from every fit and choice."""
    drawn = hashlib.sha256(f"{_SEED} {KEYS[table](row)}".encode()).hexdigest()
    return int(drawn, 16) % _ONE_IN == 0
