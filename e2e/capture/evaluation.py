"""Forward passes of a program that train nothing: evaluation before the first step and between steps.

Passes are grouped by the line that they run from, to separate them from the training step. Each group has its number of
passes and, if a condition such as ``if step % eval_interval == 0`` reveals it, its period in steps. Long runs of equal
passes cost little: after a few that ran, the next ones get outputs of the same shapes, without running, and nothing is
recorded between them (:attr:`EvaluationPasses.replaying`). So do passes with gradients that nobody asks for: the graphs
of those before them, from the same line, are gone. One whose gradients are asked for after all runs then. Of many that
differ the first ones are recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from e2e.capture.imports import patched_imports
from e2e.capture.periods import period
from e2e.capture.python_calls import Uncounted
from e2e.capture.recorder import Recorder
from e2e.capture.script_lines import script_line

# Equal passes in a row that are run before the following ones are replayed.
RUN_FIRST = 4
# Passes from one line between two steps after which more of them run but are not recorded, such as those of a
# generation whose cache grows with each.
MOST_DIFFERENT = 64
_PLAIN = (int, float, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class PassGroup:
    """Passes without gradients that ran from one line of the program, between two steps."""

    title: str
    # Place of the call (``train.py:120``).
    line: str
    # Steps after which the program runs them again; None if its source does not say.
    every: int | None
    passes: int = 0
    replayed: int = 0
    # Range of the recorder's calls with one of the first of them.
    calls: slice = field(default_factory=lambda: slice(0))

    @property
    def told(self) -> str:
        """Description of the group."""
        count = f"{self.passes:,} forward passes" if self.passes > 1 else "a forward pass"
        often = f"every {self.every:,} steps" if self.every else "now and then"
        return f"{count} of {self.title} without gradients {often}, from {self.line}"


class EvaluationPasses:
    """Collector of the passes of outermost modules without gradients since the last step of the optimizer."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.groups: list[PassGroup] = []
        # False where every pass must run, because steps have such passes too.
        self.replaying = True
        # Passes of the current step that were not run.
        self.passed_over = 0
        # Outputs of each pass without gradients since the last one with them, and how often it was run.
        self._ran: dict[Hashable, tuple[Any, int]] = {}
        # Outputs of each pass with gradients of this step, and marks, each of which lives as long as its graph.
        self._graphs: dict[Hashable, tuple[Any, list[weakref.ref[_Mark]]]] = {}
        self._anchor = torch.empty((), device="meta", requires_grad=True)

    def taken(self) -> list[PassGroup]:
        """Return the groups since the last call."""
        found, self.groups, self.passed_over, self._graphs = self.groups, [], 0, {}
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which passes are noticed."""
        call = torch.nn.Module.__call__

        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.depth or torch._C._current_graph_task_id() != -1:  # inside another module
                return call(module, *args, **kwargs)
            if torch.is_grad_enabled():
                return self._pass_with_gradients(call, module, args, kwargs)
            return self._pass(call, module, args, kwargs)

        with patch.object(torch.nn.Module, "__call__", called):
            yield

    def _pass(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        group = self._group(module)
        group.passes += 1
        key = key_of(module, args, kwargs) if _has_parameters(module) else None
        form, ran = self._ran.get(key, (None, 0))
        if self.replaying and ran > RUN_FIRST:
            group.replayed += 1
            self._pass_over()
            return _copied(form)
        if self.replaying and group.passes > MOST_DIFFERENT:
            group.replayed += 1
            self._pass_over()
            return call(module, *args, **kwargs)
        if key is not None or _has_parameters(module):  # else a loss, of outputs that may be no real ones
            self._go_on()
        begin = self.recorder.recorded
        outputs = call(module, *args, **kwargs)
        if group.passes <= 2:  # the first one of a generation has all of its prompt
            group.calls = slice(begin, self.recorder.recorded)
        if key is not None and is_plain(outputs):
            self._ran[key] = form_of(outputs, self.recorder), ran + 1
        return outputs

    def _pass_with_gradients(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.recorder.leaving_out or self.recorder.capturing or not _has_parameters(module):
            return call(module, *args, **kwargs)
        self._ran.clear()
        inputs = key_of(module, args, kwargs)
        key = inputs, script_line(), self.recorder.finished_passes
        form, graphs = self._graphs.get(key, (None, []))
        unused = sum(graph() is not None for graph in graphs) <= 1  # that of the last one may be held still
        if self.replaying and unused and len(graphs) >= RUN_FIRST:
            self._pass_over()
            return self._imitated(form, lambda: call(module, *args, **kwargs))
        self._go_on()
        outputs = call(module, *args, **kwargs)
        nodes = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        given = any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves((args, kwargs)))
        if inputs is not None and nodes and None not in nodes and not given and is_plain(outputs):
            mark = _Mark()
            for node in nodes:
                node.metadata[_Mark] = mark
            self._graphs[key] = form_of(outputs, self.recorder), [*graphs, weakref.ref(mark)]
        return outputs

    def _imitated(self, form: Any, call: Callable[[], Any]) -> Any:
        """Return outputs of this form, whose backward pass makes the ``call``."""

        def run() -> Any:
            self.replaying = False
            self._go_on()
            return call()

        leaves, tree = tree_flatten(form)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        found = [torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        results = _RunLater.apply(self._anchor, run, places, *(found[place] for place in places))
        for place, result in zip(places, results, strict=True):
            found[place] = result
        return tree_unflatten(found, tree)

    def _pass_over(self) -> None:
        self.passed_over += 1
        self.recorder.pass_over()

    def _go_on(self) -> None:
        if self.recorder.passing_over:
            self.recorder.go_on()

    def _group(self, module: torch.nn.Module) -> PassGroup:
        title, line = type(module).__name__, script_line()
        for group in self.groups:
            if (group.title, group.line) == (title, line):
                return group
        group = PassGroup(title, line, period(sys._getframe(3)))
        self.groups.append(group)
        return group


def _has_parameters(module: torch.nn.Module) -> bool:
    """False for losses and metrics, which are called between passes."""
    with Uncounted():
        return next(module.parameters(), None) is not None


class _Mark:
    """Kept by a graph of autograd."""


class _RunLater(torch.autograd.Function):
    """Module that runs when the gradients of its outputs at ``places`` are asked for."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: Callable[[], Any], places: list[int], *outputs: Any) -> Any:
        ctx.run, ctx.places = run, places
        return tuple(torch.empty_like(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            leaves = tree_leaves(ctx.run())
        torch.autograd.backward([leaves[place] for place in ctx.places], gradients)
        return (None,) * (3 + len(gradients))


def key_of(module: torch.nn.Module, args: Any, kwargs: Any) -> Hashable:
    """Return a key that determines the shapes of the outputs; None if an argument is an object with its own state."""
    leaves, form = tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return id(module), module.training, str(form), tuple(map(_signature, leaves))


def _signature(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def is_plain(outputs: Any) -> bool:
    return all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in tree_flatten(outputs)[0])


def form_of(outputs: Any, recorder: Recorder) -> Any:
    """Return tensors like these, unknown to ``recorder``: ``outputs`` themselves, if kept, would never be freed."""

    def alike(output: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(output).requires_grad_(output.requires_grad)

    with recorder.paused(), torch.no_grad():
        return tree_map_only(torch.Tensor, alike, outputs)


def _copied(outputs: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.empty_like, outputs)


@contextmanager
def named_generation(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the generation of Transformers is a range of its own, ``generate``."""

    def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
        generate = module.GenerationMixin.generate

        @wraps(generate)
        def named(model: Any, *args: Any, **kwargs: Any) -> Any:
            note("generate: sequences are as long as they may become; no token ends one")
            with torch.profiler.record_function("generate"):
                return generate(model, *args, **kwargs)

        yield module.GenerationMixin, "generate", named

    with patched_imports({"transformers.generation.utils": patches}):
        yield
