"""Figures of one prediction agree with each other: five unlike steps, every identity that a reader may check."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from costmodel.machines.machine_file import load_machine
from e2e.commands.cli import app
from e2e.explain.critical_path import HOST_KINDS

NETWORK = """
import torch
from torch import nn
from torch.profiler import record_function


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, given):
        gate = given.mean((2, 3), keepdim=True)
        return given * self.expand(nn.functional.silu(self.reduce(gate))).sigmoid()


class InvertedResidual(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        wide = 4 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            SqueezeExcite(wide), nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))
        self.skips = stride == 1 and channels == out

    def forward(self, given):
        with record_function("block"):
            result = self.layers(given)
            return result + given if self.skips else result


def make_step(batch_size=32):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
        InvertedResidual(32, 32, 1), InvertedResidual(32, 64, 2), InvertedResidual(64, 64, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch_size, 3, 128, 128, device="cuda")
    labels = torch.zeros(batch_size, dtype=torch.long, device="cuda")

    def step():
        optimizer.zero_grad()
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        with record_function("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, step
"""
BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 30522,
        "max_position_embeddings": 512}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
         "max_position_embeddings": 8192}  # fmt: skip
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 1024,
           "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3584,
           "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}  # fmt: skip
TABLES = """
origin: made up
model: {bottom: [13, 256, 64], top: [512, 256, 1]}
tables:
""" + "".join(
    f"  - {{name: t{place}, rows: {rows}, dim: 64, pooling: {pooling}}}\n"
    for place, (rows, pooling) in enumerate([(10**6, 1), (5 * 10**5, 20), (2 * 10**6, 5), (10**4, 1), (10**5, 40),
                                             (3 * 10**6, 1), (10**3, 1), (8 * 10**5, 10), (10**6, 2), (10**6, 3)])
)  # fmt: skip


def _file(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def network(folder: Path) -> list[str]:
    return ["--script", _file(folder, "network.py", NETWORK) + ":make_step", "--gpu", "a100-sxm-80gb"]


def bert(folder: Path) -> list[str]:
    return ["--model-config", _file(folder, "bert.json", BERT), "--gpu", "a100-sxm-40gb", "--batch-size", "16",
            "--sequence-length", "128"]  # fmt: skip


def decoding(folder: Path) -> list[str]:
    return ["--model-config", _file(folder, "llama.json", LLAMA), "--gpu", "h100-sxm", "--mode", "inference",
            "--cache-length", "2048", "--batch-size", "8", "--dtype", "bfloat16", "--attention", "flash"]  # fmt: skip


def mixture(folder: Path) -> list[str]:
    return ["--model-config", _file(folder, "mixtral.json", MIXTRAL), "--gpu", "h100-sxm", "--gpus", "8", "--dtype",
            "bfloat16", "--attention", "flash", "--sequence-length", "512", "--parallel",
            "pp=2,dp=4,ep=4,micro-batches=4"]  # fmt: skip


def recommending(folder: Path) -> list[str]:
    tables = _file(folder, "tables.yaml", TABLES)
    plan = str(folder / "plan.json")
    _run("shard", "--tables", tables, "--gpu", "a100-sxm-40gb", "--gpus", "8", "--batch-size", "512", "--seconds", "1",
         "-o", plan)  # fmt: skip
    return ["--model", "dlrm", "--config", tables, "--sharding", plan, "--gpu", "a100-sxm-40gb", "--gpus", "8",
            "--batch-size", "512"]  # fmt: skip


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def asked(arguments: list[str]) -> dict:
    return json.loads(_run("predict", *arguments, "--json"))


@pytest.fixture(scope="module", params=[network, bert, decoding, mixture, recommending])
def answer(request, tmp_path_factory) -> dict:
    return asked([*request.param(tmp_path_factory.mktemp(request.param.__name__)), "--price", "2"])


def near(value: float, **options) -> object:
    return pytest.approx(value, **{"rel": 1e-9, "abs": 1e-12, **options})


def test_times_sum_to_the_step(answer: dict):
    step = answer["critical_path_seconds"]
    # The one that was looked at, of several alike.
    assert answer["iteration_seconds"] == near(step, rel=2e-3)
    low, high = answer["interval_seconds"]
    assert 0 < low < answer["iteration_seconds"] < high
    phases = [answer[f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer", "other")]
    assert all(each >= 0 for each in phases) and sum(phases) == near(step)
    assert sum(answer["attribution"].values()) == near(step)
    assert sum(part["seconds"] for part in answer["critical_path"]) == near(step)
    host = sum(seconds for kind, seconds in answer["attribution"].items() if kind in HOST_KINDS)
    assert answer["host_bound_fraction"] == near(host / step)
    assert answer["gpu_active_seconds"] + answer["gpu_idle_seconds"] == near(step)


def test_ranks_sum_to_the_job(answer: dict):
    ranks, step = answer["ranks"], answer["critical_path_seconds"]
    assert sum(rank["multiplicity"] for rank in ranks) == answer["gpus"]
    for rank in ranks:
        parts = ("compute", "exposed_transfer", "exposed_wait", "bubble", "idle")
        assert sum(rank[f"{part}_seconds"] for part in parts) == near(step, rel=1e-6)
        assert sum(rank["attribution"].values()) == near(step)
        assert rank["communication_seconds"] >= rank["exposed_transfer_seconds"] - 1e-12
    for name in ("kernels", "operators", "path_seconds"):
        whole = answer["critical_path_seconds" if name == "path_seconds" else name]
        assert sum(rank[name] for rank in ranks) == near(whole)
    assert 0 < answer["kernels"] < answer["operators"]


def test_device_time_is_divided_in_three_ways(answer: dict):
    by = [sum(answer["breakdown"][way].values()) for way in ("by_operator", "by_bound", "by_kind")]
    assert by == near(by[0]) or max(by) == near(min(by))
    assert sum(answer["coverage"].values()) == near(1.0)


def test_throughput_times_time_is_the_batch(answer: dict):
    rate = answer["throughput"]
    seconds = answer["iteration_seconds"]
    assert rate["samples_per_second"] * seconds == near(rate["samples"])
    if rate["sequence_length"] is not None:
        tokens = rate["samples"] * rate["sequence_length"]
        assert rate["tokens_per_second"] * seconds == near(tokens)
        assert rate["tokens_per_second_per_gpu"] * answer["gpus"] * seconds == near(tokens)


def test_utilisation_energy_and_cost_follow_from_time(answer: dict):
    seconds, gpus = answer["iteration_seconds"], answer["gpus"]
    used = answer["utilisation"]
    assert used["hfu"] >= used["mfu"] and used["executed_flops"] >= used["model_flops"]
    if len(used["peak_flops_per_second"]) == 1:
        (peak,) = used["peak_flops_per_second"].values()
        assert used["mfu"] * peak * gpus * seconds == near(used["model_flops"])
        assert used["hfu"] * peak * gpus * seconds == near(used["executed_flops"])
    energy = answer["energy"]
    assert energy["joules"] == near(energy["mean_watts"] * gpus * seconds)
    assert energy["mean_watts"] <= energy["limit_watts"]
    assert answer["cost"]["per_step"] == near(2.0 * gpus * seconds / 3600)


def test_memory_sums_to_its_peak(answer: dict):
    full = max(answer["ranks"], key=lambda rank: rank["peak_memory_bytes"])
    assert answer["peak_memory_bytes"] == full["peak_memory_bytes"]
    for each in (answer, *answer["ranks"]):
        assert sum(each["memory_breakdown"].values()) == each["peak_memory_bytes"]
        assert all(size >= 0 for size in each["memory_breakdown"].values())
    capacity = load_machine(answer["machine"]).memory[-1].capacity_bytes
    assert answer["memory_capacity_bytes"] == capacity and answer["fits"] is True


def test_named_ranges_are_parts_of_the_step(answer: dict):
    ranges = {row["name"]: row for row in answer["ranges"]}
    if "network.py" not in answer["workload"]:
        assert not ranges
        return
    assert set(ranges) == {"forward", "block", "clip"}
    assert ranges["block"]["entered"] == 3 and ranges["clip"]["entered"] == 1
    device = sum(answer["breakdown"]["by_operator"].values())
    block, forward = ranges["block"], ranges["forward"]
    assert 0 < block["forward_seconds"] < forward["forward_seconds"]
    assert 0 < block["backward_seconds"] < forward["backward_seconds"] < device
    assert ranges["clip"]["backward_seconds"] == 0 < ranges["clip"]["other_seconds"]


@pytest.mark.parametrize(
    "source", [network, pytest.param(bert, marks=pytest.mark.thorough)], ids=lambda source: source.__name__
)
def test_advice_is_what_the_command_says(source, tmp_path: Path):
    """Every row, asked by itself as it is written, takes what the row says."""
    arguments = source(tmp_path)
    answer = asked([*arguments, "--advice"])
    rows = [row for row in answer["advice"]["alternatives"] if row["iteration_seconds"] is not None]
    assert len(rows) >= 3
    checked = [row for row in rows if row["change"] in answer["advice"]["best"]] or rows
    now = answer["iteration_seconds"] / answer["throughput"]["samples"]
    for row in checked:
        again = asked([*_without_repeated(arguments, row["change"]), *row["change"].split()])
        assert again["iteration_seconds"] == near(row["iteration_seconds"], rel=1e-6), row["change"]
        assert again["peak_memory_bytes"] == row["peak_memory_bytes"], row["change"]
        assert again["throughput"]["samples"] == row["samples"]
        assert row["gain"] == near(now / (row["iteration_seconds"] / row["samples"]))
    largest = answer["advice"]["largest_batch"]
    assert math.isfinite(largest["allocated_bytes"])


def _without_repeated(arguments: list[str], change: str) -> list[str]:
    """``arguments`` without the options that ``change`` gives, each with its value."""
    given = {word for word in change.split() if word.startswith("--")}
    kept: list[str] = []
    place = 0
    while place < len(arguments):
        if arguments[place] in given:
            place += 2
            continue
        kept.append(arguments[place])
        place += 1
    return kept
