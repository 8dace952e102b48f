"""Latency and throughput of a build by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from fusion.artifact.build_folder import Artifact
from fusion.commands.cli import app
from fusion.comparing.compare import benchmark_build, render_times, summarize_calls


def test_throughput_adds_up_over_streams_and_latencies_are_of_all_calls():
    """One stream answers 4 calls in 8 s, the other one 2 in 8 s: 0.5 + 0.25 calls of 3 images a second."""
    times = summarize_calls("build", 2, 3, [np.array([1.0, 1.0, 1.0, 5.0]), np.array([4.0, 4.0])])
    assert times.samples_per_second == pytest.approx(3 * 0.75)
    assert (times.streams, times.calls, times.minimum, times.maximum) == (2, 6, 1.0, 5.0)
    assert times.median == 2.5 and times.mean == pytest.approx(16 / 6)
    assert times.percentile_90 == pytest.approx(4.5)
    assert "6 calls of batch 3, 2 streams of 2 threads" in render_times(times)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_build_is_run_in_streams(tiny_build: Artifact, streams: int, monkeypatch):
    monkeypatch.setattr("fusion.comparing.compare.usable_cores", lambda: 2)
    monkeypatch.setattr("costmodel.base.process.usable_cores", lambda: 2)
    times = benchmark_build(tiny_build.directory, streams, seconds=0.05)
    assert times.streams == streams and times.threads == 2 // streams and times.batch == 2
    assert times.calls >= 20 * streams and 0 < times.minimum <= times.median <= times.percentile_99 <= times.maximum


def test_the_command_prints_one_document(tiny_build: Artifact):
    arguments = ["benchmark", str(tiny_build.directory), "--seconds", "0.05", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["threads"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"streams": 0}, "--streams 0: this process may use 1 to 2 cores"),
        ({"streams": 3}, "--streams 3"),
        ({"streams": 2, "threads": 2}, "2 streams of 2 threads: there are 2 cores"),
        ({"seconds": 0.0}, "--seconds 0: must be more than 0"),
        ({"seconds": float("nan")}, "--seconds nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(tiny_build: Artifact, options, words, monkeypatch):
    monkeypatch.setattr("fusion.comparing.compare.usable_cores", lambda: 2)
    monkeypatch.setattr("costmodel.base.process.usable_cores", lambda: 2)
    with pytest.raises(InputError, match=words):
        benchmark_build(tiny_build.directory, **options)


def test_a_folder_that_is_no_build_is_refused(tmp_path):
    with pytest.raises(InputError, match=str(tmp_path)):
        benchmark_build(tmp_path)
