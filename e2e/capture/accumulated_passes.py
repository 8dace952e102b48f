"""Passes of accumulated gradients: of many equal ones between two steps of the optimizer only some are run.

The first four are run, since the first one makes the gradients and the others show that the passes are equal, and the
last two, which may communicate. Modules of those between return outputs of the same shapes without running, so the
number of passes must be known: that of the step before. A step that turns out to have another number is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from e2e.capture.evaluation import form_of, is_plain, key_of
from e2e.capture.recorder import Recorder
from e2e.step.collective_names import POINT_TO_POINT, kind_of
from e2e.step.operator_trace import RepeatedPass, shape_of

# Passes that are run before equal ones are left out, and behind them.
RUN_FIRST, RUN_LAST = 4, 2


class AccumulatedPasses:
    """Passes of the step that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # False where every pass must run.
        self.leaving_out = True
        # Passes of the step before; 0 if there is none.
        self.before = 0
        # Form of the outputs of outermost modules in the last pass that ran, and in the current one.
        self._last: dict[Hashable, Any] = {}
        self._now: dict[Hashable, Any] = {}
        # First and last of the records of each of those calls in the current step.
        self._called: list[tuple[int, int]] = []
        self._passes = 0
        self._anchor = torch.empty((), device="meta", requires_grad=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which passes are noticed."""
        call, differentiate = torch.nn.Module.__call__, torch.autograd.grad

        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            inside = self.recorder.depth or self.recorder.capturing or torch._C._current_graph_task_id() != -1
            if inside or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
                return call(module, *args, **kwargs)
            return self._pass(call, module, args, kwargs)

        def differentiated(*args: Any, **kwargs: Any) -> Any:
            self.leaving_out = False  # for weights, perhaps, of which passes left out know nothing
            return differentiate(*args, **kwargs)

        with patch.object(torch.nn.Module, "__call__", called), patch.object(torch.autograd, "grad", differentiated):
            yield

    def is_whole(self) -> bool:
        """True if the last passes of the step, which is to be cut, have been run."""
        return not self.recorder.left_out or self.recorder.finished_passes == self.before

    def end_step(self) -> RepeatedPass | None:
        """Return the pass that stands for those left out of the step, which is to be cut; None if none was."""
        begins, more = self.recorder.pass_begins(), self.recorder.left_out
        self.before = self.recorder.finished_passes
        self._passes, self._last, self._now, self._called = 0, {}, {}, []
        return RepeatedPass(begins[RUN_FIRST - 1], begins[RUN_FIRST], more) if more else None

    def _pass(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        key = (key_of(module, args, kwargs), _synchronizes(module))
        if not recorder.leaving_out and recorder.finished_passes > self._passes:
            self._passes, self._last, self._now = recorder.finished_passes, self._now, {}
            if self.leaving_out and key in self._last and self._is_equal(args, kwargs):
                recorder.leave_out()
                self._now = self._last
        if recorder.leaving_out and key in self._last:
            return self._imitated(self._last[key])
        first = recorder.recorded
        outputs = call(module, *args, **kwargs)
        self._called.append((first, recorder.recorded))
        if key[0] is not None and is_plain(outputs) and not recorder.leaving_out:
            self._now[key] = form_of(outputs, recorder)
        return outputs

    def _is_equal(self, args: Any, kwargs: Any) -> bool:
        """True if the pass that begins is like the one before, and is not one of the last."""
        if self._passes < RUN_FIRST or (self.before and self._passes >= self.before - RUN_LAST):
            return False
        if self.recorder.left_out:
            return True
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves((args, kwargs))):
            return False  # its backward pass goes on
        begins = self.recorder.pass_begins()
        one, other = (
            [(row["name"], row["thread"], shape_of(row.get("inputs", ()))) for row in self.recorder.records(begin, end)]
            for begin, end in zip(begins[-3:-1], begins[-2:], strict=True)
        )
        return one == other and not self._sends_between_modules(begins[-3], begins[-2])

    def _sends_between_modules(self, begin: int, end: int) -> bool:
        """True if the stages of a pipeline send from ``begin`` to ``end``; modules themselves do in a ring of ranks."""
        return any(
            kind_of(row["name"]) in POINT_TO_POINT
            and row["phase"] == "forward"
            and not any(first <= row["id"] < last for first, last in self._called)
            for row in self.recorder.records(begin, end)
        )

    def _imitated(self, outputs: Any) -> Any:
        """Return outputs like these, whose backward pass does nothing."""
        leaves, form = tree_flatten(outputs)
        found = [torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        connected = _Imitation.apply(self._anchor, self.recorder, *(found[place] for place in places))
        for place, tensor in zip(places, connected, strict=True):
            found[place] = tensor
        return tree_unflatten(found, form)


def _synchronizes(module: torch.nn.Module) -> bool | None:
    """False if DDP or FSDP1 accumulates gradients in this pass, for which the optimizer has no use; True if it reduces
    them, None without these.
    """
    for part in (module, *module.children()):
        for name in ("require_backward_grad_sync", "_sync_gradients"):
            if hasattr(part, name):
                return bool(getattr(part, name))
    return None


class _Imitation(torch.autograd.Function):
    """Module of a pass that is left out."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, recorder: Recorder, *outputs: torch.Tensor) -> Any:
        ctx.recorder = recorder
        return tuple(torch.empty_like(output) for output in outputs)  # which may be written in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.recorder.leaving_out:
            torch.autograd.Variable._execution_engine.queue_callback(ctx.recorder.go_on)
        return (None,) * (2 + len(gradients))
