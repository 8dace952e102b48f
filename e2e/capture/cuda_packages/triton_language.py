"""Triton on a machine without a GPU: launches of a program's kernels, a driver that tells of the GPU, and, where Triton
is not installed, a stand-in whose kernels are never compiled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

Launched = Callable[[str, list[torch.Tensor], bool], None]


def ignore(name: str, tensors: list[torch.Tensor], multiplies: bool) -> None:
    """Ignore a launch."""


# What is told of launches of the stand-in: name, tensors, True if the kernel multiplies matrices.
launched: Launched = ignore


class Kernel:
    """Kernel of the stand-in, launched as ``kernel[grid](...)``."""

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn = fn
        self.src = str(getattr(fn, "src", ""))
        with suppress(OSError, TypeError):
            self.src = self.src or inspect.getsource(fn)
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.arg_names = getattr(fn, "arg_names", None) or list(inspect.signature(fn).parameters)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self.run, grid=grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a Triton kernel is launched on a grid: kernel[grid](...)")

    def run(self, *args: Any, grid: Any = None, warmup: Any = None, **kwargs: Any) -> None:
        """Tell of a launch."""
        launched(self.__name__, tensors_of(args, kwargs), multiplies(self))


class Tuned(Kernel):
    """Kernel with configurations or heuristics, which launches another one."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.configs: list[Any] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel itself."""
        self.fn.run(*args, **kwargs)


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a launch."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


_PRODUCT = re.compile(r"\b(?:tl|triton\.language|language|gl)\.dot(?:_scaled)?\(|\bdot\(")


def multiplies(kernel: Any, seen: frozenset[int] = frozenset()) -> bool:
    """True if the source of a kernel, or of one that it calls, multiplies matrices."""
    if _PRODUCT.search(str(getattr(kernel, "src", ""))):
        return True
    function = getattr(kernel, "fn", None)
    code = getattr(function, "__code__", None)
    if code is None or len(seen) > 100:
        return False
    called = (getattr(function, "__globals__", {}).get(name) for name in code.co_names)
    kernels = [each for each in called if hasattr(each, "src") and hasattr(each, "fn") and id(each) not in seen]
    return any(multiplies(each, seen | {id(kernel)}) for each in kernels)


def jit(fn: Any = None, **options: Any) -> Any:
    """Make a function a kernel."""
    return Kernel(fn) if fn is not None else Kernel


def tuned(*args: Any, **options: Any) -> Any:
    """Make a kernel one with configurations or heuristics."""
    return Tuned


class Config:
    """Configuration of a kernel."""

    def __init__(self, kwargs: Any = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        self.__dict__.update({"num_warps": 4, "num_stages": 3, "num_ctas": 1, **options})


class constexpr:  # the language's own name
    """Constant of a kernel."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __class_getitem__(cls, kind: Any) -> Any:
        return cls


def cdiv(x: int, y: int) -> int:
    """Divide, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below ``n``."""
    return 1 << (max(int(n), 1) - 1).bit_length()


class Driver:
    """Driver that tells of the GPU of ``torch.cuda``."""

    @property
    def utils(self) -> Any:
        """Questions to the driver."""
        return SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, device: Any = 0) -> dict[str, int]:
        found = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_multiprocessor,
            "max_num_regs": 65536,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": 32,
            "sm_clock_rate": 1_500_000,
            "mem_clock_rate": 1_500_000,
            "mem_bus_width": 5120,
        }

    def get_current_target(self) -> Any:
        """Return the architecture."""
        major, minor = torch.cuda.get_device_capability()
        return SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)

    def get_current_device(self) -> int:
        """Return the number of the GPU."""
        return torch.cuda.current_device()

    def get_active_torch_device(self) -> torch.device:
        """Return the GPU."""
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        """Return PyTorch's interface of the GPU."""
        return torch.cuda

    def get_device_capability(self, device: Any = None) -> Any:
        """Return the compute capability."""
        return torch.cuda.get_device_capability()

    def get_current_stream(self, device: Any = None) -> int:
        """Return the default stream."""
        return 0

    def get_benchmarker(self) -> Any:
        """Return a function that would measure a kernel."""
        return lambda call, *_, **__: [1.0, 1.0, 1.0]

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return nothing to clear."""
        return None

    def map_python_to_cpp_type(self, name: str) -> str:
        """Return the type itself."""
        return name


DRIVER = Driver()
_LANGUAGE: dict[str, Any] = {"constexpr": constexpr, "cdiv": cdiv}
_TYPES = {"Kernel": Kernel, "JITFunction": Kernel, "Autotuner": Tuned, "Heuristics": Tuned, "Config": Config}
# Other names of these modules are there too, and do nothing: bodies of kernels never run.
MODULES: dict[str, dict[str, Any]] = {
    "triton": {
        "jit": jit,
        "autotune": tuned,
        "heuristics": tuned,
        "Config": Config,
        "JITFunction": Kernel,
        "cdiv": cdiv,
        "next_power_of_2": next_power_of_2,
    },
    "triton.language": _LANGUAGE,
    "triton.runtime": {"driver": SimpleNamespace(active=DRIVER), "JITFunction": Kernel, "Config": Config},
    "triton.runtime.jit": _TYPES,
    "triton.runtime.autotuner": _TYPES,
    "triton.testing": {"do_bench": lambda *_, **__: 1.0},
}
