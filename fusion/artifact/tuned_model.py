"""Tuned models as Python functions on arrays. :func:`load` opens a build written by ``tune``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.cores import threads_to_use
from costmodel.base.errors import InputError
from fusion.artifact.build_folder import MODEL
from fusion.artifact.executable import CompiledModel, load_compiled, threads_of_tvm
from fusion.artifact.profile_folders import describe_inputs, read_profiles
from fusion.model.named_arrays import Arrays, check_arrays
from fusion.model.tensor_info import TensorInfo


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
