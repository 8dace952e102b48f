"""Capture of the operators of a training or inference step without a GPU. ``torch`` is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from e2e.capture.models.catalog import build, build_from_file, known_models
    from e2e.capture.script import capture_script, load_script
    from e2e.capture.session import CapturedWorkload, capture

__all__ = [
    "CapturedWorkload",
    "build",
    "build_from_file",
    "capture",
    "capture_script",
    "known_models",
    "load_script",
]

_HOMES = {
    "CapturedWorkload": "e2e.capture.session",
    "build": "e2e.capture.models.catalog",
    "build_from_file": "e2e.capture.models.catalog",
    "capture": "e2e.capture.session",
    "capture_script": "e2e.capture.script",
    "known_models": "e2e.capture.models.catalog",
    "load_script": "e2e.capture.script",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
