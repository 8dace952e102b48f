"""Commands of users: program, arguments and processes, as the launchers read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.capture.launcher import parse_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "program", "arguments", "processes", "nodes"),
    [
        ("python train.py --lr 1", "train.py", "--lr 1", None, None),
        ("python3.11 -u -X dev train.py -- x", "train.py", "-- x", None, None),
        ("./train.py -b 4", "./train.py", "-b 4", None, None),
        ("python -m package.train --lr 1", "package.train", "--lr 1", None, None),
        ("torchrun --nproc-per-node 4 train.py --lr 1", "train.py", "--lr 1", 4, 1),
        ("torchrun --standalone --nproc_per_node=gpu train.py", "train.py", "", None, 1),
        ("torchrun --nnodes 2 --nproc-per-node 8 -m package.train a", "package.train", "a", 8, 2),
        ("python -m torch.distributed.run --nnodes 1:4 --nproc-per-node 2 train.py", "train.py", "", 2, 4),
        ("deepspeed --num_gpus 4 --num_nodes 2 train.py --deepspeed", "train.py", "--deepspeed", 4, 2),
        ("fabric run --devices 2 train.py --lr 1", "train.py", "--lr 1", 2, 1),
    ],
)
def test_what_a_launcher_starts(
    folder: Path, command: str, program: str, arguments: str, processes: int | None, nodes: int | None
) -> None:
    launch = parse_command(command.split(), folder)
    assert (launch.program, " ".join(launch.arguments)) == (program, arguments)
    assert (launch.processes, launch.nodes) == (processes, nodes)
    assert launch.gpus == (None if processes is None or nodes is None else processes * nodes)
    assert launch.module == program.startswith("package")


def test_the_environment_before_the_program_is_its_own(folder: Path) -> None:
    launch = parse_command(["env", "A=1", "B=x=y", "python", "train.py"], folder)
    assert launch.environment == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "no command"),
        ("A=1", "no command"),
        ("python", "without a program"),
        ("python -c pass", "write the program to a file"),
        ("python -m", "name a module"),
        ("python missing.py", "missing.py: no such program"),
        ("bash train.sh", "bash: not a known launcher"),
        ("torchrun --nproc-per-node 4", "torchrun: "),
        ("torchrun --nproc-per-node xpu train.py", "expected a number of GPUs"),
        ("fabric run --devices auto train.py", "expected a number of GPUs"),
    ],
)
def test_refusals(folder: Path, command: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_command(command.split(), folder)
