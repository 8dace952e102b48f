"""One file per family of kernels: analytic seconds and features."""
