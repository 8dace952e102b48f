"""DeepSpeed's engine by its configuration: what each ZeRO stage sends between ranks, and refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError, ModelError
from costmodel.operators.device_work import MemoryCopy
from e2e.capture.distributed.deepspeed_engine import unread_parts
from e2e.capture.distributed.deepspeed_package import names_deepspeed
from e2e.capture.distributed.distributed_capture import capture_distributed
from e2e.capture.distributed.zero_parameters import _OF_GRADIENT, _OF_LINEAR, _OF_MODULE
from e2e.capture.launcher import Launch
from e2e.lowering import host_operators, unknown_operators
from e2e.lowering.lower_trace import lower_ranks
from e2e.step.execution_graph import HostWork, RankGraph
from e2e.step.options import StepOptions

SCRIPT = """import argparse, json, torch
import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR

def make_step():
    deepspeed.init_distributed()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    with deepspeed.zero.Init():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    engine, optimizer, _, _ = deepspeed.initialize(
        parser.parse_args([]), model, model_parameters=model.parameters(), config=CONFIG
    )

    def step():
        for _ in range(engine.gradient_accumulation_steps()):
            data = torch.randn(engine.train_micro_batch_size_per_gpu(), 64, device=engine.device)
            data = data.bfloat16() if engine.bfloat16_enabled() else data
            engine.backward(engine(data).float().mean())
            engine.step()
        assert engine.get_lr() == [0.001]

    return engine, step
