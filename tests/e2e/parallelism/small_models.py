"""Small transformers spread over GPUs. Layouts with the same layers on a rank share one capture, as for a user."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from e2e.parallelism import ParallelGraph, build_parallel_graph, parse_parallel
from e2e.step.options import StepOptions

_FOLDER = TemporaryDirectory(prefix="small-models-")


def spread_model(config: dict[str, Any], text: str, step: StepOptions, **more: Any) -> ParallelGraph:
    """Build the step of the model of ``config`` in the layout ``text`` of ``--parallel``; the same one once."""
    return _spread_model(json.dumps(config), text, step, **more)


@cache
def _spread_model(config: str, text: str, step: StepOptions, **more: Any) -> ParallelGraph:
    path = Path(_FOLDER.name) / "config.json"
    path.write_text(config, encoding="utf-8")
    return build_parallel_graph(path, parse_parallel(text), step, captures=path.parent / "captures", **more)
