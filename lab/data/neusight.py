"""Reader of NeuSight's single-operator latencies (sitar-lab/NeuSight, MIT), ``neusight/op_latency/<op>/<GPU>.csv.gz``.

Torch 2.1, FP32 with TF32 off, milliseconds. The column ``N`` is the contraction: bmm is (B, M, N) x (B, N, K), linear
has N inputs and K outputs. A latency is the time between two CUDA events around an eager call, so that it holds what
the host needs before the kernel starts: never less than a floor of 25 to 90 us, by operator and GPU. For kernels longer
than the floor a part of it remains, what the host does before the launch, and is taken off: 0.5 for most (intercept of
latency over bytes of the element-wise tables: 0.38 to 0.64 of the floor), 0.7 for layer norm and 0.6 for softmax, whose
Python and autograd wrappers come before the launch (intercepts 0.7 to 1.2 and 0.4 to 0.8, rows up to 1,024 columns).
Rows below twice the floor or 0.1 ms say more about the host and do not count.

The floor of ``conv`` grows with the row: convolutions of a few microseconds take 60 to 150 us in the first rows and 350
to 900 us in the last, on every GPU (the table is in order of measurement, sizes in random order). It is taken from the
fastest rows of each stretch, a straight line through them, and 0.9 of it off: at that share what trees leave of rows
above 1 ms no longer correlates with the row.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax
from costmodel.operators.layers import Conv2d
from lab.data.data_folder import AGAIN, BROUGHT
from lab.data.kernel_table import KernelTable
from lab.data.selection import Wanted, everything

MACHINES = {
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
}
MINIMUM_SECONDS = 1e-4
_FLOOR_QUANTILE, _FLOOR_SHARE, _FLOORS_COUNTED = 0.005, 0.5, 2.0
_FLOOR_SHARES = {"ln": 0.7, "softmax": 0.6, "conv": 0.9}
_DRIFTING = ("conv",)
_STRETCH_ROWS, _STRETCH_QUANTILE, _SWEEPS = 100, 0.03, 30

NeusightRow = Mapping[str, str]


def _elementwise(kind: str, inputs: int) -> Callable[[NeusightRow], Any]:
    return lambda row: Elementwise(kind, int(row["B"]) * int(row["H"]), inputs=inputs)


def _conv(row: NeusightRow) -> Conv2d:
    size, padding = int(row["Input_Size"]), int(row["Padding"])
    kernel, stride = int(row["Kernel_Szie"]), int(row["Stride"])  # sic: the column is misspelt
    channels = int(row["Input_Channel"]), int(row["Output_Channel"])
    paddings = (padding, padding, padding, padding)
    return Conv2d(
        int(row["B"]), channels[0], size, size, channels[1], (kernel, kernel), (stride, stride), padding=paddings
    )


OPERATORS: dict[str, Callable[[NeusightRow], Any]] = {
    "bmm": lambda row: Gemm(int(row["B"]), int(row["M"]), int(row["K"]), int(row["N"])),
    "linear": lambda row: Gemm(
        1, int(row["B"]) * int(row["M"]), int(row["K"]), int(row["N"]), transpose_b=True, bias=True
    ),
    "conv": _conv,
    "add": _elementwise("add", 2),
    "mul": _elementwise("mul", 2),
    "div": _elementwise("div", 2),
    "gelu": _elementwise("gelu", 1),
    "relu": _elementwise("relu", 1),
    "tanh": _elementwise("tanh", 1),
    "ln": lambda row: Normalization("layer_norm", int(row["B"]), int(row["H"])),
    "softmax": lambda row: Softmax(int(row["B"]), int(row["H"])),
}


def latency_files(data: Path) -> list[Path]:
    """Tables of known operators and GPUs under ``data/neusight/op_latency``."""
    directory = data / "neusight" / "op_latency"
    files = [path for name in OPERATORS for path in sorted((directory / name).glob("*.csv.gz"))]
    return [path for path in files if path.name.removesuffix(".csv.gz") in MACHINES]


def read_neusight(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """Read the wanted ones of :func:`latency_files`; :class:`InputError` if there are none or one is malformed."""
    files = [path for path in latency_files(data) if wanted(path)]
    if not files:
        raise InputError(f"{data / 'neusight' / 'op_latency'}: no tables (<operator>/<GPU>.csv.gz); {BROUGHT}")
    for path in files:
        yield read_table(path)


def read_table(path: Path) -> KernelTable:
    """Read the table of one file; its folder names the operator, its name the GPU."""
    name, machine = path.parent.name, MACHINES[path.name.removesuffix(".csv.gz")]
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        operators = tuple(OPERATORS[name](row) for row in rows)
        latency = np.array([float(row["Latency"]) for row in rows]) * 1e-3
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {AGAIN}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a table of operator latencies ({error!r}); {AGAIN}") from None
    if not len(latency) or not (latency > 0).all():
        raise InputError(f"{path}: no rows, or times that are not above zero; {AGAIN}")
    steady = np.full(len(latency), np.quantile(latency, _FLOOR_QUANTILE))
    floor = _drifting_floor(latency) if name in _DRIFTING else steady
    counted = latency >= np.maximum(MINIMUM_SECONDS, _FLOORS_COUNTED * floor)
    kernel = np.where(counted, latency - _FLOOR_SHARES.get(name, _FLOOR_SHARE) * floor, latency)
    return KernelTable(name, machine, operators, kernel, counted, str(path))


def _drifting_floor(latency: np.ndarray) -> np.ndarray:
    """Line of least absolute deviation through the fastest rows of each stretch of the table, per row (rows,)."""
    starts = range(0, max(len(latency) - _STRETCH_ROWS, 1), _STRETCH_ROWS)
    centres = np.array([start + _STRETCH_ROWS / 2 for start in starts])
    fastest = np.array([np.quantile(latency[start : start + _STRETCH_ROWS], _STRETCH_QUANTILE) for start in starts])
    if len(centres) < 2:
        return np.full(len(latency), fastest[0])
    design, weights = np.column_stack([np.ones(len(centres)), centres]), np.ones(len(centres))
    line: np.ndarray = np.zeros(2)
    for _ in range(_SWEEPS):
        line = np.linalg.lstsq(design * weights[:, None], fastest * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(fastest - design @ line), 1e-6))
    return np.asarray(np.maximum(line[0] + line[1] * np.arange(len(latency)), fastest.min()))
