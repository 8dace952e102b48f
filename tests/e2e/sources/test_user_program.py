"""Programs of users, run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from costmodel.base.errors import InputError, ModelError
from e2e.commands.e2e_api import predict
from e2e.price.speed_band import PROGRAMS
from e2e.sources.requests import Program

# An unchanged training program: host tensors with values, accumulation, evaluation, a logger that is not installed.
TRAINING = """
import argparse
import os

import numpy as np
import torch
import wandb

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--file")
given = parser.parse_args()
wandb.init(project="none")
several = "RANK" in os.environ
if several:
    torch.distributed.init_process_group("nccl")
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
assert torch.cuda.get_device_properties(device).name.startswith("NVIDIA H100")
data = np.memmap(given.file, dtype=np.uint16, mode="r") if given.file else np.arange(10_000, dtype=np.uint16) % 512
model = torch.nn.Sequential(torch.nn.Embedding(512, 256), torch.nn.Linear(256, 512)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
if several:
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])


def batch():
    starts = torch.randint(len(data) - 65, (given.batch_size,))
    rows = [torch.from_numpy(data[start : start + 65].astype(np.int64)) for start in starts]
    return torch.stack(rows).pin_memory().to(device, non_blocking=True)


for number in range(1_000_000):
    if number % 1_000 == 0:
        with torch.no_grad():
            print("evaluation", sum(model(batch()[:, :-1]).mean().item() for _ in range(3)))
    for _ in range(2):
        tokens = batch()
        scores = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    wandb.log({"step": number})
"""

SHARDED = """
import os

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
for part in (*model, model):
    if any(True for _ in part.parameters()):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
model.to_empty(device="cuda")
for parameter in model.parameters():
    torch.nn.init.uniform_(parameter, -0.1, 0.1)
optimizer = torch.optim.Adam(model.parameters())
while True:
    loss = model(torch.randn(32, 256, device="cuda")).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("program")
    (found / "train.py").write_text(TRAINING, encoding="utf-8")
    (found / "sharded.py").write_text(SHARDED, encoding="utf-8")
    return found


def run(folder: Path, command: str, **options: object) -> object:
    return predict(command=tuple(command.split()), folder=folder, **{"gpu": "h100-sxm", **options})


def test_a_training_loop_is_predicted_by_its_steady_step(folder: Path) -> None:
    found = run(folder, "python train.py --batch-size 4")
    assert found.throughput.samples == 2 * 4
    assert any("step 3 of AdamW" in line and "equal to step 2" in line for line in found.notes)
    assert {"aten::embedding_dense_backward", "aten::mm"} <= set(found.breakdown["by_operator"])
    asked = Program(command=("python", "train.py", "--batch-size", "4"), folder=folder, gpu="h100-sxm")
    band = asked.with_defaults().prepare().band
    assert band is not None and band.errors.whole == PROGRAMS


def test_ranks_come_from_the_launcher(folder: Path) -> None:
    found = run(folder, "torchrun --nproc-per-node 4 train.py")
    assert found.gpus == 4 and [each.multiplicity for each in found.ranks] == [4]
    assert found.collectives


def test_sharded_parameters_are_filled_and_trained(folder: Path) -> None:
    found = run(folder, "torchrun --nproc-per-node 4 sharded.py")
    assert {"all_gather", "reduce_scatter"} <= {each.kind for each in found.collectives}


