"""Step of the user's script, ``train.py:make_step``: loaded, made into a workload, captured.

Captures can be kept (:func:`captures_kept`): advice predicts one step under many settings, few of which change the
script's calls. PyTorch's TF32 switches are read as the script has set them (:func:`tf32_switches`): float32 operations
that run on TF32 units, on GPUs that have them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from costmodel.base.errors import InputError
from costmodel.base.input_files import find_refusal, read_text
from e2e.capture.environment import StreamState, pretend_gpu, pretend_streams
from e2e.capture.gpu_decisions import GpuDecisions
from e2e.capture.recorder import Recorder
from e2e.capture.script_errors import reporting, watched
from e2e.capture.session import CapturedWorkload, capture, without_compiler
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepFunction, StepOptions, Tf32Switches, script_name

# Parameters of a script's function set by prediction options.
SIZES = ("batch_size", "sequence_length")
_LOADED = "__loaded_for_a_capture__"


class Fallback(int):
    """Value of a parameter for which the script's function has no default."""


def load_script(script: StepFunction, options: StepOptions | None = None, **parameters: Any) -> CapturedWorkload:
    """Make the workload of ``script`` (``FILE.py:FUNCTION``, or the function itself).

    The function is called with those of ``parameters`` that it takes (``batch_size``, ``sequence_length`` ...; any
    that it requires must be given) and returns ``(module, step)``: an ``nn.Module`` and a function without arguments
    that runs one iteration, with backward pass and optimizer step if it has them::

        def make_step(batch_size):
            model = Net().to("cuda")
            optimizer = torch.optim.AdamW(model.parameters())
            data = torch.randn(batch_size, 1024, device="cuda")

            def step():
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()

            return model, step

    Nothing needs a GPU or memory: it runs with the meta device as default, ``cuda`` means the meta device, and
    ``torch.cuda.is_available()`` is true. There are no values: ``.item()`` returns 1, a flag is true, a result of
    ``any()`` false. Raise ``InputError`` for a wrong reference or result; a script that fails prints its own traceback
    on standard error and raises ``ModelError``.
    """
    options = options or StepOptions()
    found: list[str] = []
    with _as_on_gpu(options) as streams, without_compiler(found):
        workload = make_workload(script, parameters)
        return replace(workload, streams=streams, compiled=bool(found))


def make_workload(script: StepFunction, parameters: dict[str, Any]) -> CapturedWorkload:
    """Call the script's function without pretending a GPU (see :func:`load_script`)."""
    reference = script_name(script)
    # A script that parses its command line gets its own defaults, not the options of ``predict``.
    arguments = [reference.rpartition(":")[0]]
    with torch.device("meta"), patch.object(sys, "argv", arguments), reporting(reference):
        function = _imported(script) if isinstance(script, str) else script
        taken = _taken(function, parameters, reference)
        result = function(**taken)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.nn.Module):
        raise InputError(f"{reference}: must return (module, step), got {type(result).__name__}")
    if not callable(result[1]):
        raise InputError(f"{reference}: must return (module, step); the second of them cannot be called")
    samples, length = (_size(function, taken, name) for name in SIZES)
    return CapturedWorkload(reference, *result, samples=samples, sequence_length=length)


def capture_script(workload: CapturedWorkload, options: StepOptions | None = None) -> OperatorTrace:
    """Capture a loaded script by :func:`capture`; a failing step is reported as described in :func:`load_script`."""
    with reporting(workload.name):
        return capture(workload, options)


@contextmanager
def own_process() -> Iterator[None]:
    """Context that restores the working folder, default number type and gradient mode, so that another rank or script
    begins as in its own process.

    TF32 and the environment stay: a module that sets them is imported once.
    """
    folder, dtype, gradients = os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        with suppress(OSError):  # it has been removed meanwhile
            os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


@contextmanager
def _as_on_gpu(options: StepOptions) -> Iterator[StreamState]:
    """Context that makes the model under the conditions of the captured step. Yields the streams it creates."""
    recorder = Recorder({})
    decisions = GpuDecisions(recorder, options.form)
    as_there = pretend_gpu(lambda: None, options.seen_gpu), pretend_streams(recorder.streams)
    with as_there[0], as_there[1], watched(lambda: recorder.called), recorder.paused(), decisions, recorder:
        yield recorder.streams


