"""Reader of PyTorch execution traces (schema 1.0.x and 1.1.x, also with Chakra's suffix) as :class:`OperatorTrace`.

Bookkeeping nodes of the recorder (processes, threads, user annotations) are not operator calls: the calls under them
move to the next operator above, with the names in ``attributes["annotations"]``. Arguments are recorded as value,
shape, type and stride (:class:`ValueReader`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED, decoded
from e2e.step.operator_trace import (
    NamedRange,
    NamedRanges,
    OperatorCall,
    OperatorTrace,
    Phase,
    Tensor,
    Value,
    is_named_by_script,
    of_forward_calls,
    tensors,
)
from e2e.traces.json_stream import read_members

# C++ and ATen names of scalar types; types that are not listed keep their names.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
LARGEST_EXTENT = 2**48  # more elements than any memory holds
_UNDEFINED = "nullptr"
_MISSING = "<None>"


class ValueReader:
    """Reader of arguments; equal tensors become one object, because a trace repeats each many times."""

    def __init__(self) -> None:
        self._tensors: dict[Tensor, Tensor] = {}

    def read(
        self,
        values: Sequence[Any],
        shapes: Sequence[Any],
        types: Sequence[str],
        strides: Sequence[Any] | None = None,
    ) -> tuple[Value, ...]:
        """Convert all arguments. A tensor is ``[id, storage, offset, elements, element bytes, device]``."""
        for name, given in (("values", values), ("shapes", shapes), ("types", types)):
            if not isinstance(given, list | tuple):
                raise TypeError(f"the {name} of its arguments are {str(given)[:40]!r}, not a list")
        # Generated kernels are recorded with more values than types: their launch grid has no type.
        return tuple(
            self._value(value, _at(shapes, i), _at(types, i) or "", _at(strides, i)) for i, value in enumerate(values)
        )

    def _value(self, value: Any, shape: Any, kind: str, stride: Any) -> Value:
        if not isinstance(kind, str):
            raise TypeError(f"the type of an argument is {str(kind)[:40]!r}, not a text")
        if kind.startswith("Tensor("):
            return self._tensor(value, shape, kind[7:-1], stride)
        if isinstance(value, list):
            kinds = element_kinds(kind)
            return tuple(
                self._value(item, _at(shape, i), kinds[i] if i < len(kinds) else "", _at(stride, i))
                for i, item in enumerate(value)
            )
        if value == _MISSING:
            return None
        return value if isinstance(value, int | float | bool | str) or value is None else float(value)

    def _tensor(self, value: Sequence[Any], shape: Any, kind: str, stride: Any) -> Tensor | None:
        if kind.startswith(_UNDEFINED):
            return None
        tensor = Tensor(
            _whole(value[0]),
            _whole(value[1]),
            tuple(map(_extent, shape)),
            DTYPES.get(kind, kind),
            str(value[5]) if len(value) > 5 else "",
            None if stride is None else tuple(map(_extent, stride)),
        )
        return self._tensors.setdefault(tensor, tensor)


def _whole(value: Any) -> int:
    """Return ``value`` if it is an integer; raises ``TypeError`` otherwise."""
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value


def _extent(value: Any) -> int:
    """Return a size or a stride; raises ``ValueError`` if it exceeds any memory."""
    if not 0 <= _whole(value) <= LARGEST_EXTENT:
        raise ValueError(f"{value} is no size of a tensor")
    return int(value)


@lru_cache(maxsize=4096)
def element_kinds(kind: str) -> tuple[str, ...]:
    """Types of the elements of ``GenericList[A,B]`` or ``Tuple[A,B]``, split at commas outside brackets."""
    start = kind.find("[")
    if start < 0 or not kind.endswith("]"):
        return ()
    parts, depth, begin = [], 0, start + 1
    for place in range(start + 1, len(kind) - 1):
        sign = kind[place]
        if sign in "[(<":
            depth += 1
        elif sign in "])>":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(kind[begin:place])
            begin = place + 1
    last = kind[begin:-1]
    return tuple([*parts, last] if last else parts)


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None


_SCHEMA = re.compile(r"1\.[01]\.\d+(-chakra\.[\d.]+)?")
USER_SCOPE = 7  # at::RecordScope::USER_SCOPE
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION
_NUMBERS = ("id", "parent", "scope", "thread", "forward_thread", "sequence", "function")
GROUPS_NODE = "## process_group:init ##"
_COLLECTIVE_ATTRIBUTES = ("collective_name", "dtype", "in_msg_nelems", "out_msg_nelems", "pg_name", "pg_size")


@dataclass(slots=True)
class TraceNode:
    """One node in any layout: schema 1.0.1 keeps its fields at the top level, later ones in ``attrs``."""

    id: int
    name: str
    parent: int
    scope: int
    thread: int
    # Thread and sequence number of the forward operator, for a backward one.
    forward_thread: int
    sequence: int
    # Id of the record function.
    function: int
    schema: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    extra: dict[str, Value]


def read_execution_trace(path: Path | str, only: Container[int] | None = None) -> OperatorTrace:
    """Read the operator calls of the execution trace ``path`` in the order they began (archives: :func:`read_members`).

    Every call has ``attributes["rf_id"]`` (the record-function id that links it to a profile) and the schema's
    ``overload``; collectives also have name, group and sizes in elements. The format has no rank: ``rank`` is the index
    of the device that holds most tensors, if that is a rank of the group. ``only``: ids of the nodes to keep (``None``:
    all); the others use no memory. Raises :class:`InputError` naming the file if it is truncated, of another format or
    of another schema.
    """
    header: dict[str, Any] = {}
    values = ValueReader()
    nodes: list[TraceNode] = []
    for key, value in read_members(path):
        if key == "nodes":
            if only is None or (isinstance(value, dict) and value.get("id") in only):
                nodes.append(_read_node(value, values, path))
        elif key == "traceEvents":
            raise InputError(f"{path}: a profiler (Kineto) trace, not an execution trace; give it as --kineto")
        else:
            header[key] = value
    _check_header(header, nodes, path)
    nodes.sort(key=lambda node: node.id)  # ids are assigned at the begin of a call; the file is in order of ends
    return trace_of_nodes(nodes, header, str(path))


def _check_header(header: Mapping[str, Any], nodes: list[TraceNode], path: Path | str) -> None:
    schema = header.get("schema")
    if not isinstance(schema, str):
        raise InputError(f"{path}: not an execution trace (no schema); record one with ExecutionTraceObserver")
    if not _SCHEMA.fullmatch(schema):
        raise InputError(f"{path}: execution trace schema {schema!r} is not known; known are 1.0.x and 1.1.x")
    if not nodes:
        raise InputError(f"{path}: an execution trace without nodes; start the observer before the step to record")


def _read_node(node: Any, values: ValueReader, path: Path | str) -> TraceNode:
    try:
        found = _flat_node(node, values) if "attrs" not in node else _nested_node(node, values)
        for field in _NUMBERS:
            if type(getattr(found, field)) is not int:
                raise TypeError(f"{field} is {str(getattr(found, field))[:40]!r}, not a whole number")
        if not isinstance(found.name, str) or not isinstance(found.schema, str):
            raise TypeError("its name or schema is no text")
        return found
    except MALFORMED as error:
        name = node.get("id") if isinstance(node, dict) else node
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: node {name!r} is not of an execution trace ({reason}); record it again") from None


def _flat_node(node: Mapping[str, Any], values: ValueReader) -> TraceNode:
    return TraceNode(
        node["id"],
        node["name"],
        node["parent"],
        node["scope"],
        node["tid"],
        node["fw_tid"],
        node["seq_id"],
        node["rf_id"],
        node["op_schema"],
        values.read(node["inputs"], node["input_shapes"], node["input_types"]),
        values.read(node["outputs"], node["output_shapes"], node["output_types"]),
        {},
    )


def _nested_node(node: Mapping[str, Any], values: ValueReader) -> TraceNode:
    attributes = {item["name"]: item["value"] for item in node["attrs"]}
    inputs, outputs = node["inputs"], node["outputs"]
    extra: dict[str, Value] = {key: attributes[key] for key in _COLLECTIVE_ATTRIBUTES if key in attributes}
    if attributes.get("kernel_backend"):
        extra["kernel_backend"] = attributes["kernel_backend"]
        extra["kernel_file"] = attributes.get("kernel_file", "")
    return TraceNode(
        node["id"],
        node["name"],
        node["ctrl_deps"],
        attributes["scope"],
        attributes["tid"],
        attributes["fw_tid"],
        attributes["seq_id"],
        attributes["rf_id"],
        attributes["op_schema"],
        values.read(inputs["values"], inputs["shapes"], inputs["types"], inputs.get("strides")),
        values.read(outputs["values"], outputs["shapes"], outputs["types"], outputs.get("strides")),
        extra,
    )


def trace_of_nodes(nodes: list[TraceNode], header: Mapping[str, Any], source: str) -> OperatorTrace:
    """Return the calls of ``nodes``, which are in the order in which they began."""
    threads = {tid: place for place, tid in enumerate(sorted({node.thread for node in nodes if node.thread > 0}))}
    groups = _process_groups(nodes, source)
    calls: dict[int, OperatorCall] = {}
    # Node -> (annotations around it, operator around it).
    annotations: dict[int, tuple[tuple[str, ...], int | None]] = {}
    for node in nodes:
        if node.id in annotations:  # a repeated id could make a call its own ancestor
            raise InputError(f"{source}: node {node.id} is there twice; record the trace again")
        around, parent = annotations.get(node.parent, ((), None))
        if node.parent in calls:
            parent = node.parent
        if node.scope == USER_SCOPE:
            named = () if node.name.startswith("[pytorch|") else (node.name,)
            annotations[node.id] = (around + named, parent)
            continue
        annotations[node.id] = (around, node.id)
        if node.name != GROUPS_NODE:
            above = calls[parent] if parent is not None else None
            calls[node.id] = _call(node, above, around, threads)
    found = tuple(calls.values())
    world = max((len(ranks) for ranks in groups.values()), default=1)
    pid = header.get("pid")
    process = pid if isinstance(pid, int) else None
    return OperatorTrace(found, _rank(found, world), world, groups, source, process, ranges=_named_ranges(nodes, calls))


def _named_ranges(nodes: Iterable[TraceNode], calls: Mapping[int, OperatorCall]) -> NamedRanges:
    """Return the ranges named by the script.

    A backward call belongs to the ranges of the last forward call with its sequence number, which made the autograd
    node; earlier ones with this number made none.
    """
    entered: dict[int, NamedRange] = {}
    innermost: dict[int, int] = {}  # node -> entry that it is, or is in
    for node in nodes:
        around = innermost.get(node.parent)
        if node.scope == USER_SCOPE and is_named_by_script(node.name):
            entered[node.id] = NamedRange(node.id, node.name, around)
            around = node.id
        if around is not None:
            innermost[node.id] = around
    if not entered:
        return NamedRanges()
    numbered = ((call.id, call.sequence, call.phase == "backward") for call in calls.values())
    return NamedRanges(
        entered,
        {call: entry for call, entry in innermost.items() if call in calls},
        of_forward_calls(numbered, innermost),
    )


def _call(
    node: TraceNode, above: OperatorCall | None, around: tuple[str, ...], threads: Mapping[int, int]
) -> OperatorCall:
    attributes: dict[str, Value] = {"rf_id": node.function, **node.extra}
    if around:
        attributes["annotations"] = around
    overload = node.schema.partition("(")[0].removeprefix(node.name).lstrip(".")
    if overload:
        attributes["overload"] = overload
    thread = threads.get(node.thread, 0)
    module = next((name for name in reversed(around) if name.startswith("nn.Module: ")), "")
    return OperatorCall(
        node.id,
        node.name,
        above.id if above else None,
        thread,
        node.inputs,
        node.outputs,
        _phase(node, above, around),
        node.sequence if node.sequence >= 0 else None,
        module.removeprefix("nn.Module: "),
        attributes,
    )


def _phase(node: TraceNode, above: OperatorCall | None, around: tuple[str, ...]) -> Phase:
    """Phase of a call from its surroundings: annotations of PyTorch itself, the autograd thread, backward functions."""
    if any(name.startswith("Optimizer.") for name in around):
        return "optimizer"
    if any(name.startswith("enumerate(DataLoader)") for name in around):
        return "data"
    if node.scope == _BACKWARD_SCOPE or node.forward_thread > 0 or node.name.startswith("autograd::engine::"):
        return "backward"
    return above.phase if above else ("forward" if node.thread <= 1 else "backward")


def _process_groups(nodes: Iterable[TraceNode], source: str) -> dict[str, tuple[int, ...]]:
    """Read the process groups of the init nodes; an empty list of ranks means the first ``group_size`` ranks."""
    groups: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        if node.name != GROUPS_NODE or not node.inputs:
            continue
        try:
            for group in decoded(str(node.inputs[0])):
                ranks = group.get("ranks") or range(group["group_size"])
                groups[str(group["pg_name"])] = tuple(int(rank) for rank in ranks)
        except MALFORMED as error:
            raise InputError(
                f"{source}: process groups of node {node.id} are not readable ({error}); record it again"
            ) from None
    return groups


def _rank(calls: Iterable[OperatorCall], world_size: int) -> int:
    devices = Counter(
        tensor.device for call in calls for tensor in tensors(call.inputs) if tensor.device.startswith("cuda:")
    )
    if not devices:
        return 0
    index = int(devices.most_common(1)[0][0].partition(":")[2])
    return index if index < world_size else 0
