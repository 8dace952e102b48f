"""Rewrites of quantised models that change no value.

Signs: an int8 tensor becomes a uint8 tensor with a zero point 128 higher. Zero points that a file omits become
explicit: they determine the dtype of the bytes.

Places: QuantizeLinear and DequantizeLinear are moved next to the layers whose data they round. Files from
quantisation-aware training have them only at the inputs of layers: pooling, reshaping and other moves of values are
between a layer and the rounding of its result, or between bytes and the layer that reads them. Rounding commutes with
a move, so that a pair of the two on the other side of a move changes no value, and weights are moved before they are
dequantised.

Transposed convolutions become ordinary ones, one per phase of their stride, which are computed in integers; see
:mod:`fusion.relax.canonical.windows`. Element-wise operators after one, and the quantisation, are moved before the
DepthToSpace that puts the phases in place, so that pixels are moved as bytes.

For comparisons all of them bring a model to the form that ONNX Runtime computes in integers wherever it can
(:func:`in_whole_numbers`). ONNX Runtime leaves these in floats: layers of signed bytes with several readers of their
data, layers with a move between DequantizeLinear and the data or weights, transposed convolutions, values that two
steps round, and means over pixels that are written as ReduceMean. The rounded result of such a layer sometimes
differs by one byte, and in a deep network the difference grows: quantised networks do not damp it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion.relax.canonical.windows import Phase, outputs_first, phases_along
from fusion.relax.onnx.byte_steps import is_over_pixels
from fusion.relax.onnx.model_file import all_nodes, opset_of
from fusion.relax.onnx.quantised_graph import (
    MOVES,
    SHIFTED,
    QuantisedTensors,
    TensorOfBytes,
    is_move,
    is_of_channels,
    padding_of,
)

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


_STEPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def with_zero_points(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` in which every QuantizeLinear and DequantizeLinear of 8 or 16 bits with a constant
    scale has a zero point, of the dtype of its bytes; ``model`` itself if none is missing.

    The dtype for a QuantizeLinear is its ``output_dtype``, or ``uint8``; for a DequantizeLinear the dtype of its input,
    which may be signed.
    """
    from onnx import ModelProto, TensorProto, helper, numpy_helper, shape_inference

    if not any(map(_lacks, model.graph.node)):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = shape_inference.infer_shapes(copy).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    scales = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            types[node.output[0]], scales[node.output[0]] = tensor.data_type, tuple(tensor.dims)
    known = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
    for node in filter(_lacks, copy.graph.node):
        held = types.get((node.output if node.op_type == "QuantizeLinear" else node.input)[0])
        shape = scales.get(node.input[1])
        if held not in known or shape is None:
            continue
        name = f"{node.output[0]}_zero_point"
        zeros = np.zeros(shape, helper.tensor_dtype_to_np_dtype(held))
        copy.graph.initializer.append(numpy_helper.from_array(zeros, name))
        node.input[:] = [*node.input[:2], name]
    return copy


def _lacks(node: NodeProto) -> bool:
    return node.op_type in _STEPS and not (len(node.input) > 2 and node.input[2])


def remove_signs(model: ModelProto, resized: Collection[str] = ()) -> bool:
    """Convert int8 tensors that are quantised and read in ``model`` (in place); return True if it changed. Zero points
    must be present (:func:`with_zero_points`). ``resized``: outputs of Resize nodes that
    read bytes directly and truncate; the kernels that compute them truncate towards the original zero.
    """
    signs = _Signs(QuantisedTensors(model), resized)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            signs.remove(node)
    return signs.found


