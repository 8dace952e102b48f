"""The user's own step: what it may do, and what it sees when it is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import e2e
from costmodel.base.errors import InputError, ModelError
from e2e.capture import load_script
from e2e.capture.script import Fallback, capture_script
from e2e.lowering.lower_trace import lower
from e2e.step.execution_graph import StreamWait, Synchronize
from e2e.step.operator_trace import tensors

GOOD = """
import torch

def make_step(batch_size, width=8):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(width, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, width, device=device)

    def step():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.1f}")

    return model, step
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return f"{tmp_path / 'train.py'}:make_step"

    return write


def test_a_script_that_speaks_of_cuda_is_captured_without_one(script, capsys):
    workload = load_script(script(GOOD), batch_size=16, sequence_length=None)
    trace = capture_script(workload)
    product = next(call for call in trace.calls if call.name == "aten::addmm")
    assert product.outputs[0].shape == (16, 8)
    assert product.outputs[0].device == "cuda:0"
    assert {call.phase for call in trace.calls} == {"forward", "backward", "optimizer"}
    assert capsys.readouterr().out == 2 * "loss 1.0\n"  # the second step is captured


def test_only_parameters_that_the_function_takes_are_given(script):
    workload = load_script(script(GOOD), batch_size=4, width=32, sequence_length=7)
    assert workload.module.weight.shape == (32, 32)
    with pytest.raises(InputError, match="needs a value for batch_size"):
        load_script(script(GOOD))


def test_a_fallback_gives_way_to_the_default_of_the_function(script):
    def rows(text: str, size: int) -> int:
        trace = capture_script(load_script(script(text), batch_size=size))
        return next(call for call in trace.calls if call.name == "aten::addmm").outputs[0].shape[0]

    own = GOOD.replace("make_step(batch_size,", "make_step(batch_size=5,")
    assert [rows(text, Fallback(1)) for text in (GOOD, own)] == [1, 5]
    assert [rows(text, 3) for text in (GOOD, own)] == [3, 3]


def test_a_failing_script_shows_its_own_traceback(script, capsys):
    reference = script("def make_step():\n    return helper()\n\ndef helper():\n    return 1 / 0\n")
    with pytest.raises(ModelError, match="failed with ZeroDivisionError: division by zero") as caught:
        load_script(reference)
    assert "\n" not in str(caught.value)
    shown = capsys.readouterr().err
    assert "in helper" in shown and "ZeroDivisionError" in shown
    assert "load_script" not in shown


def test_a_failing_step_is_reported_the_same_way(script, capsys):
    broken = GOOD.replace("loss = model(data)", "loss = model(data[:, 1:])")
    workload = load_script(script(broken), batch_size=4)
    with pytest.raises(ModelError, match="the script failed with RuntimeError"):
        capture_script(workload)
    assert "in step" in capsys.readouterr().err


BY_CAPABILITY = """
import torch

def make_step(batch_size=4):
    newer = torch.cuda.get_device_capability() >= (8, 0)
    assert newer == ("T4" not in torch.cuda.get_device_name())
    model = torch.nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16 if newer else torch.float16)
    data = torch.randn(batch_size, 8, device="cuda", dtype=model.weight.dtype)
    return model, lambda: model(data)
"""


@pytest.mark.parametrize(("gpu", "dtype"), [("t4", "float16"), ("h100-sxm", "bfloat16")])
def test_a_script_that_branches_on_the_gpu_takes_the_branch_of_the_one_asked_for(
    gpu: str, dtype: str, script: Callable[[str], str]
) -> None:
    found = e2e.predict(script=script(BY_CAPABILITY), gpu=gpu)
    assert list(found.utilisation.peak_flops_per_second) == [dtype]


ASKING = """
import torch

def make_step(batch_size=4):
    torch.cuda.manual_seed_all(seed=0)
    assert torch.cuda.get_device_capability() >= (8, 0) and "NVIDIA" in torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    model = torch.nn.Linear(8, 8).to(0)
    data = torch.randn(batch_size, 8).to(0), torch.randn(batch_size, 8, device=0)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.nvtx.range_push("step")
        with torch.cuda.device(0):
            begin.record()
            (model(data[0]) - data[1]).sum().backward()
            end.record()
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        print(begin.elapsed_time(end), torch.cuda.max_memory_allocated())

    return model, step
"""

SIDE_STREAM = """
import torch

def make_step():
    side, data = torch.cuda.Stream(), torch.randn(64, device="cuda")

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice = data * 2
        torch.cuda.current_stream().wait_stream(side)
        return twice + 1

    return torch.nn.Identity(), step
"""


