"""Stand-ins for packages that cannot be installed, or cannot run, without CUDA: FlashAttention, xformers, Apex,
Transformer Engine and others.

A stand-in has the package's names and shapes and calls the operators that stand for its kernels, priced like those of
PyTorch of the same kind (:mod:`e2e.lowering.families.package_kernels`). What it does not have is refused by name. Each
module here holds one package, or several of a kind: ``MODULES`` maps module names to what they export, and
:mod:`e2e.capture.cuda_packages.finder` lets programs import them.
"""
