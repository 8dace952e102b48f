"""Kernel family of embedding lookups, forward and backward, of one table or many.

The stages of a pass are in :mod:`costmodel.gpu.lookups.lookup_passes`, the operators as arrays in
:mod:`costmodel.gpu.lookups.lookup_entries`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.lookups.lookup_entries import Entries, entries_of
from costmodel.gpu.lookups.lookup_passes import LookupStage, Reuse, reuse_of, stages_of
from costmodel.machines.machine_records import Machine
from costmodel.operators.lookups import EmbeddingLookup

_MEASURED = ("float32", "float16", "bfloat16")


class LookupKernels(Family[EmbeddingLookup]):
    """Table lookups, pooled or not, forward and backward, one table or many."""

    name = "embedding"

    def analyse(self, operators: Sequence[EmbeddingLookup], machine: Machine) -> KernelAnalysis:
        entries = entries_of(operators)
        found = reuse_of(entries, machine)
        return analysis(entries, found, stages_of(entries, found, machine))

    def least(self, operators: Sequence[EmbeddingLookup], machine: Machine) -> np.ndarray:
        return np.zeros(len(operators))  # repeatedly accessed rows come from caches

    def covers(self, operator: EmbeddingLookup) -> bool:
        """True for operators that `costmodel measure --suite embedding` times: forward calls, and whole backward
        passes.
        """
        whole = operator.direction == "forward" or operator.whole_pass
        return whole and all(table.dtype in _MEASURED for table, _ in operator.parts)


def analysis(entries: Entries, found: Reuse, stages: Sequence[LookupStage]) -> KernelAnalysis:
    """Seconds, terms and features of the operators of ``entries``."""
    seconds = sum((stage.seconds(entries) for stage in stages), np.zeros(entries.operators))
    terms = {
        "memory:DRAM": _summed(entries, [stage.dram for stage in stages]),
        "memory:L2": _summed(entries, [stage.l2 for stage in stages]),
        "waiting": _summed(entries, [stage.waiting for stage in stages]),
        "longest": np.sum([entries.most(stage.longest) for stage in stages], axis=0),
        "launch": np.sum([stage.fixed for stage in stages], axis=0),
    }
    return KernelAnalysis(seconds, terms, {**_features(entries, found), **_shares(seconds, terms)})


def _summed(entries: Entries, values: Sequence[np.ndarray]) -> np.ndarray:
    return entries.total(np.sum(values, axis=0))


def _features(entries: Entries, found: Reuse) -> dict[str, np.ndarray]:
    lookups = entries.total(entries.indices)
    values = entries.total(entries.indices * entries.dim)
    flags = {name: entries.first(getattr(entries, name)).astype(float) for name in ("kernel", "backward", "sparse")}
    return {
        "indices": safe_log2(lookups),
        "dim": safe_log2(values / np.maximum(lookups, 1)),
        "pooling": safe_log2(lookups / np.maximum(entries.total(entries.bags), 1)),
        "tables": safe_log2(entries.total(np.ones(len(entries.rows)))),
        "unique": safe_log2(entries.total(found.unique) / np.maximum(lookups, 1)),
        "misses": safe_log2(entries.total(found.misses) / np.maximum(lookups, 1)),
        "most_popular": safe_log2(entries.most(found.most_popular)),
        "element": safe_log2(entries.first(entries.element)),
        "state": entries.first(entries.state_row + entries.state_element + entries.fused),
        **flags,
    }


def _shares(seconds: np.ndarray, terms: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Seconds, and the share of each term in them."""
    shares = {f"{name}_share": safe_log2(values / np.maximum(seconds, 1e-12) + 1e-6) for name, values in terms.items()}
    return {"seconds": safe_log2(seconds), **shares}
