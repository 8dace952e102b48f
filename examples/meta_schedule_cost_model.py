"""TVM's own MetaSchedule with this project's cost model: its search and its schedules, our ranking of candidates.

    python examples/meta_schedule_cost_model.py [--machine NAME] [--trials 16] [--records DIRECTORY]

Two small convolutions are tuned one after the other with one model (a roofline corrected by trees that learn from what
is measured). Each line says how the model's order of a batch agreed with the times measured then, before it learned
them: the first batch of the second layer is ranked by what the first one taught. Takes under a minute on two cores;
needs the extra ``fusion``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

from costmodel.cost_model import Measurement
from costmodel.cpu.learned_residual import ResidualModel
from costmodel.cpu.roofline import RooflineModel
from costmodel.operators.layers import Conv2d, Epilogue
from fusion.analysis.target_machine import machine_for
from schedules.contract.cpu_target import host_target
from schedules.tuning.meta_schedule import CostModelAdapter, tune_kernel

RELU = Epilogue(bias=True, activation="relu")
LAYERS = {
    "3x3, 16 to 32 channels, 14x14": Conv2d(1, 16, 14, 14, 32, (3, 3), padding=(1, 1, 1, 1), epilogue=RELU),
    "3x3, 32 to 32 channels, 14x14": Conv2d(1, 32, 14, 14, 32, (3, 3), padding=(1, 1, 1, 1), epilogue=RELU),
}
BATCH = 8


class Watched(ResidualModel):
    """Says of every batch how right the model was, before it learns from it."""

    def update(self, measurements: Iterable[Measurement]) -> None:
        batch = list(measurements)
        if len(batch) > 1:
            estimates = [self.predict(each.operator, [each.config])[0] for each in batch]
            print(f"  {len(batch)} candidates: {agreement([each.seconds for each in estimates], batch)}")
        super().update(batch)


def agreement(predicted: list[float], batch: list[Measurement]) -> str:
    """Rank correlation of predicted and measured times, as text."""
    if np.ptp(predicted) == 0:
        return "the model knows nothing to tell them apart yet"
    correlation = spearmanr(predicted, [each.seconds for each in batch]).statistic
    return f"rank correlation of predicted and measured times {correlation:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="name or YAML file of a machine; default: this CPU, measured on first use")
    parser.add_argument("--trials", type=int, default=16, help="candidates measured of each layer")
    parser.add_argument("--records", type=Path, help="where MetaSchedule's records and the model are kept")
    given = parser.parse_args()
    cpu = host_target(threads=2)
    model = Watched(RooflineModel(machine_for(given.machine, cpu.threads, print), cpu.threads), key=cpu.key)
    # Any tuner of MetaSchedule takes it: tune_kernel passes it to tune_tir as `cost_model`.
    adapter = CostModelAdapter(model, list(LAYERS.values()))
    # MetaSchedule's own sizes (512 candidates in 4 generations) take longer than measuring does here.
    strategy = EvolutionarySearch(population_size=64, genetic_num_iters=2, init_min_unmeasured=16)
    with tempfile.TemporaryDirectory() as scratch:
        records = given.records or Path(scratch)
        for number, (name, operator) in enumerate(LAYERS.items()):
            print(name)
            kernel = tune_kernel(
                operator, cpu, adapter, given.trials, records / f"layer{number}", strategy=strategy, batch=BATCH
            )
            print(f"  {kernel.measured} measured, best {1e6 * kernel.seconds:.1f} us")
        adapter.save(str(records / "cost_model"))
    print(f"the model has learned from {len(model.measurements)} candidates")


if __name__ == "__main__":
    main()
