"""Stand-ins for what a program asks of the machine with the GPUs and this machine lacks: ``nvidia-smi`` and NVML,
loggers that are not installed, files of data.

Loggers are always silent. Data that are missing are made up only if that was asked for (``--data synthetic``): numbers
of the right type, as many as needed. Whatever was made up is noted, for the report.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from e2e.step.options import SeenGpu

Note = Callable[[str], None]

# Packages that only tell how a run goes.
LOGGERS = (
    "wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "clearml", "aim", "swanlab", "trackio",
    "dvclive", "codecarbon",
)  # fmt: skip
_SILENCE = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COMET_MODE": "disabled",
}
# Elements of a file that is made up: as many as no loop over batches of the first steps gets through.
MADE_UP = 1 << 28


class Silent:
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
        return iter(())

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop the value."""

    def __getitem__(self, key: Any) -> Any:
        return Silent()

    def __bool__(self) -> bool:
        return False


class _SilentModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Classes are derived from (`class Mine(SummaryWriter)`) and called alike.
        return Silent if name[:1].isupper() else Silent()


class _Loggers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of loggers that are not installed. It is asked last."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in LOGGERS and name != "torch.utils.tensorboard":
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
    program = folder / "nvidia-smi"
    lines = [f"GPU {number}: {gpu.name} (UUID: GPU-{number:08x})" for number in range(count)]
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n", encoding="utf-8")
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    with patch.dict(os.environ, PATH=path), patch.dict(sys.modules, pynvml=_nvml(gpu, count)):
        yield


def _nvml(gpu: SeenGpu, count: int) -> ModuleType:
    module = _SilentModule("pynvml")

    class Memory:
        total, free, used = gpu.memory_bytes, gpu.memory_bytes, 0

    class NVMLError(Exception):
        """Error of the driver, which never occurs."""

    answers: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetName": lambda handle: gpu.name,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: Memory(),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpu.capability,
        "nvmlDeviceGetPowerUsage": lambda handle: 0,
        "nvmlDeviceGetTemperature": lambda handle, sensor=0: 0,
        "NVMLError": NVMLError,
    }
    for name, value in answers.items():
        setattr(module, name, value)
    return module


@contextmanager
def made_up_data(note: Note) -> Iterator[None]:
    """Context in which files of data that are not there are made up: arrays of NumPy and images of torchvision."""
    with ExitStack() as stack:
        numpy = import_module("numpy")
        stack.enter_context(patch.object(numpy, "memmap", _memory_map(numpy, note)))
        stack.enter_context(patch.object(numpy, "fromfile", _from_file(numpy, note)))
        stack.enter_context(patch.object(numpy, "load", _load(numpy, note)))
        if importlib.util.find_spec("torchvision") is not None:
            for target, name, value in _image_datasets(note):
                stack.enter_context(patch.object(target, name, value))
        yield


def _zeros(numpy: Any, file: Any, dtype: Any, count: int, note: Note) -> Any:
    note(f"{os.fspath(file)} is not there: {count:,} zeros of {numpy.dtype(dtype).name}")
    return numpy.zeros(count, dtype)  # takes memory where it is written only


def _is_missing(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike)) and not os.path.exists(file)


