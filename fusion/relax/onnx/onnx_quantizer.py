"""Quantisation of a float ONNX model by ONNX Runtime's own quantiser, whose output every runtime can read."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError, MissingDependencyError, ModelError, ProjectError
from fusion.model.calibration_data import CalibrationData, DeclaredInput
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays
from fusion.relax.onnx.onnx_file import load_model, opset_of
from fusion.relax.onnx.onnx_precision import holds_half
from fusion.relax.onnx.onnx_prepare import dimensions, inline_functions, name_nodes, real_inputs
from fusion.relax.onnx.onnx_quantised import FLOAT_LAYERS, is_quantised

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

FORMATS = ("qdq", "qoperator")
METHODS = ("minmax", "entropy", "percentile")
# Number of progress lines while samples run.
_REPORTS = 10
# The quantiser converts older models itself, which fails for some operators.
_SAFE_OPSET = 11
# Severities of ONNX Runtime: while it processes graphs of its own, and its default.
_ERRORS, _WARNINGS = 3, 2


@dataclass(frozen=True)
class QuantizationOptions:
    """Options of ``python -m fusion quantize``."""

    # Quantisation steps around float layers (``qdq``) or integer layers (``qoperator``).
    format: str = "qdq"
    # One scale per output channel of a weight.
    per_channel: bool = False
    # Activations from -128 to 127 around zero instead of 0 to 255 from any zero point; weights are always symmetric.
    symmetric: bool = False
    # Names of nodes that stay in floating point.
    exclude: tuple[str, ...] = ()
    # Method that derives ranges from the samples.
    method: str = "minmax"

    def __post_init__(self) -> None:
        for option, value, known in (("format", self.format, FORMATS), ("method", self.method, METHODS)):
            if value not in known:
                raise InputError(f"--{option} {value}: there are {', '.join(known)}")


def load_float_model(path: Path) -> ModelProto:
    """Return the model in ``path`` with a name for every node. ``ModelError`` if it cannot be read, is already
    quantised or has 16 bits.
    """
    model = inline_functions(path, load_model(path))
    if is_quantised(model.graph):
        raise ModelError(f"{path}: is quantised already; quantise the float model that it was made from")
    if holds_half(model.graph):
        raise ModelError(f"{path}: computes in 16 bits; quantise the FP32 model that it was made from")
    name_nodes(model.graph)
    return model


def declared_inputs(path: Path, model: ModelProto) -> list[DeclaredInput]:
    """Return the inputs as ``model`` declares them; ``ModelError`` for an input of unknown rank."""
    from onnx import helper

    found = []
    for value in real_inputs(model.graph):
        sizes = dimensions(value)
        if sizes is None:
            raise ModelError(f"{path}: the rank of input {value.name!r} is unknown; export the model with shapes")
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = tuple(size if isinstance(size, int) else None for size in sizes)
        found.append(DeclaredInput(value.name, shape, dtype.name))
    return found


def quantized(
    path: Path,
    model: ModelProto,
    data: CalibrationData,
    calls: Sequence[int],
    options: QuantizationOptions,
    say: Callable[[str], None] = lambda _: None,
) -> ModelProto:
    """Return ``model`` (of the file ``path``) quantised with the ranges of its tensors in ``calls`` of ``data``.

    ``InputError`` for excluded names that do not exist, or if nothing is left to quantise; ``ModelError`` if ONNX
    Runtime cannot process the model.
    """
    quantizer = _library()
    with tempfile.TemporaryDirectory(prefix="quantising-") as folder, _silent(), _understood(path, model):
        prepared, result = _prepared(quantizer, model, Path(folder), say), Path(folder) / "quantised.onnx"
        graph = _parsed(prepared).graph
        names = {node.name for node in (*model.graph.node, *graph.node)}
        for name in options.exclude:
            if name not in names:
                raise InputError(f"{path}: --exclude {name}: no such node; {_some(sorted(names))}")
        excluded = _excluded(graph, model.graph, options.exclude)
        if any(node.op_type in FLOAT_LAYERS and node.name not in excluded for node in graph.node):
            _quantize_static(quantizer, prepared, result, _Samples(data, calls, say), excluded, options)
        found = _parsed(result) if result.exists() else None
    if found is None or not is_quantised(found.graph):
        raise InputError(
            f"{path}: nothing in it can be quantised: it has no convolution or product, or all are excluded; "
            "leave it as it is, or exclude less"
        )
    return found


def float_form(path: Path, model: ModelProto) -> ModelProto:
    """Return ``model`` in the form before its layers are quantised: constants folded, norms in the weights. Its nodes
    and tensors have the names of the quantised model, and can be excluded like those of ``model``. Errors as in
    :func:`quantized`.
    """
    with tempfile.TemporaryDirectory(prefix="quantising-") as folder, _silent(), _understood(path, model):
        return _parsed(_prepared(_library(), model, Path(folder), lambda _: None))


def with_what_follows(form: ModelProto, layers: Collection[str]) -> tuple[str, ...]:
    """Return ``layers`` (names of nodes of a :func:`float_form`) and the nodes that process their results, such as
    additions: the quantiser would round those to bytes though no adjacent layer is quantised.
    """
    made = {output: node for node in form.graph.node for output in node.output}
    found = dict.fromkeys(layers)
    for node in form.graph.node:  # in the order in which they are computed
        sources = (made.get(name) for name in node.input)
        if node.op_type not in FLOAT_LAYERS and any(each is not None and each.name in found for each in sources):
            found[node.name] = None
    return tuple(found)


@contextlib.contextmanager
def _understood(path: Path, model: ModelProto) -> Iterator[None]:
    try:
        yield
    except ProjectError:
        raise
    except Exception as error:  # the library raises any error on unexpected graphs
        old = "; export the model again with opset 17" * (opset_of(model) < _SAFE_OPSET)
        raise ModelError(
            f"{path}: ONNX Runtime cannot quantise it: {sentence(error)}{old}; leave layers out with --exclude"
        ) from error


def _prepared(quantizer: Any, model: ModelProto, folder: Path, say: Callable[[str], None]) -> Path:
    named, prepared = (folder / f"{stage}.onnx" for stage in ("named", "prepared"))
    say("preparing the graph")
    named.write_bytes(model.SerializeToString())
    # Shapes of convolutional networks need no symbols, for which the library requires another package.
    quantizer.shape_inference.quant_pre_process(str(named), str(prepared), skip_symbolic_shape=True)
    return prepared


def _quantize_static(
    quantizer: Any, prepared: Path, result: Path, samples: _Samples, excluded: list[str], options: QuantizationOptions
) -> None:
    kinds = quantizer.QuantType
    quantizer.quantize_static(
        str(prepared),
        str(result),
        samples,
        quant_format={"qdq": quantizer.QuantFormat.QDQ, "qoperator": quantizer.QuantFormat.QOperator}[options.format],
        per_channel=options.per_channel,
        activation_type=kinds.QInt8 if options.symmetric else kinds.QUInt8,
        weight_type=kinds.QInt8,
        nodes_to_exclude=excluded,
        calibrate_method=_methods(quantizer)[options.method],
        extra_options={
            "ActivationSymmetric": options.symmetric,
            "CalibTensorRangeSymmetric": options.symmetric,
            "WeightSymmetric": True,
            # One call at a time: else the library keeps every tensor of all calls in memory.
            "CalibStridedMinMax": 1,
        },
    )


class _Samples:
    """Reader of calls for the library, which requests one range of them at a time."""

    def __init__(self, data: CalibrationData, calls: Sequence[int], say: Callable[[str], None]) -> None:
        self._data, self._calls, self._say = data, list(calls), say
        self._next, self._end = 0, len(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Select the calls from ``start_index`` up to, excluding, ``end_index``."""
        self._next, self._end = start_index, end_index

    def get_next(self) -> Arrays | None:
        """Return the next call of the range, None after its end."""
        if self._next >= self._end:
            return None
        self._next += 1
        if self._next * _REPORTS // len(self._calls) > (self._next - 1) * _REPORTS // len(self._calls):
            self._say(f"calibrated with {self._next} of {len(self._calls)}")
        return self._data.call(self._calls[self._next - 1])


