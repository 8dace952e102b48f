"""MFU and HFU of steps whose FLOPs are mental arithmetic, or known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Gemm
from e2e.explain.utilisation import utilisation_of
from e2e.lowering.lower_trace import lower_step
from e2e.step.execution_graph import CallInfo, ExecutionGraph, Kernel
from e2e.step.operator_trace import OperatorCall
from e2e.step.options import StepOptions
from lab.data.data_folder import data_folder
from lab.steps.training import TRAINING_FILE
from tests.e2e.drawn_graphs import Drawing
from tests.e2e.toy_predictions import GPU, predict_step, setting, step, tensor

H100 = load_machine("h100-sxm")
PRODUCT = Gemm(1, 10, 10, 50, "bfloat16")  # 10,000 flops


def drawn(*kernels: tuple[str, str], **options) -> ExecutionGraph:
    """One product for each pair of a phase and a thread."""
    drawing = Drawing()
    for number, (phase, thread) in enumerate(kernels):
        drawing.calls[number] = CallInfo(number, "aten::mm", phase, **options)
        drawing.kernel("gemm", 1.0, thread=thread, call=number)
    rank = drawing.graph()
    tasks = tuple(replace(task, operators=(PRODUCT,)) for task in rank.tasks)
    return ExecutionGraph((replace(rank, tasks=tasks),))


def test_a_step_is_held_against_the_datasheet_rate_of_its_dtype():
    found = predict_step(step(), setting(1.0, 1e-3)).prediction
    flops = 2 * 64 * 16 * 32 + 2 * 64 * 8 * 16  # both products; ReLU and what nobody knows count nothing
    peak = GPU.compute["float32"].datasheet
    assert found.utilisation is not None and found.utilisation.model_flops == flops
    assert found.utilisation.mfu == pytest.approx(flops / peak / found.iteration_seconds)
    assert found.utilisation.hfu == found.utilisation.mfu


def test_a_product_of_an_optimizer_is_executed_but_none_of_the_models():
    trace = step()
    muon = OperatorCall(
        4, "aten::mm", None, 0, (tensor(8, 64, 32), tensor(9, 32, 16)), (tensor(10, 64, 16),), "optimizer"
    )
    before = predict_step(trace, setting(1.0, 1e-3)).prediction.utilisation
    after = predict_step(replace(trace, calls=(*trace.calls, muon)), setting(1.0, 1e-3)).prediction.utilisation
    assert after.model_flops == before.model_flops
    assert after.executed_flops == before.executed_flops + 2 * 64 * 32 * 16


def test_a_forward_pass_on_autograds_thread_runs_again():
    """As ``recompute=`` of ``--parallel`` writes it."""
    once = drawn(("forward", "main"), ("backward", "autograd"), ("backward", "autograd"))
    again = drawn(("forward", "main"), ("forward", "autograd"), ("backward", "autograd"), ("backward", "autograd"))
    peak = H100.compute["bfloat16"].datasheet
    for graph, executed in ((once, 3), (again, 4)):
        found = utilisation_of(graph, H100, 2.0)
        assert found.mfu == pytest.approx(30_000 / peak / 2) and found.hfu == pytest.approx(executed * 1e4 / peak / 2)


def test_runs_of_kernels_and_ranks_that_are_alike_count_as_often_as_they_are():
    graph = drawn(("forward", "main"), ("backward", "autograd"))
    (rank,) = graph.ranks
    kernels = tuple(Kernel("gemm", "kernel", (PRODUCT,), 0) for _ in range(3))
    tasks = tuple(replace(task, operators=(), kernels=kernels) for task in rank.tasks)
    many = replace(graph, ranks=(replace(rank, tasks=tasks),), multiplicity={0: 8})
    found = utilisation_of(many, H100, 1.0)
    # Those on autograd's thread are of a call of the forward pass: they run again.
    assert found.model_flops == 8 * 3 * 10_000 and found.executed_flops == 2 * found.model_flops
    assert found.mfu == pytest.approx(3 * 10_000 / H100.compute["bfloat16"].datasheet)


def test_nothing_is_said_where_kernels_are_known_by_their_names_alone():
    drawing = Drawing()
    drawing.kernel("ampere_sgemm_128x64", 1.0)
    assert utilisation_of(ExecutionGraph((drawing.graph(),)), H100, 1.0) is None


def test_a_machine_without_a_datasheet_rate_has_flops_and_no_share():
    rates = {name: replace(rate, datasheet=None) for name, rate in H100.compute.items()}
    found = utilisation_of(drawn(("forward", "main")), replace(H100, compute=rates), 1.0)
    assert found.model_flops == 10_000 and found.mfu is None and found.hfu is None


def test_what_is_computed_more_widely_is_held_against_the_rate_of_the_step_and_8_bits_against_their_own():
    graph = drawn(("forward", "main"), ("forward", "main"))
    (rank,) = graph.ranks
    tasks = (rank.tasks[0], replace(rank.tasks[1], operators=(replace(PRODUCT, dtype="float32"),)))
    found = utilisation_of(replace(graph, ranks=(replace(rank, tasks=tasks),)), H100, 1.0)
    assert found.mfu == pytest.approx(2 * 10_000 / H100.compute["bfloat16"].datasheet)
    assert list(found.peak_flops_per_second) == ["bfloat16"]
    tasks = (rank.tasks[0], replace(rank.tasks[1], operators=(replace(PRODUCT, dtype="float8"),)))
    found = utilisation_of(replace(graph, ranks=(replace(rank, tasks=tasks),)), H100, 1.0)
    peaks = [H100.compute[dtype].datasheet for dtype in ("bfloat16", "float8")]
    assert found.mfu == pytest.approx(sum(10_000 / peak for peak in peaks))


# --- captured ----------------------------------------------------------------------------------------


def captured_flops(make) -> tuple[float, float]:
    """Model's and executed FLOPs of a step that ``make`` makes."""
    from e2e.capture.session import capture

    trace = capture(make(), StepOptions())
    found = utilisation_of(lower_step(trace, StepOptions()).graph, H100, 1.0)
    return found.model_flops, found.executed_flops


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_a_script_is_executed_and_not_counted(reentrant):
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from e2e.capture.session import CapturedWorkload

    def make():
        block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).to("meta")
        data = torch.empty(4, 8, device="meta", requires_grad=True)
        return CapturedWorkload(
            "checkpointed", block, lambda: checkpoint(block, data, use_reentrant=reentrant).sum().backward()
        )

    product = 2 * 4 * 8 * 8
    model, executed = captured_flops(make)
    assert model == 6 * product  # two forward, four backward
    # Without re-entrance it stops where nothing more is needed: behind the first layer and the ReLU.
    assert executed - model == (2 if reentrant else 1) * product


