"""Capture of one steady step of a workload.

Threads started by the step are recorded too: PyTorch's modes apply to one thread, so each enters its own. Code that
PyTorch or Triton would generate for the GPU is not generated: a compiled function (``torch.compile``) runs as written
(:mod:`e2e.lowering` applies the fusion, if requested); a launch of a Triton kernel is a record ``triton::NAME`` of its
tensors, which is priced by their bytes.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint as checkpoints
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from e2e.capture.attention import flex_attention
from e2e.capture.cuda_graphs import cuda_graphs
from e2e.capture.cuda_packages import triton_language
from e2e.capture.environment import StreamState, pretend_gpu, pretend_streams
from e2e.capture.gpu_decisions import GpuDecisions, weights_cast_once
from e2e.capture.imports import patched_imports
from e2e.capture.linear_attention import linear_attention_kernels
from e2e.capture.possible_values import true_share
from e2e.capture.python_calls import counted_functions
from e2e.capture.recorder import Recorder, heard
from e2e.capture.regions import Regions, in_region, outside_regions
from e2e.capture.script_errors import watched
from e2e.step.operator_trace import PRODUCTS, TRITON, OperatorTrace
from e2e.step.options import AttentionForm, OptimizerForm, StepOptions


@contextmanager
def without_compiler(found: list[str], recorder: Recorder | None = None) -> Iterator[None]:
    """Context in which ``torch.compile`` and TorchScript leave functions unchanged, and modules may break the graphs of
    the compiler. Names of compiled functions and modules are added to ``found``; their calls are regions of
    ``recorder``.
    """
    compile_module, regions = torch.compile, None if recorder is None else recorder.regions

    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("disable"):
            return model
        if model is None:
            return partial(compiled, **options)
        in_graphs = options.get("mode") in ("reduce-overhead", "max-autotune")
        in_graphs = regions is not None and (
            in_graphs or (options.get("options") or {}).get("triton.cudagraphs", False)
        )
        if isinstance(model, torch.nn.Module):
            found.append(type(model).__name__)
            made = compile_module(model, **{**options, "fullgraph": False, "mode": None, "options": None})
            if recorder is not None and in_graphs:
                recorder.graphed.add(id(made))
            return made
        owner = getattr(model, "__self__", None)
        own = isinstance(owner, (torch.nn.Module, torch.optim.Optimizer)) and regions is not None
        if own or not str(getattr(model, "__module__", "")).startswith("torch."):
            found.append(type(owner).__name__ if own else getattr(model, "__name__", "function"))
        if recorder is None or regions is None:
            return model
        return in_region(in_region(model, recorder.graphs) if in_graphs else model, regions)

    def disabling(module: Any) -> Iterator[tuple[Any, str, Any]]:
        disable = module.disable

        def disabled(fn: Any = None, recursive: bool = True, **more: Any) -> Any:
            if fn is None:
                return partial(disabled, recursive=recursive, **more)
            own = not str(getattr(fn, "__module__", "")).startswith("torch.") and not isinstance(fn, type)
            # PyTorch itself says `wrapping=False`, of the methods of modes, such as the recorder's.
            if not own or regions is None or "wrapping" in more:
                return disable(fn, recursive, **more)
            apart = outside_regions(fn, regions)
            return apart if isinstance(fn, torch.nn.Module) else disable(apart)  # PyTorch's compiler looks for regions

        yield module, "disable", disabled

    def scripted(what: Any = None, *_: Any, **__: Any) -> Any:
        # Compiled from source text, which is not that of the functions replaced here. Its fuser joins the element-wise
        # operators of a function to kernels. Of a module it joins little, since few of PyTorch's operators have
        # gradients in TorchScript (torch/csrc/jit/runtime/symbolic_script.cpp): the others run as without it.
        if regions is None or not callable(what) or isinstance(what, (type, torch.nn.Module)):
            return what
        found.append(getattr(what, "__name__", "function"))
        return in_region(what, regions)

    disables = dict.fromkeys(("torch.compiler", "torch._dynamo"), disabling)
    recomputing = patch.object(checkpoints, "_recomputation_hook", _recomputing(regions or Regions()))
    scripting = patch.object(torch.jit, "script", scripted)
    with patch.object(torch, "compile", compiled), scripting, patched_imports(disables), recomputing:
        yield


def _recomputing(regions: Regions) -> type:
    """Return the hooks of a checkpoint's recomputation, which stops once all tensors are saved again. Compiled code
    saves them at its end: where a checkpoint encloses one of ``regions``, all of it runs.
    """

    class Recomputing(checkpoints._recomputation_hook):
        pack_hook: Callable[[torch.Tensor], Any]

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            pack, found = self.pack_hook, False

            def saved(tensor: torch.Tensor) -> Any:
                nonlocal found
                if found:
                    if regions.inside:
                        return tensor
                    raise checkpoints._StopRecomputationError
                try:
                    return pack(tensor)
                except checkpoints._StopRecomputationError:
                    if not regions.inside:
                        raise
                    found = True
                    return tensor

            self.pack_hook = saved

    return Recomputing


@contextmanager
def generated_kernels(recorder: Recorder) -> Iterator[None]:
    """Context in which flexible attention and launches of Triton kernels are recorded."""

    def flexible(module: Any) -> Iterator[tuple[Any, str, Any]]:
        """Yield the patches of internals of ``flex_attention``, since scripts hold the function itself."""
        yield module, "_validate_device", lambda query, key, value: None
        yield module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True  # its own call of the compiler
        yield module, "flex_attention_hop", partial(flex_attention, recorder.paused)

    def launches(module: Any) -> Iterator[tuple[Any, str, Any]]:
        def launch(self: Any, *args: Any, grid: Any = None, warmup: Any = None, **kwargs: Any) -> None:
            launched(self.__name__, triton_language.tensors_of(args, kwargs), triton_language.multiplies(self))

        yield module.JITFunction, "run", launch

    def launched(name: str, given: list[torch.Tensor], multiplies: bool) -> None:
        recorder.record_call(f"{TRITON}{name}", given, (), {PRODUCTS: True} if multiplies else {})

    def driver(module: Any) -> Iterator[tuple[Any, str, Any]]:
        if hasattr(module.driver, "_active"):
            yield module.driver, "_active", triton_language.DRIVER

    def tuning(module: Any) -> Iterator[tuple[Any, str, Any]]:
        def tuned(self: Any, *args: Any, **kwargs: Any) -> None:
            self.fn.run(*args, **kwargs)

        yield module.Autotuner, "run", tuned

    patches = {
        "torch.nn.attention.flex_attention": flexible,
        "triton.runtime": driver,
        "triton.runtime.jit": launches,
        "triton.runtime.autotuner": tuning,
    }
    with patched_imports(patches), patch.object(triton_language, "launched", launched):
        yield


@contextmanager
def followed_threads(recorder: Recorder, attention: AttentionForm) -> Iterator[None]:
    """Context in which operators of started threads are recorded too, in the order of their calls.

    The host alternates between threads, as with Python's threads. On exit an exception that ended one of them is
    raised.
    """
    failed: list[BaseException] = []
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith("torch.utils.data"):
            start(thread)  # it hands batches over while the step runs
            return
        thread.run = _followed(thread.run, recorder, attention, failed)  # type: ignore[method-assign]
        start(thread)

    with patch.object(threading.Thread, "start", started):
        yield
    if failed:
        raise failed[0]


def _followed(
    run: Callable[[], Any], recorder: Recorder, attention: AttentionForm, failed: list[BaseException]
) -> Callable[[], None]:
    def follow() -> None:
        try:
            with GpuDecisions(recorder, attention), recorder:
                run()
        except SystemExit:
            raise
        except BaseException as error:
            failed.append(error)  # reported by the capture, not by the thread

    return follow


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

    It is the second step, as the first calls other Python functions, which are counted. Errors raised by the step pass
    through unchanged.
    """
    options = options or StepOptions()
    recorder = Recorder(module_paths(workload), workload.streams)
    recorder.counting = True
    with recording(recorder, options):
        with recorder.paused():
            workload.step()
        workload.step()
    return OperatorTrace(
        recorder.calls(),
        source=workload.name,
        compiled=workload.compiled or bool(recorder.compiled) or is_compiled(workload.module),
        ranges=recorder.ranges.found(),
        passes=tuple(recorder.passes),
        storage_bytes=recorder.convert.identities.bytes(),
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
def recording(recorder: Recorder, options: StepOptions, steady: bool = True) -> Iterator[None]:
    """Context in which everything is recorded as a GPU would run it. ``steady``: first steps of optimizers count as
    later ones.
    """
    with ExitStack() as stack:
        memory = recorder.convert.identities.memory
        wait = partial(recorder.host_call, "cudaDeviceSynchronize")
        stack.enter_context(pretend_gpu(wait, options.seen_gpu, memory))
        stack.enter_context(pretend_streams(recorder.streams))
        stack.enter_context(heard(recorder))
        stack.enter_context(_module_paths(recorder))
        stack.enter_context(_marked_optimizers(recorder, options.optimizer or "foreach", steady))
        stack.enter_context(_noted_gradients(recorder))
        if options.mode == "inference":
            stack.enter_context(torch.no_grad())
        stack.enter_context(without_compiler(recorder.compiled, recorder))
        if recorder.regions is not None:
            stack.enter_context(cuda_graphs(recorder))
        stack.enter_context(generated_kernels(recorder))
        stack.enter_context(linear_attention_kernels(options.linear_attention))
        stack.enter_context(true_share(options.selected))
        stack.enter_context(watched(lambda: recorder.called))
        stack.enter_context(followed_threads(recorder, options.form))
        recorder.decisions = lambda: GpuDecisions(recorder, options.form)
        if recorder.custom is not None:
            stack.enter_context(recorder.custom.noticed())
        stack.enter_context(weights_cast_once())
        stack.enter_context(GpuDecisions(recorder, options.form))
        stack.enter_context(_told_selections(recorder))
        stack.enter_context(recorder)
        if recorder.counting:
            stack.enter_context(counted_functions(recorder))
        yield


@contextmanager
def _told_selections(recorder: Recorder) -> Iterator[None]:
    """Context that notes, on an error of sizes, that what was selected by data may have another."""
    try:
        yield
    except RuntimeError as error:
        if recorder.selected and "invalid for input of size" in str(error):
            error.add_note("; selections by data are taken to find all that they could: --selected says which share")
        raise


@contextmanager
def _module_paths(recorder: Recorder) -> Iterator[None]:
    before = register_module_forward_pre_hook(lambda module, inputs: recorder.enter_module(module))
    after = register_module_forward_hook(recorder.leave_module, with_kwargs=True, always_call=True)
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
def _marked_optimizers(recorder: Recorder, form: OptimizerForm, steady: bool) -> Iterator[None]:
    """Context that marks optimizer steps. ``steady``: the first step of an optimizer, which makes its state, runs
    unrecorded; the second is recorded.
    """
    open_frames: dict[int, Any] = {}
    warming: set[int] = set()

    def before(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if id(optimizer) in warming:
            return None
        _choose_form(optimizer, form)
        _take_all_rounds(optimizer)
        if recorder.regions is not None and recorder.regions.inside:
            _choose_fused(optimizer)
        if not recorder.enabled:  # called by another optimizer while that makes its state
            return None
        if steady and not optimizer.state and len(args) < 2 and not kwargs.get("closure"):
            warming.add(id(optimizer))
            with recorder.paused():
                optimizer.step()
            warming.discard(id(optimizer))
        frame = recorder.annotation(f"Optimizer.step#{type(optimizer).__name__}.step")
        open_frames[id(optimizer)] = frame, recorder.phase
        recorder.phase, outer = "optimizer", recorder.phase

        def outside(closure: Any) -> Any:
            recorder.phase, inner = outer, recorder.phase
            try:
                return closure()
            finally:
                recorder.phase = inner

        # The passes of a closure are no work of the optimizer; the first argument is the optimizer itself.
        given = [partial(outside, each) if callable(each) else each for each in args[1:]]
        named = {name: partial(outside, each) if name == "closure" and each else each for name, each in kwargs.items()}
        return (*args[:1], *given), named

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


def _choose_fused(optimizer: Any) -> None:
    """Set the fused form, which moves what a compiled step moves, if the optimizer has one."""
    for group in optimizer.param_groups:
        if group.get("fused") is None and "fused" in group:
            group["fused"], group["foreach"] = True, False


def _take_all_rounds(optimizer: Any) -> None:
    """Let a step that ends where the loss hardly changes any more (LBFGS) take all its rounds: a tolerance that is not
    a number is never reached.
    """
    for group in optimizer.param_groups:
        group.update((name, math.nan) for name in ("tolerance_grad", "tolerance_change") if name in group)