class _Signs:
    def __init__(self, tensors: QuantisedTensors, resized: Collection[str]) -> None:
        self.found = False
        self._tensors = tensors
        self._resized = resized

    def remove(self, node: NodeProto) -> None:
        """Convert the tensors that hold the bytes of the QuantizeLinear ``node``."""
        for end in self._ends(node):
            self._shift(end)

    def _ends(self, node: NodeProto) -> list[NodeProto]:
        """Return the quantising and dequantising nodes of the tensors that hold the bytes of ``node``; empty if any
        other node reads or writes one of them, or they are unsigned.
        """
        tensors, ends = self._tensors, []
        waiting, seen = [node.output[0]], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = tensors.made_by.get(name)
            if maker is None or name in tensors.results:
                return []
            for each in (maker, *tensors.readers[name]):
                if each.op_type in ("QuantizeLinear", "DequantizeLinear"):
                    found = tensors.quantisation(each)
                    if found is None or found[1].dtype != np.int8:
                        return []
                    ends.append(each)
                elif each.op_type in MOVES or is_move(each) or each.output[0] in self._resized:
                    waiting += each.input if each.op_type == "Concat" else each.input[:1]
                    waiting.append(each.output[0])
                else:
                    return []
        return ends

    def _shift(self, node: NodeProto) -> None:
        from onnx import numpy_helper

        zero = self._tensors.constants[node.input[2]]
        if zero.dtype == np.uint8:
            return
        self.found = True
        name = f"{node.input[2]}{SHIFTED}"
        if name not in self._tensors.constants:
            shifted = (zero.astype(np.int16) + 128).astype(np.uint8)
            self._tensors.constants[name] = shifted
            self._tensors.graph.initializer.append(numpy_helper.from_array(shifted, name))
        node.input[2] = name
        for each in [each for each in node.attribute if each.name == "output_dtype"]:
            node.attribute.remove(each)  # the zero point determines the type


def bring_steps_to_layers(model: ModelProto) -> bool:
    """Insert pairs in ``model`` (in place) after moves of dequantised tensors that are read as floats, and before moves
    of floats that are quantised afterwards. Return True if ``model`` changed.
    """
    tensors, before = QuantisedTensors(model), len(model.graph.node)
    for name in _moves(tensors):
        _forward(tensors, tensors.made_by[name])
    for name in reversed(_moves(tensors)):
        _backward(tensors, tensors.made_by[name])
    return len(model.graph.node) > before


def share_equal_steps(model: ModelProto) -> bool:
    """Merge QuantizeLinear nodes of ``model`` (in place) that round one value in the same way. Some tools write one
    pair per reader; a layer is computed in integers only if one step reads it. Return True if ``model`` changed.
    """
    tensors = QuantisedTensors(model)
    kept: dict[tuple[object, ...], str] = {}
    renamed: dict[str, str] = {}
    branches = (graph for node in model.graph.node for each in node.attribute for graph in (each.g, *each.graphs))
    in_branches = {name for graph in branches for node in all_nodes(graph) for name in node.input}
    for node in model.graph.node:
        found = tensors.quantisation(node) if node.op_type == "QuantizeLinear" and len(node.input) > 2 else None
        if found is None or node.output[0] in tensors.results or node.output[0] in in_branches:
            continue
        options = tuple(sorted(each.SerializeToString() for each in node.attribute))
        key = (node.input[0], *((array.dtype.str, array.shape, array.tobytes()) for array in found), options)
        first = kept.setdefault(key, node.output[0])
        if first != node.output[0]:
            renamed[node.output[0]] = first
    if not renamed:
        return False
    nodes = [node for node in model.graph.node if not (node.output and node.output[0] in renamed)]
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    nodes = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return True


def transpose_weights(model: ModelProto) -> bool:
    """Replace each Transpose of dequantised constants in ``model`` (in place) by a DequantizeLinear of transposed
    constants. Tools that round weights in the layout of training, (out, in), write such a Transpose before products.
    Return True if ``model`` changed.
    """
    from onnx import helper, numpy_helper

    tensors, found = QuantisedTensors(model), False
    for node in model.graph.node:
        held = tensors.dequantised(node.input[0]) if node.op_type == "Transpose" else None
        if held is None or held.source not in tensors.constants:
            continue
        values, found = tensors.constants[held.source], True
        order = next((list(each.ints) for each in node.attribute if each.name == "perm"), [*range(values.ndim)][::-1])
        name = f"{node.output[0]}_transposed"
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.transpose(order)), name))
        del node.attribute[:]
        node.op_type, node.input[:] = held.node.op_type, [name, *held.node.input[1:]]
        node.attribute.extend(each for each in held.node.attribute if each.name != "axis")
        if held.scale.size > 1:
            node.attribute.append(helper.make_attribute("axis", order.index(held.axis % values.ndim)))
    return found


def _moves(tensors: QuantisedTensors) -> list[str]:
    """Return the outputs of moves, in order; by name, because inserting nodes replaces the node objects."""
    nodes = [node for node in tensors.graph.node if len(node.output) == 1]
    return [node.output[0] for node in nodes if is_move(node) or _pads_exactly(tensors, node)]


