"""The ways to run a model without gradients give one and the same device work; tensors say that they are on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from e2e.capture.evaluation import MOST_DIFFERENT, EvaluationPasses
from e2e.capture.models.catalog import IMAGES
from e2e.capture.recorder import Recorder
from e2e.capture.script import capture_script, load_script
from e2e.capture.session import recording
from e2e.lowering.lower_trace import lower_step
from e2e.step.execution_graph import RankGraph
from e2e.step.options import StepOptions
from tests.case_lists import one_in

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}
Make = Callable[[], tuple[nn.Module, Callable[[], Any]]]


def work(make: Make, *, compiled: bool = False) -> list[Any]:
    """Names and device work of the kernels of one step."""
    trace = capture_script(load_script(make), StepOptions(mode="forward-backward", attention="flash"))
    assert trace.calls
    graph = lower_step(trace, StepOptions(compile=compiled)).graph
    assert isinstance(rank := graph.ranks[0], RankGraph)
    return [(task.name, task.operators) for task in rank.tasks]


def in_each_mode(make: Callable[[Callable[[], AbstractContextManager[Any]]], Make], **how: bool) -> None:
    expected = work(make(MODES["no_grad"]), **how)
    for name, mode in MODES.items():
        assert work(make(mode), **how) == expected, name


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


PICTURE, WORDS, SQUARE = (2, 8, 12, 12), (2, 6, 16), (16, 16)
# Composite operators: PyTorch's own functions around those that have kernels.
COMPOSITE: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(cuda(*WORDS), cuda(*SQUARE), cuda(16)),
    "linear without bias": lambda: F.linear(cuda(*WORDS), cuda(*SQUARE)),
    "linear of a slice": lambda: F.linear(cuda(2, 12, 16)[:, ::2], cuda(*SQUARE), cuda(16)),
    "bilinear": lambda: F.bilinear(cuda(4, 16), cuda(4, 16), cuda(3, 16, 16), cuda(3)),
    "matmul folded": lambda: torch.matmul(cuda(*WORDS), cuda(*SQUARE)),
    "matmul batched": lambda: torch.matmul(cuda(3, 2, 4, 8), cuda(2, 8, 5)),
    "einsum": lambda: torch.einsum("bij,jk->bik", cuda(*WORDS), cuda(*SQUARE)),
    "tensordot": lambda: torch.tensordot(cuda(*WORDS), cuda(*SQUARE), dims=1),
    "batch_norm": lambda: F.batch_norm(cuda(*PICTURE), cuda(8), cuda(8), cuda(8), cuda(8)),
    "batch_norm of the batch": lambda: F.batch_norm(cuda(*PICTURE), None, None, cuda(8), cuda(8), training=True),
    "instance_norm": lambda: F.instance_norm(cuda(*PICTURE)),
    "group_norm": lambda: F.group_norm(cuda(*PICTURE), 2, cuda(8), cuda(8)),
    "layer_norm": lambda: F.layer_norm(cuda(*WORDS), (16,), cuda(16), cuda(16)),
    "rms_norm": lambda: F.rms_norm(cuda(*WORDS), (16,), cuda(16)),
    "conv2d": lambda: F.conv2d(cuda(*PICTURE), cuda(4, 8, 3, 3), cuda(4), padding="same"),
    "conv1d grouped": lambda: F.conv1d(cuda(*WORDS), cuda(6, 1, 3), groups=6),
    "conv_transpose2d": lambda: F.conv_transpose2d(cuda(*PICTURE), cuda(8, 4, 2, 2), stride=2),
    "max_pool2d": lambda: F.max_pool2d(cuda(*PICTURE), 2),
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(cuda(*PICTURE), 1),
    "interpolate": lambda: F.interpolate(cuda(*PICTURE), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda: F.grid_sample(cuda(*PICTURE), cuda(2, 5, 5, 2), align_corners=False),
    "attention": lambda: F.scaled_dot_product_attention(*(cuda(2, 4, 16, 32, dtype=torch.float16) for _ in range(3))),
    "softmax in another type": lambda: F.softmax(cuda(*WORDS, dtype=torch.float16), -1, dtype=torch.float32),
    "cross_entropy": lambda: F.cross_entropy(cuda(4, 10), cuda(4, dtype=torch.int64)),
    "cosine_similarity": lambda: F.cosine_similarity(cuda(*WORDS), cuda(*WORDS)),
    "dropout": lambda: F.dropout(cuda(*WORDS), 0.1),
    "embedding_bag": lambda: F.embedding_bag(cuda(2, 6, dtype=torch.int64), cuda(10, 8)),
    "one_hot": lambda: F.one_hot(cuda(6, dtype=torch.int64), 4),
    "silu, gelu, glu": lambda: F.glu(F.gelu(F.silu(cuda(*WORDS)))),
    "reshape, to, contiguous": lambda: cuda(*WORDS).transpose(0, 1).reshape(-1, 8).to(torch.float16).t().contiguous(),
    "layout": lambda: cuda(*PICTURE).to(memory_format=torch.channels_last).flatten(1),
    "norm": lambda: torch.linalg.norm(cuda(*WORDS), dim=-1),
    "var, std": lambda: cuda(*WORDS).var(-1) + cuda(*WORDS).std(-1),
    "lstm": lambda: torch.nn.LSTM(16, 8, device="cuda")(cuda(*WORDS)),
    "selected by a mask": lambda: cuda(*WORDS)[cuda(*WORDS) > 0],
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", COMPOSITE)
def test_composite_operators_are_the_same_in_every_mode(name: str, autocast: bool):
    def make(mode: Callable[[], AbstractContextManager[Any]]) -> Make:
        def step() -> None:
            with mode(), torch.autocast("cuda") if autocast else nullcontext():
                COMPOSITE[name]()

        return lambda: (nn.Identity(), step)

    in_each_mode(make)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.layers(data.flatten(2).mT.mean(-1, keepdim=True).expand(-1, -1, 64))


@pytest.mark.parametrize(
    ("name", "compiled"), one_in(3, itertools.product([*sorted(IMAGES)[:4], "encoder"], [False, True]))
)
def test_models_are_the_same_in_every_mode(name: str, compiled: bool):
    def make(mode: Callable[[], AbstractContextManager[Any]]) -> Make:
        def made() -> tuple[nn.Module, Callable[[], Any]]:
            module = (Encoder() if name == "encoder" else IMAGES[name][0]()).eval().cuda()
            side = 8 if name == "encoder" else IMAGES[name][1]
            data = torch.randn(2, 3, side, side, device="cuda")

            @mode()  # type: ignore[operator,unused-ignore]
            def step() -> Any:
                return module(data)

            return module, step

        return made

    in_each_mode(make, compiled=compiled)


def test_the_mode_is_told_to_the_script_and_ends():
    told: list[bool] = []

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        module = nn.Linear(4, 4).cuda()

        def step() -> None:
            with torch.inference_mode():
                result = module(cuda(2, 4))
                told.extend([torch.is_inference_mode_enabled(), result.is_inference(), not result.requires_grad])
                with torch.inference_mode(False):
                    told.extend([not torch.is_inference_mode_enabled(), torch.is_grad_enabled()])
            told.extend([not torch.is_inference_mode_enabled(), torch.is_grad_enabled()])
            module(cuda(2, 4)).sum().backward()

        return module, step

    with torch.inference_mode():  # of the caller
        trace = capture_script(load_script(make), StepOptions(mode="forward-backward"))
        assert torch.is_inference_mode_enabled()
    assert len(told) == 2 * 7 and all(told)  # the second step is captured
    assert any(call.phase == "backward" for call in trace.calls)


def test_tensors_say_that_they_are_on_the_gpu():
    seen: dict[str, Any] = {}

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("cuda")
        data = torch.randn(4, 8, device=torch.device("cuda"))
        seen["module"] = next(module.parameters()).device

        def step() -> None:
            device = data.device
            seen["type"], seen["whole"] = device.type, device == torch.device("cuda", 0)
            seen["is"] = (data.is_cuda, data.is_meta, data.detach().cpu().device.type)
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                result = module[0](data)
                seen["autocast"] = (torch.is_autocast_enabled(device.type), result.dtype)
            made = [
                torch.arange(4, device=device),
                torch.zeros_like(data, device=device),
                data.new_ones(3, device=device),
                torch.tensor([1, 2], device=device),
                torch.ones(2, device="cpu").to(device),
                torch.ones(2, device="cpu").to(data),
                torch.full((2,), 1.0, device=str(device)),
            ]
            seen["made"] = {each.device for each in made}
            with torch.device(device):
                seen["context"] = torch.zeros(2).device
            result.float().sum().backward()
            seen["gradient"] = next(module.parameters()).grad.device  # type: ignore[union-attr]

        return module, step

    capture_script(load_script(make), StepOptions(mode="forward-backward"))
    gpu = torch.device("cuda", 0)
    assert seen == {
        "module": gpu,
        "type": "cuda",
        "whole": True,
        "is": (True, False, "cpu"),
        "autocast": (True, torch.bfloat16),
        "made": {gpu},
        "context": gpu,
        "gradient": gpu,
    }
    assert torch.empty(2, device="meta").device.type == "meta"


def test_of_many_passes_that_differ_the_first_ones_are_recorded() -> None:
    """As in a generation whose cache grows with every token."""
    recorder = Recorder({})
    passes = EvaluationPasses(recorder)
    with recording(recorder, StepOptions(), steady=False), passes.watching(), torch.no_grad():
        layer = nn.Linear(4, 4, device="cuda")
        recorded = []
        for rows in range(1, MOST_DIFFERENT + 9):
            layer(torch.empty(rows, 4, device="cuda"))
            recorded.append(recorder.recorded)
    group = passes.groups[0]
    assert (group.passes, group.replayed, passes.passed_over) == (MOST_DIFFERENT + 8, 8, 8)
    assert recorded[MOST_DIFFERENT - 1] > recorded[1] == group.calls.stop and len(set(recorded[MOST_DIFFERENT:])) == 1
