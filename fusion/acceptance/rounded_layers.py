"""ONNX model whose layers round their inputs and outputs to a shorter type, each controlled by a switch.

It gives the output error of storing layers in bfloat16, or of quantising them (:class:`ByteRounding`), before any
kernel is built, for any set of layers, in the time of an ONNX Runtime run. Input, weights and output (after the
epilogue) of a layer are rounded, as a kernel stores them; sums are in float32. None of our kernels is used.
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
from fusion.comparing.engine import ENGINES, REFERENCE, EngineWorkload, Unavailable
from fusion.comparing.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.model.named_arrays import Arrays, TensorInfo

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

    from fusion.model.conv_graph import Graph, Node

# Model input with one boolean per layer: True rounds the layer.
SWITCHES = "fusion_rounded_layers"
# Veltkamp's splitting: a product with 2^16 + 1 and two differences round a float32 to 8 of its 24 bits, those of a
# bfloat16. Casts are not used: engines remove pairs of casts.
_SPLITTER = np.float32(2**16 + 1)
_LAYERS = ("Conv", "Gemm", "MatMul")
# Operators between the sums of a layer and the output that its kernel stores.
_EPILOGUES = frozenset(
    {"BatchNormalization", "Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh"}
    | {"Gelu", "Mish"}
)
_QUANTISE, _RESTORE = "QuantizeLinear", "DequantizeLinear"
_LARGEST_MODEL = 2**31 - 2**20  # bytes of a protobuf
# Number of draws for estimating the rounding error near one input; the noise is this share of its largest value.
DRAWS = 6
# Fewer draws if they would take longer than this for one input; such large models have many outputs to average over.
DRAWS_SECONDS, LEAST_DRAWS = 1.0, 2
_NEARNESS = 2.0**-8


# (Source tensor, prefix of new names) -> nodes and the name of the rounded tensor.
Steps = Callable[[str, str], "tuple[list[NodeProto], str]"]
# Inputs of a layer that are rounded, by input number, and None for its output.
READ, WRITTEN = (0, 1), None


class LayerRounding(Protocol):
    """Rule by which layers are rounded."""

    def constants(self) -> list[TensorProto]:
        """Constants read by the steps, which are added to the model."""

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        """Rounding steps of input ``number`` of a layer, or of its output ``tensor`` (``number`` None).

        None if it is not rounded. A layer whose data (number 0) are not rounded gets no switch.
        """


class BFloat16Rounding:
    """Rounding of all inputs and outputs to bfloat16."""

    def constants(self) -> list[TensorProto]:
        from onnx import numpy_helper

        return [numpy_helper.from_array(np.asarray(_SPLITTER), f"{SWITCHES}.splitter")]

    def steps(self, node: NodeProto, number: int | None, tensor: str) -> Steps | None:
        return _split


class ByteRounding:
    """Rounding by the quantisation steps around the layers of the model ``quantised``, a :class:`LayerRounding`.

    Nodes and tensors must have the names of the float model (:func:`fusion.relax.onnx.quantised_model.float_form`). The
    error of quantising any set of layers is known after a few runs, where ONNX Runtime's quantiser would calibrate for
    every set again. Scales and zero points are those of the model with all layers quantised.
    """

    def __init__(self, quantised: ModelProto) -> None:
        graph = quantised.graph
        self._layers = {node.name: node for node in graph.node}
        self._made = {output: node for node in graph.node for output in node.output}
        # QuantizeLinear nodes by the name of the tensor before quantisation and after dequantisation; for model outputs
        # the latter is the name in the float model.
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
        """Steps that quantise with the scale of ``step`` and dequantise; None without rounding or a constant scale."""
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
    """A model with one switch per layer."""

    model: ModelProto
    # Names of the layers of the graph, in the order of the switches.
    layers: tuple[str, ...]
    # Layer -> name of its ONNX node.
    nodes: Mapping[str, str] = field(default_factory=dict)

    def switches(self, rounded: Collection[str]) -> np.ndarray:
        """Value of the input ``SWITCHES`` that rounds these layers."""
        return np.array([name in rounded for name in self.layers], dtype=np.bool_)


def switched_model(
    prepared: ModelProto, graph: Graph, exposed: Collection[str] = (), rounding: LayerRounding | None = None
) -> SwitchedModel:
    """Copy of the model that ``graph`` was extracted from (:func:`fusion.relax.onnx.preparation.prepare`), with
    switches.

    Every layer with weights that is found in it has a switch. ``exposed``: tensors added to the outputs if they exist;
    ``rounding``: bfloat16 by default.
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
    """Position of a layer in the model: ``node`` computes its sums, ``output`` is the tensor that its kernel stores."""

    node: NodeProto
    output: str


