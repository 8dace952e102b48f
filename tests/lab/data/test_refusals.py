"""Damaged files of every public form: each reader names the file and what to do, in one line."""

from __future__ import annotations

import gzip
import json

import pytest

from costmodel.base.errors import InputError
from lab.bench.unseen_kernels import FILE, read_dlrm_trace
from lab.data.aiconfigurator import read_aiconfigurator, read_attention
from lab.data.collective_sweeps import read_collectives
from lab.data.profiled_kernels import read_layer_kernels, read_neusight
from lab.data.timm_steps import read_timm, timm_files
from lab.steps.training import TRAINING_FILE, read_training_rows
from lab.validate.models import LABELS, cases
from lab.validate.vtrain import read_cases

NEUSIGHT = "neusight/op_latency/add/Tesla T4.csv.gz"
LAYERS = "llmservingsim/A6000/meta-llama/Llama-3.1-8B/tp1/layers.csv.gz"
GEMM = "aiconfigurator/l40s/gemm/gemm_perf.parquet"
ATTENTION = "aiconfigurator/l40s/attention/vllm/1.0/context_attention_perf.parquet"
SWEEP = "vidur/h100_dgx/send_recv.csv.gz"
TIMM = "timm/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
VTRAIN = "vtrain/iteration_times_4_gpus.csv"
LABEL = f"{LABELS}/Tesla_T4/tiny-inf-64-2.json"


def read_timm_files(data):
    return [step for path in timm_files(data) for step in read_timm(path)]


@pytest.mark.parametrize(
    ("read", "name", "content", "told"),
    [
        (read_neusight, NEUSIGHT, "Latency,B\n1.0,3\n", "not a table of operator latencies"),
        (read_neusight, NEUSIGHT, "Latency,B,H\nfast,3,4\n", "not a table of operator latencies"),
        (read_neusight, NEUSIGHT, "Latency,B,H\n-1,3,4\n", "times that are not above zero"),
        (
            read_neusight,
            NEUSIGHT,
            gzip.compress(b"Latency,B,H\n" + b"1.0,3,4\n" * 1000, mtime=0)[:-20],
            "cannot be read",
        ),
        (read_layer_kernels, LAYERS, "layer_name,input\nq_proj,3\n", "not a table of layer kernels"),
        (read_layer_kernels, LAYERS, "layer_name,input,latency(ns)\nq_proj,many,3\n", "not a table of layer kernels"),
        (read_aiconfigurator, GEMM, b"PAR1 no", "not a GEMM table"),
        (read_attention, ATTENTION, b"PAR1 no", "not a table of attention"),
        (read_collectives, SWEEP, b"not compressed", "fetch it again"),
        (read_collectives, SWEEP, "size,seconds\n1,2\n", "fetch it again"),
        (read_collectives, SWEEP, "", "fetch it again"),
        (read_timm_files, TIMM, "model,train_step_time\nresnet50,400\n", "not results of timm"),
        (read_training_rows, TRAINING_FILE, "source,task\na,b\n", "not a table of training steps"),
        (read_cases, VTRAIN, "1,2,3\n", "not a table of iterations"),
        (read_cases, VTRAIN, "4,16,2,1024,16,24,1024,2,2,1,fast\n", "not a table of iterations"),
        (cases, LABEL, "{", "not a measured model"),
        (cases, LABEL, json.dumps({"latency": 3}), "not a measured model"),
        (read_dlrm_trace, FILE, b"no archive", "not the profiles of the eight ranks"),
    ],
)
def test_a_damaged_file_names_itself(tmp_path, read, name, content, told):
    if str(name).endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    if isinstance(content, str):
        content = gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode()
    path.write_bytes(content)
    with pytest.raises(InputError, match=told) as error:
        list(read(tmp_path))
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_neusight, read_aiconfigurator, read_cases, cases, read_training_rows])
def test_a_folder_without_the_tables_says_what_to_give(tmp_path, read):
    with pytest.raises(InputError, match=r"--data|docs/measurements.md"):
        list(read(tmp_path))