def test_a_captured_transformer_has_the_flops_of_the_closed_form():
    """PaLM, appendix B: 6 N + 12 L H Q T per token, for the weights that are multiplied."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from e2e.capture.models.catalog import build

    batch, tokens, layers, width, words = 2, 64, 12, 768, 50257
    weights = layers * 12 * width**2 + words * width
    expected = batch * tokens * (6 * weights + 12 * layers * width * tokens)
    for attention in ("eager", "flash"):
        model, _ = captured_flops(lambda form=attention: build("gpt2", batch, tokens, StepOptions(attention=form)))
        assert model == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not (data_folder() / TRAINING_FILE).is_file(), reason="the table of training steps is not here")
def test_published_mfu_is_met_by_the_count_of_flops(tmp_path):
    """One row of each source; ``python -m lab.bench.published_throughput mfu`` compares all."""
    pytest.importorskip("torch")
    from lab.bench.published_throughput import compared, published_rows

    rows = {
        step.row.family: step for step in published_rows(data_folder()) if step.row.model in ("mpt-125m", "llama3-8B")
    }
    assert set(rows) == {"llm-foundry", "torchtitan"}
    for each in compared(list(rows.values()), tmp_path):
        assert abs(each.unexplained) < 0.002 and each.hfu >= each.counted > 0.3
