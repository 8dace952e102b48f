"""Execution of a compiled module with TVM's runtime: named arrays in, named arrays out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import check_file
from fusion.artifact.build_folder import Artifact, check_runnable
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays, to_tvm
from fusion.model.tensor_info import TensorInfo
from schedules.contract.lean_import import lacks_compiler, tvm_threads, uninterrupted

# Prefix of VM functions between kernels: storage, views, shape checks.
_BUILTIN = "vm.builtin."
_LEAST_RUNS = 5
# True once the thread's pool exists: TVM reads its size from the environment at the thread's first kernel.
_SETTLED = threading.local()


class CompiledModel:
    """One module of a build directory in the Relax virtual machine. Inputs must match the interface."""

    def __init__(
        self, machine: Any, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], threads: int | None = None
    ) -> None:
        """``threads``: of the kernels; default: TVM's."""
        self._machine = machine
        self._inputs = inputs
        self._outputs = outputs
        self._main = machine["main"]
        self._lock = threading.Lock()
        self._threads = threads

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs, copied out of TVM's memory. Concurrent calls are serialised: a machine runs one call."""
        arguments = self._arguments(arrays)
        settle_threads(self._threads)
        with self._lock:
            result = self._main(*arguments)
            values = [result] if hasattr(result, "numpy") else list(result)
            return {info.name: value.numpy() for info, value in zip(self._outputs, values, strict=True)}

    def bind(self, arrays: Mapping[str, np.ndarray]) -> Callable[[], Any]:
        """Cheapest call on inputs that are already in TVM's memory, for timing; not thread-safe."""
        arguments = self._arguments(arrays)
        settle_threads(self._threads)
        self._machine.save_function("main", "bound_main", *arguments, include_return=False)
        return self._machine["bound_main"]

    def kernel_durations(self, arrays: Mapping[str, np.ndarray], seconds: float) -> list[tuple[str, list[float]]]:
        """(Symbol, durations in seconds of all runs) of every kernel call, in execution order.

        Runs back to back for ``seconds``. A duration includes a few microseconds of clock overhead.
        """
        arguments, clock = self._arguments(arrays), time.perf_counter
        settle_threads(self._threads)
        calls: list[tuple[str, float, float]] = []
        started = 0.0

        def instrument(_: Any, symbol: str, before: bool, *__: Any) -> None:
            nonlocal started
            ended = clock()
            if not before:
                if not symbol.startswith(_BUILTIN):
                    calls.append((symbol, started, ended))
                return
            started = clock()

        runs: list[list[tuple[str, float]]] = []
        with self._lock:
            self._machine.set_instrument(instrument)
            try:
                end = clock() + seconds
                while len(runs) <= _LEAST_RUNS or clock() < end:
                    calls.clear()
                    self._main(*arguments)
                    runs.append([(symbol, ended - started) for symbol, started, ended in calls])
            finally:
                self._machine.set_instrument(None)
        symbols = [symbol for symbol, _ in runs[0]]
        same = [run for run in runs[1:] if [symbol for symbol, _ in run] == symbols]
        return [(symbol, [run[index][1] for run in same]) for index, symbol in enumerate(symbols)]

    def _arguments(self, arrays: Mapping[str, np.ndarray]) -> list[Any]:
        return [to_tvm(arrays[info.name]) for info in self._inputs]


def load_compiled(artifact: Artifact, name: str, threads: int) -> CompiledModel:
    """Load the module ``name`` of a build to run on ``threads`` threads. Raises ``InputError``.

    Only TVM's runtime library is loaded, unless this process already loaded the compiler.
    """
    library = artifact.library(name)
    if library is None:
        raise InputError(f"{artifact.directory}: this build has no {name}; tune the model again")
    check_runnable(artifact)
    with uninterrupted(), _runtime_alone():
        import tvm

    check_runnable(artifact, tvm_version=tvm.__version__)
    settle_threads(threads)
    return load_library(library, artifact.manifest.inputs, artifact.manifest.outputs, threads)


def load_library(
    library: Path, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], threads: int | None = None
) -> CompiledModel:
    """Load a shared library exported by ``tvm.relax.build``. Raises ``InputError``."""
    import tvm
    from tvm.runtime.vm import VirtualMachine

    try:
        check_file(library, "library")
        machine = VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        return CompiledModel(machine, inputs, outputs, threads)
    except (RuntimeError, AttributeError, ValueError, OSError) as error:
        raise InputError(f"{library}: cannot be loaded: {sentence(error)}; tune the model again") from error


def settle_threads(count: int | None) -> None:
    """Create the thread pool of TVM for the calling thread with ``count`` threads; an existing pool is unchanged."""
    if count is not None and not getattr(_SETTLED, "done", False):
        with tvm_threads(count):
            threads_of_tvm()
        _SETTLED.done = True


def threads_of_tvm() -> int:
    """Number of threads that TVM uses for this thread; fixed by the first call."""
    from tvm_ffi import get_global_func

    found = get_global_func("runtime.NumThreads")
    return int(found())


def require_compiler() -> None:
    """Load TVM; raise ``InputError`` if this process loaded it without its compiler, which cannot be added later."""
    if lacks_compiler():
        raise InputError(
            "this process loaded a tuned model with TVM's runtime alone, without its compiler: analyze and tune before "
            "the first load, or in another process"
        )
    with uninterrupted():
        import tvm  # noqa: F401


@contextmanager
def _runtime_alone() -> Iterator[None]:
    """Load TVM without its compiler in this context. Child processes do not inherit the setting: they may compile."""
    name = "TVM_USE_RUNTIME_LIB"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
