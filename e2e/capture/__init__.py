"""Operators of a training or inference step, recorded without a GPU. ``torch`` is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.capture.options import CaptureOptions

if TYPE_CHECKING:
    from e2e.capture.models.catalog import build, build_from_file, known_models
    from e2e.capture.script import capture_script, load_script
    from e2e.capture.session import CapturedWorkload, capture

__all__ = [
    "CaptureOptions",
    "CapturedWorkload",
    "build",
    "build_from_file",
    "capture",
    "capture_script",
    "known_models",
    "load_script",
]

_HOMES = {
    "CapturedWorkload": "session",
    "build": "models.catalog",
    "build_from_file": "models.catalog",
    "capture": "session",
    "capture_script": "script",
    "known_models": "models.catalog",
    "load_script": "script",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"e2e.capture.{_HOMES[name]}"), name)
