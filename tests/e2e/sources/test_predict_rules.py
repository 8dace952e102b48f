"""The table of options x sources: complete, the same in errors, help and documentation, open to a new source."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

import e2e
from costmodel.base.errors import InputError
from e2e.commands.cli import app
from e2e.sources.asked.option_table import PAIR_RULES, TABLE
from e2e.sources.asked.request import ConfigurationOptions, MachineOptions, PredictRequest, WorkloadOptions
from e2e.sources.asked.rule_types import refused
from e2e.sources.option_check import check
from e2e.sources.options_page import note, page
from e2e.sources.predict_request import predict_request
from e2e.sources.registry import SOURCES, StepSource, source_of
from e2e.sources.request_parts import one_gpu
from e2e.step.precision import Precision

ROOT = Path(__file__).resolve().parents[3]
RECORDS = {"workload": WorkloadOptions, "configuration": ConfigurationOptions, "machine": MachineOptions}


def test_every_option_of_a_request_is_a_row_and_every_cell_is_of_a_source():
    places = [f"{name}.{each.name}" for name, record in RECORDS.items() for each in fields(record)]
    assert sorted(row.place for row in TABLE) == sorted([*places, "what_if"])
    names = {source.name for source in SOURCES}
    assert all(set(row.cells) <= names for row in TABLE)
    assert {pair.source for pair in PAIR_RULES} <= names


def test_whatever_is_not_used_has_a_sentence():
    rules = [source.rule(row) for row in TABLE for source in SOURCES]
    assert all(rule.sentence for rule in rules if rule.effect != "used")


def test_the_page_on_disk_is_the_one_that_the_table_makes():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page(), (
        "python -m e2e.sources.options_page > docs/options.md"
    )


def test_the_help_says_for_which_sources_an_option_is():
    assert note("--retarget") == "(For: recorded run.)"
    assert note("--batch-size") == "(Not for: recorded run, execution trace.)"
    assert note("--gpu") == note("--model") == ""
    for option in ("--gpus", "--nodes", "--network", "--skew"):  # several GPUs are for models and scripts too
        assert note(option) in ("", "(Not for: recorded run.)")
    assert "model spread over GPUs" not in note("--mode")  # forward passes of it are predicted
    shown = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "300"}).stdout
    assert "(For: recorded run.)" in shown and "(Not for: recorded run, execution trace.)" in shown


@pytest.mark.parametrize(
    ("workload", "machine", "name"),
    [
        ({"model": "gpt2"}, {}, "model"),
        ({"model_config": Path("c.json"), "model": "gpt2"}, {}, "configuration"),
        ({"script": "t.py:f"}, {}, "script"),
        ({"script": "t.py:f"}, {"gpus": 1}, "distributed-script"),
        ({"traces": ("t.json",), "model": "gpt2"}, {}, "trace"),
        ({"traces": ("t.json",), "kineto": ("k.json",)}, {}, "recording"),
        ({"model": "dlrm", "tables": Path("t.yaml")}, {}, "sharded"),
    ],
)
def test_options_choose_a_source(workload, machine, name):
    assert source_of(PredictRequest(WorkloadOptions(**workload), machine=MachineOptions(**machine))).name == name


def test_options_without_effect_are_told_by_reason():
    workload = WorkloadOptions(traces=("t.json",), batch_size=4, mode="inference")
    request = PredictRequest(
        workload, ConfigurationOptions(dtype="bfloat16", attention="flash"), MachineOptions(gpu="t4")
    )
    assert check(request, source_of(request)) == [
        "--batch-size, --mode, --attention: without effect, a recorded step brings its own",
        "--dtype: without effect, number types are as recorded; only tf32 changes them",
    ]
    plain = PredictRequest(
        WorkloadOptions(traces=("t.json",)), ConfigurationOptions(dtype="tf32"), MachineOptions(gpu="t4")
    )
    assert check(plain, source_of(plain)) == []


# --- a new source ---------------------------------------------------------------------------------

TOY = '''
"""One kernel that copies as many MiB as the batch has samples."""

from costmodel.operators.device_work import MemoryCopy
from e2e.step.execution_graph import ExecutionGraph, Task
from e2e.sources.request_parts import one_gpu, setting_of
from e2e.sources.prepared_step import PreparedStep
from e2e.step.rank_writer import RankWriter


def prepare(request):
    cluster = one_gpu(request.machine)
    rank = RankWriter(0)
    work = MemoryCopy(request.workload.samples * 2**20, "d2d")
    rank.unit(Task(rank.next_task, "copy", "kernel", 0, (work,), call=rank.call("copy", "forward")))
    graph = ExecutionGraph((rank.finish(),), source="toy")
    return PreparedStep(graph, setting_of(request.configuration, cluster.machine), cluster, {})
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A new source is one file and one line in the registry."""
    (tmp_path / "toy_source.py").write_text(TOY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    cells = {"--mode": refused("a copy is neither trained nor inferred; leave --mode {value} out")}
    line = StepSource("toy", "toy", "toy_source:prepare", (frozenset({"--overheads"}),), cells)
    importlib.invalidate_caches()
    SOURCES.insert(0, line)
    yield
    SOURCES.remove(line)
    sys.modules.pop("toy_source", None)


def toy_request(**workload: object) -> PredictRequest:
    """The toy is chosen by a table of host overheads."""
    shared = ROOT / "costmodel" / "calibration" / "host_overheads" / "shared.json"
    return PredictRequest(WorkloadOptions(**workload), ConfigurationOptions(overheads=shared), MachineOptions(gpu="t4"))


def test_a_new_source_is_a_file_and_a_line(toy):
    one, four = (predict_request(toy_request(batch_size=size)).prediction for size in (1, 1024))
    assert one.workload == "toy" and one.kernels == 1
    assert four.gpu_active_seconds > 100 * one.gpu_active_seconds
    with pytest.raises(InputError, match="leave --mode inference out"):
        predict_request(toy_request(mode="inference"))
    with pytest.raises(InputError, match="exactly one of --model"):  # by the rows of the table
        predict_request(toy_request(model="gpt2"))
    assert "1. toy: `--overheads`" in page()


# --- machines -------------------------------------------------------------------------------------


def test_a_gpu_of_ones_own_needs_no_link_to_run_alone(tmp_path):
    text = (ROOT / "costmodel" / "machines" / "gpu" / "t4.yaml").read_text(encoding="utf-8")
    before, links, _ = text.partition("links:")
    assert links, "the file has changed"
    own = tmp_path / "own.yaml"
    own.write_text(before, encoding="utf-8")
    alone = one_gpu(MachineOptions(gpu=str(own)))
    assert (alone.gpus, alone.nodes, alone.machine.name) == (1, 1, "t4")


def test_the_name_of_a_cluster_stands_for_one_of_its_gpus():
    arguments = ["predict", "--model", "resnet-50", "--mode", "inference", "--json"]
    by_cluster, by_gpu = (
        json.loads(CliRunner().invoke(app, [*arguments, "--gpu", name]).stdout) for name in ("dgx-h100", "h100-sxm")
    )
    asked = [each for each in by_cluster.pop("asked") if each["option"] == "--gpu"]
    assert asked == [{"option": "--gpu", "value": "dgx-h100", "given": True}]
    del by_gpu["asked"]
    assert by_cluster == by_gpu and by_gpu["board"]["name"] == "h100-sxm"


# --- overlap --------------------------------------------------------------------------------------


def test_products_in_pieces_are_said_to_cost_launches(tmp_path):
    """The one overlap that may make a step longer, and why."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    whole, pieces = (
        e2e.predict(model_config=path, gpu="h100-sxm", gpus=2, parallel=f"tp=2,sp=yes,tp-overlap={each}")
        for each in ("no", "yes")
    )
    assert pieces.iteration_seconds > whole.iteration_seconds and pieces.host_bound_fraction > 0.5
    told = [any("in 2 pieces" in note for note in each.notes) for each in (whole, pieces)]
    assert told == [False, True]


# --- 8 bits ---------------------------------------------------------------------------------------

EIGHT_BITS = get_args(Precision)
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("spread", [None, "dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_recipes_of_training_never_serve(precision, spread, tmp_path):
    """A forward pass of a training recipe casts weights that no engine casts: 2.9 to 4 times as long as one serves."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    options = ["--model-config", str(path), "--gpu", "b200-sxm", "--precision", precision]
    options += [] if spread is None else ["--gpus", "2", "--parallel", spread]
    told = CliRunner().invoke(app, ["predict", *options, "--mode", "inference"])
    assert told.exit_code == 2 and "quantization_config" in told.stderr and "leave --precision out" in told.stderr
    with pytest.raises(InputError, match="--precision is how training casts"):
        e2e.predict(
            model_config=path, gpu="b200-sxm", precision=precision, mode="inference",
            gpus=None if spread is None else 2, parallel=spread,
        )  # fmt: skip


@pytest.mark.parametrize("spread", ["dp=2", "tp=2", "pp=2"])
def test_weights_kept_in_8_bits_are_served_by_one_gpu_alone(spread, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}), encoding="utf-8")
    with pytest.raises(InputError, match="config.json: weights .* are for one GPU yet; leave --parallel out"):
        e2e.predict(model_config=path, gpu="b200-sxm", mode="inference", gpus=2, parallel=spread)
    assert e2e.predict(model_config=path, gpu="b200-sxm", mode="inference").iteration_seconds > 0
