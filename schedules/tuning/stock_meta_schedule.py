"""A whole Relax module tuned by stock MetaSchedule: the peer ``tvm-metaschedule``, without our code.

The flow is that of ``relax.pipeline.static_shape_tuning_pipeline`` with its advice for CPUs (weight layouts are changed
at compile time), one task after the other so that an interrupted run can continue. Failed builds and runs are counted
and reported: otherwise they would make the peer look slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import transform
from tvm.s_tir import meta_schedule as ms

from costmodel.base.errors import OutputError, TuningError
from costmodel.base.output_files import write_whole
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.tvm_import import tvm_threads
from schedules.tuning.in_process_measurer import (
    InProcessMeasurer,
    import_tensor_intrinsics,
    log_to_files_only,
)

DONE = "tasks.json"
_BATCH = 64  # MetaSchedule's default


@dataclass(frozen=True)
class TaskReport:
    """Statistics of tuning one task. In a small space fewer than ``trials`` candidates may be ``measured``.

    ``weight``: number of calls in the module.
    """

    name: str
    weight: int
    trials: int
    measured: int
    build_failures: int
    run_failures: int
    best_seconds: float | None


def tune_stock(
    mod: tvm.IRModule,
    cpu: CpuTarget,
    trials_per_task: int,
    directory: Path,
    progress: Callable[[str], None] | None = None,
    *,
    strategy: str = "evolutionary",
) -> Any:
    """Tune ``mod`` (static shapes, weights as constants) with ``trials_per_task`` for every task, and build it.

    Records and the list of finished tasks are kept in ``directory``; a second call continues from there. ``progress``
    receives lines of text. Raises ``TuningError`` if no task can be extracted.
    """
    say = progress or (lambda text: None)
    target = cpu.tvm_target()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    import_tensor_intrinsics()
    prepared = _prepare(mod, target)
    with tvm_threads(cpu.threads):
        reports = _tune_tasks(prepared, cpu, trials_per_task, directory, say, strategy)
    say(_summary(reports))
    return _build(prepared, target, directory)


def task_reports(directory: Path) -> dict[str, TaskReport]:
    """Finished tasks of earlier calls by the structural hash of their function."""
    try:
        content = json.loads((Path(directory) / DONE).read_text(encoding="utf-8"))
        return {key: TaskReport(**report) for key, report in content.items()}
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _prepare(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Fused TIR functions, with constant arguments marked as layout-free."""
    passes = [
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        relax.pipeline.zero_pipeline(),
        transform.DeadCodeElimination(),
        transform.AttachAttrLayoutFreeBuffers(),
    ]
    with target:
        return tvm.transform.Sequential(passes)(mod)


def _tune_tasks(
    mod: tvm.IRModule, cpu: CpuTarget, trials: int, directory: Path, say: Callable[[str], None], strategy: str
) -> list[TaskReport]:
    """Tune the unfinished tasks one after the other: with equal trials for every task, MetaSchedule's own task
    scheduler would only change the order.
    """
    tasks = ms.relax_integration.extract_tasks(mod, cpu.tvm_target())
    if not tasks:
        raise TuningError(
            "MetaSchedule finds nothing to tune in the module; give a model with convolutions or products"
        )
    database = ms.database.JSONDatabase(work_dir=str(directory))
    cost_model = ms.cost_model.XGBModel(num_tuning_cores=cpu.threads)
    done = task_reports(directory)
    reports = []
    for number, task in enumerate(sorted(tasks, key=lambda task: -task.weight), 1):
        key = str(tvm_ffi.structural_hash(task.dispatched[0]))
        missing = trials - (done[key].trials if key in done else 0)
        if missing > 0:
            say(f"MetaSchedule: task {number} of {len(tasks)}, {task.task_name}, {missing} trials")
            report = _tune_task(task, cpu, missing, database, cost_model, directory, strategy)
            done[key] = _added(done.get(key), report)
            _keep(directory / DONE, done)
        reports.append(done[key])
    return reports


def _tune_task(
    task: Any, cpu: CpuTarget, trials: int, database: Any, cost_model: Any, directory: Path, strategy: str
) -> TaskReport:
    measurer = InProcessMeasurer()
    log_to_files_only()
    contexts, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(
        [task], work_dir=str(directory), strategy=strategy, num_threads=cpu.threads, seed=0
    )
    ms.tune.tune_tasks(
        tasks=contexts,
        task_weights=weights,
        work_dir=str(directory),
        max_trials_global=trials,
        num_trials_per_iter=min(_BATCH, trials),
        builder=measurer.builder,
        runner=measurer.runner,
        measure_callbacks=measurer.callbacks,
        database=database,
        cost_model=cost_model,
    )
    best = database.get_top_k(database.commit_workload(contexts[0].mod), 1)
    seconds = min((float(value) for value in best[0].run_secs), default=None) if best else None
    return TaskReport(
        name=task.task_name,
        weight=int(task.weight),
        trials=trials,
        measured=measurer.measured,
        build_failures=len(measurer.build_failures),
        run_failures=len(measurer.run_failures),
        best_seconds=seconds,
    )


def _added(before: TaskReport | None, now: TaskReport) -> TaskReport:
    if before is None:
        return now
    return replace(
        now,
        trials=before.trials + now.trials,
        measured=before.measured + now.measured,
        build_failures=before.build_failures + now.build_failures,
        run_failures=before.run_failures + now.run_failures,
    )


def _keep(path: Path, done: Mapping[str, TaskReport]) -> None:
    try:
        write_whole(path, json.dumps({key: asdict(report) for key, report in done.items()}, indent=1))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; choose another place, or free some") from error


def _summary(reports: Sequence[TaskReport]) -> str:
    measured = sum(report.measured for report in reports)
    builds, runs = (sum(getattr(report, name) for report in reports) for name in ("build_failures", "run_failures"))
    untuned = sum(report.best_seconds is None for report in reports)
    text = f"MetaSchedule: {len(reports)} tasks, {measured} candidates, {builds} failed to build, {runs} to run"
    return text + (f"; {untuned} tasks have no schedule" if untuned else "")


def _build(mod: tvm.IRModule, target: tvm.target.Target, directory: Path) -> Any:
    """Build the tuned module: weights in their final layouts, functions without a record scheduled by DLight."""
    with target:  # the constructor of MetaScheduleApplyDatabase reads it
        passes = [
            transform.MetaScheduleApplyDatabase(str(directory)),
            transform.SplitLayoutRewritePreproc(),
            transform.LiftTransformParams(),
            transform.FoldConstant(),
            transform.DeadCodeElimination(),
        ]
        mod = tvm.transform.Sequential(passes)(mod)
    return relax.build(mod, target)
