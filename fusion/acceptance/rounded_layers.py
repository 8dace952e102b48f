"""An ONNX model whose layers round what they read and write to a shorter type, each where it is told to.

So it is known what storing layers in bfloat16, or quantising them (:class:`ByteRounding`), does to
the outputs before any kernel of theirs is built, for one layer or any set of them, in the time that ONNX Runtime takes.
Rounded are the input and the weights of a layer and what it leaves behind its epilogue, as a kernel stores them; sums
are those of float32. Nothing of our kernels is in there.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from costmodel.base.errors import TuningError
from costmodel.operators.layers import Conv2d, Dense
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import ENGINES, REFERENCE
from fusion.comparing.engines.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.model.named_arrays import Arrays
from fusion.model.tensor_info import TensorInfo

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

    from fusion.model.conv_graph import Graph, Node

# The input that says which layers round, one boolean each.
SWITCHES = "fusion_rounded_layers"
# Veltkamp's splitting: a product with 2^16 + 1 and two differences leave 8 of the 24 bits of a float32, rounded to the
# nearest, which are those of a bfloat16. No cast: engines drop pairs of those.
_SPLITTER = np.float32(2**16 + 1)
_LAYERS = ("Conv", "Gemm", "MatMul")
# Operators between the sums of a layer and what its kernel stores.
_EPILOGUES = frozenset(
    {"BatchNormalization", "Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh"}
    | {"Gelu", "Mish"}
)
_QUANTISE, _RESTORE = "QuantizeLinear", "DequantizeLinear"
_LARGEST_MODEL = 2**31 - 2**20  # bytes of a protobuf
# How far roundings move an output is told by so many draws of them, near one input: by noise of this share of its
# largest value.
DRAWS = 6
# Fewer where they would take longer than this for one input: models so large have many outputs that move by themselves.
DRAWS_SECONDS, LEAST_DRAWS = 1.0, 2
_NEARNESS = 2.0**-8


# (Source, prefix of new names) -> nodes, and the tensor in which they leave the source rounded.
Steps = Callable[[str, str], "tuple[list[NodeProto], str]"]
# What a layer reads, by the number of its input, and what it leaves.
READ, WRITTEN = (0, 1), None


class LayerRounding(Protocol):
    """How layers round."""

    def constants(self) -> list[TensorProto]:
        """Values that the steps read, which become part of the model."""

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        """What rounds the input ``number`` of the layer of ``node``, or what it leaves (``None``) in ``tensor``;
        ``None`` if that is not rounded. A layer whose data (number 0) is not rounded gets no switch.
        """


class BFloat16Rounding:
    """To bfloat16, all of them."""

    def constants(self) -> list[TensorProto]:
        from onnx import numpy_helper

        return [numpy_helper.from_array(np.asarray(_SPLITTER), f"{SWITCHES}.splitter")]

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        return _split


class ByteRounding:
    """By the steps around the layers of ``quantised``, whose nodes and tensors are called as those of the float model
    (:func:`fusion.relax.onnx.onnx_quantizer.float_form`); a :class:`LayerRounding`.

    What quantising any set of layers does to the outputs is so known in the time of some runs, where ONNX Runtime's
    quantiser would calibrate for every set anew. Scales and zero points are those of the model with all layers
    quantised.
    """

    def __init__(self, quantised: ModelProto) -> None:
        graph = quantised.graph
        self._layers = {node.name: node for node in graph.node}
        self._made = {output: node for node in graph.node for output in node.output}
        # What is stored in bytes, by the name of the tensor before and behind the step there and back: of results of a
        # model the latter has the name that they have in the float one.
        self._stored = {node.input[0]: node for node in graph.node if node.op_type == _QUANTISE}
        for node in graph.node:
            before = self._made.get(node.input[0]) if node.op_type == _RESTORE else None
            if before is not None:
                self._stored[node.output[0]] = before
        self._values = {tensor.name: tensor for tensor in graph.initializer}

    def constants(self) -> list[TensorProto]:
        """Scales and zero points."""
        from onnx import TensorProto

        found = []
        for name in dict.fromkeys(
            name for node in self._layers.values() if node.op_type in (_QUANTISE, _RESTORE) for name in node.input[1:3]
        ):
            if name in self._values:
                copy = TensorProto()
                copy.CopyFrom(self._values[name])
                copy.name = _own(name)
                found.append(copy)
        return found

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        layer = self._layers.get(node.name)
        if layer is None:
            return None
        if number is WRITTEN:
            return self._there_and_back(self._stored.get(tensor))
        step = self._made.get(layer.input[number])
        return self._there_and_back(step if step is not None and step.op_type == _RESTORE else None)

    def _there_and_back(self, step: NodeProto | None) -> Steps | None:
        """To bytes by the scale of ``step`` and back; ``None`` where nothing is rounded, or by no constant."""
        if step is None or any(name not in self._values for name in step.input[1:3]):
            return None
        from onnx import helper

        scale, *zero = (_own(name) for name in step.input[1:3])
        axis = next((attribute.i for attribute in step.attribute if attribute.name == "axis"), None)
        options = {} if axis is None or not self._values[step.input[1]].dims else {"axis": axis}

        def steps(source: str, prefix: str) -> tuple[list[NodeProto], str]:
            stored, restored = f"{prefix}.stored", f"{prefix}.restored"
            return [
                helper.make_node(_QUANTISE, [source, scale, *zero], [stored], stored, **options),
                helper.make_node(_RESTORE, [stored, scale, *zero], [restored], restored, **options),
            ], restored

        return steps


def _own(name: str) -> str:
    return f"{SWITCHES}.{name}"


def _split(source: str, prefix: str) -> tuple[list[NodeProto], str]:
    from onnx import helper

    names = [f"{prefix}.{part}" for part in ("product", "rest", "rounded")]
    return [
        helper.make_node("Mul", [source, f"{SWITCHES}.splitter"], [names[0]], names[0]),
        helper.make_node("Sub", [names[0], source], [names[1]], names[1]),
        helper.make_node("Sub", [names[0], names[1]], [names[2]], names[2]),
    ], names[2]


@dataclass(frozen=True, eq=False)
class SwitchedModel:
    """``layers``: names of the layers of the graph, in the order of the switches; ``nodes``: of the ONNX nodes."""

    model: ModelProto
    layers: tuple[str, ...]
    nodes: Mapping[str, str] = field(default_factory=dict)

    def switches(self, rounded: Collection[str]) -> np.ndarray:
        """The value of the input ``SWITCHES`` with which these layers round."""
        return np.array([name in rounded for name in self.layers], dtype=np.bool_)


def switched_model(
    prepared: ModelProto, graph: Graph, exposed: Collection[str] = (), rounding: LayerRounding | None = None
) -> SwitchedModel:
    """A copy of the model that ``graph`` was extracted from (:func:`fusion.relax.onnx.onnx_prepare.prepare`).

    Layers with weights that are found in it have a switch. ``exposed``: tensors that become outputs, where they exist;
    ``rounding``: to bfloat16 unless told.
    """
    from onnx import ModelProto, TensorProto, helper

    copy = ModelProto()
    copy.CopyFrom(prepared)
    rounding = rounding or BFloat16Rounding()
    places = _located(copy, graph)
    found = {name: place for name, place in places.items() if rounding.steps(place.node, 0, place.node.input[0])}
    layers = tuple(name for name in (node.name for node in graph.nodes) if name in found)
    editor = _Editor(copy, rounding)
    for index, name in enumerate(layers):
        editor.switch(index, found[name])
    editor.apply(len(layers))
    made = {output for node in copy.graph.node for output in node.output}
    present = {value.name for value in copy.graph.output}
    for name in exposed:
        if name in made and name not in present:
            copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return SwitchedModel(copy, layers, {name: found[name].node.name for name in layers})


@dataclass(frozen=True, eq=False)
class _Place:
    """A layer in the model: ``node`` computes its sums, ``output`` is the tensor that its kernel stores."""

    node: NodeProto
    output: str


def _located(model: ModelProto, graph: Graph) -> dict[str, _Place]:
    """The places of layers with weights. Variables have the name of their ONNX node, perhaps continued by what it was
    taken apart into; others, such as results of the function, are the first node left that has as many weights.
    """
    from fusion.model.layer_names import identifier

    nodes = {identifier(node.name): node for node in model.graph.node}
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            readers[name].append(node)
    results = {value.name for value in model.graph.output}
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    layers = [node for node in graph.nodes if isinstance(node.operator, Conv2d | Dense)]
    weighted = [node for node in model.graph.node if node.op_type in _LAYERS and node.input[1] in sizes]
    owners: dict[str, NodeProto] = {}
    for node in layers:
        own = _named(nodes, node.name)
        if own in weighted:
            owners[node.name] = own
            weighted.remove(own)
    for node in (each for each in layers if each.name not in owners):
        size = node.parameters[0].weight.size
        own = next((each for each in weighted if sizes[each.input[1]] == size), None)
        if own is not None:
            owners[node.name] = own
            weighted.remove(own)
    found: dict[str, _Place] = {}
    for node in (each for each in layers if each.name in owners):
        own, last = owners[node.name], _named(nodes, node.output.name)
        output = _behind(own, readers, results, node)
        if last is not None and last.output[0] != own.output[0]:
            output = last.output[0]
        found[node.name] = _Place(own, output)
    return found


def _named(nodes: Mapping[str, NodeProto], variable: str) -> NodeProto | None:
    """The node whose name ``variable`` has, or begins with."""
    name = variable
    while name:
        if name in nodes:
            return nodes[name]
        name = name.rpartition("_")[0]
    return None


def _behind(own: NodeProto, readers: Mapping[str, list[NodeProto]], results: Collection[str], node: Node) -> str:
    """The tensor behind the epilogue of ``own``, as far as a chain of operators that nothing else reads goes."""
    tensor = own.output[0]
    if not isinstance(node.operator, Conv2d | Dense) or node.operator.epilogue.activation is None:
        return tensor
    while tensor not in results and len(readers[tensor]) == 1 and readers[tensor][0].op_type in _EPILOGUES:
        tensor = readers[tensor][0].output[0]
    return tensor


@dataclass(eq=False)
class _Editor:
    """Collects what becomes rounded, and writes the graph anew."""

    model: ModelProto
    rounding: LayerRounding
    # (First result of a node, number of its input) -> switch, and what it switches.
    _reads: dict[tuple[str, int], tuple[int, Steps]] = field(default_factory=dict)
    # Tensor -> the same.
    _writes: dict[str, list[tuple[int, Steps]]] = field(default_factory=lambda: defaultdict(list))

    def switch(self, index: int, place: _Place) -> None:
        """The layer of switch ``index`` rounds its data, its weights and its result."""
        for number in READ:
            if (steps := self.rounding.steps(place.node, number, place.node.input[number])) is not None:
                self._reads[place.node.output[0], number] = index, steps
        if (steps := self.rounding.steps(place.node, WRITTEN, place.output)) is not None:
            self._writes[place.output].append((index, steps))

    def apply(self, count: int) -> None:
        from onnx import TensorProto, helper, numpy_helper

        graph = self.model.graph
        graph.input.append(helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [count]))
        graph.initializer.extend(self.rounding.constants())
        nodes: list[NodeProto] = []
        for index in range(count):
            place = f"{SWITCHES}.{index}"
            graph.initializer.append(numpy_helper.from_array(np.asarray(index, np.int64), f"{place}.index"))
            nodes.append(helper.make_node("Gather", [SWITCHES, f"{place}.index"], [place], f"{place}.gather"))
        for node in graph.node:
            inputs = list(node.input)
            for number, name in enumerate(inputs):
                read = self._reads.get((node.output[0], number))
                if read is not None:
                    node.input[number] = f"{name}.{SWITCHES}.{read[0]}.{number}"
                    nodes += _rounding(name, node.input[number], *read)
            outputs = list(node.output)
            nodes.append(node)
            for number, name in enumerate(outputs):
                source = name
                for step, (index, steps) in enumerate(self._writes.get(name, ())):
                    if not step:
                        node.output[number] = source = f"{name}.{SWITCHES}"
                    last = step + 1 == len(self._writes[name])
                    target = name if last else f"{name}.{SWITCHES}.then.{step}"
                    nodes += _rounding(source, target, index, steps)
                    source = target
        kept = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)


def _rounding(source: str, target: str, index: int, steps: Steps) -> list[NodeProto]:
    """``target`` is ``source``, rounded where switch ``index`` is on."""
    from onnx import helper

    nodes, rounded = steps(source, f"{target}.{index}")
    condition = f"{SWITCHES}.{index}"
    return [*nodes, helper.make_node("Where", [condition, rounded, source], [target], f"{target}.{index}.where")]


class RoundedRuns:
    """The model of ONNX Runtime with any layers stored in the shorter type. ``layers``: those that can be."""

    def __init__(self, worker: Worker, switched: SwitchedModel) -> None:
        self.layers = switched.layers
        self._worker = worker
        self._switched = switched
        self._seconds = 0.0  # of the last run

    @property
    def draw_seconds(self) -> float:
        """What :meth:`draws` for one input take, by the last run."""
        return 2.0 * self._seconds * self._draws()

    def _draws(self) -> int:
        affordable = int(DRAWS_SECONDS / max(2.0 * self._seconds, 1e-9))
        return max(LEAST_DRAWS, min(DRAWS, affordable))

    def draws(self, inputs: Arrays, rounded: Collection[str]) -> list[tuple[Arrays, Arrays]]:
        """Outputs with the layers ``rounded`` in the shorter type, and without: on ``inputs``, and on such as are so
        near that they differ by their roundings alone.
        """
        found = [(self.outputs(inputs, rounded), self.outputs(inputs, ()))]
        for seed in range(1, self._draws()):
            near = _near(inputs, seed)
            found.append((self.outputs(near, rounded), self.outputs(near, ())))
        return found

    def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays:
        """What the model computes with the layers ``rounded`` in the shorter type; ``TuningError`` if it fails."""
        started = time.monotonic()
        try:
            return self._worker.run({**inputs, SWITCHES: self._switched.switches(rounded)})
        except EngineFailed as error:
            raise TuningError(
                f"the model with rounded layers cannot be run: {error}; choose --precision float32"
            ) from error
        finally:
            self._seconds = time.monotonic() - started


def _near(inputs: Arrays, seed: int) -> Arrays:
    """``inputs`` with noise of a few roundings to bfloat16; what has no floating point stays."""
    generator = np.random.default_rng(seed)
    near: Arrays = {}
    for name, array in inputs.items():
        near[name] = array
        if array.dtype == np.float32 and array.size:
            scale = np.float32(_NEARNESS * (np.abs(array).max() or 1.0))
            near[name] = array + scale * generator.standard_normal(array.shape, dtype=np.float32)
    return near


@contextmanager
def rounded_runs(
    switched: SwitchedModel,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    threads: int,
    scratch: Path,
) -> Iterator[RoundedRuns]:
    """``switched`` loaded by ONNX Runtime in a process of its own. ``TuningError`` if it does not load it."""
    if switched.model.ByteSize() > _LARGEST_MODEL:
        raise TuningError(
            "the model has more than 2 GiB: what bfloat16 does to its outputs cannot be told; "
            "choose --precision float32"
        )
    path = scratch / "rounded.onnx"
    path.write_bytes(switched.model.SerializeToString())
    switch = TensorInfo(SWITCHES, (len(switched.layers),), "bool")
    load = EngineWorkload(path, "", (*inputs, switch), tuple(outputs), threads, scratch, scratch, exact=True)
    with Worker(ENGINES[REFERENCE], threads) as worker:
        try:
            worker.prepare(load, PREPARE_TIMEOUT_SECONDS)
        except (Unavailable, EngineFailed) as error:
            raise TuningError(
                f"the model with rounded layers cannot be loaded: {error}; choose --precision float32"
            ) from error
        yield RoundedRuns(worker, switched)
