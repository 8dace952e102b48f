"""PyTorch on the CPU: eager, and the best of channels-last eager, frozen TorchScript and frozen Inductor, in FP32
and BF16; and AMD's zentorch.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engine import Arrays, EngineCall, EngineWorkload, Unavailable, fastest

TorchModel = Callable[..., Any]
Builder = Callable[[Any, list[Any]], TorchModel]
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass
class TorchSession:
    """One model in several modes. ``chosen``: the fastest one found by :meth:`bind`; ``failed``: mode -> reason."""

    version: str
    outputs: tuple[str, ...]
    modes: Mapping[str, TorchModel]
    failed: Mapping[str, str]
    chosen: str

    @property
    def mode(self) -> str:
        """Chosen mode, and the modes that failed."""
        failures = "".join(f"; {name} failed: {reason}" for name, reason in self.failed.items())
        return f"{self.version}, {self.chosen}{failures}"

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return all outputs by name in the chosen mode (before ``bind``: the first mode)."""
        results = self._call(self.chosen, inputs)()
        return {output: result.numpy() for output, result in zip(self.outputs, results, strict=True)}

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        """Bind the fastest mode, with inputs converted to tensors once."""
        calls = {name: self._call(name, inputs) for name in self.modes}
        self.chosen = fastest(calls)
        return calls[self.chosen]

    def _call(self, name: str, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        import torch

        model, arguments = self.modes[name], _tensors(inputs, name in CHANNELS_LAST)

        def call() -> Any:
            with torch.no_grad():
                return model(*arguments)

        for _ in range(3):  # TorchScript's profiling executor optimises during the first calls
            call()
        return call


@dataclass(frozen=True)
class TorchEngine:
    """PyTorch with a set of modes."""

    # Names of :data:`MODES` to try; the fastest is used.
    modes: tuple[str, ...]
    # Fold batch norms into convolutions first.
    fold: bool
    # The modes compute in BF16; the engine is unavailable on CPUs without it.
    bfloat16: bool = False

    def prepare(self, workload: EngineWorkload, progress: Say) -> TorchSession:
        """Convert the model and compile it in every mode; modes that fail are left out."""
        os.environ.setdefault(CACHE_VARIABLE, str((workload.cache / "inductor").resolve()))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        warnings.simplefilter("ignore")
        import torch

        from fusion.comparing.torch_graph import convert_to_torch, fold_batch_norms, require_bfloat16
        from fusion.model.named_arrays import random_arrays

        torch.set_num_threads(workload.threads)
        torch.set_float32_matmul_precision("highest")  # full FP32, whatever PyTorch's default becomes
        version = torch.__version__
        if self.bfloat16:
            version = f"{version}, {require_bfloat16()}"
        examples = random_arrays(workload.inputs)
        outputs = tuple(info.name for info in workload.outputs)
        converted = convert_to_torch(workload.model, examples, outputs)
        graph = fold_batch_norms(converted) if self.fold else converted
        compiled: dict[str, TorchModel] = {}
        failed: dict[str, str] = {}
        for name in self.modes:
            progress(f"compiling: {name}")
            try:
                with torch.no_grad():
                    compiled[name] = MODES[name](graph, _tensors(examples, name in CHANNELS_LAST))
            except Exception as error:  # a failing mode must not affect the others
                failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not compiled:
            raise Unavailable("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
        return TorchSession(version, outputs, compiled, failed, chosen=next(iter(compiled)))


def _eager(graph: Any, _: list[Any]) -> TorchModel:
    return graph


def _eager_channels_last(graph: Any, _: list[Any]) -> TorchModel:
    import copy

    import torch

    return copy.deepcopy(graph).to(memory_format=torch.channels_last)


def _torchscript(graph: Any, examples: list[Any]) -> TorchModel:
    import torch

    return torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(graph, examples)))


def _inductor(graph: Any, examples: list[Any]) -> TorchModel:
    """Inductor with weights as constants packed for oneDNN, and a C++ wrapper that calls the kernels.

    Freezing is enabled for the whole process: as an option of ``torch.compile`` it takes effect too late to pack
    weights, and the model is 1.7 times slower.
    """
    import torch
    from torch._inductor import config

    config.freezing = True
    config.cpp_wrapper = True
    compiled = torch.compile(graph, dynamic=False)
    compiled(*examples)
    return compiled


def _zentorch(graph: Any, examples: list[Any]) -> TorchModel:
    """AMD's backend of ``torch.compile``, with weights as constants as in :func:`_inductor`."""
    import torch
    from torch._inductor import config

    importlib.import_module("zentorch")  # registers the backend
    config.freezing = True
    compiled = torch.compile(graph, backend="zentorch", dynamic=False)
    compiled(*examples)
    return compiled


def _whole(build: Builder) -> Builder:
    """Mode ``build`` with the network cast to BF16."""

    def compile_(graph: Any, examples: list[Any]) -> TorchModel:
        from fusion.comparing.torch_graph import InBfloat16

        return build(InBfloat16(graph).eval(), examples)

    return compile_


def _autocast(build: Builder) -> Builder:
    """Mode ``build`` with the network under autocast."""

    def compile_(graph: Any, examples: list[Any]) -> TorchModel:
        from fusion.comparing.torch_graph import UnderAutocast

        return build(UnderAutocast(graph).eval(), examples)

    return compile_


MODES: dict[str, Builder] = {
    "eager": _eager,
    "eager, channels last": _eager_channels_last,
    "TorchScript, frozen": _torchscript,
    "Inductor, frozen": _inductor,
    "zentorch, frozen": _zentorch,
    "bfloat16, channels last": _whole(_eager_channels_last),
    "bfloat16, TorchScript, frozen": _whole(_torchscript),
    "bfloat16, Inductor, frozen": _whole(_inductor),
    "autocast to bfloat16, channels last": _autocast(_eager_channels_last),
    "autocast to bfloat16, TorchScript, frozen": _autocast(_torchscript),
}
CHANNELS_LAST = frozenset(name for name in MODES if name.endswith("channels last"))


def _tensors(inputs: Mapping[str, np.ndarray], channels_last: bool) -> list[Any]:
    import torch

    tensors = [torch.from_numpy(np.array(array)) for array in inputs.values()]
    if not channels_last:
        return tensors
    return [tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor for tensor in tensors]


BEST = TorchEngine(("eager, channels last", "TorchScript, frozen", "Inductor, frozen"), fold=True)
EAGER = TorchEngine(("eager",), fold=False)
ZENTORCH = TorchEngine(("zentorch, frozen",), fold=True)
BF16 = TorchEngine(tuple(name for name in MODES if "bfloat16" in name), fold=True, bfloat16=True)
