"""Sweeps: what is tried, what is kept, who computes, what is told."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costmodel.base.errors import InputError, SimulationError
from costmodel.base.output_files import lock_folder

pytest.importorskip("torch")

from e2e.commands.cli import app
from e2e.parallelism import ParallelSpec, parse_parallel
from e2e.parallelism.spec import require_consistent
from e2e.sources.prepared_step import run_step
from e2e.sweeps.sweep_driver import SweepResult, run_sweep
from e2e.sweeps.sweep_report import render_sweep, sweep_record, write_plot
from e2e.sweeps.sweep_results import ResultFile, SweepRow, SweepTask, evaluate
from e2e.sweeps.sweep_space import (
    RECOMPUTE,
    SweepCell,
    SweepRequest,
    cells_of,
    ways_to_spread,
)
from e2e.sweeps.worker_process import each_in_processes
from e2e.sweeps.workers import LocalWorkers, RayWorkers

# Small: quick to capture, still all that a transformer has.
TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}


def row(samples_per_second: float | None, gpus: int = 8, gpu: str = "h100-sxm", parallel: str = "dp=8") -> SweepRow:
    if samples_per_second is None:
        return SweepRow(gpu, gpus, 1, parallel, "does not fit", "90.0 GiB of 80 GiB on the fullest rank")
    seconds = 8 / samples_per_second
    return SweepRow(
        gpu, gpus, 1, parallel, "ok", "", seconds, (0.9 * seconds, 1.1 * seconds), 8, samples_per_second,
        100.0, 0.0, 0.0, 2**30, 80 * 2**30,
    )  # fmt: skip


class Scripted:
    """Gives prepared rows, the last job first, and then fails if told to."""

    def __init__(self, rows: Sequence[SweepRow], failure: BaseException | None = None) -> None:
        self.rows, self.failure, self.asked = rows, failure, 0

    def run(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[int, SweepRow]]:
        self.asked += len(tasks)
        for place in reversed(range(min(len(tasks), len(self.rows)))):
            yield place, self.rows[place]
        if self.failure is not None:
            raise self.failure


def quiet(*_: object) -> None:
    pass


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return path


# --- what is tried --------------------------------------------------------------------------------


def test_automatic_ways_use_all_gpus_and_keep_tensor_parallel_inside_a_node():
    found = list(ways_to_spread(SweepRequest("m"), gpus=16, gpus_per_node=8))
    assert ParallelSpec(dp=16) in found
    assert ParallelSpec(fsdp=2, tp=8, zero=3) in found and ParallelSpec(fsdp=2, tp=8, zero=1) in found
    assert ParallelSpec(fsdp=2, pp=8, zero=1, micro_batches=32) in found
    assert ParallelSpec(tp=2, pp=8, micro_batches=32) in found
    assert len(set(found)) == len(found)
    for spec in found:
        require_consistent(spec, 16)
        assert spec.tp <= 8
        assert spec.fsdp == 1 or spec.pp == 1 or spec.zero == 1


def test_long_sequences_are_spread_over_ranks_too():
    found = list(ways_to_spread(SweepRequest("m", sequence_length=16_384), gpus=8, gpus_per_node=8))
    assert ParallelSpec(dp=2, cp=4) in found and ParallelSpec(fsdp=4, cp=2, zero=3) in found
    assert ParallelSpec(cp=4, zero=3, tp=2) in found and ParallelSpec(cp=2, tp=2, pp=2, micro_batches=8) in found
    assert not any(spec.cp == 8 for spec in found), "2,048 tokens a rank are not worth it"
    for spec in found:
        require_consistent(spec, 8)
    assert len(set(found)) == len(found)


def test_experts_are_whole_or_divided_as_far_as_a_node_allows():
    found = list(ways_to_spread(SweepRequest("m", experts=8), gpus=16, gpus_per_node=8))
    assert {ParallelSpec(fsdp=16, zero=3), ParallelSpec(fsdp=16, ep=8, zero=3)} <= set(found)
    assert ParallelSpec(dp=4, ep=4, tp=2, pp=2, micro_batches=8) in found and ParallelSpec(dp=2, tp=8) in found
    for spec in found:
        require_consistent(spec, 16)
    assert len(set(found)) == len(found)
    assert not any(spec.ep > 1 for spec in ways_to_spread(SweepRequest("m"), gpus=16, gpus_per_node=8))


def test_a_global_batch_sets_the_micro_batches():
    found = list(ways_to_spread(SweepRequest("m", batch_size=2, global_batch=32), gpus=4, gpus_per_node=4))
    assert ParallelSpec(dp=4, micro_batches=4) in found  # 32 sequences / (2 per micro-batch x 4 replicas)
    assert ParallelSpec(dp=2, pp=2, micro_batches=8) in found
    assert not list(ways_to_spread(SweepRequest("m", batch_size=3, global_batch=32), gpus=4, gpus_per_node=4))


def test_cells_are_machines_times_counts_times_ways():
    cells = cells_of(SweepRequest("m"), ["h100-sxm", "h200-sxm"], [8, 16], ["dp=8", "auto", "dp=8"])
    assert len(set(cells)) == len(cells)
    assert sum(cell.parallel == ParallelSpec(dp=8) and not cell.recompute for cell in cells) == 4
    assert SweepCell("h100-sxm", 8, ParallelSpec(dp=8), RECOMPUTE) in cells
    by_torchtitan = cells_of(SweepRequest("m"), ["h100-sxm"], [8], ["auto"], ["torchtitan"])
    assert {cell.recompute for cell in by_torchtitan} == {("none", "operators", "full")}


def test_what_a_text_leaves_open_fills_every_number_of_gpus():
    cells = cells_of(SweepRequest("m"), ["h100-sxm"], [8, 16], ["tp=4"])
    assert [cell.parallel for cell in cells] == [ParallelSpec(dp=2, tp=4), ParallelSpec(dp=4, tp=4)]


def test_recomputation_is_tried_in_order():
    eight = ParallelSpec(dp=8)
    assert SweepCell("g", 8, eight, ("none", "full")).specs() == (eight, ParallelSpec(dp=8, recompute="full"))
    assert SweepCell("g", 8, eight).specs() == (eight,)


# --- what is kept ---------------------------------------------------------------------------------


def cells(count: int) -> list[SweepCell]:
    return [SweepCell("h100-sxm", 8, ParallelSpec(dp=8, micro_batches=number)) for number in range(1, count + 1)]


def test_results_are_ranked_and_never_computed_twice(tmp_path):
    rows = [row(10.0), row(None), row(30.0)]
    first = run_sweep(SweepRequest("m"), cells(3), tmp_path, Scripted(rows), quiet)
    assert [each.samples_per_second for each in first.rows] == [30.0, 10.0, None]
    again = Scripted([])
    second = run_sweep(SweepRequest("m"), cells(3), tmp_path, again, quiet)
    assert again.asked == 0 and second.rows == first.rows and second.computed == 0
    other = Scripted([row(1.0)] * 3)
    run_sweep(SweepRequest("m", batch_size=2), cells(3), tmp_path, other, quiet)
    assert other.asked == 3  # another question


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SimulationError("a worker died")])
def test_what_came_in_before_a_stop_is_kept(tmp_path, failure):
    with pytest.raises(type(failure)):
        run_sweep(SweepRequest("m"), cells(3), tmp_path, Scripted([row(10.0), row(20.0)], failure), quiet)
    rest = Scripted([row(30.0)])
    result = run_sweep(SweepRequest("m"), cells(3), tmp_path, rest, quiet)
    assert rest.asked == 1 and [each.samples_per_second for each in result.rows] == [30.0, 20.0, 10.0]


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt()])
def test_what_was_half_written_is_taken_away(tmp_path, failure):
    """Of a run that was killed, and of workers that were."""
    (tmp_path / "captures").mkdir()

    class Killed(Scripted):
        def run(self, tasks: Sequence[SweepTask]) -> Iterator[tuple[int, SweepRow]]:
            assert list((tmp_path / "captures").iterdir()) == []
            (tmp_path / "captures" / ".other.pickle.1.partial").write_text("")
            yield from super().run(tasks)

    (tmp_path / "captures" / ".key.pickle.0.partial").write_text("")
    try:
        run_sweep(SweepRequest("m"), cells(1), tmp_path, Killed([row(1.0)], failure), quiet)
    except KeyboardInterrupt:
        assert list((tmp_path / "captures").iterdir()) == []


def test_a_changed_configuration_is_another_question(tiny, tmp_path):
    request = SweepRequest(str(tiny))
    run_sweep(request, cells(1), tmp_path / "out", Scripted([row(10.0)]), quiet)
    same = Scripted([])
    run_sweep(request, cells(1), tmp_path / "out", same, quiet)
    tiny.write_text(json.dumps({**TINY, "num_hidden_layers": 8}), encoding="utf-8")
    other = Scripted([row(5.0)])
    run_sweep(request, cells(1), tmp_path / "out", other, quiet)
    assert (same.asked, other.asked) == (0, 1)


def test_a_line_cut_off_at_the_end_is_dropped_and_damage_inside_is_an_error(tmp_path):
    file = ResultFile(tmp_path)
    file.add("a", row(1.0))
    file.add("b", row(2.0))
    whole = file.path.read_text()
    file.path.write_text(whole[:-20])
    assert ResultFile(tmp_path).get("a") == row(1.0)
    assert ResultFile(tmp_path).get("b") is None
    ResultFile(tmp_path).add("c", row(3.0))
    assert ResultFile(tmp_path).get("c") == row(3.0)
    file.path.write_text(whole.rstrip("\n"))  # as some editors leave it
    ResultFile(tmp_path).add("d", row(4.0))
    assert [ResultFile(tmp_path).get(key) for key in "abd"] == [row(1.0), row(2.0), row(4.0)]
    file.path.write_text("nonsense\n" + whole)
    with pytest.raises(InputError, match=r"results\.jsonl:1"):
        ResultFile(tmp_path)


def test_results_of_earlier_versions_stay_readable(tmp_path):
    """The text of ``parallel`` is for people: nothing reads it again."""
    line = {
        "key": "k", "gpu": "h100-sxm", "gpus": 4, "nodes": 1, "parallel": "dp=4,tp=1,pp=1,recompute=none",
        "status": "ok", "reason": "", "iteration_seconds": 0.02, "interval_seconds": [0.01, 0.03], "samples": 4,
        "samples_per_second": 200.0, "tokens_per_second_per_gpu": 3200.0, "exposed_seconds": 0.0,
        "bubble_seconds": 0.0, "peak_memory_bytes": 1, "memory_capacity_bytes": 2,
    }  # fmt: skip
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    found = ResultFile(tmp_path).get("k")
    assert found is not None and found.parallel == line["parallel"] and found.interval_seconds == (0.01, 0.03)


# --- who computes ---------------------------------------------------------------------------------


def task(tiny: Path, spec: str, gpus: int = 4, recompute: tuple[str, ...] = ()) -> SweepTask:
    request = SweepRequest(str(tiny), sequence_length=64)
    return SweepTask(request, SweepCell("h100-sxm", gpus, parse_parallel(spec), recompute), tiny.parent / "captures")


def test_a_cell_is_the_prediction_of_its_step(tiny):
    found = evaluate(task(tiny, "dp=2,tp=2,micro-batches=2"))
    assert found.status == "ok" and found.samples == 4
    assert found.iteration_seconds and found.interval_seconds and found.samples_per_second
    assert found.samples_per_second == pytest.approx(4 / found.iteration_seconds)
    assert found.tokens_per_second_per_gpu == pytest.approx(found.samples_per_second * 64 / 4)
    low, high = found.interval_seconds
    assert low <= found.iteration_seconds <= high
    assert evaluate(task(tiny, "dp=2,tp=2,micro-batches=2")) == found  # from the kept capture


def test_a_cell_of_many_kernels_is_simulated_in_runs_of_them(tiny, monkeypatch):
    """As `predict` does: a step of millions of kernels would take minutes and gigabytes."""
    kernels: list[int] = []

    def counted(step):
        kernels.append(sum(len(rank.tasks) for rank in step.graph.ranks))
        return run_step(step)

    monkeypatch.setattr("e2e.sweeps.sweep_results.run_step", counted)
    cell = task(tiny, "pp=2,dp=2,micro-batches=8")
    plain = evaluate(cell)
    monkeypatch.setattr("e2e.parallelism.parallel_graph.MANY_KERNELS", 100)
    short = evaluate(cell)
    assert kernels[1] < kernels[0] / 3
    assert short.iteration_seconds == pytest.approx(plain.iteration_seconds, rel=0.05)


def test_what_does_not_divide_or_fit_says_so(tiny):
    impossible = evaluate(task(tiny, "pp=3,dp=1", gpus=3))
    assert impossible.status == "not possible" and "layers" in impossible.reason
    other = evaluate(task(tiny, "fsdp=8", gpus=4))  # told as it was asked, without what the recipe adds
    assert other.reason == "--parallel 'fsdp=8': dp x fsdp x cp x tp x pp = 8, but --gpus is 4"
    request = SweepRequest("llama-8b", sequence_length=512)
    full = evaluate(
        SweepTask(request, SweepCell("t4", 2, ParallelSpec(dp=2), ("none", "full")), tiny.parent / "captures")
    )
    assert full.status == "does not fit" and "GiB" in full.reason and full.parallel.endswith("recompute=full")


def test_an_error_in_one_cell_is_its_row_and_is_tried_again(tiny, tmp_path, monkeypatch):
    def broken(task: SweepTask) -> SweepRow:
        raise ZeroDivisionError("of this cell")

    monkeypatch.setattr("e2e.sweeps.sweep_results._first_that_fits", broken)
    found = evaluate(task(tiny, "dp=4"))
    assert (found.status, found.reason) == ("failed", "ZeroDivisionError: of this cell")
    rows = [row(10.0), found]
    first = run_sweep(SweepRequest("m"), cells(2), tmp_path / "out", Scripted(rows), quiet)
    assert [each.status for each in first.rows] == ["ok", "failed"]
    again = Scripted([row(20.0)])
    second = run_sweep(SweepRequest("m"), cells(2), tmp_path / "out", again, quiet)
    assert again.asked == 1 and [each.status for each in second.rows] == ["ok", "ok"]


def test_ctrl_c_that_an_extension_module_made_an_error_of_is_no_row(tiny, monkeypatch):
    def stopped(task: SweepTask) -> SweepRow:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr("e2e.sweeps.sweep_results._first_that_fits", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate(task(tiny, "dp=4"))


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_worker_that_dies_takes_no_other_cell_with_it(tiny, monkeypatch):
    assert dict(each_in_processes(len, {0: "a", 1: Deadly(), 2: "abc"}, 2)) == {0: 1, 2: 3}
    monkeypatch.setattr("e2e.sweeps.workers.each_in_processes", lambda *_: iter([(0, "row")]))
    found = dict(LocalWorkers(2).run([task(tiny, "tp=4"), task(tiny, "dp=4")]))
    assert found[0] == "row" and found[1].status == "failed"
    assert "died" in found[1].reason and found[1].parallel == "dp=4"


def test_what_a_worker_is_told_first_is_read_before_pytorch(monkeypatch):
    """It asks to end with this process there, and would outlive it while it loads."""
    told: list[str] = []

    def note(*_: object, initializer: Callable[..., None], **__: object) -> None:
        told.append(initializer.__module__)
        raise InputError("no pool")

    monkeypatch.setattr("e2e.sweeps.worker_process.ProcessPoolExecutor", note)
    with pytest.raises(InputError, match="no pool"):
        next(each_in_processes(len, {0: ""}, 1))
    code = f"import sys, {told[0]}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


@pytest.mark.thorough
def test_ray_computes_the_same_as_this_process(tiny):
    ray = pytest.importorskip("ray")
    tasks = [task(tiny, "dp=4"), task(tiny, "pp=3,dp=1", gpus=3)]
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        found = dict(RayWorkers("local").run(tasks))
    finally:
        ray.shutdown()
    assert [found[0], found[1]] == [evaluate(each) for each in tasks]


def test_a_ray_cluster_that_does_not_answer_is_an_error(monkeypatch):
    ray = pytest.importorskip("ray")

    def refuse(**_: object) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(InputError, match="nobody there"):
        RayWorkers("10.0.0.1:6379")


def test_workers_are_counted():
    with pytest.raises(InputError, match="--workers"):
        LocalWorkers(0)


# --- what is told ---------------------------------------------------------------------------------


def test_table_and_record_show_the_best_and_why_others_do_not_run(capsys):
    rows = (row(30.0, parallel="tp=8"), row(20.0), row(10.0, parallel="pp=8"), row(None))
    result = SweepResult(SweepRequest("m"), rows, 4)
    render_sweep(result, top=2)
    out = capsys.readouterr().out
    assert "tp=8" in out and "dp=8" in out and "pp=8" not in out
    assert "does not fit: 1" in out and "90.0 GiB" in out
    record = sweep_record(result)
    assert [each["samples_per_second"] for each in record["rows"]] == [30.0, 20.0, 10.0, None]
    json.dumps(record)


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    rows = (row(30.0), row(20.0, parallel="tp=8"), row(50.0, gpus=16), row(25.0, gpu="a100-sxm-80gb"))
    path = tmp_path / "sweep.svg"
    write_plot(SweepResult(SweepRequest("model-name"), rows, 4), path)
    assert "</svg>" in path.read_text()


def test_command_ranks_and_resumes(tiny, tmp_path):
    step = ["--model", str(tiny), "--sequence-length", "64", "--parallel", "dp=2", "--parallel", "tp=2"]
    place = ["--gpu", "h100-sxm,a100-sxm-80gb", "--gpus", "2", "--workers", "1", "-o", str(tmp_path / "out")]
    arguments = ["sweep", *step, *place]
    first = CliRunner().invoke(app, [*arguments, "--json"])
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout)["rows"]
    assert {(each["gpu"], each["parallel"]) for each in rows} == {
        (gpu, way) for gpu in ("h100-sxm", "a100-sxm-80gb") for way in ("dp=2", "tp=2")
    }
    rates = [each["samples_per_second"] for each in rows]
    assert rates == sorted(rates, reverse=True)
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0 and "of 4:" not in second.stderr  # nothing is computed again
    assert "4 of 4 were in" in second.stderr


def test_a_second_sweep_in_the_same_folder_is_told_so(tiny, tmp_path):
    """Both would write one file of results, and captures of one name."""
    step = ["--model", str(tiny), "--gpu", "h100-sxm", "--gpus", "2", "--parallel", "dp=2", "--sequence-length", "64"]
    arguments = ["sweep", *step, "--workers", "1", "-o", str(tmp_path / "out")]
    with lock_folder(tmp_path / "out", "results of a sweep"):
        refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {tmp_path / 'out'}: another process is writing results of a sweep here (")
    assert refused.stderr.endswith("; wait until it has ended\n")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 1


def test_the_folder_need_not_be_named(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "--model-config", str(tiny), "--gpu", "h100-sxm", "--gpus", "2", "--parallel", "dp=2"]
    result = CliRunner().invoke(app, [*arguments, "--sequence-length", "64", "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sweep" / "results.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100-sxn", "--gpus", "8"], "h100-sx"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--model", "gpt5"], "gpt5"),
        (["--gpu", "h100-sxm", "--gpus", "many"], "--gpus"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--dtype", "int4"], "--dtype"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--plot", "plot.gif"], "plot.gif"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--report", "a.txt"], "--report a.txt: a report is a page"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--ray", "auto", "--workers", "2"], "--ray"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--batch-size", "3", "--global-batch", "8"], "--global-batch"),
        (["--gpu", "h100-sxm", "--gpus", "8", "--parallel", "dp=8,wings=3"], "'wings' is not known"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["sweep", "--model", "gpt2", "-o", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output
