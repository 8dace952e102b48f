"""Capture of one steady step of a workload."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from e2e.capture.cuda_streams import StreamState, pretend_streams
from e2e.capture.environment import pretend_gpu
from e2e.capture.functions import GpuDecisions
from e2e.capture.generated_code import generated_kernels, without_compiler
from e2e.capture.recorder import Recorder
from e2e.capture.scan_libraries import linear_attention_kernels
from e2e.capture.script_ranges import heard
from e2e.capture.threads import followed_threads
from e2e.capture.watch import watched
from e2e.step.choices import OptimizerForm
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions


@dataclass(frozen=True)
class CapturedWorkload:
    """Model on the meta device and a function that runs one step of it."""

    name: str
    module: torch.nn.Module
    step: Callable[[], Any]
    # Streams created before the step.
    streams: StreamState | None = None
    # True if parts of it went through ``torch.compile``.
    compiled: bool = False
    # Samples of a step, of ``sequence_length`` tokens each, if known.
    samples: int | None = None
    sequence_length: int | None = None
    # Class name of its optimizer, if known.
    optimizer: str = ""


def capture(workload: CapturedWorkload, options: StepOptions | None = None) -> OperatorTrace:
    """Capture the operators of one steady step of ``workload``, as a GPU would run them, without allocating memory.

    Errors raised by the step pass through unchanged.
    """
    options = options or StepOptions()
    recorder = Recorder(module_paths(workload), workload.streams)
    with recording(recorder, options):
        workload.step()
    return OperatorTrace(
        recorder.calls(),
        source=workload.name,
        compiled=workload.compiled or bool(recorder.compiled) or is_compiled(workload.module),
        ranges=recorder.ranges.found(),
        passes=tuple(recorder.passes),
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """True if some part of ``module`` went through ``torch.compile``. PyTorch runs it eagerly while it is recorded."""
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def module_paths(workload: CapturedWorkload) -> dict[int, str]:
    """Return id of each module -> its path."""
    return {id(module): path for path, module in workload.module.named_modules()}


@contextmanager
def recording(recorder: Recorder, options: StepOptions) -> Iterator[None]:
    """Context in which everything is recorded as a GPU would run it."""
    with ExitStack() as stack:
        stack.enter_context(pretend_gpu(lambda: recorder.host_call("cudaDeviceSynchronize"), options.seen_gpu))
        stack.enter_context(pretend_streams(recorder.streams))
        stack.enter_context(heard(recorder))
        stack.enter_context(_module_paths(recorder))
        stack.enter_context(_steady_optimizers(recorder, options.optimizer or "foreach"))
        stack.enter_context(_noted_gradients(recorder))
        if options.mode == "inference":
            stack.enter_context(torch.no_grad())
        stack.enter_context(without_compiler(recorder.compiled))
        stack.enter_context(generated_kernels(recorder))
        stack.enter_context(linear_attention_kernels(options.linear_attention))
        stack.enter_context(watched(lambda: recorder.called))
        stack.enter_context(followed_threads(recorder, options.form))
        stack.enter_context(GpuDecisions(recorder, options.form))
        stack.enter_context(recorder)
        yield


@contextmanager
def _module_paths(recorder: Recorder) -> Iterator[None]:
    before = register_module_forward_pre_hook(lambda module, inputs: recorder.enter_module(module))
    after = register_module_forward_hook(recorder.leave_module, always_call=True)
    try:
        with warnings.catch_warnings():
            # PyTorch warns about these hooks for a module that a script compiles.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def _noted_gradients(recorder: Recorder) -> Iterator[None]:
    """Context in which ``recorder`` notes calls that clear gradients: the previous step has left some, which hold
    memory.
    """

    def noted(zero_grad: Any) -> Any:
        def clear(self: Any, set_to_none: bool = True) -> None:
            recorder.note_gradients(set_to_none)
            zero_grad(self, set_to_none)

        return clear

    with ExitStack() as stack:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            stack.enter_context(patch.object(owner, "zero_grad", noted(owner.zero_grad)))
        yield


@contextmanager
def _steady_optimizers(recorder: Recorder, form: OptimizerForm) -> Iterator[None]:
    """Context that marks optimizer steps. The first step of an optimizer, which makes its state, runs unrecorded; the
    second is recorded.
    """
    open_frames: dict[int, Any] = {}
    warming: set[int] = set()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in warming:
            return
        _choose_form(optimizer, form)
        if not recorder.enabled:  # called by another optimizer while that makes its state
            return
        if not optimizer.state and len(args) < 2 and not kwargs.get("closure"):
            warming.add(id(optimizer))
            with recorder.paused():
                optimizer.step()
            warming.discard(id(optimizer))
        frame = recorder.annotation(f"Optimizer.step#{type(optimizer).__name__}.step")
        open_frames[id(optimizer)] = frame, recorder.phase
        recorder.phase = "optimizer"

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in open_frames:
            frame, recorder.phase = open_frames.pop(id(optimizer))
            recorder.close(frame)

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_form(optimizer: Any, form: OptimizerForm) -> None:
    """Set the form if the optimizer supports it and the script left it open; foreach is PyTorch's own default."""
    for group in optimizer.param_groups:
        if form == "fused" and "fused" in group and group["fused"] is None and group.get("foreach") is None:
            group["fused"] = True
