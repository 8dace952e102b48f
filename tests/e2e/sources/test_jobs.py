"""What `predict` is asked for: options that contradict each other, and jobs of several ranks from end to end."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from e2e.commands.cli import app
from e2e.sources.predict_request import predict_request
from e2e.sources.requests import request_of
from e2e.traces.recorded_run import expand_files, read_recorded_run
from tests.e2e.recorded_traces import DLRM, DLRM_ET, LINEAR, LINEAR_ET, recorded

SIZED = """
import torch

def make_step(batch_size=4096):
    model = torch.nn.Linear(64, 64, bias=False).cuda()
    data = torch.randn(batch_size, 64, device="cuda")
    return model, lambda: model(data).sum().backward()
"""


@pytest.mark.parametrize("gpus", [None, 2])
def test_a_script_keeps_its_own_batch_size(tmp_path: Path, gpus: int | None) -> None:
    """One that is given takes its place."""
    (tmp_path / "train.py").write_text(SIZED, encoding="utf-8")

    def rows(size: int | None) -> int:
        script = f"{tmp_path / 'train.py'}:make_step"
        done = predict_request(request_of({"script": script, "batch_size": size, "gpu": "t4", "gpus": gpus}))
        task = next(task for task in done.graph.ranks[0].tasks if task.name == "aten::mm")
        return task.operators[0].m

    assert (rows(None), rows(1024)) == (4096, 1024)


@pytest.mark.parametrize("gpus", [[], ["--gpus", "2"]])
def test_a_size_that_a_script_does_not_take_is_said(tmp_path: Path, gpus: list[str]) -> None:
    (tmp_path / "train.py").write_text(SIZED.replace("batch_size=4096", "size=8").replace("batch_size", "8"), "utf-8")
    arguments = ["predict", "--script", f"{tmp_path}/train.py:make_step", "--gpu", "t4", "--json", *gpus]
    plain, sized = (
        json.loads(CliRunner().invoke(app, [*arguments, *more]).stdout)["warnings"]
        for more in ([], ["--batch-size", "64"])
    )
    assert set(sized) - set(plain) == {
        "--batch-size: without effect, the script's function has no parameter batch_size"
    }


read_once = functools.cache(lambda kineto, traces: read_recorded_run(kineto, traces))


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recording is read once for all tests."""
    monkeypatch.setattr("e2e.sources.recorded_job.read_recorded_run", read_once)


