"""Commands of users: program, arguments and processes, as the launchers read them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.capture.launcher import parse_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n", encoding="utf-8")
    script = "#!/bin/bash\n# python old.py\nset -e\ncd here && torchrun --nproc_per_node=$1 train.py \\\n  --lr 1\n"
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")
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
        ("CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node gpu train.py", "train.py", "", 2, 1),
        ("CUDA_VISIBLE_DEVICES=2,3 python train.py", "train.py", "", None, None),
        ("deepspeed --include localhost:0,1,2 train.py", "train.py", "", 3, 1),
        ("deepspeed --include a:0,1@b:0,1 train.py", "train.py", "", 2, 2),
        ("uv run --with einops train.py --lr 1", "train.py", "--lr 1", None, None),
        ("conda run -n env nohup torchrun --nproc-per-node 4 train.py", "train.py", "", 4, 1),
        ("srun -N2 --ntasks-per-node=4 python train.py", "train.py", "", 4, 2),
        ("srun --ntasks 16 --nodes 2 --gpus-per-node 8 python -u train.py", "train.py", "", 8, 2),
        ("srun python train.py", "train.py", "", None, None),
        ("srun --nodes 2 torchrun --nproc-per-node 8 train.py", "train.py", "", 8, 2),
        ("mpirun -np 8 -x PATH --bind-to none python train.py", "train.py", "", 8, None),
        ("bash -c 'torchrun --nproc-per-node 4 train.py --lr 1'", "train.py", "--lr 1", 4, 1),
    ],
)
def test_what_a_launcher_starts(
    folder: Path, command: str, program: str, arguments: str, processes: int | None, nodes: int | None
) -> None:
    launch = parse_command(shlex.split(command), folder)
    assert (launch.program, " ".join(launch.arguments)) == (program, arguments)
    assert (launch.processes, launch.nodes) == (processes, nodes)
    assert launch.gpus == (None if processes is None else processes * (nodes or 1))
    assert launch.module == program.startswith("package")


def test_the_environment_before_the_program_is_its_own(folder: Path) -> None:
    launch = parse_command(["env", "A=1", "B=x=y", "python", "train.py"], folder)
    assert launch.environment == {"A": "1", "B": "x=y"}


def test_ranks_of_slurm_and_of_open_mpi_are_told_by_their_own_variables(folder: Path) -> None:
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    slurm = parse_command(["srun", "--ntasks", "8", "python", "train.py"], folder).rank_environment(place)
    assert (slurm["SLURM_PROCID"], slurm["SLURM_NTASKS"], slurm["SLURM_LOCALID"], slurm["SLURM_NODEID"]) == tuple(
        "5811"
    )
    mpi = parse_command(["mpirun", "-n", "8", "python", "train.py"], folder).rank_environment(place)
    assert (mpi["OMPI_COMM_WORLD_RANK"], mpi["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("5", "1")
    assert not parse_command(["python", "train.py"], folder).rank_environment(place)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "no command"),
        ("A=1", "no command"),
        ("python", "without a program"),
        ("python -c pass", "write the program to a file"),
        ("python -m", "name a module"),
        ("python missing.py", "missing.py: no such program"),
        ("bash other.sh", "no such shell script"),
        ("julia train.jl", "julia: neither a known launcher"),
        ("nohup julia train.jl", "names no program"),
        ("bash train.sh 8", r"train.sh is a shell script.*: torchrun --nproc_per_node=\$1 train.py --lr 1$"),
        ("./train.sh", r"train.sh is a shell script"),
        ("bash train.sh -c model.yaml", r"train.sh is a shell script"),
        ("./train.sh -c model.yaml", r"train.sh is a shell script"),
        ("torchrun --nproc-per-node 4", "torchrun: "),
        ("torchrun --nproc-per-node xpu train.py", "expected a number of GPUs"),
        ("fabric run --devices auto train.py", "expected a number of GPUs"),
    ],
)
def test_refusals(folder: Path, command: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_command(command.split(), folder)


def test_recipes_of_torchtune_are_known_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = """
from dataclasses import dataclass, field

@dataclass
class Named:
    name: str
    file_path: str
    configs: list = field(default_factory=list)

def get_all_recipes():
    return [Named("full_finetune_distributed", "full.py", [Named("llama/1B_full", "llama/1B_full.yaml")])]
"""
    for file, text in {
        "torchtune/__init__.py": "",
        "torchtune/_recipe_registry.py": registry,
        "recipes/full.py": "",
    }.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    command = "tune run --nproc_per_node 2 full_finetune_distributed --config llama/1B_full epochs=1"
    launch = parse_command(command.split(), folder)
    assert launch.program == str(folder / "recipes" / "full.py") and not launch.module and launch.gpus == 2
    assert launch.arguments == ("--config", str(folder / "recipes" / "configs" / "llama" / "1B_full.yaml"), "epochs=1")
    own = parse_command(["tune", "run", "my/recipe.py", "--config", "mine.yaml"], folder)
    assert (own.program, own.module, own.arguments, own.gpus) == ("my.recipe", True, ("--config", "mine.yaml"), None)


def test_installed_commands_that_are_python_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, first in (("trainer", "#!/usr/bin/python3"), ("tool", "#!/bin/sh")):
        (folder / name).write_text(f"{first}\nprint()\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    launch = parse_command(["trainer", "pretrain", "--lr", "1"], folder)
    assert (launch.program, launch.arguments) == (str(folder / "trainer"), ("pretrain", "--lr", "1"))
    monkeypatch.setenv("PATH", "")  # beside the interpreter, as in an environment that was not entered
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    assert parse_command(["trainer"], folder).program == str(folder / "trainer")
    with pytest.raises(InputError, match="tool: neither a known launcher"):
        parse_command(["tool"], folder)


def test_old_launchers_tell_a_process_its_number_by_an_option(folder: Path) -> None:
    (folder / "old.py").write_text("parser.add_argument('--local_rank', type=int)\n", encoding="utf-8")
    old, both = "python -m torch.distributed.launch --nproc_per_node 2", "deepspeed --num_gpus 2"
    options = {
        f"{old} train.py": "--local-rank",
        f"{old} old.py": "--local_rank",
        f"{old} --use_env old.py": "",
        f"{both} train.py": "--local_rank",
        f"{both} --no_local_rank train.py": "",
        "torchrun --nproc-per-node 2 old.py": "",
    }
    for command, option in options.items():
        launch = parse_command(shlex.split(command), folder)
        assert (launch.processes, launch.rank_option) == (2, option), command
