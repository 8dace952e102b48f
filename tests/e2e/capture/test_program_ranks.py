"""Ranks of programs run as they are: those that differ, those that wait for each other, those that a program starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import ModelError
from e2e.capture.distributed.distributed_capture import DistributedCapture, capture_job
from e2e.capture.distributed.rank_work import RankWork, work_of
from e2e.capture.launcher import parse_command
from e2e.capture.program_process import ProgramRanks
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.step.options import StepOptions

HEAD = """
import os, torch
import torch.distributed as dist
"""
LOOP = """
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    after()
    optimizer.step()
"""


def captured(folder: Path, program: str, command: str, gpus: int) -> DistributedCapture:
    (folder / "train.py").write_text(program, encoding="utf-8")
    launch = parse_command(command.split(), folder)
    with closing(ProgramRanks(launch, StepOptions(attention="flash"), folder)) as ranks:
        return capture_job(ranks, gpus, 8)


def names(trace: OperatorTrace) -> Counter[str]:
    return Counter(call.name for call in trace.calls)


def test_ranks_that_update_different_numbers_of_parameters_are_told_apart(tmp_path):
    """Six matrices are updated by four ranks in turn; all hold the same parameters."""
    program = f"""{HEAD}
assert not dist.is_initialized()
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
assert os.environ["LOCAL_RANK"] == str(rank) and torch.device(rank) == torch.device("cuda", rank)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)]).to(rank)
optimizer = torch.optim.SGD(model.parameters())

def after():
    for number, parameter in enumerate(model.parameters()):
        update = parameter.grad if number % ranks else parameter.grad
        if number % ranks == rank:
            for _ in range(3):
                update = update @ update.T @ update
        dist.broadcast(update, number % ranks)
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 4 train.py", 4)
    assert found.multiplicity == {0: 2, 2: 2}
    products = [names(trace)["aten::mm"] for trace in found.traces]
    assert products[0] - products[1] == 6  # of one matrix


def test_stages_send_each_other_objects(tmp_path):
    program = f"""{HEAD}
dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    dist.send_object_list([{{"width": 64}}], 1)
    answer = [None]
    dist.recv_object_list(answer, 1)
    width = answer[0]
else:
    given = [None]
    dist.recv_object_list(given, 0)
    dist.send_object_list([given[0]["width"]], 0)
    width = given[0]["width"]
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    data = torch.empty(4, 64, device="cuda")
    dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2)
    assert found.multiplicity == {0: 1, 1: 1}
    assert [(names(trace)["c10d::send"], names(trace)["c10d::recv_"]) for trace in found.traces] == [(1, 0), (0, 1)]


def test_ranks_get_what_the_first_one_broadcasts_and_scatters(tmp_path):
    """Where it does not come to a broadcast, they keep what they have."""
    program = f"""{HEAD}
dist.init_process_group("nccl")
rank = dist.get_rank()
shared, own = ([64], [None]) if rank == 0 else ([None], [None])
dist.broadcast_object_list(shared, src=0)
dist.scatter_object_list(own, [10, 11, 12, 13] if rank == 0 else None, src=0)
assert own == [10 + rank], own
model = torch.nn.Linear(64, shared[0]).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    if rank:
        kept = [rank]
        dist.broadcast_object_list(kept, src=0)
        assert kept == [rank], kept
    dist.all_reduce(model.weight.grad)
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 4 train.py", 4)
    assert found.multiplicity == {0: 4}


def test_a_rank_that_gives_an_object_to_its_group_is_run_but_not_modelled_for_it(tmp_path):
    program = f"""{HEAD}
dist.init_process_group("nccl")
rank = dist.get_rank()
pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
width = [64 if rank % 2 == 0 else None]
dist.broadcast_object_list(width, src=rank // 2 * 2, group=pairs[rank // 2])
model = torch.nn.Linear(64, width[0]).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    dist.all_reduce(model.weight.grad)
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 4 train.py", 4)
    assert found.multiplicity == {0: 4}


def test_ranks_that_run_at_the_same_time_meet_at_barriers(tmp_path, monkeypatch):
    """And at their start, so that one reads what another has written, until that moves it; one that has ended is not
    waited for.
    """
    monkeypatch.setattr(ProgramRanks, "at_once", 2)
    program = f"""{HEAD}
