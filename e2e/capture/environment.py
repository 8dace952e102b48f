"""GPU pretended during a capture: patches that make PyTorch behave as if there were one, with streams and events.

Every patch replaces a name in a Python module and is undone on exit: outer functions of PyTorch do not hide the
functions that they call; meta parameters count as CUDA parameters in the selection of foreach and fused optimizers;
``torch.cuda`` reports a device, with the properties given by the caller and no memory in use; ``torch.inference_mode``
leaves operators to autograd, which selects those that run.

Scripts create, enter and wait for streams and events, and the calls are recorded. Streams are numbered in the order of
their creation; 0 is the default stream. A call that only affects order (``cudaEventRecord``, ``cudaStreamWaitEvent``
...) becomes a record named like the runtime call, with stream and event numbers in its attributes; :mod:`e2e.lowering`
turns it into an action of the host.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from costmodel.base.errors import ModelError
from e2e.capture.known_values import know, known
from e2e.capture.script_errors import OtherGpusError
from e2e.step.options import SeenGpu

# An overridden function hides those that it calls: for ``backward`` that would be a recomputed forward pass.
OUTER_MODULES = (torch.nn.functional, torch._tensor, torch.functional, torch.autograd)
SWITCHES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def pretend_gpu(synchronized: Callable[[], None], gpu: SeenGpu, memory: MemoryInUse | None = None) -> Iterator[None]:
    """Context in which scripts find ``gpu`` with ``memory`` in use. ``synchronized`` is called when a script waits for
    it.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # the caller's mode
            stack.enter_context(torch.inference_mode(False))
        for module in OUTER_MODULES:
            for switch in SWITCHES:
                if hasattr(module, switch):
                    stack.enter_context(patch.object(module, switch, _overridden))
        for target, name, value in (
            *_optimizer_patches(), *_cuda_patches(synchronized, gpu), *_inference_patches(),
            *_memory_patches(memory or MemoryInUse(), gpu.memory_bytes),
        ):  # fmt: skip
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(copyreg.dispatch_table, {_Device: _named}))
        yield


def _overridden(*args: Any) -> bool:
    """True for what stands for a tensor and is none, such as a value of ``torch.fx``; modes are not asked here."""
    given = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return any(not isinstance(each, torch.Tensor) and hasattr(type(each), "__torch_function__") for each in given)


class _WithoutGradients:
    """``torch.inference_mode`` in a capture: gradients are off and the script sees the mode as on.

    In PyTorch's own mode the operators below autograd are composite ones (``aten::linear``, ``aten::batch_norm``),
    since their kernels have not been selected yet; kernels are those of ``torch.no_grad``.
    """

    enabled: ContextVar[bool] = ContextVar("the script is in inference mode", default=False)

    def __init__(self, enabled: bool) -> None:
        self._inside = enabled

    def __enter__(self) -> None:
        self._before = self.enabled.get(), torch.is_grad_enabled()
        self._set(self._inside, not self._inside)

    def __exit__(self, *error: object) -> None:
        self._set(*self._before)

    def _set(self, inference: bool, gradients: bool) -> None:
        self.enabled.set(inference)
        torch._C._set_grad_enabled(gradients)


def _inference_patches() -> list[tuple[Any, str, Any]]:
    return [
        (torch._C, "_InferenceMode", _WithoutGradients),
        (torch, "is_inference_mode_enabled", _WithoutGradients.enabled.get),
        (torch.Tensor, "is_inference", lambda tensor: _WithoutGradients.enabled.get()),
    ]


