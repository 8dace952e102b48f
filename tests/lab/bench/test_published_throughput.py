"""The served runs that users measured and published, as requests."""

from __future__ import annotations

import pytest

from e2e.serving.workload import workload_of
from lab.bench.published_throughput import read_community_runs


def test_the_community_runs_are_read_as_they_were_measured(tmp_path):
    rows = read_community_runs(tmp_path)
    assert len({each.name for each in rows}) == len(rows) > 100
    assert {each.group.split("/")[0] for each in rows} == {"open", "held-out"}
    chat = next(each for each in rows if each.request.trace)
    load = workload_of(chat.request)
    assert load.count == 100 and load.inputs.mean() == pytest.approx(232.6, rel=0.02)
    assert load.concurrency == 1 and load.arrivals is None
