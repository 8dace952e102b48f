"""Every block of every tutorial is run, written, compared or parsed (:mod:`tutorial_blocks` says by which rule). Those
that tune are in ``tests/fusion/test_fusion_tutorials.py``, so that another worker runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorial_blocks import (
    TUTORIALS,
    Block,
    blocks_of,
    command_mistake,
    commands_in,
    line_matches,
    lines_missing,
    require,
    run_page,
    uses,
)

PAGES = {name: path.read_text(encoding="utf-8") for name, path in TUTORIALS.items()}


def test_the_tutorials_are_there():
    assert set(TUTORIALS) >= {
        "fuse-and-deploy",
        "tvm-pipeline",
        "predict-my-script",
        "plan-a-cluster",
        "shard-tables",
        "add-my-gpu",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "predict-my-script" else pytest.mark.thorough)
        for name in TUTORIALS
        if not uses("fusion", name)
    ],
)
def test_the_commands_of_a_tutorial_print_what_it_shows(name: str, tmp_path: Path):
    require("e2e", name)
    assert run_page(TUTORIALS[name], tmp_path) == []


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_checked(name: str):
    found = blocks_of(PAGES[name])
    kinds = [block.kind for block in found]
    assert kinds.count("run") > 2 and kinds.count("output") > 1, "a tutorial shows commands and what they print"
    for block in found:
        if block.kind == "output":
            assert block.text.strip(" \n…"), f"line {block.line}: nothing is compared"
        if block.kind == "write":
            used = any(Path(block.title).stem in other.text for other in found if other.line > block.line)
            assert used, f"line {block.line}: {block.title} is written and never used"


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_is_not_run_is_understood_by_its_command(name: str):
    consoles = [block for block in blocks_of(PAGES[name]) if block.kind == "parse"]
    commands = [command for block in consoles for command in commands_in(block)]
    for tool in ("fusion", "e2e"):
        if any(tool in command.split() for command in commands):
            pytest.importorskip("onnx" if tool == "fusion" else "torch")  # its command line imports that
    assert [mistake for mistake in map(command_mistake, commands) if mistake] == []


# --- the rules themselves ---------------------------------------------------------------------------------


def test_lines_are_compared_with_numbers_a_fifth_apart():
    assert line_matches("step 613.6 ms (80% interval …)", "step 650.0 ms (80% interval 1 ms to 2 ms)")
    assert line_matches("1.20x as fast, 2,871 calls", "1.25x as fast, 2,900 calls")
    assert not line_matches("step 613.6 ms", "step 320.0 ms")
    assert not line_matches("h100-sxm 1", "h200-sxm 1")  # digits of a name are no number
    assert not line_matches("step 1 ms", "step 1 ms more")
    assert line_matches("error 1.0e-05 … 3", "error 1.1e-05 of 7 and 3")
    assert not line_matches("pointwise_3x56x56", "pointwise_3x55x56")


def test_lines_are_wanted_in_their_order():
    printed = "one  1\ntwo 2\nthree 3\n"
    assert lines_missing("one 1\n…\nthree 3\n", printed) == []
    assert lines_missing("three 3\none 1\n", printed) == ["one 1"]
    assert lines_missing("one 1\nfour …\n", printed) == ["four …"]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```sh\nls\n```\n", "nothing that a test looks at"),
        ("```\nls\n```\n", "nothing that a test looks at"),
        ("```cpp\nint a;\n```\n", "nothing that a test looks at"),
        ("```bash {linenums=1}\nls\n```\n", "not understood"),
        ("```bash\nls\n", "blocks are closed"),
        ("```text\nhello\n```\n", "output of nothing"),
        ('```python title="a.py"\n1\n```\n```text\nhello\n```\n', "output of nothing"),
    ],
)
def test_no_block_is_left_out(page: str, message: str):
    with pytest.raises(ValueError, match=message):
        blocks_of(page)


PROGRAM = """```yaml title="made/numbers.yaml"
three: 3
```
1. In a list:

   ```bash
   python -c "print(open('made/numbers.yaml').read())"
   ```
   ```text
   three: …
   ```
```bash title="exit status 2"
costmodel machines no-such-machine
```
```text
error: …no-such-machine…
```
```python
print("six", 6)
```
```text
six 5
```
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "", ""),
        ("six 5", "six 4", "not printed: six 4"),
        ("three: …", "four: …", "not printed: four: …"),
        ('```bash title="exit status 2"', "```bash", "ended with status 2"),
        ('print("six", 6)', "raise SystemExit(3)", "ended with status 3"),
    ],
)
def test_a_page_that_tells_something_else_is_found(before: str, after: str, message: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PROGRAM.replace(before, after) if before else PROGRAM)
    (tmp_path / "folder").mkdir()
    found = run_page(page, tmp_path / "folder")
    assert (message in found[0]) if message else found == []


def test_commands_that_are_not_run_are_parsed():
    assert command_mistake("costmodel measure --device cuda --suite kernels --minutes 8 -o measured") == ""
    assert command_mistake("torchrun --nproc-per-node 8 -m costmodel measure --suite collectives -o measured") == ""
    assert "cudda" in command_mistake("costmodel measure --cudda --suite kernels -o measured")
    assert "suite" in command_mistake("costmodel measure -o measured")  # an option that is needed
    assert "minutes" in command_mistake("costmodel measure --suite kernels -o measured --minutes soon")
    assert "measures" in command_mistake("costmodel measures")
    assert command_mistake("pip install .[fusion,peers]") == "" and "gpu" in command_mistake("pip install .[gpu]")
    assert "nvidia-smi" in command_mistake("nvidia-smi")
    with pytest.raises(ValueError, match="every line is a command"):
        commands_in(Block("console", "", "$ costmodel machines\nh100-sxm\n", 1))
