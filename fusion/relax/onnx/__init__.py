"""Import of ONNX files into Relax modules, with errors for files that cannot be read."""
