"""Sessions of ONNX Runtime that tests compare with."""

from __future__ import annotations

from typing import Any


def exact_session(model: Any) -> Any:
    """Session of ``model`` (file or bytes) whose products of bytes are exact on every CPU.

    Without instructions for bytes (VNNI) ONNX Runtime adds pairs of products of unsigned and signed bytes in 16 bits,
    which saturate; the option makes it widen them first (``kOrtSessionOptionsAvx2PrecisionMode``).
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
