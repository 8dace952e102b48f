"""Published whole training steps of language models: ``llm_training.csv`` and ``llm_training_kinds.csv`` in
``whole_step`` of the data folder, and ``simumax_b200.csv`` and ``torchtitan_h100.csv`` beside this file, to which
nothing is fitted.

Sources of the former: mosaicml/llm-foundry (scripts/train/benchmarking), NVIDIA/dgxc-benchmarking, pytorch/torchtitan
(docs/performance.md and benchmarks), NVIDIA-NeMo/Megatron-Bridge; seconds are mostly batch x length / throughput. The
latter name their sources; SimuMax's steps include its own predictions.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.base.errors import InputError
from lab.data.selection import is_sealed

TRAINING_FILE = Path("whole_step/llm_training.csv")
# Kinds absent from the former; one job in four of it is sealed (:mod:`lab.data.selection`).
KINDS_FILE = Path("whole_step/llm_training_kinds.csv")
SIMUMAX_FILE, TORCHTITAN_FILE = "simumax_b200.csv", "torchtitan_h100.csv"
# Name of a GPU in the table -> machine or cluster.
TRAINING_MACHINES = {
    # 1,600 Gb/s of RoCE per node, according to the README of the table.
    "a100_40gb": "oci-bm-gpu4-8",
    "a100_80gb": "dgx-a100",
    "A100-80GB": "dgx-a100",
    "h100_80gb": "dgx-h100",
    "H100": "dgx-h100",
    "DGX-H100": "dgx-h100",
    "DGX-B200": "dgx-b200",
    "H200 SXM": "dgx-h200",
    "B200 SXM": "dgx-b200",
    "H100-96GB HBM2e 2.4TB/s 500W (Grand Teton)": "grand-teton-h100",
}


@dataclass(frozen=True)
class TrainingRow:
    """One published step. Sizes missing in the table are 0, texts empty."""

    # Line in the table, counted from 1 after the header.
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
    # Peak memory reserved by the allocator.
    memory_gib: float
    note: str
    layers: int = 0
    # Peak memory in use.
    allocated_gib: float = 0.0
    # Predictions of the source's own program.
    peer_seconds: float = 0.0
    peer_allocated_gib: float = 0.0
    # Tensor-parallel messages are overlapped with products.
    async_tp: bool = False
    # Nothing is fitted to the step.
    held_out: bool = False
    # As published, a share.
    mfu: float = 0.0
    # As published, per GPU.
    tflops: float = 0.0
    # The step was never looked at before.
    sealed: bool = False

    @property
    def name(self) -> str:
        """Name for ``--only``, after the GPU."""
        sizes = f"{self.gpus}gpus-batch{self.global_batch}-seq{self.sequence_length}"
        if self.held_out:
            degrees = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
            sizes += "".join(f"-{name}{degree}" for name, degree in degrees.items() if degree > 1)
        return f"{self.source}/{self.model}/{self.task}-{self.precision}-{sizes}-row{self.place}".replace(" ", "-")

    @property
    def family(self) -> str:
        """Source without its version."""
        return self.source.split()[0]

    @property
    def release(self) -> str:
        """Version of the source, empty if not given; versions compare as texts."""
        return self.source.partition(" ")[2]


def read_training_rows(data: Path) -> list[TrainingRow]:
    """Read all rows of the table below ``data``; ``InputError`` names the file if it is absent or malformed."""
    return [_row(place, cells) for place, cells in _table(data, TRAINING_FILE)]


def read_kinds_rows(data: Path, *, sealed: bool = False) -> list[TrainingRow]:
    """Read the unsealed rows of :data:`KINDS_FILE`, or the ``sealed`` ones; ``InputError`` as above."""
    table = KINDS_FILE.as_posix()
    return [
        replace(_row(place, cells), held_out=True, sealed=sealed)
        for place, cells in _table(data, KINDS_FILE)
        if is_sealed(table, cells) == sealed
    ]


def _table(data: Path, name: Path) -> list[tuple[int, dict[str, str]]]:
    """Lines of a table below ``data``, counted from 1 after the header."""
    path = data / name
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(enumerate(csv.DictReader(file), 1))
        for place, cells in lines:
            _row(place, cells)
        return lines
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); `data fetch` does not bring it; "
            "see docs/measurements.md for where it is from"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: not a table of training steps ({error!r}); restore it from where it came from"
        ) from None


def read_held_out_rows() -> list[TrainingRow]:
    """Rows of the files in this folder."""
    return [*read_simumax_rows(), *read_torchtitan_rows()]


def read_simumax_rows() -> list[TrainingRow]:
    """Rows of ``simumax_b200.csv``: 8 GPUs each, micro-batches of one sequence."""
    return [_simumax_row(place, cells) for place, cells in _own_table(SIMUMAX_FILE)]


def read_torchtitan_rows() -> list[TrainingRow]:
    """Rows of ``torchtitan_h100.csv``. Pipelines run as many micro-batches as they have stages of GPUs
    (``build_pipeline_schedule`` of torchtitan's pipelining_utils.py at that time), interleaved ones two parts on each
    (``generate_split_points``).
    """
    return [_torchtitan_row(place, cells) for place, cells in _own_table(TORCHTITAN_FILE)]


def _own_table(name: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Rows of a file in this folder, counted from 1; lines that begin with # give its source."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return enumerate(csv.DictReader(line for line in lines if not line.startswith("#")), 1)


def _simumax_row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    tp, pp, cp, ep = (int(cells[name]) for name in ("tp", "pp", "cp", "ep"))
    return TrainingRow(
        place=place,
        source="SimuMax 1.2",
        task="pretrain",
        model=cells["model"],
        gpu="simumax-b200",
        gpus=8,
        global_batch=int(cells["micro_batches"]) * 8 // (tp * pp * cp),
        micro_batch=1,
        sequence_length=int(cells["sequence_length"]),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        virtual_stages=0,
        fsdp="",
        checkpointing="",
        precision="bf16",
        compiled=False,
        seconds=float(cells["step_ms"]) / 1e3,
        memory_gib=float(cells["reserved_gib"]),
        note="",
        layers=int(cells["layers"]),
        allocated_gib=float(cells["allocated_gib"]),
        peer_seconds=float(cells["simumax_step_ms"]) / 1e3,
        peer_allocated_gib=float(cells["simumax_allocated_gib"]),
        held_out=True,
    )


def _torchtitan_row(place: int, cells: Mapping[str, str]) -> TrainingRow:
    fsdp, tp, pp, cp, batch, tokens = (int(cells[name]) for name in ("fsdp", "tp", "pp", "cp", "local_batch", "tokens"))
    return TrainingRow(
        place=place,
        source="torchtitan 2024-12",
        task="pretrain",
        model=cells["model"],
        gpu="grand-teton-h100",
        gpus=fsdp * tp * pp * cp,
        global_batch=batch * fsdp,
        micro_batch=batch // pp,
        sequence_length=tokens,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=0,
        virtual_stages=2 if cells["schedule"] == "interleaved" else 0,
        fsdp=str(fsdp),
        checkpointing=cells["checkpointing"],
        precision=cells["precision"],
        compiled=cells["compiled"] == "1",
        seconds=batch * tokens / (float(cells["tokens_s_gpu"]) * tp * pp * cp),
        memory_gib=float(cells["reserved_gib"]),
        note="",
        async_tp=cells["async_tp"] == "1",
        held_out=True,
    )


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
        seconds=float(cells["step_s"] or 0),
        memory_gib=float(cells["mem_gib"] or 0),
        note=cells["note"],
        mfu=_published(cells["mfu_or_tflops"], "mfu") / 100,
        tflops=_published(cells["mfu_or_tflops"], "tflops"),
    )


def _published(told: str, kind: str) -> float:
    """Number in ``mfu 41.12`` (a percentage) or ``tflops 731``; 0 for another ``kind``."""
    found, _, number = told.partition(" ")
    return float(number) if found == kind else 0.0