import time
rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(1)
    os.mkdir("first")
dist.init_process_group("nccl")
assert os.path.exists("first")
if rank == 0:
    time.sleep(1)
    os.mkdir("unfinished")
dist.barrier()
time.sleep(rank / 2)
assert os.path.exists("unfinished")
dist.barrier()
if rank == 0:
    os.rename("unfinished", "finished")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    dist.all_reduce(model.weight.grad)
    if rank:
        dist.barrier(dist.group.WORLD)
        torch.ones(1, device="cuda") * torch.ones(1, device="cuda")
{LOOP}"""
    assert captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2).multiplicity == {0: 1, 1: 1}


STREAMING = """
class SharedBarrier:
    def __init__(self, filelock_path, shm_name):
        pass

    def __call__(self, num_procs):
        raise AssertionError("waits for loaders of ranks that are not run")
"""


def test_ranks_meet_at_barriers_of_streaming_loaders(tmp_path, monkeypatch):
    monkeypatch.setattr(ProgramRanks, "at_once", 2)
    (tmp_path / "streaming" / "base" / "shared").mkdir(parents=True)
    (tmp_path / "streaming" / "base" / "shared" / "barrier.py").write_text(STREAMING, encoding="utf-8")
    program = f"""{HEAD}
import time
from streaming.base.shared.barrier import SharedBarrier
dist.init_process_group("nccl")
first, second = SharedBarrier("a", "b"), SharedBarrier("c", "d")
if dist.get_rank() == 0:
    time.sleep(1)
    os.mkdir("shards")
first(8)
assert os.path.exists("shards")
second(8)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    dist.all_reduce(model.weight.grad)
    first(8)
{LOOP}"""
    assert captured(tmp_path, program, "torchrun --nproc-per-node 8 train.py", 8).multiplicity == {0: 8}


def test_ranks_that_wait_for_each_other_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(ProgramRanks, "at_once", 2)
    program = f"""{HEAD}
dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    dist.barrier()
else:
    dist.broadcast_object_list([None], 0)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())

def after():
    dist.all_reduce(model.weight.grad)
{LOOP}"""
    assert captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2).multiplicity == {0: 2}


def test_a_rank_that_waits_in_vain_is_named(tmp_path):
    program = f"""{HEAD}
dist.init_process_group("nccl")
dist.recv_object_list([None], 1 - dist.get_rank())"""
    with pytest.raises(ModelError, match="waits for an object from rank [01], which never sends one"):
        captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2)


@pytest.mark.parametrize("start", ["spawn(work, (ranks,), ranks)", "Process"])
def test_ranks_that_a_program_starts_itself(tmp_path, start: str):
    processes = """processes = [torch.multiprocessing.Process(target=work, args=(rank, ranks)) for rank in range(ranks)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()"""
    started = processes if start == "Process" else f"torch.multiprocessing.{start}"
    program = f"""{HEAD}
def work(rank, ranks):
    os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}}
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(rank), [rank])
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    {started}
"""
    found = captured(tmp_path, program, "python train.py", 2)
    assert found.multiplicity == {0: 2}
    assert names(found.traces[0])["c10d::allreduce_"] == 1


def test_a_daemon_that_loads_data_is_no_rank(tmp_path):
    """Batchgenerators gives its processes their number, as others do their ranks."""
    program = f"""{HEAD}
import multiprocessing
def load(number, batches):
    while True:
        batches.put(number, timeout=60)

batches = multiprocessing.Queue(1)
multiprocessing.Process(target=load, args=(0, batches), daemon=True).start()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
after = batches.get
{LOOP}"""
    assert names(captured(tmp_path, program, "python train.py", 1).traces[0])["aten::addmm"] == 1


def test_an_error_that_a_rank_hands_to_its_parent(tmp_path, capfd):
    """As pycls and fairseq do: the parent ends all ranks, whose print is not the usual one, and raises it again."""
    program = f"""{HEAD}
