"""Builds for another CPU: named, or that of a tracker's servers, which are on this machine."""

# ruff: noqa: E402

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
import fusion
from costmodel.base.errors import InputError, MissingDependencyError, ProjectError
from costmodel.cpu.calibration import find_compiler
from costmodel.machines.machine_file import write_machine
from schedules.contract.cpu_target import host_target
from tests.fusion.commands.test_cli import toy_machine, write_model
from tests.fusion.quantised_models import quantised
from tests.schedules.rpc_servers import KEY, running_servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``model.onnx`` and ``toy.yaml``, a machine of 8 threads."""
    path = tmp_path_factory.mktemp("elsewhere")
    write_model(path / "model.onnx")
    write_machine(toy_machine(8), path / "toy.yaml")
    return path


def test_a_named_cpu_gets_a_build_that_says_what_was_not_done(folder: Path, tmp_path: Path, monkeypatch):
    """As on a CPU without AVX-512: nothing is run, neither here nor by ``load``."""
    old = frozenset(("avx2", "fma"))
    monkeypatch.setattr("fusion.analysis.target_machine.cpu_flags", lambda: old)
    monkeypatch.setattr("fusion.model.build_folder.cpu_flags", lambda: old)
    target = "llvm -mcpu=znver4 -num-cores 8"
    summary = fusion.tune(folder / "model.onnx", tmp_path / "build", target=target, machine=folder / "toy.yaml")
    manifest = json.loads((tmp_path / "build" / "manifest.json").read_text())
    assert (manifest["mcpu"], manifest["threads"], manifest["measured"], manifest["checked"]) == (
        "znver4", 8, False, False,
    )  # fmt: skip
    assert {"avx512bw", "avx512_bf16"} <= set(manifest["cpu_flags"])
    assert summary.trials == 0 and np.isnan(summary.tuned_seconds) and np.isnan(summary.max_abs_error)
    notes = " ".join(summary.notes)
    assert "built for znver4 with 8 threads, not for this CPU" in notes and "whole networks were not timed" in notes
    assert "the cost model chose them" in notes and "outputs cannot be checked here" in notes
    with pytest.raises(InputError, match="built for znver4; this CPU lacks .*avx512f"):
        fusion.load(tmp_path / "build")


@pytest.mark.parametrize(
    ("mcpu", "precision"), [("cascadelake", "int8"), pytest.param("haswell", "float32", marks=pytest.mark.thorough)]
)
def test_a_build_of_a_quantised_model_says_its_precision(mcpu, precision, tmp_path: Path, monkeypatch):
    """Whole numbers for a CPU that has kernels of them, floats for another."""
    monkeypatch.setattr("fusion.analysis.target_machine.cpu_flags", frozenset)
    model = quantised(tmp_path / "q.onnx", per_channel=True)
    toy = toy_machine(2)
    compute = {**toy.compute, "int8": replace(toy.compute["float32"], origin="invented for this test")}
    write_machine(replace(toy, compute=compute), tmp_path / "toy.yaml")
    build, target = tmp_path / "build", f"llvm -mcpu={mcpu} -num-cores 2"
    fusion.tune(model, build, target=target, machine=tmp_path / "toy.yaml")
    manifest, summary = (json.loads((build / f"{name}.json").read_text()) for name in ("manifest", "summary"))
    assert manifest["precision"] == precision == summary["precision"]["shipped"]


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("auto", marks=pytest.mark.thorough)])
def test_a_precision_of_another_cpu(precision, folder: Path, tmp_path: Path, monkeypatch):
    """Errors are told by ONNX Runtime here; nothing is run of what is built."""
    monkeypatch.setattr("fusion.analysis.target_machine.cpu_flags", frozenset)
    toy = toy_machine(2)
    rate = toy.compute["float32"].sustained
    faster = type(rate)(tuple((threads, 8 * value) for threads, value in rate.points))
    write_machine(replace(toy, compute={**toy.compute, "bfloat16": replace(toy.compute["float32"], sustained=faster)}),
                  tmp_path / "toy.yaml")  # fmt: skip
    words = {"precision": precision, "machine": tmp_path / "toy.yaml"}
    build, target = tmp_path / "build", "llvm -mcpu=cooperlake -num-cores 2"
    found = fusion.tune(folder / "model.onnx", build, target=target, max_error=0.5, **words).record["precision"]
    assert found["asked"] == precision and 0 < found["errors"]["max_relative_error"] < 0.5
    assert found["bfloat16_layers"] == found["layers"] == 4
    if precision == "auto":
        (chosen,) = (point for point in found["choice"]["frontier"] if point["chosen"])
        assert chosen["predicted_seconds"] > 0 and chosen["measured_seconds"] is chosen["raced_seconds"] is None
        plain = fusion.tune(folder / "model.onnx", tmp_path / "none", target=target, max_error=1e-6, **words)
        assert plain.record["precision"]["shipped"] == "float32"
        return
    for asked, words_in_it, cpu in (
        ({**words, "max_error": 1e-6}, "--max-error 1e-06", "cooperlake"),
        (words, "bfloat16 needs a CPU with avx512_bf16", "haswell"),
    ):
        with pytest.raises(ProjectError, match=words_in_it):
            fusion.tune(folder / "model.onnx", tmp_path / "refused", target=f"llvm -mcpu={cpu} -num-cores 2", **asked)
        assert not (tmp_path / "refused").exists()


def test_what_does_not_go_together_is_one_line(folder: Path, tmp_path: Path):
    model, build = folder / "model.onnx", tmp_path / "build"
    for asked, words in (
        ({"target": "llvm -mcpu=znver4 -num-cores 8"}, "name a machine file with --machine"),
        ({"target": "toy", "tracker": "localhost:1", "key": "a"}, "--target and --tracker"),
        ({"tracker": "localhost:1"}, "name the servers with --key"),
        ({"key": "a"}, "say where that is with --tracker"),
    ):
        with pytest.raises(InputError, match=words):
            fusion.tune(model, build, **asked)
        assert not build.exists()


@pytest.mark.thorough
def test_kernels_of_servers_are_kept_for_their_cpu(folder: Path, tmp_path: Path):
    """Then the same folder builds for that CPU by name from the records alone."""
    try:
        find_compiler()
    except MissingDependencyError:
        pytest.skip("there is no C compiler")
    model, build = folder / "model.onnx", tmp_path / "build"
    options = {"trials": 1, "threads": 1, "machine": folder / "toy.yaml"}
    with running_servers() as tracker:
        summary = fusion.tune(model, build, tracker=tracker, key=KEY, **options)
    assert summary.trials > 0 and "measured on 2 server(s) of tiny" in summary.notes[0]
    (site,) = summary.record["sites"]
    assert site["measured"]["fused_seconds"] > 0 and site["measured"]["unfused_seconds"] > 0
    assert summary.record["check"]["worst_share_of_allowed"] < 1
    records = (build / "records" / "database_tuning_record.json").read_bytes()
    again = fusion.tune(model, build, target=f"llvm -mcpu={host_target().mcpu} -num-cores 1", **options)
    assert again.trials == 0 and not any("no record" in note for note in again.notes)
    assert again.record["sites"] == summary.record["sites"]
    assert (build / "records" / "database_tuning_record.json").read_bytes() == records
    assert (build / "model.so").is_file()