def test_data_that_are_not_there_are_named_or_made_up(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"train.py:19: opens tokens.bin, which is not here; give --data synthetic"):
        run(folder, "python train.py --file tokens.bin")
    found = run(folder, "python train.py --file tokens.bin", data="synthetic")
    assert any("tokens.bin is not there: 268,435,456 zeros of uint16" in line for line in found.notes)


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("python missing.py", {}, "missing.py: no such program"),
        ("torchrun --nproc-per-node 4 train.py", {"gpus": 2}, "--gpus 2: torchrun starts 4"),
    ],
)
def test_refusals(folder: Path, command: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(folder, command, **options)


def test_a_program_that_refuses_its_arguments_is_told(folder: Path) -> None:
    with pytest.raises(ModelError, match="train.py: the program ended before its first step: status 2; its own"):
        run(folder, "python train.py --no-such-option")


def test_a_program_that_takes_no_step_is_told(folder: Path) -> None:
    (folder / "nothing.py").write_text("print('nothing')\n", encoding="utf-8")
    with pytest.raises(ModelError, match="ended without a step on the GPU"):
        run(folder, "python nothing.py")


def test_device_time_is_told_by_line_of_the_program(folder: Path) -> None:
    found = run(folder, "python train.py")
    lines = found.breakdown["by_line"]
    place = TRAINING.splitlines().index("        scores = model(tokens[:, :-1])") + 1
    model, loss, step = (f"train.py:{place + after}" for after in (0, 1, 2))
    assert {model, loss, step} <= set(lines) and "no line of the program" not in lines
    # The product and its gradients belong to the model's line, in the forward and in the backward pass.
    assert lines[model] > 2 * found.breakdown["by_operator"]["aten::addmm"]
    assert sum(lines.values()) == pytest.approx(sum(found.breakdown["by_operator"].values()))


def test_evaluation_is_told_apart_with_its_time_and_how_often_it_runs(folder: Path) -> None:
    (line,) = [line for line in run(folder, "python train.py").notes if line.startswith("not in the step")]
    assert "3 forward passes of Sequential without gradients every 1,000 steps, from train.py:35" in line


# Fifty passes before the first of the steps, each of which asks a model of the same line for gradients.
PASSED_OVER = """
import sys
import torch

class Counted(torch.nn.Linear):
    runs = 0

    def forward(self, data):
        Counted.runs += 1
        return super().forward(data)


def loss():
    return criterion(model(torch.randn(8, 64, device="cuda")), torch.zeros(8, 64, device="cuda"))


model, criterion = Counted(64, 64).cuda(), torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "trained" not in sys.argv:
    with torch.set_grad_enabled("gradients" in sys.argv):
        print(sum(loss().item() for _ in range(50)))
    assert Counted.runs < 10, Counted.runs
while True:
    optimizer.zero_grad()
    if "rewarded" in sys.argv:
        print(sum(loss().item() for _ in range(20)))
    loss().backward()
    assert model.weight.grad is not None
    optimizer.step()
"""


@pytest.mark.parametrize("how", ["", "gradients", "gradients rewarded"])
def test_equal_passes_of_an_evaluation_are_not_run(folder: Path, how: str) -> None:
    """But those of every step are, and those that turn out to be trained with."""
    (folder / "passed.py").write_text(PASSED_OVER, encoding="utf-8")
    found, trained = (run(folder, f"python passed.py {each}") for each in (how, f"trained {how}"))
    assert found.operators == trained.operators
    assert found.breakdown["by_operator"] == pytest.approx(trained.breakdown["by_operator"])
    assert any("of SGD" in line and "equal to step" in line for line in found.notes)


LOOPS = {
    # Five steps of a critic for each of the generator's.
    "critic": """
import torch

critic, generator = torch.nn.Linear(64, 1).cuda(), torch.nn.Linear(16, 64).cuda()
one, other = torch.optim.Adam(critic.parameters()), torch.optim.RMSprop(generator.parameters())
while True:
    for _ in range(5):
        (critic(generator(torch.randn(8, 16, device="cuda")).detach()).mean()).backward()
        one.step()
    critic(generator(torch.randn(8, 16, device="cuda"))).mean().backward()
    other.step()
""",
    # A penalty in every sixteenth step.
    "penalty": """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1_000):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    if number % 16 == 0:
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
""",
    # Batches of ever new lengths.
    "lengths": """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in (8, 8, 300, 700, 500, 200, 800, 1600, 400):
    model(torch.randn(length, 64, device="cuda")).mean().backward()
    optimizer.step()
""",
    # Batches of a new size in every second step.
    "convolutions": """
import torch

model = torch.nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in (8, 8, 3, 7, 3, 2, 7, 16, NUMBER):
    model(torch.randn(batch, 3, 16, 16, device="cuda")).mean().backward()
    optimizer.step()
""",
    # Ten passes of a teacher in every step, which must not be taken for evaluation.
    "teacher": """
import torch

teacher, student = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
while True:
    crops = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        targets = [teacher(crops) for _ in range(10)]
    sum((student(crops) - target).square().mean() for target in targets).backward()
    optimizer.step()
""",
}


# Two steps of the optimizer for one backward pass, and steps that differ in turn.
TWICE = """
import sys
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(100):
    batch = torch.randn(8, 64, device="cuda")
    if number % 2 and "turn" in sys.argv:
        batch = batch * 2
    model(batch).sum().backward()
    optimizer.step()
    if "twice" in sys.argv:
        optimizer.step()
"""


@pytest.mark.parametrize(("how", "samples", "said"), [("twice", 8, "step 3 of SGD,"), ("turn", 16, "each is 2 of its")])
def test_a_step_is_all_that_comes_again(folder: Path, how: str, samples: int, said: str) -> None:
    (folder / "twice.py").write_text(TWICE, encoding="utf-8")
    found = run(folder, f"python twice.py {how}")
    (line,) = [line for line in found.notes if "of SGD" in line]
    assert said in line and line.endswith("equal to step 2")
    assert found.throughput.samples == samples and "aten::addmm" in found.breakdown["by_operator"]


def test_a_step_has_steps_of_all_optimizers(folder: Path) -> None:
    (folder / "critic.py").write_text(LOOPS["critic"], encoding="utf-8")
    found = run(folder, "python critic.py")
    assert any("of RMSprop" in line for line in found.notes)
    products = [name for name in found.breakdown["by_line"] if name.startswith("critic.py:8")]
    assert products and found.operators > 5 * 20


def test_work_that_is_not_in_every_step_is_named(folder: Path) -> None:
    text = LOOPS["penalty"].replace("number % 16 == 0", "not number")  # which does not say when it comes again
    (folder / "penalty.py").write_text(text, encoding="utf-8")
    found = run(folder, "python penalty.py")
    (line,) = [line for line in found.notes if "of SGD" in line]
    assert line.endswith(
        "equal to step 2; step 1 had 2 backward passes, this one 1: what is not done in every step is left out"
    )
    (apart,) = [line for line in found.notes if "not in the step" in line]
    said, _, seconds = apart.rpartition(": ")
    assert said == "not in the step: a step with 2 backward passes, as a whole" and found.mean is None
    assert float(seconds.removesuffix(" s")) > 1.2 * found.iteration_seconds


GUARDED = """
    for every in 1, 16:
        if number % every != 0:
            continue
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
"""
NAMED = """
    penalised = number % 16 == 0
    inputs = torch.randn(8, 64, device="cuda", requires_grad=True)
    loss = model(inputs).square().mean()
    if penalised:
        slope, = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = loss + slope.square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("loop", "whole"), [(None, True), (NAMED, True), (GUARDED, False)])
def test_work_of_every_sixteenth_step_is_in_the_mean(folder: Path, loop: str | None, whole: bool) -> None:
    text = LOOPS["penalty"]
    text = text if loop is None else text[: text.index("\n    model(")] + loop
    (folder / "penalty.py").write_text(text, encoding="utf-8")
    found = run(folder, "python penalty.py")
    (apart,) = [line for line in found.notes if "not in the step" in line]
    said, _, seconds = apart.rpartition(": ")
    place = "a whole step with more work" if whole else "besides the step"
    assert said == f"not in the step: every 16 steps, {place}" and found.mean is not None
    usual, rare = found.iteration_seconds, float(seconds.removesuffix(" s"))
    assert found.mean.every == 16 and rare > (usual if whole else 0)
    assert found.mean.iteration_seconds == pytest.approx(usual + (rare - usual * whole) / 16, rel=1e-3)
    assert found.mean.interval_seconds[0] < found.mean.iteration_seconds < found.mean.interval_seconds[1]
    assert found.throughput.samples_per_second == pytest.approx(8 / found.mean.iteration_seconds)
    assert not any("left out" in line for line in found.notes)


SLOW = """
import sys
import time

import torch


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4_000

    def __getitem__(self, place):
        end = time.thread_time() + 2e-3
        while time.thread_time() < end:
            pass
        return torch.ones(64)


model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Slow(), 8, num_workers=int(sys.argv[1])):
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


