"""A tuned model as a function: arrays in, arrays out. :func:`load` opens what ``tune`` wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.cores import threads_to_use
from costmodel.base.errors import InputError
from fusion.artifact.build_folder import MODEL, read_artifact
from fusion.artifact.executable import CompiledModel, load_compiled, threads_of_tvm
from fusion.model.named_arrays import Arrays, check_arrays
from fusion.model.tensor_info import TensorInfo


class TunedModel:
    """What :func:`load` returns. Threads may share it: their calls take turns.

    ``inputs`` and ``outputs``: names, shapes and dtypes in order; ``threads``: for how many it was loaded.
    """

    def __init__(
        self,
        folder: Path,
        model: CompiledModel,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        threads: int,
    ) -> None:
        self.folder = folder
        self.inputs = inputs
        self.outputs = outputs
        self.threads = threads
        self._model = model

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """The output as a NumPy array; of a model with several a dict of them by name.

        Inputs by position, by name, or one dict of all (names need not be identifiers). ``InputError`` for arrays that
        do not fit, as :meth:`run` says.
        """
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            given = {**arrays[0], **named}
        else:
            given = {**self._by_name(arrays), **named}
        outputs = self.run(given)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def run(self, arrays: Mapping[str, Any], source: str = "") -> Arrays:
        """Outputs by name of inputs by name, always as dicts.

        Inputs are NumPy arrays, or tensors of other libraries in the memory of this CPU (DLPack), which are read where
        they lie if they are contiguous and on a boundary of 64 bytes; NumPy's arrays, mostly on no such boundary, are
        copied. Outputs are the caller's own. ``InputError`` names ``source`` (default: the folder) and the input that
        is missing, unknown, or of another shape or dtype; nothing is converted.
        """
        source = source or str(self.folder)
        checked = check_arrays({name: _view(name, each, source) for name, each in arrays.items()}, self.inputs, source)
        return self._model(
            {name: arrays[name] if _is_foreign(arrays[name]) else each for name, each in checked.items()}
        )

    def _by_name(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        names = [info.name for info in self.inputs]
        if len(arrays) > len(names):
            raise InputError(f"{self.folder}: {len(arrays)} arrays given; the model takes {', '.join(names)}")
        return dict(zip(names, arrays, strict=False))

    def __repr__(self) -> str:
        inputs = ", ".join(f"{info.name}: {info.dtype}{list(info.shape)}" for info in self.inputs)
        outputs = ", ".join(f"{info.name}: {info.dtype}{list(info.shape)}" for info in self.outputs)
        return f"<TunedModel {self.folder} ({inputs}) -> ({outputs}), {self.threads} threads>"


def load(folder: str | os.PathLike[str], threads: int | None = None) -> TunedModel:
    """The tuned model in ``folder``, ready to be called; loads TVM's runtime alone, without its compiler.

    ``threads``: of the kernels (default: those it was tuned for, as far as there are cores for them). TVM settles their
    number when it is first used. Raises ``InputError``: not a whole build (it names the file), another CPU or TVM,
    another number of threads than TVM runs with in this process.

    >>> model = load("build/")                          # doctest: +SKIP
    >>> model(images).shape                             # doctest: +SKIP
    (1, 1000)
    """
    artifact = read_artifact(Path(folder))
    wanted = threads_to_use(threads, artifact.manifest.threads)
    if wanted < 1:
        raise InputError(f"--threads {wanted}: must be 1 or more")
    model = load_compiled(artifact, MODEL, wanted)
    if threads is not None and (running := threads_of_tvm()) != threads:
        raise InputError(
            f"--threads {threads}: TVM runs with {running} threads in this process; load it in another one"
        )
    return TunedModel(artifact.directory, model, artifact.manifest.inputs, artifact.manifest.outputs, wanted)


def _is_foreign(array: Any) -> bool:
    """Whether it is a tensor of another library that lends its memory."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def _view(name: str, array: Any, source: str) -> np.ndarray:
    """``array`` for NumPy, not copied if it is one of its own or lends its memory."""
    if not _is_foreign(array):
        return np.asarray(array)
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: input '{name}' cannot be read in this CPU's memory: {reason}") from error
