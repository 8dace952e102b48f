"""Stand-in for the package ``deepspeed``, whose engine needs a GPU: the names that programs import from it."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from costmodel.base.errors import ModelError
from e2e.capture.distributed.deepspeed_engine import DeepSpeedEngine, FusedAdam, initialize, unread_parts
from e2e.capture.distributed.zero import HostAdam, ZeroOptimizer
from e2e.capture.distributed.zero_parameters import ZeroParamStatus
from e2e.capture.launcher import Launch
from e2e.capture.recorder import Recorder

Note = Callable[[str], object]

VERSION = "0.19.0"
# Bytes of files in which the name of DeepSpeed is looked for.
LONGEST = 1 << 20


@contextmanager
def deepspeed_package(recorder: Recorder, named: bool, note: Note) -> Iterator[None]:
    """Context in which ``deepspeed`` is the stand-in. ``named``: libraries find it among the installed packages, as
    where the command names DeepSpeed.
    """

    def start(*args: Any, **kwargs: Any) -> Any:
        note("deepspeed cannot run without a GPU: stood in for, its engine by its configuration")
        engine, *others = initialize(recorder, *args, **kwargs)
        if parts := unread_parts(engine.config):
            note(f"DeepSpeed's {', '.join(parts)} are not followed: the step is that of the same configuration without")
        return engine, *others

    finder = _Finder(start)
    with ExitStack() as stack:
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        stack.callback(_forget)
        if named:
            for name, answer in (("version", VERSION), ("metadata", _metadata())):
                stack.enter_context(patch.object(importlib.metadata, name, _told(name, answer)))
        yield


def _forget() -> None:
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
        del sys.modules[name]


def _told(name: str, answer: Any) -> Callable[[str], Any]:
    ask = getattr(importlib.metadata, name)
    return lambda package: answer if package == "deepspeed" else ask(package)


def _metadata() -> Message:
    found = Message()
    found["Name"], found["Version"] = "deepspeed", VERSION
    return found


class _Module(ModuleType):
    """Module of the stand-in."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name} of DeepSpeed is not captured")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "deepspeed" and name not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = _NAMES[module.__name__]
        vars(module).update(names)
        if module.__name__ != "deepspeed":
            return
        vars(module)["initialize"] = self._start
        for name in _NAMES:
            if name != "deepspeed":
                importlib.import_module(name)


class Init:
    """``deepspeed.zero.Init``: modules are made without memory in any case."""

    def __init__(self, module: Any = None, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@contextmanager
def gathered_parameters(params: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Context in which the program uses parameters itself (``deepspeed.zero.GatheredParameters``)."""
    with ExitStack() as stack:
        for each in (params,) if isinstance(params, torch.Tensor) else params or ():
            if hasattr(each, "ds_parted"):
                stack.enter_context(each.ds_parted.gathered())
        yield


class Accelerator:
    """What ``get_accelerator()`` returns: ``torch.cuda`` by other names."""

    def device_name(self, index: int | None = None) -> str:
        """Name of a GPU."""
        return "cuda" if index is None else f"cuda:{index}"

    def current_device_name(self) -> str:
        """Name of the GPU of this rank."""
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        """Name of the backend of process groups."""
        return "nccl"

    def is_fp16_supported(self) -> bool:
        """Return true."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True for a tensor on the GPU."""
        return tensor.is_cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Start the process group unless it has been."""
    if not dist.is_initialized():
        dist.init_process_group(dist_backend or "nccl")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` without saving what it computes."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


def _refused(name: str) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ModelError(f"DeepSpeed's {name} is not captured; use ZeRO, or a pipeline of torch.distributed.pipelining")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


class RepeatingLoader:
    """Loader that begins again at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


class _Schedule(torch.optim.lr_scheduler.LambdaLR):
    """Any schedule: rates do not change the kernels."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _log(message: str, *args: Any, **kwargs: Any) -> None:
    print(message)


_ACCELERATOR = Accelerator()
_ZERO: Mapping[str, Any] = {
    "Init": Init,
    "GatheredParameters": gathered_parameters,
    "register_external_parameter": _ignore,
}
_OPTIMIZERS: Mapping[str, Any] = {"FusedAdam": FusedAdam, "DeepSpeedCPUAdam": HostAdam}
_SCHEDULE_NAMES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
_SCHEDULES: Mapping[str, Any] = {"VALID_LR_SCHEDULES": _SCHEDULE_NAMES, **dict.fromkeys(_SCHEDULE_NAMES, _Schedule)}
_UTILS: Mapping[str, Any] = {
    "logger": logging.getLogger("deepspeed"),
    "log_dist": _log,
    "RepeatingLoader": RepeatingLoader,
    "set_z3_leaf_modules": _ignore,
}
_NAMES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed": {
        "__version__": VERSION,
        "DeepSpeedEngine": DeepSpeedEngine,
        "PipelineEngine": _refused("PipelineEngine"),
        "init_distributed": init_distributed,
        "add_config_arguments": add_config_arguments,
        "get_accelerator": lambda: _ACCELERATOR,
    },
    "deepspeed.accelerator": {"get_accelerator": lambda: _ACCELERATOR},
    "deepspeed.checkpointing": {"checkpoint": checkpoint, "configure": _ignore, "is_configured": lambda: True},
    "deepspeed.comm": {
        **{name: value for name, value in vars(dist).items() if not name.startswith("_") and callable(value)},
        "init_distributed": init_distributed,
    },
    "deepspeed.ops": {},
    "deepspeed.ops.adam": _OPTIMIZERS,
    "deepspeed.pipe": {"PipelineModule": _refused("PipelineModule"), "LayerSpec": _refused("LayerSpec")},
    "deepspeed.runtime": {},
    "deepspeed.runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.utils": {"see_memory_usage": _ignore, "set_random_seed": torch.manual_seed},
    "deepspeed.runtime.zero": {"ZeroOptimizer": ZeroOptimizer},
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "ZeroParamStatus": ZeroParamStatus,
        "zero_wrapper_for_fp_tensor_constructor": lambda function, *args, **kwargs: function,
        "_orig_torch_arange": torch.arange,
    },
    "deepspeed.utils": _UTILS,
    "deepspeed.zero": _ZERO,
}


def names_deepspeed(launch: Launch) -> bool:
    """True if the program, its arguments, environment or a file named in them has DeepSpeed's name."""
    words = [launch.launcher, launch.program, *launch.arguments, *launch.environment, *launch.environment.values()]
    return any("deepspeed" in f"{word} {_text(word)}".lower() for word in words)


def _text(word: str) -> str:
    """Return the contents of the small file called ``word``, or nothing."""
    path = Path(word)
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and path.stat().st_size < LONGEST else ""
    except (OSError, ValueError):
        return ""
