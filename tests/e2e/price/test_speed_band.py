"""The band of speeds of GPUs: what a synchronised step loses, and to whom it applies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Gemm
from costmodel.operators.layers import Conv2d
from e2e.explain.predictor import predict_graph
from e2e.price.speed_band import (
    SPEED_BAND,
    SpeedBand,
    StepErrors,
    band_record,
    chip_name,
    load_speed_band,
    narrow_share,
    release_spread,
    slow_down,
    with_speeds,
)
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Duration, ExecutionGraph, Kernel
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import SETTING, ToyCluster, ToyCollectives

BAND = SpeedBand(0.1, StepErrors(0.05, 0.5, ("Gemm",)), (chip_name(load_machine("a100-sxm-80gb")),))


def job(ranks: int = 2) -> ExecutionGraph:
    """Each rank computes 8 s, then all meet for 4 s."""
    drawings = []
    for rank in range(ranks):
        drawing = Drawing(rank)
        drawing.kernel("gemm", 8.0, launch=0.0)
        drawing.collective("sum", 4.0, 0, ranks=tuple(range(ranks)), stream=7, launch=0.0)
        drawings.append(drawing)
    return together(*drawings)


def asked(graph: ExecutionGraph, spread: float | None = None, band: SpeedBand | None = BAND):
    return predict_graph(
        graph, SETTING, ToyCluster(), collectives=ToyCollectives(), speed_spread=spread, band=band
    ).prediction


def test_the_slowest_of_many_gpus_is_at_the_end_of_the_band():
    assert BAND.slowdown(1) == 0
    assert BAND.slowdown(3) == pytest.approx(0.05)
    losses = [BAND.slowdown(gpus) for gpus in (1, 2, 8, 128, 16384)]
    assert losses == sorted(losses) and losses[-1] < 0.1


def test_kernels_wait_for_the_slowest_transfers_do_not():
    bare, lost = asked(job(), band=None), asked(job())
    assert bare.iteration_seconds == pytest.approx(12.0)
    assert lost.iteration_seconds == pytest.approx(8.0 * (1 + BAND.slowdown(2)) + 4.0)
    assert sum(part.seconds for part in lost.critical_path) == pytest.approx(lost.iteration_seconds)
    (note,) = lost.notes
    assert "3.3% longer" in note and "2 GPUs" in note and not bare.notes


@pytest.mark.parametrize("dtype, share", [("bfloat16", 1.0), ("float8", 1.0), ("float32", 0.0)])
def test_a_gpu_alone_loses_half_the_band_of_its_narrow_products(dtype, share):
    drawing = Drawing()
    drawing.kernel("gemm", 8.0, launch=0.0)
    graph = together(drawing)
    (rank,) = graph.ranks
    product = Gemm(1, 64, 64, 64, dtype)
    graph = replace(graph, ranks=(replace(rank, tasks=(replace(rank.tasks[0], operators=(product,)),)),))
    assert narrow_share(graph) == share
    assert asked(graph).iteration_seconds == pytest.approx(8.0 * (1 + 0.05 * share))


@pytest.mark.parametrize(("fitted", "images"), [(True, 1.0), (False, 0.5)])
def test_convolutions_on_other_chips_than_those_of_the_fitted_steps_do_not_count(fitted: bool, images: float):
    drawing = Drawing()
    for name in ("gemm", "convolution"):
        drawing.kernel(name, 8.0, launch=0.0)
    graph = together(drawing)
    (rank,) = graph.ranks
    work = Gemm(1, 64, 64, 64, "float16"), Conv2d(1, 64, 8, 8, 64, (1, 1), dtype="float16")
    tasks = tuple(replace(task, operators=(each,)) for task, each in zip(rank.tasks, work, strict=True))
    band = BAND if fitted else replace(BAND, errors=replace(BAND.errors, families=()))
    priced = replace(graph, ranks=(replace(rank, tasks=tasks),))
    assert asked(priced, band=band).iteration_seconds == pytest.approx(16.0 * (1 + 0.05 * images))


def test_one_gpu_waits_for_nobody():
    drawing = Drawing()
    drawing.kernel("gemm", 8.0, launch=0.0)
    alone, bare = asked(together(drawing)), asked(together(drawing), band=None)
    assert alone.iteration_seconds == bare.iteration_seconds and not alone.notes


def test_given_speeds_replace_the_band():
    alike = asked(job(), 0.0)
    assert alike.iteration_seconds == pytest.approx(12.0) and not alike.notes
    assert asked(job(), 0.1).iteration_seconds != alike.iteration_seconds


def test_each_rank_has_one_speed_and_the_step_takes_the_slowest():
    graph = with_speeds(job(8), 0.1)
    kernels = [rank.tasks[0].duration.seconds for rank in graph.ranks]
    assert len(set(kernels)) == 8 and all(rank.tasks[1].duration.seconds == 4 for rank in graph.ranks)
    assert simulate(graph).step_seconds == pytest.approx(max(kernels) + 4)
    assert with_speeds(job(8), 0.1) == graph


def test_a_folded_rank_is_the_slowest_of_those_it_stands_for():
    """Of 4,096 normal draws the largest is 3.5 deviations above the mean, give or take half a deviation."""
    graph = with_speeds(replace(job(1), multiplicity={0: 4096}), 0.02)
    assert graph.ranks[0].tasks[0].duration.seconds == pytest.approx(8 * 1.07, rel=0.012)


def test_all_kernels_that_a_task_stands_for_are_slowed():
    drawing = Drawing()
    drawing.kernel("run", 8.0)
    run = Kernel("part", "kernel", (), duration=Duration(4.0, 3.0, 5.0))
    drawing.tasks[0] = replace(drawing.tasks[0], kernels=(run, run))
    (task,) = slow_down(together(drawing), 0.25).ranks[0].tasks
    assert task.duration is not None and task.duration.seconds == 10.0
    assert [each.duration for each in task.kernels] == [Duration(5.0, 3.75, 6.25)] * 2


def test_what_steps_tell_of_their_errors_is_kept_for_their_chips():
    assert BAND.meant_for(load_machine("a100-sxm-40gb")) is BAND
    other = BAND.meant_for(load_machine("h200-sxm"))
    assert other.width == BAND.width and other.errors.share("Gemm") == 1.0
    assert other.errors.in_step({"Gemm": 1.0}, 1.0) == StepErrors(0.0, 1.0)


def test_libraries_older_than_the_tables_widen_what_steps_are_known_to_err_by():
    a100 = load_machine("a100-sxm-40gb")
    older = BAND.meant_for(a100, older_libraries=True)
    assert older.width == BAND.width and older.errors.families == BAND.errors.families
    assert older.errors.residual == pytest.approx((0.05**2 + release_spread() ** 2) ** 0.5) and release_spread() > 0
    unknown = BAND.meant_for(load_machine("h200-sxm"), older_libraries=True)
    assert unknown.errors.share("Gemm") == 1.0


def test_the_shipped_band_is_what_its_provenance_says(tmp_path: Path):
    band = load_speed_band()
    assert band is not None and 0 < band.width < 0.2 and 0 < band.errors.residual < 0.2
    assert len(band.provenance["rows"]) >= 2 and set(band.provenance["rows"]) <= set(band.left_out)
    for source, others in band.left_out.items():
        assert source not in others.provenance["rows"]
    assert load_speed_band(tmp_path / "none.json") is None
    damaged = tmp_path / "band.json"
    damaged.write_text(SPEED_BAND.read_text(encoding="utf-8").replace('"kept"', '"kelt"'), encoding="utf-8")
    with pytest.raises(InputError, match=r"band\.json: not a band of speeds.*install the package again"):
        load_speed_band(damaged)


ROADS = """
import torch, transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def _step(net, batch_size):
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.zeros(batch_size, 1024, dtype=torch.long, device="cuda")
    def step():
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, step

