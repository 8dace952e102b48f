"""Engines of ``compare`` by name; packages are imported only in the engine's own process."""

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
    """Location of an engine (``module:attribute``), the packages it imports, and the extra that installs them.

    ``precision``: number type of its layers; an INT8 engine runs the quantised file of the model.
    """

    name: str
    location: str
    packages: tuple[str, ...]
    extra: str
    precision: str = FLOAT32

    def missing(self) -> str | None:
        """Reason why the engine cannot be used here, or None if its packages are installed. Imports nothing."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if not absent:
            return None
        return f"{', '.join(absent)} not installed: pip install -e '.[{self.extra}]'"

    def load(self) -> Engine:
        """Import the engine."""
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
# Engines without tuning.
DEFAULT = ("onnxruntime", "openvino", "openvino-bf16", "opencv", "torch", "torch-eager", UNFUSED_ENGINE)


def peers_of(precision: str) -> tuple[str, ...]:
    """Names of other engines in ``precision`` (``float32``, ``bfloat16`` or ``int8``), without those that tune."""
    ours = (TUNED, UNFUSED_ENGINE, "tvm-metaschedule")
    return tuple(spec.name for spec in ENGINES.values() if spec.precision == precision and spec.name not in ours)


def select_engines(names: Iterable[str]) -> list[EngineSpec]:
    """Engines of these names in the given order, with ``tuned`` first. Raises ``InputError``."""
    chosen = {TUNED: ENGINES[TUNED]}
    for name in names:
        if name not in ENGINES:
            raise InputError(f"--against {name}: no such engine; there are {', '.join(ENGINES)}")
        chosen[name] = ENGINES[name]
    return list(chosen.values())