def test_a_step_that_may_wait_for_its_data_is_told(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    (line,) = [line for line in run(folder, "python slow.py 2").warnings if "data loader" in line]
    found = re.match(r"a data loader takes ([0-9.]+) ms a step, ([0-9.]+) ms of a core .* by 2 workers", line)
    assert found and 2 * float(found[1]) == pytest.approx(float(found[2]), rel=0.01) and 16 <= float(found[2]) < 32
    assert not any("data loader" in line for line in run(folder, "python slow.py 1000").warnings)


def test_of_steps_of_different_lengths_the_middle_one_is_taken(folder: Path) -> None:
    (folder / "lengths.py").write_text(LOOPS["lengths"], encoding="utf-8")
    found = run(folder, "python lengths.py")
    assert found.throughput.samples == 500
    (line,) = [line for line in found.notes if "of SGD" in line]
    assert "step 5" in line and "the middle one of 7 different steps (0." in line


@pytest.mark.parametrize(("batch", "told"), [(5, True), (7, False)])
def test_convolutions_of_new_shapes_are_told(folder: Path, batch: int, told: bool) -> None:
    (folder / "sizes.py").write_text(LOOPS["convolutions"].replace("NUMBER", str(batch)), encoding="utf-8")
    notes = [line for line in run(folder, "python sizes.py").notes if "cuDNN looks for their kernels" in line]
    assert [line.startswith("2 of 2 convolutions and gradients in step 9 ") for line in notes] == [True] * told


def test_several_gpus_wait_for_the_one_with_the_longest(folder: Path) -> None:
    more = "int(os.environ['RANK'])"  # ranks have data of their own
    lengths = f"(8, 8, *(100 + 7 * step % 22 * 100 + {more} for step in range(30)))"
    text = LOOPS["lengths"].replace("(8, 8, 300, 700, 500, 200, 800, 1600, 400)", lengths)
    (folder / "lengths.py").write_text("import os\n" + text, encoding="utf-8")
    for gpus, length, place in ((2, 1600, 16), (4, 1900, 19)):
        found = run(folder, f"torchrun --nproc-per-node {gpus} lengths.py")
        assert found.throughput.samples == gpus * length and [each.multiplicity for each in found.ranks] == [gpus]
        (line,) = [line for line in found.notes if "of SGD" in line]
        assert f"number {place} by work of 22 different steps (0." in line and f"slowest of {gpus} GPUs" in line


def test_passes_without_gradients_in_every_step_are_part_of_it(folder: Path) -> None:
    (folder / "teacher.py").write_text(LOOPS["teacher"], encoding="utf-8")
    found = run(folder, "python teacher.py")
    assert not any("not in the step" in line for line in found.notes)
    products = found.breakdown["by_operator"]["aten::addmm"]
    assert found.breakdown["by_line"]["teacher.py:9"] == pytest.approx(products / 2)  # the student is called as often


WRITER = """
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

with open("log.txt", "a") as log:
    log.write("overwritten")
assert Path("log.txt").read_text() == "oldoverwritten"
os.makedirs("run/deep")
Path("run/deep/new.txt").write_text("new")
shutil.rmtree("kept")
(tokens := np.memmap("tokens.bin", dtype=np.uint8))[:] = 1  # to be written, by default
assert tokens.sum() == 3
os.replace("run/deep/new.txt", "best.txt")
assert open("best.txt").read() == "new"
os.makedirs("step-tmp/deep")
torch.save({"step": 7, "images": torch.ones(8, 64)}, "step-tmp/deep/state.pt")
os.replace("step-tmp", "step")
tempfile.mkstemp(dir="step")
assert os.path.exists("step/deep/state.pt") and torch.load("step/deep/state.pt")["step"] == 7
images = torch.load("step/deep/state.pt", map_location=torch.device("cuda", 0))["images"]
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(images).mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "checkpoint.pt")
    model.load_state_dict(torch.load("checkpoint.pt"))
    print("much to say " * 100_000)
"""


def test_files_are_as_they_were_and_output_has_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(WRITER, encoding="utf-8")
    (tmp_path / "kept").mkdir()
    for name in ("log.txt", "best.txt", "checkpoint.pt", "kept/file.txt", "tokens.bin"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    before = {path: path.is_dir() or path.read_text() for path in tmp_path.rglob("*")}
    found = run(tmp_path, "python train.py")
    assert {path: path.is_dir() or path.read_text() for path in tmp_path.rglob("*")} == before
    place = WRITER.splitlines().index('    torch.save(model.state_dict(), "checkpoint.pt")') + 1
    assert f"train.py:{place} writes checkpoint.pt: not written" in found.notes
    assert len(capfd.readouterr().err) < 50_000


HABITS = """
import os
import subprocess
import threading

import torch


@torch.jit.script
def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / 1.41421))


state = torch.cuda.get_rng_state()
torch.cuda.random.set_rng_state(state)
torch.cuda.default_generators[0].set_state(state)
torch.cuda.set_sync_debug_mode("warn")
assert torch.cuda.get_sync_debug_mode() == 1
os.chdir("/")
if os.fork() == 0:
    os._exit(0)
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("started", left.pid)
thread = threading.Thread(target=print, args=("from a thread",))
thread.start()
thread.join()
model = torch.compile(torch.nn.Linear(64, 64).cuda(), mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(5):
    loss = gelu(model(torch.randn(8, 64, device="cuda"))).mean()
    loss.backward()
    optimizer.step()
    print({"loss": loss}, model.weight)
    if number == 4:
        os._exit(0)
"""


def test_habits_of_programs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "habits.py").write_text(HABITS, encoding="utf-8")
    found = run(folder, "python habits.py")
    assert any("fused" in name and "erf" in name for name in found.breakdown["by_operator"])  # TorchScript's
    said = capfd.readouterr().err
    left = Path("/proc", re.search(r"started (\d+)", said)[1], "cmdline")  # ended, though in a session of its own
    assert not left.exists() or b"sleep" not in left.read_bytes()
    assert "{'loss': tensor(1.0, device='cuda:0')}" in said and "size=(64, 64), dtype=torch.float32)" in said


def test_advice_and_questions(folder: Path) -> None:
    found = run(folder, "python train.py", advice=True, what_if=("host=2x",))
    assert {"--compile", "--cuda-graph"} <= {each.change for each in found.advice.alternatives}
    assert found.what_if[1].iteration_seconds < found.what_if[0].iteration_seconds
    with pytest.raises(InputError, match="a program has its own batch"):
        run(folder, "python train.py", what_if=("batch=64",))


def test_a_program_that_fails_is_told_by_its_own_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "fails.py").write_text("import torch\n\n\ntorch.nn.Linear(3, 4)(torch.randn(5, 6))\n", encoding="utf-8")
    with pytest.raises(ModelError, match="^fails.py:4: the script failed with RuntimeError: .*$") as caught:
        run(folder, "python fails.py")
    assert "mend it there" not in str(caught.value) and "its traceback is above" in str(caught.value)
    assert 'File "fails.py", line 4' in capfd.readouterr().err


