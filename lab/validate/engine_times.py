"""Fit of the host times of serving engines to whole measured rows: seconds per step, per sequence of a step, and of the
server before the first token (``e2e/serving/engines.yaml``); nothing per model or GPU.

The time per token of a row is nearly linear in the seconds per step and per sequence, at the server's time that the
engine has now. That to the first token is not linear in the server's, by which users meet or spread: it is predicted at
some, with the other times that the engine has now (fit again with what is found). Three predictions of each row (with
neither, with some seconds per step, with some per sequence) give the coefficients, by which every choice of constants
is judged. Groups of rows (GPU x engine x model) weigh the same. Left out: a group is predicted with times that are
fitted to all other groups, of whatever engine. A band is the pair of factors between which 80 % of measured over
predicted values lie.

    python -m lab.validate.engine_times --data DATA    # the constants, those without each group, and the bands
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from costmodel.base.errors import ProjectError
from lab.command_line import program, run, with_progress
from lab.data.data_folder import data_folder
from lab.validate.serving import MeasuredServing, answered, quantities, read_silicon

STEPS = tuple(each * 1e-4 for each in (0, 2, 4, 6, 8, 10, 12, 15, 20, 25, 30))
SEQUENCES = tuple(each * 1e-6 for each in (0, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60))
SERVERS = tuple(each * 5e-3 for each in range(61))
# Server's times at which rows are predicted; between them the time to the first token is interpolated.
_SERVED = (0.0, 0.02, 0.08, 0.3)
_MORE_STEP, _MORE_SEQUENCE = 1e-3, 20e-6
# Share of the errors between the ends of a band.
_HELD = 0.8


@dataclass(frozen=True)
class HostTimes:
    """Constants of an engine in seconds."""

    step: float
    sequence: float
    server: float


@dataclass(frozen=True)
class RowLine:
    """Predicted seconds of a row as a line in the constants: without them, and per second of each."""

    row: MeasuredServing
    token: float
    per_step: float
    per_sequence: float
    first: tuple[float, ...]  # at the times of ``_SERVED``

    def tpot(self, times: HostTimes) -> float:
        """Seconds per token with ``times``."""
        return self.token + self.per_step * times.step + self.per_sequence * times.sequence

    def errors(self, times: HostTimes) -> tuple[float, float]:
        """Logarithms of predicted over measured time per token, and to the first token."""
        measured = self.row.measured
        return (
            float(np.log(self.tpot(times) / measured["tpot"])),
            float(np.log(np.interp(times.server, _SERVED, self.first) / measured["ttft"])),
        )


def row_line(row: MeasuredServing) -> RowLine | None:
    """The line of one row; ``None`` if it cannot be answered."""

    def answer(**seconds: float) -> Mapping[str, float]:
        times = [f"{name}={value:.9f} s" for name, value in seconds.items()]
        options = ",".join(filter(None, [row.request.engine_options, *times]))
        return quantities(answered(replace(row, request=replace(row.request, engine_options=options))))

    try:
        token = answer(step=0.0, sequence=0.0)["tpot"]
        per_step = (answer(step=_MORE_STEP, sequence=0.0)["tpot"] - token) / _MORE_STEP
        per_sequence = (answer(step=0.0, sequence=_MORE_SEQUENCE)["tpot"] - token) / _MORE_SEQUENCE
        first = tuple(answer(server=each)["ttft"] for each in _SERVED)
    except ProjectError:
        return None
    return RowLine(row, token, per_step, per_sequence, first)


def fitted(lines: Sequence[RowLine]) -> HostTimes:
    """Constants with the least mean absolute error of ``lines``, every group weighing the same; the server's with the
    least median, as servers that cannot keep up say nothing of it.
    """
    weights = _weights(lines)
    measured = np.array([each.row.measured["tpot"] for each in lines])
    token, per_step, per_sequence = (
        np.array([getattr(each, name) for each in lines]) for name in ("token", "per_step", "per_sequence")
    )

    def loss(step: float, sequence: float) -> float:
        found = np.abs(np.log((token + per_step * step + per_sequence * sequence) / measured))
        return float((weights * found).sum())

    step, sequence = min(((a, b) for a in STEPS for b in SEQUENCES), key=lambda each: loss(*each))

    def first_error(times: HostTimes) -> float:
        errors: dict[str, list[float]] = defaultdict(list)
        for line in lines:
            errors[line.row.group].append(abs(line.errors(times)[1]))
        return sum(float(np.median(each)) for each in errors.values())

    return min((HostTimes(step, sequence, each) for each in SERVERS), key=first_error)


def _weights(lines: Sequence[RowLine]) -> np.ndarray:
    groups = [each.row.group for each in lines]
    return np.array([1 / groups.count(each) for each in groups])


def left_out(lines: Sequence[RowLine]) -> dict[str, HostTimes]:
    """For each group, the constants fitted without it."""
    groups = dict.fromkeys(each.row.group for each in lines)
    return {group: fitted([each for each in lines if each.row.group != group]) for group in groups}


def band(errors: Iterable[float]) -> tuple[float, float]:
    """Factors of a prediction between which 80 % of the measured values lie."""
    low, high = np.quantile(-np.asarray(list(errors)), [(1 - _HELD) / 2, (1 + _HELD) / 2])
    return float(np.exp(low)), float(np.exp(high))


def _told(name: str, errors: Sequence[tuple[float, float]]) -> str:
    tpot, ttft = (np.abs(np.exp([each[place] for each in errors]) - 1) * 100 for place in (0, 1))
    return (
        f"{name}: TPOT {np.median(tpot):.1f} / {np.quantile(tpot, 0.9):.1f}, "
        f"TTFT {np.median(ttft):.1f} / {np.quantile(ttft, 0.9):.1f} % ({len(errors)} rows)"
    )


def fit_command(
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements.")] = None,
    only: Annotated[str, typer.Option(help="Groups (GPU/engine/model) that contain this.")] = "",
) -> None:
    """Fit the host times of serving engines and print them."""
    rows = [each for each in read_silicon(data_folder(data)) if each.counts and only in each.group]
    lines = [line for row in with_progress(rows, lambda row: row.name) if (line := row_line(row)) is not None]
    by_engine: Mapping[str, list[RowLine]] = {
        engine: [each for each in lines if each.row.request.engine == engine]
        for engine in sorted({each.row.request.engine for each in lines})
    }
    for engine, found in by_engine.items():
        times = fitted(found)
        print(f"{engine}: {times}  {_told('fitted', [each.errors(times) for each in found])}")
    everything = []
    for group, times in left_out(lines).items():
        errors = [each.errors(times) for each in lines if each.row.group == group]
        everything += errors
        print(f"left out {group}: {times}  {_told('unseen', errors)}")
    print(_told("all left out", everything))
    print(f"bands: TPOT {band(each[0] for each in everything)}, TTFT {band(each[1] for each in everything)}")


app = program(fit_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run(app, "lab.validate.engine_times", arguments)


if __name__ == "__main__":
    sys.exit(main())
