"""The version of this project and of the Python that runs it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "fusion-costmodel"


def project_version(packages: Path = Path(__file__).parents[2]) -> str:
    """Version of the code: from ``pyproject.toml`` in a checkout, else from the installed metadata."""
    import tomllib

    try:
        project = tomllib.loads((packages / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        # the metadata of an editable install keep the version at the time of installation
        if project["name"] == DISTRIBUTION:
            return str(project["version"])
    except (OSError, KeyError, ValueError):
        pass
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def version_line() -> str:
    """Version line, such as ``fusion-costmodel 1.0.0, Python 3.11.9``."""
    return f"{DISTRIBUTION} {project_version()}, Python {platform.python_version()}"