ACCUMULATION = """
import os
import sys
from contextlib import nullcontext

import torch

several = "RANK" in os.environ
if several:
    torch.distributed.init_process_group("nccl")
if "all" in sys.argv:  # a derivative asked for keeps every pass
    weight = torch.ones(1, requires_grad=True)
    torch.autograd.grad(weight.sum(), weight)
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
model = torch.nn.parallel.DistributedDataParallel(net) if several else net
criterion = torch.nn.MSELoss()
passes = int(sys.argv[1])
batch = torch.randn(4096, 256).cuda()
while True:
    for number in range(passes):
        with model.no_sync() if several and number < passes - 1 else nullcontext():
            output = model(batch)
            output *= 2
            loss = criterion(output, torch.zeros(4096, 256, device="cuda"))
            batch = torch.randn(4096, 256).cuda()
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc-per-node 2"])
def test_equal_passes_of_a_step_are_counted(folder: Path, launcher: str) -> None:
    """Of twelve passes six are run; the answer is that of all twelve."""
    (folder / "accumulation.py").write_text(ACCUMULATION, encoding="utf-8")
    some = run(folder, f"{launcher} accumulation.py 12", what_if=("host=2x",))
    every = run(folder, f"{launcher} accumulation.py 12 all", what_if=("host=2x",))
    assert any("6 of its 12 passes, which are alike, not run" in line for line in some.notes)
    assert not any("not run" in line for line in every.notes)
    for name in ("iteration_seconds", "forward_seconds", "gpu_active_seconds", "host_bound_fraction"):
        assert getattr(some, name) == pytest.approx(getattr(every, name), rel=0.005)
    assert some.interval_seconds == pytest.approx(every.interval_seconds, rel=0.03)
    assert (some.kernels, some.operators) == (every.kernels, every.operators)
    assert some.throughput.samples == every.throughput.samples
    assert some.memory_breakdown == pytest.approx(every.memory_breakdown, rel=0.005)
    assert some.breakdown["by_operator"] == pytest.approx(every.breakdown["by_operator"], rel=0.005)
    assert some.coverage == pytest.approx(every.coverage, rel=0.005)
    assert some.energy.joules == pytest.approx(every.energy.joules, rel=0.01)
    assert some.utilisation.mfu == pytest.approx(every.utilisation.mfu, rel=0.005)
    assert some.what_if[1].iteration_seconds == pytest.approx(every.what_if[1].iteration_seconds, rel=0.005)
    collectives = {each.kind for each in some.collectives}
    assert collectives == ({"all_reduce"} if "torchrun" in launcher else set())


TRANSFORMED = """
import torch


