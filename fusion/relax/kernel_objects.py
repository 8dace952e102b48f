"""Machine code of a module's kernels, each compiled once, in parallel.

Nearly all of the time of a build is spent on the kernels, and TVM compiles them one after the other. Most kernels of
the next build are those of the previous one: it differs by a fusion, a few configurations, or one more output. So every
kernel becomes a separate object file, made by a pool of threads (TVM and LLVM do not hold Python's lock while they
compile), and is linked into every library that needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from costmodel.base.cores import usable_cores
from costmodel.base.errors import OutputError
from costmodel.base.termination import Terminated
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import pass_context, tir_pipeline

# TVM joins the names of all operators fused into a kernel, and a file name may have at most 255 bytes.
_LONGEST_NAME = 96


@dataclass(frozen=True, eq=False)
class KernelObject:
    """``function`` compiled into the object file ``path`` under the name ``symbol``."""

    function: tirx.PrimFunc
    symbol: str
    path: Path


class KernelObjects:
    """Store of object files for one CPU in ``directory``, which is kept afterwards. Thread-safe."""

    def __init__(self, directory: Path, cpu: CpuTarget, threads: int | None = None) -> None:
        """Store objects in ``directory``; ``threads``: kernels compiled in parallel (default: the cores of this
        process).
        """
        self._directory = directory
        self._target = cpu.tvm_target()
        self._threads = threads or usable_cores()
        self._known: dict[int, list[tuple[tirx.PrimFunc, Future[KernelObject]]]] = {}
        self._lock = Lock()
        self._seconds = 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        """Wall time in :meth:`compile` so far."""
        return self._seconds

    def stop(self) -> None:
        """Cancel the kernels that are not started yet, as the job ends; their futures raise ``CancelledError``."""
        self._stopped = True

    def compile(self, functions: Mapping[str, tirx.PrimFunc]) -> dict[str, KernelObject]:
        """Return the objects of ``functions`` by the same names. Raises TVM's error if it cannot compile one,
        ``OutputError`` if the disk is full.
        """
        started = time.monotonic()
        with ThreadPoolExecutor(self._threads) as pool:
            asked = {name: self._asked(name, function, pool) for name, function in functions.items()}
            try:
                made = {name: future.result() for name, future in asked.items()}
            except (KeyboardInterrupt, Terminated):
                self.stop()
                raise
        self._seconds += time.monotonic() - started
        return made

    def _asked(self, name: str, function: tirx.PrimFunc, pool: ThreadPoolExecutor) -> Future[KernelObject]:
        anonymous = function.without_attr("global_symbol")
        digest = tvm_ffi.structural_hash(anonymous)
        with self._lock:
            alike = self._known.setdefault(digest, [])
            for known, future in alike:
                if tvm_ffi.structural_equal(known, anonymous):
                    return future
            # The name helps when profiling the library; the digest and the number make it unique.
            symbol = f"{name[:_LONGEST_NAME]}_{digest & 0xFFFFFFFFFFFFFFFF:016x}_{len(alike)}"
            future = pool.submit(self._compile, anonymous, symbol)
            alike.append((anonymous, future))
        return future

    def _compile(self, function: tirx.PrimFunc, symbol: str) -> KernelObject:
        if self._stopped:
            raise CancelledError
        module = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
        with pass_context():  # contexts are thread-local
            compiled = tvm.tirx.build(module, target=self._target, pipeline=tir_pipeline())
        path = self._directory / f"{symbol}.o"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_object_code(compiled))
        except OSError as error:
            raise OutputError(
                f"{path}: a compiled kernel cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        return KernelObject(function, symbol, path)


def _object_code(compiled: Any) -> bytes:
    """Return the object file of a module, written to memory: LLVM ends the whole process if a disk is full."""
    with open(os.memfd_create("object"), "rb") as memory:
        compiled.write_to_file(f"/proc/self/fd/{memory.fileno()}", "o")
        return memory.read()


def separately_compiled(objects: KernelObjects) -> tvm.transform.Pass:
    """Return the last Relax pass: it replaces every kernel by the symbol of an object file, which is linked."""

    @tvm.transform.module_pass(opt_level=0, name="fusion.kernel_objects")
    def replace(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        functions: dict[Any, Any] = dict(mod.functions.items())
        kernels = {
            variable.name_hint: function
            for variable, function in functions.items()
            if isinstance(function, tirx.PrimFunc)
        }
        made = objects.compile(kernels)
        for variable in functions:
            if variable.name_hint in made:
                functions[variable] = relax.ExternFunc(made[variable.name_hint].symbol)
        linked = {each.symbol: each for each in made.values()}
        libraries = [tvm.runtime.load_static_library(str(each.path), [symbol]) for symbol, each in linked.items()]
        replaced = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
        return replaced.with_attr("external_mods", libraries)

    return replace
