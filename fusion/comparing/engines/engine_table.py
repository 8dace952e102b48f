"""The engines ``compare`` knows, by name. Nothing is imported before an engine's own process needs it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from costmodel.base.errors import InputError
from fusion.comparing.engines.base import Engine
from fusion.model.precision import BFLOAT16, FLOAT32, INT8

TUNED = "tuned"
REFERENCE = "onnxruntime"
UNFUSED_ENGINE = "tvm-unfused"


@dataclass(frozen=True)
class EngineSpec:
    """Where an engine lives (``module:attribute``), the packages it imports, and the extra that installs them.

    ``precision``: what its layers are computed in; one of INT8 runs the quantised file of the model.
    """

    name: str
    location: str
    packages: tuple[str, ...]
    extra: str
    precision: str = FLOAT32

    def missing(self) -> str | None:
        """Why the engine cannot be used here, ``None`` if its packages are installed. Imports nothing."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if not absent:
            return None
        return f"{', '.join(absent)} not installed: pip install -e '.[{self.extra}]'"

    def load(self) -> Engine:
        """Import the engine's module."""
        module, _, attribute = self.location.partition(":")
        return cast(Engine, getattr(importlib.import_module(module), attribute))


ENGINES = {
    spec.name: spec
    for spec in (
        EngineSpec(TUNED, "fusion.comparing.engines.tuned:TUNED", ("tvm",), "fusion"),
        EngineSpec(UNFUSED_ENGINE, "fusion.comparing.engines.tuned:UNFUSED", ("tvm",), "fusion"),
        EngineSpec("tvm-metaschedule", "fusion.comparing.engines.stock_tvm:METASCHEDULE", ("tvm", "onnx"), "fusion"),
        EngineSpec(REFERENCE, "fusion.comparing.engines.onnx_runtime:ENGINE", ("onnxruntime",), "fusion"),
        EngineSpec("openvino", "fusion.comparing.engines.open_vino:FP32", ("openvino",), "peers"),
        EngineSpec("openvino-bf16", "fusion.comparing.engines.open_vino:BF16", ("openvino",), "peers", BFLOAT16),
        EngineSpec("openvino-int8", "fusion.comparing.engines.open_vino:INT8", ("openvino",), "peers", INT8),
        EngineSpec("onnxruntime-int8", "fusion.comparing.engines.onnx_runtime:INT8", ("onnxruntime",), "fusion", INT8),
        EngineSpec("opencv", "fusion.comparing.engines.open_cv:ENGINE", ("cv2",), "peers"),
        EngineSpec("torch", "fusion.comparing.engines.pytorch:BEST", ("torch", "onnx", "onnx2fx"), "peers"),
        EngineSpec("torch-eager", "fusion.comparing.engines.pytorch:EAGER", ("torch", "onnx", "onnx2fx"), "peers"),
        EngineSpec(
            "torch-bf16", "fusion.comparing.engines.pytorch:BF16", ("torch", "onnx", "onnx2fx"), "peers", BFLOAT16
        ),
    )
}
# Everything that needs no tuning of its own.
DEFAULT = ("onnxruntime", "openvino", "openvino-bf16", "opencv", "torch", "torch-eager", UNFUSED_ENGINE)


def peers_of(precision: str) -> tuple[str, ...]:
    """Names of other engines that compute in ``precision`` (``float32``, ``bfloat16`` or ``int8``), without those that
    tune.
    """
    ours = (TUNED, UNFUSED_ENGINE, "tvm-metaschedule")
    return tuple(spec.name for spec in ENGINES.values() if spec.precision == precision and spec.name not in ours)


def select_engines(names: Iterable[str]) -> list[EngineSpec]:
    """The engines of these names in the given order, ``tuned`` first and once. Raises ``InputError``."""
    chosen = {TUNED: ENGINES[TUNED]}
    for name in names:
        if name not in ENGINES:
            raise InputError(f"--against {name}: no such engine; there are {', '.join(ENGINES)}")
        chosen[name] = ENGINES[name]
    return list(chosen.values())