class Windowed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, sound):
        return sound.to(self.window.device) * self.window


found = torch.nn.Sequential(Windowed())(torch.ones(4, 8))
assert found.device.type == "cpu" and found[:, 4].tolist() == [1.0] * 4
assert Windowed().cuda()(torch.ones(4, 8)).is_cuda
net = torch.nn.Sequential(Windowed(), torch.nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters())
while True:
    net(found.cuda()).square().mean().backward()
    optimizer.step()
"""


def test_a_transform_of_the_host_has_its_values(folder: Path) -> None:
    (folder / "transformed.py").write_text(TRANSFORMED, encoding="utf-8")
    assert run(folder, "python transformed.py").throughput.samples == 4


NUMBERED = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--rows", type=int)
options = parser.parse_args()
torch.cuda.set_device(options.local_rank)
torch.distributed.init_process_group("nccl")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32).cuda())
optimizer = torch.optim.SGD(net.parameters())
while True:
    net(torch.randn(options.rows, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "launcher", ["python -m torch.distributed.launch --nproc_per_node=2", "deepspeed --num_gpus 2"]
)
def test_a_program_gets_its_number_from_an_old_launcher(folder: Path, launcher: str) -> None:
    (folder / "numbered.py").write_text(NUMBERED, encoding="utf-8")
    assert run(folder, f"{launcher} numbered.py --rows 16").throughput.samples == 2 * 16


AVERAGED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters())
number = 0
while True:
    net(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    number += 1
    if number % 6 == 0:
        for parameter in net.parameters():
            dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)
"""


