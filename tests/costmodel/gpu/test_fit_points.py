"""A user's own GPU from the table of ``costmodel measure``: moved as measured, where predictions look, and it alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from costmodel.base.errors import InputError, MachineError
from costmodel.commands.cli import main
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.fitted import DIRECTORY, all_fitted, fitted_in
from costmodel.gpu.own_gpu import fit_to_tables
from costmodel.machines.machine_file import load_machine
from costmodel.operators.any_operator import AnyOperator, to_record
from costmodel.operators.device_work import Elementwise, Gemm, MemoryCopy

PRODUCTS = [Gemm(1, size, size, 1024, dtype="bfloat16") for size in (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)]
HALVES = [Elementwise("add", elements, dtype="bfloat16") for elements in (1 << 24, 1 << 25, 1 << 26)]
# None is faster than the memory of its datasheet, which no measurement moves.
FACTORS = {"products": 1.5, "halves": 1.25}
VARIANT = """variant_of: rtx-3090
name: my-card
gpu: {sm_count: 68, clock: 1710 MHz, power: 320 W, origin: test}
"""


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine file of the user's, in a folder of machines that is the user's own."""
    monkeypatch.setenv("COSTMODEL_MACHINES", str(tmp_path / "machines"))
    path = tmp_path / "my-card.yaml"
    path.write_text(VARIANT, encoding="utf-8")
    return path


def seconds_of(operators: list[AnyOperator], machine: Path | str) -> list[float]:
    return [each.seconds for each in gpu_cost_model(load_machine(machine)).estimate(operators)]


def table(path: Path, machine: Path | str, **slower: float) -> Path:
    """Kernels that take ``slower`` times what is predicted of them; rows as ``measure`` writes them."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("operator", "median_s", "error"))
        for operators, factor in ((PRODUCTS, slower.get("products")), (HALVES, slower.get("halves"))):
            for each, seconds in zip(operators, seconds_of(operators, machine), strict=True):
                if factor is not None:
                    writer.writerow((json.dumps(to_record(each)), seconds * factor, ""))
        writer.writerow((json.dumps(to_record(MemoryCopy(1 << 20, "host_to_device"))), "", "out of memory"))
    return path


def test_a_table_moves_its_kernels_where_predictions_look_and_no_other_gpu(card: Path, tmp_path: Path):
    before, others = seconds_of([*PRODUCTS, *HALVES], card), seconds_of(PRODUCTS, "rtx-3090")
    told: list[str] = []
    written = fit_to_tables([table(tmp_path / "kernels.csv", card, **FACTORS)], str(card), None, told.append)
    assert written == tmp_path / "machines" / "calibration" / "gpu" / "my-card.json"
    after = gpu_cost_model(load_machine(card)).estimate([*PRODUCTS, *HALVES])
    assert [each.seconds / one for each, one in zip(after, before, strict=True)] == pytest.approx(
        [FACTORS["products"]] * 8 + [FACTORS["halves"]] * 3, rel=0.02
    )
    assert {each.source for each in after} == {"fitted"}
    assert seconds_of(PRODUCTS, "rtx-3090") == others
    assert any("8 kernels, 1.50 times as long" in line for line in told)
    assert json.loads(written.read_text(encoding="utf-8"))["provenance"]["points"]["kernels.csv"]["rows"] == 11


def test_a_second_table_takes_the_place_of_the_first_as_if_it_were_alone(card: Path, tmp_path: Path):
    alone = table(tmp_path / "second.csv", card, products=1.25)
    before = seconds_of(PRODUCTS, card)
    fit_to_tables([table(tmp_path / "first.csv", card, products=2.0, halves=2.0)], str(card), None, lambda line: None)
    fit_to_tables([alone], str(card), None, lambda line: None)
    assert seconds_of(PRODUCTS, card) == pytest.approx([1.25 * each for each in before], rel=0.02)
    assert not [key for key in all_fitted()["my-card"].adaptations if not key.startswith("gemm")]


def test_trees_of_a_shipped_gpu_stay_and_fits_of_what_is_shipped_see_no_points(card: Path, tmp_path: Path):
    name = "h100-sxm"
    before = seconds_of(PRODUCTS, name)
    fit_to_tables([table(tmp_path / "kernels.csv", name, products=1.1)], name, None, lambda line: None)
    assert seconds_of(PRODUCTS, name) == pytest.approx([1.1 * each for each in before], rel=0.03)
    assert all_fitted()[name].families == fitted_in(DIRECTORY)[name].families
    assert all_fitted()[name].adaptations != fitted_in(DIRECTORY)[name].adaptations


def test_elsewhere_means_that_nothing_is_moved(card: Path, tmp_path: Path):
    before = seconds_of(PRODUCTS, card)
    fit_to_tables(
        [table(tmp_path / "kernels.csv", card, products=3.0)], str(card), tmp_path / "aside", lambda line: None
    )
    assert seconds_of(PRODUCTS, card) == before


def test_what_says_nothing_is_refused(card: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    empty = table(tmp_path / "empty.csv", card)
    with pytest.raises(InputError, match=r"empty.csv: of no family and number type 3 kernels or more; measure longer"):
        fit_to_tables([empty], str(card), None, lambda line: None)
    with pytest.raises(MachineError, match="unknown machine"):
        fit_to_tables([empty], "my-crad", None, lambda line: None)
    assert main(["fit", "--table", str(empty)]) == 2
    assert "--machine" in capsys.readouterr().err
