"""Tuned models as Python functions on arrays, run by TVM's runtime. :func:`load` opens a build written by ``tune``;
``python -m fusion run`` runs it on the arrays of a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.input_files import check_file
from costmodel.base.output_files import check_outputs
from costmodel.base.process import threads_to_use
from fusion.model.build_folder import MODEL, Artifact, check_runnable, describe_inputs, read_profiles
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays, TensorInfo, check_arrays, read_npz, to_tvm, write_npz
from schedules.contract.tvm_import import lacks_compiler, tvm_threads, uninterrupted

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


@dataclass(frozen=True, eq=False)
class LoadedProfile:
    """A network for one set of input shapes, with names, shapes and dtypes of its inputs and outputs in order."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    model: CompiledModel


class TunedModel:
    """A tuned model, returned by :func:`load`. Thread-safe: calls of one profile are serialised.

    - ``profiles``: one per set of input shapes, in the order of the request
    - ``inputs``, ``outputs``: those of the first profile
    - ``threads``: number of threads it was loaded for
    """

    def __init__(self, folder: Path, profiles: Sequence[LoadedProfile], threads: int) -> None:
        self.folder = folder
        self.profiles = tuple(profiles)
        self.threads = threads

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Names, shapes and dtypes of the first profile's inputs."""
        return self.profiles[0].inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Names, shapes and dtypes of the first profile's outputs."""
        return self.profiles[0].outputs

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Return the output as a NumPy array, or a dict of outputs by name if there are several.

        Inputs are given by position, by name, or as one dict (names need not be identifiers). Raises ``InputError`` for
        invalid arrays, as :meth:`run` does.
        """
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            given = {**arrays[0], **named}
        else:
            given = {**self._by_name(arrays), **named}
        outputs = self.run(given)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def run(self, arrays: Mapping[str, Any], source: str = "") -> Arrays:
        """Return a dict of outputs by name for a mapping of inputs by name.

        Inputs are NumPy arrays, or CPU tensors of other libraries (DLPack). The latter are used in place if they are
        contiguous and aligned to 64 bytes; NumPy arrays, mostly not aligned so, are copied. Outputs are owned by the
        caller. Raises ``InputError`` with ``source`` (default: the folder) and the input that is missing, unknown, or
        of another shape or dtype; nothing is converted. The profile is selected by the input shapes; if no profile
        matches, the error lists them.
        """
        source = source or str(self.folder)
        if not isinstance(arrays, Mapping):
            raise InputError(
                f"{source}: run() takes a dict of inputs by name, not {type(arrays).__name__}; call the model itself "
                "with arrays: model(array)"
            )
        views = {name: _view(name, each, source) for name, each in arrays.items()}
        profile = self._fitting(views, source)
        checked = check_arrays(views, profile.inputs, source)
        return profile.model(
            {name: arrays[name] if _is_foreign(arrays[name]) else each for name, each in checked.items()}
        )

    def _fitting(self, arrays: Mapping[str, np.ndarray], source: str) -> LoadedProfile:
        """Profile for arrays of these shapes.

        With one profile, or with names other than those of the inputs, the first profile is returned; the check of the
        arrays reports the error.
        """
        if len(self.profiles) == 1 or arrays.keys() != {info.name for info in self.inputs}:
            return self.profiles[0]
        for profile in self.profiles:
            if all(arrays[info.name].shape == info.shape for info in profile.inputs):
                return profile
        given = describe_inputs([TensorInfo(info.name, arrays[info.name].shape, info.dtype) for info in self.inputs])
        known = "; ".join(describe_inputs(profile.inputs) for profile in self.profiles)
        raise InputError(
            f"{source}: {given} fits no profile; the model was tuned for {known}; "
            "pad to one of these, or tune for this shape too"
        )

    def _by_name(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        names = [info.name for info in self.inputs]
        if len(arrays) > len(names):
            raise InputError(f"{self.folder}: {len(arrays)} arrays given; the model takes {', '.join(names)}")
        return dict(zip(names, arrays, strict=False))

    def __repr__(self) -> str:
        profiles = "; ".join(f"({_listed(each.inputs)}) -> ({_listed(each.outputs)})" for each in self.profiles)
        return f"<TunedModel {self.folder} {profiles}, {self.threads} threads>"


def load(folder: str | os.PathLike[str], threads: int | None = None) -> TunedModel:
    """Load the tuned model in ``folder``, with only TVM's runtime, without its compiler.

    ``threads``: of the kernels (default: the number it was tuned for, limited by the available cores). TVM fixes the
    number at its first use. Networks of all profiles are loaded, each with its weights.

    Raises ``InputError``: build incomplete (names the file), other CPU or TVM version, or a number of threads other
    than that of TVM in this process.

    >>> model = load("build/")                          # doctest: +SKIP
    >>> model(images).shape                             # doctest: +SKIP
    (1, 1000)
    """
    artifacts = read_profiles(Path(folder))
    wanted = threads_to_use(threads, artifacts[0].manifest.threads)
    if wanted < 1:
        raise InputError(f"--threads {wanted}: must be 1 or more")
    models = [load_compiled(artifact, MODEL, wanted) for artifact in artifacts]
    if threads is not None and (running := threads_of_tvm()) != threads:
        raise InputError(
            f"--threads {threads}: TVM runs with {running} threads in this process; load it in another one"
        )
    loaded = zip(artifacts, models, strict=True)
    profiles = [LoadedProfile(each.manifest.inputs, each.manifest.outputs, model) for each, model in loaded]
    return TunedModel(Path(folder), profiles, wanted)


def _listed(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(f"{info.name}: {info.dtype}{list(info.shape)}" for info in tensors)


def _is_foreign(array: Any) -> bool:
    """True if ``array`` is a tensor of another library that supports DLPack."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def _view(name: str, array: Any, source: str) -> np.ndarray:
    """``array`` as a NumPy array, without a copy if possible."""
    if not _is_foreign(array):
        return np.asarray(array)
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{source}: input '{name}' cannot be read in this CPU's memory: {reason}; give it as a NumPy array"
        ) from error


@dataclass(frozen=True)
class RunResult:
    """Result of ``run``; ``seconds``: the first call without loading (``compare`` measures latency)."""

    output: str
    outputs: tuple[TensorInfo, ...]
    seconds: float
    threads: int


def run_command(build_dir: Path, input_npz: Path, output_npz: Path, threads: int | None = None) -> RunResult:
    """Run the model of ``build_dir`` on the named arrays of ``input_npz`` and write its named outputs.

    ``threads`` defaults to the number it was tuned for, limited by the available cores. Raises ``InputError`` or
    ``OutputError``.
    """
    check_outputs({"--output": output_npz}, {"--input": input_npz})
    model, arrays = load(build_dir, threads), read_npz(input_npz)
    started = time.perf_counter()
    outputs = model.run(arrays, source=str(input_npz))
    seconds = time.perf_counter() - started
    write_npz(output_npz, outputs)
    described = tuple(TensorInfo(name, array.shape, str(array.dtype)) for name, array in outputs.items())
    return RunResult(str(output_npz), described, seconds, model.threads)


def render_run(result: RunResult) -> str:
    """Format the outputs as text, one per line."""
    lines = [f"{info.name}: {info.dtype}{list(info.shape)}" for info in result.outputs]
    return "\n".join([*lines, f"written to {result.output}"])
