"""Quantised file of a model, run by every INT8 engine of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from costmodel.base.whole_file import write_whole
from fusion.artifact.build_folder import digest
from fusion.comparing.engines.base import Unavailable
from fusion.model.tensor_info import TensorInfo
from fusion.relax.onnx.onnx_file import load_model
from fusion.relax.onnx.onnx_prepare import dimensions, real_inputs, static_model
from fusion.relax.onnx.onnx_quantised import is_quantised, origin_of, quantized_path

if TYPE_CHECKING:
    from onnx import ModelProto


def quantized_file(
    model: Path,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    given: Path | None,
    cache: Path,
    built: Sequence[Path] = (),
) -> Path:
    """Return the quantised file of ``model``.

    It is ``given``; or ``model`` if quantised itself; or the first file in ``built`` that was quantised from it, which
    our builds run; or the file that ``python -m fusion quantize`` wrote beside it. A file for another batch is
    rewritten for that of ``inputs``, into ``cache``. Raises ``Unavailable`` if there is none, or if it was made from
    another file, ``InputError`` for a file that is not quantised or not of the model.
    """
    path = given or _found(model, built)
    loaded = load_model(path)
    if not is_quantised(loaded.graph):
        raise InputError(f"{path}: is not quantised; `python -m fusion quantize {model} --calibration DATA.npz` does")
    _require_names(path, loaded, inputs, outputs)
    wanted = {info.name: info.shape for info in inputs}
    if all(_fits(dimensions(value), wanted[value.name]) for value in real_inputs(loaded.graph)):
        return path
    return _for_batch(path, loaded, wanted, cache)


def quantized_from(path: Path) -> str | None:
    """SHA-256 of the float file that ``path`` was quantised from, or None if unknown."""
    import onnx

    return origin_of(onnx.load(str(path), load_external_data=False)) if path.is_file() else None


def _found(model: Path, built: Sequence[Path]) -> Path:
    import onnx

    if is_quantised(onnx.load(str(model), load_external_data=False).graph):
        return model
    own = digest(model)
    made = next((each for each in built if quantized_from(each) == own), None)
    if made is not None:
        return made
    beside = quantized_path(model)
    way = f"`python -m fusion quantize {model} --calibration DATA.npz` makes one, --quantized FILE names another"
    if not beside.is_file():
        raise Unavailable(f"{model} has no quantised file: {way}")
    if quantized_from(beside) != own:
        raise Unavailable(f"{beside} was not quantised from {model} as it is now: {way}")
    return beside


def _require_names(path: Path, loaded: ModelProto, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
    pairs = ((real_inputs(loaded.graph), inputs, "inputs"), (loaded.graph.output, outputs, "outputs"))
    for values, infos, kind in pairs:
        found, wanted = [value.name for value in values], [info.name for info in infos]
        if sorted(found) != sorted(wanted):
            listed = f"{', '.join(found)}, the model's are {', '.join(wanted)}"
            raise InputError(f"{path}: is of another model: its {kind} are {listed}; quantise this model again")


def _fits(declared: tuple[int | str, ...] | None, shape: tuple[int, ...]) -> bool:
    if declared is None:
        return True
    same = (isinstance(size, str) or size == extent for size, extent in zip(declared, shape, strict=False))
    return len(declared) == len(shape) and all(same)


def _for_batch(path: Path, loaded: ModelProto, wanted: Mapping[str, tuple[int, ...]], cache: Path) -> Path:
    for value in real_inputs(loaded.graph):
        declared, shape = dimensions(value), wanted[value.name]
        if not declared or not _fits(declared[1:], shape[1:]):
            raise InputError(
                f"{path}: input {value.name!r} has shape {declared}, the model takes {shape}; "
                "quantise the model in that shape"
            )
    batch = next(iter(wanted.values()))[0]
    copy = cache / f"{path.stem}-batch{batch}.onnx"
    cache.mkdir(parents=True, exist_ok=True)
    write_whole(copy, static_model(path, {}, batch).SerializeToString())
    return copy
