"""Predicted against measured embedding kernels that others have published; nothing is fitted to them as a whole.

python -m lab.bench.embedding_kernels [--data FOLDER]

**dlrm_8xV100** (facebookresearch/param, MIT; ``traces/dlrm_8xV100``): FBGEMM's kernels on the eight ranks; single
constants of the backward stages stem from this run (costmodel/gpu/families/lookups.py says which),
the forward pass has none from it. The profile has the kernels, the execution trace their sizes, neither has the tables.
Of the 26 tables of MLPerf's DLRM v2 (rows of Criteo 1TB cut at 40 million, lookups per sample: mlcommons/training,
recommendation_v2), exactly one choice of three has the rows and lookups that the execution trace of a rank shows. 128
samples, 16 values, FP32, Adagrad. Which rows were looked up is not known: some more than 32 times, because the kernel
for such rows takes 15 to 37 us on every rank (4 us where it finds none). So indices are taken for even, for even but
for the least that this says, one row of every table looked up 33 times, and for Zipf distributed.

**pytorch/pytorch pull request 49913**: `embedding_dense_backward` on A100 (GA100), 64 to 8,192 values, the kernel
without a sort; one constant, two loads per step, stems from its column of 64 values. The rows of the table are not
stated; the change was made for MLPerf's BERT, which has 30,522.
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.base.errors import InputError
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.lookups import entries_of, reuse_of, stages_of
from costmodel.machines.machine_file import load_machine
from costmodel.operators.lookups import EmbeddingLookup, IndexStatistics, TableLookup, zipf
from lab.data.data_folder import AGAIN, BROUGHT, data_folder

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


BERT_ROWS = 30_522
# (lookups, values): seconds, pytorch/pytorch pull request 49913, table "GA100-fp32 embedding", column "cuda kernel".
PULL_REQUEST_49913 = {
    (1024, 64): 7.03e-5, (1024, 256): 1.10e-4, (1024, 1024): 1.80e-4, (1024, 2048): 2.71e-4, (1024, 4096): 4.59e-4,
    (1024, 8192): 8.92e-4, (2048, 64): 1.11e-4, (2048, 256): 1.76e-4, (2048, 1024): 2.48e-4, (2048, 2048): 3.44e-4,
    (2048, 4096): 5.40e-4, (2048, 8192): 1.033e-3, (3072, 64): 1.70e-4, (3072, 256): 2.45e-4, (3072, 1024): 3.22e-4,
    (3072, 2048): 4.19e-4,
}  # fmt: skip
STAGES = {"linearize": 2, "sort": 3, "update": 4}
LONG_ROW = 33  # lookups of a row processed by FBGEMM's second update kernel
Popularity = Callable[[TableLookup], IndexStatistics | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_folder())
    ranks = read_dlrm_trace(parser.parse_args().data)
    console = Console(width=140)
    console.print(_trace_table(ranks, "even indices", lambda table: None))
    console.print(_trace_table(ranks, "even but for one row", partial(one_popular_row, count=LONG_ROW)))
    console.print(_trace_table(ranks, "Zipf 1.2", lambda table: zipf(table.rows, 1.2)))
    console.print(_dense_backward_table())


def one_popular_row(table: TableLookup, count: float) -> IndexStatistics:
    """Statistics with one row accessed ``count`` times (more, if uniform lookups are), all others uniformly."""
    share = min(max(count / table.indices, 1 / table.rows), 1.0)
    return IndexStatistics(table.rows, (1.0, table.rows - 1.0), (share, 1 - share), "one popular row")


def _trace_table(ranks: Sequence[RankKernels], title: str, popularity: Popularity) -> Table:
    names = ("forward", *STAGES, "backward")
    table = Table("rank", *names, title=f"dlrm_8xV100, {title}: predicted / measured us", box=None)
    errors: dict[str, list[float]] = {name: [] for name in names}
    for rank in ranks:
        cells = []
        for name, predicted in predicted_stages(rank, popularity).items():
            measured = getattr(rank, name)
            errors[name].append(predicted / measured - 1)
            cells.append(f"{1e6 * predicted:.1f} / {1e6 * measured:.0f}")
        table.add_row(str(rank.rank), *cells)
    table.add_row("MAPE (bias)", *(_summary(values) for values in errors.values()))
    return table


def predicted_stages(rank: RankKernels, popularity: Popularity) -> dict[str, float]:
    """Predicted seconds of every stage, by name."""
    machine = load_machine(MACHINE)
    rank = replace(rank, tables=tuple(replace(each, statistics=popularity(each)) for each in rank.tables))
    forward = gpu_cost_model(machine).estimate([rank.operator("forward")])[0].seconds
    entries = entries_of([rank.operator("backward")])
    stages = [float(each.seconds(entries)[0]) for each in stages_of(entries, reuse_of(entries, machine), machine)]
    return {"forward": forward, **{name: stages[place] for name, place in STAGES.items()}, "backward": sum(stages)}


def _dense_backward_table() -> Table:
    table = Table(
        "lookups", "values", "predicted us", "measured us", "error", title="pull request 49913, A100", box=None
    )
    operators = [
        EmbeddingLookup(BERT_ROWS, dim, count, count, direction="backward", whole_pass=True)
        for count, dim in PULL_REQUEST_49913
    ]
    estimates = gpu_cost_model(load_machine("a100-sxm-40gb")).estimate(operators)
    errors = []
    for ((count, dim), measured), estimate in zip(PULL_REQUEST_49913.items(), estimates, strict=True):
        errors.append(estimate.seconds / measured - 1)
        table.add_row(
            str(count), str(dim), f"{1e6 * estimate.seconds:.0f}", f"{1e6 * measured:.0f}", f"{errors[-1]:+.0%}"
        )
    table.add_row("MAPE (bias)", "", "", "", _summary(errors))
    return table


def _summary(errors: Sequence[float]) -> str:
    return f"{np.mean(np.abs(errors)):.1%} ({np.mean(errors):+.1%})"


if __name__ == "__main__":
    main()
