"""Stand-ins for what a program asks of the machine with the GPUs and this machine lacks: ``nvidia-smi`` and NVML,
loggers that are not installed. (:mod:`e2e.capture.missing` has those for data and weights.)
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import opcode
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from e2e.capture.environment import uuid_of
from e2e.step.options import SeenGpu

# Takes a line for the report on what was made up.
Note = Callable[[str], None]

# Packages that only tell how a run goes, or how well.
LOGGERS = (
    "wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "clearml", "aim", "swanlab", "trackio",
    "dvclive", "codecarbon", "evaluate", "nltk", "rouge_score", "sacrebleu", "seqeval",
)  # fmt: skip
_SILENCE = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COMET_MODE": "disabled",
}
# Operation of Python that unpacks a number of names.
_UNPACK = opcode.opmap["UNPACK_SEQUENCE"]


class _SilentClass(type):
    """Class whose own methods, as in ``Task.current_task()``, say nothing either."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()


class Silent(metaclass=_SilentClass):
    """Object of a logger: whatever is asked of it, called or entered is another silent object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Silent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing, but where names are unpacked (``one, other = logger.pair()``) as many objects."""
        caller = sys._getframe(1)
        operation, count = caller.f_code.co_code[caller.f_lasti :][:2]
        return iter([Silent() for _ in range(count if operation == _UNPACK else 0)])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop the value."""

    def __getitem__(self, key: Any) -> Any:
        return Silent()

    def __bool__(self) -> bool:
        return False

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(self, other: Any) -> Any:
        return self

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__

    def __index__(self) -> int:
        return 1  # such as a number of entries to write at once


class _SilentModule(ModuleType):
    __path__: list[str] = []
    __version__ = "99.0"  # newer than whatever is asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Classes are derived from (`class Mine(SummaryWriter)`) and called alike.
        return Silent if name[:1].isupper() else Silent()

    def __bool__(self) -> bool:
        return False  # of a program that tests whether it has the logger, the way without


class _Loggers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of loggers that are not installed. It is asked last."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in LOGGERS and not name.startswith("torch.utils.tensorboard"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _SilentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


@contextmanager
def silent_loggers() -> Iterator[None]:
    """Context in which loggers say nothing, installed or not."""
    finder = _Loggers()
    first = importlib.util.find_spec("tensorboard") is None  # PyTorch's own module needs it
    sys.meta_path.append(finder)
    if first:
        sys.modules["torch.utils.tensorboard"] = _SilentModule("torch.utils.tensorboard")
    try:
        with patch.dict(os.environ, _SILENCE):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _SilentModule)]:
            del sys.modules[name]


@contextmanager
def driver_tools(gpu: SeenGpu, count: int, folder: Path) -> Iterator[None]:
    """Context in which ``nvidia-smi`` and NVML tell of ``count`` GPUs. ``folder``: place for the program."""
    facts = [_facts(gpu, number, count) for number in range(count)]
    program, answers = folder / "nvidia-smi", folder / "nvidia_smi.py"
    answers.write_text(f"FACTS = {facts!r}\n{_NVIDIA_SMI}", encoding="utf-8")
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -E -S '{answers}' \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    with patch.dict(os.environ, PATH=path), patch.dict(sys.modules, pynvml=_nvml(gpu, count)):
        yield


def _facts(gpu: SeenGpu, number: int, count: int) -> dict[str, tuple[str, str]]:
    """Return what ``nvidia-smi --query-gpu`` can be asked of a GPU: values with their units."""
    total = gpu.memory_bytes >> 20
    return {
        "index": (str(number), ""),
        "count": (str(count), ""),
        "name": (gpu.name, ""),
        "gpu_name": (gpu.name, ""),
        "uuid": (f"GPU-{uuid_of(number)}", ""),
        "gpu_uuid": (f"GPU-{uuid_of(number)}", ""),
        "driver_version": ("570.86.15", ""),
        "compute_cap": (".".join(map(str, gpu.capability)), ""),
        "memory.total": (str(total), " MiB"),
        "memory.used": ("0", " MiB"),
        "memory.free": (str(total), " MiB"),
        "utilization.gpu": ("100", " %"),
        "utilization.memory": ("50", " %"),
        "temperature.gpu": ("50", ""),
        "power.draw": ("300.00", " W"),
        "power.limit": ("700.00", " W"),
        "clocks.sm": ("1500", " MHz"),
        "clocks.mem": ("2000", " MHz"),
    }


# Program that answers as nvidia-smi does, from FACTS; a library is not imported.
_NVIDIA_SMI = """
import sys
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
asked = given.get("--query-gpu", "")
form = given.get("--format", "csv").split(",")
chosen = given.get("--id", "")
if "-i" in sys.argv:
    chosen = sys.argv[sys.argv.index("-i") + 1]
rows = [row for row in FACTS if not chosen or row["index"][0] in chosen.split(",")]
if any(word.startswith("--query-") and not word.startswith("--query-gpu") for word in sys.argv[1:]):
    pass
elif asked:
    names = [name.strip() for name in asked.split(",")]
    if "noheader" not in form:
        units = {name: rows[0].get(name, ("", ""))[1].strip() for name in names} if rows else {}
        print(", ".join(name + (f" [{units[name]}]" if units.get(name) else "") for name in names))
    for row in rows:
        values = [row.get(name, ("[N/A]", "")) for name in names]
        print(", ".join(value + ("" if "nounits" in form else unit) for value, unit in values))
elif "-L" in sys.argv or "--list-gpus" in sys.argv:
    for row in rows:
        print(f"GPU {row['index'][0]}: {row['name'][0]} (UUID: {row['uuid'][0]})")
else:
    print("| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8 |")
    for row in rows:
        print(f"| {row['index'][0]}  {row['name'][0]} |  0MiB / {row['memory.total'][0]}MiB | 100% Default |")
"""


def _nvml(gpu: SeenGpu, count: int) -> ModuleType:
    module = _SilentModule("pynvml")

    class Memory:
        total, free, used = gpu.memory_bytes, gpu.memory_bytes, 0

    class Utilization:
        gpu, memory = 100, 50

    class NVMLError(Exception):
        """Error of the driver, which never occurs."""

    answers: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: gpu.name,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{uuid_of(handle)}",
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: Memory(),
        "nvmlDeviceGetUtilizationRates": lambda handle: Utilization(),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpu.capability,
        "nvmlDeviceGetPowerUsage": lambda handle: 300_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 0,
        "nvmlDeviceGetTemperature": lambda handle, sensor=0: 50,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
    }
    for name, value in answers.items():
        setattr(module, name, value)
    return module
