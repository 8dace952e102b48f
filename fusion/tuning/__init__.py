"""The road of ``tune``: from an ONNX file to a build, stage by stage."""
