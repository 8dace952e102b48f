"""MetaSchedule's builder (in forks, with a time limit), runner (in this process) and imports, without long waits.

MetaSchedule's own ``LocalBuilder`` starts new processes for every batch, and each imports ``tvm.s_tir.tensor_intrin``
first. That takes 20 s and more, because TVMScript inspects the whole stack for every intrinsic; on busy cores it
exceeds the time limit of a build, and all candidates of the batch are lost with only a line in a log.

LLVM needs many minutes for some candidates of a search (large bodies, fully unrolled). So each build runs in a forked
child, which is cheap (no import, no copy of the module), and is killed at its limit.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import select
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common, run_evaluator_common

from costmodel.base.errors import TuningError
from costmodel.base.process import end_with_parent

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