def test_weights_that_are_averaged_now_and_then_are_in_the_mean(folder: Path) -> None:
    (folder / "averaged.py").write_text(AVERAGED, encoding="utf-8")
    found = run(folder, "torchrun --nproc-per-node 2 averaged.py")
    assert any("every 6 steps, a whole step with more work" in line for line in found.notes)
    assert found.mean is not None and found.mean.iteration_seconds > found.iteration_seconds
    (folder / "alone.py").write_text(AVERAGED.replace("% 6 == 0", "< 0"), encoding="utf-8")
    alone = run(folder, "torchrun --nproc-per-node 2 alone.py")
    assert alone.mean is None and any("no collective in 17 steps" in line for line in alone.notes)


CLOSURES = """
import torch

net = torch.nn.Linear(64, 32).cuda()
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=2)
data = torch.randn(256, 64, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = net(data).square().mean()
    loss.backward()
    return loss


while True:
    optimizer.step(closure)
"""


def test_a_step_that_would_end_by_its_loss_takes_all_its_rounds(folder: Path) -> None:
    (folder / "closures.py").write_text(CLOSURES, encoding="utf-8")
    found = run(folder, "python closures.py")
    assert found.throughput.samples == 3 * 256
    assert found.forward_seconds > 0  # in the closure, which the optimizer calls


