"""Import of an ONNX file to canonical Relax, ready for the extraction of kernels.

Operators are converted in ``frontend.py``; those without a converter are refused in ``refusals.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import ModelError, UnsupportedOperatorError
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import TensorInfo
from fusion.relax.onnx.model_file import load_model
from fusion.relax.onnx.preparation import prepare, real_inputs
from fusion.relax.onnx.quantised_model import FloatLayer, layers_in_floats
from fusion.relax.onnx.refusals import require_known_shapes

if TYPE_CHECKING:
    from onnx import ModelProto
    from tvm import IRModule


@dataclass(frozen=True, eq=False)
class ImportedModel:
    """Model in canonical Relax (:mod:`fusion.relax.canonical.canonicalize`); inputs and outputs in the order of
    ``main``.
    """

    mod: IRModule
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    # Layers of a quantised model that are not computed in integers.
    in_floats: tuple[FloatLayer, ...] = ()


def import_onnx(
    path: str | os.PathLike[str],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    whole_numbers: bool = True,
) -> ImportedModel:
    """Read an ONNX model and convert it to canonical Relax; ``shapes`` fixes dynamic inputs by name, ``batch`` rewrites
    the leading dimension. ``whole_numbers``: layers of a quantised model are computed in integers, for CPUs that have
    kernels for ``int8``; else in floats, for which every CPU has kernels.

    ``main`` takes the real inputs and returns the output, or a tuple of several. ``ModelError`` for files that cannot
    be read, ``UnsupportedOperatorError`` (with node names) for operators and opsets without a converter, ``InputError``
    for shapes that are missing or do not fit; each message is one line and names the file.
    """
    file = Path(path)
    model = load_model(file)
    prepared = prepare(file, model, shapes, batch)
    require_known_shapes(file, prepared.graph, model.graph)
    mod, in_floats = _convert(file, prepared, whole_numbers)
    given = [value.name for value in real_inputs(prepared.graph)]
    inputs = _describe(file, given, [parameter.ty for parameter in mod["main"].params])
    outputs = _describe(file, [value.name for value in prepared.graph.output], _result_types(mod))
    return ImportedModel(mod, inputs, outputs, in_floats)


def _convert(file: Path, prepared: ModelProto, whole_numbers: bool) -> tuple[IRModule, tuple[FloatLayer, ...]]:
    from fusion.relax.canonical.canonicalize import canonicalize
    from fusion.relax.onnx.frontend import as_computed, convert

    try:
        computed = as_computed(prepared, whole_numbers)
        in_floats = layers_in_floats(computed) if whole_numbers else ()
        return canonicalize(convert(computed)), in_floats
    except UnsupportedOperatorError as error:
        raise UnsupportedOperatorError(f"{file}: {error}") from error
    except Exception as error:  # TVM raises any error for unexpected graphs and types
        raise ModelError(
            f"{file}: the graph cannot be converted: {sentence(error)}; "
            "export the model in another way, or cut out what is refused"
        ) from error


def _result_types(mod: IRModule) -> list[Any]:
    from tvm import relax

    result = mod["main"].ret_ty
    return list(result.fields) if isinstance(result, relax.TupleType) else [result]


def _describe(file: Path, names: Sequence[str], types: Sequence[Any]) -> tuple[TensorInfo, ...]:
    """Return names from ONNX with the types of the Relax module, which is what will run."""
    from tvm import relax, tirx

    if len(names) != len(types):
        raise ModelError(f"{file}: an output is a sequence of tensors; only tensors are supported")
    tensors = []
    for name, ty in zip(names, types, strict=True):
        sizes = ty.shape if isinstance(ty, relax.TensorType) else None
        if sizes is None or not all(isinstance(size, tirx.IntImm) for size in sizes):
            raise ModelError(f"{file}: the shape of {name!r} depends on the data; only static shapes are supported")
        tensors.append(TensorInfo(name, tuple(int(size) for size in sizes), str(ty.dtype)))
    return tuple(tensors)