def _memory_map(numpy: Any, note: Note) -> Any:
    class memmap(numpy.memmap):  # type: ignore[misc,name-defined]
        """Array in a file, or zeros where there is no file to be read."""

        def __new__(cls, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            if mode in ("r", "c", "readonly", "copyonwrite") and _is_missing(filename):
                shape = kwargs.get("shape", args[1] if len(args) > 1 else None)
                count = MADE_UP if shape is None else int(numpy.prod(shape))
                zeros = _zeros(numpy, filename, dtype, count, note)
                return zeros if shape is None else zeros.reshape(shape)
            return numpy.ndarray.view(_original(filename, dtype, mode, *args, **kwargs), cls)

    _original = numpy.memmap
    return memmap


def _from_file(numpy: Any, note: Note) -> Any:
    original = numpy.fromfile

    def fromfile(file: Any, dtype: Any = float, count: int = -1, *args: Any, **kwargs: Any) -> Any:
        if _is_missing(file):
            return _zeros(numpy, file, dtype, MADE_UP if count < 0 else count, note)
        return original(file, dtype, count, *args, **kwargs)

    return fromfile


def _load(numpy: Any, note: Note) -> Any:
    original = numpy.load

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_missing(file) and str(file).endswith(".npy"):
            return _zeros(numpy, file, numpy.uint16, MADE_UP, note)
        return original(file, *args, **kwargs)

    return load


@contextmanager
def torchvision_operators() -> Iterator[None]:
    """Context in which a torchvision built for CUDA can be imported beside a PyTorch without it: its library does not
    load there, and two of its operators are expected all the same.
    """
    spec = importlib.util.find_spec("torchvision")
    with ExitStack() as stack:
        if spec is not None and spec.origin is not None and not _loads(Path(spec.origin).parent.glob("_C*.so")):
            library = stack.enter_context(torch.library._scoped_library("torchvision", "DEF"))
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield


def _loads(libraries: Iterable[Path]) -> bool:
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return True


# torchvision's data: mode and size of an image, classes, images of the training part.
_IMAGES: dict[str, tuple[str, tuple[int, int], int, int]] = {
    "MNIST": ("L", (28, 28), 10, 60_000),
    "FashionMNIST": ("L", (28, 28), 10, 60_000),
    "KMNIST": ("L", (28, 28), 10, 60_000),
    "EMNIST": ("L", (28, 28), 47, 112_800),
    "CIFAR10": ("RGB", (32, 32), 10, 50_000),
    "CIFAR100": ("RGB", (32, 32), 100, 50_000),
    "SVHN": ("RGB", (32, 32), 10, 73_257),
    "STL10": ("RGB", (96, 96), 10, 5_000),
    "ImageFolder": ("RGB", (500, 375), 1_000, 1_281_167),
    "ImageNet": ("RGB", (500, 375), 1_000, 1_281_167),
    "Flowers102": ("RGB", (500, 667), 102, 1_020),
    "OxfordIIITPet": ("RGB", (500, 375), 37, 3_680),
    "Food101": ("RGB", (512, 512), 101, 75_750),
    "CelebA": ("RGB", (178, 218), 10_177, 162_770),
    "LSUN": ("RGB", (256, 256), 10, 3_033_042),
}


def _image_datasets(note: Note) -> Iterator[tuple[Any, str, Any]]:
    """Yield classes of images that are made up if their folder is not there; transformations run on them as on real
    ones.
    """
    datasets = import_module("torchvision.datasets")
    for name, (mode, size, classes, length) in _IMAGES.items():
        original = getattr(datasets, name, None)
        if original is not None:
            yield datasets, name, _pictures(original, name, (mode, size, classes, length), note)


def _pictures(original: Any, name: str, form: tuple[str, tuple[int, int], int, int], note: Note) -> Any:
    mode, size, classes, length = form

    class Pictures(original):  # type: ignore[misc]
        def __init__(self, root: Any, *args: Any, **kwargs: Any) -> None:
            self.made_up = _is_missing(root) or not os.listdir(root)
            if not self.made_up:
                super().__init__(root, *args, **kwargs)
                return
            note(f"torchvision's {name} is not in {root}: {length:,} empty images of {size[0]}x{size[1]}")
            names = ("transform", "target_transform") if name in ("ImageFolder",) else ()
            given = dict(zip(names, args, strict=False)) | kwargs
            self.root, self.transform = root, given.get("transform")
            self.target_transform = given.get("target_transform")
            self.classes = [str(number) for number in range(classes)]
            self.class_to_idx = {each: number for number, each in enumerate(self.classes)}

        def __len__(self) -> int:
            return length if self.made_up else super().__len__()

        def __getitem__(self, place: int) -> Any:
            if not self.made_up:
                return super().__getitem__(place)
            image, target = import_module("PIL.Image").new(mode, size), place % classes
            if self.transform is not None:
                image = self.transform(image)
            return image, target if self.target_transform is None else self.target_transform(target)

    Pictures.__name__ = Pictures.__qualname__ = name
    return Pictures


def missing_file(error: BaseException, frames: Sequence[Any]) -> str | None:
    """Return what to do about a file that a program opens and that is not there, or None for other errors."""
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return None
    place = next((f"{frame.filename}:{frame.lineno}: " for frame in reversed(frames) if _is_users(frame.filename)), "")
    return (
        f"{place}opens {error.filename}, which is not here; give --data synthetic, where made-up data will do, or put "
        "a file of that form there, as small as the program takes it"
    )


def _is_users(file: str) -> bool:
    return "site-packages" not in file and not file.startswith(
        ("<", str(Path(torch.__file__).parent), str(Path(__file__).parent))
    )
