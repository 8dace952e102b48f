"""Depthwise convolutions: the library that computes one; PyTorch's own gradient of weights.

PyTorch uses cuDNN for all of them in NHWC, in NCHW for those in FP16 with square windows of 1, 3 or 5 elements
from 32 channels on, of stride 1, or of stride 2 with many channels (``use_cudnn_depthwise`` and
``check_cudnn_depthwise_workload_with_filter`` in aten/src/ATen/native/Convolution.cpp, cuDNN 8.2 and later). The rest
are kernels of its own (aten/src/ATen/native/cuda/DepthwiseConv2d.cu): forward and the gradient of the data take a
thread per element of the result; the gradient of the weights takes a block of threads for each channel and each element
of the window, whose warps go over the pictures one by one,

    seconds = factor * max(bytes / DRAM bandwidth, waves * loads of a thread * latency of a load)

so that it costs as many passes over both tensors as the window has elements, and few channels leave most of the GPU
idle. Forward and data kernels of the two libraries share classes: separate classes do not improve the predictions of
held-out families.
"""

from __future__ import annotations

from costmodel.gpu.families.rates import latency
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d

_CUDNN_WINDOWS, _CUDNN_CHANNELS, _CUDNN_WIDTH = (1, 3, 5), 32, 7
# For stride 2 and more than one picture: fewest channels at any width, and at this width.
_STRIDED_CHANNELS, _STRIDED_CHANNELS_WIDE, _STRIDED_WIDTH = 512, 256, 28
_WARP, _GRADIENT_WARPS = 32, 8  # getGradParamsNumThreads: a warp per picture, 256 threads at most


def asks_cudnn(conv: Conv2d) -> bool:
    """True if PyTorch computes the depthwise ``conv`` and its gradients by cuDNN rather than by its own kernels."""
    if conv.channels_last:
        return True
    plane = conv.depth is None and conv.dilation == (1, 1)
    if conv.dtype != "float16" or not plane or conv.in_channels < _CUDNN_CHANNELS:
        return False
    stride = conv.stride[1]
    if conv.height == 1 and stride == 1:
        return True
    square = conv.kernel[0] == conv.kernel[1] and (conv.stride[0] == stride or conv.height == 1)
    if not square or conv.kernel[0] not in _CUDNN_WINDOWS or conv.width < _CUDNN_WIDTH:
        return False
    return stride == 1 or (stride == 2 and _asks_strided(conv))


def _asks_strided(conv: Conv2d) -> bool:
    if conv.kernel == (1, 1):
        few = conv.batch <= 16 and conv.in_channels >= 128 and conv.width <= _CUDNN_WIDTH
        return conv.width <= _STRIDED_WIDTH if conv.batch == 1 else few
    wide = conv.in_channels >= _STRIDED_CHANNELS_WIDE and conv.width >= _STRIDED_WIDTH
    return conv.batch == 1 or conv.in_channels >= _STRIDED_CHANNELS or wide


def own_gradient_seconds(conv: Conv2d, machine: Machine) -> float:
    """Load time, before any factor, of PyTorch's own gradient of the weights of ``conv``, in seconds.

    Of a window's passes over the tensors the first reads DRAM, the others, which run concurrently, read L2.
    """
    chip = machine.chip()
    window = conv.kernel[0] * conv.kernel[1] * (1 if conv.depth is None else conv.depth[0])
    resident = chip.sm_count * (chip.max_threads // (_GRADIENT_WARPS * _WARP))
    waves = max(conv.plane_channels * window / resident, 1.0)
    loads = conv.batch / min(_GRADIENT_WARPS, conv.batch) * -(-conv.out_height * conv.out_width // _WARP)
    return waves * loads * (latency(machine, 1) + (window - 1) * latency(machine, 0)) / window
