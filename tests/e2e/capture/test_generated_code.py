"""Compiled functions, flexible attention and kernels in Triton in a script; steps that do not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from costmodel.base.errors import ModelError
from costmodel.operators.attention import Attention, seen_pairs
from costmodel.operators.device_work import Elementwise
from e2e.capture import recorder, script_errors
from e2e.capture.script import capture_script, load_script
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions

LENGTH = 512


def captured(make: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> OperatorTrace:
    return capture_script(load_script(make), StepOptions(mode="forward-backward", attention="flash"))


def test_a_compiled_function_without_breaks_runs_as_it_is_written():
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        layer = nn.Linear(8, 8).cuda()

        @torch.compile(fullgraph=True)
        def forward(data: torch.Tensor) -> torch.Tensor:
            return layer(data).relu()

        return layer, lambda: forward(torch.randn(4, 8, device="cuda"))

    trace = captured(make)
    assert trace.compiled
    assert "aten::relu" in {call.name for call in trace.calls}


def test_a_module_that_is_compiled_beside_the_one_that_is_returned_is_one(recwarn: pytest.WarningsRecorder):
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        layer = nn.Linear(8, 8).cuda()
        compiled = torch.compile(layer)
        return layer, lambda: compiled(torch.randn(4, 8, device="cuda"))

    trace = captured(make)
    assert trace.compiled and "aten::addmm" in {call.name for call in trace.calls}
    assert not [each for each in recwarn if "global hooks" in str(each.message)]  # those of the capture


def attention_of(mask: Callable[..., Any] | None, listed: int = 0) -> list[Attention]:
    """Return the records of attention by ``mask``; ``listed``: blocks of 128 keys that the script lists for a row."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        query = torch.randn(2, 4, LENGTH, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        blocks = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda")
        if listed:
            rows = LENGTH // 128
            number = torch.full((1, 1, rows), listed, dtype=torch.int32, device="cuda", pin_memory=True)
            places = torch.arange(rows, dtype=torch.int32, device="cuda").expand(1, 1, rows, rows).contiguous()
            blocks = BlockMask.from_kv_blocks(number, places, number * 0, places, BLOCK_SIZE=128, mask_mod=mask)
        attend = torch.compile(flex_attention)
        return nn.Identity(), lambda: attend(query, query, query, block_mask=blocks).sum().backward()

    records = [record for task in lower(captured(make)).tasks for record in task.operators]
    return [record for record in records if isinstance(record, Attention)]


def test_flexible_attention_computes_the_pairs_that_its_mask_leaves():
    """Causal; four documents of a quarter each, which the script wrote; none."""
    documents = torch.tensor([place // 128 for place in range(LENGTH)])

    def packed(b: Any, h: Any, row: Any, column: Any) -> Any:
        held = torch.tensor(documents.tolist(), device="meta")
        return (held[row] == held[column]) & (row >= column)

    causal = attention_of(lambda b, h, row, column: row >= column)
    assert [record.direction for record in causal] == ["forward", "backward"]
    assert {record.pairs for record in causal} == {seen_pairs(LENGTH, LENGTH, True)}
    assert attention_of(packed)[0].pairs == pytest.approx(4 * seen_pairs(128, 128, True), rel=0.05)
    assert attention_of(None)[0].pairs == LENGTH * LENGTH


def test_blocks_that_a_script_lists_bound_the_pairs_of_flexible_attention():
    data = torch.randn(LENGTH, device="meta")
    unknown = attention_of(lambda b, h, row, column: data[row] >= data[column], listed=1)
    assert unknown[0].pairs == pytest.approx(LENGTH * 128, rel=0.02)
    causal = attention_of(lambda b, h, row, column: row >= column, listed=LENGTH // 128)
    assert causal[0].pairs == seen_pairs(LENGTH, LENGTH, True)


def test_a_launch_of_a_triton_kernel_moves_its_tensors_once():
    triton = pytest.importorskip("triton")

    @triton.jit
    def twice(source, target, count):
        pass

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        source, target = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda")
        return nn.Identity(), lambda: twice[(8,)](source, target, 1000)

    (task,) = lower(captured(make)).tasks
    (record,) = task.operators
    assert task.name == "triton::twice"
    assert isinstance(record, Elementwise)
    assert record.read_bytes + record.write_bytes == 2 * 4000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_waits_for_data_is_stopped(monkeypatch):
    """With calls of operators by their number, without by the clock."""

    def calling() -> tuple[nn.Module, Callable[[], Any]]:
        data = torch.randn(4, device="cuda")

        def step() -> None:
            while data.sum().item() != 2:
                pass

        return nn.Identity(), step

    def silent() -> tuple[nn.Module, Callable[[], Any]]:
        def step() -> None:
            while True:
                pass

        return nn.Identity(), step

    monkeypatch.setattr(recorder, "MOST_CALLS", 50)
    monkeypatch.setattr(script_errors, "SILENT_SECONDS", 0.0)
    with pytest.raises(
        ModelError, match=r"test_generated_code.py:\d+: the script has called .* a fixed number of rounds"
    ):
        captured(calling)
    with pytest.raises(ModelError, match="has called no operator for .* a fixed number of rounds"):
        captured(silent)
