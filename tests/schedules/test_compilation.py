"""Where a kernel's buffers end up in machine code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm")
sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import CPU, conv

from costmodel.operators import Conv2d, FusedConvs
from schedules.compilation import pass_context
from schedules.templates import template_for

DEPTHWISE = conv(1, 32, 14, 14, 32, 3, groups=32)
POINTWISE = Conv2d(1, 32, 14, 14, 64, (1, 1))


@pytest.mark.parametrize(
    ("operator", "buffers"),
    [
        (POINTWISE, 0),
        (DEPTHWISE, 0),
        (FusedConvs((DEPTHWISE, POINTWISE)), 1),
        (FusedConvs((Conv2d(1, 64, 14, 14, 32, (1, 1)), DEPTHWISE, POINTWISE)), 2),
    ],
    ids=["pointwise", "depthwise", "depthwise-pointwise", "sliding window"],
)
def test_only_tiles_come_from_the_workspace_pool(operator, buffers):
    """Sums are registers: an allocation for each of them would cost more than small kernels do."""
    import tvm

    template = template_for(operator, CPU)
    function = template.build(operator, template.space(operator, CPU)[0], CPU)
    with pass_context():
        module = tvm.compile(tvm.IRModule({"main": function}), target=CPU.tvm_target()).mod
    calls = [line for line in module.inspect_source("ll").splitlines() if "load ptr, ptr @__TVMBackendAlloc" in line]
    assert len(calls) == buffers