def _library() -> Any:
    try:
        from onnxruntime import quantization
    except ImportError as error:
        raise MissingDependencyError(f"quantising needs onnxruntime: pip install -e '.[fusion]' ({error})") from error
    return quantization


def _methods(quantizer: Any) -> dict[str, Any]:
    kinds = quantizer.CalibrationMethod
    return dict(zip(METHODS, (kinds.MinMax, kinds.Entropy, kinds.Percentile), strict=True))


def _excluded(prepared: GraphProto, original: GraphProto, names: Sequence[str]) -> list[str]:
    """Return the names in the prepared graph of the nodes ``names`` of the original one: a node they were merged into
    has their name with a suffix, or computes their result.
    """
    before = {node.name for node in original.node}
    results = {output for node in original.node if node.name in names for output in node.output}

    def is_meant(name: str, outputs: Sequence[str]) -> bool:
        merged = name not in before and any(name.startswith(f"{each}/") for each in names)
        return name in names or merged or not results.isdisjoint(outputs)

    return [node.name for node in prepared.node if is_meant(node.name, node.output)]


def _parsed(path: Path) -> ModelProto:
    import onnx

    return onnx.load(str(path))


def _some(names: Sequence[str], limit: int = 6) -> str:
    return "its nodes are " + ", ".join(names[:limit]) + (" ..." if len(names) > limit else "")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress the library's own progress and advice, which are for developers."""
    import onnxruntime

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    onnxruntime.set_default_logger_severity(_ERRORS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        onnxruntime.set_default_logger_severity(_WARNINGS)
