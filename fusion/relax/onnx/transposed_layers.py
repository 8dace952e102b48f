"""Transposed convolutions of a quantised model as ordinary ones, one per phase of their stride, which are computed in
integers; see :mod:`fusion.relax.canonical.windows`.

Element-wise operators after a transposed convolution, and the quantisation, are moved before the DepthToSpace that puts
the phases in place, so that pixels are moved as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.relax.canonical.windows import Phase, outputs_first, phases_along
from fusion.relax.onnx.model_file import opset_of
from fusion.relax.onnx.quantised_graph import QuantisedTensors, TensorOfBytes, is_of_channels

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto, NodeProto

# First opset in which DepthToSpace has modes, and Slice its parameters as inputs.
_OLDEST_OPSET = 13


@dataclass(frozen=True)
class _Transposed:
    """Transposed convolution of bytes."""

    node: NodeProto
    # Nodes after it up to ``last``, the QuantizeLinear.
    behind: tuple[NodeProto, ...]
    last: NodeProto
    # Quantisation of ``weight``, whose layout is that of an ordinary convolution.
    held: TensorOfBytes
    weight: np.ndarray
    stride: int
    groups: int
    # Kernel taps and pads of each phase.
    phases: tuple[tuple[Phase, Phase], ...]
    # Rows and columns of all phases together, before they are cut to the shape ``result``.
    whole: tuple[int, int]
    result: tuple[int, ...]

    @property
    def is_joined(self) -> bool:
        """True if all phases are outputs of a single convolution: they read the same pixels."""
        pads = {self.pads(index) for index in range(len(self.phases))}
        taps = {(len(row.taps), len(column.taps)) for row, column in self.phases}
        return self.groups == 1 and len(pads) == len(taps) == 1

    def pads(self, index: int) -> tuple[int, int, int, int]:
        """Return top, left, bottom, right padding of a phase."""
        row, column = self.phases[index]
        return row.before, column.before, row.after, column.after

    def taps(self, index: int) -> np.ndarray:
        """Return the weights of a phase."""
        row, column = self.phases[index]
        return self.weight[:, :, row.taps][:, :, :, column.taps]


def split_transposed(model: ModelProto) -> bool:
    """Replace the transposed convolutions of the static ``model`` (in place); return True if it changed."""
    from onnx import shape_inference

    if opset_of(model) < _OLDEST_OPSET or not any(node.op_type == "ConvTranspose" for node in model.graph.node):
        return False
    shapes = QuantisedTensors(shape_inference.infer_shapes(model)).shapes()
    tensors = QuantisedTensors(model)
    names = [node.output[0] for node in model.graph.node if node.op_type == "ConvTranspose"]
    changed = False
    for name in names:
        found = _found(tensors, shapes, tensors.made_by[name])
        if found is not None:
            _Writer(tensors, found).write()
            changed = True
    return changed


def _found(tensors: QuantisedTensors, shapes: dict[str, tuple[int, ...]], node: NodeProto) -> _Transposed | None:
    """Return the transposed convolution ``node`` with its parameters; None if it is to be computed in floats."""
    given = {each.name: each for each in node.attribute}
    data, held = tensors.dequantised(node.input[0]), tensors.dequantised(node.input[1])
    if data is None or held is None or data.source in tensors.constants or data.scale.size != 1:
        return None
    values = tensors.constants.get(held.source)
    if values is None or values.ndim != 4 or values.dtype not in (np.int8, np.uint8):
        return None
    groups = given["group"].i if "group" in given else 1
    held = _of_outputs(held, values.shape, groups)
    if held is None:
        return None
    if len(node.input) > 2 and node.input[2] and not _is_constant_bias(tensors, node.input[2]):
        return None
    image, result = shapes.get(node.input[0], ()), shapes.get(node.output[0], ())
    strides = tuple(given["strides"].ints) if "strides" in given else (1, 1)
    dilated = "dilations" in given and any(each != 1 for each in given["dilations"].ints)
    if dilated or len(set(strides)) != 1 or len(image) != 4 or len(result) != 4 or 0 in (*image, *result):
        return None
    end = tensors.rounded_behind(node.output[0])
    if end is None or not _are_of_channels(tensors, end[0], result[1]):
        return None
    stride = int(strides[0])
    pads = _pads_before(given, stride, values.shape[2:], image[2:], result[2:])
    whole = [-(-size // stride) * stride for size in result[2:]]
    axes = [phases_along(values.shape[2 + axis], stride, pads[axis], image[2 + axis], whole[axis]) for axis in (0, 1)]
    if axes[0] is None or axes[1] is None:
        return None
    phases = tuple((row, column) for row in axes[0] for column in axes[1])
    behind, last = end
    weight = outputs_first(values, groups)
    return _Transposed(node, behind, last, held, weight, stride, groups, phases, (whole[0], whole[1]), result)


def _of_outputs(held: TensorOfBytes, shape: Sequence[int], groups: int) -> TensorOfBytes | None:
    """Return ``held`` of weights (in, out of a group, ...) with one scale, or one for each output of all groups; else
    None.
    """
    if held.scale.size == 1:
        return held
    if held.axis % 4 == 1:
        return replace(held, scale=np.tile(held.scale, groups), zero=np.tile(held.zero, groups))
    if held.axis % 4 == 0 and groups == shape[0]:
        return replace(held, scale=np.repeat(held.scale, shape[1]), zero=np.repeat(held.zero, shape[1]))
    return None


def _pads_before(
    given: dict[str, AttributeProto], stride: int, kernel: Sequence[int], image: Sequence[int], result: Sequence[int]
) -> list[int]:
    """Return the rows and columns cut off at the top and left: as the file states, or as its size of the ``result``
    implies.
    """
    automatic = given["auto_pad"].s if "auto_pad" in given else b"NOTSET"
    if "output_shape" not in given and automatic not in (b"SAME_UPPER", b"SAME_LOWER"):
        pads = list(given["pads"].ints) if "pads" in given else []
        return pads[:2] if pads and automatic != b"VALID" else [0, 0]
    added = list(given["output_padding"].ints) if "output_padding" in given else [0, 0]
    whole = [stride * (image[axis] - 1) + kernel[axis] + added[axis] for axis in (0, 1)]
    return [padding_before(whole[axis] - result[axis], automatic == b"SAME_UPPER") for axis in (0, 1)]


def _is_constant_bias(tensors: QuantisedTensors, name: str) -> bool:
    held = tensors.dequantised(name)
    return name in tensors.constants if held is None else held.source in tensors.constants


def _are_of_channels(tensors: QuantisedTensors, nodes: Sequence[NodeProto], channels: int) -> bool:
    """True if each parameter of ``nodes`` is one number, or one per channel: others belong to pixels of the result."""
    numbers = [tensors.constants[name] for node in nodes for name in node.input[1:] if name]
    return all(each.size == 1 or is_of_channels(each, channels) for each in numbers)


def padding_before(total: int, upper: bool) -> int:
    """Return the part at the start of ``total`` rows or columns that a transposed convolution cuts off to reach its
    stated output size; ``upper``: its ``auto_pad`` is ``SAME_UPPER``. A negative total adds rows or columns, all at the
    end.
    """
    return max(total, 0) // 2 if upper else -(-max(total, 0) // 2)


class _Writer:
    """Writer of the nodes of ``found`` in place of the nodes that computed its result."""

    def __init__(self, tensors: QuantisedTensors, found: _Transposed) -> None:
        self._tensors = tensors
        self._found = found
        self._name = found.node.output[0]
        self._made: list[Any] = []

    def write(self) -> None:
        found, tensors = self._found, self._tensors
        if found.is_joined:
            every = np.concatenate([found.taps(index) for index in range(len(found.phases))])
            value = self._phase("all", every, found.pads(0), len(found.phases))
        else:
            parts = [
                self._phase(str(index), found.taps(index), found.pads(index), 1) for index in range(len(found.phases))
            ]
            value = self._stepped(self._add("Concat", parts, "joined", axis=1)) if len(parts) > 1 else parts[0]
        if found.stride > 1:
            value = self._add("DepthToSpace", [value], "spread", blocksize=found.stride, mode="DCR")
        if found.whole != found.result[2:]:
            bounds = ([0, 0], list(found.result[2:]), [2, 3])
            names = ("starts", "ends", "axes")
            given = [self._constant(np.array(each), name) for each, name in zip(bounds, names, strict=True)]
            value = self._add("Slice", [self._stepped(value), *given], "cut")
        found.last.input[0] = value
        nodes = tensors.graph.node
        gone = [found.node.output[0], *(each.output[0] for each in found.behind)]
        kept = [each for each in nodes if not (each.output and each.output[0] in gone)]
        place = next(index for index, each in enumerate(kept) if each.output == found.last.output)
        kept[place:place] = self._made
        kept = [type(each).FromString(each.SerializeToString()) for each in kept]
        del nodes[:]
        nodes.extend(kept)
        tensors.index()

    def _phase(self, what: str, weight: np.ndarray, pads: Sequence[int], copies: int) -> str:
        """Add a convolution with ``weight``, with ``copies`` times the outputs of the file; return the name of its
        result, quantised and dequantised.
        """
        found, node = self._found, self._found.node
        held = self._dequantised(f"{what}_weight", weight, found.held, copies)
        inputs = [node.input[0], held, *self._bias(what, copies)]
        options = {"kernel_shape": weight.shape[2:], "pads": pads, "group": found.groups}
        value = self._add("Conv", inputs, f"{what}_phase", **options)
        self._made[-1].name = node.name if copies > 1 or len(found.phases) == 1 else f"{node.name}_{what}"
        for each in found.behind:
            others = [self._numbers(each, name, what, copies) for name in each.input[1:]]
            made = type(each).FromString(each.SerializeToString())
            made.input[:], made.output[:] = [value, *others], [f"{each.output[0]}_{what}"]
            made.name = made.output[0]
            self._made.append(made)
            value = made.output[0]
        return self._stepped(value)

    def _dequantised(self, what: str, values: np.ndarray, held: TensorOfBytes, copies: int) -> str:
        inputs = [self._constant(values, what)]
        for array, name in ((held.scale, "scale"), (held.zero, "zero")):
            copied = np.tile(array, copies) if array.size > 1 else array
            inputs.append(self._constant(copied, f"{what}_{name}"))
        options = {"axis": 0} if held.scale.size > 1 else {}
        return self._add("DequantizeLinear", inputs, f"{what}_values", **options)

    def _bias(self, what: str, copies: int) -> list[str]:
        node, tensors = self._found.node, self._tensors
        name = node.input[2] if len(node.input) > 2 else ""
        if not name or copies == 1:
            return [name] if name else []
        held = tensors.dequantised(name)
        if held is None:
            return [self._constant(np.tile(tensors.constants[name], copies), f"{what}_bias")]
        return [self._dequantised(f"{what}_bias", np.tile(tensors.constants[held.source], copies), held, copies)]

    def _numbers(self, node: NodeProto, name: str, what: str, copies: int) -> str:
        """Return the parameters of an activation, repeated for every copy of the channels."""
        if not name or copies == 1 or self._tensors.constants[name].size == 1:
            return name
        copied = np.tile(self._tensors.constants[name].reshape(-1, 1, 1), (copies, 1, 1))
        return self._constant(copied, f"{node.output[0]}_{what}_numbers")

    def _stepped(self, value: str) -> str:
        """Add the quantisation of ``value`` to the bytes of the result, and the dequantisation."""
        given = list(self._found.last.input[1:])
        held = self._add("QuantizeLinear", [value, *given], f"{value}_bytes")
        return self._add("DequantizeLinear", [held, *given], f"{value}_stepped")

    def _add(self, operator: str, inputs: Sequence[str], what: str, **options: Any) -> str:
        from onnx import helper

        output = f"{self._name}_{what}"
        self._made.append(helper.make_node(operator, list(inputs), [output], output, **options))
        return output

    def _constant(self, array: np.ndarray, what: str) -> str:
        from onnx import numpy_helper

        name = f"{self._name}_{what}"
        self._tensors.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name
