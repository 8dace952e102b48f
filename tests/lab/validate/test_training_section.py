"""Published training steps: how rows are read and asked, the figures, and a made table predicted whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism.spec import parse_parallel, text_of
from lab.steps.training import (
    KINDS_FILE,
    TRAINING_FILE,
    AskedStep,
    TrainingRow,
    asked_step,
    read_kinds_rows,
    read_simumax_rows,
    read_torchtitan_rows,
    read_training_rows,
)
from lab.steps.training_runs import BareStep, PredictedStep
from lab.validate.sections import Asked, run_sections
from lab.validate.training import TrainingCase, TrainingReport, training_section

HEAD = (
    "source,task,model,gpu,n_gpus,global_batch,micro_batch,seq,tp,pp,cp,vp,ep,fsdp,act_ckpt,precision,framework,compile,"
    "step_s,tokens_s_gpu,mem_gib,mfu_or_tflops,note"
)
MPT = "llm-foundry,pretrain,mpt-125m,a100_40gb,8,32,2,512,,,,,,FULL_SHARD,False,bf16,x,,0.1,1,,,"
NEMO = "dgxc-benchmarking,pretrain,Nemotron4 15b BF16,H100,16,64.0,4.0,,4.0,1.0,,,,,,BF16,x,,2.8,1,,,"
NEMO_2504 = "dgxc-benchmarking,pretrain,Llama 3.1 8b BF16,H100,16,,,,,,,,,,,BF16,x,,12.3,1,,,v25.04"
SFT = "dgxc-benchmarking,sft,Llama3 8b Finetuning SFT BF16,H100,8,32,,,1,41,1,,,,,BF16,x,,1.3,1,,,"
TITAN = "torchtitan 2024-05,pretrain,llama3-70B,A100-80GB,64,64,1,8192,,,,,,64,full,bf16,x,0,24.7,1,70.5,,"
NVFP4 = "dgxc-benchmarking,pretrain,Llama 3.1 8b FP8,H100,8,128,1,,1,1,2,,,,,NVFP4,x,,9.4,1,,,"
LORA = "dgxc-benchmarking,lora,Llama3 8b Finetuning LORA BF16,H100,8,32,,,1,41,1,,,,,BF16,x,,0.9,1,,,"


BRIDGE_2509 = (
    "Megatron-Bridge 25.09,pretrain,Qwen3_30B_a3B (tokendrop),DGX-H100,16,512,2,4096,1,2,1,24,8,0,,,x,,12.5,1,,,"
)
BRIDGE_2604 = "Megatron-Bridge 26.04,pretrain,Qwen3_30B_a3B,DGX-H100,16,1024,1,4096,1,1,1,n/a,16,0,,FP8,x,,29.5,1,,,"
BRIDGE_FSDP = "Megatron-Bridge 25.11,pretrain,LLAMA3_8B,DGX-H100,8,128,1,8192,1,1,1,n/a,1,8,,FP8-CS,x,,9.1,1,,,"
RING = "torchtitan 2024-12,pretrain,llama3.1-8B,A100-80GB,8,2,1,131072,,,4,,,2,full,float8,x,1,30.6,1,84,,"


def table(folder: Path, *lines: str) -> Path:
    path = folder / TRAINING_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")
    return folder


def rows(folder: Path, *lines: str) -> list[TrainingRow]:
    return read_training_rows(table(folder, *lines))


def asked(folder: Path, line: str) -> AskedStep:
    (row,) = rows(folder, line)
    step = asked_step(row)
    assert isinstance(step, AskedStep), step
    return step


def test_a_step_of_llm_foundry_is_fsdp_with_its_own_positions(tmp_path: Path) -> None:
    step = asked(tmp_path, MPT)
    assert (step.model, step.config, step.batch_size, step.sequence_length) == (
        "mpt-125m", {"n_positions": 512}, 2, 512
    )  # fmt: skip
    assert (step.spec.fsdp, step.spec.sharing, step.spec.micro_batches, step.spec.recompute) == (8, 3, 2, "none")
    assert step.row.gpu == "oci-bm-gpu4-8" and step.spec.master_weights


def test_a_step_of_nemo_has_a_distributed_optimizer_and_the_length_of_its_recipe(tmp_path: Path) -> None:
    step = asked(tmp_path, NEMO)
    assert (step.model, step.sequence_length, step.batch_size) == ("nemotron-4-15b", 4096, 4)
    assert (step.spec.fsdp, step.spec.tp, step.spec.zero, step.spec.micro_batches) == (4, 4, 1, 4)
    assert step.spec.sequence_parallel and step.spec.world_size == step.row.gpus


def test_what_a_table_does_not_tell_is_said_to_be_assumed(tmp_path: Path) -> None:
    step = asked(tmp_path, NEMO_2504)
    assert (step.spec.cp, step.spec.fsdp, step.spec.micro_batches) == (2, 8, 32) and step.assumed
    tuned = asked(tmp_path, SFT)
    assert (tuned.spec.pp, tuned.spec.fsdp, tuned.spec.micro_batches) == (1, 8, 4) and "41" in tuned.assumed[0]


def test_fine_tuning_is_on_short_examples_packed(tmp_path: Path) -> None:
    whole, adapted, pretrained = (asked(tmp_path, line) for line in (SFT, LORA, NEMO))
    assert whole.document_length == adapted.document_length == 190 and pretrained.document_length is None
    assert any("190 tokens" in each for each in whole.assumed)
    assert (whole.stack, adapted.stack, whole.lora, adapted.lora) == ("megatron", "te", None, 8)  # the loss differs


def test_a_step_of_megatron_bridge_is_what_its_release_ran(tmp_path: Path) -> None:
    """25.09 drops tokens, has no column of precision and exchanges rows; from 26.04 on tokens go once to a node."""
    dropped, hybrid, sharded = (asked(tmp_path, line) for line in (BRIDGE_2509, BRIDGE_2604, BRIDGE_FSDP))
    assert dropped.precision == "fp8-current" and "footnote" in dropped.assumed[-1]
    assert (dropped.spec.schedule, dropped.spec.virtual_stages, dropped.spec.dispatch) == (
        "interleaved",
        24,
        "alltoall",
    )
    assert dropped.routing.capacity == 1.0 and hybrid.routing.capacity is None
    assert (hybrid.spec.dispatch, hybrid.spec.virtual_stages, hybrid.spec.zero) == ("deepep", 1, 1)
    assert (sharded.spec.sharing, sharded.spec.fsdp, sharded.spec.overlap_gather) == (3, 8, False)
    for step in (dropped, hybrid, sharded):
        assert parse_parallel(text_of(step.spec), step.row.gpus) == step.spec


def test_sequences_of_torchtitan_that_ranks_share_go_round_a_ring(tmp_path: Path) -> None:
    step = asked(tmp_path, RING)
    assert (step.spec.cp, step.spec.fsdp, step.spec.context_form) == (4, 2, "ring")


def test_a_made_table_is_predicted_and_rows_that_cannot_be_asked_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = rows(tmp_path, MPT, NVFP4, NEMO)
    assert training_section(given, "no such row") is None
    report = training_section(given[:2])
    assert report is not None and len(report.cases) == 1 and not report.failed
    (case,) = report.cases
    assert case.predicted.seconds > 0 and case.bare_error == pytest.approx(case.predicted.seconds / 0.1 - 1)
    # Fitted to other sources alone: GPUs that wait for the slowest of eight.
    assert case.band is not None and "llm-foundry" not in case.band.provenance["rows"]
    assert 0 < case.left_out.seconds / case.predicted.seconds - 1 <= case.band.slowdown(8)
    (reason,) = report.left_out.values()
    assert "NVFP4" in reason
    again = training_section(given[:2])  # from the folder of answers
    assert again is not None and again.cases[0].predicted == case.predicted
    record = json.loads(json.dumps(report.record()))
    assert record["figures"][0]["count"] == 1 and record["cases"][0]["asked"]["parallel"].startswith("fsdp=8")
    report.render()
    assert ": precision NVFP4" in capsys.readouterr().out


def test_the_figures_are_of_every_group(tmp_path: Path) -> None:
    first, second = asked(tmp_path, MPT), asked(tmp_path, TITAN)
    short = PredictedStep(0.12, (0.09, 0.15), 10 * 2**30, 40 * 2**30)
    long = PredictedStep(19.76, (19.0, 20.0), 141 * 2**29, 80 * 2**30, shortage="rank 0 needs more")
    report = TrainingReport([TrainingCase(first, short), TrainingCase(second, long)], {}, {})
    figures = {(each.kind, each.name): each for each in report.figures()}
    whole = figures["all", "all"]
    assert (whole.count, whole.refused, whole.memory_count) == (2, 1, 1)
    assert whole.mape == pytest.approx(0.2) and whole.bias == pytest.approx(0.0) and whole.interval == 0.5
    assert whole.memory == pytest.approx(0.0)
    assert figures["source", "torchtitan"].bias == pytest.approx(-0.2)
    assert ("length", "to 2k tokens") in figures and ("length", "8k tokens") in figures


def simumax(*, layers: int, tp: int, pp: int = 1, cp: int = 1) -> AskedStep:
    row = next(row for row in read_simumax_rows() if (row.layers, row.tp, row.pp, row.cp) == (layers, tp, pp, cp))
    step = asked_step(row)
    assert isinstance(step, AskedStep)
    return step


def test_the_rows_on_b200_are_asked_as_they_ran() -> None:
    rows = read_simumax_rows()
    assert len(rows) == 43 and len({row.name for row in rows}) == 43
    for row in rows:
        step = asked_step(row)
        assert isinstance(step, AskedStep) and step.spec.world_size == 8 and step.stack == "megatron"
        assert row.global_batch == step.spec.micro_batches * step.spec.replicas
        assert 0.8 < row.peer_seconds / row.seconds < 1.05 and row.allocated_gib < row.memory_gib
    step = simumax(layers=12, tp=2, cp=4)
    assert (step.spec.sharing, step.spec.shards, step.sequence_length) == (1, 4, 32768)
    assert step.spec.sequence_parallel and not step.spec.overlap


def test_the_rows_of_torchtitan_are_asked_as_they_ran() -> None:
    rows = read_torchtitan_rows()
    assert len(rows) == 11 and len({row.name for row in rows}) == 11
    for row in rows:
        step = asked_step(row)
        assert isinstance(step, AskedStep) and step.spec.world_size == row.gpus and step.stack == "torchtitan"
        assert parse_parallel(text_of(step.spec), row.gpus) == step.spec
        assert step.batch_size * step.spec.micro_batches * step.spec.replicas == row.global_batch
        assert step.spec.sequence_parallel == (row.tp > 1) and step.spec.zero == (1 if row.pp > 1 else 3)
        assert not BareStep(step, PredictedStep()).teaches
    # 126 layers in 8 parts, and in 16: both ends have one less than what is between them.
    plain, interleaved = (asked_step(row) for row in rows[5:7])
    assert isinstance(plain, AskedStep) and isinstance(interleaved, AskedStep)
    assert (plain.spec.first_layers, plain.spec.last_layers, plain.spec.micro_batches) == (15, 15, 8)
    assert (interleaved.spec.schedule, interleaved.spec.stages, interleaved.spec.first_layers) == ("interleaved", 16, 7)
    # 8 replicas of 32 sequences of 8,192 tokens at 100 tokens/s on each of 512 GPUs.
    assert rows[5].seconds == pytest.approx(8 * 32 * 8192 / (512 * 100)) and rows[5].model == "llama3.1-405B"


@pytest.mark.parametrize(("layers", "tp", "pp"), [(12, 8, 1), (12, 1, 2), (4, 1, 2)])
def test_memory_in_use_on_b200_is_what_was_measured(layers: int, tp: int, pp: int, tmp_path: Path) -> None:
    """Nothing of the model of memory is fitted; published to 0.01 GiB."""
    from e2e.parallelism.parallel_graph import build_parallel_graph
    from e2e.step.options import StepOptions
    from lab.steps.training_runs import _configuration

    asked = simumax(layers=layers, tp=tp, pp=pp)
    step = StepOptions(
        batch_size=1,
        sequence_length=asked.sequence_length,
        dtype="bfloat16",
        attention=asked.attention,
        stack=asked.stack,
    )
    memory = build_parallel_graph(_configuration(asked, tmp_path), asked.spec, step).memory
    fullest = max(usage.allocated_bytes for usage in memory.values()) / 2**30
    assert fullest == pytest.approx(asked.row.allocated_gib, rel=0.01)


GROK = "dgxc-benchmarking,pretrain,Grok 1 314b Dev BF16,H100,2048,,,,,,,,,,,BF16,x,,21,1,,,"
LONG = "NVIDIA/NeMo long sequences 2024-10,pretrain,LLAMA2-7B,DGX-H100,8,512,1,8192,1,2,1,,,,,FP8,,,,,,tflops 730,"
OFFLOADED = (
    "stas00/ml-engineering 2026,pretrain,llama3.1-8B,B200 SXM,8,8,1,262144,,,,,,ZeRO-3,full,bf16,x,,78.3,1,124,,"
)
BLACKWELL = "Megatron-Bridge 25.11,pretrain,Qwen3_30B_a3B,DGX-B200,8,512,1,4096,1,1,1,1,8,0,,FP8-MX,x,,28.2,1,,,"


def test_steps_of_other_kinds_are_asked_as_their_sources_tell(tmp_path: Path) -> None:
    grok, long, offloaded, mixture = (asked(tmp_path, line) for line in (GROK, LONG, OFFLOADED, BLACKWELL))
    assert [each.kind for each in (grok, long, offloaded, mixture)] == ["mixtures", "8 bits", "offload", "mixtures"]
    assert (grok.spec.world_size, grok.row.global_batch * grok.sequence_length) == (2048, 2**25)
    assert grok.routing.capacity == 1.0 and (long.precision, mixture.precision) == ("fp8-delayed", "mxfp8")
    assert offloaded.spec.offloaded_state == 1.0 and offloaded.config["max_position_embeddings"] == 262144
    for step in (grok, long, offloaded, mixture):
        assert parse_parallel(text_of(step.spec), step.row.gpus) == step.spec


def test_seconds_of_a_rate_are_by_the_sources_own_count(tmp_path: Path) -> None:
    """Six operations for a parameter and token, besides the attention, where every token meets all keys."""
    step = asked(tmp_path, LONG)
    parameters, tokens = 6.738e9 - 32000 * 4096, 512 * 8192
    attention = 3 * 4 * 8192 * 4096 * 32
    count = tokens * (6 * parameters + attention)
    assert step.row.seconds == pytest.approx(count / (730e12 * 8), rel=0.01) and "TFLOP" in step.assumed[-1]


def test_sealed_rows_are_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / KINDS_FILE
    path.parent.mkdir(parents=True)
    lines = [BLACKWELL.replace(",8,512,", f",{gpus},512,") for gpus in range(8, 208, 8)]
    path.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")
    seen, kept = read_kinds_rows(tmp_path), read_kinds_rows(tmp_path, sealed=True)
    assert seen and kept and len(seen) + len(kept) == len(lines)
    assert not {row.gpus for row in seen} & {row.gpus for row in kept}
    assert all(row.sealed and row.held_out for row in kept) and not any(row.sealed for row in seen)
    with pytest.raises(InputError, match="--sealed: sealed rows are of training steps"):
        run_sections(Asked(tmp_path), names=["models"], sealed=True)


def test_figures_say_whether_anybody_had_looked_at_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, found = asked(tmp_path, MPT), PredictedStep(0.12, (0.09, 0.15))
    TrainingReport([TrainingCase(step, found)], {}, {}).render()
    assert "development error: 1 of the 1 rows" in capsys.readouterr().out
    unseen = replace(step, row=replace(step.row, sealed=True))
    TrainingReport([TrainingCase(unseen, found)], {}, {}).render()
    told = capsys.readouterr().out
    assert "1 sealed rows" in told and "development error" not in told
