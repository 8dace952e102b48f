"""Machine code of a module's kernels, each compiled once and several at a time.

One build of a network spends nearly all of its time on the kernels, and TVM compiles them one after the other. Most
kernels of the next build are those of the one before: with another fusion, another configuration here and there, or
one more output. So every kernel becomes an object file of its own, made by a pool of threads (TVM and LLVM hold no
lock of Python while they compile), and is linked into every library that needs it.
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

# TVM joins the names of all operators that it fuses into a kernel's, and no file may be called by more than 255 bytes.
_LONGEST_NAME = 96


@dataclass(frozen=True, eq=False)
class KernelObject:
    """``function`` compiled into the object file ``path``, where it is called ``symbol``."""

    function: tirx.PrimFunc
    symbol: str
    path: Path


class KernelObjects:
    """Object files for one CPU in ``directory``, which outlives this. Several threads may ask."""

    def __init__(self, directory: Path, cpu: CpuTarget, threads: int | None = None) -> None:
        """``threads``: so many kernels are compiled at a time; default: the cores of this process."""
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
        """Kernels that are waiting are given up, by whichever thread waits for them: the job ends."""
        self._stopped = True

    def compile(self, functions: Mapping[str, tirx.PrimFunc]) -> dict[str, KernelObject]:
        """The objects of ``functions``, by the same names; what TVM raises where it cannot compile one, ``OutputError``
        where there is no room for it.
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
            # The name is for people who profile the library; the digest and the number make it unique.
            symbol = f"{name[:_LONGEST_NAME]}_{digest & 0xFFFFFFFFFFFFFFFF:016x}_{len(alike)}"
            future = pool.submit(self._compile, anonymous, symbol)
            alike.append((anonymous, future))
        return future

    def _compile(self, function: tirx.PrimFunc, symbol: str) -> KernelObject:
        if self._stopped:
            raise CancelledError
        module = tvm.IRModule({symbol: function.with_attr("global_symbol", symbol)})
        with pass_context():  # of this thread: contexts are thread-local
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
    """The object file of a module, written to memory: LLVM ends the whole process where a disk is full."""
    with open(os.memfd_create("object"), "rb") as memory:
        compiled.write_to_file(f"/proc/self/fd/{memory.fileno()}", "o")
        return memory.read()


def separately_compiled(objects: KernelObjects) -> tvm.transform.Pass:
    """A pass at the end of Relax's: every kernel becomes the symbol of an object file, which is linked."""

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
