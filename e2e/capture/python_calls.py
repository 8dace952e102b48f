"""Count of the Python functions that a program and its libraries call between two recorded operators.

The host takes time for them that no operator has: modules and their hooks, wrappers such as FSDP (which visits every
parameter four times in a step), loops over parameters, collating of batches. Functions of this capture, and those that
PyTorch calls because operators are recorded, do not count; nor do those that a worker of a data loader calls, those of
imports, and those of logging, which mostly warns once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
from torch.utils.data._utils import worker

_MAIN = "__main__"
# What a function counts for, in functions of a program such as those of `copy.deepcopy`, one of which takes 0.1 us on a
# core of an EPYC of 2023: functions of PyTorch read and set attributes of tensors and modules, which are not calls.
# From FSDP's hooks around a transformer with LoRA (0.9 us each, 0.3 one in C of PyTorch) and from mmengine's samples.
_OF_PYTORCH, _IN_C_OF_PYTORCH = 9, 3
_PYTORCH = str(Path(torch.__file__).parent)
# Calls of functions in C from one place in one frame that count: loops over tokens, such as `[int(each) for ...]`, take
# a hundredth of that time for each, and loops over the parameters of a layer are shorter. The same goes for generators.
_MOST_REPEATED = 16
_OWN = str(Path(__file__).parents[1])
# Parts of PyTorch that find shapes of results or hand operators to a recorder, and what this capture uses itself.
_OF_RECORDING = (
    *(f"torch/{name}" for name in ("_meta_registrations", "_refs", "_prims", "_decomp", "_subclasses", "_library")),
    *(f"torch/{name}" for name in ("_ops", "_dynamo", "_compile.py", "compiler", "_jit_internal", "overrides", "fx/")),
    *(f"torch/utils/{name}" for name in ("_python_dispatch", "_pytree", "_device", "_stats")),
    *("unittest/mock", "contextlib", "weakref", "typing.py", "/logging/"),
)


class CountsFunctions(Protocol):
    """Recorder of operators, active while ``enabled``; ``functions``: those called since the last operator.

    ``count``: what Python calls at each function of a thread, once the recorder has begun.
    """

    enabled: bool
    functions: int
    count: Callable[[FrameType, str, Any], None] | None


@contextmanager
def counted_functions(recorder: CountsFunctions) -> Iterator[None]:
    """Context in which ``recorder`` counts the functions that this thread calls from when it begins to record."""
    # Place -> what a call of it counts for, 0 for none.
    weights: dict[tuple[str, str], int] = {}
    # Frame -> place of a call in it -> functions in C that it has called.
    sites: dict[int, dict[int, int]] = {}
    importing = 0

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal importing
        if (
            event in ("call", "return")
            and frame.f_code.co_name == "<module>"
            and frame.f_globals.get("__name__") != _MAIN
        ):
            importing += 1 if event == "call" else -1
        elif event in ("call", "c_call") and recorder.enabled and not importing:
            place = frame.f_code.co_filename, frame.f_code.co_name
            weight = weights.get(place)
            if weight is None:
                generates = frame.f_code.co_flags & inspect.CO_GENERATOR
                weight = weights[place] = 0 if generates else _weight(*place)
            if not weight or worker._worker_info is not None:
                return
            if event == "call":
                sites[id(frame)] = {}
            else:
                here, site = sites.setdefault(id(frame), {}), frame.f_lasti
                here[site] = here.get(site, 0) + 1
                if here[site] > _MOST_REPEATED:
                    return
                weight = _IN_C_OF_PYTORCH if _is_of_pytorch(function) else 1
            recorder.functions += weight

    before, recorder.count = sys.getprofile(), count
    if recorder.enabled:
        sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def _weight(file: str, function: str) -> int:
    """What a call counts for; 0 for functions of this capture, and what they call; its hooks alone lead calls of
    modules the long way.
    """
    if file.startswith((_OWN, "<")) or any(part in file for part in _OF_RECORDING):
        return 0
    if file.endswith("torch/nn/modules/module.py") and function in ("_call_impl", "inner"):
        return 0
    return _OF_PYTORCH if file.startswith(_PYTORCH) else 1


def _is_of_pytorch(function: Any) -> bool:
    """Whether ``function``, in C, belongs to PyTorch or is a method of one of its objects."""
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    return str(module).startswith("torch")


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, inside of which functions are not counted."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with Uncounted():
            return function(*args, **kwargs)

    return called


class Uncounted:
    """Context in which functions are not counted; it costs next to nothing."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(self._before)
