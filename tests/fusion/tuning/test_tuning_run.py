"""What the road of ``tune`` leaves behind."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("tvm")

from costmodel.base.errors import InputError
from fusion.tuning import tuning_run
from fusion.tuning.clock import TuningDisplay
from fusion.tuning.network import TuneRequest


def test_a_job_leaves_the_environment_as_it_was(tmp_path, monkeypatch):
    """TVM reads how many threads it may use from the environment, as long as the job runs."""
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    seen = []

    def read(*_):
        seen.append(os.environ["TVM_NUM_THREADS"])
        raise InputError("unreadable")

    monkeypatch.setattr(tuning_run, "read_networks", read)
    request = TuneRequest(tmp_path / "model.onnx", tmp_path / "build", threads=1)
    with pytest.raises(InputError, match="unreadable"):
        tuning_run.tune_model(request, TuningDisplay(told=lambda line: None))
    assert seen == ["1"] and "TVM_NUM_THREADS" not in os.environ
    assert not (tmp_path / "build").exists()
