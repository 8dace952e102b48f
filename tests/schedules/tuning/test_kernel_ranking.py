"""The ranking learned from shipped records and what a run takes from it."""

from __future__ import annotations

import random
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import load_machine, write_machine
from costmodel.operators.layers import Conv2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import TEMPLATE_REVISION
from schedules.kernels.template_table import config_terms, template_for
from schedules.tuning.kernel_ranking import (
    KernelGuesses,
    empty_ranking,
    guesses_for,
    read_ranking,
    train_ranking,
    write_ranking,
)
from schedules.tuning.kernel_tuner import TaskState, next_batch
from schedules.tuning.shipped_records import (
    MACHINE_FILE,
    RANKING_FILE,
    RECORDS_FILE,
    SHIPPED_DIRECTORY,
    CpuRecords,
    FoundRecords,
    KernelRecords,
    find_records,
    identity_of,
    read_records,
    write_records,
)
from schedules.tuning.tuning_records import Record, environment

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
NARROW_CPU = replace(CPU, mcpu="cooperlake", features=("avx512f", "avx512_bf16", "avx512_vnni"))
ROOT = Path(__file__).resolve().parents[3]
TOY = load_machine("toy")
LAYERS = {
    "a": [Conv2d(1, 64, 14, 14, 128, (1, 1)), Conv2d(1, 128, 14, 14, 128, (1, 1))],
    "b": [Conv2d(1, 256, 14, 14, 128, (1, 1)), Conv2d(1, 96, 28, 28, 64, (1, 1))],
    "c": [Conv2d(1, 128, 28, 28, 96, (1, 1)), Conv2d(1, 192, 14, 14, 64, (1, 1))],
}


def true_seconds(operator, config, cpu) -> float:
    """A made-up CPU on which the analytic cost holds but that unrolling doubles a kernel's speed each time."""
    return 1e-9 * template_for(operator, cpu).cost(operator, config, cpu) / config["unroll"]


def kernel(operator, network: str, threads: int = 2, count: int = 24, base: CpuTarget = CPU) -> KernelRecords:
    cpu = replace(base, threads=threads)
    space = template_for(operator, cpu).space(operator, cpu)
    configs = random.Random(0).sample(list(space), min(count, len(space)))
    records = tuple(Record(operator, config, true_seconds(operator, config, cpu)) for config in configs)
    return KernelRecords(operator, threads, (network,), "2026-01-01", records)


def content(networks: str = "abc", threads=(1, 2)) -> CpuRecords:
    kernels = [kernel(each, name, count) for name in networks for each in LAYERS[name] for count in threads]
    return CpuRecords(identity_of(CPU), "0.27", "5", "toy", tuple(kernels))


def test_terms_say_what_a_cost_is_made_of():
    operator = LAYERS["b"][0]
    template = template_for(operator, CPU)
    space = template.space(operator, CPU)[:40]
    terms = config_terms(operator, space, CPU)
    assert terms.shape == (40, 8) and np.isfinite(terms).all()
    assert terms[:, 0].tolist() == [template.cost(operator, config, CPU) for config in space]
    endless = replace(CPU, l1_bytes=1 << 50, l2_bytes=1 << 50)
    assert terms[3, 1] == pytest.approx(np.log(terms[3, 0] / template.cost(operator, space[3], endless)))
    assert (terms[:, 1] >= terms[:, 2]).all() and (terms[:, 2] >= 0).all()  # less traffic, less cost
    assert (terms[:, 3] <= 0).all() and set(terms[:, 4]) == {2.0}
    assert (terms[:, 5:].sum(axis=1) == 1).all()


