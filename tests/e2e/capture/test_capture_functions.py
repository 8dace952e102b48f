"""Decisions that CUDA takes: fused dropout, attention kernels, autocast, devices, reads by the host."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

from costmodel.operators.device_work import Attention, Gemm
from costmodel.operators.experts import GroupedGemm
from e2e.capture import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions


def record(step: Callable[[], object], **options: str) -> OperatorTrace:
    return capture(CapturedWorkload("step", torch.nn.Identity(), step), StepOptions(**options))


def counts(trace: OperatorTrace) -> Counter[str]:
    return Counter(call.name for call in trace.calls)


def heads(dtype: torch.dtype = torch.float32, kv: int = 4, grad: bool = True) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 4, 16, 32), (2, kv, 16, 32), (2, kv, 16, 32))
    return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes)


def test_values_of_torch_fx_are_traced_as_such():
    """As libraries do that write the code of their modules while they are made."""

    def step() -> None:
        graph = torch.fx.Graph()
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        left, right = (torch.fx.Proxy(graph.placeholder(name), tracer) for name in "ab")
        for value in (torch.einsum("ij,jk->ik", left, right), torch.tensordot(left, right, dims=1)):
            assert isinstance(value, torch.fx.Proxy)
        assert len(graph.nodes) == 4

    assert not record(step).calls


def test_dropout_is_one_kernel_in_training_and_nothing_otherwise():
    data = torch.empty(8, device="meta")
    assert counts(record(lambda: functional.dropout(data, 0.1)))["aten::native_dropout"] == 1
    assert not record(lambda: functional.dropout(data, 0.1, training=False)).calls
    assert not record(lambda: functional.dropout(data, 0.0)).calls


def test_flash_attention_for_16_bits_without_a_mask():
    query, key, value = heads(torch.bfloat16)
    step = lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()  # noqa: E731
    names = counts(record(step, attention="flash"))
    assert names["aten::_scaled_dot_product_flash_attention"] == 1
    assert names["aten::_scaled_dot_product_flash_attention_backward"] == 1
    assert not names["aten::bmm"]


def test_efficient_attention_for_32_bits_or_a_mask():
    query, key, value = heads()
    names = counts(record(lambda: functional.scaled_dot_product_attention(query, key, value), attention="flash"))
    assert names["aten::_scaled_dot_product_efficient_attention"] == 1
    query, key, value = heads(torch.float16)
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta")
    step = lambda: functional.scaled_dot_product_attention(query, key, value, mask)  # noqa: E731
    assert counts(record(step, attention="flash"))["aten::_scaled_dot_product_efficient_attention"] == 1


def transposed(mask: torch.Tensor) -> torch.Tensor:
    return mask.transpose(-1, -2)


@pytest.mark.parametrize(
    ("kv", "mask", "width", "grouped"),
    [(2, None, 32, True), (4, (1, 4, 16, 16), 32, False), (4, None, 30, False)],
    ids=["heads that share keys", "a mask with columns in memory", "rows of no whole vectors"],
)
def test_separate_products_where_no_kernel_of_32_bits_fits(kv: int, mask: tuple | None, width: int, grouped: bool):
    query, key, value = (each[..., :width].contiguous() for each in heads(kv=kv))
    given = None if mask is None else transposed(torch.empty(mask, device="meta"))
    step = lambda: functional.scaled_dot_product_attention(query, key, value, given, enable_gqa=grouped)  # noqa: E731
    names = counts(record(step, attention="flash"))
    assert names["aten::bmm"] == 2 and names["aten::_safe_softmax"] == 1
    assert not names["aten::_scaled_dot_product_efficient_attention"]


def test_a_learned_bias_and_grouped_heads_in_32_bits_run_as_products():
    query, key, value = heads()
    bias = torch.empty(16, 16, device="meta", requires_grad=True)
    step = lambda: functional.scaled_dot_product_attention(query, key, value, bias)  # noqa: E731
    assert counts(record(step, attention="flash"))["aten::bmm"] == 2
    fewer = key[:, :1], value[:, :1]
    step = lambda: functional.scaled_dot_product_attention(query, *fewer, enable_gqa=True)  # noqa: E731
    assert counts(record(step, attention="flash"))["aten::bmm"] == 2


def test_efficient_attention_where_values_are_narrower_than_keys():
    """DeepSeek's latent attention: each width counts, forward and backward."""
    query, key, value = heads(torch.bfloat16)
    narrow = value[..., : value.shape[-1] // 2]
    step = lambda: functional.scaled_dot_product_attention(query, key, narrow, is_causal=True).sum().backward()  # noqa: E731
    trace = record(step, attention="flash")
    names = counts(trace)
    assert names["aten::_scaled_dot_product_efficient_attention"] == 1 and not names["aten::bmm"]
    found = [each for task in lower(trace).tasks for each in task.operators if isinstance(each, Attention)]
    assert [each.direction for each in found] == ["forward", "backward"]
    assert {each.widths for each in found} == {(query.shape[-1], query.shape[-1] // 2)}


def test_eager_attention_is_products_and_softmax():
    query, key, value = heads()
    names = counts(record(lambda: functional.scaled_dot_product_attention(query, key, value), attention="eager"))
    assert names["aten::bmm"] == 2
    assert not any("flash" in name or "efficient" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_with_dropout_differs_from_pytorchs_own_by_the_dropout_alone(dtype: torch.dtype):
    query, key, value = heads(dtype)

    def products(dropout: float) -> Counter[str]:
        step = lambda: functional.scaled_dot_product_attention(query, key, value, None, dropout, True)  # noqa: E731
        trace = record(step, attention="eager")
        # C++ adds the mask in place, but not under a recorder.
        return Counter(task.name.removesuffix("_") for task in lower(trace).tasks)

    plain, dropped = products(0.0), products(0.1)
    assert dropped - plain == {"aten::native_dropout": 1}
    assert sum((plain - dropped).values()) <= 1  # a scalar made of minus infinity


def test_a_recomputed_forward_pass_is_seen_like_the_first():
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)).to("meta")
    data = torch.empty(4, 8, device="meta", requires_grad=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            result = checkpoint(block, data, use_reentrant=False)
        result.float().sum().backward()

    calls = record(step).calls
    dropouts = [call for call in calls if call.name == "aten::native_dropout"]
    assert [call.phase for call in dropouts] == ["forward", "backward"]
    assert {call.inputs[0].dtype for call in dropouts} == {"float16"}


def test_a_loss_scaler_does_not_skip_the_step_and_clipping_is_one_list():
    layer = torch.nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    data = torch.empty(4, 8, device="meta")

    def step() -> None:
        scaler = torch.amp.GradScaler("cuda")
        optimizer.zero_grad()
        scaler.scale(layer(data).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    names = counts(record(step))
    assert names["aten::_amp_foreach_non_finite_check_and_unscale_"] == names["aten::_amp_update_scale_"] == 1
    assert names["aten::_foreach_norm"] == 1
    assert names["aten::_foreach_add_"] == 1


@pytest.mark.parametrize(("dtype", "kernels"), [(torch.bfloat16, 1), (torch.float32, 4), (torch.float16, 4)])
def test_groups_of_rows_are_multiplied_at_once_in_bfloat16_alone(dtype: torch.dtype, kernels: int):
    rows = torch.empty((64, 32), dtype=dtype, device="meta", requires_grad=True)
    matrices = torch.empty((4, 32, 16), dtype=dtype, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    trace = record(lambda: functional.grouped_mm(rows, matrices, offs=ends).square().sum().backward())
    found = [each for task in lower(trace).tasks for each in task.operators if isinstance(each, Gemm | GroupedGemm)]
    assert len(found) == 3 * kernels and sum(each.flops for each in found) == 3 * 2 * 64 * 32 * 16


def test_grouped_queries_keep_their_heads_under_flash():
    query, key, value = heads(torch.float16, kv=2, grad=False)
    step = lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)  # noqa: E731
    call = next(c for c in record(step, attention="flash").calls if "flash_attention" in c.name)
    assert call.inputs[1].shape[1] == 2


def test_autocast_casts_products_down_and_softmax_up():
    layer = torch.nn.Linear(8, 8, device="meta")
    data = torch.empty(4, 8, device="meta")
    seen: dict[str, torch.dtype] = {}

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            seen["linear"] = layer(data).dtype
            seen["softmax"] = torch.softmax(layer(data), -1).dtype
        seen["after"] = layer(data).dtype

    names = counts(record(step))
    assert seen == {"linear": torch.bfloat16, "softmax": torch.float32, "after": torch.float32}
    assert names["aten::_to_copy"] == 2 + 2 + 1  # inputs and weights of products, the latter once, and of softmax


def test_an_autocast_region_casts_each_weight_once():
    layer = torch.nn.Linear(8, 8, device="meta")

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                first = layer(torch.empty(4, 8, device="meta", dtype=torch.bfloat16))
                with torch.no_grad():
                    layer(first)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    second = layer(first)
            second.sum().backward()

    trace = record(step)
    # In each region weight and bias with gradients and without; backward one of each, their gradients in float32.
    casts = Counter(call.phase for call in trace.calls if call.name == "aten::_to_copy")
    assert casts == {"forward": 2 * (2 + 2), "backward": 2 * 2}
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


def test_cuda_means_the_device_without_memory():
    def step() -> torch.Tensor:
        data = torch.zeros(3, device="cuda")
        assert torch.cuda.is_available() and data.is_cuda
        model = torch.nn.Linear(3, 3).to("cuda")
        return model(data.to("cuda:0")).cuda()

    trace = record(step)
    assert {t.device for c in trace.calls if c.name == "aten::addmm" for t in c.outputs} <= {"cuda:0"}


class Halved(torch.Tensor):
    """Tensor that holds another one, in bfloat16."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Halved:
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=torch.float32, device=held.device)
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.held if isinstance(each, Halved) else each for each in args), **(kwargs or {}))


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return Halved(tensor.to(torch.bfloat16))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float()


def test_a_tensor_that_holds_one_on_the_gpu_is_where_that_is():
    weight = torch.zeros(8, 8, device="meta", requires_grad=True)
    trace = record(lambda: torch.mm(Halve.apply(weight), torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda")))
    products = [call for call in trace.calls if call.name == "aten::mm"]
    assert [each.dtype for each in products[-1].inputs] == ["bfloat16"] * 2


def test_a_batch_from_the_host_is_copied_to_the_device():
    batch = torch.ones(4, 4)
    trace = record(lambda: batch.to("cuda", non_blocking=True) + 1)
    copies = [call for call in trace.calls if call.name == "aten::_to_copy"]
    assert (copies[0].inputs[0].device, copies[0].outputs[0].device) == ("cpu", "cuda:0")
    assert copies[0].attributes["non_blocking"] is True


def test_a_model_that_is_copied_to_the_host_takes_no_memory_there():
    model = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")
    held: list[int] = []

    def step() -> None:
        before = resident_pages()
        copy = model.to("cpu")
        held.append(resident_pages() - before)
        assert copy.shape == model.shape and copy.dtype == torch.bfloat16 and copy[-1] == 0

    record(step)
    assert max(held) * resource.getpagesize() < 1 << 28


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_reads_by_the_host_are_recorded_and_give_agreed_values():
    values = torch.empty(4, device="meta")
    seen: list[object] = []

    def step() -> None:
        seen.append(values.sum().item())
        seen.append(bool((values > 0).all()))
        seen.append(bool(values.isnan().any()))
        seen.append(values.cpu().tolist())
        torch.cuda.synchronize()

    names = counts(record(step))
    assert seen == 2 * [1.0, True, False, [0.0] * 4]  # the second step is captured
    assert names["aten::_local_scalar_dense"] == 3
    assert names["cudaDeviceSynchronize"] == 1


def test_a_function_around_several_operators_gives_no_call_of_its_own():
    layer = torch.nn.MultiheadAttention(16, 2, device="meta")
    data = torch.empty(4, 2, 16, device="meta")
    trace = record(lambda: layer(data, data, data))
    top = {call.name for call in trace.calls if call.parent is None}
    assert "aten::linear" in top
    assert not any("multi_head" in name for name in top)


@pytest.mark.parametrize("rows", [1, 7])
def test_shapes_that_depend_on_values_take_the_largest(rows: int):
    flags = torch.empty(rows, 3, dtype=torch.bool, device="meta")
    found: list[int] = []
    record(lambda: found.append(flags.nonzero().shape[0]))
    assert found == [rows * 3] * 2