PIECES = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 32)

    def forward(self, x):
        return list(self.layer(x).split(128))


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
target = torch.zeros(255, dtype=torch.long, device="cuda")
while True:
    for _ in range(12):
        pieces = net(torch.randn(256, 64, device="cuda"))
        pieces[-1] = pieces[-1][:-1]
        loss = torch.nn.functional.cross_entropy(torch.cat(pieces), target)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_pass_left_out_gives_what_the_module_gave(folder: Path) -> None:
    """The program replaces an element of the list that it got: passes that are not run still give the module's own."""
    (folder / "pieces.py").write_text(PIECES, encoding="utf-8")
    found = run(folder, "python pieces.py")
    assert any("6 of its 12 passes, which are alike, not run" in line for line in found.notes)


RING = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
other, inside = 1 - dist.get_rank(), sys.argv[1] == "inside"


def exchanged(data):
    found = torch.empty_like(data)
    ways = [dist.P2POp(dist.isend, data.contiguous(), other), dist.P2POp(dist.irecv, found, other)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    return found


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, data):
        return exchanged(data)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        x = self.layer(x)
        return x + Passed.apply(x) if inside else x


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
while True:
    for _ in range(12):
        data = torch.randn(256, 64, device="cuda")
        net(data if inside else exchanged(data)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("place", ["inside", "between"])
def test_passes_whose_modules_send_in_a_ring_are_left_out_and_stages_of_a_pipeline_are_not(folder: Path, place: str):
    (folder / "ring.py").write_text(RING, encoding="utf-8")
    found = run(folder, f"torchrun --nproc-per-node 2 ring.py {place}")
    assert any("6 of its 12 passes, which are alike, not run" in line for line in found.notes) is (place == "inside")


GRAPHS = """
import sys

import torch

(mode,) = sys.argv[1:]
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(net.parameters(), capturable=True)
data = torch.randn(32, 256, device="cuda")
model = torch.cuda.make_graphed_callables(net, (data,)) if mode == "callables" else net
if mode == "compiled":
    model = torch.compile(net, mode="reduce-overhead")


def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


if mode == "whole":
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        step()
    step = graph.replay
while True:
    data.copy_(torch.randn(32, 256))
    step()
"""


def test_cuda_graphs_of_the_program(folder: Path) -> None:
    """One launch for each replay; kernels and memory are those of the eager step."""
    (folder / "graphs.py").write_text(GRAPHS, encoding="utf-8")
    eager, callables, compiled, whole = (
        run(folder, f"python graphs.py {mode}") for mode in ("eager", "callables", "compiled", "whole")
    )
    assert eager.kernels == callables.kernels == whole.kernels
    assert callables.gpu_active_seconds == pytest.approx(eager.gpu_active_seconds, rel=0.01)
    for some in (callables, compiled):  # the optimizer is not in the graphs
        assert some.forward_seconds < 0.5 * eager.forward_seconds
        assert some.backward_seconds < 0.5 * eager.backward_seconds
        assert some.optimizer_seconds == pytest.approx(eager.optimizer_seconds, rel=0.1)
    assert whole.iteration_seconds < 0.3 * eager.iteration_seconds
    assert whole.iteration_seconds >= whole.gpu_active_seconds == pytest.approx(eager.gpu_active_seconds, rel=0.1)


MEMORY = """
import torch

model = torch.nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(1024, 1024, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
used, most, megabytes = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), 4 << 20
assert 3 * megabytes <= used < 5 * megabytes  # weights and the optimizer's state, and perhaps the last output
assert used + megabytes <= most < 10 * megabytes
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == most <= torch.cuda.max_memory_reserved()
free, whole = torch.cuda.mem_get_info()
assert 0 < whole - free <= most
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == used
"""


def test_a_program_is_told_the_memory_in_use(folder: Path) -> None:
    (folder / "memory.py").write_text(MEMORY.replace("range(3)", "range(2)"), encoding="utf-8")
    assert run(folder, "python memory.py").operators


OUTPUTS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 16384, bias=False)

    def forward(self, x):
        scores = self.layer(x)
        return {"loss": scores.mean(), "scores": scores.detach().clone()}


