"""Layers of Transformer Engine that ranks share, as Megatron-LM uses them: what is sent, multiplied and added up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from costmodel.operators.attention import Attention, seen_pairs
from costmodel.operators.device_work import Elementwise, Gemm, ScaledCast, ScaledGemm
from e2e.capture.cuda_packages.finder import cuda_packages
from e2e.capture.distributed.distributed_capture import capture_distributed
from e2e.lowering.lower_trace import LoweredStep, lower_ranks, memory_of
from e2e.step.execution_graph import RankGraph
from e2e.step.options import SeenGpu, StepOptions

pytestmark = pytest.mark.usefixtures("packages")
ROWS, INNER, OUTER, HALF, WIDE = 64, 256, 512, 2, 4

HEAD = """import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

def make_step({parameters}):
    dist.init_process_group("nccl")
    group, half = dist.group.WORLD, dict(device="cuda", dtype=torch.bfloat16)
"""
LINEAR = """
    layer = te.Linear(
        256, 512, bias=False, params_dtype=torch.bfloat16, parallel_mode=way, tp_size=2, tp_group=group,
        sequence_parallel=sequence, fuse_wgrad_accumulation=adds,
    )
    if adds:
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
        layer.weight.grad_added_to_main_grad = False
    rows = 32 if sequence and way == "column" else 64
    data = torch.randn(rows, layer.in_features, requires_grad=True, **half)
    def step():
        layer.weight.grad = None
        with te.fp8_autocast(enabled=eight, fp8_recipe=Float8CurrentScaling()):
            for first in (True, False)[:passes]:
                layer(data, is_first_microbatch=first).sum().backward()
        assert layer.weight.grad_added_to_main_grad if adds else layer.weight.grad is not None
    return layer, step
"""


@pytest.fixture
def packages() -> Iterator[None]:
    with cuda_packages(lambda line: None):
        yield


def shared(tmp_path: Path, body: str, parameters: str = "", **given: Any) -> LoweredStep:
    script = tmp_path / "shared_layers.py"
    script.write_text(HEAD.format(parameters=parameters) + body, encoding="utf-8")
    options = StepOptions(seen_gpu=SeenGpu(capability=(9, 0)), mode="forward-backward")
    found = capture_distributed(f"{script}:make_step", 2, parameters=given, options=options)
    return lower_ranks(found.traces, found.multiplicity, found.source, StepOptions())


def linear(tmp_path: Path, way: str, sequence: bool, adds: bool, eight: bool = False, passes: int = 1) -> RankGraph:
    return shared(
        tmp_path, LINEAR, "way, sequence, adds, eight, passes", way=way, sequence=sequence, adds=adds, eight=eight,
        passes=passes,
    ).graph.ranks[0]  # fmt: skip


def sent(rank: RankGraph) -> list[tuple[str, int]]:
    return [(c.kind, c.size_bytes) for task in rank.tasks if (c := task.collective) is not None]


def records(rank: RankGraph, *kinds: type[Any]) -> list[Any]:
    return [record for task in rank.tasks for record in task.operators if isinstance(record, kinds)]


@pytest.mark.parametrize(
    ("way", "sequence", "expected"),
    [
        ("column", True, [("all_gather", INNER), ("all_gather", INNER), ("reduce_scatter", INNER)]),
        ("column", False, [("all_reduce", INNER)]),
        ("row", True, [("reduce_scatter", OUTER), ("all_gather", OUTER)]),
        ("row", False, [("all_reduce", OUTER)]),
    ],
)
def test_ranks_that_share_a_weight_send_the_rows_of_a_layer(tmp_path, way: str, sequence: bool, expected):
    """Those of the whole sequence; the input of a column-parallel layer is gathered again for its gradient."""
    rank = linear(tmp_path, way, sequence, adds=False)
    own = {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 1}  # what is gathered is told by a rank's own part
    assert sent(rank) == [(kind, ROWS * width * HALF // own[kind]) for kind, width in expected]
    products = records(rank, Gemm)
    assert len(products) == 3 and {each.flops for each in products} == {2 * ROWS * INNER * OUTER // 2}


def test_what_is_gathered_again_comes_beside_the_gradient_of_the_input(tmp_path):
    rank = linear(tmp_path, "column", True, adds=True)
    again, scattered = [task for task in rank.tasks if task.collective is not None][1:]
    places = {task.name: task.id for task in rank.tasks if task.operators}
    assert again.id < places["aten::mm"] < scattered.id < places["package::add_mm_"]
    assert again.stream == scattered.stream != rank.tasks[places["aten::mm"]].stream


def test_gradients_of_weights_are_added_up_in_32_bits_by_their_products(tmp_path):
    rank = linear(tmp_path, "row", False, adds=True)
    forward, of_input, of_weight = records(rank, Gemm)
    assert (of_weight.accumulates, forward.accumulates, of_input.accumulates) == ("float32", "", "")
    assert of_weight.write_bytes == OUTER * INNER // 2 * WIDE
    # No other kernel reads or writes a gradient of the weight.
    assert not [each for each in records(rank, Elementwise) if each.elements == OUTER * INNER // 2]


def test_casts_are_gathered_in_8_bits_and_weights_are_cast_once_a_step(tmp_path):
    rank = linear(tmp_path, "column", True, adds=True, eight=True, passes=2)
    assert sent(rank) == 2 * [
        *(2 * [("all_gather", ROWS * INNER // 2)]),
        ("reduce_scatter", ROWS * INNER * HALF),
    ]
    assert [each.accumulates for each in records(rank, ScaledGemm)] == 2 * ["", "", "float32"]
    casts = [each for each in records(rank, ScaledCast) if each.outputs and each.rows == OUTER // 2]
    assert len(casts) == 1
    # Inputs and gradients are written twice, for products along both of their sides.
    assert {each.outputs for each in records(rank, ScaledCast) if each.outputs} == {2}


RING = """
    attention = te.DotProductAttention(4, 64, attention_dropout=0.0, qkv_format="sbhd", cp_group=group)
    given = [torch.randn(256, 2, 4, 64, requires_grad=True, **half) for _ in range(3)]
    def step():
        attention(*given).sum().backward()
    return attention, step
