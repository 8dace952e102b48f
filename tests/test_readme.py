"""What README, CONTRIBUTING and docs tell people exists: commands, options, files, links, names, contracts."""

from __future__ import annotations

import re

import pytest

from tests.promised_names import KEPT, offered
from tests.test_imports import ORDER
from tests.written_pages import (
    MODULE,
    PAGES,
    ROOT,
    benchmark_mistakes,
    code_of,
    commands,
    commands_of,
    contract_mistakes,
    dead_links,
    exists,
    missing_files,
    unknown_names,
    unknown_options,
)

COMMANDS = sorted({line for text in PAGES.values() for line in commands(text)})


def test_there_are_commands_of_every_tool():
    assert len(commands(PAGES["README.md"])) > 10
    for tool in ("fusion", "e2e", "costmodel"):
        assert any(each.startswith(f"-m {tool} ") for each in COMMANDS)


def test_the_readme_is_one_page():
    assert len(PAGES["README.md"].encode()) < 6 * 1024


@pytest.mark.parametrize("line", COMMANDS)
def test_command_and_options_exist(line: str):
    if line.split()[1] == "fusion":
        pytest.importorskip("onnx")
    assert not unknown_options(line)


@pytest.mark.parametrize("tool", ["fusion", "e2e", "costmodel"])
def test_the_page_of_commands_has_all_of_them(tool: str):
    if tool == "fusion":
        pytest.importorskip("onnx")
    listed = "\n".join(commands(PAGES["docs/commands.md"]))
    assert [words for words in commands_of(tool) if f"-m {tool} {words}" not in listed] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_links_and_names_exist(page: str):
    text = PAGES[page]
    assert missing_files(text) == []
    assert dead_links(page, text) == []
    assert unknown_names(text) == []
    assert benchmark_mistakes(text) == []
    assert [module for module in MODULE.findall(code_of(text)) if not exists(module)] == []


def test_chores_are_those_of_the_makefile():
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = re.findall(r"^make ((?:[a-z]+ )*[a-z]+)", "\n".join(code_of(text) for text in PAGES.values()), re.MULTILINE)
    assert lines and {word for line in lines for word in line.split()} <= made


def test_contracts_are_those_of_the_code():
    assert contract_mistakes(PAGES["docs/architecture.md"]) == []
    assert PAGES["docs/architecture.md"].count("```python\n# ") > 3


def test_the_drawing_has_the_folders_in_their_order():
    drawing = PAGES["docs/architecture.md"].split("```")[1]
    drawn: dict[str, tuple[str, ...]] = {}
    for package, folder in re.findall(r"^(?:(\w+)|  (\w+)) {2,}", drawing, re.MULTILINE):
        package, folders = (package, ()) if package else (list(drawn)[-1], (*drawn[list(drawn)[-1]], folder))
        drawn[package] = folders
    assert drawn == ORDER


def test_released_options_names_and_fields_are_still_there():
    pytest.importorskip("onnx")
    there = set(offered())
    assert {
        "e2e predict --model", "fusion records train --leave-out", "e2e.predict(batch_size)", "fusion.TunedModel.run",
        "e2e.Prediction.ranks.compute_seconds", "costmodel.Machine.memory.bandwidth",
    } <= there  # fmt: skip
    assert sorted(set(KEPT.read_text(encoding="utf-8").splitlines()) - there) == []


def test_mistakes_are_found():
    assert unknown_options("-m e2e predict --model gpt2 --gpuz t4") == {"--gpuz"}
    with pytest.raises(KeyError):
        unknown_options("-m costmodel data fetsh")
    assert missing_files("`e2e/simulate/simulatr.py`, `simulatr.py`, `e2e/lowering/families/<family>.py`") == [
        "e2e/simulate/simulatr.py", "simulatr.py",
    ]  # fmt: skip
    assert dead_links("docs/trust.md", "[a](trust.md) [b](docs/trust.md) [c](https://example.org)") == ["docs/trust.md"]
    assert unknown_names("`costmodel.machine.load_machine`, `costmodel.gpu.kernel_model.KernelModel`") == [
        "costmodel.machine.load_machine"
    ]
    assert unknown_names("```python\nfrom costmodel.gpu import gpu_costs, gpu_cost_model\n```") == [
        "costmodel.gpu.gpu_costs"
    ]
    assert benchmark_mistakes("`python -m lab.bench.scale --plot x`, `python benchmarks/scales.py`") == [
        "lab/bench/scale.py --plot", "benchmarks/scales.py",
    ]  # fmt: skip
    contract = "```python\n# e2e/price/pricing.py\nprice(graph, cost_model) -> ExecutionGraph\nprice(graph, ...)\n```"
    assert len(contract_mistakes(contract)) == 1
