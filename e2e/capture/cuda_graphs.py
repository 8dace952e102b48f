"""CUDA graphs that a program makes itself (``torch.cuda.CUDAGraph``, ``make_graphed_callables``): what is captured does
not run, each replay records it as one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from e2e.capture.recorder import CapturedCalls, Recorder
from e2e.capture.regions import in_region


@contextmanager
def cuda_graphs(recorder: Recorder) -> Iterator[None]:
    """Context in which ``torch.cuda`` has CUDA graphs, recorded by ``recorder``."""

    class Graph:
        """Replacement of ``torch.cuda.CUDAGraph``."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._calls = CapturedCalls()
            self._open = ExitStack()

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self._calls = self._open.enter_context(recorder.captured())

        def capture_end(self) -> None:
            self._open.close()

        def replay(self) -> None:
            if recorder.enabled:
                recorder.replay(self._calls)
            for optimizer in self._calls.stepped:
                recorder.replayed_step(optimizer)

        def pool(self) -> tuple[int, int]:
            return (0, 0)

        def instantiate(self) -> None:
            pass

        reset = enable_debug_mode = instantiate

        def debug_dump(self, path: str) -> None:
            pass

    class Capture:
        """Replacement of ``torch.cuda.graph``."""

        def __init__(self, cuda_graph: Graph, *args: Any, **kwargs: Any) -> None:
            self._graph = cuda_graph

        def __enter__(self) -> None:
            self._graph.capture_begin()

        def __exit__(self, *error: Any) -> None:
            self._graph.capture_end()

    def graphed(callables: Any, sample_args: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(callables, tuple)
        found = tuple(map(_of, callables if several else (callables,)))
        return found if several else found[0]

    def _of(function: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(function, torch.nn.Module):
            return in_region(function, recorder.graphs)
        function.forward = in_region(function.forward, recorder.graphs)
        return function

    with ExitStack() as stack:
        for name, value in (
            ("CUDAGraph", Graph),
            ("graph", Capture),
            ("make_graphed_callables", graphed),
            ("is_current_stream_capturing", lambda: recorder.capturing),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield
