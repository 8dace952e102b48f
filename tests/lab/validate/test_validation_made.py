"""Every section of ``lab.validate``, and the fit of host overheads, on small data made here."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError
from e2e.price.host_overheads import INFLATION, fit_table, level_of, load_inflation, load_table, save_table
from e2e.price.overhead_samples import extract
from e2e.traces.kineto import read_kineto
from lab.fit import host_overheads as overhead_fitting
from lab.fit.host_overheads import H200_NAME, INFLATION_FILE, NEWER_NAME, SHARED_NAME, fit_shared_tables
from lab.validate.models import CONFIGS, LABELS, cases
from lab.validate.recorded_jobs import DLRM_PROFILES, DLRM_TRACES
from lab.validate.sections import Asked, run_sections
from tests.e2e.recorded_traces import MAIN, Profile

TABLES = Path(__file__).resolve().parents[3] / "costmodel" / "calibration" / "host_overheads"
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 128}


def label(data: Path, gpu: str, name: str, milliseconds: float) -> None:
    path = data / LABELS / gpu / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"e2e_latency": milliseconds}))


def test_cases_are_named_by_their_files(tmp_path: Path) -> None:
    label(tmp_path, "Tesla_T4", "tiny-inf-64-2", 12.5)
    label(tmp_path, "NVIDIA_A100-PCIE-40GB", "tiny-train-128-4-fusion", 7.0)
    compiled, eager = cases(tmp_path)
    assert (eager.gpu, eager.model, eager.mode, eager.sequence_length, eager.batch_size) == ("t4", "tiny", "inf", 64, 2)
    assert eager.measured_seconds == pytest.approx(12.5e-3) and not eager.compiled
    assert compiled.name == "tiny-train-128-4-compiled" and compiled.gpu == "a100-pcie-40gb"


def test_the_section_of_models_predicts_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for gpu in ("Tesla_T4", "Tesla_V100-PCIE-32GB"):
        label(tmp_path, gpu, "tiny-inf-64-2", 10.0)
    label(tmp_path, "Tesla_T4", "absent-inf-64-2", 1.0)
    (tmp_path / CONFIGS).mkdir(parents=True)
    (tmp_path / CONFIGS / "tiny.json").write_text(json.dumps(GPT2))
    sections = run_sections(Asked(tmp_path), names=["models"])
    record = sections["models"].record()
    assert [each["gpu"] for each in record["cases"]] == ["t4", "v100-pcie-32gb"]
    for each in record["cases"]:
        assert 0 < each["interval_seconds"][0] < each["predicted_seconds"] < each["interval_seconds"][1]
        assert each["error"] == pytest.approx(each["predicted_seconds"] / 0.01 - 1)
    assert list(record["left_out"]) == ["t4/absent-inf-64-2"] and record["summary"]["count"] == 2
    sections["models"].render()
    assert "left out: t4/absent-inf-64-2" in capsys.readouterr().out


def archive(path: Path, members: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as made:
        for name, record in members.items():
            content = json.dumps(record).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))


def recorded_rank(rank: int, begin: float, wait: float) -> dict[str, Any]:
    """A kernel of 10 us, then an all-reduce of two ranks that waits ``wait`` us and takes 5."""
    header = {"distributedInfo": {"rank": rank, "world_size": 2}, "deviceProperties": [{"name": "Tesla T4"}]}
    made = Profile()
    made.host("user_annotation", "ProfilerStep#0", begin, 40)
    made.operator("aten::mm", begin, 10, **{"Record function id": 3, "Input Dims": []})
    made.launch(begin + 2, 3, begin + 5, 10)
    made.launch(begin + 12, 3, begin + 16, wait + 5, stream=9, name="ncclDevKernel_AllReduce")
    made.events[-1]["args"] |= {"Collective name": "allreduce", "In msg nelems": 8, "Group size": 2, "dtype": "Float"}
    for event in made.events:  # a process per rank
        event["pid"] = MAIN + rank if event["pid"] == MAIN else event["pid"]
    return {**header, "traceEvents": made.events}


def execution_trace(rank: int) -> dict[str, Any]:
    def node(number: int, name: str, parent: int, scope: int) -> dict[str, Any]:
        found = {"id": number, "name": name, "parent": parent, "tid": 1, "scope": scope, "fw_tid": 0, "seq_id": -1}
        for side in ("input", "output"):
            found |= {f"{side}s": [], f"{side}_shapes": [], f"{side}_types": []}
        return found | {"rf_id": number, "op_schema": ""}

    nodes = [node(2, "[pytorch|profiler|execution_graph|thread]", 1, 7), node(3, "aten::mm", 2, 0)]
    return {"schema": "1.0.1", "pid": MAIN + rank, "nodes": nodes}


def test_the_section_of_recorded_ranks_replays_two_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"dlrm_kineto.tar.gz: no recorded ranks there"):
        run_sections(Asked(tmp_path), names=["replay"])
    ranks = {0: recorded_rank(0, 0, 7), 1: recorded_rank(1, 7, 0)}
    archive(tmp_path / DLRM_PROFILES, {f"kineto/worker{rank}.json": made for rank, made in ranks.items()})
    archive(tmp_path / DLRM_TRACES, {f"et/rank_{rank}.json": execution_trace(rank) for rank in ranks})
    sections = run_sections(Asked(tmp_path), names=["replay"])
    record = sections["replay"].record()
    assert record["worst_rank"] < 1e-6 and [tuple(each["linked"]) for each in record["ranks"]] == [(1, 1), (1, 1)]
    (collective,) = record["collectives"]
    assert collective["transfer_seconds"] == pytest.approx(5e-6)
    assert collective["longest_wait_seconds"] == pytest.approx(7e-6)
    sections["replay"].render()
    assert "all_reduce" in capsys.readouterr().out


def test_host_overheads_are_fitted_from_made_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts: launches of 4 and of 8 us; the shared table is of the first alone. A newer one takes half of it."""
    for name, launch in (("fast", 4.0), ("slow", 8.0), ("newer", 2.0)):
        made = Profile(deviceProperties=[{"name": "Tesla T4"}])
        for step in range(20):
            begin = 200.0 * step
            made.operator("aten::linear", begin, 100)
            made.operator("aten::addmm", begin + 10, 60)
            made.launch(begin + 20, launch, begin + 40, 10)
            made.launch(begin + 50, launch, begin + 65, 10)
            made.operator("aten::view", begin + 120, 3)
            made.operator("aten::item", begin + 130, 40)
            made.runtime("cudaStreamSynchronize", begin + 140, 20)
        made.write(tmp_path / f"{name}.json")
    monkeypatch.setattr(overhead_fitting, "STACKS", {"fast": ("fast.json",), "slow": ("slow.json",)})
    monkeypatch.setattr(overhead_fitting, "WITH_STACKS", ("newer.json",))
    monkeypatch.setattr(overhead_fitting, "NOT_SHARED", frozenset({"slow"}))
    output = tmp_path / "out"
    output.mkdir()
    shutil.copy(TABLES / INFLATION_FILE, output)
    newer_host = fit_table(H200_NAME, [extract(read_kineto(tmp_path / "newer.json"))], load_inflation(INFLATION))
    save_table(newer_host, output / f"{H200_NAME}.json")
    tables = {each.name: each for each in fit_shared_tables(tmp_path, output)}
    assert set(tables) == {"fast", "slow", SHARED_NAME, NEWER_NAME}
    launches = {name: each.seconds("T4", "cudaLaunchKernel") for name, each in tables.items()}
    # Few samples are drawn towards the mean of all calls, that of the synchronisation included.
    assert launches["fast"] == launches[SHARED_NAME] == pytest.approx(4e-6, rel=0.1)
    assert launches["slow"] == pytest.approx(8e-6, rel=0.1)
    shared, newer = (load_table(output / f"{name}.json") for name in (SHARED_NAME, NEWER_NAME))
    assert shared.sources[0].file == "fast.json" and shared.level == 1.0 and newer.factor >= shared.factor >= 1.0
    # T2 and T3 last longer where launches are short: the made operators begin and end at the same times.
    assert newer.level == pytest.approx(level_of(newer, shared), rel=0.05)
    assert newer.means["T4"]["cudaLaunchKernel"].seconds == pytest.approx(2e-6)
    (tmp_path / "slow.json").unlink()
    with pytest.raises(InputError, match=r"slow.json: missing; .*data fetch"):
        fit_shared_tables(tmp_path, output)
