"""Our cost model ranks MetaSchedule's candidates; stock MetaSchedule tunes a module. Real, with few trials."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from costmodel.base.errors import TuningError
from costmodel.cost_model import Estimate, Measurement
from costmodel.operators.layers import Conv2d, Dense, Epilogue
from schedules.contract.cpu_target import host_target
from schedules.contract.operator_reference import reference
from schedules.contract.template import Config, Parameters
from schedules.measuring.kernel_verification import random_parameters

CPU = host_target(threads=2)
CONV = Conv2d(1, 8, 14, 14, 16, (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(bias=True, activation="relu"))


class SmallTiles:
    """Predicts a time that grows with the sum of the decisions, and remembers what it was asked and told."""

    def __init__(self) -> None:
        self.predicted: list[Config] = []
        self.measured: list[Measurement] = []
        self.saved: list[Path] = []

    @staticmethod
    def cost(config: Config) -> float:
        return 1e-6 * (1 + sum(value for knob, value in config.items() if knob.startswith("decision")))

    def predict(self, operator: Any, configs: Sequence[Config]) -> list[Estimate]:
        self.predicted += configs
        return [Estimate(self.cost(config), 0.0, 1.0, "compute") for config in configs]

    def update(self, measurements: Iterable[Measurement]) -> None:
        self.measured += measurements

    def save(self, directory: Path) -> None:
        self.saved.append(directory)

    def load(self, directory: Path) -> None:
        self.saved.remove(directory)


@pytest.mark.thorough
def test_tuning_a_kernel_asks_the_model_follows_it_and_teaches_it(tmp_path: Path):
    import tvm
    from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

    from schedules.tuning.meta_schedule import CostModelAdapter, tune_kernel

    model = SmallTiles()
    strategy = EvolutionarySearch(population_size=48, genetic_num_iters=2, init_min_unmeasured=16, eps_greedy=0.0)
    kernel = tune_kernel(CONV, CPU, CostModelAdapter(model, [CONV]), 8, tmp_path, strategy=strategy, batch=8)
    assert (kernel.measured, kernel.build_failures, kernel.run_failures) == (8, 0, 0)
    # Asked about many, it had those measured that it found fast.
    assert len(model.predicted) > 48 and len(model.measured) == 8
    costs = [model.cost(config) for config in model.predicted]
    chosen = [model.cost(measurement.config) for measurement in model.measured]
    assert np.mean(chosen) < np.quantile(costs, 0.25)
    assert all(measurement.operator == CONV for measurement in model.measured)
    assert kernel.seconds == pytest.approx(min(measurement.seconds for measurement in model.measured), rel=0.2)
    # The kernel is right.
    rng = np.random.default_rng(0)
    data = rng.standard_normal(CONV.input_shape, dtype=np.float32)
    (parameters,) = random_parameters(CONV, rng)
    arrays = (data, parameters.weight, parameters.bias, np.zeros(CONV.output_shape, np.float32))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(kernel.module, target=CPU.tvm_target())["main"](*tensors)
    np.testing.assert_allclose(tensors[-1].numpy(), reference(CONV, data, [parameters]), atol=1e-4)


def candidate(*decided: Any, kinds: Sequence[str] = ("Sample", "Sample")) -> Any:
    insts = [SimpleNamespace(kind=SimpleNamespace(name=kind)) for kind in kinds]
    numbered = {id(inst): inst for inst in insts}
    lookup = dict(zip(numbered, decided, strict=False))

    class Decisions:
        def __contains__(self, inst: Any) -> bool:
            return id(inst) in lookup

        def __getitem__(self, inst: Any) -> Any:
            return lookup[id(inst)]

    return SimpleNamespace(sch=SimpleNamespace(trace=SimpleNamespace(insts=insts, decisions=Decisions())))


def test_scores_are_relative_to_the_best_and_higher_is_better():
    from schedules.contract.operator_workload import workload
    from schedules.tuning.meta_schedule import CostModelAdapter

    adapter = CostModelAdapter(SmallTiles(), [CONV])._inst  # the Python object behind TVM's, to call it with fakes
    context = SimpleNamespace(mod=workload(CONV))
    scores = adapter.predict(context, [candidate([1, 2], 0), candidate([3, 4], 0)])
    assert scores.dtype == np.float64 and scores.tolist() == [1.0, 0.5]  # 1 + 3 against 1 + 7
    other = SimpleNamespace(mod=workload(Dense(1, 4, 4)))
    assert adapter.predict(other, [candidate([9, 9], 0)] * 2).tolist() == [1.0, 1.0]


def test_sketches_and_decisions_are_knobs_and_failures_teach_nothing():
    from schedules.contract.operator_workload import workload
    from schedules.tuning.meta_schedule import CostModelAdapter

    model = SmallTiles()
    adapter = CostModelAdapter(model, [CONV])._inst  # the Python object behind TVM's, to call it with fakes
    candidates = [candidate([1, 2], 5), candidate([4], kinds=("Sample", "Vectorize")), candidate([7, 7], 7)]
    results = [SimpleNamespace(run_secs=seconds) for seconds in ([3e-3, 1e-3, 2e-3], [1e-3], None)]
    adapter.update(SimpleNamespace(mod=workload(CONV)), candidates, results)
    found = [(dict(measurement.config), measurement.seconds) for measurement in model.measured]
    sketches = [config.pop("sketch") for config, _ in found]
    assert found == [({"decision00.0": 1, "decision00.1": 2, "decision01.0": 5}, 2e-3), ({"decision00.0": 4}, 1e-3)]
    assert sketches == [12938, 20999]  # by their instructions: a model saved by another process means the same sketches
    adapter.save("/somewhere")
    adapter.load("/somewhere")
    assert model.saved == []


def test_failed_builds_and_runs_are_counted_not_raised():
    from schedules.contract.operator_workload import workload
    from schedules.tuning.in_process_measurer import InProcessMeasurer

    measurer = InProcessMeasurer()
    result = measurer.build(workload(Dense(1, 4, 4)), "no such target")
    assert result.error_msg and len(measurer.build_failures) == 1
    built = measurer.build(workload(Dense(1, 4, 4)), CPU.tvm_target())
    outcome = measurer.run(built.artifact_path, [])  # the kernel wants three arguments
    assert outcome.error_msg and len(measurer.run_failures) == 1
    assert measurer.measured == 2


def small_network() -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    from tvm import relax

    rng = np.random.default_rng(0)
    first = rng.standard_normal((16, 8, 3, 3), dtype=np.float32) / 8
    second = rng.standard_normal((8, 16, 1, 1), dtype=np.float32) / 4
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 14, 14), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(relax.op.nn.conv2d(x, relax.const(first), padding=(1, 1))))
            output = builder.emit_output(relax.op.nn.conv2d(hidden, relax.const(second)))
        builder.emit_func_output(output)
    return builder.get(), rng.standard_normal((1, 8, 14, 14), dtype=np.float32), first, second


@pytest.mark.thorough
def test_stock_meta_schedule_tunes_a_module_and_resumes(tmp_path: Path):
    import tvm
    from tvm import relax

    from schedules.tuning.stock_meta_schedule import task_reports, tune_stock

    mod, data, first, second = small_network()
    lines: list[str] = []
    tune_stock(mod, CPU, 2, tmp_path, lines.append, strategy="replay-trace")
    assert lines[-1] == "MetaSchedule: 2 tasks, 4 candidates, 0 failed to build, 0 to run"
    records = (tmp_path / "database_tuning_record.json").read_text()
    executable = tune_stock(mod, CPU, 2, tmp_path, lines.append, strategy="replay-trace")
    assert (tmp_path / "database_tuning_record.json").read_text() == records
    assert [report.trials for report in task_reports(tmp_path).values()] == [2, 2]
    output = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
    hidden = reference(
        Conv2d(1, 8, 14, 14, 16, (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(activation="relu")),
        data,
        [Parameters(weight=first)],
    )
    expected = reference(Conv2d(1, 16, 14, 14, 8, (1, 1)), hidden, [Parameters(weight=second)])
    np.testing.assert_allclose(output, expected, atol=1e-4)


def test_a_module_without_tasks_is_an_error(tmp_path: Path):
    from tvm import relax

    from schedules.tuning.stock_meta_schedule import tune_stock

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    with pytest.raises(TuningError, match="nothing to tune"):
        tune_stock(builder.get(), CPU, 2, tmp_path)


@pytest.mark.thorough
def test_the_example_learns_from_one_layer_and_ranks_the_next(tmp_path: Path):
    """What it prints: nothing known, then opinions; what it keeps can be loaded."""
    from costmodel.cpu.learned_residual import ResidualModel
    from costmodel.cpu.roofline import RooflineModel
    from costmodel.machines.machine_file import load_machine

    options = ["--machine", "toy", "--trials", "12", "--records", str(tmp_path)]
    command = [sys.executable, "examples/meta_schedule_cost_model.py", *options]
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[1].endswith("knows nothing to tell them apart yet")
    second = next(index for index, line in enumerate(lines) if line.startswith("3x3, 32"))
    assert "rank correlation of predicted and measured times" in lines[second + 1]
    assert sum(line.startswith("12 measured, best") for line in lines) == 2
    model = ResidualModel(RooflineModel(load_machine("toy"), 2), key=CPU.key)
    model.load(tmp_path / "cost_model")
    assert lines[-1] == f"the model has learned from {len(model.measurements)} candidates" and len(lines) > 8
