"""ONNX files to Relax modules."""
