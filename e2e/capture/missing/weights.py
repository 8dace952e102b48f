"""Weights that are not read: models by their configurations, checkpoints that are not there.

The values of weights do not matter to a prediction, so a model of Transformers or Diffusers is made from its
configuration alone, without memory, whether its weights are on this machine or not. A checkpoint that a program loads
itself (``torch.load``) is used if it is there; if not, it stands for any state: whatever takes it (``load_state_dict``)
stays as it is, and a number in it (an epoch, the best loss) is zero.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from costmodel.base.errors import ModelError
from e2e.capture.imports import patched_imports
from e2e.capture.missing.hub import Hub
from e2e.capture.stand_ins import Note


def _of_zero(calculate: Callable[[Any, Any], Any]) -> Any:
    def number(self: Any, other: Any) -> Any:
        return calculate(0, 0 if isinstance(other, MissingState) else other)

    return number


class MissingState(dict):  # type: ignore[type-arg]
    """State that is not there: weights of the ``module`` that it will be loaded into, if that is known; under any other
    name another such state, which is also a number that is zero.
    """

    def __init__(self, file: str, module: torch.nn.Module | None = None) -> None:
        super().__init__({} if module is None else module.state_dict())
        self._file, self._module = file, module

    def __missing__(self, key: Any) -> Any:
        return MissingState(self._file, self._module)

    def get(self, key: Any, default: Any = None) -> Any:
        there = key in self
        return self[key] if there else default

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(key) if super().__contains__(key) else default[0] if default else self[key]

    def __contains__(self, key: Any) -> bool:
        # Names of weights have dots, or are attributes; others are parts of a checkpoint.
        if super().__contains__(key) or self._module is None:
            return True
        attribute = hasattr(self._module, str(key)) and not hasattr(torch.nn.Module, str(key))
        return "." not in str(key) and not attribute

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # such as the metadata of a module's state, which a state may lack
            raise AttributeError(name)
        raise ModelError(f"{self._file} is not there and its {name} is asked for; put a file of that form there")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "a function")
        found = next((each for each in args if isinstance(each, cls)), None)
        file = found._file if found is not None else "a file"
        raise ModelError(f"{file} is not there and {name} needs its values; put a file of that form there")

    def __index__(self) -> int:
        return 0

    __int__ = __index__

    def __float__(self) -> float:
        return 0.0

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    __add__ = __radd__ = _of_zero(operator.add)
    __sub__, __rsub__ = _of_zero(operator.sub), _of_zero(lambda zero, other: other)
    __mul__ = __rmul__ = _of_zero(operator.mul)
    __lt__, __gt__ = _of_zero(operator.lt), _of_zero(operator.gt)
    __le__, __ge__ = _of_zero(operator.le), _of_zero(operator.ge)


@contextmanager
def weights_not_read(hub: Hub, note: Note) -> Iterator[None]:
    """Context in which weights of libraries are not read, and checkpoints that are not there stand for any state."""

    def missing(file: Any) -> MissingState:
        note(f"{os.fspath(file)} is not there: weights and numbers in it make no difference")
        hub.states.append(os.fspath(file))
        return MissingState(os.fspath(file), _module_at_hand())

    with ExitStack() as stack:
        for target, name, value in _torch_patches(missing, hub):
            stack.enter_context(patch.object(target, name, value))
        libraries = {
            "transformers.modeling_utils": lambda module: _transformers(module, hub, note),
            "diffusers.models.modeling_utils": lambda module: _diffusers(module, note),
            "timm.models._builder": lambda module: _timm(module, note),
            "torchvision.models._api": lambda module: _torchvision(module, note),
            "safetensors": lambda module: [(module, "safe_open", _safe_open(module.safe_open, missing))],
            "safetensors.torch": lambda module: _safetensors(module, missing),
            "fvcore.common.checkpoint": lambda module: _fvcore(module, note),
            **{
                f"{name}.utilities.load": lambda module: _lightning(module, missing)
                for name in ("lightning.fabric", "lightning_fabric")
            },
        }
        stack.enter_context(patched_imports(libraries))
        yield


def _module_at_hand() -> torch.nn.Module | None:
    """Return the module among the variables of the functions that are running, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None:
                return value
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_missing(file: Any) -> bool:
    """True for the path of a file that is not there or empty, which is put there for programs that look for it."""
    if not isinstance(file, (str, os.PathLike)):
        return False
    return not os.path.exists(file) or (os.path.isfile(file) and not os.path.getsize(file))


