"""The version of this project and of the Python that runs it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "fusion-costmodel"


def project_version(packages: Path = Path(__file__).parents[2]) -> str:
    """The version of the code: in a checkout what ``pyproject.toml`` says, elsewhere what is installed."""
    import tomllib

    try:
        project = tomllib.loads((packages / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION:  # an editable install goes on with the version that it was made of
            return str(project["version"])
    except (OSError, KeyError, ValueError):
        pass
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def version_line() -> str:
    """``fusion-costmodel 1.0.0, Python 3.11.9``."""
    return f"{DISTRIBUTION} {project_version()}, Python {platform.python_version()}"