import builtins, multiprocessing, signal, traceback
def work(rank, errors):
    dist.init_process_group("nccl", rank=rank, world_size=2)
    builtins.print = lambda text: None
    try:
        raise OSError("no data")
    except Exception:
        errors.put(traceback.format_exc())
    finally:
        dist.destroy_process_group()

errors = multiprocessing.SimpleQueue()
processes = [multiprocessing.Process(target=work, args=(rank, errors)) for rank in range(2)]
for each in processes:
    each.start()
for each in processes:
    each.join()
    os.kill(each.pid, signal.SIGKILL)
assert [each.exitcode for each in processes] == [0, 0]
raise RuntimeError(errors.get())
"""
    with pytest.raises(ModelError, match="failed with RuntimeError: OSError: no data; its traceback"):
        captured(tmp_path, program, "python train.py", 2)
    assert "in work" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["'-m', 'torch.distributed.run', '--nproc_per_node=2',", ""])
def test_a_program_that_starts_itself_by_a_command(tmp_path, launcher: str):
    """As the commands of libraries do: by a launcher, or once for each rank. What is read is really run."""
    program = f"""{HEAD}
import subprocess, sys
if sys.argv[1:] != ["--rank"]:
    assert subprocess.check_output([sys.executable, "-c", "print(3)"]) == b"3\\n"
    for rank in range({1 if launcher else 2}):
        os.environ |= {{"LOCAL_RANK": str(rank), "MINE": "1"}}
        started = subprocess.Popen([sys.executable, {launcher} "train.py", "--rank"])
        assert started.wait() == 0
    raise SystemExit(0)
dist.init_process_group("nccl")
assert os.environ["MINE"] == "1" and os.environ["LOCAL_RANK"] == str(torch.cuda.current_device())
dist.new_group(backend="gloo").monitored_barrier()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters())
after = lambda: None
{LOOP}"""
    found = captured(tmp_path, program, "python train.py", 2)
    assert found.multiplicity == {0: 2}
    assert names(found.traces[0])["c10d::allreduce_"] == 1
    with pytest.raises(ModelError, match="train.py: the program ended before its first step: status 3"):
        captured(tmp_path, program.replace("after = ", "sys.exit(3) # "), "python train.py", 2)
    if launcher:
        with pytest.raises(ModelError, match="starts 2 processes of train.py: give --gpus 2"):
            captured(tmp_path, program, "python train.py", 4)


def test_parameters_without_gradients_are_none_of_apex_concern(tmp_path):
    program = f"""{HEAD}
from apex.parallel import DistributedDataParallel
dist.init_process_group("nccl")
parts = torch.nn.ModuleDict({{"used": torch.nn.Linear(64, 64), "pooler": torch.nn.Linear(64, 64)}})
parts.forward = lambda given: parts["used"](given)
model = DistributedDataParallel(parts.cuda())
optimizer = torch.optim.SGD(model.parameters())
after = lambda: None
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2)
    assert found.multiplicity == {0: 2} and names(found.traces[0])["c10d::allreduce_"] == 1


def test_a_launcher_that_catches_all_errors_hides_none(tmp_path):
    """As that of Composer does."""
    program = f"""{HEAD}
import subprocess, sys
if sys.argv[1:] != ["--rank"]:
    try:
        subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py", "--rank"])
    except:
        raise SystemExit(1)
    raise SystemExit(0)
"""
    with pytest.raises(ModelError, match="starts 2 processes of train.py: give --gpus 2"):
        captured(tmp_path, program, "python train.py", 4)


