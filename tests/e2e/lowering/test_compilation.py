"""Compiled steps: what is fused, what the fused kernels move, what the host still does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from costmodel.operators.device_work import Elementwise, Gemm
from e2e.explain.breakdowns import operator_count
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import compile_rank
from e2e.step.execution_graph import HostWork, Launch, RankGraph
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor

ROWS, COLUMNS = 64, 128
SIZE = ROWS * COLUMNS


class Script:
    """Writes a trace call by call; every result lies in memory of its own."""

    def __init__(self) -> None:
        self.calls: list[OperatorCall] = []
        self.tensors = 0

    def tensor(self, *shape: int) -> Tensor:
        self.tensors += 1
        return Tensor(self.tensors, self.tensors, shape or (ROWS, COLUMNS), "float32", "cuda:0")

    def call(self, name: str, *inputs: Tensor, output: Tensor | None = None, phase: str = "forward", **more) -> Tensor:
        output = output or self.tensor()
        call = OperatorCall(len(self.calls), f"aten::{name}", None, 0, inputs, (output,), phase, attributes=more)
        self.calls.append(call)
        return output

    def compiled(self) -> RankGraph:
        trace = OperatorTrace(tuple(self.calls))
        return compile_rank(lower(trace), trace)


def records(graph: RankGraph) -> list:
    return [task.operators[0] for task in graph.tasks]


def test_a_chain_becomes_one_kernel_that_reads_and_writes_what_is_outside():
    script = Script()
    first, second, third = script.tensor(), script.tensor(), script.tensor()
    result = script.call("relu", script.call("add", first, second))
    script.call("mul", result, third)
    graph = script.compiled()
    (task,) = graph.tasks
    record = task.operators[0]
    # Out of memory: add's and relu's results are nobody's else, but they are not said to be freed.
    assert task.name == "inductor::triton_fused_add_relu_mul"
    assert (record.kind, record.elements, record.inputs) == ("fused", SIZE, 3)
    assert record.outputs == 1


def test_generated_code_calls_what_it_launches_and_the_optimizer_what_it_did():
    script = Script()
    result = script.call("relu", script.call("add", script.tensor(), script.tensor()))
    script.call("mm", result, script.tensor(COLUMNS, COLUMNS))
    script.call("add_", result, output=result, phase="optimizer")
    graph = script.compiled()
    assert len(graph.tasks) == 3 and operator_count(graph) == 3  # of four calls two are one kernel
    eager = lower(OperatorTrace(tuple(script.calls)))
    assert operator_count(eager) == 4


def test_sums_of_a_few_elements_are_unrolled_in_the_forward_pass_and_longer_ones_are_kernels():
    for parts, count in ((2, 1), (16, 2)):
        script = Script()
        split = script.call("relu", script.tensor(ROWS, parts, COLUMNS), output=script.tensor(ROWS, parts, COLUMNS))
        script.call("sum", split, (1,), output=script.tensor(ROWS, COLUMNS), freed=(split.storage,))
        found = records(script.compiled())
        assert len(found) == count
        if count == 1:
            assert (found[0].kind, found[0].inputs, found[0].elements) == ("fused", 1, parts * SIZE)


def test_what_is_cast_twice_alike_is_cast_once():
    script = Script()
    data, weight = script.tensor(), script.tensor(COLUMNS, COLUMNS)
    narrow = [replace(script.tensor(), dtype="float16") for _ in range(2)]
    for each in narrow:
        script.call("_to_copy", data, output=each)
        script.call("mm", each, weight)
    casts = [record for record in records(script.compiled()) if isinstance(record, Elementwise)]
    assert len(casts) == 1 and casts[0].write_bytes == SIZE * 2
    script.call("relu_", data, output=data)  # what is in it has changed: it is cast again
    script.call("_to_copy", data, output=replace(script.tensor(), dtype="float16"))
    assert sum(isinstance(record, Elementwise) for record in records(script.compiled())) > 1


def test_pooling_over_small_windows_is_generated_code():
    for side, kind in ((2, "Elementwise"), (7, "Pooling")):
        script = Script()
        image, smaller = script.tensor(8, 16, 28, 28), script.tensor(8, 16, 28 // side, 28 // side)
        script.call("avg_pool2d", image, (side, side), output=smaller)
        (record,) = records(script.compiled())
        assert type(record).__name__ == kind
        if side == 2:
            made = 8 * 16 * 14 * 14
            assert (record.read_bytes, record.write_bytes) == (4 * made * 4, made * 4)


def test_a_product_on_the_way_parts_two_kernels():
    script = Script()
    weight = script.tensor(COLUMNS, COLUMNS)
    data = script.call("relu", script.tensor())
    product = script.call("mm", script.call("tanh", data), weight)
    script.call("relu", script.call("add", product, data))
    kinds = [type(record).__name__ for record in records(script.compiled())]
    assert kinds == ["Elementwise", "Gemm", "Elementwise"]
    before, _, after = records(script.compiled())
    assert (before.inputs, before.outputs) == (1, 2)  # both results are used by what follows
    assert (after.inputs, after.outputs) == (2, 1)


def test_what_is_not_used_again_and_freed_is_not_written():
    script = Script()
    unused = script.tensor()
    kept = script.call("add", script.tensor(), script.tensor())
    script.call("mul", kept, kept, output=unused)
    script.call("relu", kept, freed=(unused.storage,))
    (record,) = records(script.compiled())
    assert record.outputs == 1


def test_a_broadcast_operand_is_read_in_its_own_size():
    script = Script()
    bias = script.tensor(COLUMNS)
    script.call("relu", script.call("add", script.tensor(), bias))
    (record,) = records(script.compiled())
    assert (record.inputs, record.broadcast_elements) == (1, COLUMNS)


def test_scale_mask_and_softmax_are_one_kernel():
    script = Script()
    masked = script.call("add", script.call("div", script.tensor()), script.tensor(1, COLUMNS))
    output = script.tensor()
    script.calls.append(OperatorCall(2, "aten::_softmax", None, 0, (masked, -1, False), (output,), "forward"))
    (record,) = records(script.compiled())
    assert (record.kind, record.inputs, record.outputs) == ("fused", 1, 1)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_training_reads_twice_what_leads_to_it(training):
    script = Script()
    image, weights = script.tensor(8, 16, 14, 14), [script.tensor(16) for _ in range(4)]
    skipped = script.tensor(8, 16, 14, 14)
    before = script.call("relu", image, output=script.tensor(8, 16, 14, 14))
    normed = script.tensor(8, 16, 14, 14)
    inputs = (before, *weights, training, 0.1, 1e-5)
    script.calls.append(OperatorCall(1, "aten::cudnn_batch_norm", None, 0, inputs, (normed,), "forward"))
    last = script.call("add", normed, skipped, output=script.tensor(8, 16, 14, 14))
    script.calls[-1] = replace(script.calls[-1], attributes={"freed": (before.storage, normed.storage)})
    graph = script.compiled()
    size = 4 * 8 * 16 * 14 * 14
    fused = records(graph)[-1]
    small = 4 * 4 * 16
    assert last.shape == image.shape and fused.write_bytes == size
    assert sum(each.read_bytes for each in records(graph)) == pytest.approx(
        (3 if training else 2) * size, abs=2 * small
    )
    assert len(graph.tasks) == (2 if training else 1)
    launches = [action.task for actions in graph.threads.values() for action in actions if isinstance(action, Launch)]
    assert launches == list(range(len(graph.tasks)))


def test_forward_and_backward_are_not_fused():
    script = Script()
    result = script.call("add", script.tensor(), script.tensor())
    script.call("relu", result, phase="backward")
    assert len(script.compiled().tasks) == 2


def test_the_optimizer_is_left_as_it_is():
    script = Script()
    gradient = script.call("add", script.tensor(), script.tensor())
    script.call("mul", script.call("add", gradient, gradient, phase="optimizer"), gradient, phase="optimizer")
    trace = OperatorTrace(tuple(script.calls))
    eager, compiled = lower(trace), compile_rank(lower(trace), trace)
    assert [task.operators for task in compiled.tasks] == [task.operators for task in eager.tasks]
    later = [action for action in eager.actions() if getattr(action, "call", None) in (1, 2)]
    assert [action for action in compiled.actions() if getattr(action, "call", None) in (1, 2)] == later


def test_types_that_kernels_do_not_tell_apart_are_priced_by_their_size():
    """Rotations of complex numbers, as in Llama 4."""
    script = Script()
    turned = replace(script.tensor(), dtype="complex64")
    script.call(
        "mul", turned, replace(script.tensor(), dtype="complex64"), output=replace(script.tensor(), dtype="complex64")
    )
    (record,) = records(script.compiled())
    assert record.read_bytes == 2 * SIZE * 8 and record.write_bytes == SIZE * 8


def test_generated_code_has_a_gap_and_a_launch_and_libraries_all_overheads():
    script = Script()
    script.call("mm", script.call("relu", script.call("add", script.tensor(), script.tensor())), script.tensor())
    actions = [
        (action.kind, action.call) if isinstance(action, HostWork) else "launch"
        for action in script.compiled().actions()
    ]
    assert actions == [("T1", 1), "launch", ("T1", 2), ("T2", 2), "launch", ("T3", 2)]


def test_every_task_is_launched_once():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from e2e.capture.models.catalog import build_from_config
    from e2e.capture.models.configurations import PRESETS
    from e2e.capture.session import capture
    from e2e.step.options import StepOptions

    assert torch
    options = StepOptions(mode="forward-backward")
    config = {**PRESETS["gpt2"], "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128}
    trace = capture(build_from_config(config, 2, 16, options, "gpt2"), options)
    eager, compiled = lower(trace), compile_rank(lower(trace), trace)
    launched = Counter(action.task for action in compiled.actions() if isinstance(action, Launch))
    assert launched == Counter(range(len(compiled.tasks)))
    assert [task.id for task in compiled.tasks] == list(range(len(compiled.tasks)))
    assert moved(compiled) < 0.7 * moved(eager)
    assert products(compiled) == products(eager)


def moved(graph: RankGraph) -> int:
    """Bytes of all kernels but products."""
    return sum(
        record.read_bytes + record.write_bytes
        for task in graph.tasks
        for record in task.operators
        if isinstance(record, Elementwise) or type(record).__name__ in ("Softmax", "Normalization", "Rearrangement")
    )


def products(graph: RankGraph) -> Counter:
    return Counter(record for task in graph.tasks for record in task.operators if isinstance(record, Gemm))


def test_large_products_with_a_ragged_vocabulary_are_computed_on_padded_copies():
    rows, width, classes = 16384, 768, 50257
    script = Script()

    def tensor(*shape: int) -> Tensor:
        return replace(script.tensor(*shape), dtype="bfloat16")

    inputs, scores = tensor(rows, width), tensor(rows, classes)
    script.call("mm", scores, tensor(classes, width), output=tensor(rows, width))
    turned = replace(scores, shape=(classes, rows), stride=(1, classes))
    script.call("mm", turned, inputs, output=tensor(classes, width))
    found = records(script.compiled())
    products = [record for record in found if isinstance(record, Gemm)]
    assert [(each.m, each.n, each.k) for each in products] == [(rows, width, 50264), (50264, width, rows)]
    copies = [record.elements for record in found if isinstance(record, Elementwise)]
    assert sorted(copies) == [classes * width, rows * classes]  # the scores once for both products


def test_products_that_are_aligned_or_move_more_than_they_compute_are_left_as_they_are():
    for shape in ((16384, 50304, 768), (16, 50257, 768)):
        script = Script()
        m, n, k = shape
        a, b, c = (replace(script.tensor(*each), dtype="bfloat16") for each in ((m, k), (k, n), (m, n)))
        script.call("mm", a, b, output=c)
        (record,) = records(script.compiled())
        assert (record.m, record.n, record.k) == shape
