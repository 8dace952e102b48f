"""Fit and validation on invented tables whose truth is known, and the commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.input_files import content_digest
from costmodel.commands.cli import main as costmodel_main
from costmodel.gpu.fitted import all_fitted, level_transfer
from costmodel.machines.machine_file import load_machine
from lab.fit.__main__ import main as fit_main
from lab.fit.kernels import fit
from lab.validate.__main__ import main as validate_main
from lab.validate.cost_models import CALIBRATED, HELD_OUT_SHAPES, LEFT_OUT_GPU, left_out_machine, validate_kernels

pytest.importorskip("xgboost")
# name in the tables, our name, how much slower than the analytic model the invented kernels are
GPUS = (("Tesla T4", "t4", 1.2), ("Tesla P4", "p4", 1.4))


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """Tables of ``relu``: twice 4 B per element over the sustained DRAM bandwidth, times the factor of the GPU."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    directory = tmp_path_factory.mktemp("data")
    for label, name, slower in GPUS:
        bandwidth = load_machine(name).memory[-1].bandwidth.at(1)
        path = directory / "neusight" / "op_latency" / "relu" / f"{label}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ["0.02,1,1"] * 10
        for size in np.geomspace(1e7, 1e9, 400).astype(int):
            rows.append(f"{1e3 * (8 * size / bandwidth * slower) + 0.01},1,{size}")
        with gzip.open(path, "wt") as stream:
            stream.write("\n".join(["Latency,B,H", *rows]))
    path = directory / "aiconfigurator" / "l40s" / "gemm" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    sizes = [64 * each for each in range(1, 81)]
    columns = {"gemm_dtype": ["bfloat16"] * 80, "m": sizes, "n": sizes, "k": sizes, "latency": [0.1] * 80}
    parquet.write_table(pyarrow.table(columns), path)
    return directory


@pytest.fixture(scope="module")
def models(invented, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    fit(invented, directory, lambda line: None)
    return directory


def test_one_file_per_gpu_with_provenance(models, invented):
    trees = {name for name, each in all_fitted(models).items() if each.families}
    assert trees == {"t4", "p4", "l40s"}
    t4 = all_fitted(models)["t4"]
    (named,) = t4.provenance["tables"].items()
    path = invented / "neusight" / "op_latency" / "relu" / "Tesla T4.csv.gz"
    assert named == (path.relative_to(invented).as_posix(), {"rows": 400, "sha256": content_digest(path)})
    carried = json.loads((models / "transfer.json").read_text())["provenance"]["tables"]
    assert len(carried) == 3 and named[0] in carried  # every file of the fit
    assert t4.power_limited and t4.architecture == "turing" and set(t4.families) == {"elementwise"}


def test_what_is_fitted_is_learned_and_a_left_out_gpu_gets_the_others_level(invented, models):
    errors = {(each.split, each.machine): each.accuracy for each in validate_kernels(invented, models)}
    for _, name, _ in GPUS:
        assert errors[HELD_OUT_SHAPES, name].mape < 0.01 and errors[HELD_OUT_SHAPES, name].coverage == {
            "fitted": pytest.approx(1)
        }
        assert errors[CALIBRATED, name].mape < 0.02
    shares = {name: load_machine(name).memory[-1] for _, name, _ in GPUS}
    share = {name: level.bandwidth.at(1) / level.datasheet for name, level in shares.items()}
    # T4 is taken for as slow as P4: by 1.4 / 1.2, and by what each reaches of its DRAM's datasheet.
    expected = 1.4 / 1.2 * share["t4"] / share["p4"] - 1
    assert errors[LEFT_OUT_GPU, "t4"].bias == pytest.approx(expected, abs=0.01)
    assert errors[LEFT_OUT_GPU, "t4"].coverage == {"analytic": pytest.approx(1)}
    assert (LEFT_OUT_GPU, "l40s") not in errors  # nothing to learn from


def test_levels_weigh_machines_not_rows(invented, models):
    level = level_transfer(models).levels["elementwise"]["any"]
    assert level.middle == pytest.approx((np.log(1.2) + np.log(1.4)) / 2, abs=0.01)
    assert set(level.machines) == {"t4", "p4"}


def test_a_left_out_machine_knows_only_its_datasheet():
    h100, h200 = load_machine("h100-sxm"), load_machine("h200-sxm")
    left_out = left_out_machine(h100, [h200])
    share = h200.peak_flops("bfloat16", 1) / h200.compute["bfloat16"].datasheet
    assert left_out.peak_flops("bfloat16", 1) == pytest.approx(share * h100.compute["bfloat16"].datasheet)
    dram = h200.memory[-1].bandwidth.at(1) / h200.memory[-1].datasheet
    assert left_out.memory[-1].bandwidth.at(1) == pytest.approx(dram * h100.memory[-1].datasheet)
    assert left_out.memory[0] == h100.memory[0]


@pytest.mark.slow
def test_the_commands(invented, models, tmp_path, capsys):
    """Fitting again writes the same bytes."""
    assert fit_main(["--all", "--data", str(invented), "-o", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {Path(each["file"]).stem for each in files} >= {"t4", "p4", "l40s", "transfer", "l4"}  # l4: points alone
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in models.iterdir())
    assert validate_main(["kernels", "--all", "--data", str(invented), "--models", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["kernels"]["results"]
    row = next(each for each in results if each["machine"] == "p4" and each["split"] == HELD_OUT_SHAPES)
    assert row["mape"] < 0.01 and row["count"] > 20
    assert validate_main(["kernels", "--all", "--data", str(invented), "--models", str(tmp_path)]) == 0
    assert "left-out GPU, 20 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--table", "x", "--ranks", "4"), "--ranks 4: does not go with --table"),
        (("--steps", "x", "--collective", "all_reduce"), "--collective all_reduce: does not go with --steps"),
        (("--steps", "x", "--table", "y"), "give one of --table, --steps, --nccl-log"),
        ((), "give one of --table, --steps, --nccl-log"),
    ],
)
def test_options_of_another_fit_are_refused(options, told, capsys):
    assert costmodel_main(["fit", "--machine", "t4", *options]) == 2
    assert told in capsys.readouterr().err