def _torch_patches(missing: Callable[[Any], MissingState], hub: Hub) -> Iterator[tuple[Any, str, Any]]:
    load = torch.load

    def load_or_stand_in(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _is_missing(f):
            return missing(f)
        return load(f, _on_meta(map_location), *args, **kwargs)

    yield torch, "load", load_or_stand_in
    yield torch.hub, "load_state_dict_from_url", lambda url, *args, **kwargs: missing(url)
    yield torch.hub, "load", _hub_load(torch.hub.load)
    for owner in (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler):
        yield owner, "load_state_dict", _unless_missing(owner.load_state_dict, hub)


def _on_meta(map_location: Any) -> Any:
    """Return where tensors of a file go: those of a GPU to the meta device."""
    if map_location is None:
        return lambda storage, place: _meta_storage(storage) if place.startswith("cuda") else storage
    if isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda":
        return "meta"
    if callable(map_location):
        return lambda storage, place: map_location(storage, "cpu")
    return map_location


def _meta_storage(storage: Any) -> Any:
    return torch.UntypedStorage(storage.nbytes(), device="meta")


def _unless_missing(load_state_dict: Any, hub: Hub) -> Any:
    def load(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # Programs give weights other names before they load them: of those that are not there nothing is left.
        emptied = hub.states and isinstance(self, torch.nn.Module) and not state_dict
        if emptied or isinstance(state_dict, MissingState):
            return torch.nn.modules.module._IncompatibleKeys([], [])
        return load_state_dict(self, state_dict, *args, **kwargs)

    return load


def _hub_load(load: Any) -> Any:
    def load_from_hub(repo_or_dir: str, model: str, *args: Any, source: str = "github", **kwargs: Any) -> Any:
        if source == "local" or os.path.isdir(repo_or_dir):
            return load(repo_or_dir, model, *args, source="local", **kwargs)
        owner = repo_or_dir.partition(":")[0]
        if owner != "pytorch/vision":
            raise ModelError(
                f"torch.hub.load({repo_or_dir!r}) needs the code of that repository; "
                "give a folder with a copy of it, and source='local'"
            )
        for name in ("trust_repo", "force_reload", "verbose", "skip_validation"):
            kwargs.pop(name, None)
        return getattr(import_module("torchvision.models"), model)(*args, **kwargs)

    return load_from_hub


# Arguments of `from_pretrained` that say where weights are and how they are read.
_READING = (
    "device_map", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers",
    "use_safetensors", "weights_only", "ignore_mismatched_sizes", "state_dict", "from_tf", "from_flax",
    "adapter_kwargs", "adapter_name", "variant", "key_mapping", "generation_config", "_fast_init", "disable_mmap",
    "fusion_config", "use_kernels", "kernel_config", "gguf_file", "mirror", "resume_download", "local_files_only",
    "force_download", "cache_dir", "proxies", "token", "use_auth_token", "revision", "subfolder", "code_revision",
    "_commit_hash", "_from_auto", "_from_pipeline", "trust_remote_code", "allow_all_kernels",
)  # fmt: skip
# Those that say where the configuration is.
_PLACE = ("cache_dir", "force_download", "token", "revision", "subfolder", "trust_remote_code")

_LOADING_INFORMATION = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def _transformers(module: Any, hub: Hub, note: Note) -> Iterator[tuple[Any, str, Any]]:
    configuration = module.PreTrainedConfig if hasattr(module, "PreTrainedConfig") else module.PretrainedConfig
    # The type of the weights is that of the file from version 5 on, before it was single precision.
    version = tuple(int(part) for part in sys.modules["transformers"].__version__.split(".")[:2])
    as_stored = version >= (5, 0)
    # Versions before 4.56 call the type of the weights by this name, and take `dtype` for an option of the model.
    named = "dtype" if version >= (4, 56) else "torch_dtype"

    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        place = {key: kwargs[key] for key in _PLACE if key in kwargs}
        told = kwargs.pop("output_loading_info", False)
        options = {key: value for key, value in kwargs.items() if key not in _READING}
        quantized = options.pop("quantization_config", None)
        for refused in ("tp_plan", "device_mesh", "distributed_config"):
            if options.pop(refused, None) is not None:
                raise ModelError(f"from_pretrained({refused}=...) is not captured; use torch's own parallelism")
        dtype = options.pop("dtype", None)
        dtype = options.pop("torch_dtype", None) or dtype
        if not isinstance(config, configuration):
            config, options = cls.config_class.from_pretrained(
                config if config is not None else name, return_unused_kwargs=True, **place, **options
            )
        if dtype == "auto" or (dtype is None and as_stored):
            dtype = getattr(config, named) or torch.float32
        elif dtype is None:
            dtype = torch.float32
        config.name_or_path = str(name)
        quantizer = None
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if quantized or any(getattr(part, "quantization_config", None) for part in (config, text)):
            quantizer = module.get_hf_quantizer(config, quantized, None, True, {})[0]
        model = cls._from_config(config, *args, **{named: dtype}, **options)
        if quantizer is not None:  # puts its layers in place of those with full weights
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=None)
            model.hf_quantizer, model.is_quantized = quantizer, True
            quantizer.postprocess_model(model)
        model.eval()
        note(f"{name}: {type(model).__name__} by its configuration, weights not read")
        return (model, {name: [] for name in _LOADING_INFORMATION}) if told else model

    yield module.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)


