"""What a prediction costs by the number of GPUs and by that of distinct ranks, without the capture of the model.

python -m lab.bench.ranks --plot docs/ranks.svg
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from costmodel.machines.cluster import load_cluster
from costmodel.pages.charts import picture
from e2e.explain.predictor import Setting, predict
from e2e.parallelism import build, parse_parallel
from e2e.price.host_overheads import load_overheads
from e2e.step.options import StepOptions

MODEL, GPU = "gpt2", "h100-sxm"
# One distinct rank for any number of GPUs; then increasing numbers of stages for the same number of GPUs.
SPREADS = [f"dp={gpus}" for gpus in (8, 64, 512, 4096)] + [
    f"dp={replicas},pp={stages},micro-batches=16" for replicas, stages in ((2048, 2), (1024, 4), (680, 6), (340, 12))
]


@dataclass(frozen=True)
class Row:
    """CPU ``seconds`` to price, simulate and explain, the fastest run; ``events``: actions and tasks of one step."""

    parallel: str
    gpus: int
    distinct_ranks: int
    events: int
    seconds: float
    step_seconds: float


def measure(parallel: str, repeat: int) -> Row:
    """Measure one row of the table."""
    spec = parse_parallel(parallel)
    cluster = load_cluster(GPU, spec.world_size)
    built = build(MODEL, spec, StepOptions(dtype="bfloat16", attention="flash"))
    setting = Setting(cluster.machine, load_overheads())
    seconds = []
    for _ in range(repeat):
        begin = time.process_time()
        result = predict(built.graph, setting, cluster, built.memory)
        seconds.append(time.process_time() - begin)
    events = sum(len(rank.tasks) + sum(1 for _ in rank.actions()) for rank in built.graph.ranks)
    return Row(
        parallel, spec.world_size, len(built.graph.ranks), events, min(seconds), result.prediction.iteration_seconds
    )


def plot(rows: list[Row], path: Path) -> None:
    """Plot seconds over GPUs for one distinct rank, and over distinct ranks for 4,096 GPUs."""
    with picture(path, 9, 3.2, columns=2, sharey=True) as (left, right):
        alone = [row for row in rows if row.distinct_ranks == 1]
        left.plot([row.gpus for row in alone], [row.seconds for row in alone], "o-")
        left.set(xscale="log", xlabel="GPUs (one distinct rank)", ylabel="CPU seconds", ylim=(0, None))
        largest = [row for row in rows if row.gpus >= 4000]
        right.plot([row.distinct_ranks for row in largest], [row.seconds for row in largest], "o-")
        right.set(xlabel="distinct ranks (about 4,096 GPUs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(parallel, arguments.repeat) for parallel in SPREADS]
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        print(
            f"{row.parallel:36}{row.gpus:>6,} GPUs {row.distinct_ranks:>3} distinct {row.events:>9,} events "
            f"{row.seconds:7.2f} s, step {1e3 * row.step_seconds:8.1f} ms"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB, capture included")


if __name__ == "__main__":
    main()
