"""Selection of the nodes of the last step of an execution trace, with a few bytes of memory per node.

A recording of many steps may exceed the memory as operator calls. It is read twice: once for the order, nesting and
step of every node, then for the selected nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.plain_json import MALFORMED
from e2e.step.operator_trace import OperatorTrace
from e2e.traces.formats.execution_trace import GROUPS_NODE, USER_SCOPE, read_execution_trace
from e2e.traces.formats.json_stream import read_members
from e2e.traces.formats.steps import is_optimizer_step, last_step, of_last_step, step_mark


def read_last_step(path: Path | str) -> OperatorTrace:
    """Return :func:`last_step` of :func:`read_execution_trace`, with memory for that step alone.

    Same errors as both.
    """
    survey = _Survey()
    for key, value in read_members(path):
        if key == "nodes":
            try:
                survey.add(value)
            except MALFORMED:
                return read_execution_trace(path)  # reports the invalid node
    return last_step(read_execution_trace(path, survey.last_step()))


class _Survey:
    """Nodes in the order of the file. ``marks``: by id, the parsed annotations; ``annotations``: ids of all of them."""

    def __init__(self) -> None:
        self.ids, self.parents, self.threads, self.names = array("q"), array("q"), array("q"), array("q")
        self.marks: dict[int, tuple[int | None, bool]] = {}
        self.annotations: set[int] = set()
        self.groups: set[int] = set()

    def add(self, node: Mapping[str, Any]) -> None:
        nested = "attrs" in node
        own = {item["name"]: item["value"] for item in node["attrs"]} if nested else node
        number, name = node["id"], node["name"]
        self.ids.append(number)
        self.parents.append(node["ctrl_deps"] if nested else node["parent"])
        self.threads.append(max(own["tid"], 0))
        self.names.append(hash(name))
        if name == GROUPS_NODE:
            self.groups.add(number)
        elif own["scope"] == USER_SCOPE:
            self.annotations.add(number)
            mark = (step_mark(name), is_optimizer_step(name))
            if mark != (None, False):
                self.marks[number] = mark

    def last_step(self) -> set[int] | None:
        """Ids of the calls of the last step, of the annotations around them and of process groups.

        ``None``: all nodes.
        """
        if not self.marks:
            return None
        ids = np.frombuffer(self.ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        ids, parents = ids[order], np.frombuffer(self.parents, dtype=np.int64)[order]
        if (np.diff(ids) == 0).any():
            return None  # ids are not unique
        above = np.searchsorted(ids, parents)
        above[above == len(ids)] = 0
        above[(ids[above] != parents) | (above >= np.arange(len(ids)))] = -1
        threads = np.frombuffer(self.threads, dtype=np.int64)[order]
        threads = np.maximum(threads, threads[threads > 0].min(initial=np.iinfo(np.int64).max))
        names = np.frombuffer(self.names, dtype=np.int64)[order]
        return self._chosen(ids.tolist(), above.tolist(), threads.tolist(), names.tolist())

    def _chosen(self, ids: list[int], above: list[int], threads: list[int], names: list[int]) -> set[int] | None:
        steps: list[int | None] = []
        optimizing: list[bool] = []
        for number, parent in zip(ids, above, strict=True):
            step, optimizer = (steps[parent], optimizing[parent]) if parent >= 0 else (None, False)
            own_step, own_optimizer = self.marks.get(number, (None, False))
            steps.append(own_step if step is None else step)
            optimizing.append(optimizer or own_optimizer)
        calls = [
            place for place, number in enumerate(ids) if number not in self.annotations and number not in self.groups
        ]
        chosen = of_last_step(
            [threads[place] for place in calls],
            [steps[place] for place in calls],
            [optimizing[place] for place in calls],
            [names[place] for place in calls],
        )
        if chosen is None:
            return None
        wanted = set(self.groups)
        for place, kept in zip(calls, chosen, strict=True):
            if kept:
                wanted.add(ids[place])
                self._add_annotations(above[place], ids, above, wanted)
        return wanted

    def _add_annotations(self, place: int, ids: list[int], above: list[int], wanted: set[int]) -> None:
        """Add the annotations around a node, up to the first one that has been added before."""
        while place >= 0 and ids[place] not in wanted:
            if ids[place] in self.annotations:
                wanted.add(ids[place])
            place = above[place]
