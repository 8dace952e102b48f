"""Values of small tensors that the script itself wrote decide what the script does, as they would on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from costmodel.base.errors import ModelError
from e2e.capture.script import capture_script, load_script
from e2e.sources.built_in_model import assumptions
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions


def captured(step: Callable[[], Any]) -> OperatorTrace:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        return nn.Identity(), step

    return capture_script(load_script(make), StepOptions(mode="forward-backward", attention="flash"))


def value_of(compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns inside a capture."""
    found: list[Any] = []
    captured(lambda: found.append(compute()))
    return found[-1]


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: torch.tensor([[1, 16, 16]], device="cuda").prod(-1).tolist(), [256]),
        (lambda: torch.ones(2, 5, dtype=torch.long, device="cuda").sum(-1).max().item(), 5),
        (lambda: torch.arange(7, device="cuda")[2:].cumsum(0)[-1].item(), 20),
        (lambda: torch.full((3,), False, device="cuda").all().item(), False),
        (lambda: bool(torch.isnan(torch.randn((), device="cuda"))), False),
        (lambda: torch.isin(torch.randn(4, 9, device="cuda").argmax(-1), torch.tensor([2])).tolist(), [False] * 4),
        (lambda: (torch.randint(3, 7, (64,), device="cuda") < 7).all().item(), True),
        (lambda: torch.LongTensor([4, 5]).cuda().cpu().tolist(), [4, 5]),
        (lambda: torch.zeros(4, dtype=torch.long, device="cuda").fill_(3).sum().item(), 12),
        (
            lambda: torch.zeros(4, device="cuda").index_fill_(0, torch.tensor([1, 2], device="cuda"), 1).tolist(),
            [0.0, 1.0, 1.0, 0.0],
        ),
        (lambda: len(torch.repeat_interleave(torch.tensor([2, 3], device="cuda"))), 5),
        (lambda: bool(torch.tensor(0.0).cuda()), False),
        (lambda: bool(deepcopy(torch.tensor(0.0).cuda())), False),
        (lambda: bool(torch.randn((), device="cuda") <= float("nan")), False),
        # Nothing is known of the first side, but the second decides.
        (lambda: bool((torch.randn(4, device="cuda") > 0).any() & torch.full((), False, device="cuda")), False),
    ],
)
def test_what_follows_from_the_script_alone_is_known(compute, expected):
    assert value_of(compute) == expected


def test_a_tensor_that_is_written_is_not_known_any_more():
    def compute() -> list[int]:
        counts = torch.zeros(3, dtype=torch.long, device="cuda")
        counts[0] = torch.randn(9, device="cuda").argmax()
        return counts.tolist()

    with pytest.raises(ModelError, match=r"test_known_values.py:\d+: tolist\(\): a capture has no values"):
        value_of(compute)


def test_a_view_of_a_tensor_that_was_written_with_known_values_is_known():
    def compute() -> list[list[int]]:
        ends = torch.zeros(2, dtype=torch.long, device="cuda").fill_(3)
        return (torch.arange(2, device="cuda") + ends.unsqueeze(1)).tolist()

    assert value_of(compute) == [[3, 4], [3, 4]]


def test_numbers_that_are_only_shown_are_zeros():
    assert value_of(lambda: torch.randn(2, device="cuda").tolist()) == [0.0, 0.0]


def test_a_known_mask_selects_what_it_says_without_an_assumption():
    sizes: list[int] = []

    def step() -> None:
        data, mask = torch.randn(8, 4, device="cuda"), torch.arange(8, device="cuda") < 3
        sizes.append(data[mask].shape[0])

    trace = captured(step)
    assert sizes == 2 * [3]  # the second step is captured
    assert assumptions([trace]) == []


def test_generation_makes_as_many_tokens_as_are_asked_for():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = transformers.LlamaForCausalLM(config).to("cuda").eval()
        tokens = torch.randint(3, 64, (2, 8), device="cuda")
        return model, lambda: sizes.append(model.generate(tokens, max_new_tokens=5, pad_token_id=0).shape)

    sizes: list[torch.Size] = []
    capture_script(load_script(make), StepOptions(mode="inference", attention="flash"))
    assert sizes == 2 * [(2, 13)]


def test_numbers_on_the_gpu_in_a_new_tensor_are_read_and_known():
    """As Qwen2-VL makes positions: a list of single elements becomes a tensor again."""
    sizes: list[int] = []

    def step() -> None:
        grid = torch.tensor([[2, 3], [4, 5]], device="cuda")
        again = torch.tensor([grid[0, 1], grid[1, 0] + 1, 7], device="cuda")
        sizes.extend(again.tolist())

    trace = captured(step)
    assert sizes == 2 * [3, 5, 7]
    assert sum(call.name == "aten::_local_scalar_dense" for call in trace.calls) >= 2


def test_tensors_on_the_gpu_are_at_places_of_their_own():
    def places() -> tuple[int, ...]:
        one, other = torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda")
        return one.data_ptr(), one.view(16).data_ptr(), one[1].data_ptr(), other.data_ptr(), one[:0].clone().data_ptr()

    first, same, later, other, empty = value_of(places)
    assert first == same == later - 16 != other != 0 == first % 512 == empty


def test_a_flag_without_value_raises_nothing():
    def checked() -> int:
        flags = torch.randn(70_000, device="cuda") > 0
        if not flags.any():
            raise ValueError("none is set")
        assert not flags.all() and not torch.tensor([1.0], device="cuda").sum().isnan()
        return 1 if flags.any() else 2

    assert value_of(checked) == 2


def test_a_tensor_stays_where_it_is():
    given = torch.zeros(3)

    def places() -> list[str]:
        return [torch.as_tensor(given.cuda()).device.type, torch.as_tensor(given).device.type]

    assert value_of(places) == ["cuda", "cpu"]
