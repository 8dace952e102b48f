"""Kernel selection of ``scaled_dot_product_attention`` by GPU, dtype, shape, mask and PyTorch version.

After ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` of the versions named. The order is flash,
memory-efficient, math; cuDNN is tried first on Hopper and datacenter Blackwell by version 2.5.0, which 2.5.1 reverted
(pytorch issues 138340 and 138522), and from 2.11 on, whose cuDNN is newer than the required 9.15 (pytorch pull request
162073; huggingface/transformers pull request 48163). Version 2.2 introduced FlashAttention 2; 2.0 and 2.1 have the
first. Flash needs Ampere or later, 16 bits, no mask and heads of up to 256 (128 in the first); the memory-efficient
kernel supports masks and FP32, but BF16 only from Ampere on; all other cases run as separate products.
"""

from __future__ import annotations

from costmodel.base.errors import MachineError, UnsupportedOperatorError
from costmodel.machines.machine_records import Machine
from costmodel.operators.attention import Attention, AttentionKernel

Release = tuple[int, int, int]
LATEST: Release = (2, 13, 0)
_BEFORE_AMPERE = ("pascal", "volta", "turing")
_CUDNN_FIRST = ("hopper", "blackwell")
_CUDNN_BRIEFLY, _CUDNN_AGAIN, _FLASH_2, _GROUPED = (2, 5, 0), (2, 11, 0), (2, 2, 0), (2, 5, 0)
_HALVES = ("float16", "bfloat16")
_WIDEST = 256
_LATENT = (192, 128)  # of DeepSeek V2 and V3
EIGHT_BITS: AttentionKernel = "flash3-fp8"


def kernel_of(operator: Attention, machine: Machine, release: Release = LATEST) -> AttentionKernel:
    """Kernel named by ``operator``, or the one that PyTorch ``release`` selects for it on ``machine``.

    ``MachineError`` if a named kernel does not run there.
    """
    if operator.dtype == "float8" and operator.kernel != EIGHT_BITS:
        raise UnsupportedOperatorError(
            f"attention in 8 bits by {operator.kernel!r} has no model; name `{EIGHT_BITS}` (Hopper, forward) or give "
            "16 bits"
        )
    if operator.kernel == "sdpa":
        return sdpa_kernel(operator, machine, release)
    kernel = _flash(release) if operator.kernel == "flash" else operator.kernel
    architecture = machine.chip().architecture
    if kernel in ("flash3", EIGHT_BITS) and architecture != "hopper":
        raise MachineError(f"{machine.name}: FlashAttention 3 runs on Hopper alone; name another kernel of attention")
    if kernel == "flash4" and architecture != "blackwell":
        raise MachineError(
            f"{machine.name}: FlashAttention 4 is for B200 and its like; name another kernel of attention"
        )
    if kernel == EIGHT_BITS and operator.direction == "backward":
        raise UnsupportedOperatorError("FlashAttention 3 has no gradients in 8 bits; name `flash3`")
    if kernel in ("flash1", "flash2", "cudnn", "mla") and architecture in _BEFORE_AMPERE:
        other = "eager" if kernel == "mla" else "efficient"
        raise MachineError(f"{machine.name}: has no kernel {kernel!r}, which needs Ampere or later; name `{other}`")
    return kernel


def generation_of(machine: Machine) -> str:
    """Architecture whose kernels a GPU runs: its own, except that consumer Blackwell (capability 12.0: no tensor
    memory, and PyTorch does not prefer cuDNN there) runs those of Ada.
    """
    architecture = machine.chip().architecture
    return "ada" if architecture == "blackwell-rtx" else architecture


def sdpa_kernel(operator: Attention, machine: Machine, release: Release = LATEST) -> AttentionKernel:
    """Kernel that ``scaled_dot_product_attention`` of PyTorch ``release`` selects for the shapes of ``operator``."""
    architecture = machine.chip().architecture
    half, modern = operator.dtype in _HALVES, architecture not in _BEFORE_AMPERE
    even = len(set(operator.widths)) == 1
    grouped = operator.kv_heads != operator.heads
    plain = not operator.sinks and not operator.window and not (grouped and release < _GROUPED)
    if _prefers_cudnn(machine, release) and half and plain and _fits_cudnn(operator.widths, machine, release):
        return "cudnn"
    widest = _WIDEST if release >= _FLASH_2 else 128
    square = operator.query_length == operator.key_length or not operator.causal or operator.placed == "spread"
    fits = even and square and max(operator.widths) <= widest
    if modern and half and fits and plain and not operator.mask:
        return _flash(release)
    if not operator.sinks and not operator.window and (operator.dtype != "bfloat16" or modern):
        return "efficient"
    return "math"


def _flash(release: Release) -> AttentionKernel:
    return "flash2" if release >= _FLASH_2 else "flash1"


def _fits_cudnn(widths: tuple[int, int], machine: Machine, release: Release) -> bool:
    """True if ``check_cudnn_tensor_shapes`` accepts the head dimensions of queries and values, which may differ. Above
    128 on Hopper with cuDNN 9.10, on Blackwell for latent attention only.
    """
    wide = release >= _CUDNN_AGAIN and (generation_of(machine) == "hopper" or widths == _LATENT)
    return max(widths) <= (_WIDEST if wide else _WIDEST // 2) and all(width % 8 == 0 for width in widths)


def _prefers_cudnn(machine: Machine, release: Release) -> bool:
    return (release == _CUDNN_BRIEFLY or release >= _CUDNN_AGAIN) and generation_of(machine) in _CUDNN_FIRST
