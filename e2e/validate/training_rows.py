"""Published whole training steps of language models: ``whole_step/llm_training.csv`` of the data folder, read in place.

Sources of the rows: mosaicml/llm-foundry (scripts/train/benchmarking), NVIDIA/dgxc-benchmarking, pytorch/torchtitan
(docs/performance.md and benchmarks), NVIDIA-NeMo/Megatron-Bridge. Seconds are mostly batch x length / throughput.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError

TRAINING_FILE = Path("whole_step/llm_training.csv")
# What the table calls a GPU, and the machine or cluster that it is.
TRAINING_MACHINES = {
    # 1,600 Gb/s of RoCE per node, as the README of the table says.
    "a100_40gb": "oci-bm-gpu4-8",
    "a100_80gb": "dgx-a100",
    "A100-80GB": "dgx-a100",
    "h100_80gb": "dgx-h100",
    "H100": "dgx-h100",
    "DGX-H100": "dgx-h100",
    "H100-96GB HBM2e 2.4TB/s 500W (Grand Teton)": "grand-teton-h100",
}


@dataclass(frozen=True)
class TrainingRow:
    """One published step. ``place``: its line in the table, counted from 1 after the header; sizes that the table does
    not tell are 0, texts empty. ``tokens``: of the whole step, where batch and length do not say it.
    """

    place: int
    source: str
    task: str
    model: str
    gpu: str
    gpus: int
    global_batch: int
    micro_batch: int
    sequence_length: int
    tp: int
    pp: int
    cp: int
    ep: int
    virtual_stages: int
    fsdp: str
    checkpointing: str
    precision: str
    compiled: bool
    seconds: float
    memory_gib: float
    note: str

    @property
    def name(self) -> str:
        """What ``--only`` is compared with, behind the GPU."""
        sizes = f"{self.gpus}gpus-batch{self.global_batch}-seq{self.sequence_length}"
        return f"{self.source}/{self.model}/{self.task}-{self.precision}-{sizes}-row{self.place}".replace(" ", "-")

    @property
    def family(self) -> str:
        """The source without its version."""
        return self.source.split()[0]

    @property
    def release(self) -> str:
        """The version of the source, empty where it names none; versions compare as texts."""
        return self.source.partition(" ")[2]


def read_training_rows(data: Path) -> list[TrainingRow]:
    """All rows of the table below ``data``; ``InputError`` names the file where it is absent or none."""
    path = data / TRAINING_FILE
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_row(place, cells) for place, cells in enumerate(csv.DictReader(file), 1)]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); `data fetch` does not bring it, see docs/data.md"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a table of training steps ({error!r})") from None


def _row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    def number(name: str) -> int:
        told = cells[name].strip()
        return int(float(told)) if told not in ("", "n/a") else 0

    return TrainingRow(
        place=place,
        source=cells["source"],
        task=cells["task"],
        model=cells["model"],
        gpu=TRAINING_MACHINES[cells["gpu"]],
        gpus=number("n_gpus"),
        global_batch=number("global_batch"),
        micro_batch=number("micro_batch"),
        sequence_length=number("seq"),
        tp=number("tp"),
        pp=number("pp"),
        cp=number("cp"),
        ep=number("ep"),
        virtual_stages=number("vp"),
        fsdp=cells["fsdp"],
        checkpointing=cells["act_ckpt"],
        precision=cells["precision"],
        compiled=cells["compile"] in ("1", "1.0"),
        seconds=float(cells["step_s"]),
        memory_gib=float(cells["mem_gib"] or 0),
        note=cells["note"],
    )
