"""The protocol on scripted engines: every number can be checked in the head."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.comparing import timing as rounds_module
from fusion.comparing.engine_worker import EngineFailed
from fusion.comparing.timing import LEAST_ROUNDS, Sampling, measure_engines


class Scripted:
    """Each block lasts what the script says; a string is a failure. ``log`` notes whose turn it was."""

    def __init__(self, name: str, script: list, log: list | None = None) -> None:
        self.name, self.script, self.log = name, list(script), log if log is not None else []

    def block(self, warmup: int, calls: int, seconds: float) -> np.ndarray:
        self.log.append((self.name, warmup, calls))
        entry = self.script.pop(0)
        if isinstance(entry, str):
            raise EngineFailed(entry)
        return np.array(entry, dtype=float)


def rounds(count: int, **settings) -> Sampling:
    return Sampling(rounds=count, **settings)


def test_statistics_of_one_engine():
    engine = Scripted("tuned", [[1, 2, 9], [4, 3, 5], [6, 6, 6]])
    timing = measure_engines({"tuned": engine}, "tuned", rounds(3)).timings["tuned"]
    assert timing.median == 4  # of the block medians 2, 4, 6
    assert (timing.lower_quartile, timing.upper_quartile) == (3, 5)
    assert timing.minimum == 1
    assert timing.calls == 9
    assert timing.ratio == 1


def test_the_ratio_is_taken_within_rounds_so_that_drift_cancels():
    tuned = Scripted("tuned", [[1], [10], [100], [2]])
    other = Scripted("other", [[3], [30], [300], [60]])  # a neighbour slowed the last one down
    timings = measure_engines({"tuned": tuned, "other": other}, "tuned", rounds(4)).timings
    assert timings["other"].ratio == 3


def test_the_order_reverses_every_round():
    log: list = []
    engines = {name: Scripted(name, [[1]] * 3, log) for name in ("tuned", "b", "c")}
    measure_engines(engines, "tuned", rounds(3))
    assert "".join(name[0] for name, _, _ in log) == "tbc" + "cbt" + "tbc"


@pytest.mark.parametrize(("end", "expected"), [(7.5, 7), (0.0, LEAST_ROUNDS), (1e9, 9)])
def test_no_round_begins_that_would_end_too_late(monkeypatch, end, expected):
    """Every round takes a second of a clock that begins at zero; the least number of rounds is always made."""
    log: list = []
    monkeypatch.setattr(rounds_module.time, "monotonic", lambda: float(len(log)))
    measure_engines({"tuned": Scripted("tuned", [[1]] * 9, log)}, "tuned", rounds(9), end=end)
    assert len(log) == expected


def test_a_failing_engine_is_left_out_and_the_others_go_on():
    log: list = []
    engines = {"tuned": Scripted("tuned", [[1]] * 3, log), "bad": Scripted("bad", [[1], "it died"], log)}
    measured = measure_engines(engines, "tuned", rounds(3))
    assert measured.failures == {"bad": "it died"}
    assert set(measured.timings) == {"tuned"}
    assert [name for name, _, _ in log].count("bad") == 2


def test_the_failure_of_the_baseline_is_raised():
    with pytest.raises(EngineFailed, match="it died"):
        measure_engines({"tuned": Scripted("tuned", ["it died"])}, "tuned", rounds(2))
