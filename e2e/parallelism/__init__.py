"""Built-in transformers on many GPUs, trained or in inference: data, sharded-data, tensor, pipeline, context and expert
parallel.

:func:`build_parallel_graph` makes the unpriced :class:`~e2e.step.execution_graph.ExecutionGraph` of one step;
:func:`parse_parallel` parses ``--parallel``. ``torch`` is imported when a graph is built, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from e2e.parallelism.spec import ParallelSpec, parse_parallel

if TYPE_CHECKING:
    from e2e.parallelism.parallel_graph import ParallelGraph, build_parallel_graph

__all__ = ["ParallelGraph", "ParallelSpec", "build_parallel_graph", "parse_parallel"]


def __getattr__(name: str) -> Any:
    if name not in ("ParallelGraph", "build_parallel_graph"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("e2e.parallelism.parallel_graph"), name)
