"""The last step of long recordings: the same as by reading everything, in memory for one step."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.step_window import last_step, read_last_step

WEIGHT = [1, 2, 0, 32, 4, "cuda:0"]


def node(number: int, name: str, parent: int, thread: int = 1, scope: int = 0) -> dict[str, Any]:
    """A node as of schema 1.0.1 with one tensor."""
    found: dict[str, Any] = {"id": number, "name": name, "parent": parent, "tid": thread, "scope": scope, "fw_tid": 0}
    found |= {"seq_id": -1, "rf_id": number, "op_schema": ""}
    for side in ("input", "output"):
        found |= {f"{side}s": [WEIGHT], f"{side}_shapes": [[4, 8]], f"{side}_types": ["Tensor(float)"]}
    return found


def recording(path: Path, steps: int, operators: int, mark: str = "ProfilerStep#{}") -> Path:
    """``steps`` steps of ``operators`` pairs of nested calls on the main thread and one call on autograd's."""
    nodes = [node(1, "[pytorch|profiler|execution_trace|process]", 1, 0, 7)]
    nodes += [node(2, "thread", 1, 1, 7), node(3, "thread", 1, 2, 7)]
    number = 4
    for step in range(steps):
        around = number
        nodes.append(node(around, mark.format(step + 5), 2, 1, 7))
        number += 1
        for _ in range(operators):
            nodes += [node(number, "aten::linear", around), node(number + 1, "aten::addmm", number)]
            number += 2
        nodes.append(node(number, "AddmmBackward0", 3, 2, 1))
        number += 1
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 42, "nodes": nodes[::-1], "finish_ts": 1}))
    return path


@pytest.mark.parametrize("mark", ["ProfilerStep#{}", "Optimizer.step#SGD.step", "## my range {} ##"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_is_what_reading_everything_gives(tmp_path, mark, steps):
    path = recording(tmp_path / "et.json", steps, 4, mark)
    assert read_last_step(path) == last_step(read_execution_trace(path))


def test_the_last_step_alone_is_kept(tmp_path):
    found = read_last_step(recording(tmp_path / "et.json", 3, 4))
    assert len(found.calls) == 9
    assert found.calls[0].attributes["annotations"][-1] == "ProfilerStep#7"


@pytest.mark.thorough
def test_other_steps_take_a_fraction_of_the_memory_of_their_calls(tmp_path):
    few, many = (recording(tmp_path / f"{steps}.json", steps, 300) for steps in (2, 40))

    def growth(read: Callable[[Path], object]) -> int:
        """Bytes at the peak that 38 more steps take."""
        return peak(lambda: read(many)) - peak(lambda: read(few))

    read_last_step(few)  # what is imported and cached once
    assert growth(read_last_step) < 0.4 * growth(read_execution_trace)


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
