"""What a program compiles: functions, modules and optimizers; Python bodies of custom operators; forced attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data._utils import worker

from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, ScaledGemm
from costmodel.operators.layers import Conv2d
from e2e.capture.custom_operators import CustomOperators
from e2e.capture.recorder import Recorder
from e2e.capture.regions import Regions
from e2e.capture.session import recording
from e2e.commands.e2e_api import predict
from e2e.lowering.lower_trace import lower, lower_step
from e2e.step.operator_trace import OperatorTrace, tensors
from e2e.step.options import SeenGpu, StepOptions

OPTIONS = StepOptions(mode="forward-backward", attention="flash", seen_gpu=SeenGpu(capability=(8, 0)))


def watched(run: Callable[[], Any]) -> OperatorTrace:
    """Trace of what ``run`` does, recorded as a program is."""
    recorder = Recorder({})
    recorder.regions, recorder.custom, recorder.counting = Regions(hand_on=recorder.hand_on), CustomOperators(), True
    with recording(recorder, OPTIONS):
        run()
    step = recorder.cut()
    return OperatorTrace(step.calls, compiled=bool(recorder.compiled), regions=step.regions)


def kernels(trace: OperatorTrace) -> list[str]:
    step = lower_step(trace, StepOptions(compile=True))
    return [task.name for task in step.graph.ranks[0].tasks]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def test_functions_called_between_operators_are_counted_where_they_run():
    """Before an operator; not in a compiled region; what one calls in a worker of a data loader is not the host's."""

    def idle() -> None:
        pass

    def run() -> None:
        given = tensor(4)
        of_pytorch = torch.is_deterministic_algorithms_warn_only_enabled  # calls another one in C
        for function, times in (
            *((idle, 3), (idle, 40), (time.monotonic, 10), (time.monotonic, 400), (given.dim, 10), (of_pytorch, 10)),
        ):
            repeat(function, times)
            given = given.cos()

        @torch.compile
        def compiled(given: torch.Tensor) -> torch.Tensor:
            for _ in range(40):
                idle()
            return given.sin()

        compiled(given)
        with patch.object(worker, "_worker_info", object()):
            for _ in range(40):
                idle()
        given.tanh()

    trace = watched(run)
    counts = [call.functions for call in trace.calls if call.name == "aten::cos"]
    few, *more = counts
    # One in C counts from one place 16 times; PyTorch's count for more.
    assert few < 30 and [count - few for count in more] == [37, 7, 13, 27, 117]
    assert all(call.functions < 30 for call in trace.calls if call.name in ("aten::sin", "aten::tanh"))
    infos = lower(trace).calls.values()
    assert [info.functions for info in infos if info.name == "aten::cos"] == counts


@pytest.mark.parametrize("compiles", [False, True])
def test_a_checkpoint_around_compiled_code_computes_all_of_it_again(compiles: bool):
    def run() -> None:
        layer = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)).to("cuda")
        if compiles:
            layer.compile()
        checkpoint(layer, tensor(8, 64), use_reentrant=False).sum().backward()

    products = [call for call in watched(run).calls if call.name == "aten::addmm"]
    assert len(products) == (4 if compiles else 3)  # eagerly the last one's result is needed by nothing