def _imported(reference: str) -> Callable[..., Any]:
    path, function_name = _split(reference)
    function = getattr(_load(path), function_name, None)
    if not callable(function):
        raise InputError(f"{path}: has no function {function_name!r}; write {path.name}:FUNCTION")
    return function


def _split(reference: str) -> tuple[Path, str]:
    file, _, function = reference.rpartition(":")
    if not file or not function.isidentifier():
        raise InputError(f"script {reference!r} must be written FILE.py:FUNCTION")
    path = Path(file)
    refusal = find_refusal(path, "configuration", "no such script")
    if refusal is not None:
        raise InputError(f"{path}: {refusal}; check the path")
    return path, function


def _load(path: Path) -> ModuleType:
    """Load the module in ``path``, with its folder importable."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file; give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    # Functions are sent to other processes (a pool's) by the name of their module, unless it is a library's.
    known = sys.modules.get(path.stem)
    if known is None or getattr(known, _LOADED, False):
        setattr(module, _LOADED, True)
        sys.modules[path.stem] = module
    folder = str(path.parent.resolve())  # the script may change the folder, and the list
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def taken_names(script: StepFunction, names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that are parameters of the script's function; all if it is not known."""
    if not isinstance(script, str):
        parameters = inspect.signature(script).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
            return set(names)
        return set(names) & set(parameters)
    path, function_name = _split(script)
    for node in ast.walk(ast.parse(read_text(path, "configuration"))):
        if isinstance(node, ast.FunctionDef) and node.name == function_name and not node.decorator_list:
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return set(names) if node.args.kwarg else set(names) & {each.arg for each in every}
    return set(names)


def _size(function: Callable[..., Any], taken: Mapping[str, Any], name: str) -> int | None:
    """Return the value of the parameter ``name`` of ``function``: as passed, or its default; None without either."""
    parameter = inspect.signature(function).parameters.get(name)
    value = taken.get(name, None if parameter is None else parameter.default)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _taken(function: Callable[..., Any], parameters: dict[str, Any], reference: str) -> dict[str, Any]:
    """Return those of ``parameters`` that are given and that ``function`` takes; raise ``InputError`` if one is
    missing.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    signature = inspect.signature(function).parameters
    for name, parameter in signature.items():
        if isinstance(given.get(name), Fallback) and parameter.default is not inspect.Parameter.empty:
            del given[name]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.values()):
        return given
    missing = [
        name
        for name, parameter in signature.items()
        if name not in given
        and parameter.default is inspect.Parameter.empty
        and parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    if missing:
        asked = [f"--{name.replace('_', '-')}" for name in missing if name in SIZES]
        advice = f"give {', '.join(asked)}" if len(asked) == len(missing) else "give the parameter a default"
        raise InputError(f"{reference}: needs a value for {', '.join(missing)}; {advice}")
    return {name: value for name, value in given.items() if name in signature}


# The original step, and the last one of another batch or optimizer: a capture of 100,000 calls takes a gigabyte.
MOST_KEPT = 2
_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept captures", default=None)
Captured = TypeVar("Captured")


@contextmanager
def captures_kept() -> Iterator[None]:
    """Context in which :func:`kept` caches."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(key: Hashable, make: Callable[[], Captured]) -> Captured:
    """Return the cached result of ``make`` for ``key``, inside :func:`captures_kept`; otherwise call it."""
    held = _KEPT.get()
    if held is None:
        return make()
    if key not in held:
        found = make()
        while len(held) >= MOST_KEPT:
            held.pop(list(held)[-1])  # the first one is the original step
        held[key] = found
    return held[key]


def tf32_switches() -> Tf32Switches:
    """Return the switches of this process.

    PyTorch's own defaults are on in cuDNN's kernels, off in products (``set_float32_matmul_precision``,
    ``torch.backends.cuda.matmul.allow_tf32``).
    """
    cudnn = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    # The older `allow_tf32` raises if a script has set the newer ones, but not vice versa.
    return Tf32Switches(*(switch.fp32_precision == "tf32" for switch in switches))
