"""Code that PyTorch or Triton would generate for the GPU: ``torch.compile``, ``flex_attention``, Triton kernels.

No code is generated in a capture. A compiled function runs as written (:mod:`e2e.lowering` applies the fusion, if
requested); a launch of a Triton kernel is a record ``triton::NAME`` of its tensors, which is priced by their bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from e2e.capture.flex_attention import attend
from e2e.capture.recorder import Recorder
from e2e.step.operator_trace import TRITON


@contextmanager
def without_compiler(found: list[str]) -> Iterator[None]:
    """Context in which ``torch.compile`` leaves functions unchanged, and modules may break its graphs. Names of
    compiled functions and modules are added to ``found``.
    """
    compile_module = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compiled, **options)
        if isinstance(model, torch.nn.Module):
            found.append(type(model).__name__)
            return compile_module(model, **{**options, "fullgraph": False})
        if not str(getattr(model, "__module__", "")).startswith("torch."):
            found.append(getattr(model, "__name__", "function"))
        return model

    with patch.object(torch, "compile", compiled):
        yield


@contextmanager
def generated_kernels(recorder: Recorder) -> Iterator[None]:
    """Context in which flexible attention and launches of Triton kernels are recorded, if they have been imported."""
    with ExitStack() as stack:
        for target, name, value in (*_flexible(recorder), *_launches(recorder)):
            stack.enter_context(patch.object(target, name, value))
        yield


def _flexible(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Return the patches of internals of ``flex_attention``, since scripts hold the function itself."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        return []
    return [
        (module, "_validate_device", lambda query, key, value: None),
        (module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # its own call of the compiler
        (module, "flex_attention_hop", partial(attend, recorder.paused)),
    ]


def _launches(recorder: Recorder) -> list[tuple[Any, str, Callable[..., Any]]]:
    if find_spec("triton") is None or "triton" not in sys.modules:
        return []
    kernel = import_module("triton.runtime.jit").JITFunction
    tuner = import_module("triton.runtime.autotuner").Autotuner

    def launch(self: Any, *args: Any, grid: Any = None, warmup: Any = None, **kwargs: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        recorder.record_call(f"{TRITON}{self.__name__}", given, (), {})

    def tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fn.run(*args, **kwargs)

    return [(kernel, "run", launch), (tuner, "run", tuned)]