def _pads_exactly(tensors: QuantisedTensors, node: NodeProto) -> bool:
    """True for a pad with zeros, which every scale rounds to themselves."""
    padding = padding_of(tensors, node)
    return padding is not None and not padding.value


def _forward(tensors: QuantisedTensors, node: NodeProto) -> None:
    step, output = tensors.made_by.get(node.input[0]), node.output[0]
    if step is None or step.op_type != "DequantizeLinear" or not _is_of_all(tensors, step):
        return
    readers = tensors.readers[output]
    if output in tensors.results or not readers or any(each.op_type == "QuantizeLinear" for each in readers):
        return
    node.output[0] = f"{output}_before_bytes"
    _insert(tensors, node, node.output[0], output, step, after=True)


def _backward(tensors: QuantisedTensors, node: NodeProto) -> None:
    value, output = node.input[0], node.output[0]
    maker = tensors.made_by.get(value)
    if maker is None or maker.op_type == "DequantizeLinear" or not tensors.inner(value) or not tensors.inner(output):
        return
    (step,) = tensors.readers[output]
    if step.op_type != "QuantizeLinear" or not _is_of_all(tensors, step):
        return
    node.input[0] = f"{value}_through_bytes"
    _insert(tensors, node, value, node.input[0], step, after=False)


def _is_of_all(tensors: QuantisedTensors, step: NodeProto) -> bool:
    """True if ``step`` has one positive scale and zero point for the whole tensor, and the tensor is computed."""
    found = tensors.quantisation(step)
    return (
        found is not None
        and found[0].size == 1
        and found[0].reshape(-1)[0] > 0
        and len(step.input) > 2
        and step.input[0] not in tensors.constants
    )


def _insert(tensors: QuantisedTensors, node: NodeProto, value: str, result: str, like: NodeProto, after: bool) -> None:
    """Insert a pair next to ``node``: ``result`` is ``value`` quantised and dequantised with the parameters of
    ``like``.
    """
    from onnx import helper

    given, held = list(like.input[1:]), f"{result}_bytes"
    pair = [
        helper.make_node("QuantizeLinear", [value, *given], [held], f"{result}_quantised"),
        helper.make_node("DequantizeLinear", [held, *given], [result], f"{result}_dequantised"),
    ]
    nodes = tensors.graph.node
    place = next(index for index, each in enumerate(nodes) if each.output == node.output)
    for offset, made in enumerate(pair):
        nodes.insert(place + after + offset, made)
    tensors.index()


# First opset in which the axes of Squeeze are an input.
_AXES_AS_INPUT = 13


def in_whole_numbers(model: ModelProto) -> ModelProto | None:
    """Return an equivalent copy with unsigned bytes, one quantisation step next to each layer, transposed convolutions
    as phases, and GlobalAveragePool for means over pixels; None if ``model`` already has this form.
    """
    from onnx import ModelProto

    copy = ModelProto()
    copy.CopyFrom(with_zero_points(model))
    # All of them, in order, whatever the earlier ones changed.
    changes = [share_equal_steps(copy), transpose_weights(copy), bring_steps_to_layers(copy), split_transposed(copy)]
    changes += [remove_signs(copy), _pool_means(copy)]
    return copy if any(changes) else None


def _pool_means(model: ModelProto) -> bool:
    """Replace means over pixels in ``model`` (in place) by GlobalAveragePool; return True if it changed."""
    from onnx import helper, numpy_helper, shape_inference

    shapes = QuantisedTensors(shape_inference.infer_shapes(model)).shapes()
    tensors, found = QuantisedTensors(model), False
    for index, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type != "ReduceMean" or tensors.data(node.input[0]) is None:
            continue
        if len(shapes.get(node.input[0], ())) != 4 or not is_over_pixels(tensors, node):
            continue
        kept = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
        if not kept and opset_of(model) < _AXES_AS_INPUT:
            continue
        found, output = True, node.output[0]
        if not kept:
            axes = numpy_helper.from_array(np.array([2, 3], np.int64), f"{output}_axes")
            model.graph.initializer.append(axes)
            node.output[0] = f"{output}_pixel"
            squeezed = helper.make_node("Squeeze", [node.output[0], axes.name], [output], f"{output}_squeezed")
            model.graph.node.insert(index + 1, squeezed)
        node.op_type = "GlobalAveragePool"
        del node.input[1:], node.attribute[:]
    return found
