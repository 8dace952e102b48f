"""Operator fusion of ONNX models on CPUs: where it pays, by prediction and by measurement, and the tuned network."""
