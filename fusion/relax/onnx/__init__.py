"""Reads ONNX files into Relax modules, and refuses those that cannot be read."""