def test_a_process_group_of_one_gpu(tmp_path):
    program = f"""{HEAD}
dist.init_process_group("nccl", rank=0, world_size=1)
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=0)
optimizer = torch.optim.SGD(model.parameters())
after = lambda: model.clip_grad_norm_(1.0)
{LOOP}"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 1 train.py", 1)
    assert found.multiplicity == {0: 1} and names(found.traces[0])["aten::addmm"] == 1


def test_gradients_of_fsdp1_are_reduced_in_the_first_step_too(tmp_path):
    """Of many accumulated passes the last one, which reduces them to the optimizer's type, is not left out."""
    program = f"""{HEAD}
import contextlib
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
dist.init_process_group("nccl")
half = MixedPrecision(torch.bfloat16, torch.bfloat16)
place = int(os.environ["LOCAL_RANK"])
model = FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=place, mixed_precision=half)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(10):
    for number in range(9):
        with model.no_sync() if number < 8 else contextlib.nullcontext():
            model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (trace,) = captured(tmp_path, program, "torchrun --nproc-per-node 4 train.py", 4).traces
    assert names(trace)["c10d::_reduce_scatter_base_"] == 1
    assert trace.repeated is not None and trace.repeated.more == 3


def test_data_parallel_on_several_gpus(tmp_path):
    program = f"""{HEAD}
model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(10):
    output = model(torch.randn(10, 64, device="cuda"))
    assert output.shape == (10, 64)
    optimizer.zero_grad()
    output.sum().backward()
    optimizer.step()
"""
    found = captured(tmp_path, program, "python train.py", 4)
    (trace,), calls = found.traces, names(found.traces[0])
    assert found.multiplicity == {0: 4} and found.samples == 3
    products = [call for call in trace.calls if call.name == "aten::addmm"]
    assert [call.inputs[1].shape for call in products] == [(3, 64)]
    # Parameters, and buffers of two types; inputs, and gradients of outputs; outputs.
    moved = calls["c10d::broadcast_"], calls["c10d::scatter_"], calls["c10d::gather_"], calls["c10d::reduce_"]
    assert moved == (3, 2, 1, 1)
    with pytest.raises(ModelError, match="DataParallel on 2 GPUs: give --gpus 2"):
        captured(tmp_path, program.replace("cuda())", "cuda(), [0, 1])"), "python train.py", 1)


def test_deepspeed_by_its_launcher(tmp_path):
    program = """
import argparse, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(inplace=True), torch.nn.Linear(64, 64))
engine, *_ = deepspeed.initialize(args, model, torch.optim.AdamW(model.parameters()), config=args.deepspeed_config)
for _ in range(10):
    loss = engine(torch.randn(4, 64, device=engine.device, dtype=torch.bfloat16)).sum()
    engine.backward(loss)
    engine.step()
"""
    (tmp_path / "zero.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}',
        encoding="utf-8",
    )
    command = "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config zero.json"
    found = captured(tmp_path, program, command, 2)
    assert found.multiplicity == {0: 2}
    assert names(found.traces[0])["c10d::_reduce_scatter_base_"] == 1


def work(**elements: int) -> RankWork:
    return RankWork(Counter(elements), Counter())


def test_work_is_alike_up_to_uneven_parts_and_apart_by_its_collectives():
    assert work(mm=10_000).is_like(work(mm=10_000, item=90))
    assert not work(mm=10_000).is_like(work(mm=9_000))
    assert not work(mm=10_000).is_like(work(bmm=10_000))
    reduced = RankWork(Counter(mm=10_000), Counter({"c10d::allreduce_": 1}))
    assert not work(mm=10_000).is_like(reduced)
    drawn = [replace(each, drawn=True) for each in (work(mm=10_000), work(mm=5_000), reduced)]
    assert drawn[0].is_like(drawn[1]) and not drawn[0].is_like(drawn[2]) and not drawn[0].is_like(work(mm=5_000))


def test_work_counts_elements_on_the_gpu_only():
    def tensor(device: str) -> Tensor:
        return Tensor(0, 0, (4, 8), "float32", device)

    call = OperatorCall(0, "aten::add", None, 0, inputs=(tensor("cuda:0"), tensor("cpu")), outputs=(tensor("cuda:0"),))
    assert work_of([call]).elements == Counter({"aten::add": 64})


def test_views_are_no_work():
    """As of a rank that finds its part in a large tensor by more slices than another one."""
    held = Tensor(0, 0, (4, 8), "float32", "cuda:0")
    calls = [
        OperatorCall(number, name, None, 0, inputs=(held,), outputs=(held,))
        for number, name in enumerate(["aten::slice", "aten::view", "aten::neg"])
    ]
    assert work_of(calls).elements == Counter({"aten::neg": 64})


def test_steps_that_begin_anew_after_another_number_on_each_rank(tmp_path):
    """Batches of two lengths in turn on one rank, of three on the other; both ranks meet once in each step."""
    program = f"""{HEAD}
