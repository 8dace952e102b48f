"""For tests of timelines: what Perfetto's trace processor does with Chrome trace JSON, and what it would drop.

Written from its importer (``src/trace_processor``: ``json_trace_tokenizer``, ``json_trace_parser``, ``slice_tracker``,
``flow_tracker``), not from our exporter: events are taken by time, those of one moment in the order of the file; a
complete event (``X``) is put on the stack of its thread, from which what has ended is taken off before; one that would
outlast what it lies in is dropped. An arrow binds to the slice on top of the stack at its moment, its head (``bp``
``e``) too. Times are microseconds and become whole nanoseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]
PHASES = frozenset("MXisfC")
NAMES = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
         "thread_sort_index": "sort_index"}  # fmt: skip


def faults(events: list[Event]) -> list[str]:
    """What is wrong, one line each; nothing for a file that is shown as it is meant."""
    found = [line for event in events for line in _malformed(event)]
    if found:
        return found
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            if key in named[event["name"]]:
                found.append(f"{event['name']} {key} twice")
            named[event["name"]].add(key)
    timed = [event for event in events if event["ph"] != "M"]
    found += [f"process {pid} has no name" for pid in {each["pid"] for each in timed} - named["process_name"]]
    tracks = {(each["pid"], each["tid"]) for each in timed if each["ph"] != "C"}
    found += [f"thread {track} has no name" for track in tracks - named["thread_name"]]
    return found + _Importer().read(timed)


def _malformed(event: Event) -> list[str]:
    text = json.dumps(event)[:120]
    if event.get("ph") not in PHASES:
        return [f"unknown phase: {text}"]
    if not all(type(event.get(key)) is int and event[key] > 0 for key in ("pid", "tid")):
        return [f"process or thread is no positive whole number: {text}"]
    if not isinstance(event.get("name"), str) or not isinstance(event.get("args", {}), dict):
        return [f"name or arguments: {text}"]
    if event["ph"] == "M":
        wanted = NAMES.get(event["name"])
        value = event.get("args", {}).get(wanted)
        kind = str if wanted == "name" else int
        return [] if wanted is not None and type(value) is kind else [f"metadata: {text}"]
    lines = [] if _nanoseconds(event.get("ts")) is not None else [f"time: {text}"]
    if event["ph"] == "X" and _nanoseconds(event.get("dur")) is None:
        lines.append(f"duration: {text}")
    if event["ph"] == "i" and event.get("s") not in ("t", "p", "g"):
        lines.append(f"instant without scope: {text}")
    if event["ph"] == "C":
        values = event.get("args", {}).values()
        if not values or not all(type(each) in (int, float) for each in values):
            lines.append(f"counter: {text}")
    return lines


def _nanoseconds(microseconds: Any) -> int | None:
    """Whole, from zero; ``None`` otherwise."""
    if type(microseconds) not in (int, float) or microseconds < 0:
        return None
    nanoseconds = round(microseconds * 1000)
    return nanoseconds if abs(nanoseconds - microseconds * 1000) < 1e-3 else None


class _Importer:
    def __init__(self) -> None:
        self.stacks: dict[Track, list[tuple[int, str]]] = defaultdict(list)  # end and name of what is open
        self.tails: dict[Any, tuple[int, Track]] = {}
        self.heads: set[Any] = set()
        self.found: list[str] = []

    def read(self, events: list[Event]) -> list[str]:
        for event in sorted(events, key=lambda each: round(each["ts"] * 1000)):
            if event["ph"] == "X":
                self._slice(event)
            elif event["ph"] in "sf":
                self._arrow(event)
        self.found += [f"arrow {number} has no head" for number in self.tails.keys() - self.heads]
        return self.found

    def _open(self, event: Event) -> list[tuple[int, str]]:
        stack = self.stacks[event["pid"], event["tid"]]
        while stack and stack[-1][0] <= round(event["ts"] * 1000):
            stack.pop()
        return stack

    def _slice(self, event: Event) -> None:
        stack = self._open(event)
        end = round(event["ts"] * 1000) + round(event["dur"] * 1000)
        if stack and end > stack[-1][0]:
            self.found.append(f"overlap: {event['name']} ends after {stack[-1][1]}, in which it began")
            return
        stack.append((end, event["name"]))

    def _arrow(self, event: Event) -> None:
        number = (event.get("cat"), event["name"], event.get("id"))
        at = round(event["ts"] * 1000)
        if type(event.get("id")) is not int:
            self.found.append(f"arrow without a number: {event['name']}")
        if not self._open(event):
            self.found.append(f"arrow {number} at {at} ns binds to no slice")
        if event["ph"] == "s":
            if number in self.tails:
                self.found.append(f"arrow {number} begins twice")
            self.tails[number] = at, (event["pid"], event["tid"])
            return
        if event.get("bp") != "e":
            self.found.append(f"arrow {number} binds to the next slice, not to the one around its head")
        if number not in self.tails:
            self.found.append(f"arrow {number} has no tail before its head")
        if number in self.heads:
            self.found.append(f"arrow {number} ends twice")
        self.heads.add(number)
