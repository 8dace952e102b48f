"""Command of the user, as it would be started on the machine with the GPUs: program, arguments and launcher.

Read are ``python FILE`` and ``python -m MODULE``, ``torchrun`` (``python -m torch.distributed.run``), ``accelerate
launch``, ``deepspeed``, ``fabric run`` and ``tune run``, behind any number of ``NAME=value`` words of the environment,
behind ``srun`` and ``mpirun``, which start the ranks too, and behind what changes nothing here (``uv run``, ``nohup``).
Launchers are read by their own parsers, where they are installed, so that their options mean what they mean there.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError

_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
_SHELLS = ("bash", "sh", "zsh", "dash")
# Commands that start another one and change nothing of its prediction.
_WRAPPERS = (
    *("uv", "poetry", "conda", "mamba", "micromamba", "pixi", "pipenv", "hatch", "rye", "pdm"),
    *("nohup", "time", "nice", "ionice", "numactl", "taskset", "stdbuf", "timeout", "exec", "sudo", "xvfb-run"),
    *("nsys", "ncu", "py-spy", "strace", "gdb"),
)
# Those that start the ranks: their options for ranks, nodes and ranks per node.
_JOB_LAUNCHERS = {
    "srun": (("-n", "--ntasks"), ("-N", "--nodes"), ("--ntasks-per-node",)),
    **dict.fromkeys(("mpirun", "mpiexec"), (("-n", "-np", "--np"), (), ("-N", "-npernode", "--npernode", "-ppn"))),
}
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}
_RANK_VARIABLES = {
    "srun": {
        "SLURM_PROCID": "RANK",
        "SLURM_NTASKS": "WORLD_SIZE",
        "SLURM_LOCALID": "LOCAL_RANK",
        "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
        "SLURM_NODEID": "GROUP_RANK",
    },
    **dict.fromkeys(("mpirun", "mpiexec"), _OPEN_MPI),
}
# Words of a line of a shell script among which its program stands, and how many such lines an error shows.
_BEFORE_PROGRAM = 6
_SHOWN_COMMANDS = 3
# Options of the interpreter that take a value in the next word.
_VALUED = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Launch:
    """Program of a command, with the processes that its launcher starts."""

    # File of the program, or its name if it is a module.
    program: str
    arguments: tuple[str, ...] = ()
    # True for ``python -m``.
    module: bool = False
    # Processes per node and nodes; None if no launcher says so.
    processes: int | None = None
    nodes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    # Name of the launcher; empty for Python itself.
    launcher: str = ""
    # Option by which the launcher tells a process its number on the node; empty if it does not.
    rank_option: str = ""

    @property
    def gpus(self) -> int | None:
        """GPUs of the whole job, or None if no launcher says so."""
        return None if self.processes is None else self.processes * (self.nodes or 1)

    def rank_environment(self, torchrun: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which ``srun`` and ``mpirun`` tell a rank its place, from those of ``torchrun``."""
        return {name: torchrun[same] for name, same in _RANK_VARIABLES.get(self.launcher, {}).items()}

    @property
    def title(self) -> str:
        """Name of the program for messages."""
        return f"-m {self.program}" if self.module else self.program


def parse_command(words: Sequence[str], folder: Path | None = None) -> Launch:
    """Parse a command; ``folder`` is where it would be started (default: the current one).

    Raise ``InputError`` for an empty command, an unknown launcher, a shell script (naming the commands in it) and a
    program that does not exist.
    """
    environment: dict[str, str] = {}
    rest = list(words)
    if rest[:1] == ["env"]:
        del rest[0]
    while rest and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0], re.DOTALL):
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if not rest:
        raise InputError("no command: write it after --, such as -- python train.py --batch-size 64")
    launch = _parsed(rest, folder or Path.cwd())
    if launch.launcher and launch.processes is None:
        launch = replace(launch, processes=_listed(environment.get("CUDA_VISIBLE_DEVICES", "")))
    if not launch.module:
        place = (folder or Path.cwd()) / launch.program
        if not place.is_file():
            raise InputError(f"{launch.program}: no such program; give the command as it is started, from its folder")
        text = place.read_text(encoding="utf-8", errors="replace") if launch.rank_option == "--local-rank" else ""
        if "--local_rank" in text and "--local-rank" not in text:  # as PyTorch 1 spelled it
            launch = replace(launch, rank_option="--local_rank")
    return replace(launch, environment={**environment, **launch.environment})


