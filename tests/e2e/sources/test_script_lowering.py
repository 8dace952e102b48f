"""What a script's operators become: TF32 as it leaves PyTorch's switches, rows of experts as `--routing` says."""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import e2e
from costmodel.operators.experts import (
    BALANCED,
    ExpertRouting,
    GroupedGemm,
)
from e2e.capture.script import tf32_switches
from e2e.sources.recorded_job import recorded_switches
from e2e.sources.requests import request_of
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.step.options import Tf32Switches


class Parts(torch.nn.Module):
    """A product, a convolution with its gradients, a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(16, 32, 3, padding=1)
        self.network = torch.nn.GRU(32, 32, batch_first=True)
        self.product = torch.nn.Linear(32, 8)

    def forward(self, data: Any) -> Any:
        found, _ = self.network(self.convolution(data).transpose(1, 2).contiguous())
        return self.product(found)


def making(switch: Callable[[], object]) -> Callable[..., Any]:
    def make_step(batch_size: int = 4) -> Any:
        switch()
        model = Parts().cuda()
        return model, lambda: model(torch.randn(batch_size, 16, 24, device="cuda")).sum().backward()

    return make_step


def high() -> None:
    torch.set_float32_matmul_precision("high")


def off() -> None:
    torch.backends.cudnn.allow_tf32 = False


def recurrent_off() -> None:
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


def dtypes(
    script: Any, gpu: str = "a100-sxm-40gb", gpus: int | None = None, dtype: Any = "float32"
) -> dict[str, set[str]]:
    """Number types of products by the module that they are in."""
    step = request_of({"script": script, "dtype": dtype, "gpu": gpu, "gpus": gpus}).prepare()
    (rank,) = step.graph.ranks
    calls = {call.id: call for call in next(iter(step.traced.values())).trace.calls}
    found: dict[str, set[str]] = {"product": set(), "convolution": set(), "network": set()}
    for task in rank.tasks:
        module = calls[task.call].module.rpartition(".")[2]
        kinds = {type(each).__name__ for each in task.operators}
        if module in found and kinds & {"Gemm", "Conv2d", "ConvolutionBackward"}:
            found[module] |= {each.dtype for each in task.operators}
    return found


@pytest.mark.parametrize(
    ("switch", "product", "convolution", "network"),
    [
        (lambda: None, "float32", "tf32", "tf32"),
        (high, "tf32", "tf32", "tf32"),
        (off, "float32", "float32", "float32"),
        (recurrent_off, "float32", "tf32", "float32"),
    ],
    ids=["default", "high", "cudnn off", "recurrent off"],
)
def test_kernels_run_as_the_switches_of_the_script_say(switch: Any, product: str, convolution: str, network: str):
    expected = {"product": {product}, "convolution": {convolution}, "network": {network}}
    assert dtypes(making(switch)) == expected
    assert set().union(*dtypes(making(switch), "t4").values()) == {"float32"}  # no such units


def test_what_is_asked_for_counts_beside_them():
    assert set().union(*dtypes(making(off), dtype="tf32").values()) == {"tf32"}
    assert set().union(*dtypes(making(off), "t4", dtype="tf32").values()) == {"float32"}


def test_ranks_of_a_script_have_them_too():
    assert dtypes(making(lambda: None), gpus=2)["convolution"] == {"tf32"}
    assert dtypes(making(off), gpus=2)["convolution"] == {"float32"}


def test_a_switch_that_an_imported_module_sets_stays_for_the_next_capture(tmp_path: Path):
    """Advice loads a script again and again; what it imports is imported once."""
    (tmp_path / "own_settings.py").write_text('import torch\ntorch.set_float32_matmul_precision("high")\n')
    (tmp_path / "train.py").write_text(
        "import torch, own_settings\n"
        "def make_step(batch_size=4):\n"
        "    model = torch.nn.ModuleDict({'product': torch.nn.Linear(64, 64)}).cuda()\n"
        '    return model, lambda: model["product"](torch.randn(batch_size, 64, device="cuda")).sum().backward()\n'
    )
    script = f"{tmp_path / 'train.py'}:make_step"
    for _ in range(2):
        assert dtypes(script)["product"] == {"tf32"}
    found = e2e.predict(script=script, gpu="a100-sxm-40gb")
    told = {each.option: each.value for each in found.asked}
    assert told["--dtype"] == "the script's own, TF32 in products, convolutions and recurrent networks"
    assert found.utilisation.peak_flops_per_second.keys() == {"tf32"}


def experts(batch_size: int = 64) -> Any:
    model = torch.nn.ParameterList([torch.empty(8, 64, 64, device="cuda", dtype=torch.bfloat16)])

    def step() -> None:
        ends = torch.full((8,), batch_size, device="cuda", dtype=torch.int32)
        data = torch.empty(8 * batch_size, 64, device="cuda", dtype=torch.bfloat16)
        torch._grouped_mm(data, model[0], offs=ends).square().sum().backward()

    return model, step


@pytest.mark.parametrize("gpus", [None, 2])
def test_experts_share_rows_as_asked(gpus: int | None):
    def largest(routing: ExpertRouting) -> int:
        request = request_of({"script": experts, "routing": routing, "gpu": "h100-sxm", "gpus": gpus})
        (rank,) = request.prepare().graph.ranks
        products = [each for task in rank.tasks for each in task.operators if isinstance(each, GroupedGemm)]
        return max(max(each.counts) for each in products)

    assert largest(ExpertRouting(1.0)) > largest(BALANCED) == 64


@pytest.mark.parametrize(("flag", "allowed"), [((True,), True), ((False,), False), ((), False)])
def test_recorded_convolutions_say_it_themselves(flag: tuple[bool, ...], allowed: bool):
    given = (Tensor(0, 0, (8, 4, 4, 4), "float32", "cuda:0"), Tensor(1, 1, (4, 4, 1, 1), "float32", "cuda:0"))
    plain = OperatorCall(0, "aten::mm", None, 0, (*given, True), ())
    rest = ((0, 0), (1, 1), (1, 1), 1, False, False)
    found = OperatorTrace((plain, OperatorCall(1, "aten::cudnn_convolution", None, 0, (*given, *rest, *flag), ())))
    assert recorded_switches([OperatorTrace((plain,)), found]) == Tf32Switches(convolutions=allowed)


def test_what_is_told():
    assert Tf32Switches().described == "TF32 off"
    assert Tf32Switches(convolutions=True).described == "TF32 in convolutions"
    assert tf32_switches().described == "TF32 in convolutions and recurrent networks"


@pytest.mark.parametrize("example", ["ddp_step", "fsdp_step"])
def test_ranks_are_compiled_between_their_collectives(example: str):
    from e2e.capture.distributed.distributed_capture import capture_distributed
    from e2e.lowering.lower_trace import lower_ranks
    from e2e.lowering.torch_compile import between_collectives
    from e2e.step.options import StepOptions

    script = Path(__file__).parents[3] / "examples" / f"{example}.py"
    captured = capture_distributed(f"{script}:make_step", 2, parameters={"batch_size": 1})
    eager, compiled = (
        lower_ranks(captured.traces, captured.multiplicity, "x", StepOptions(compile=asked)).graph.ranks[0]
        for asked in (False, True)
    )
    assert [task.collective for task in compiled.tasks if task.collective] == [
        task.collective for task in eager.tasks if task.collective
    ]
    products = [[task.name for task in rank.tasks if "mm" in task.name] for rank in (eager, compiled)]
    assert products[0] == products[1]
    assert len(compiled.tasks) < len(eager.tasks)
    # What a generated kernel does the work of lies between the same two collectives.
    parts = between_collectives(captured.traces[0])
    gone = [task for task in eager.tasks if task.call not in {task.call for task in compiled.tasks}]
    fused = {
        parts[task.call] for task in compiled.tasks if task.name.startswith("inductor::") and task.call is not None
    }
    assert len(set(parts.values())) > 2
    assert {parts[task.call] for task in gone if task.call is not None} <= fused
