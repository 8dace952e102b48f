"""What kernels cost by physics, one file per family of kernels: analytic seconds and features."""