def _model():
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa", use_cache=False)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)

def fsdp(batch_size=8):
    net = _model()
    for layer in net.model.layers:
        fully_shard(layer)
    fully_shard(net)
    return _step(net, batch_size)

def dp(batch_size=8):
    return _step(DistributedDataParallel(_model()), batch_size)
"""
SIZES = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.mark.parametrize("way", ["fsdp", "dp"])
def test_a_job_takes_as_long_and_is_known_as_well_by_its_script_as_by_its_sizes(way: str, tmp_path: Path):
    pytest.importorskip("transformers")
    from e2e import predict as predicted

    script, config = tmp_path / "train.py", tmp_path / "model.json"
    script.write_text(f"SIZES = {SIZES!r}\n{ROADS}")
    config.write_text(json.dumps({"model_type": "llama", **SIZES}))
    # So large that no step waits for the host: functions that hooks of FSDP call are counted in the script alone.
    machine: dict[str, Any] = {"gpu": "dgx-h100", "gpus": 8, "batch_size": 16}
    by_script = predicted(script=f"{script}:{way}", **machine)
    # The script's weights and states are BF16 alone.
    sizes: dict[str, Any] = {"recipe": "pure-bf16", "dtype": "bfloat16", "attention": "flash", "sequence_length": 1024}
    by_sizes = predicted(model_config=config, parallel=f"{way}=8", **sizes, **machine)
    assert by_script.iteration_seconds == pytest.approx(by_sizes.iteration_seconds, rel=0.03)
    for one, other in zip(_width(by_script), _width(by_sizes), strict=True):
        assert one == pytest.approx(other, abs=0.015)


def _width(prediction: Any) -> tuple[float, float]:
    low, high = prediction.interval_seconds
    return 1 - low / prediction.iteration_seconds, high / prediction.iteration_seconds - 1


def test_what_is_shipped_is_what_was_fitted():
    """Not the residual of programs, which the code has."""
    shipped = json.loads(SPEED_BAND.read_text(encoding="utf-8"))
    record = band_record(load_speed_band().of_program())
    assert json.loads(json.dumps(record)) == shipped
