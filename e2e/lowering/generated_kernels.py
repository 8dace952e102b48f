"""Kernels that a compiler generated (Inductor's Triton kernels), as execution traces record them."""

from __future__ import annotations

from costmodel.operators.device_work import Elementwise
from e2e.lowering.families.work import DeviceWork, dtype_of, gpu_inputs, numel
from e2e.step.operator_trace import OperatorCall


def is_generated(call: OperatorCall) -> bool:
    """Whether the call is the launch of such a kernel."""
    return bool(call.attributes.get("kernel_backend"))


def generated_kernel(call: OperatorCall) -> list[DeviceWork]:
    """One pass over all arguments. Traces do not tell results from inputs: Inductor puts the results last."""
    arguments = gpu_inputs(call)
    if not arguments:
        return []
    elements = max(numel(tensor) for tensor in arguments)
    *read, written = arguments
    full = sum(numel(tensor) == elements for tensor in read)
    rest = sum(numel(tensor) for tensor in read if numel(tensor) != elements)
    outputs = int(numel(written) == elements)
    rest += 0 if outputs else numel(written)
    return [DeviceWork(call.name, (Elementwise("fused", elements, full, outputs, rest, dtype_of(written)),))]
