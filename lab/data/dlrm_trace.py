"""Embedding kernels of the eight-rank DLRM run in ``traces/dlrm_8xV100`` (facebookresearch/param, MIT): FBGEMM on V100.

The profile has the kernels, the execution trace their sizes, neither has the tables. Of the 26 tables of MLPerf's DLRM
v2 (rows of Criteo 1TB cut at 40 million, lookups per sample: mlcommons/training, recommendation_v2), exactly one choice
of three has the rows and lookups that the execution trace of a rank shows. 128 samples, 16 values, FP32, Adagrad. Which
rows were looked up is not known: some more than 32 times, because the kernel for such rows takes 15 us and more on
every rank (4 us where it finds none).
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.operators.lookups import EmbeddingLookup, TableLookup
from lab.data.data_folder import AGAIN, BROUGHT

MACHINE = "v100-sxm2-32gb"
FILE = Path("traces") / "dlrm_8xV100" / "dlrm_kineto.tar.gz"
SAMPLES, DIM, OPTIMIZER = 128, 16, "adagrad"
# Rows and lookups per sample of the three tables of every rank.
RANKS = (
    ((40_000_000, 3), (39_060, 2), (1_543, 1)),
    ((20_265, 6), (40_000_000, 7), (976, 1)),
    ((17_295, 1), (155, 5), (40_000_000, 12)),
    ((40_000_000, 100), (12_973, 3), (108, 1)),
    ((63, 1), (11_938, 9), (40_000_000, 27)),
    ((7_424, 2), (3_067_956, 3), (36, 1)),
    ((7_122, 1), (14, 1), (590_152, 10)),
    ((405_282, 8), (10, 1), (2_209, 6)),
)
_MEMBER = re.compile(r".*worker(\d+)_.*\.json")
_COMPUTE_STREAM = 7


@dataclass(frozen=True)
class RankKernels:
    """Lookups of one rank and seconds of their kernels: ``forward``; in the backward pass ``linearize`` (row numbers
    made global), ``sort`` (and runs found), ``update`` (gradients summed, rows updated).
    """

    rank: int
    tables: tuple[TableLookup, ...]
    forward: float
    linearize: float
    sort: float
    update: float

    @property
    def backward(self) -> float:
        """Seconds of all kernels of the backward pass."""
        return self.linearize + self.sort + self.update

    def operator(self, direction: Any) -> EmbeddingLookup:
        """Operator of the forward kernel, or of the whole backward pass, with uniform indices."""
        backward = direction == "backward"
        return EmbeddingLookup.of(self.tables, direction, OPTIMIZER if backward else "", whole_pass=backward)


def read_dlrm_trace(data: Path) -> tuple[RankKernels, ...]:
    """Read every rank of the run below ``data``; ``InputError`` if the file is missing or malformed."""
    path = data / FILE
    try:
        with tarfile.open(path) as archive:
            members = {int(match[1]): name for name in archive.getnames() if (match := _MEMBER.fullmatch(name))}
            return tuple(_rank(rank, json.load(archive.extractfile(members[rank]))) for rank in range(len(RANKS)))  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {BROUGHT}") from None
    except (KeyError, IndexError, ValueError, TypeError, tarfile.TarError) as error:
        raise InputError(f"{path}: not the profiles of the eight ranks ({error!r}); {AGAIN}") from None


def _rank(rank: int, profile: Mapping[str, Any]) -> RankKernels:
    kernels = [event for event in profile["traceEvents"] if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: event["ts"])
    # The data-parallel tables' backward pass comes first.
    start = [place for place, event in enumerate(kernels) if "linearize_index" in event["name"]][1]
    after = [event for event in kernels[start:] if event["args"]["stream"] == _COMPUTE_STREAM]
    own = [event for event in after if "at_cuda_detail" not in event["name"]]  # a sort of PyTorch's own

    def seconds(events: list[Any], word: str) -> float:
        return float(1e-6 * sum(event["dur"] for event in events if word in event["name"]))

    tables = tuple(TableLookup(rows, DIM, SAMPLES * pooling, SAMPLES) for rows, pooling in RANKS[rank])
    forward = seconds(kernels, "split_embedding_codegen_forward")
    update = seconds(after, "backward_codegen_adagrad")
    return RankKernels(rank, tables, forward, seconds(after, "linearize_index"), seconds(own, "cub::Device"), update)
