"""Latency and throughput of a build by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from fusion.commands.cli import app
from fusion.comparing.compare import benchmark_build, render_times, summarize_calls
from fusion.model.build_folder import Artifact


def test_statistics_are_of_all_calls():
    times = summarize_calls("build", 2, 3, np.array([1.0, 1.0, 1.0, 5.0, 4.0, 4.0]))
    assert times.samples_per_second == pytest.approx(3 * 6 / 16)
    assert (times.calls, times.minimum, times.maximum, times.median) == (6, 1.0, 5.0, 2.5)
    assert times.mean == pytest.approx(16 / 6) and times.percentile_90 == pytest.approx(4.5)
    assert "6 calls of batch 3, 2 threads" in render_times(times)


def test_the_command_prints_one_document(tiny_build: Artifact):
    arguments = ["benchmark", str(tiny_build.directory), "--seconds", "0.05", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    times = json.loads(result.stdout)
    assert times["threads"] == 1 and times["batch"] == 2 and times["calls"] >= 20
    assert 0 < times["minimum"] <= times["median"] <= times["percentile_99"] <= times["maximum"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 4096}, "--threads 4096"),
        ({"seconds": 0.0}, "--seconds 0: must be more than 0"),
        ({"seconds": float("nan")}, "--seconds nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(tiny_build: Artifact, options, words):
    with pytest.raises(InputError, match=words):
        benchmark_build(tiny_build.directory, **options)


def test_a_folder_that_is_no_build_is_refused(tmp_path):
    with pytest.raises(InputError, match=str(tmp_path)):
        benchmark_build(tmp_path)
