"""Several builds of a model in turns, and the benchmark of networks never seen that stands on it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from fusion.comparing.timing import Sampling
from fusion.model.build_folder import Artifact
from lab.bench import zero_trials
from lab.bench.zero_trials import compare_builds

pytestmark = pytest.mark.usefixtures("short_rounds")
BRIEF = Sampling(rounds=3, seconds=0.01, calls=2, warmup=1)


def test_builds_take_turns_and_are_compared_with_the_first(tiny_build: Artifact, tmp_path):
    other = shutil.copytree(tiny_build.directory, tmp_path / "other")
    timings = compare_builds({"full": tiny_build.directory, "other": other}, sampling=BRIEF)
    assert list(timings) == ["full", "other"]
    assert timings["full"].ratio == 1.0 and len(timings["other"].rounds) == 3
    rounds = zip(timings["other"].rounds, timings["full"].rounds, strict=True)
    assert timings["other"].ratio == pytest.approx(sorted(one / two for one, two in rounds)[1])


def test_a_network_is_tuned_without_its_records_and_compared(tiny_build: Artifact, tmp_path, monkeypatch):
    asked = []

    def tuned(artifact, minutes, output, records):
        asked.append((minutes, records))
        shutil.copytree(tiny_build.directory, output)
        return 10.0 + minutes, 15.0

    left_out = []
    monkeypatch.setattr(zero_trials, "tune_build", tuned)
    monkeypatch.setattr(zero_trials, "train_records", lambda *arguments: left_out.append(arguments))
    found = zero_trials.measure(tiny_build.directory, [0.0, 1.0], None, tmp_path)
    assert [minutes for minutes, _ in asked] == [0.0, 1.0] == [each.minutes for each in found]
    ((records, networks, output),) = left_out
    assert records is None and networks == [tiny_build.directory.name] and {output} == {own for _, own in asked}
    assert all(0.2 < each.ratio < 5.0 for each in found) and found[1].wall_seconds == 11.0


def test_the_table_says_in_how_many_networks_the_goal_was_reached():
    build = zero_trials.ShortBuild(0.0, 1.05, 18.0, 25.0)
    table = zero_trials.table({"a": [build], "b": [replace(build, ratio=1.21)]}, [0.0])
    assert "| a | 1.050 | 18 | 25 |" in table and "1.127 (worst 1.210, 1 within 10%)" in table.splitlines()[-1]
