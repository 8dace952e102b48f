"""Fused against unfused kernels of a site, measured in turns, and kept.

Times that were measured minutes apart on a shared machine differ by more than fusion brings. So the best fused kernel
and the best separate ones take turns in one process; their ratio, not the two times, decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from costmodel.errors import InputError, OutputError
from costmodel.serialization import to_record
from schedules.messages import Candidate, Outcome
from schedules.target import CpuTarget

FILE = "duels.jsonl"
# An arm this much slower than its kernels were before has been disturbed: the duel is repeated, so often at most.
DISTURBED = 1.25
ATTEMPTS = 4


class Comparing(Protocol):
    """What a duel asks of :class:`schedules.runner.Runner`."""

    def compare(self, arms: Sequence[Sequence[Candidate]]) -> list[Outcome]: ...


@dataclass(frozen=True)
class Duel:
    """Seconds of one fused kernel and of the kernels it replaces, run one after the other, from the same minute."""

    fused_seconds: float
    unfused_seconds: float

    def disturbed(self, expected: Duel) -> bool:
        """Whether an arm took clearly longer than its kernels did before."""
        return (
            self.fused_seconds > DISTURBED * expected.fused_seconds
            or self.unfused_seconds > DISTURBED * expected.unfused_seconds
        )

    def undisturbed(self, other: Duel) -> Duel:
        """The lesser time of each arm."""
        return Duel(min(self.fused_seconds, other.fused_seconds), min(self.unfused_seconds, other.unfused_seconds))


class DuelStore:
    """Results in ``directory``, keyed by both arms' kernels and configurations, CPU and TVM version."""

    def __init__(self, directory: Path, cpu: CpuTarget) -> None:
        self._path = directory / FILE
        self._environment = {"cpu": cpu.key, "tvm": version("apache-tvm")}
        self._known = dict(_read(self._path))

    def get(self, fused: Candidate, unfused: Sequence[Candidate]) -> Duel | None:
        """The result of an earlier run."""
        return self._known.get(self._key(fused, unfused))

    def duel(
        self, fused: Candidate, unfused: Sequence[Candidate], runner: Comparing, expected: Duel
    ) -> Duel | None:
        """The result, measured now if it is not known; ``None`` if an arm fails.

        ``expected``: what the kernels of both arms took one by one. Other tenants of a shared machine may hit one arm
        harder: a disturbed duel is repeated, and each arm's least time counts.
        """
        known = self.get(fused, unfused)
        if known is not None:
            return known
        result: Duel | None = None
        for _ in range(ATTEMPTS):
            outcomes = runner.compare([[fused], list(unfused)])
            if outcomes[0].seconds is None or outcomes[1].seconds is None:
                return None
            duel = Duel(outcomes[0].seconds, outcomes[1].seconds)
            result = duel if result is None else result.undisturbed(duel)
            if not result.disturbed(expected):
                break
        assert result is not None  # at least one attempt was made
        self._keep(self._key(fused, unfused), result)
        return result

    def _key(self, fused: Candidate, unfused: Sequence[Candidate]) -> str:
        arms = [[to_record(operator), dict(config)] for operator, config in (fused, *unfused)]
        return json.dumps({"arms": arms, **self._environment}, sort_keys=True)

    def _keep(self, key: str, duel: Duel) -> None:
        """Writes the file anew: it is small, and so it is whole at any time."""
        known = {**self._known, key: duel}
        lines = [json.dumps([json.loads(each), d.fused_seconds, d.unfused_seconds]) for each, d in known.items()]
        staged = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(staged, self._path)
        except OSError as error:
            with suppress(OSError):
                staged.unlink()
            raise OutputError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._known = known


def _read(path: Path) -> list[tuple[str, Duel]]:
    """All results; a damaged line is measured again."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it, it is measured again") from error
    return [entry for line in lines if (entry := _parse(line)) is not None]


def _parse(line: str) -> tuple[str, Duel] | None:
    try:
        content: Any = json.loads(line)
        key, fused, unfused = content
        return json.dumps(key, sort_keys=True), Duel(float(fused), float(unfused))
    except (ValueError, TypeError):
        return None