def _optimizer_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches that allow foreach and fused forms for meta parameters, as for CUDA ones, where foreach is
    PyTorch's default.
    """
    base = import_module("torch.optim.optimizer")  # torch.optim hides its submodules
    patches: list[tuple[Any, str, Any]] = [
        (base, "_get_foreach_kernels_supported_devices", lambda: ["meta", "cuda"]),
        (base, "_get_fused_kernels_supported_devices", lambda: ["meta", "cuda"]),
    ]
    shared = import_module("torch.utils._foreach_utils")
    patches.append((shared, "_get_foreach_kernels_supported_devices", lambda: ["meta", "cuda"]))
    for name in ("adam", "sgd", "adagrad"):
        module = import_module(f"torch.optim.{name}")
        patches.append((module, "_device_dtype_check_for_fused", lambda param, cuda_unsupported=False: None))
    for name in [each for each in sys.modules if each.startswith("torch.optim.")]:
        if hasattr(sys.modules[name], _CAPTURABLE):
            patches.append((sys.modules[name], _CAPTURABLE, lambda supports_xla=True: ["meta", "cuda"]))
    return patches


# Name of the supported-device query of optimizers whose steps can be in a CUDA graph (``capturable=True``).
_CAPTURABLE = "_get_capturable_supported_devices"


class _Generators:
    """Generators of random numbers of any number of GPUs."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return torch.cuda.device_count()

    def __getitem__(self, number: int) -> torch.Generator:
        return self._made.setdefault(number, torch.Generator("cpu"))


def _random_state(device: Any = None) -> torch.Tensor:
    number = device if isinstance(device, int) else torch.device(device or "cuda").index
    return torch.cuda.default_generators[number or 0].get_state()


# Random numbers of GPUs have no values here; their states are those of a generator of the host.
_RANDOM: dict[str, Any] = {
    **{
        # One function for each name: PyTorch's compiler tells them apart.
        name: lambda *args, **kwargs: None
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
    },
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state(number) for number in range(torch.cuda.device_count())],
    "initial_seed": lambda: 0,
}


def _properties(gpu: SeenGpu) -> SimpleNamespace:
    """Return the properties as ``torch.cuda.get_device_properties`` does."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=164 << 10,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=False,
        is_multi_gpu_board=False,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        shared_memory_per_block_optin=163 << 10,
        gcnArchName=f"sm_{major}{minor}",
        uuid=uuid_of(0),
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def uuid_of(number: int) -> str:
    """Return the name of a GPU in the form of the driver's."""
    return f"{number:08x}-0000-0000-0000-000000000000"


def _cuda_patches(synchronized: Callable[[], None], gpu: SeenGpu) -> list[tuple[Any, str, Any]]:
    return [
        *_checkpoint_patches(),
        # The meta device means autocast of the GPU.
        (torch, "get_autocast_dtype", _of_gpu(torch.get_autocast_dtype)),
        (torch, "is_autocast_enabled", _of_gpu(torch.is_autocast_enabled)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "default_generators", _Generators()),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "synchronize", lambda device=None: synchronized()),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "get_device_properties", lambda device=None: _properties(gpu)),
        (torch.cuda, "get_device_name", lambda device=None: gpu.name),
        (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        *_default_device_patches(),
        (torch, "Generator", _Generator),
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "get_arch_list", lambda: ["sm_{}{}".format(*gpu.capability)]),
        (torch.cuda, "can_device_access_peer", lambda device, peer: True),
        (torch.cuda, "ipc_collect", lambda: None),
        *_debug_patches(),
        *((torch.cuda, name, lambda device=None, value=value: value) for name, value in _SENSORS.items()),
        (torch.version, "cuda", "12.8"),
        (torch.backends.cudnn, "version", lambda: 91002),
        *((module, name, value) for module in (torch.cuda, torch.cuda.random) for name, value in _RANDOM.items()),
        *((torch.cuda.nvtx, name, lambda *args, **kwargs: 0) for name in _MARKS),
        # Classes stay classes, since libraries use them in annotations (``CUDAGraph | None``) and in ``isinstance``.
        *((torch.cuda, name, _RefusedGraph) for name in ("CUDAGraph", "graph")),
        (torch.cuda, "make_graphed_callables", _refuse_graphs),
        (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        *_data_parallel_patches(),
        *_accelerator_patches(),
        # Called only by recurrent layers, which would otherwise flatten their weights once.
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        # There is no memory to pin, and the source of data does not matter.
        (torch.Tensor, "pin_memory", lambda self, device=None: self),
        (torch.Tensor, "share_memory_", _shared(torch.Tensor.share_memory_)),
        (torch.Tensor, "_make_wrapper_subclass", _held_on_meta(torch.Tensor._make_wrapper_subclass)),
        (torch.nn.init, "_no_grad_trunc_normal_", _drawn_once(torch.nn.init._no_grad_trunc_normal_)),
        (torch.Tensor, "__deepcopy__", _copied(torch.Tensor.__deepcopy__)),
        (torch.Tensor, "__format__", _formatted),
        (torch.Tensor, "__repr__", _represented(torch.Tensor.__repr__)),
        (torch.utils.data.RandomSampler, "__iter__", lambda self: iter(range(self.num_samples))),
        # Device numbers, as in `model.to(rank)` and `torch.device(rank)`, mean GPUs.
        (torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to)),
        (torch, "device", NumberedDevice),
    ]


