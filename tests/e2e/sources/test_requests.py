"""From options to the request of one source: what is chosen, refused, and said in the help; a new source."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

import e2e
from costmodel.base.errors import InputError
from costmodel.machines.cluster import load_gpu, single_gpu
from e2e.commands.cli import app
from e2e.commands.predict_command import note
from e2e.sources.requests import (
    SOURCES,
    Model,
    Recording,
    Script,
    ScriptJob,
    ShardedTables,
    SpreadModel,
    Trace,
    request_of,
)
from e2e.step.options import Precision

ROOT = Path(__file__).resolve().parents[3]
H100 = {"gpu": "h100-sxm"}
PLAN = {"tables": "t.yaml", "sharding": "p.json", "gpus": 2}


# --- from options to a request --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "record"),
    [
        ({"model": "gpt2"}, Model),
        ({"model": "gpt2", "gpus": 1, "nodes": 1}, Model),
        ({"model_config": "c.json", "routing": "balanced"}, Model),
        ({"model": "gpt2", "parallel": "dp=2"}, SpreadModel),
        ({"model": "gpt2", "gpus": 2}, SpreadModel),
        ({"script": "t.py:f"}, Script),
        ({"script": "t.py:f", "gpus": 1}, ScriptJob),
        ({"traces": "t.json"}, Trace),
        ({"traces": "t.json", "kineto": ["k.json"]}, Recording),
        ({"model": "dlrm", **PLAN}, ShardedTables),
    ],
)
def test_options_choose_a_record(options, record):
    assert type(request_of({**H100, **options})) is record


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of --model, --model-config, --script, --command, --trace and --kineto"),
        ({"model": "gpt2", "gpu": None}, "give --gpu: GPU or cluster"),
        ({"tables": "t.yaml"}, "give --gpus: .*; --sharding: Placement"),
        # Of what is computed one alone.
        ({"model": "gpt2", "script": "t.py:f"}, "got --model and --script"),
        ({"traces": "a", "model": "gpt2"}, "got --model and --trace"),
        ({"kineto": "k", "model": "gpt2"}, "got --model and --kineto"),
        ({"model": "gpt2", "model_config": "c.json"}, "give exactly one of --model and --model-config"),
        # What a source does not have, by one rule that says why and who has it.
        ({"model": "gpt2", "retarget": "t4"},
         r"--retarget is no option of a model on one GPU; leave it out \(it is for: recorded run \(--kineto\)\)"),
        ({"model": "gpt2", "ranks": "0,1"}, r"for: script on several GPUs \(--script --gpus\)"),
        ({"model": "gpt2", "network": "infiniband-ndr"}, "--network is no option of a model on one GPU"),
        ({"script": "t.py:f", "parallel": "dp=8"}, "script on one GPU: a script says itself what it runs"),
        ({"script": "t.py:f", "gpus": 2, "parallel": "dp=2"}, "and how it is spread; leave it out"),
        ({"traces": "a", "parallel": "dp=8"}, "--parallel is no option of an execution trace: a recorded step brings"),
        ({"traces": "a", "batch_size": 4}, "--batch-size is no option of an execution trace: a recorded step brings"),
        ({"kineto": "k", "gpus": 8}, "--gpus is no option of a recorded run: a recorded run is as it was"),
        ({"kineto": "k", "overheads": "o.json"}, "--overheads is no option of a recorded run"),
        ({**PLAN, "mode": "inference"}, "--mode is no option of a sharded DLRM: it is a training step"),
        ({**PLAN, "compile": True}, "--compile is no option of a sharded DLRM"),
        # What a request knows itself.
        ({**PLAN, "model": "gpt2"}, "are for --model dlrm"),
        ({"model": "gpt2", "parallel": "dp=8", "gpus": 4}, "= 8, but --gpus is 4"),
        ({"model": "gpt2", "parallel": "dp=8", "mode": "forward-backward"}, "leave --mode forward-backward out"),
        ({"model": "gpt2", "cache_length": 8}, "--cache-length decodes: give --mode inference"),
        ({"traces": "a", "dtype": "bfloat16"}, "number types are as recorded; only tf32 changes them"),
        ({"traces": "a", "speed_spread": 0.1}, "--speed-spread is for several ranks"),
        ({"kineto": "k", "network": "infiniband-ndr"}, "--network goes with --retarget"),
        ({"kineto": "k", "retarget": "t4"}, "--retarget needs the operators behind the kernels"),
        ({"script": "t.py:f", "gpus": 2, "ranks": "0-7"}, "--ranks 0-7: expected numbers"),
    ],
)  # fmt: skip
def test_what_a_source_does_not_have_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        request_of({**H100, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt2", "gpus": 8, "mode": "inference"}, "8 GPUs: say how the work is spread"),
        ({"model": "resnet-50", "gpus": 8}, "8 GPUs: say how the work is spread"),
        ({"model": "gpt2", "nodes": 2}, "2 nodes: say how the work is spread"),
        ({"traces": ("a", "b"), "gpus": 8}, "--gpus 8: there are traces of 2 ranks; leave it out"),
    ],
)
def test_jobs_that_are_not_spread_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        e2e.predict(**H100, **options)


def test_every_source_names_the_function_that_prepares_it():
    assert all(callable(resolve_name(record.prepared_by)) for record in SOURCES)


def test_ranks_are_numbers():
    assert request_of({"script": "t.py:f", "gpus": 8, "ranks": "0, 7", **H100}).ranks == (0, 7)


def test_a_record_has_its_options_and_no_others():
    with pytest.raises(TypeError, match="lora"):
        Script("t.py:f", gpu="t4", lora=4)
    with pytest.raises(InputError, match="--batch-size 0: must be a whole number"):
        Model("gpt2", gpu="t4", batch_size=0)


def test_the_help_says_for_which_sources_an_option_is():
    assert note("batch_size") == " (Not for: program, execution trace, recorded run.)"
    assert note("gpu") == note("model") == note("lora") == note("parallel") == note("nodes") == ""
    assert (
        note("gpus") == note("speed_spread") == " (Not for: recorded run.)"
    )  # several GPUs are for models and scripts too
    shown = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "300"}).stdout
    places = [shown.index(each) for each in ("My model on N GPUs", "My program or script", "My trace", "My tables")]
    assert places == sorted(places) and "(Not for: program, execution trace, recorded run.)" in shown


def test_names_records_and_single_options_ask_together():
    asked = {"gpu": "h100-sxm", "gpus": 2, "parallel": "dp=2", "sequence_length": 32, "recipe": "torchtitan"}
    whole = e2e.predict("gpt2", **asked)
    cluster, stack = e2e.ClusterOptions(gpu="h100-sxm", gpus=2), e2e.StackOptions(recipe="torchtitan")
    parts = e2e.predict("gpt2", cluster, stack, parallel="dp=2", sequence_length=32)
    record = e2e.predict(e2e.SpreadModel("gpt2", **asked))
    assert parts.to_json() == whole.to_json() == record.to_json()
    with pytest.raises(InputError, match="--gpus is given twice"):
        e2e.predict("gpt2", cluster, gpus=4)
    with pytest.raises(TypeError, match="batchsize"):
        e2e.predict("gpt2", batchsize=4)


# --- a new source ---------------------------------------------------------------------------------

TOY = '''
"""One kernel that copies so many MiB."""

from dataclasses import dataclass

from costmodel.operators.device_work import MemoryCopy
from costmodel.machines.cluster import load_gpu, single_gpu
from e2e.sources.prepared_step import PreparedStep, step_setting
from e2e.sources.requests import Request, source
from e2e.step.execution_graph import ExecutionGraph, RankWriter, Task
from e2e.step.option_fields import option
from e2e.step.options import GpuOptions


@source("plain copy", "copy")
@dataclass(frozen=True, kw_only=True)
class Copy(Request, GpuOptions):
    """A copy inside a GPU."""

    panel = "My copy"

    copy: int = option("MiB to copy.", least=1, source=True, kw_only=False)

    def prepare(self) -> PreparedStep:
        cluster, rank = single_gpu(load_gpu(self.gpu)), RankWriter(0)
        work = MemoryCopy(self.copy * 2**20, "d2d")
        rank.unit(Task(rank.next_task, "copy", "kernel", 0, (work,), call=rank.call("copy", "forward")))
        graph = ExecutionGraph((rank.finish(),), source="toy")
        return PreparedStep(graph, step_setting(self, cluster.machine), cluster, {})
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A new source is one file."""
    (tmp_path / "toy_source.py").write_text(TOY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("toy_source").Copy
    SOURCES.pop()
    sys.modules.pop("toy_source", None)


def test_a_new_source_is_a_file(toy):
    one, many = e2e.predict(copy=1, gpu="t4"), e2e.predict(toy(1024, gpu="t4"))
    assert one.workload == "toy" and one.kernels == 1
    assert many.gpu_active_seconds > 100 * one.gpu_active_seconds
    asked = {each.option: each.value for each in many.asked if each.given}
    assert asked == {"--copy": "1024", "--gpu": "t4"}
    with pytest.raises(InputError, match="--mode is no option of a plain copy"):
        e2e.predict(copy=1, gpu="t4", mode="inference")
    with pytest.raises(InputError, match="got --model and --copy"):
        e2e.predict("gpt2", copy=1, gpu="t4")


# --- machines -------------------------------------------------------------------------------------


def test_a_gpu_of_ones_own_needs_no_link_to_run_alone(tmp_path):
    text = (ROOT / "costmodel" / "machines" / "gpu" / "t4.yaml").read_text(encoding="utf-8")
    before, links, _ = text.partition("links:")
    assert links, "the file has changed"
    own = tmp_path / "own.yaml"
    own.write_text(before, encoding="utf-8")
    alone = single_gpu(load_gpu(str(own)))
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
