"""Stages of ``tune``: from an ONNX file to a build."""
