"""Analyse ONNX models of convolutional networks, tune fused CPU kernels for them and run the result.

::

    import fusion

    summary = fusion.tune("model.onnx", "build/", minutes=5)
    outputs = fusion.load("build/")(images)

Submodules are imported on first use. See docs/api.md.
"""

from typing import TYPE_CHECKING

from costmodel.base.lazy_names import lazy_names

__all__ = ["NetworkAnalysis", "QuantizeSummary", "TuneSummary", "TunedModel", "analyze", "load", "quantize", "tune"]

if TYPE_CHECKING:
    from fusion.analysis.analyzer import NetworkAnalysis
    from fusion.commands.fusion_api import TuneSummary, analyze, quantize, tune
    from fusion.model.tuned_model import TunedModel, load
    from fusion.tuning.quantization import QuantizeSummary
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "NetworkAnalysis": "fusion.analysis.analyzer",
            "QuantizeSummary": "fusion.tuning.quantization",
            "TuneSummary": "fusion.commands.fusion_api",
            "TunedModel": "fusion.model.tuned_model",
            "analyze": "fusion.commands.fusion_api",
            "load": "fusion.model.tuned_model",
            "quantize": "fusion.commands.fusion_api",
            "tune": "fusion.commands.fusion_api",
        },
    )