def _parsed(words: list[str], folder: Path) -> Launch:
    name, rest = os.path.basename(words[0]), words[1:]
    if _PYTHON.match(name):
        return _of_python(rest)
    if name in _LAUNCHERS:
        return _LAUNCHERS[name](rest)
    if name.endswith(".py"):
        return Launch(words[0], tuple(rest))
    if name in _SHELLS or name.endswith(".sh"):
        return _of_shell(words, folder)
    if name in _WRAPPERS or name in _JOB_LAUNCHERS:
        return _wrapped(words, folder)
    script = _console_script(words[0])
    if script is not None:
        return Launch(script, tuple(rest))
    raise InputError(
        f"{words[0]}: neither a known launcher nor a Python command on PATH; start the command with python, "
        f"{', '.join(_LAUNCHERS)}, a .py file or such a command"
    )


def _starts_program(word: str) -> bool:
    name = os.path.basename(word)
    return bool(_PYTHON.match(name)) or name in (*_LAUNCHERS, *_SHELLS) or name.endswith((".py", ".sh"))


def _wrapped(words: list[str], folder: Path) -> Launch:
    """Parse a command that another one starts; ``srun`` and ``mpirun`` also say how many processes it has."""
    name = os.path.basename(words[0])
    place = next((place for place in range(1, len(words)) if _starts_program(words[place])), None)
    if place is None:
        raise InputError(f"{shlex.join(words)}: names no program; give the command that trains")
    launch = _parsed(words[place:], folder)
    if name not in _JOB_LAUNCHERS:
        return launch
    ranks, nodes, per_node = (_last_number(words[1:place], names) for names in _JOB_LAUNCHERS[name])
    if launch.launcher:  # it starts the ranks, once on every node
        return replace(launch, nodes=max(launch.nodes or 1, nodes or 1))
    nodes = nodes or (-(-ranks // per_node) if ranks and per_node else None)
    per_node = per_node or (-(-ranks // (nodes or 1)) if ranks else None)
    return replace(launch, processes=per_node, nodes=nodes, launcher=name)


def _last_number(words: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the number that the last of the options ``names`` has, as ``-n 8``, ``-n8`` or ``--ntasks=8``."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        for name in names:
            value = following if word == name else word.removeprefix(name).removeprefix("=")
            if word.startswith(name) and value.isdigit():
                found = int(value)
    return found


def _of_shell(words: list[str], folder: Path) -> Launch:
    """Parse the command of ``sh -c``; for a script, or several commands, raise an ``InputError`` that shows them."""
    plain = [word for word in words if not word.startswith("-")]
    own = plain[0].endswith(".sh") or len(plain) == 1
    given = not own and re.fullmatch(r"-[a-z]*c", words[words.index(plain[1]) - 1]) is not None
    name = plain[0] if own else plain[1]
    if not given and not (folder / name).is_file():
        raise InputError(f"{shlex.join(words)}: there is no such shell script; give the command that trains")
    text = plain[1] if given else (folder / name).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    commands = [each.strip() for line in lines if not line.startswith("#") for each in re.split(r"&&|;", line)]
    found = [each for each in commands if any(map(_starts_program, each.split()[:_BEFORE_PROGRAM]))]
    if given and len(found) == 1 and not set("$`|<>") & set(found[0]) and len(commands) == 1:
        return _parsed(shlex.split(found[0]), folder)
    what = "several commands of a shell" if given else f"{name} is a shell script"
    shown = "  or  ".join(found[-_SHOWN_COMMANDS:]) or "none was found"
    raise InputError(f"{what}: give only the command that trains, with all variables filled in: {shown}")


def _listed(devices: str) -> int | None:
    """Return how many GPUs a list such as that of ``CUDA_VISIBLE_DEVICES`` has, or None if it is empty."""
    return len([each for each in devices.split(",") if each.strip()]) or None


def _console_script(name: str) -> str | None:
    """Return the file of the installed command ``name`` (``litgpt``) if it is a Python program."""
    found = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))  # an environment not entered
    if found is None:
        return None
    with open(found, "rb") as file:
        first = file.readline(200)
    return found if first.startswith(b"#!") and b"python" in first else None


def _of_python(words: list[str]) -> Launch:
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "-c", "-"):
        place += 2 if words[place] in _VALUED else 1
    if place == len(words):
        raise InputError("python without a program: name a file or -m MODULE")
    if words[place] in ("-c", "-"):
        raise InputError(f"python {words[place]}: write the program to a file")
    if words[place] != "-m":
        return Launch(words[place], tuple(words[place + 1 :]))
    if place + 1 == len(words):
        raise InputError("python -m: name a module")
    module, rest = words[place + 1], words[place + 2 :]
    reader = _MODULES.get(module)
    return reader(rest) if reader is not None else Launch(module, tuple(rest), module=True)


def _of_old_launch(words: list[str]) -> Launch:
    parser = import_module("torch.distributed.run").get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    launch = _of_torchrun(words, parser)
    return launch if parser.parse_args(words).use_env else replace(launch, rank_option="--local-rank")


def _of_torchrun(words: list[str], parser: argparse.ArgumentParser | None = None) -> Launch:
    read = _read("torchrun", parser or import_module("torch.distributed.run").get_args_parser(), words)
    if read.no_python:
        raise InputError("torchrun --no-python: name a Python program")
    processes = {"auto": "", "gpu": ""}.get(str(read.nproc_per_node), str(read.nproc_per_node))
    if processes and not processes.isdigit():
        raise InputError(f"torchrun --nproc-per-node {processes}: expected a number of GPUs")
    nodes = str(read.nnodes).rpartition(":")[2]  # of elastic jobs, the most
    arguments = tuple(read.training_script_args)
    count = int(processes) if processes else None
    return Launch(read.training_script, arguments, read.module, count, int(nodes), launcher="torchrun")


def _of_accelerate(words: list[str]) -> Launch:
    if words[:1] != ["launch"]:
        raise InputError(f"accelerate {' '.join(words[:1])}: only `accelerate launch` starts a program")
    return _of_accelerate_launch(words[1:])


def _of_accelerate_launch(words: list[str]) -> Launch:
    if find_spec("accelerate") is None:
        raise InputError("accelerate launch: the package accelerate is not installed here; pip install accelerate")
    launch = import_module("accelerate.commands.launch")
    read = _read("accelerate launch", launch.launch_command_parser(), words)
    given = read.num_processes
    logging.disable(logging.WARNING)  # of defaults for the GPUs of this machine
    try:
        read, file, precision_of_file = launch._validate_launch_command(read)
        environment = _accelerate_environment(read, file, precision_of_file)
    except (ValueError, OSError) as error:
        raise InputError(f"accelerate launch: {error}") from None
    finally:
        logging.disable(logging.NOTSET)
    count = given or (file.num_processes if file is not None else None)
    nodes = read.num_machines or 1
    processes = count // nodes if count else None
    arguments = tuple(read.training_script_args)
    return Launch(read.training_script, arguments, read.module, processes, nodes, environment, "accelerate")


def _accelerate_environment(read: Any, file: Any, precision_of_file: bool) -> dict[str, str]:
    """Return what ``accelerate launch`` tells its processes; ``file``: its configuration, if there is one."""
    utilities = import_module("accelerate.utils.launch")
    read.num_processes = read.num_processes or 1
    read.num_machines, read.machine_rank = read.num_machines or 1, read.machine_rank or 0
    if read.use_deepspeed:
        fields = [*(file.deepspeed_config if file is not None else ()), *["mixed_precision"] * precision_of_file]
        read.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environment = utilities.prepare_deepspeed_cmd_env(read)
    elif read.multi_gpu or read.use_fsdp or read.num_processes > 1:
        environment = utilities.prepare_multi_gpu_env(read)
    else:
        _, environment = utilities.prepare_simple_launcher_cmd_env(read)
    own = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "FP8_")
    return {name: value for name, value in environment.items() if name.startswith(own)}


def _of_deepspeed(words: list[str]) -> Launch:
    parser = argparse.ArgumentParser(prog="deepspeed", add_help=False, exit_on_error=False)
    for name in ("--num_gpus", "--num_nodes"):
        parser.add_argument(name, type=int)
    for name in ("--hostfile", "--include", "--exclude", "--master_addr", "--master_port", "--launcher"):
        parser.add_argument(name)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    read = _read("deepspeed", parser, words)
    count, nodes, arguments = read.num_gpus, read.num_nodes, tuple(read.training_script_args)
    if read.include:  # as worker-0:0,1@worker-1:0,1
        places = read.include.split("@")
        count, nodes = count or _listed(places[0].partition(":")[2]), nodes or len(places)
    option = "" if read.no_local_rank else "--local_rank"
    return Launch(read.training_script, arguments, read.module, count, nodes, launcher="deepspeed", rank_option=option)


def _of_fabric(words: list[str]) -> Launch:
    if words[:1] != ["run"]:
        raise InputError(f"fabric {' '.join(words[:1])}: only `fabric run` starts a program")
    parser = argparse.ArgumentParser(prog="fabric run", add_help=False, exit_on_error=False)
    for name in ("--accelerator", "--strategy", "--precision", "--node-rank", "--main-address", "--main-port"):
        parser.add_argument(name)
    parser.add_argument("--devices", default="1")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    read = _read("fabric run", parser, words[1:])
    if not read.devices.isdigit():
        raise InputError(f"fabric run --devices {read.devices}: expected a number of GPUs")
    environment = {"LT_CLI_USED": "1", "LT_DEVICES": read.devices, "LT_NUM_NODES": str(read.num_nodes)}
    for name in ("accelerator", "strategy", "precision"):
        if getattr(read, name):
            environment[f"LT_{name.upper()}"] = getattr(read, name)
    arguments = tuple(read.training_script_args)
    return Launch(read.training_script, arguments, False, int(read.devices), read.num_nodes, environment, "fabric")


def _of_tune(words: list[str]) -> Launch:
    """Parse ``tune run [OPTIONS OF TORCHRUN] RECIPE --config CONFIG ...`` of torchtune, which knows both by name."""
    if words[:1] != ["run"]:
        raise InputError(f"tune {' '.join(words[:1])}: only `tune run` starts a program")
    if find_spec("torchtune") is None:
        raise InputError("tune run: the package torchtune is not installed here; pip install torchtune")
    launch = _of_torchrun(words[1:])
    alone = words[1:2] == [launch.program]
    place = Path(str(find_spec("torchtune").origin)).parent  # type: ignore[union-attr]
    recipes, configs = _torchtune_names(place / "_recipe_registry.py")
    arguments = list(launch.arguments)
    if "--config" not in arguments[:-1]:
        raise InputError("tune run: give --config")
    where = arguments.index("--config") + 1
    folder = place.parent / "recipes"
    if arguments[where] in configs:
        arguments[where] = str(folder / "configs" / configs[arguments[where]])
    known = launch.program in recipes
    program = str(folder / recipes[launch.program]) if known else launch.program.removesuffix(".py").replace("/", ".")
    processes = None if alone else launch.processes
    return Launch(program, tuple(arguments), not known, processes, launch.nodes, launcher="" if alone else "tune run")


def _torchtune_names(registry: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files of recipes and of configurations, by name, from torchtune's list of them."""
    spec = spec_from_file_location("torchtune_recipe_registry", registry)
    if spec is None or spec.loader is None or not registry.is_file():
        raise InputError("tune run: this torchtune has no list of recipes; give the recipe's file to torchrun")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where its data classes look for their names
    spec.loader.exec_module(module)
    recipes = module.get_all_recipes()
    files = {config.name: config.file_path for recipe in recipes for config in recipe.configs}
    return {recipe.name: recipe.file_path for recipe in recipes}, files


def _read(name: str, parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse a launcher's options; its complaints become ``InputError``."""

    def refuse(message: str) -> None:
        raise InputError(f"{name}: {message}")

    parser.error = refuse  # type: ignore[assignment,method-assign]
    try:
        return parser.parse_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise InputError(f"{name}: {error}") from None


Reader = Callable[[list[str]], Launch]
_LAUNCHERS: dict[str, Reader] = {
    "torchrun": _of_torchrun,
    "accelerate": _of_accelerate,
    "deepspeed": _of_deepspeed,
    "fabric": _of_fabric,
    "tune": _of_tune,
}
_MODULES: dict[str, Reader] = {
    "torch.distributed.run": _of_torchrun,
    "torch.distributed.launch": _of_old_launch,
    "accelerate.commands.launch": _of_accelerate_launch,
    "deepspeed.launcher.runner": _of_deepspeed,
}