def test_the_shipped_trees_rank_as_those_that_were_trained(tmp_path):
    known = content()
    trees = train_ranking(known, TOY)
    write_ranking(tmp_path, known, trees)
    write_machine(TOY, tmp_path / MACHINE_FILE)
    model = read_ranking(FoundRecords(tmp_path, known, True), 2)
    fresh = empty_ranking(TOY, CPU)
    fresh.install(trees)
    operator = Conv2d(1, 160, 14, 14, 128, (1, 1))
    space = template_for(operator, CPU).space(operator, CPU)
    assert np.allclose(model.seconds(operator, space), fresh.seconds(operator, space), rtol=1e-3)
    best = min(true_seconds(operator, config, CPU) for config in space)
    assert true_seconds(operator, space[model.rank(operator, space)[0]], CPU) < 1.1 * best
    with pytest.raises(InputError, match="trained for"):
        read_ranking(FoundRecords(tmp_path, replace(known, templates="6"), True), 2)
    (tmp_path / "ranking.json.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="damaged"):
        read_ranking(FoundRecords(tmp_path, known, True), 2)


def test_a_model_corrects_the_one_it_stands_on():
    """The chip at hand wants no unrolling: a few measurements of one kernel tell, of a family learned elsewhere."""
    before = empty_ranking(TOY, CPU)
    before.install(train_ranking(content(), TOY))
    model = empty_ranking(TOY, CPU, before)
    operator = LAYERS["a"][1]
    space = template_for(operator, CPU).space(operator, CPU)
    assert model.rank(operator, space) == before.rank(operator, space)

    def here(config) -> float:
        return true_seconds(operator, config, CPU) * config["unroll"] ** 2

    from costmodel.cost_model import Measurement

    configs = random.Random(1).sample(list(space), 40)
    model.update([Measurement(operator, config, here(config)) for config in configs])
    chosen = [here(space[each.rank(operator, space)[0]]) for each in (before, model)]
    assert chosen[1] < 1.1 * min(map(here, space)) < chosen[0]


def test_a_recorded_operator_is_tried_first_and_gains_less():
    operator = LAYERS["a"][0]
    recorded = kernel(operator, "a")
    guesses = KernelGuesses(CPU, None, {operator: recorded}, trusted=True)
    first = guesses.first(operator)
    assert first[0] == recorded.best.config
    assert guesses.guess(operator).config == first[0] and guesses.guess(operator).seconds == recorded.best.seconds
    space = guesses.space(operator)
    state = TaskState(operator, 1, 20, space, first=first, elsewhere=guesses.trials(operator))
    batch = next_batch(state, empty_ranking(TOY, CPU), 4, 0.0, random.Random(0))
    assert batch[: len(first)] == first and len(batch) == 4
    assert len({tuple(config.items()) for config in batch}) == 4
    known, new = (TaskState(operator, 1, 20, space, elsewhere=each) for each in (24, 0))
    for each in (known, new):
        each.note(first[0], 1e-3)
    assert known.expected_gain() < new.expected_gain() / 10


def test_records_of_another_chip_are_only_a_guess():
    operator = LAYERS["a"][0]
    recorded = {operator: kernel(operator, "a")}
    elsewhere = KernelGuesses(CPU, None, recorded, trusted=False)
    assert elsewhere.guess(operator).config == recorded[operator].best.config
    assert elsewhere.guess(operator).seconds is None and elsewhere.trials(operator) == 0


def test_without_anything_known_the_first_of_the_space_is_taken():
    operator = LAYERS["b"][1]
    guess = KernelGuesses(CPU).guess(operator)
    assert guess.config == template_for(operator, CPU).space(operator, CPU)[0] and guess.seconds is None


def test_a_recorded_configuration_that_is_no_longer_legal_is_ignored():
    operator = LAYERS["a"][0]
    stale = KernelRecords(operator, 2, ("a",), "", (Record(operator, {"gone": 1}, 1e-6),))
    guesses = KernelGuesses(CPU, None, {operator: stale}, trusted=True)
    assert guesses.first(operator) == [] and "gone" not in guesses.guess(operator).config


@pytest.mark.parametrize("own", ["chip", "code", "nearest", None])
def test_a_run_says_in_one_line_where_its_guesses_are_from(own, tmp_path, monkeypatch):
    here = replace(identity_of(CPU), chip="Us 1/2/3")
    there = {"chip": here, "code": replace(here, chip="Them 4/5/6"), "nearest": replace(here, chip="T", l1_bytes=65536)}
    for module in ("schedules.tuning.shipped_records.identity_of", "schedules.tuning.kernel_ranking.chip_name"):
        monkeypatch.setattr(module, lambda cpu=None, module=module: here if "identity" in module else here.chip)
    monkeypatch.setenv("FUSION_RECORDS", str(tmp_path))
    find_records.cache_clear()
    if own is not None:
        known = replace(content(), cpu=there[own], **{name: environment(CPU)[name] for name in ("tvm", "templates")})
        write_records(tmp_path / "cpu" / RECORDS_FILE, known)
        write_machine(TOY, tmp_path / "cpu" / MACHINE_FILE)
        write_ranking(tmp_path / "cpu", known, train_ranking(known, TOY))
    guesses = guesses_for(CPU)
    find_records.cache_clear()
    words = {
        "chip": "starting from records of this CPU, Us 1/2/3",
        "code": "starting from those of Them 4/5/6, skylake-avx512, which runs the same code",
        "nearest": "the nearest with vectors as wide",
        None: "no records of Us 1/2/3 or a CPU like it",
    }
    assert words[own] in guesses.origin and "\n" not in guesses.origin
    assert guesses.trusted == (own == "chip") and (guesses.ranking is None) == (own is None)
    operator = Conv2d(1, 160, 14, 14, 128, (1, 1))  # in no network of the records
    space = template_for(operator, CPU).space(operator, CPU)
    assert guesses.seconds(operator) == (None if own is None else guesses.guess(operator).seconds)
    best = min(true_seconds(operator, config, CPU) for config in space)
    if own is None:
        assert guesses.guess(operator).config == space[0]
    else:
        assert true_seconds(operator, guesses.guess(operator).config, CPU) < 1.1 * best


SHIPPED = sorted(SHIPPED_DIRECTORY.glob(f"*/{RECORDS_FILE}"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_what_is_shipped_is_whole_small_and_of_these_templates(path):
    content = read_records(path)
    assert content.templates == str(TEMPLATE_REVISION), "collect and train again, or remove the folder"
    assert all(kernel.networks and kernel.measured for kernel in content.kernels)
    model = read_ranking(FoundRecords(path.parent, content, True), content.kernels[0].threads)
    assert any(model.knows(kernel.operator) for kernel in content.kernels)
    assert sum(each.stat().st_size for each in path.parent.iterdir()) < 3_000_000


def test_the_package_takes_what_is_shipped_along():
    """The files' names fit the patterns of the package's data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["schedules"]
    folder = (SHIPPED_DIRECTORY / "some-cpu").relative_to(ROOT / "schedules")
    for name in (RECORDS_FILE, MACHINE_FILE, RANKING_FILE):
        assert any((folder / name).match(pattern) for pattern in patterns), name