net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters())
x = torch.randn(1024, 64, device="cuda")
while True:
    net(x)["loss"].backward()
    with torch.no_grad():
        net(x)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_outputs_of_a_module_live_as_long_as_the_program_keeps_them(folder: Path) -> None:
    """Two of 64 MiB at the end of the forward pass; in the backward pass a gradient as large, and none of them."""
    (folder / "outputs.py").write_text(OUTPUTS, encoding="utf-8")
    (rank,) = run(folder, "python outputs.py").ranks
    assert 128 << 20 < rank.allocated_bytes - rank.memory_breakdown["buffers"] < 160 << 20


STARTED = {
    "takes its place": """
import os
import sys

if "PLACE" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv, "again"], {**os.environ, "PLACE": "taken"})
assert sys.argv[1:] == ["again"]
""",
    "no optimizer": "",
}


@pytest.mark.parametrize("how", STARTED)
def test_a_forward_loop_without_optimizer_also_in_place_of_another_program(folder: Path, how: str) -> None:
    loop = """
import torch

model = torch.nn.Linear(64, 64).cuda().eval()
while True:
    with torch.no_grad():
        model(torch.randn(8, 64, device="cuda"))
"""
    (folder / "loop.py").write_text(STARTED[how] + loop, encoding="utf-8")
    found = run(folder, "python loop.py")
    assert found.backward_seconds == 0 and "aten::addmm" in found.breakdown["by_operator"]
    assert any("of Linear" in line and "equal to step" in line for line in found.notes)


def test_a_program_that_is_ended_by_a_signal_is_told(folder: Path) -> None:
    (folder / "ended.py").write_text("import os\n\nos.kill(os.getpid(), 15)\n", encoding="utf-8")
    with pytest.raises(ModelError, match="^ended.py: its process ended without an answer, with signal SIGTERM$"):
        run(folder, "python ended.py")


def test_a_program_that_starts_its_ranks_says_how_many_gpus_it_takes(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import torch


def work(rank, ranks):
    torch.distributed.init_process_group("nccl", init_method="tcp://localhost:1234", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(rank), [rank])
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 64, device=rank)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (4,), 4)
""",
        encoding="utf-8",
    )
    found = predict(command=["python", "train.py"], gpu="h100-sxm", folder=tmp_path)
    assert found.gpus == 4 and [each.multiplicity for each in found.ranks] == [4]
    assert any("starts 4 processes: 4 GPUs taken" in note for note in found.notes)
    with pytest.raises(ModelError, match="starts 4 processes: give --gpus 4"):
        predict(command=["python", "train.py"], gpu="h100-sxm", folder=tmp_path, gpus=2)