@pytest.mark.parametrize("as_module", [False, True])
def test_compiled_code_writes_what_it_returns_and_gets_zeros_for_what_is_not_in_the_loss(as_module: bool):
    class Net(nn.Module):
        def forward(self, given: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = given.bfloat16().float()
            return {"loss": scores.exp().sum(), "scores": scores}

    def run() -> None:
        given = tensor(1024, 1024).requires_grad_()
        net = Net()
        found = (torch.compile(net) if as_module else torch.compile(net.forward))(given)
        loss = found["loss"]
        del found
        loss.backward()

    trace = watched(run)
    (zeros,) = [call for call in trace.calls if call.name == "aten::zeros" and call.phase == "backward"]
    assert zeros.outputs[0].shape == (1024, 1024) and zeros.id not in trace.regions
    rank = lower_step(trace, StepOptions(compile=True)).graph.ranks[0]
    forward = [task for task in rank.tasks if task.call is not None and rank.calls[task.call].phase == "forward"]
    written = [each for task in forward for each in task.operators if isinstance(each, Elementwise)]
    assert any(each.kind == "fused" and each.outputs for each in written)


def test_only_what_is_compiled_is_fused():
    def run() -> None:
        @torch.compile(mode="max-autotune", fullgraph=True)
        def compiled(given: torch.Tensor) -> torch.Tensor:
            return given.sigmoid() * given + 1

        found = compiled(tensor(64, 64))
        (found.cos() * found).sum().backward()

    names = kernels(watched(run))
    assert "inductor::triton_fused_sigmoid_mul_add" in names
    assert {"aten::cos", "aten::mul"} <= set(names)
    fused = [name for name in names if name.startswith("inductor")]
    assert len(fused) == 2  # one each way


def test_torchscript_fuses_a_function_but_not_a_module():
    """Its calls are regions as those of ``torch.compile``; a convolution beside them keeps its layout."""

    class Gate(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given.sigmoid() * given

    def run() -> None:
        @torch.jit.script
        def scaled(given: torch.Tensor) -> torch.Tensor:
            return given.tanh() * 2.0 + given

        convolution = nn.Conv2d(8, 64, 3).cuda()
        torch.jit.script(Gate())(scaled(convolution(tensor(2, 8, 8, 8)))).cos().sum().backward()

    trace = watched(run)
    names = kernels(trace)
    assert len([name for name in names if name.startswith("inductor")]) == 2  # one each way
    assert {"aten::cos", "aten::sigmoid"} <= set(names) and "aten::tanh" not in names
    graph = lower_step(trace, StepOptions(compile=True)).graph.ranks[0]
    layouts = {each.channels_last for task in graph.tasks for each in task.operators if isinstance(each, Conv2d)}
    assert layouts == {False}


def test_a_number_is_added_in_place():
    trace = watched(lambda: torch.zeros(64, device="cuda").add_(0.5))
    assert [call.name for call in trace.calls][-1] == "aten::add_"


def test_a_sparse_gradient_moves_the_rows_that_it_holds():
    def run() -> None:
        table = nn.Embedding(100_000, 128, sparse=True, device="cuda")
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.randint(100_000, (4096,), device="cuda")).sum().backward()
        assert table.weight.grad is not None and table.weight.grad._nnz() == 4096
        optimizer.step()

    trace = watched(run)
    graph = lower(trace, StepOptions())
    update = [task for task in graph.tasks if task.call is not None and graph.calls[task.call].phase == "optimizer"]
    assert [task.name for task in update] == ["aten::mul", "aten::index_add_"]
    assert all(each.elements == 4096 * 128 for task in update for each in task.operators)  # type: ignore[union-attr]
    assert not [task for task in graph.tasks if task.name in ("aten::clone", "aten::copy_")]


def test_a_constructor_gives_a_parameter_numbers_that_it_has_computed():
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(4, 4, bias=False)
            self.product.weight.data = torch.linalg.qr(torch.FloatTensor(4, 4).normal_())[0]

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.product(given)  # type: ignore[no-any-return]

    (product,) = [call for call in watched(lambda: Rotation().cuda()(tensor(8, 4))).calls if call.name == "aten::mm"]
    assert [each.shape for each in tensors(product.inputs)] == [(8, 4), (4, 4)]


def test_calls_of_one_compiled_module_are_regions_of_their_own():
    def run() -> None:
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda()
        once, again = torch.compile(block), nn.Linear(8, 8).cuda()
        again.compile()
        again(once(once(tensor(4, 8)))).sum().backward()

    trace = watched(run)
    assert trace.regions is not None and set(trace.regions.values()) == {1, 2, 3}
    backward = {call.name for call in trace.calls if call.phase == "backward" and call.id in trace.regions}
    assert "aten::threshold_backward" in backward


@pytest.mark.parametrize("where", ["torch.compiler", "torch._dynamo"])
def test_what_is_not_to_be_compiled_is_no_part_of_the_region_around_it(where: str):
    def run() -> None:
        @import_module(where).disable
        def apart(given: torch.Tensor) -> torch.Tensor:
            return given.cos() * 2

        class Layer(nn.Module):
            def forward(self, given: torch.Tensor) -> torch.Tensor:
                return apart(given.sigmoid() * 3).exp() + 1

        compiled = torch.compile(Layer() if where == "torch._dynamo" else Layer().forward)
        compiled(tensor(64, 64)).sum().backward()

    names = kernels(watched(run))
    assert {"inductor::triton_fused_sigmoid_mul", "inductor::triton_fused_exp_add"} <= set(names)
    assert {"aten::cos", "aten::sin"} <= set(names)


def fused(trace: OperatorTrace) -> list[tuple[str, int, int]]:
    """Name, bytes read and bytes written of each generated kernel."""
    tasks = lower_step(trace, StepOptions(compile=True)).graph.ranks[0].tasks
    return [
        (task.name, record.read_bytes, record.write_bytes)
        for task in tasks
        if task.name.startswith("inductor")
        for record in task.operators
    ]


def test_a_loss_over_classes_reads_the_scores_and_writes_no_logarithms():
    rows, classes = 512, 4096
    scores = 2 * rows * classes

    def run() -> None:
        head, targets = tensor(64, classes).bfloat16(), torch.zeros(rows, dtype=torch.long, device="cuda")

        @torch.compile
        def loss(hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy((hidden @ head).float(), targets)

        loss(tensor(rows, 64).bfloat16()).backward()

    forward, backward = (each for each in fused(watched(run)) if "softmax" in each[0])
    small = scores // 100
    assert abs(forward[1] - scores) < small and forward[2] < small
    assert abs(backward[1] - scores) < small and abs(backward[2] - scores) < small


def test_the_backward_pass_computes_again_what_the_forward_pass_need_not_write():
    rows, columns = 512, 4096
    size = 4 * rows * columns

    def run() -> None:
        first, second = tensor(64, columns), tensor(columns, 64)
        torch.compile(lambda given: (given @ first).relu().square() @ second)(tensor(rows, 64)).sum().backward()

    forward, backward = fused(watched(run))
    assert forward[1:] == (size, size)  # of the product; the square
    assert backward[1:] == (2 * size, size)  # the gradient and the product again


def test_what_is_broadcast_is_computed_by_each_kernel_that_reads_it():
    batch, length = 64, 256
    size = 4 * batch * length * length

    def run() -> None:
        def layers(scores: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            total = bias + mask
            return ((scores + total).softmax(-1) @ scores + total).softmax(-1) @ scores

        given = torch.randn(batch, length, length, device="cuda")
        bias, mask = torch.randn(1, length, length, device="cuda"), torch.randn(batch, 1, length, device="cuda")
        torch.compile(layers)(given, bias, mask)

    for _, read, written in fused(watched(run)):
        assert (read, written) == (pytest.approx(size, rel=0.05), size)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_step_keeps_what_its_kernels_write(compiled: bool):
    rows, columns = 1024, 8192
    size = 4 * rows * columns

    def run() -> None:
        def chain(given: torch.Tensor) -> torch.Tensor:
            return given.sigmoid().tanh().exp()

        call = torch.compile(chain) if compiled else chain
        call(tensor(rows, columns)).backward(torch.empty(rows, columns, device="cuda"))

    (usage,) = lower_step(watched(run), StepOptions(compile=compiled)).memory.values()
    # Compiled: the input, the result and its gradient; eagerly the results of all three, and the gradient.
    assert usage.breakdown["activations"] == (3 if compiled else 4) * size


def test_numbers_in_compiled_code_are_constants():
    def run() -> None:
        def scaled(given: torch.Tensor) -> torch.Tensor:
            return given * torch.tensor([2.0, 3.0], device="cuda")

        torch.compile(scaled)(scaled(tensor(64, 2)))

    assert [name for name in kernels(watched(run)) if "Memcpy" in name] == ["Memcpy HtoD"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_step_of_an_optimizer_is_one_pass(whole: bool):
    def run() -> None:
        layer = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(layer.parameters())
        step = torch.compile(optimizer.step if whole else lambda: optimizer.step())
        layer(tensor(4, 64)).sum().backward()
        step()

    names = {call.name for call in watched(run).calls}
    assert "aten::_fused_adamw_" in names and "aten::_foreach_lerp_" not in names


def test_functions_compiled_inside_an_optimizer_are_fused():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            direction = torch.compile(lambda given: given.sign() * given.abs() + given)
            for each in self.param_groups[0]["params"]:
                each.data.add_(direction(each.grad))

    def run() -> None:
        layer = nn.Linear(64, 64, bias=False).cuda()
        optimizer = Own(layer.parameters())
        layer(tensor(4, 64)).sum().backward()
        optimizer.step()

    assert "inductor::triton_fused_sign_abs_mul_add" in kernels(watched(run))


def test_the_body_of_a_custom_operator_is_priced():
    library = torch.library.Library("kern_test", "DEF")

    @torch.library.custom_op("kern_test::product", mutates_args=(), device_types="cuda")
    def product(data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        one = data.new_tensor(1.0, dtype=torch.float32)
        eight = data.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        return torch._scaled_mm(eight[0], eight[1].t(), one, one, out_dtype=torch.bfloat16)

    @product.register_fake
    def _(data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return data.new_empty(data.shape[0], weight.shape[0])

    @torch.library.custom_op("kern_test::strange", mutates_args=(), device_types="cuda")
    def strange(data: torch.Tensor) -> torch.Tensor:
        (data + 1).data_ptr().nothing()  # type: ignore[attr-defined]
        return data

    @strange.register_fake
    def _(data: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(data)

    def run() -> None:
        library.define("older(Tensor data) -> Tensor")
        library.impl("older", lambda data: data.exp(), "CUDA")
        library._register_fake("older", torch.empty_like)
        data = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
        torch.ops.kern_test.older(strange(product(data, data)))

    trace = watched(run)
    graph = lower(trace)
    (scaled,) = [each for task in graph.tasks for each in task.operators if isinstance(each, ScaledGemm)]
    assert (scaled.m, scaled.n, scaled.k) == (64, 64, 32)
    assert "aten::exp" in [task.name for task in graph.tasks]
    # What fails is named, and what it did before is forgotten.
    (unknown,) = [task for task in graph.tasks if task.name.startswith("kern_test")]
    assert unknown.name == "kern_test::strange"
    assert isinstance(unknown.operators[0], Elementwise) and unknown.operators[0].kind == "unknown"
    assert "aten::add" not in [call.name for call in trace.calls]


@pytest.mark.parametrize(
    ("backends", "kernel"),
    [
        ([SDPBackend.FLASH_ATTENTION], "flash2"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "efficient"),
        ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
        ([SDPBackend.MATH], None),
    ],
)
def test_attention_that_a_program_forces(backends: list[SDPBackend], kernel: str | None):
    def run() -> None:
        query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(backends):
            F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    graph = lower(watched(run))
    found = [each for task in graph.tasks for each in task.operators if isinstance(each, Attention)]
    assert [each.kernel for each in found] == ([kernel, kernel] if kernel else [])
    assert all(each.causal and each.query_length == 128 and each.heads == 4 for each in found)


def test_weights_of_a_truncated_distribution_are_drawn_once():
    def run() -> None:
        weight = torch.empty(64, 64, device="cuda")
        torch.nn.init.trunc_normal_(weight, std=0.02)
        torch.nn.init.trunc_normal_(weight, a=1.0, b=2.0)

    def on_host() -> None:
        assert (torch.nn.init.trunc_normal_(torch.empty(1000), a=1.0, b=2.0) >= 1).all()

    drawn = [call.name for call in watched(run).calls if "normal" in call.name or "any" in call.name]
    assert drawn == ["aten::normal_", "aten::normal_"]
    assert watched(on_host).calls


@pytest.mark.parametrize("in_order", [True, False])
def test_a_program_that_orders_the_attention_kernels(in_order: bool):
    """GPUs of compute capability 8 do not prefer cuDNN of themselves."""
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def run() -> None:
        assert torch.cuda.get_device_capability()[0] < 9
        query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
        with sdpa_kernel(backends, set_priority=in_order):
            F.scaled_dot_product_attention(query, query, query, is_causal=True)

    graph = lower(watched(run))
    (found,) = [each for task in graph.tasks for each in task.operators if isinstance(each, Attention)]
    assert found.kernel == ("cudnn" if in_order else "flash2")


def test_a_policy_keeps_the_attention_of_cudnn_that_a_program_forces():
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    def run() -> None:
        query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        key = torch.randn(2, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        checkpoint(attend, query, key, use_reentrant=False, context_fn=contexts).sum().backward()
        assert key.grad is not None and key.grad.shape == key.shape

    graph = lower(watched(run))
    found = [each.direction for task in graph.tasks for each in task.operators if isinstance(each, Attention)]
    assert found == ["forward", "backward"]


PROGRAM = """
import torch
from flash_attn import flash_attn_func
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attend = torch.compile(flex_attention)
model = torch.compile(torch.nn.Linear(256, 256).to("cuda", torch.bfloat16))
optimizer = torch.optim.SGD(model.parameters(), fused=True)
blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512)
while True:
    data = model(torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16)).relu().unflatten(2, (4, 64))
    turned = data.transpose(1, 2)
    (flash_attn_func(data, data, data).sum() + attend(turned, turned, turned, block_mask=blocks).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_program_with_all_of_it(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    found = predict(command=("python", "train.py"), folder=tmp_path, gpu="a100-sxm-80gb")
    priced = set(found.breakdown["by_operator"])
    assert {"package::attention_backward", "attention::flex", "aten::relu", "aten::_fused_sgd_"} <= priced
    assert any(line.startswith("flash_attn cannot run without a GPU") for line in (*found.notes, *found.warnings))
    assert not any("without a model" in line for line in (*found.notes, *found.warnings))
