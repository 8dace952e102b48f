"""Capture of a model with few layers: its parts, its parameters, its optimizer. Imports ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import compile_rank, fused_storages
from e2e.parallelism.pieces import (
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

# Parameters of the optimizer -> function that runs one step.
CapturedOptimizer = Callable[[list[nn.Parameter]], Callable[[], Any]]


@dataclass(frozen=True)
class Captured:
    """Captured model."""

    pieces: Pieces
    # Shapes of the parameters of each part.
    shapes: Mapping[Name, Sequence[tuple[int, ...]]]
    # Shape of the word embedding, if the head shares it.
    tied: tuple[int, ...] | None
    dtype: torch.dtype
    boundary_bytes: int
    # Shapes of the trained parameters (None: all).
    trained: Mapping[Name, Sequence[tuple[int, ...]]] | None = None


@dataclass(frozen=True)
class ModelSource:
    """Model of :data:`CAPTURED_LAYERS` layers."""

    name: str
    module: nn.Module
    layers: nn.ModuleList
    # Forward pass that returns the loss, or the scores.
    forward: Callable[[], torch.Tensor]
    # Shape of the activations between layers.
    boundary_shape: tuple[int, ...]
    # Modules that selective recomputation runs again.
    repeats: Repeats = nothing_again
    # Layers of the whole model that are like its first.
    leading: int = 1


def capture_model(
    source: ModelSource,
    options: StepOptions,
    ends_compiled: bool = True,
) -> Captured:
    """Capture two passes over ``source``, split into parts.

    Each layer is compiled if ``options`` request it and, with ``ends_compiled``, also the parts before and after the
    layers.
    """
    module = source.module

    def step() -> None:
        module.zero_grad(set_to_none=True)
        for _ in range(2):
            output = source.forward()
            # Scores, in inference, are not scalar: a free gradient marks the borders of the parts.
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
        trained, tied = _shapes(source, trained=True)[0], None  # a frozen embedding has no shared gradients
    return Captured(pieces, shapes, tied, dtype, boundary.nbytes, trained)


def find_layers(module: nn.Module, source: str, first_differs: bool = False) -> nn.ModuleList:
    """Return the list of identical layers with most parameters; raise ``InputError`` if there is none.

    ``first_differs``: the first layer may differ.
    """
    found = [each for each in module.modules() if isinstance(each, nn.ModuleList) and _alike(each, first_differs)]
    if not found:
        raise InputError(
            f"{source}: has no list of alike layers, so it cannot be put together for --parallel; "
            "give a --script with --gpus"
        )
    return max(found, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def _alike(layers: nn.ModuleList, first_differs: bool) -> bool:
    """True if all layers have parameters of the same shapes."""
    if len(layers) != CAPTURED_LAYERS:
        return False
    shapes = [[tuple(parameter.shape) for parameter in layer.parameters()] for layer in layers]
    return all(each == shapes[1] for each in shapes[1 if first_differs else 0 :])


def _shapes(
    source: ModelSource, trained: bool = False
) -> tuple[dict[Name, list[tuple[int, ...]]], tuple[int, ...] | None]:
    """Return the shapes of parameters before, in and after the layers, in model order. ``trained``: trained parameters
    only.
    """
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
    """Return the word embedding if the head shares it, or None."""
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
    """Capture one steady optimizer step over parameters of ``shapes`` with gradients; add its calls to ``calls``.

    Return its items, and the peak bytes of temporary tensors.
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
