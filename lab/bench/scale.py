"""Time and memory of a prediction against the number of GPUs: ``python -m lab.bench.scale [-o docs/scale.svg]``.

Each point is a process of its own (imports included), as ``python -m e2e predict``: FSDP of Llama-3-8B and 3D-parallel
GPT-3 175B (tp=8, pp=8, the rest replicas), whose numbers of distinct ranks stay 1 and 8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.base.errors import InputError
from costmodel.pages.charts import picture
from lab.command_line import program, run

COUNTS = (64, 256, 1024, 4096)
GPT3 = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}
COMMON = ["--gpu", "h100-sxm", "--network", "infiniband-ndr:8", "--dtype", "bfloat16", "--attention", "flash", "--json"]


def workloads(folder: Path) -> dict[str, list[str]]:
    """Arguments of ``predict`` by workload name, without the number of GPUs."""
    config = folder / "gpt3-175b.json"
    config.write_text(json.dumps(GPT3), encoding="utf-8")
    three = "tp=8,pp=8,sp=yes,micro-batches=16,recompute=full"
    return {
        "FSDP, Llama-3-8B": ["--model", "llama-3-8b", "--sequence-length", "4096", "--parallel", "fsdp={gpus}"],
        "3D, GPT-3 175B": ["--model-config", str(config), "--sequence-length", "2048", "--parallel", three],
    }


def measure(arguments: list[str], gpus: int) -> dict[str, float]:
    """Wall and processor seconds, the largest memory in bytes, and the predicted step in seconds."""
    command = [sys.executable, "-m", "e2e", "predict", *COMMON, "--gpus", str(gpus), "--nodes", str(gpus // 8)]
    command += [argument.format(gpus=gpus) for argument in arguments]
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=output)
        _, status, used = os.wait4(process.pid, 0)  # usage of this process only
        wall = time.perf_counter() - begin
        if status:
            raise InputError(f"failed: {' '.join(command)}")
        output.seek(0)
        step = json.load(output)["iteration_seconds"]
    processor = used.ru_utime + used.ru_stime
    return {"wall": wall, "processor": processor, "bytes": used.ru_maxrss * 1024, "step": step}


def plot(results: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Plot seconds and memory against GPUs, both from zero."""
    with picture(path, 9, 3.6, columns=2) as (left, right):
        for name, points in results.items():
            counts = list(points)
            left.plot(counts, [points[each]["processor"] for each in counts], "o-", label=name)
            right.plot(counts, [points[each]["bytes"] / 2**30 for each in counts], "o-", label=name)
        for axes, title in ((left, "processor seconds"), (right, "GiB")):
            axes.set(xscale="log", xlabel="GPUs", title=title)
            axes.set_ylim(bottom=0)
            axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
            axes.grid(alpha=0.3)
        left.legend()


def scale_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plot, such as docs/scale.svg.")] = None,
) -> None:
    """Measure all points, print them, write the plot."""
    results: dict[str, dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in workloads(Path(folder)).items():
            for gpus in COUNTS:
                point = results.setdefault(name, {})[gpus] = measure(arguments, gpus)
                print(
                    f"{name:18s} {gpus:5d} GPUs: {point['wall']:6.1f} s, {point['processor']:6.1f} s of processor, "
                    f"{point['bytes'] / 2**30:5.2f} GiB; step {point['step'] * 1e3:9.1f} ms",
                    flush=True,
                )
    if output is not None:
        plot(results, output)


if __name__ == "__main__":
    sys.exit(run(program(scale_command), "lab.bench.scale"))