def run(*arguments: object) -> dict:
    done = CliRunner().invoke(app, ["predict", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert sum(record["attribution"].values()) == pytest.approx(record["critical_path_seconds"], rel=1e-9)
    window = record["critical_path_seconds"]
    assert all(sum(rank["attribution"].values()) == pytest.approx(window, rel=1e-9) for rank in record["ranks"])
    return record


def test_real_recorded_ranks_are_replayed_on_their_own_gpu(cached):
    record = run("--kineto", recorded(DLRM), "--trace", recorded(DLRM_ET))
    assert (record["machine"], record["gpus"]) == ("v100-sxm2-32gb", 8)
    assert record["coverage"] == {"measured": 1.0}
    assert record["iteration_seconds"] == pytest.approx(20.8e-3, rel=0.01)
    assert len(record["collectives"]) == 8
    assert any("kernels and transfers are as recorded" in note for note in record["notes"])
    assert all(rank["peak_memory_bytes"] > 0 for rank in record["ranks"])


@pytest.mark.thorough
def test_real_recorded_ranks_move_to_another_gpu(cached):
    """Launch-bound: kernels and transfers get shorter, the step hardly."""
    files = ("--kineto", recorded(DLRM), "--trace", recorded(DLRM_ET))
    before, after = run(*files), run(*files, "--retarget", "h100-sxm")
    assert after["machine"] == "h100-sxm" and after["cluster"] != before["cluster"]
    assert sum(r["compute_seconds"] for r in after["ranks"]) < 0.9 * sum(r["compute_seconds"] for r in before["ranks"])
    assert all(each["source"] != "measured" for each in after["collectives"])
    assert after["iteration_seconds"] == pytest.approx(before["iteration_seconds"], rel=0.02)
    # The host in front of the other GPU is not known.
    (low, high), (lowest, highest) = before["interval_seconds"], after["interval_seconds"]
    assert high / low < 1.1 and highest / lowest > 1.37
    assert any("the host is the recorded one; in front of h100-sxm" in note for note in after["notes"])


def test_a_real_recorded_rank_of_a_job_stands_for_all_of_it_elsewhere():
    """Its own collectives hold waiting; predicted ones do not."""
    profile = next(path for path in expand_files([recorded(DLRM)]) if "worker0" in path.name)
    files = ("--kineto", profile, "--trace", recorded(DLRM_ET) / "dlrm_pytorch_et/dlrm_eg_0.json")
    here, there = run(*files), run(*files, "--retarget", "h100-sxm")
    assert here["gpus"] == there["gpus"] == 8
    assert any("its collectives include the waiting" in each for each in here["warnings"])
    assert [each for each in there["warnings"] if "one of 8 ranks" in each] == [
        f"{profile} is one of 8 ranks; the others are taken as alike"
    ]


def test_a_real_recorded_rank_uses_its_measured_kernels_on_its_own_gpu(cached):
    files = ["--kineto", str(recorded(LINEAR)), "--trace", str(recorded(LINEAR_ET))]
    own = json.loads(CliRunner().invoke(app, ["predict", *files, "--json"]).stdout)
    assert own["machine"] == "rtx-2080-ti" and own["coverage"] == {"measured": 1.0}
    other = json.loads(CliRunner().invoke(app, ["predict", *files, "--gpu", "t4", "--json"]).stdout)
    assert "measured" not in other["coverage"]
    assert any("kernels are predicted for t4" in note for note in other["notes"])
    moved = json.loads(CliRunner().invoke(app, ["predict", *files, "--retarget", "t4", "--json"]).stdout)
    assert moved["interval_seconds"][1] > 1.3 * moved["iteration_seconds"]  # with a host that nobody named
    assert "measured" not in moved["coverage"] and moved["gpu_active_seconds"] > own["gpu_active_seconds"]


def test_of_an_execution_trace_of_two_steps_one_is_predicted(tmp_path):
    """The second step is a copy of the first; the profile has forty alike."""
    with gzip.open(recorded(LINEAR_ET), "rt") as stream:
        document = json.load(stream)
    nodes, offset = document["nodes"], 1 + max(node["id"] for node in document["nodes"])
    fixed = {node["id"] for node in nodes if node["name"].startswith("[pytorch|")}

    def again(node: dict) -> dict:
        parent = node["parent"] if node["parent"] in fixed else node["parent"] + offset
        return {**node, "id": node["id"] + offset, "parent": parent, "rf_id": node["rf_id"] + offset}

    document["nodes"] = [*nodes, *(again(node) for node in nodes if node["id"] not in fixed)]
    (tmp_path / "two.json").write_text(json.dumps(document))

    def predicted(trace: Path) -> dict:
        files = ["--kineto", str(recorded(LINEAR)), "--trace", str(trace), "--json"]
        done = CliRunner().invoke(app, ["predict", *files])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    one, two = predicted(recorded(LINEAR_ET)), predicted(tmp_path / "two.json")
    assert two["kernels"] == one["kernels"]
    assert two["iteration_seconds"] == pytest.approx(one["iteration_seconds"], rel=0.02)


def test_a_step_that_was_recorded_without_a_gpu_is_refused(tmp_path):
    """Its operators are those of a CPU: as a step of a GPU it would be its host's time alone."""

    def written(device: str) -> str:
        matrix = [5, 6, 0, 64, 4, device]
        node = {"id": 3, "name": "aten::mm", "parent": 2, "tid": 1, "scope": 0, "fw_tid": 0, "seq_id": -1, "rf_id": 3}
        node |= {"inputs": [matrix, matrix], "input_shapes": [[8, 8], [8, 8]], "op_schema": ""}
        node |= {"input_types": ["Tensor(float)"] * 2, "outputs": [matrix], "output_shapes": [[8, 8]]}
        node |= {"output_types": ["Tensor(float)"]}
        thread = {"id": 2, "name": "[pytorch|profiler|execution_graph|thread]", "parent": 1, "tid": 1, "scope": 7}
        thread |= {"fw_tid": 0, "seq_id": -1, "rf_id": 2, "op_schema": ""}
        thread |= {f"{side}{part}": [] for side in ("input", "output") for part in ("s", "_shapes", "_types")}
        (tmp_path / "et.json").write_text(
            json.dumps({"schema": "1.0.1", "pid": 7, "nodes": [thread, node], "finish_ts": 1})
        )
        done = CliRunner().invoke(app, ["predict", "--trace", str(tmp_path / "et.json"), "--gpu", "t4"])
        return done.output if done.exit_code else ""

    assert written("cuda:0") == ""
    assert "none of its 1 operators works on a GPU: the step was recorded on a CPU" in " ".join(written("cpu").split())


def test_what_a_recording_leaves_out_is_named_where_only_its_files_tell(cached):
    job = run("--kineto", recorded(DLRM), "--trace", recorded(DLRM_ET), "--cuda-graph")
    assert "--cuda-graph: without effect, the launches of a job are as recorded" in job["warnings"]
    files = ["--kineto", str(recorded(LINEAR)), "--trace", str(recorded(LINEAR_ET)), "--json"]
    alone = json.loads(CliRunner().invoke(app, ["predict", *files, "--nodes", "2"]).stdout)
    assert "--nodes: without effect, the recorded run is of one GPU" in alone["warnings"]


def test_a_recorded_run_moves_to_a_cluster_by_its_name(cached):
    files = ["--kineto", str(recorded(LINEAR)), "--trace", str(recorded(LINEAR_ET)), "--json"]
    moved = json.loads(CliRunner().invoke(app, ["predict", *files, "--retarget", "dgx-h100"]).stdout)
    assert moved["machine"] == "h100-sxm"


def test_a_real_trace_of_one_rank_stands_for_all_of_its_job():
    """The same collectives, priced instead of measured."""
    trace = recorded(DLRM_ET) / "dlrm_pytorch_et/dlrm_eg_0.json"
    record = run("--trace", trace, "--gpus", 8, "--gpu", "v100-sxm2-32gb")
    assert (record["gpus"], len(record["ranks"]), len(record["collectives"])) == (8, 1, 8)
    assert any("of one rank; the other 7 are taken as alike" in warning for warning in record["warnings"])
    done = CliRunner().invoke(app, ["predict", "--trace", str(trace), "--gpu", "v100-sxm2-32gb"])
    assert done.exit_code == 2 and "a rank of a job with collectives; give --gpus" in done.stderr


def test_a_wrong_gpu_of_recorded_ranks_is_refused():
    done = CliRunner().invoke(app, ["predict", "--kineto", str(recorded(DLRM)), "--gpu", "h100-sxm"])
    assert done.exit_code == 2 and "recorded on Tesla V100-SXM2-32GB; --retarget h100-sxm moves it there" in done.stderr


def test_a_pipeline_of_a_built_in_model_has_bubbles():
    pytest.importorskip("torch")
    spread = ("--parallel", "tp=2,pp=2,dp=2,micro-batches=4", "--sequence-length", 128)
    # As a CUDA graph: else the host of every stage would be what its GPU waits for.
    record = run("--model", "gpt2", "--gpu", "h100-sxm", *spread, "--gpus", 8, "--cuda-graph")
    assert record["gpus"] == 8 and [rank["multiplicity"] for rank in record["ranks"]] == [4, 4]
    assert sum(rank["bubble_seconds"] for rank in record["ranks"]) > 0
    assert {each["kind"] for each in record["collectives"]} >= {"all_reduce", "send_recv"}
    assert all(rank["peak_memory_bytes"] > 0 for rank in record["ranks"])
    assert record["peak_memory_bytes"] == max(rank["peak_memory_bytes"] for rank in record["ranks"])
    phases = [record[f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
    assert min(phases) > 0 and sum(phases) == pytest.approx(record["critical_path_seconds"], rel=0.01)
    rate = record["throughput"]
    assert (rate["samples"], rate["sequence_length"]) == (8, 128)
    assert rate["made_of"] == "batch size 1 x 4 micro-batches x 2 replicas"
    assert rate["tokens_per_second_per_gpu"] == pytest.approx(8 * 128 / record["iteration_seconds"] / 8)


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def make_step(batch_size):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 2048, device="cuda")

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step
"""


def test_the_users_own_distributed_script_on_a_thousand_gpus(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ("--gpus", 1024, "--gpu", "h100-sxm", "--batch-size", 64)
    record = run("--script", f"{tmp_path}/train.py:make_step", *where)
    assert (record["gpus"], record["nodes"], len(record["ranks"])) == (1024, 128, 1)
    assert {each["kind"] for each in record["collectives"]} == {"all_reduce"}
    sent = sum(each["size_bytes"] for each in record["collectives"])
    assert sent == 4 * (2048 * 2048 + 2048) * 4


STRANGE = """
import torch

def make_step(batch_size):
    model = torch.nn.Linear(64, 64).cuda()
    compiled = torch.compile(model)
    data = torch.randn(batch_size, 64, device="cuda")
    return model, lambda: torch.ops.someones.strange(compiled(data).detach())
"""


@functools.cache
def strange_library():
    """Defined once: the script is loaded once per rank."""
    torch = pytest.importorskip("torch")
    library = torch.library.Library("someones", "FRAGMENT")
    library.define("strange(Tensor x) -> Tensor")
    library.impl("strange", torch.empty_like, "Meta")
    return library


@pytest.mark.parametrize("gpus", [[], ["--gpus", "2"]])
def test_what_is_not_modelled_of_a_script_is_said(tmp_path, gpus):
    """Operators that no table knows, and torch.compile, which a recording does not see."""
    assert strange_library()
    (tmp_path / "train.py").write_text(STRANGE)
    arguments = ["predict", "--script", f"{tmp_path}/train.py:make_step", "--gpu", "t4", "--json", *gpus]
    record = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert any("1 launches of operators without a model" in each for each in record["warnings"])
    assert any("the script compiles its model (torch.compile)" in each for each in record["warnings"])


@pytest.mark.parametrize(("options", "fused"), [([], True), (["--attention", "eager"], False)])
def test_a_script_gets_the_attention_that_pytorch_would_choose(tmp_path, options, fused):
    script = tmp_path / "step.py"
    script.write_text(
        "import torch\n"
        "def make_step():\n"
        "    heads = torch.randn(2, 4, 64, 32, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "    attend = torch.nn.functional.scaled_dot_product_attention\n"
        "    return torch.nn.Identity(), lambda: attend(heads, heads, heads).sum().backward()\n"
    )
    arguments = ["predict", "--script", f"{script}:make_step", "--gpu", "h100-sxm", "--json", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    families = json.loads(result.stdout)["breakdown"]["by_operator"]
    assert any("attention" in name for name in families) == fused


@pytest.mark.parametrize("gpus", [[], ["--gpus", "1"]])
def test_a_script_that_starts_a_process_group_needs_the_number_of_gpus(gpus):
    script = Path(__file__).parents[3] / "examples" / "ddp_step.py"
    arguments = ["predict", "--script", f"{script}:make_step", "--gpu", "h100-sxm", "--batch-size", "8", *gpus]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (0 if gpus else 2), result.output
    assert ("say with --gpus on how many GPUs" in result.stderr) == (not gpus)
