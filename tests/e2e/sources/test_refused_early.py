"""Sizes and files that no job has are refused before anything is built, in a line that says what is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodel.base.errors import ProjectError
from costmodel.machines.cluster import MOST_GPUS, load_cluster
from e2e.capture.models.transformer import read_config
from e2e.parallelism.spec import parse_parallel
from e2e.step.options import ClusterOptions, SelectionOptions, check_units
from e2e.sweeps.workers import LocalWorkers

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda: load_cluster("h100-sxm", 10**9), f"at most {MOST_GPUS:,} GPUs"),
        (lambda: load_cluster("h100-sxm", 16, network="infiniband-ndr:999999"), "must be 1 to 512"),
        (lambda: parse_parallel("pp=4,micro-batches=1000000", 4), "micro-batches x pp are more than"),
        (lambda: SelectionOptions(selected=0.0), "--selected 0: must be more than 0 and at most 1"),
        (lambda: ClusterOptions(gpu="t4", gpus=2, speed_spread=9), "--speed-spread 9: must be from 0 to 1"),
        (lambda: LocalWorkers(100_000), "more than 1024 processes"),
        (lambda: check_units("fp8-block", load_cluster("v100-pcie-32gb", 1).machine), "has no rate for float8"),
        (lambda: check_units("mxfp8", load_cluster("h100-sxm", 1).machine), "no units for MX formats"),
    ],
)
def test_what_no_job_has_is_refused(asked, message):
    with pytest.raises(ProjectError, match=message) as refused:
        asked()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json.dumps({**LLAMA, "num_hidden_layers": -1}), "num_hidden_layers is -1"),
        (json.dumps({**LLAMA, "auto_map": {"AutoModel": "x.Y"}}), "auto_map.*is not run"),
        ('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}', "key 'hidden_size' twice"),
    ],
)
def test_configurations_of_no_model_are_refused(tmp_path: Path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ProjectError, match=message) as refused:
        read_config(path)
    assert str(refused.value).startswith(str(path))


def test_units_that_a_gpu_has_are_taken():
    check_units("mxfp8", load_cluster("b200-sxm", 1).machine)
    check_units("fp8-block", load_cluster("h100-sxm", 1).machine)
