"""``python -m fusion run``: run a compiled model on the arrays of a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.whole_file import check_outputs
from fusion.artifact.tuned_model import load
from fusion.model.named_arrays import read_npz, write_npz
from fusion.model.tensor_info import TensorInfo


@dataclass(frozen=True)
class RunResult:
    """Result of ``run``; ``seconds``: the first call without loading (``compare`` measures latency)."""

    output: str
    outputs: tuple[TensorInfo, ...]
    seconds: float
    threads: int


def run_command(build_dir: Path, input_npz: Path, output_npz: Path, threads: int | None = None) -> RunResult:
    """Run the model of ``build_dir`` on the named arrays of ``input_npz`` and write its named outputs.

    ``threads`` defaults to the number it was tuned for, limited by the available cores. Raises ``InputError`` or
    ``OutputError``.
    """
    check_outputs({"--output": output_npz}, {"--input": input_npz})
    model, arrays = load(build_dir, threads), read_npz(input_npz)
    started = time.perf_counter()
    outputs = model.run(arrays, source=str(input_npz))
    seconds = time.perf_counter() - started
    write_npz(output_npz, outputs)
    described = tuple(TensorInfo(name, array.shape, str(array.dtype)) for name, array in outputs.items())
    return RunResult(str(output_npz), described, seconds, model.threads)


def render_run(result: RunResult) -> str:
    """Format the outputs as text, one per line."""
    lines = [f"{info.name}: {info.dtype}{list(info.shape)}" for info in result.outputs]
    return "\n".join([*lines, f"written to {result.output}"])
