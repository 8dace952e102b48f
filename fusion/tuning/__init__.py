"""Stages of ``tune``: from an ONNX file over the search for kernels and fusions to a build."""
