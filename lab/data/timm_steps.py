"""Measured steps of image models: the benchmark results of timm (huggingface/pytorch-image-models, Apache-2.0).

One row per model: FP16 autocast, TF32 and ``cudnn.benchmark`` on, one synchronisation per step, no data loading.
Training is SGD with momentum on cross entropy, without a loss scaler. Files are named
``benchmark-<infer|train>-amp-<nchw|nhwc>-pt<version>-cu<version>-<card>[-dynamo].csv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.gpu.families.family import SHARES
from lab.data.data_folder import AGAIN, csv_rows, reading

FOLDER = Path("timm")
# Counts of the kernels of the steps that factors are fitted on (:mod:`lab.steps.image_steps`).
INVENTORY = SHARES.parent / "steps.json.gz"
_NAME = re.compile(
    r"benchmark-(?P<mode>infer|train)-amp-(?P<layout>nchw|nhwc)-pt(?P<version>\d+)-cu\d+-(?P<card>[a-z0-9]+)"
    r"(?P<compiled>-dynamo)?$"
)
_CARDS = {"rtx3090": "rtx-3090", "rtx4090": "rtx-4090", "3090": "rtx-3090", "4090": "rtx-4090"}


@dataclass(frozen=True)
class TimmStep:
    """One measured step of ``seconds``. ``side``: of the pictures in pixels; ``version``: of PyTorch, such as 112;
    ``parameters``: of the measured model, 0 if the table lacks them.
    """

    model: str
    machine: str
    training: bool
    channels_last: bool
    compiled: bool
    version: int
    batch: int
    side: int
    seconds: float
    parameters: float = 0.0

    @property
    def architecture(self) -> str:
        """Model name without that of its weights."""
        return self.model.partition(".")[0]

    @property
    def group(self) -> str:
        """Mode, layout and execution, such as ``train-nhwc`` or ``infer-nchw-compiled``."""
        mode, layout = "train" if self.training else "infer", "nhwc" if self.channels_last else "nchw"
        return f"{mode}-{layout}" + ("-compiled" if self.compiled else "")

    @property
    def name(self) -> str:
        """Card, group, PyTorch, model, batch and picture size."""
        return f"{self.machine}/{self.group}-pt{self.version}/{self.model}-{self.batch}-{self.side}"


def timm_files(data: Path) -> list[Path]:
    """Files of steps in ``data``, in order; may be empty."""
    return sorted(path for path in (data / FOLDER).glob("benchmark-*.csv") if _NAME.match(path.stem))


def read_timm(path: Path) -> Iterator[TimmStep]:
    """Yield the steps of one file, one per architecture and picture size (differently trained weights are duplicates).

    ``InputError`` names a file in another format.
    """
    matched = _NAME.match(path.stem)
    if not matched or matched["card"] not in _CARDS:
        raise InputError(f"{path}: not named as timm's results are; {AGAIN}")
    mode = matched["mode"]
    seen: set[tuple[str, int]] = set()
    for row in csv_rows(path, "results of timm"):
        with reading(path, "results of timm"):
            step = TimmStep(
                model=row["model"],
                machine=_CARDS[matched["card"]],
                training=mode == "train",
                channels_last=matched["layout"] == "nhwc",
                compiled=matched["compiled"] is not None,
                version=int(matched["version"]),
                batch=int(float(row[f"{mode}_batch_size"])),
                side=int(float(row[f"{mode}_img_size"])),
                seconds=float(row[f"{mode}_step_time"]) / 1e3,
                parameters=float(row.get("param_count") or 0.0) * 1e6,
            )
        if (step.architecture, step.side) not in seen:
            seen.add((step.architecture, step.side))
            yield step