dist.init_process_group("nccl")
lengths = ([8, 16], [8, 16, 24])[dist.get_rank()]
one, other = (torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda()) for _ in range(2))
optimizers = torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters())
for number in range(100):
    other(one(torch.randn(lengths[number % len(lengths)], 64, device="cuda"))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
"""
    found = captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2)
    barriers = [names(trace)["c10d::barrier"] for trace in found.traces]
    assert set(barriers) == {1}


def test_no_rank_finds_a_value_that_it_looks_for(tmp_path):
    """Sharded weights are drawn until none of all ranks is too large."""
    program = f"""{HEAD}
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda()
fully_shard(model)
with torch.no_grad():
    while (model.weight > 2).any().full_tensor():
        model.weight.normal_()
optimizer = torch.optim.SGD(model.parameters())
after = lambda: None
{LOOP}"""
    assert captured(tmp_path, program, "torchrun --nproc-per-node 2 train.py", 2).multiplicity == {0: 2}


ENDLESS = """
import os, subprocess
helper = subprocess.Popen(["sleep", "600"])
with open(f"{os.environ['NOTES']}/{os.environ['RANK']}", "w") as file:
    print(os.getpid(), helper.pid, file=file)
helper.wait()
"""
TWO_AT_ONCE = """
from e2e.capture.program_process import ProgramRanks
from e2e.commands.cli import main

ProgramRanks.at_once = 2
main()
"""


def is_running(process: int) -> bool:
    """False for one that has ended too, which nobody may have asked for its status."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 143, "stopped (SIGTERM)"),
        (signal.SIGINT, 130, "stopped"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_a_signal_ends_the_command_and_ranks_that_would_not_end(tmp_path, number, status, line):
    """Of SIGKILL nothing is told, but the ranks notice."""
    folders = {name: tmp_path / name for name in ("code", "notes", "scratch")}
    for folder in folders.values():
        folder.mkdir()
    (folders["code"] / "train.py").write_text(ENDLESS, encoding="utf-8")
    named = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    named |= {"NOTES": str(folders["notes"]), "TMPDIR": str(folders["scratch"])}

    def listening() -> None:
        """As of a terminal: who runs the tests may ignore these, and children would, too."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    words = ["predict", "--gpu", "h100-sxm", "--", "torchrun", "--nproc-per-node", "4", "train.py"]
    command = subprocess.Popen(
        [sys.executable, "-c", TWO_AT_ONCE, *words], cwd=folders["code"], env={**os.environ, **named},
        stderr=subprocess.PIPE, text=True, preexec_fn=listening,
    )  # fmt: skip
    notes: list[str] = []
    while command.poll() is None and len(notes) < 4:
        time.sleep(0.05)
        notes = [each for file in folders["notes"].iterdir() for each in file.read_text().split()]
    command.send_signal(number)
    try:
        _, said = command.communicate(timeout=60)
    finally:
        command.kill()
    assert (command.returncode, said.strip()) == (status, line)
    for _ in range(100):
        if not (left := [each for each in notes if is_running(int(each))]):
            break
        time.sleep(0.1)
    assert len(notes) == 4 and not left
    assert not list(folders["scratch"].iterdir()) or number == signal.SIGKILL