"""


def test_keys_and_values_go_round_and_every_rank_has_half_of_the_causal_pairs(tmp_path):
    ranks = shared(tmp_path, RING).graph.ranks
    assert len(ranks) == 2
    both = 2 * 256 * 2 * 4 * 64 * HALF  # keys and values of a rank
    for rank in ranks:
        kernels = records(rank, Attention)
        forward = [each for each in kernels if each.direction == "forward"]
        assert len(forward) == 2 and len(kernels) == 4
        # Half of the pairs, up to the diagonal: a token of the first half sees none of the other rank's last one.
        assert sum(each.pairs for each in forward) == pytest.approx(seen_pairs(512, 512, True) / 2, rel=0.01)
        # Forward; back again for the gradients of the attention, and those of keys and values.
        assert sent(rank) == [("send", both), ("recv", both)] * 3


EXPERTS = """
    layer = te.GroupedLinear(
        3, 256, 512, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=adds
    )
    for weight in layer.parameters():
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    data = torch.randn(64, 256, requires_grad=True, **half)
    def step():
        layer(data, [40, 0, 24]).sum().backward()
    return layer, step
"""


@pytest.mark.parametrize("adds", [False, True])
def test_each_expert_multiplies_its_own_rows(tmp_path, adds: bool):
    (rank,) = shared(tmp_path, EXPERTS, "adds", adds=adds).graph.ranks
    products = records(rank, Gemm)
    assert sorted(each.flops for each in products if each.flops) == sorted(
        2 * rows * 256 * 512 for rows in (40, 24) for _ in range(3)
    )
    assert sum(bool(each.accumulates) for each in products if each.flops) == (2 if adds else 0)


LOSS = """
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
    scores = torch.randn(64, 1, 1000, requires_grad=True, **half)
    labels = torch.zeros(64, 1, dtype=torch.int64, device="cuda")
    def step():
        parallel_cross_entropy(scores, labels, 0.0, False, group).sum().backward()
    return torch.nn.Identity(), step
"""


def test_the_loss_reads_the_scores_twice_and_gathers_three_numbers_a_row(tmp_path):
    (rank,) = shared(tmp_path, LOSS).graph.ranks
    assert sent(rank) == [("all_gather", 64 * 3 * WIDE)]
    scores = 64 * 1000 * HALF
    kernels = [each for each in records(rank, Elementwise) if each.read_bytes + each.write_bytes >= 0.9 * scores]
    moved = [round((each.read_bytes + each.write_bytes) / scores) for each in kernels]
    assert moved == [1, 2, 2, 3]  # and the gradient is added to that of the step before


FLAT = """
    layer = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 256, bias=False)).cuda()
    flat = torch.zeros(512 * 768, device="cuda")
    for parameter, part in zip(layer.parameters(), flat.split([512 * 512, 512 * 256])):
        parameter.data = part.view(parameter.shape)
    data = torch.randn(8, 512, device="cuda")
    def step():
        layer(data).sum().backward()
    return layer, step
"""


def test_parameters_in_one_buffer_take_the_memory_of_the_buffer(tmp_path):
    script = tmp_path / "flat.py"
    script.write_text(HEAD.format(parameters="") + FLAT, encoding="utf-8")
    (trace,) = capture_distributed(f"{script}:make_step", 2).traces
    held = 512 * 768 * WIDE + 8 * 512 * WIDE  # and the data
    assert memory_of(trace, "hopper").breakdown["parameters"] == pytest.approx(held, rel=0.01)
