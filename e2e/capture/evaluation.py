"""Forward passes of a program that train nothing: evaluation before the first step and between steps.

Passes are grouped by the line that they run from, to separate them from the training step. Each group has its number of
passes and, if a condition such as ``if step % eval_interval == 0`` reveals it, its period in steps. Long runs of equal
passes cost little: after a few that ran, the next ones get outputs of the same shapes, without running
(:attr:`EvaluationPasses.replaying`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from e2e.capture.imports import patched_imports
from e2e.capture.periods import period
from e2e.capture.recorder import Recorder
from e2e.capture.script_lines import script_line

# Equal passes in a row that are run before the following ones are replayed.
RUN_FIRST = 4
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
    # Range of the recorder's calls with the first of them.
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
        self._last: Hashable = None
        self._equal = 0
        self._outputs: Any = None

    def taken(self) -> list[PassGroup]:
        """Return the groups since the last call."""
        found, self.groups = self.groups, []
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which passes are noticed."""
        call = torch.nn.Module.__call__

        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.depth or torch._C._current_graph_task_id() != -1:  # inside another module
                return call(module, *args, **kwargs)
            if torch.is_grad_enabled():
                self._last = None
                return call(module, *args, **kwargs)
            return self._pass(call, module, args, kwargs)

        with patch.object(torch.nn.Module, "__call__", called):
            yield

    def _pass(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        group = self._group(module)
        group.passes += 1
        key = key_of(module, args, kwargs)
        self._equal = self._equal + 1 if key is not None and key == self._last else 0
        self._last = key
        if self.replaying and self._equal >= RUN_FIRST and self._outputs is not None:
            group.replayed += 1
            return _copied(self._outputs)
        begin = self.recorder.recorded
        outputs = call(module, *args, **kwargs)
        if group.passes == 1:
            group.calls = slice(begin, self.recorder.recorded)
        self._outputs = form_of(outputs, self.recorder) if is_plain(outputs) else None
        return outputs

    def _group(self, module: torch.nn.Module) -> PassGroup:
        title, line = type(module).__name__, script_line()
        for group in self.groups:
            if (group.title, group.line) == (title, line):
                return group
        group = PassGroup(title, line, period(sys._getframe(3)))
        self.groups.append(group)
        return group


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
