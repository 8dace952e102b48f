"""A model captured once with few layers: its parts, its parameters, its optimizer. Imports ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import compile_rank, fused_storages
from e2e.parallelism.layers.pieces import (
    CAPTURED_LAYERS,
    FIRST,
    LAST,
    Called,
    Item,
    Name,
    Pieces,
    Repeats,
    Work,
    cut,
    nothing_again,
    parts_of,
)
from e2e.step.execution_graph import CallInfo, HostWork, Launch, Synchronize
from e2e.step.memory import peak_memory
from e2e.step.options import StepOptions

# Parameters of the optimizer's list -> optimizer and what one step runs.
CapturedOptimizer = Callable[[list[nn.Parameter]], Callable[[], Any]]


@dataclass(frozen=True)
class Captured:
    """``shapes``: of the parameters of each part; ``trained``: of those that are trained (``None``: all). ``tied``: the
    head is the word embedding. ``eight_bits``: places of the parameters of each part whose products are in 8 bits.
    """

    pieces: Pieces
    shapes: Mapping[Name, Sequence[tuple[int, ...]]]
    tied: tuple[int, ...] | None
    dtype: torch.dtype
    boundary_bytes: int
    trained: Mapping[Name, Sequence[tuple[int, ...]]] | None = None
    eight_bits: Mapping[Name, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSource:
    """A model of :data:`CAPTURED_LAYERS` layers and its forward pass, which gives the loss, or the scores.
    ``boundary_shape``: of the activations between layers. ``repeats``: what selective recomputation runs again.
    ``leading``: layers of the whole model that are like its first.
    """

    name: str
    module: nn.Module
    layers: nn.ModuleList
    forward: Callable[[], torch.Tensor]
    boundary_shape: tuple[int, ...]
    repeats: Repeats = nothing_again
    leading: int = 1


def capture_model(
    source: ModelSource,
    options: StepOptions,
    ends_compiled: bool = True,
) -> Captured:
    """Two passes over ``source``, cut into parts, each layer compiled where ``options`` say so and, with
    ``ends_compiled``, what is before and behind the layers.
    """
    module = source.module

    def step() -> None:
        module.zero_grad(set_to_none=True)
        for _ in range(2):
            output = source.forward()
            # Scores, of inference, are no number: a gradient that costs nothing to make shows where the parts are.
            output.backward(None if output.dim() == 0 else output.new_empty(()).expand(output.shape))

    trace = capture(CapturedWorkload(source.name, module, step), options)
    path = next(name for name, each in module.named_modules() if each is source.layers)
    graph = lower(trace, options)
    unneeded: set[int] | None = None
    if options.compile:
        parts = {
            call: part for call, part in parts_of(trace, path).items() if ends_compiled or isinstance(part[2], int)
        }
        unneeded = fused_storages(graph, trace, parts)
        graph = compile_rank(graph, trace, parts)
    pieces = replace(cut(trace, graph, path, source.repeats, unneeded), leading=source.leading)
    shapes, tied = _shapes(source)
    dtype = next(module.parameters()).dtype
    boundary = torch.empty(source.boundary_shape, dtype=dtype, device="meta")
    trained = None
    if not all(parameter.requires_grad for parameter in module.parameters()):
        trained, tied = _shapes(source, trained=True)[0], None  # a frozen embedding has no gradients to share
    return Captured(pieces, shapes, tied, dtype, boundary.nbytes, trained, _eight_bits(source.layers))


def _eight_bits(layers: nn.ModuleList) -> dict[Name, frozenset[int]]:
    """Of each layer the places, among its parameters, of weights of the linear layers that compute in 8 bits."""
    found: dict[Name, frozenset[int]] = {}
    for place, layer in enumerate(layers):
        weights = {id(each.weight) for each in layer.modules() if getattr(each, "eight_bits", False)}
        found[place] = frozenset(at for at, each in enumerate(layer.parameters()) if id(each) in weights)
    return found


def find_layers(module: nn.Module, source: str, first_differs: bool = False) -> nn.ModuleList:
    """The list of alike layers that holds most parameters; ``InputError`` if there is none.

    ``first_differs``: the first of them may be another.
    """
    found = [each for each in module.modules() if isinstance(each, nn.ModuleList) and _alike(each, first_differs)]
    if not found:
        raise InputError(
            f"{source}: has no list of alike layers, so it cannot be put together for --parallel; "
            "give a --script with --gpus"
        )
    return max(found, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def _alike(layers: nn.ModuleList, first_differs: bool) -> bool:
    """Whether every layer has parameters of the same shapes."""
    if len(layers) != CAPTURED_LAYERS:
        return False
    shapes = [[tuple(parameter.shape) for parameter in layer.parameters()] for layer in layers]
    return all(each == shapes[1] for each in shapes[1 if first_differs else 0 :])


def _shapes(
    source: ModelSource, trained: bool = False
) -> tuple[dict[Name, list[tuple[int, ...]]], tuple[int, ...] | None]:
    """Parameters before the layers, in each, and after them, in the order of the model. ``trained``: those alone."""
    places: dict[int, Name] = {
        id(parameter): place for place, layer in enumerate(source.layers) for parameter in layer.parameters()
    }
    found: dict[Name, list[tuple[int, ...]]] = {
        FIRST: [],
        **{place: [] for place in range(len(source.layers))},
        LAST: [],
    }
    current: Name = FIRST
    for parameter in source.module.parameters():
        current = places.get(id(parameter), current if current == FIRST else LAST)
        if parameter.requires_grad or not trained:
            found[current].append(tuple(parameter.shape))
    tied = _tied_weight(source.module)
    return found, None if tied is None else tuple(tied.shape)


def _tied_weight(module: Any) -> torch.Tensor | None:
    """The word embedding, if the head is the same."""
    if not hasattr(module, "get_output_embeddings"):
        return getattr(module, "tied_weight", None)
    head = module.get_output_embeddings()
    embedding: torch.Tensor = module.get_input_embeddings().weight
    return embedding if head is not None and head.weight is embedding else None


def capture_optimizer(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    make: CapturedOptimizer,
    options: StepOptions,
    calls: dict[int, CallInfo],
) -> tuple[tuple[Item, ...], int]:
    """The items of one steady optimizer step over parameters of ``shapes`` that have gradients; adds to ``calls``.

    Second, the bytes that it needs at its fullest moment besides parameters, gradients and state.
    """
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
    holder = nn.ParameterList(parameters)
    trace = capture(CapturedWorkload("optimizer", holder, make(parameters)), options)
    graph = lower(trace)
    offset = max(calls, default=-1) + 1
    for info in graph.calls.values():
        parent = None if info.parent is None else info.parent + offset
        calls[info.id + offset] = replace(info, id=info.id + offset, phase="optimizer", parent=parent)
    items: list[Item] = [Called(len(trace.calls))]
    for action in graph.threads["main"]:
        if isinstance(action, Launch):
            task = graph.tasks[action.task]
            items.append(Work(task.name, task.kind, task.operators, None if task.call is None else task.call + offset))
        elif isinstance(action, HostWork):
            items.append(HostWork(action.kind, None if action.call is None else action.call + offset))
        elif isinstance(action, Synchronize):
            call = None if action.call is None else action.call + offset
            items.append(Synchronize(action.stream, action.event, None, call))
    return tuple(items), peak_memory(trace).breakdown["temporary"]
