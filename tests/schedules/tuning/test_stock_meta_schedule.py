"""Stock MetaSchedule tunes a module. Real, with few trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.base.errors import TuningError
from costmodel.operators.layers import Conv2d, Dense, Epilogue
from schedules.contract.cpu_target import host_target
from schedules.contract.operator_reference import reference
from schedules.contract.template import Parameters

CPU = host_target(threads=2)


def test_failed_builds_and_runs_are_counted_not_raised():
    from schedules.contract.operator_workload import workload
    from schedules.tuning.stock_meta_schedule import InProcessMeasurer

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
