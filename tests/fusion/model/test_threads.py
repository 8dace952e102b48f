"""One executable called from several threads, and arrays of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusion.model.build_folder import MODEL, Artifact
from fusion.model.named_arrays import to_tvm
from fusion.model.tuned_model import CompiledModel, load_compiled, threads_of_tvm

ROOT = Path(__file__).resolve().parents[3]
# In a process of its own: without turns it crashes.
SCRIPT = """
import threading
import numpy as np
from tvm import relax
from fusion.relax.machine_code import build_executable
from schedules.contract.cpu_target import host_target

builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((64, 64), "float32"))
with builder.function("main", [x]):
    value = x
    for _ in range(4):
        value = builder.emit(relax.op.nn.softmax(relax.op.multiply(value, value)))
    builder.emit_func_output(value)
compiled = build_executable(builder.get(), host_target(1))
inputs = [np.random.default_rng(seed).random((64, 64), np.float32) for seed in range(4)]
expected = [compiled(each)[0] for each in inputs]
wrong = []


def call(index):
    for _ in range(200):
        if not np.array_equal(compiled(inputs[index])[0], expected[index]):
            wrong.append(index)


threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("wrong", len(wrong))
"""


def test_threads_take_turns():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "wrong 0"


def test_a_loaded_model_waits_for_the_call_before(tiny_build: Artifact):
    """Its machine has one set of frames: while one call runs, no other enters."""
    model = load_compiled(tiny_build, MODEL, 1)
    inside = []
    original = model._main

    def main(*arguments):
        inside.append(model._lock.locked())
        return original(*arguments)

    model._main = main
    arrays = {name: np.ones((2, 3), np.float32) for name in "ab"}
    np.testing.assert_array_equal(model(arrays)["sum"], np.full((2, 3), 2.0))
    assert inside == [True] and not model._lock.locked()


def test_every_thread_runs_a_model_with_the_threads_it_was_loaded_for(tiny_build: Artifact, monkeypatch):
    """And the environment stays as it is."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    arrays = {name: np.ones((2, 3), np.float32) for name in "ab"}
    seen = []

    def load() -> None:
        model = load_compiled(tiny_build, MODEL, 2)
        seen.append((threads_of_tvm(), os.environ["TVM_NUM_THREADS"]))
        in_a_thread(lambda: call(model))

    def call(model: CompiledModel) -> None:
        model(arrays)
        seen.append((threads_of_tvm(), os.environ["TVM_NUM_THREADS"]))

    in_a_thread(load)
    assert seen == [(2, "1"), (2, "1")]


def in_a_thread(work: Callable[[], None]) -> None:
    """A new one, for which TVM has no pool yet."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_tensors_of_torch_are_taken_on_any_boundary(offset):
    torch = pytest.importorskip("torch")
    whole = torch.arange(100, dtype=torch.float32)
    part = whole[offset : offset + 64].reshape(8, 8)
    for tensor in (part, part.T, part[:, ::2]):
        np.testing.assert_array_equal(to_tvm(tensor).numpy(), tensor.numpy())


def test_arrays_in_another_order_are_taken():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    np.testing.assert_array_equal(to_tvm(array).numpy(), array)
