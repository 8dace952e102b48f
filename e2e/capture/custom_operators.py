"""Custom operators of a program (``torch.library``) whose implementation for the GPU is Python: it runs, so that the
operators and Triton launches inside it are recorded instead of the custom one.

Where it fails, as one that calls an extension of its own, the operator is recorded by its name alone, with the results
of its fake implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._library.custom_ops import OPDEFS

# Operators of libraries with kernels of their own, and of this project.
_NOT_RUN = frozenset(
    ("aten", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "fbgemm", "torchvision", "bitsandbytes")
    + ("package", "attention", "stack", "scan", "moe", "float8", "megatron", "inductor", "higher_order")
)
_KEYS = ("CUDA", "CompositeExplicitAutograd")


class CustomOperators:
    """Implementations in Python that a program has registered."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Callable[..., Any]]] = {}

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Context in which registrations are noticed, and Triton kernels inside operators are launched as usual."""
        register = torch.library.Library.impl

        def impl(library: Any, name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
            key = dispatch_key or library.dispatch_key
            if key in _KEYS:
                operator = name.name() if isinstance(name, torch._ops.OpOverload) else f"{name}"
                operator = operator if "::" in operator else f"{library.ns}::{operator}"
                self._found.setdefault(operator.partition(".")[0], {})[key] = fn
            return register(library, name, fn, dispatch_key, **options)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.library.Library, "impl", impl))
            triton = torch._library.triton
            if hasattr(triton, "wrap_triton_enabled_default"):
                stack.enter_context(patch.object(triton, "wrap_triton_enabled_default", False))
            yield

    def implementation(self, func: Any) -> Callable[..., Any] | None:
        """Return the implementation of ``func`` on a GPU, or None if it is not known or not in Python."""
        if func.namespace in _NOT_RUN:
            return None
        name = func.name().partition(".")[0]
        definition = OPDEFS.get(name)
        if definition is not None:
            bodies = definition._backend_fns
            return bodies.get("cuda") or bodies.get(None)  # type: ignore[no-any-return]
        bodies = self._found.get(name, {})
        return next((bodies[key] for key in _KEYS if key in bodies), None)