def _located(model: ModelProto, graph: Graph) -> dict[str, _Place]:
    """Positions of the layers with weights.

    Variables have the name of their ONNX node, possibly with a suffix; other layers, such as results of the function,
    are matched to the first remaining node with as many weights.
    """
    from fusion.model.conv_graph import identifier

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
    """Node whose name is ``variable`` or a prefix of it up to an underscore, or None."""
    name = variable
    while name:
        if name in nodes:
            return nodes[name]
        name = name.rpartition("_")[0]
    return None


def _behind(own: NodeProto, readers: Mapping[str, list[NodeProto]], results: Collection[str], node: Node) -> str:
    """Output of the chain of single-reader epilogue operators after ``own``."""
    tensor = own.output[0]
    if not isinstance(node.operator, Conv2d | Dense) or node.operator.epilogue.activation is None:
        return tensor
    while tensor not in results and len(readers[tensor]) == 1 and readers[tensor][0].op_type in _EPILOGUES:
        tensor = readers[tensor][0].output[0]
    return tensor


@dataclass(eq=False)
class _Editor:
    """Collects the tensors to round, and rewrites the graph."""

    model: ModelProto
    rounding: LayerRounding
    # (First output of a node, input number) -> (switch, rounding steps).
    _reads: dict[tuple[str, int], tuple[int, Steps]] = field(default_factory=dict)
    # Tensor -> list of (switch, rounding steps).
    _writes: dict[str, list[tuple[int, Steps]]] = field(default_factory=lambda: defaultdict(list))

    def switch(self, index: int, place: _Place) -> None:
        """Round data, weights and output of a layer with switch ``index``."""
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
    """Nodes that set ``target`` to ``source``, rounded if switch ``index`` is on."""
    from onnx import helper

    nodes, rounded = steps(source, f"{target}.{index}")
    condition = f"{SWITCHES}.{index}"
    return [*nodes, helper.make_node("Where", [condition, rounded, source], [target], f"{target}.{index}.where")]


class RoundedRuns:
    """Runs of the model by ONNX Runtime with any layers stored in the shorter type; ``layers`` can be rounded."""

    def __init__(self, worker: Worker, switched: SwitchedModel) -> None:
        self.layers = switched.layers
        self._worker = worker
        self._switched = switched
        self._seconds = 0.0  # of the last run

    @property
    def draw_seconds(self) -> float:
        """Seconds of :meth:`draws` for one input, estimated from the last run."""
        return 2.0 * self._seconds * self._draws()

    def _draws(self) -> int:
        affordable = int(DRAWS_SECONDS / max(2.0 * self._seconds, 1e-9))
        return max(LEAST_DRAWS, min(DRAWS, affordable))

    def draws(self, inputs: Arrays, rounded: Collection[str]) -> list[tuple[Arrays, Arrays]]:
        """Pairs of outputs with the layers ``rounded`` in the shorter type and without.

        Computed on ``inputs`` and on inputs so close that their outputs differ by rounding only.
        """
        found = [(self.outputs(inputs, rounded), self.outputs(inputs, ()))]
        for seed in range(1, self._draws()):
            near = _near(inputs, seed)
            found.append((self.outputs(near, rounded), self.outputs(near, ())))
        return found

    def outputs(self, inputs: Arrays, rounded: Collection[str]) -> Arrays:
        """Outputs with the layers ``rounded`` in the shorter type; raises ``TuningError`` on failure."""
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
    """``inputs`` with noise of a few bfloat16 roundings; inputs other than float32 are unchanged."""
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
    """Load ``switched`` in an ONNX Runtime process; raises ``TuningError`` if loading fails."""
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
