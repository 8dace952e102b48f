"""FBGEMM's table-batched embeddings as execution traces record them: what they launch."""

from __future__ import annotations

import pytest

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Elementwise, RadixSort
from costmodel.operators.lookups import EmbeddingLookup
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.traces.execution_trace import read_execution_trace
from tests.e2e.recorded_traces import DLRM_ET, recorded

FORWARD = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
BACKWARD = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"


def t(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(-1, -1, shape, dtype, "cuda:0")


def lookup(name: str = FORWARD) -> OperatorCall:
    """Two tables, 100 rows of 8 and of 16 values together 2,400; 5 samples, 30 lookups."""
    ends, offsets = t(3, dtype="int64"), t(11, dtype="int64")
    sizes = (24, 16, ends, 7, t(30, dtype="int64"), offsets)
    return OperatorCall(1, name, None, 0, (t(0), t(2400), t(2, dtype="int32"), *sizes, 0, None), (t(5, 24),))


def tasks(*calls: OperatorCall):
    return [(task.name, *task.operators) for task in lower(OperatorTrace(calls)).tasks]


def test_a_lookup_of_several_tables_is_one_kernel():
    expected = EmbeddingLookup(100, 12, 15, 5, tables=2, kernel="table_batched")
    assert tasks(lookup()) == [(FORWARD, expected)]


def test_the_backward_pass_takes_sizes_and_optimizer_from_its_forward_call():
    names, operators = zip(*tasks(lookup(), OperatorCall(2, BACKWARD, None, 1, (t(5, 24),))), strict=True)
    assert names[1:] == (
        "linearize_index", "DeviceRadixSort", "DeviceCompactInit", "DeviceReduceByKey", "DeviceScanInit", "DeviceScan",
        BACKWARD,
    )  # fmt: skip
    assert operators[2] == RadixSort(30, 8, 12)
    update = EmbeddingLookup(
        100, 12, 15, 5, 2, direction="backward", fused_optimizer="rowwise_adagrad", kernel="table_batched"
    )
    assert operators[-1] == update


@pytest.mark.parametrize("gradient", [t(5, 23), t(6, 24)])
def test_without_its_forward_call_it_is_an_unknown_operator(gradient):
    ((_, _), (name, operator)) = tasks(lookup(), OperatorCall(2, BACKWARD, None, 1, (gradient,)))
    assert name == BACKWARD and isinstance(operator, Elementwise) and operator.kind == "unknown"


def test_without_an_optimizer_inside_the_gradient_is_dense_and_cleared():
    forward = lookup("fbgemm::dense_embedding_codegen_lookup_function")
    backward = OperatorCall(2, "torch::autograd::CppNode<SplitLookupFunction_Dense_Op>", None, 1, (t(5, 24),))
    found = tasks(forward, backward)
    assert found[1][1] == Elementwise("fill", 2400, 0)
    assert (found[-1][1].fused_optimizer, found[-1][1].direction) == ("", "backward")


def test_the_recorded_run_launches_what_its_profile_shows():
    """Rank 3 of the public run: kernels of the lookups by name and number, and the time of those that are long."""
    path = recorded(f"{DLRM_ET}/dlrm_pytorch_et/dlrm_eg_3.json")
    found = lower(read_execution_trace(path)).tasks
    counts = {name: sum(name in task.name for task in found) for name in ("DeviceScanInit", "linearize", "permute_2D")}
    assert counts == {"DeviceScanInit": 8, "linearize": 2, "permute_2D": 4}
    sorts = [each for task in found for each in task.operators if isinstance(each, RadixSort)]
    assert sorts == [RadixSort(32, 3, 12), RadixSort(13_312, 26, 12)]
    seconds = [each.seconds for each in gpu_cost_model(load_machine("v100-sxm2-32gb")).estimate(sorts)]
    assert seconds == pytest.approx([9e-6, 54e-6], rel=0.1)  # measured
