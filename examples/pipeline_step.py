"""Pipeline stages with one of PyTorch's schedules: ``--script examples/pipeline_step.py:make_step --gpus 4``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def make_step(
    batch_size: int = 32,
    width: int = 4096,
    layers: int = 16,
    stages: int = 4,
    micro_batches: int = 8,
    schedule: str = "1f1b",
):
    """A perceptron in ``stages`` parts; with ``interleaved``, each rank has two parts of half the size."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (stages, dist.get_world_size() // stages), mesh_dim_names=("stage", "data"))
    group, place = mesh.get_group("stage"), mesh.get_local_rank("stage")
    parts = 2 * stages if schedule == "interleaved" else stages
    per_part = layers // parts
    made, modules = [], nn.ModuleList()
    for index in range(place, parts, stages):
        blocks = [part for _ in range(per_part) for part in (nn.Linear(width, width), nn.GELU())]
        modules.append(nn.Sequential(*blocks).cuda())
        made.append(PipelineStage(modules[-1], index, parts, torch.device("cuda"), group=group))
    kind = SCHEDULES[schedule]
    runner = kind(
        made if schedule == "interleaved" else made[0],
        n_microbatches=micro_batches,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    data = torch.randn(batch_size, width, device="cuda")
    target = torch.randn(batch_size, width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        inputs = (data,) if place == 0 else ()
        runner.step(*inputs, **({"target": target} if place == stages - 1 else {}))
        optimizer.step()

    return modules, step
