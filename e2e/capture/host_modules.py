"""Modules of a program that run on the host, such as transforms of a data set: they have no parameters, are never moved
to a GPU, and get no tensors of a GPU.

All modules are made without memory (:mod:`e2e.capture.program`). When a module of the host is called, its buffers get
their values, if these follow from the program alone (a window, a filter bank).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from e2e.capture.known_values import known
from e2e.capture.python_calls import uncounted

# Entry of a module that has parameters, no buffers, or was moved or converted by the program.
_OTHER = "_not_of_the_host"


@contextmanager
def modules_of_the_host() -> Iterator[None]:
    """Context in which they get the values of their buffers."""
    call, apply = torch.nn.Module.__call__, torch.nn.Module._apply

    def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not module._parameters and _OTHER not in module.__dict__ and _is_of_host(module, args, kwargs):
            _fill(module)
        return call(module, *args, **kwargs)

    def applied(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        module.__dict__[_OTHER] = True
        return apply(module, *args, **kwargs)

    with patch.object(torch.nn.Module, "__call__", called), patch.object(torch.nn.Module, "_apply", applied):
        yield


@uncounted
def _is_of_host(module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    """True for a module that is given tensors of the host alone and has some of its own, without parameters."""
    if next(module.buffers(), None) is None or next(module.parameters(), None) is not None:
        module.__dict__[_OTHER] = True
        return False
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return bool(given) and not any(tensor.is_cuda for tensor in given)


def _fill(module: torch.nn.Module) -> None:
    """Give all buffers their values, if they are known."""
    places = [
        (part, name, tensor)
        for part in module.modules()
        for name, tensor in part._buffers.items()
        if tensor is not None and tensor.is_cuda
    ]
    values = [known(tensor) for _, _, tensor in places]
    if all(each is not None for each in values):
        for (part, name, _), value in zip(places, values, strict=True):
            part._buffers[name] = value
