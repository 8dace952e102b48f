"""Quantised ONNX models: made by ONNX Runtime's own quantiser, whose output every runtime can read; told from float
ones; the share of their layers that is quantised, the file that they were made from, and the layers that are computed
in floats, with reasons in texts that many layers share.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError, ModelError, ProjectError
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays, CalibrationData, DeclaredInput
from fusion.relax.onnx.model_file import all_nodes, load_model, opset_of
from fusion.relax.onnx.preparation import dimensions, holds_half, inline_functions, name_nodes, real_inputs
from fusion.relax.onnx.quantised_graph import QuantisedTensors

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


# Layers with most of the arithmetic of a network, by the names of ONNX and of ONNX Runtime's optimiser: in floating
# point, and in integers.
FLOAT_LAYERS = frozenset(
    {"Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
)
INTEGER_LAYERS = frozenset(
    {"QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"DynamicQuantizeMatMul"}
)
_ORIGIN = "fusion.quantized_from"
_STEPS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


def is_quantised(graph: GraphProto) -> bool:
    """True if some value of ``graph`` or its sub-graphs is rounded to integers, or some layer is computed
    in integers.
    """
    return any(node.op_type in _STEPS or node.op_type in INTEGER_LAYERS for node in all_nodes(graph))


def integer_share(nodes: Iterable[NodeProto]) -> tuple[int, int]:
    """Return the numbers of integer layers and of all layers in a graph optimised by ONNX Runtime."""
    kinds = [node.op_type for node in nodes]
    integers = sum(kind in INTEGER_LAYERS for kind in kinds)
    return integers, integers + sum(kind in FLOAT_LAYERS for kind in kinds)


def quantised_share(graph: GraphProto) -> tuple[int, int]:
    """Return the numbers of quantised layers and of all layers in the graph of a file: integer layers count, and float
    layers with data and weights that are both dequantised.
    """
    restored = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    layers = [node for node in graph.node if node.op_type in FLOAT_LAYERS or node.op_type in INTEGER_LAYERS]
    quantised = (node.op_type in INTEGER_LAYERS or restored.issuperset(node.input[:2]) for node in layers)
    return sum(quantised), len(layers)


def quantized_path(model: Path) -> Path:
    """Return the default path of the quantised file of ``model``: ``python -m fusion quantize`` writes it, and other
    commands look for it there.
    """
    return model.with_name(f"{model.stem}-int8.onnx")


def set_origin(quantised: ModelProto, digest: str) -> None:
    """Record in ``quantised`` the SHA-256 of the file that it was made from."""
    for entry in [each for each in quantised.metadata_props if each.key == _ORIGIN]:
        quantised.metadata_props.remove(entry)
    entry = quantised.metadata_props.add()
    entry.key, entry.value = _ORIGIN, digest


def origin_of(model: ModelProto) -> str | None:
    """Return the SHA-256 of the file that ``model`` was quantised from; None if another tool made it."""
    return next((entry.value for entry in model.metadata_props if entry.key == _ORIGIN), None)


FLOAT_DATA = "their data are floats"
WIDE_DATA = "their data are of 16 bits, and products of whole numbers take 8"
OTHER_SCALES = "the scale of their data is no constant, or not one for all"
COMPUTED = "both of their factors are computed"
FLOAT_WEIGHTS = "their weights are floats"
OTHER_WEIGHTS = "their weights are not of 8 bits with a scale for each output"
NOT_IMAGES = "their data are no images"
NOT_ROUNDED = "their results are not rounded to bytes before something else reads them"
OTHER_FORM = "their sums may grow too large, or their form has no kernel in whole numbers"
_NAMED = 3


@dataclass(frozen=True)
class FloatLayer:
    """Name of the node of a layer, and the reason why it is computed in floats."""

    name: str
    reason: str


def layers_in_floats(model: ModelProto) -> tuple[FloatLayer, ...]:
    """Return the float layers of a quantised ``model`` after the search for integer layers
    (:func:`fusion.relax.onnx.integer_layers.with_integer_layers`); empty for any other model.
    """
    if not is_quantised(model.graph):
        return ()
    tensors = QuantisedTensors(model)
    shapes = tensors.shapes()
    layers = (node for node in model.graph.node if node.op_type in FLOAT_LAYERS)
    return tuple(FloatLayer(node.name, _reason(tensors, shapes, node)) for node in layers)


def float_layer_notes(layers: Sequence[FloatLayer]) -> list[str]:
    """Return a sentence for each reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(layer.reason, []).append(layer.name)
    rows = sorted(found.items(), key=lambda row: -len(row[1]))
    before = "layers of the quantised model in floats"
    return [f"{before}, {len(names)}: {reason} ({_some(names)})" for reason, names in rows]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _reason(tensors: QuantisedTensors, shapes: dict[str, tuple[int, ...]], node: NodeProto) -> str:
    data, weight = tensors.made_by.get(node.input[0]), tensors.made_by.get(node.input[1])
    if data is None or data.op_type != "DequantizeLinear":
        return FLOAT_DATA
    step = tensors.quantisation(data)
    if step is None or step[0].size != 1:
        return OTHER_SCALES
    if step[1].dtype.itemsize > 1:
        return WIDE_DATA
    if tensors.constants.get(node.input[1]) is not None:
        return FLOAT_WEIGHTS
    if weight is None or weight.op_type != "DequantizeLinear" or weight.input[0] not in tensors.constants:
        return COMPUTED
    held, values = tensors.dequantised(node.input[1]), tensors.constants[weight.input[0]]
    if held is None or values.dtype not in (np.int8, np.uint8):
        return OTHER_WEIGHTS
    if "Conv" in node.op_type and len(shapes.get(node.input[0], (0,) * 4)) != 4:
        return NOT_IMAGES
    if tensors.rounded_behind(node.output[0]) is None:
        return NOT_ROUNDED
    return OTHER_FORM


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
                raise InputError(f"{path}: --exclude {name}: no such node; {_its_nodes(sorted(names))}")
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


def with_followers(form: ModelProto, layers: Collection[str]) -> tuple[str, ...]:
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


def _its_nodes(names: Sequence[str], limit: int = 6) -> str:
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
