"""A whole Relax module tuned by stock MetaSchedule: the peer ``tvm-metaschedule``, without our code.

The flow is that of ``relax.pipeline.static_shape_tuning_pipeline`` with its advice for CPUs (weight layouts are changed
at compile time), one task after the other so that an interrupted run can continue. Failed builds and runs are counted
and reported: otherwise they would make the peer look slow.

Builder and runner are in this process. MetaSchedule's own ``LocalBuilder`` starts new processes for every batch, and
each imports ``tvm.s_tir.tensor_intrin`` first. That takes 20 s and more, because TVMScript inspects the whole stack for
every intrinsic; on busy cores it exceeds the time limit of a build, and all candidates of the batch are lost with only
a line in a log. LLVM needs many minutes for some candidates of a search (large bodies, fully unrolled). So each build
runs in a forked child, which is cheap (no import, no copy of the module), and is killed at its limit.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import select
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.utils import derived_object
from tvm.relax import transform
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common, run_evaluator_common

from costmodel.base.errors import OutputError, TuningError
from costmodel.base.output_files import write_whole
from costmodel.base.process import end_with_parent
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.tvm_import import tvm_threads

# Limit of MetaSchedule's own LocalBuilder.
BUILD_SECONDS = 30.0


def build_bounded(module: tvm.IRModule, target: tvm.target.Target, seconds: float = BUILD_SECONDS) -> Any:
    """``tvm.compile(module)``, loaded from a library; raises ``TuningError`` on failure or after ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="candidate-") as folder:
        library = Path(folder) / "candidate.so"
        failure = _in_child(lambda: tvm.compile(module, target=target).export_library(str(library)), seconds)
        if failure is not None:
            raise TuningError(failure)
        return tvm.runtime.load_module(str(library))


def _in_child(work: Any, seconds: float) -> str | None:
    """Run ``work`` in a forked child; return an error message, or None on success."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _report(work, write_end)
    os.close(write_end)
    try:
        return _await(child, read_end, seconds)
    finally:
        os.close(read_end)


def _report(work: Any, write_end: int) -> None:
    """Run the child, which never returns; its message is the error, or ``done``."""
    word = "done"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    end_with_parent()
    try:
        work()
    except BaseException as error:
        word = str(error)[-2000:] or type(error).__name__
    finally:
        os.write(write_end, word.encode())
        os._exit(0)


def _await(child: int, read_end: int, seconds: float) -> str | None:
    readable: list[int] = []
    try:
        readable, _, _ = select.select([read_end], [], [], seconds)
    finally:  # also on Ctrl-C
        if not readable:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not readable:
        return f"compiling takes more than {seconds:g} s"
    word = os.read(read_end, 4096).decode(errors="replace")
    os.waitpid(child, 0)
    if word == "done":
        return None
    return word or "the compiler crashed"


def import_tensor_intrinsics() -> None:
    """Import ``tvm.s_tir.tensor_intrin``, in 3 s instead of 20.

    ``inspect.getmodule`` searches all modules for every frame of the import machinery; TVMScript, which inspects the
    stack once per intrinsic, does not use the result.
    """
    with _without_module_lookup():
        import tvm.s_tir.tensor_intrin  # noqa: F401


def log_to_files_only() -> None:
    """Keep MetaSchedule's messages off the terminal: its console handler uses the level set here.

    Its log files, in the directory of the records, are complete.
    """
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    logger.setLevel(logging.CRITICAL)
    logger.handlers.clear()  # created again for every search, which fails on handlers without a name


@contextmanager
def _without_module_lookup() -> Iterator[None]:
    original = inspect.getmodule
    inspect.getmodule = lambda object, _filename=None: None  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = original


class InProcessMeasurer:
    """A builder and a runner that share built modules. Failure messages of builds and runs are kept separately."""

    def __init__(self, evaluator: ms.runner.EvaluatorConfig | None = None) -> None:
        self.evaluator = evaluator or ms.runner.EvaluatorConfig()
        self.build_failures: list[str] = []
        self.run_failures: list[str] = []
        self.measured = 0
        self._modules: dict[str, Any] = {}
        self._names = itertools.count()
        self.builder = _Builder(self)
        self.runner = _Runner(self)
        # The defaults without RemoveBuildArtifact, which would delete the directory of the artifact's supposed path.
        self.callbacks = [ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()]

    def build(self, module: tvm.IRModule, target: tvm.target.Target) -> ms.builder.BuilderResult:
        """Build one candidate; the artifact's path is a key of this object."""
        self.measured += 1
        try:
            module = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
            built = build_bounded(module, target)
        except Exception as error:
            self.build_failures.append(str(error))
            return ms.builder.BuilderResult(None, str(error) or type(error).__name__)
        name = f"in-process-{next(self._names)}"
        self._modules[name] = built
        return ms.builder.BuilderResult(name, None)

    def run(self, name: str, arguments: Sequence[Any]) -> ms.runner.RunnerResult:
        """Time one built candidate on random arguments and discard it."""
        built = self._modules.pop(name)
        fill = tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")
        try:
            device = tvm.cpu()
            tensors = alloc_argument_common(fill, device, [info.as_json() for info in arguments], 1)
            seconds = run_evaluator_common(built, device, self.evaluator, tensors)
        except Exception as error:
            self.run_failures.append(str(error))
            return ms.runner.RunnerResult(None, str(error) or type(error).__name__)
        return ms.runner.RunnerResult(seconds, None)


def _Builder(measurer: InProcessMeasurer) -> Any:
    @derived_object
    class Builder(ms.builder.PyBuilder):
        def build(self, build_inputs: Sequence[Any]) -> list[Any]:
            return [measurer.build(each.mod, each.target) for each in build_inputs]

    return Builder()


def _Runner(measurer: InProcessMeasurer) -> Any:
    @derived_object
    class Future(ms.runner.PyRunnerFuture):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self._result = result

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            return self._result

    @derived_object
    class Runner(ms.runner.PyRunner):
        def run(self, runner_inputs: Sequence[Any]) -> list[Any]:
            return [Future(measurer.run(each.artifact_path, each.args_info)) for each in runner_inputs]

    return Runner()


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