"""
LAYER, LAYERS, HALF, FLOAT = 64 * 64, 4, 2, 4


def script(folder: Path, **config: Any) -> str:
    given = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    } | config
    (folder / "train.py").write_text(SCRIPT.replace("CONFIG", repr(given)), encoding="utf-8")
    return f"{folder / 'train.py'}:make_step"


def first_rank(folder: Path, **config: Any) -> RankGraph:
    found = capture_distributed(script(folder, **config), 4)
    return lower_ranks(found.traces, found.multiplicity, found.source, StepOptions()).graph.ranks[0]


def meetings(folder: Path, stage: int, **config: Any) -> list[tuple[str, int]]:
    zero = {"stage": stage, **config.pop("zero", {})}
    rank = first_rank(folder, zero_optimization=zero, gradient_clipping=1.0, **config)
    assert not unknown_operators(rank)
    return [(c.kind, c.size_bytes) for task in rank.tasks if (c := task.collective) is not None]


SUMMED = ("all_reduce", LAYERS * LAYER * HALF)
NORM = ("all_reduce", FLOAT)
GATHERED = ("all_gather", LAYERS * LAYER * HALF // 4)


def test_stages_with_all_parameters_on_every_rank(tmp_path):
    assert meetings(tmp_path, 0) == [SUMMED]
    assert meetings(tmp_path, 1) == [SUMMED, NORM, GATHERED]
    assert meetings(tmp_path, 2) == [SUMMED, NORM, GATHERED]
    single = {"bf16": {"enabled": False}}
    assert meetings(tmp_path, 1, **single) == [("all_reduce", 2 * SUMMED[1]), NORM, ("all_gather", 2 * GATHERED[1])]
    assert meetings(tmp_path, 0, **single) == [("all_reduce", 2 * SUMMED[1])]


def test_gradients_are_summed_in_buckets_and_accumulated(tmp_path):
    bucket = {"reduce_bucket_size": 2 * LAYER, "overlap_comm": True}
    half = ("all_reduce", SUMMED[1] // 2)
    assert meetings(tmp_path, 2, zero=bucket) == [half, half, NORM, GATHERED]
    twice = {"train_batch_size": 32, "gradient_accumulation_steps": 2}
    assert meetings(tmp_path, 2, **twice) == [SUMMED, SUMMED, NORM, GATHERED]
    assert meetings(tmp_path, 1, **twice) == [SUMMED, NORM, GATHERED]


def test_parameters_in_parts_are_gathered_ahead_and_kept_for_soon(tmp_path):
    """Layers of 4,096 elements lie below the threshold of persistence unless it is lowered."""
    part = LAYER * HALF // 4
    scattered = ("reduce_scatter", LAYERS * LAYER * HALF)
    assert meetings(tmp_path, 3) == [scattered, NORM, *[("all_gather", part)] * LAYERS]
    never = {"stage3_param_persistence_threshold": 0}
    # The first layer by itself, then all others ahead of their use; they stay for the backward pass.
    assert meetings(tmp_path, 3, zero=never) == [("all_gather", part), ("all_gather", 3 * part), scattered, NORM]
    freed = never | {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    found = Counter(meetings(tmp_path, 3, zero=freed))
    assert found == {("all_gather", part): 2 * LAYERS, scattered: 1, NORM: 1}


def test_a_parameter_that_the_program_uses_itself_is_gathered(tmp_path, monkeypatch):
    used = """with deepspeed.zero.GatheredParameters(model[0].weight):
                model[0].weight.sum()
            data = torch.randn"""
    never = {"stage3_param_persistence_threshold": 0}
    before = Counter(meetings(tmp_path, 3, zero=never))
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT.replace("data = torch.randn", used))
    assert Counter(meetings(tmp_path, 3, zero=never)) - before == {("all_gather", LAYER * HALF // 4): 1}


def test_one_fused_kernel_updates_all_parts(tmp_path):
    rank = first_rank(tmp_path, zero_optimization={"stage": 2})
    assert [task.name for task in rank.tasks].count("aten::_fused_adamw_") == 1
    of_pytorch = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
    rank = first_rank(tmp_path, zero_optimization={"stage": 2}, optimizer=of_pytorch)
    assert not any("fused" in task.name for task in rank.tasks)


def test_without_overlap_nothing_runs_beside_collectives(tmp_path):
    streams = [
        {task.stream for task in first_rank(tmp_path, zero_optimization=zero).tasks if task.collective is None}
        for zero in ({"stage": 3, "overlap_comm": False}, {"stage": 3})
    ]
    assert [len(each) for each in streams] == [1, 2]


def test_functions_of_hooks_count_in_stage_3_alone(tmp_path):
    """At two passes of each of four layers and of their container, and at every gradient."""
    traces = [capture_distributed(script(tmp_path, zero_optimization={"stage": each}), 4).traces for each in (2, 3)]
    counted = [sum(call.functions for call in trace[0].calls) for trace in traces]
    hooks = 2 * (LAYERS + 1) * _OF_MODULE + LAYERS * (_OF_GRADIENT + _OF_LINEAR)
    assert counted[1] - counted[0] == pytest.approx(hooks, rel=0.1)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, ModelError, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ModelError, "offload_param"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ModelError, "zero_quantized_weights"),
        ({"optimizer": {"type": "OneBitAdam"}}, ModelError, "OneBitAdam is not captured; use Adam"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, config: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        first_rank(tmp_path, **config)


def test_a_name_that_the_stand_in_lacks_ends_in_one_line(tmp_path, capsys):
    path = tmp_path / "named.py"
    path.write_text("import deepspeed\n\n\ndef make_step():\n    deepspeed.moe.layer()\n", encoding="utf-8")
    with pytest.raises(ModelError, match=r"named.py:5: uses deepspeed.moe, which the stand-in for DeepSpeed does not"):
        capture_distributed(f"{path}:make_step", 2)
    assert "Traceback" not in capsys.readouterr().err


def test_parts_that_are_not_followed_are_named():
    values = {
        "autotuning": {"enabled": True},
        "compression_training": {"layer_reduction": {}},
        "bf16": {"enabled": True},
    }
    assert unread_parts({**values, "curriculum_learning": {"enabled": False}}) == ("autotuning", "compression_training")


@pytest.mark.parametrize(("config", "message"), [("'absent.json'", "absent.json: no such"), ("None", "without a conf")])
def test_a_missing_configuration_is_named(tmp_path, config: str, message: str):
    reference = script(tmp_path)
    file = tmp_path / "train.py"
    text = SCRIPT.replace("CONFIG", config)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        capture_distributed(reference, 2)


def test_libraries_find_the_package_where_the_command_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("import torch", encoding="utf-8")
    (tmp_path / "args.json").write_text('{"deepspeed": "zero2.json"}', encoding="utf-8")
    assert names_deepspeed(Launch("plain.py", launcher="deepspeed"))
    assert names_deepspeed(Launch("plain.py", ("--deepspeed", "zero2.json")))
    assert names_deepspeed(Launch("plain.py", ("args.json",)))
    assert names_deepspeed(Launch("plain.py", environment={"ACCELERATE_USE_DEEPSPEED": "true"}))
    assert not names_deepspeed(Launch("plain.py", ("absent.json",)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_on_the_host(tmp_path, monkeypatch, stage):
    """Gradients of a rank's parts go to the host in FP32, which updates them; weights come back."""
    monkeypatch.setattr(host_operators, "_LARGE_BYTES", 1)
    settings = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    captured = capture_distributed(script(tmp_path, zero_optimization=settings, gradient_clipping=1.0), 4)
    rank = lower_ranks(captured.traces, captured.multiplicity, captured.source, StepOptions()).graph.ranks[0]
    records = (record for task in rank.tasks for record in task.operators)
    copies = Counter((each.kind, each.size_bytes) for each in records if isinstance(each, MemoryCopy))
    part, whole = LAYER // 4 if stage == 3 else LAYER, LAYERS * LAYER // 4
    assert copies["device_to_host", part * FLOAT] == (LAYERS if stage == 3 else 1)
    assert copies["host_to_device", whole * (HALF if stage == 3 else FLOAT)] == 1
    work = [action for action in rank.actions() if isinstance(action, HostWork) and action.kind == "host"]
    moved = {rank.calls[each.call].name: each.duration.seconds * host_operators.CORE_BANDWIDTH for each in work}
    assert moved["deepspeed::cpu_adam"] == pytest.approx(28 * whole)
    assert moved["aten::mul_"] == pytest.approx(8 * whole)
    assert ("aten::_to_copy" in moved) == (stage == 3)
    assert not unknown_operators(rank)
