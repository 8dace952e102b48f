"""Image models of the library ``timm`` by name, if it is installed (it is not a dependency of this project).

``timm`` imports ``torchvision`` for image loading; its models need only one class of it for comparison. If
``torchvision`` is absent or built for another PyTorch, empty modules replace it while ``timm`` is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from costmodel.base.errors import InputError, ModelError

NEEDED = "pip install --no-deps timm"
_ABSENT = "torchvision"


class _Anything(type):
    """Class whose attributes are such classes: members of enumerations, nested functions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(cls, name, made)
        return made


class _StandIn(ModuleType):
    """Package from which any name can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finder of :class:`_StandIn` for ``torchvision`` and its submodules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


@contextmanager
def _without_torchvision() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] == _ABSENT]:
            del sys.modules[name]


@cache
def timm_library() -> Any:
    """Return the module ``timm``; raise ``InputError`` with installation advice if it is absent."""
    try:
        importlib.import_module(_ABSENT)
        return importlib.import_module("timm")
    except (ImportError, RuntimeError):
        for name in [each for each in sys.modules if each.partition(".")[0] in (_ABSENT, "timm")]:
            del sys.modules[name]
    try:
        with _without_torchvision():
            return importlib.import_module("timm")
    except ImportError as error:
        raise InputError(f"timm is not installed ({error}); it is optional: {NEEDED}") from None


def has_timm() -> bool:
    """True if models of ``timm`` can be built here."""
    try:
        timm_library()
    except InputError:
        return False
    return True


def timm_module(
    name: str, side: int | None = None, *, fused_attention: bool = True, fast_norm: bool = False, **arguments: Any
) -> tuple[torch.nn.Module, int]:
    """Return the model ``name`` on the meta device, and the side of its images in pixels.

    ``side``: replaces the model's own. ``fused_attention``: as since PyTorch 2, by ``scaled_dot_product_attention``.
    ``fast_norm``: layer and group norm in the type of autocast instead of FP32 (timm's ``--fast-norm``). ``arguments``:
    further arguments of the model. Raise ``InputError`` for an unknown name, ``ModelError`` for a model that cannot be
    built without data.
    """
    timm = timm_library()
    if not timm.is_model(name.partition(".")[0]):
        raise InputError(f"model {name!r} is not known to timm {timm.__version__}; timm.list_models() lists them all")
    timm.layers.set_fused_attn(fused_attention)
    timm.layers.set_fast_norm(fast_norm)
    own = timm.get_pretrained_cfg(name)
    size = own.input_size[-1] if own is not None else 224
    try:
        model = _made(timm, name, None if side in (None, size) else side, arguments)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"timm's {name} cannot be built without data: {error}; choose another model") from None
    return model, side or size


def _made(timm: Any, name: str, side: int | None, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Build the model; models of a fixed size take it as an argument, which the others do not have."""
    with torch.device("meta"):
        if side is not None:
            try:
                return timm.create_model(name, img_size=side, **arguments)
            except TypeError:
                pass
        return timm.create_model(name, **arguments)
