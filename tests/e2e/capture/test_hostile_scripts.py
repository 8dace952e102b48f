"""Scripts that hang, end the process, start threads and processes, or change the process they run in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from costmodel.base.errors import ModelError
from e2e.capture import script_errors
from e2e.capture.distributed.distributed_capture import capture_distributed
from e2e.capture.script import capture_script, load_script, own_process
from e2e.step.operator_trace import OperatorTrace

HEAD = "import concurrent.futures, multiprocessing, os, queue, threading, time, torch\n"
LAYER = "layer = torch.nn.Linear(8, 8).cuda()\n    data = torch.randn(4, 8, device='cuda')\n"


def captured(folder: Path, text: str) -> OperatorTrace:
    file = folder / "hostile.py"
    file.write_text(HEAD + text)
    with own_process():
        return capture_script(load_script(f"{file}:make_step"))


def made(step: str) -> str:
    lines = "\n".join(f"        {line}" for line in step.splitlines())
    return f"def make_step():\n    {LAYER}\n    def step():\n{lines}\n    return layer, step\n"


ENDLESS = {
    "import": "while True: pass\n",
    "making": "def make_step():\n    while True: pass\n",
    "step": made("while True: pass"),
    "waits at import": "queue.Queue().get()\n",
    "waits in its step": made("threading.Event().wait()"),
}


@pytest.mark.parametrize("where", ENDLESS)
def test_what_does_not_end_is_stopped_wherever_it_is(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    captured(tmp_path, made("layer(data)"))  # what a first capture imports is not to be cut off
    monkeypatch.setattr(script_errors, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(script_errors, "_WAKING_SECONDS", 0.1)
    with pytest.raises(ModelError, match="the script has called no operator for .* and has not ended"):
        captured(tmp_path, ENDLESS[where])


def test_a_step_of_too_many_operators_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("e2e.capture.recorder.MOST_CALLS", 2)
    with pytest.raises(ModelError, match="the script has called 2 operators in a step and has not ended: a loop that"):
        captured(tmp_path, made("layer(data).relu().sum().backward()"))


ENDS = {
    "BaseException": ("class Odd(BaseException): pass\nraise Odd('no')\n", "the script failed with Odd: no"),
    "colours": ("raise ValueError('\\x1b[1mno\\x1b[0m')\n", "the script failed with ValueError: no;"),
    "os._exit": ("os._exit(0)\n", r"the script ended the program \(sys.exit, os._exit or argparse\)"),
    "os._exit in its step": (made("os._exit(0)"), "the script ended the program"),
    "a thread that fails": (
        made("thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()"),
        "the script failed with ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_every_end_is_one_line(how: str, tmp_path: Path):
    text, message = ENDS[how]
    with pytest.raises(ModelError, match=message) as caught:
        captured(tmp_path, text)
    assert "\n" not in str(caught.value) and "hostile.py" in str(caught.value)


WORK = "layer.zero_grad()\nlayer(data).sum().backward()"
THREADS = {
    "Thread": "thread = threading.Thread(target=work)\nthread.start()\nthread.join()",
    "executor": "with concurrent.futures.ThreadPoolExecutor(2) as some:\n    some.submit(work).result()",
    "after others": "threads = [threading.Thread(target=time.sleep, args=(0,)) for _ in range(3)]\n"
    "[thread.start() for thread in threads]\nthread = threading.Thread(target=work)\nthread.start()\nthread.join()",
}


@pytest.mark.parametrize("how", THREADS)
def test_a_step_in_a_thread_is_the_step(how: str, tmp_path: Path):
    def seen(step: str) -> list[tuple[str, str, str]]:
        return [(call.name, call.phase, call.module) for call in captured(tmp_path, made(step)).calls]

    inner = "\n".join(f"    {line}" for line in WORK.splitlines())
    assert seen(f"def work():\n{inner}\n{THREADS[how]}") == seen(WORK)


def test_a_pool_runs_functions_of_the_script(tmp_path: Path):
    pool = "with multiprocessing.get_context('fork').Pool(1) as pool:\n    assert pool.map(twice, [1, 2]) == [2, 4]"
    text = "def twice(value): return 2 * value\n" + made(f"{pool}\nlayer(data)")
    assert any(call.name == "aten::addmm" for call in captured(tmp_path, text).calls)


CHANGES = """
seen = (os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled())
layer = torch.nn.Linear(8, 8).cuda()
os.chdir("/")
torch.set_default_dtype(torch.bfloat16)
torch.set_grad_enabled(False)
"""


def test_what_a_script_changes_of_its_process_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    body = "\n".join(f"    {line}" for line in CHANGES.strip().splitlines())
    told = "open(os.environ['TOLD'], 'a').write(f'{seen}\\n')"
    returned = "return layer, lambda: layer(torch.ones(2, 8, device='cuda'))"
    (tmp_path / "changes.py").write_text(f"{HEAD}def make_step():\n{body}\n    {told}\n    {returned}\n")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    with own_process():
        load_script("changes.py:make_step")
    (tmp_path / "early.py").write_text((tmp_path / "changes.py").read_text().replace(HEAD, HEAD + "os.chdir('/')\n"))
    monkeypatch.setenv("TOLD", os.devnull)
    with own_process():
        load_script("early.py:make_step")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    # The last rank is made as well, by the same relative path.
    capture_distributed("changes.py:make_step", 2)
    lines = (tmp_path / "told").read_text().splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert os.getcwd() == str(tmp_path)
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()