def _drawn_once(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``draw`` of a truncated normal distribution without its repetition until every value is inside: values on
    the GPU are not known, and a sharded tensor asks all ranks for them.
    """

    @wraps(draw)
    def drawn(tensor: torch.Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_cuda:
            return draw(tensor, mean, std, *args, **kwargs)
        with torch.no_grad():
            return tensor.normal_(mean, std)

    return drawn


def _debug_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches of the mode in which PyTorch warns of synchronisations, which has no effect here."""
    modes = {"default": 0, "warn": 1, "error": 2}
    chosen = [0]

    def choose(debug_mode: int | str) -> None:
        chosen[0] = modes[debug_mode] if isinstance(debug_mode, str) else debug_mode

    return [
        (torch.cuda, "set_sync_debug_mode", choose),
        (torch.cuda, "get_sync_debug_mode", lambda: chosen[0]),
    ]


def _checkpoint_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches of checkpoints.

    A recomputed forward pass restores the autocast state of this device type; its saved tensors are compared with those
    of the first pass by device, which is read inside operators and outside.
    """
    checkpoint = import_module("torch.utils.checkpoint")
    extract = checkpoint._default_meta_extractor

    def described(tensor: torch.Tensor) -> dict[str, Any]:
        with torch._C.DisableTorchFunction():
            return extract(tensor)  # type: ignore[no-any-return]

    checks = {**checkpoint._allowed_determinism_checks_to_fns, checkpoint._DEFAULT_DETERMINISM_MODE: described}
    return [
        (checkpoint, "_infer_device_type", lambda *args: "cuda"),
        (checkpoint, "_allowed_determinism_checks_to_fns", checks),
    ]


def _shared(share: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor if tensor.is_cuda else share(tensor)  # processes share the memory of the GPU as it is


def _held_on_meta(make: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    """Return ``make``, by which a tensor that holds others (torchao's of 8 bits) is made on the device that they seem
    to be on.
    """

    def held(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value

    def made(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.get("device")
        kwargs |= {} if given is None else {"device": torch.device(given)}
        return make(cls, *map(held, args), **{name: held(value) for name, value in kwargs.items()})

    return staticmethod(made)


def _copied(copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a ``deepcopy`` of tensors whose result has the known values too."""

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        result, values = copy(tensor, memo), known(tensor)
        if values is not None:
            with torch._C.DisableTorchFunction():  # the place of ``result`` is the real one
                know(result, values)
        return result

    return copied


def _formatted(tensor: torch.Tensor, form: str) -> str:
    """Format a number on the GPU, as in ``f"{loss:.3f}"``, by reading it as ``loss.item()`` does."""
    single = tensor.dim() == 0 and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return format(tensor.item(), form) if single else object.__format__(tensor, form)


def _represented(represent: Callable[..., str]) -> Callable[..., str]:
    """Return a ``repr`` of tensors that waits for a number on the GPU and shows it; of more it shows the size."""

    def shown(tensor: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if not tensor.is_cuda or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return represent(tensor, tensor_contents=tensor_contents)
        if tensor.numel() == 1:
            return f"tensor({tensor.item()}, device='cuda:0')"
        return f"tensor(..., device='cuda:0', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    return shown


def _of_gpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *device: ask(*("cuda" if each == "meta" else each for each in device))


# What the driver's sensors say of a GPU at work: per cent, watts, degrees, MHz.
_SENSORS = {"utilization": 100, "memory_usage": 50, "power_draw": 300_000, "temperature": 50, "clock_rate": 1_500}
_MEMORY_RESETS = (
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached",
)  # fmt: skip


@dataclass
class MemoryInUse:
    """Memory of the tensors on the GPU that were used so far, in bytes, and the most there has been."""

    allocated: int = 0
    peak: int = 0
    # Most since the cache was emptied.
    reserved: int = 0

    def change(self, size: int) -> None:
        """Allocate ``size`` bytes, or free them if it is negative."""
        self.allocated += size
        self.peak, self.reserved = max(self.peak, self.allocated), max(self.reserved, self.allocated)

    def reset(self) -> None:
        """Forget the most there has been."""
        self.peak = self.allocated

    def empty_cache(self) -> None:
        """Return what is not allocated."""
        self.reserved = self.allocated

    def statistics(self) -> _Statistics:
        """Return the statistics of the allocator that follow from it; others are zero."""
        sizes = {"allocated": (self.allocated, self.peak), "reserved": (self.reserved, max(self.reserved, self.peak))}
        return _Statistics(
            {
                f"{name}_bytes.all.{kind}": size
                for name, both in sizes.items()
                for kind, size in zip(("current", "peak"), both, strict=True)
            }
        )


class _Statistics(dict):  # type: ignore[type-arg]
    def __missing__(self, key: str) -> int:
        return 0

    def get(self, key: Any, default: Any = 0) -> Any:
        return self[key]


def _memory_patches(memory: MemoryInUse, capacity: int) -> Iterator[tuple[Any, str, Any]]:
    questions = {
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: max(memory.reserved, memory.peak),
        "memory_stats": lambda device=None: memory.statistics(),
        "empty_cache": memory.empty_cache,
        **dict.fromkeys(_MEMORY_RESETS, lambda device=None: memory.reset()),
    }
    for owner in (torch.cuda, torch.accelerator):
        yield from ((owner, name, value) for name, value in questions.items() if hasattr(owner, name))
    yield torch.cuda, "mem_get_info", lambda device=None: (max(capacity - memory.reserved, 0), capacity)
    yield torch.cuda, "set_per_process_memory_fraction", lambda *args, **kwargs: None
    yield torch.cuda, "memory_summary", lambda device=None, abbreviated=False: ""
    yield torch.cuda, "memory_snapshot", lambda mempool_id=None: []
    for name in ("_record_memory_history", "_dump_snapshot"):
        yield torch.cuda.memory, name, lambda *args, **kwargs: None


def _default_device_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches by which the GPU is a default device (``torch.set_default_device``, ``with device:``), and by
    which old programs name its tensors (``torch.cuda.FloatTensor``).
    """
    context = import_module("torch.utils._device").DeviceContext
    made, default, of_type = context.__init__, torch.get_default_device, torch.Tensor.type

    def construct(self: Any, device: Any) -> None:
        made(self, "meta" if torch.device(device).type == "cuda" else device)

    def get_default_device() -> torch.device:
        found = default()
        return torch.device("cuda", torch.cuda.current_device()) if found.type == "meta" else found

    def as_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch.cuda, dtype.rpartition(".")[2])
        if isinstance(dtype, TensorType):
            return self.to(torch.device("cuda"), dtype.dtype)
        found = of_type(self, dtype, *args, **kwargs)
        return found.replace("torch.meta.", "torch.cuda.") if isinstance(found, str) else found

    def set_default_tensor_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        number = _TENSOR_TYPES[name.rpartition(".")[2]]
        torch.set_default_dtype(number)
        torch.set_default_device("cuda" if "cuda" in name or isinstance(kind, TensorType) else "cpu")

    yield context, "__init__", construct
    yield torch, "get_default_device", get_default_device
    yield torch.Tensor, "type", as_type
    yield torch, "set_default_tensor_type", set_default_tensor_type
    for name, dtype in _TENSOR_TYPES.items():
        yield torch.cuda, name, TensorType(name, dtype)


_TENSOR_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32,
    "ShortTensor": torch.int16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "BoolTensor": torch.bool,
}  # fmt: skip


class TensorType:
    """Replacement of ``torch.cuda.FloatTensor`` and the like, which make tensors on the GPU."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.__name__, self.dtype = f"torch.cuda.{name}", dtype

    def __call__(self, *args: Any) -> torch.Tensor:
        """Return a tensor of this size, or with these values."""
        if all(is_device_number(each) for each in args) or (len(args) == 1 and isinstance(args[0], torch.Size)):
            return torch.empty(*args, dtype=self.dtype, device="cuda")
        return torch.as_tensor(args[0], dtype=self.dtype).to("cuda")

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is self.dtype


class _GeneratorKind(type(torch.Generator)):  # type: ignore[misc]
    """Kind of :class:`_Generator`: generators of PyTorch itself are of that class too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _HostGenerator)


_HostGenerator = torch.Generator


class _Generator(torch.Generator, metaclass=_GeneratorKind):
    """Replacement of ``torch.Generator``; that of the GPU is one of the host, which has the same interface."""

    def __new__(cls, device: Any = "cpu") -> Any:
        place = torch.device("cuda", device) if is_device_number(device) else torch.device(device)
        if place.type not in ("cuda", "meta"):
            return _HostGenerator(place)
        made = _HostGenerator.__new__(cls)
        made._place = torch.device("cuda", place.index or 0)
        return made

    @property
    def device(self) -> torch.device:
        """Device that the program has named."""
        return self._place  # type: ignore[no-any-return]

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        made = _Generator("cuda")
        made.set_state(self.get_state())
        return made


_MARKS = ("range_push", "range_pop", "range_start", "range_end", "mark")


def _refuse_graphs(*args: Any, **kwargs: Any) -> Any:
    raise ModelError("CUDA graphs of a script are not captured; let its step run as it is and give --cuda-graph")


class _RefusedGraph:
    """Replacement of ``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``: may be named, not created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_graphs()


def _data_parallel_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches of ``nn.DataParallel``, which on one GPU only moves inputs there."""

    def construct(self: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_ids and len(device_ids) > 1:
            raise OtherGpusError(f"nn.DataParallel on {len(device_ids)} GPUs", len(device_ids))
        torch.nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, [0], 0, 0

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        inputs, named = on_gpu((inputs, named))
        return self.module(*inputs, **named)

    kind = torch.nn.DataParallel
    return [(kind, "__init__", construct), (kind, "forward", forward)]


def on_gpu(values: Any) -> Any:
    """Return ``values``, nested in any way, with tensors of the host moved to the GPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda") if not tensor.is_cuda else tensor, values)


def _accelerator_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches by which ``torch.accelerator`` is the GPU, numbered as ``torch.cuda`` says."""
    accelerator = torch.accelerator
    return [
        (torch._C, "_get_accelerator", lambda *args: torch.device("cuda", torch.cuda.current_device())),
        (accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
        (accelerator, "is_available", lambda: True),
        (accelerator, "device_count", lambda: torch.cuda.device_count()),
        (accelerator, "current_device_index", lambda: torch.cuda.current_device()),
        (accelerator, "current_device_idx", lambda: torch.cuda.current_device()),
        (accelerator, "set_device_index", lambda device: None),
        (accelerator, "set_device_idx", lambda device: None),
    ]


def is_device_number(value: Any) -> bool:
    """True if ``value`` is the number of a GPU."""
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_to(parse: Callable[..., Any]) -> Callable[..., Any]:
    def with_number(*args: Any, **kwargs: Any) -> Any:
        if args and is_device_number(args[0]):
            args = (torch.device("cuda", args[0]), *args[1:])
        if is_device_number(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        return parse(*args, **kwargs)

    return with_number


_Device = torch.device


class _DeviceKind(type):
    """Kind of a class that stands for ``torch.device``: its objects are that class's, and both are equal."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Device)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)


class NumberedDevice(metaclass=_DeviceKind):
    """``torch.device``, for which a number alone means a GPU, as where there is one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a ``torch.device``."""
        if len(args) == 1 and not kwargs and is_device_number(args[0]):
            return _Device("cuda", args[0])
        return _Device(*args, **kwargs)


def _named(device: torch.device) -> tuple[Callable[[str], torch.device], tuple[str]]:
    """Reduce a device for ``pickle``, which finds the class of objects by its name."""
    return NumberedDevice, (str(device),)


DEFAULT_STREAM = 0
RECORD_EVENT, WAIT_EVENT = "cudaEventRecord", "cudaStreamWaitEvent"
SYNCHRONIZE_STREAM, SYNCHRONIZE_EVENT = "cudaStreamSynchronize", "cudaEventSynchronize"

Note = Callable[..., None]  # callback for a runtime call: name, then attributes


def ignore_call(name: str, **attributes: Any) -> None:
    """Ignore a runtime call."""


class StreamState:
    """Current stream, and callback for runtime calls."""

    def __init__(self) -> None:
        self.note: Note = ignore_call
        self._made = 0
        self._events = 0
        self._entered: list[int] = []
        # Stream of the running autograd node: that of its forward operator.
        self.node = DEFAULT_STREAM

    @property
    def current(self) -> int:
        """Stream of new work."""
        return self._entered[-1] if self._entered else self.node

    def make(self) -> int:
        """Return the number of a new stream."""
        self._made += 1
        return self._made

    def make_event(self) -> int:
        """Return the number of a new event."""
        self._events += 1
        return self._events

    def follow(self, stream: int, other: int) -> None:
        """Make later work on ``stream`` wait for the work already on ``other``."""
        if stream != other:
            event = self.make_event()
            self.note(RECORD_EVENT, event=event, stream=other)
            self.note(WAIT_EVENT, event=event, stream=stream)

    def choose(self, stream: int) -> None:
        """Send later work to ``stream``."""
        self._entered[:] = [stream]

    @contextmanager
    def entered(self, stream: int | None) -> Iterator[None]:
        """Context in which work is sent to ``stream`` (None: no change)."""
        depth = len(self._entered)
        if stream is not None:
            self._entered.append(stream)
        try:
            yield
        finally:
            del self._entered[depth:]


def stream_classes(state: StreamState) -> tuple[type, type]:
    """Return replacements of ``torch.cuda.Stream`` and ``torch.cuda.Event`` that report to ``state``."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, number: int | None = None, **more: Any) -> None:
            self.stream_id = state.make() if number is None else number
            self.cuda_stream = self.stream_id
            self.device = torch.device("cuda", 0)
            self.device_index = 0
            self.priority = priority

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            state.follow(self.stream_id, stream.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            state.note(SYNCHRONIZE_STREAM, stream=self.stream_id)

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Any:
            self._inside = state.entered(self.stream_id)
            self._inside.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._inside.__exit__(None, None, None)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(("stream", self.stream_id))

    class Event:
        def __init__(self, *args: Any, **more: Any) -> None:
            self.event_id = state.make_event()
            self._recorded = False

        def record(self, stream: Any = None) -> Any:
            number = state.current if stream is None else stream.stream_id
            self._recorded = True
            state.note(RECORD_EVENT, event=self.event_id, stream=number)
            return self

        def wait(self, stream: Any = None) -> None:
            if self._recorded:  # waiting for an event that was never recorded does nothing
                number = state.current if stream is None else stream.stream_id
                state.note(WAIT_EVENT, event=self.event_id, stream=number)

        def synchronize(self) -> None:
            if self._recorded:
                state.note(SYNCHRONIZE_EVENT, event=self.event_id)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            """Return a fixed number of milliseconds, since nothing has run."""
            return 1.0

    return Stream, Event


@contextmanager
def pretend_streams(state: StreamState) -> Iterator[None]:
    """Context in which ``torch.cuda`` and ``torch.accelerator`` have streams and events."""
    stream_class, event_class = stream_classes(state)

    def current(device: Any = None) -> Any:
        return stream_class(number=state.current)

    def default(device: Any = None) -> Any:
        return stream_class(number=DEFAULT_STREAM)

    def inside(stream: Any) -> Any:
        return state.entered(None if stream is None else stream.stream_id)

    def choose(stream: Any) -> None:
        state.choose(stream.stream_id)

    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "Stream", stream_class),
            (torch.cuda, "Event", event_class),
            (torch.cuda, "current_stream", current),
            (torch.cuda, "default_stream", default),
            (torch.cuda, "stream", inside),
            (torch.cuda, "StreamContext", inside),
            (torch.cuda, "set_stream", choose),
            (torch, "Stream", stream_class),
            (torch, "Event", event_class),
            (torch.accelerator, "current_stream", current),
            (torch.accelerator, "set_stream", choose),
            (torch.accelerator, "synchronize", lambda device=None: torch.cuda.synchronize()),
        ):
            stack.enter_context(patch.object(target, name, value))
        # Affects only the allocator.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda self, stream: None, create=True))
        yield