def _diffusers(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        name = pretrained_model_name_or_path
        place = {key: kwargs[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in kwargs}
        config = cls.load_config(name, **place)
        model = cls.from_config(config)
        if kwargs.get("torch_dtype") is not None:
            model = model.to(kwargs["torch_dtype"])
        model.register_to_config(_name_or_path=name)
        note(f"{name}: {type(model).__name__} by its configuration, weights not read")
        return model.eval()

    yield module.ModelMixin, "from_pretrained", classmethod(from_pretrained)


def _timm(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    def load_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
        note(f"timm's {type(model).__name__}: weights not read")

    yield module, "load_pretrained", load_pretrained


def _torchvision(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    def get_state_dict(self: Any, *args: Any, **kwargs: Any) -> MissingState:
        note(f"torchvision's {self}: weights not read")
        return MissingState(str(self))

    yield module.WeightsEnum, "get_state_dict", get_state_dict


def _fvcore(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches by which checkpoints of fvcore, of files that are not there or of addresses, change nothing."""

    def from_there(load: Any) -> Any:
        def load_if_there(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if path and ("://" in str(path) or _is_missing(path)):
                note(f"{path} is not there: weights and numbers in it make no difference")
                path = ""  # which leaves all as it is
            return load(self, path, *args, **kwargs)

        return load_if_there

    for name in ("load", "resume_or_load"):
        yield module.Checkpointer, name, from_there(getattr(module.Checkpointer, name))


def _lightning(module: Any, missing: Callable[[Any], MissingState]) -> Iterator[tuple[Any, str, Any]]:
    load = module._lazy_load
    yield module, "_lazy_load", lambda filename: missing(filename) if _is_missing(filename) else load(filename)


class _NoTensors:
    """Opened file of tensors that is not there."""

    def keys(self) -> list[str]:
        """Names of its tensors."""
        return []

    offset_keys = keys

    def metadata(self) -> dict[str, str]:
        """What the file says of itself."""
        return {}

    def __enter__(self) -> _NoTensors:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _safe_open(original: Any, missing: Callable[[Any], MissingState]) -> Any:
    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_missing(filename):
            return original(filename, *args, **kwargs)
        missing(filename)
        return _NoTensors()

    return safe_open


def _safetensors(module: Any, missing: Callable[[Any], MissingState]) -> Iterator[tuple[Any, str, Any]]:
    load, load_into = module.load_file, module.load_model

    def load_file(filename: Any, device: Any = "cpu") -> Any:
        if _is_missing(filename):
            return missing(filename)
        found = load(filename, device="cpu")
        on_gpu = torch.device(device).type == "cuda"
        return {name: each.to("meta") for name, each in found.items()} if on_gpu else found

    def load_model(model: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_missing(filename):
            missing(filename)
            return [], []
        return load_into(model, filename, *args, **{**kwargs, "device": "cpu"})

    yield module, "load_file", load_file
    yield module, "load_model", load_model