def test_what_scripts_ask_of_a_gpu_is_answered(script, capsys):
    trace = capture_script(load_script(script(ASKING)))
    assert {tensor.device for call in trace.calls for tensor in tensors(call.outputs)} == {"cuda:0"}
    elapsed, used = capsys.readouterr().out.split()[-2:]
    assert elapsed == "1.0" and 8 * 8 * 4 < int(used) < 4096  # parameters, their gradients, data and results


LOADING = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def make_step():
    rows = TensorDataset(torch.randn(32, 8, device="cpu"), torch.zeros(32, 8, device="cpu"))
    batches, scale = iter(DataLoader(rows, batch_size=4, shuffle=True)), torch.ones((), device="cuda").item()
    model = torch.nn.Linear(8, 8).cuda()

    def step():
        data, wanted = (part.pin_memory().to("cuda", non_blocking=True) for part in next(batches))
        (model(data * scale) - wanted).sum().backward()

    return model, step
"""


NUMBERS = """
import torch

def make_step():
    model, places = torch.nn.Linear(8, 8).cuda(), list(range(COUNT))

    def step():
        where = torch.tensor(places, device="cuda")
        model(torch.empty(COUNT, 8, pin_memory=True).to("cuda"))[where].sum().backward()

    return model, step
"""


def test_a_tensor_of_numbers_is_made_on_the_host_and_copied_while_it_waits(script):
    rank = lower(capture_script(load_script(script(NUMBERS.replace("COUNT", "512")))))
    copies = [task.operators[0].size_bytes for task in rank.tasks if task.kind == "copy"]
    assert copies == [512 * 8, 512 * 8 * 4]
    assert sum(isinstance(action, Synchronize) for action in rank.actions()) == 2
    assert [info.numbers for info in rank.calls.values() if info.numbers] == [512]


def test_batches_of_a_data_loader_are_copied_to_the_gpu(script):
    tasks = lower(capture_script(load_script(script(LOADING)))).tasks
    assert [task.operators[0].size_bytes for task in tasks if task.kind == "copy"] == [4 * 8 * 4] * 2


LIBRARY_MODEL = """
import torch

def make_step(batch_size=2):
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.generation.continuous_batching.utils import CudaGraphBuffer  # annotates with CUDAGraph | None

    assert not isinstance(3, (torch.cuda.CUDAGraph, torch.cuda.graph))
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (batch_size, 16), device="cuda")

    def step():
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return model, step
"""


def test_a_model_of_a_library_that_names_cuda_graphs_in_annotations_is_captured(script):
    # In a process of its own: elsewhere the library may have been imported before the capture.
    code = (
        "from e2e.capture.script import capture_script, load_script\n"
        f"print(len(capture_script(load_script({script(LIBRARY_MODEL)!r})).calls))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 100


def test_streams_made_before_the_step_are_those_of_the_step(script):
    rank = lower(capture_script(load_script(script(SIDE_STREAM))))
    first, second = rank.tasks
    assert first.stream != second.stream == 0
    waits = [action for action in rank.threads["main"] if isinstance(action, StreamWait)]
    assert [wait.stream for wait in waits] == [first.stream, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no function 'make_step'"),
        ("def make_step():\n    return 3", r"must return \(module, step\), got int"),
        ("import torch\ndef make_step():\n    return torch.nn.Identity(), 3", "cannot be called"),
    ],
)
def test_wrong_scripts(script, text: str, message: str):
    with pytest.raises(InputError, match=message):
        load_script(script(text))


@pytest.mark.parametrize(("reference", "message"), [("train.py", "FILE.py:FUNCTION"), ("none.py:f", "no such script")])
def test_wrong_references(reference: str, message: str):
    with pytest.raises(InputError, match=message):
        load_script(reference)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("layer(data).detach().numpy()", r"write \.cpu\(\)\.numpy\(\)"),
        ("layer(torch.randn(4, 8, device='cpu'))", r"move it with \.to\('cuda'\)"),
        (
            "torch.sparse.mm(torch.sparse_coo_tensor(torch.zeros(2, 3).long().cuda(), data[0, :3], (8, 8)), data.T)",
            "sparse",
        ),
    ],
)
def test_errors_of_a_capture_are_told_in_the_words_of_the_script(script, step: str, message: str):
    text = (
        "import torch\n\ndef make_step():\n    layer, data = torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8).cuda()\n\n"
        f"    def step():\n        return {step}\n\n    return layer, step\n"
    )
    with pytest.raises(ModelError, match=message) as caught:
        capture_script(load_script(script(text)))
    assert ".py:7: " in str(caught.value)
    assert "meta" not in str(caught.value).lower()
