"""Acceptance checks of a tuned network: outputs compared with FP64, and errors of shorter number types."""
