"""The version of this project and of the Python that runs it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "fusion-costmodel"


def project_version() -> str:
    """The version that is installed; of a checkout that is not, what its ``pyproject.toml`` says."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        import tomllib

        path = Path(__file__).parents[2] / "pyproject.toml"
        try:
            return f"{tomllib.loads(path.read_text(encoding='utf-8'))['project']['version']} (a checkout)"
        except (OSError, KeyError, ValueError):
            return "unknown"


def version_line() -> str:
    """``fusion-costmodel 0.1.0, Python 3.11.9``."""
    return f"{DISTRIBUTION} {project_version()}, Python {platform.python_version()}"
