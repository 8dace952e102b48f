"""Python API of ``costmodel``: cost of operators on a machine. Errors are :class:`costmodel.ProjectError`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_file import load_machine, machine_files
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator

MachineLike = str | os.PathLike[str] | Machine


@overload
def estimate(operators: AnyOperator, machine: MachineLike = "h100-sxm", *, threads: int | None = None) -> Estimate: ...
@overload
def estimate(
    operators: Sequence[AnyOperator], machine: MachineLike = "h100-sxm", *, threads: int | None = None
) -> list[Estimate]: ...
def estimate(
    operators: AnyOperator | Sequence[AnyOperator],
    machine: MachineLike = "h100-sxm",
    *,
    threads: int | None = None,
) -> Estimate | list[Estimate]:
    """The time of one operator, or of each of several, in seconds with interval, bound, breakdown and source.

    ``operators``: records of :mod:`costmodel.operators.layers` (``Conv2d``, ``Pool2d``; only for CPUs ``Dense``,
    ``FusedConvs``), only for GPUs of :mod:`costmodel.operators.device_work` (``Gemm``, ``Attention``, ``Elementwise``
    ...) and :mod:`costmodel.operators.lookups`. Each runs by itself, back to back.
    ``machine``: a name of :func:`machine_names`, a file, or a record. A CPU's come from the roofline, on ``threads``
    threads (default: as many as the machine was measured with); a GPU's from the fitted models of kernels.

    Raises ``MachineError`` for an unknown machine, number of threads or dtype, ``UnsupportedOperatorError`` for an
    operator that the machine's model does not know, ``InputError`` for ``threads`` of a GPU.

    >>> from costmodel.operators.device_work import Gemm
    >>> one = estimate(Gemm(1, m=4096, n=4096, k=4096, dtype="bfloat16"), machine="h100-sxm")
    >>> one.bound, one.lower <= one.seconds <= one.upper
    ('compute', True)
    """
    model = _model(machine if isinstance(machine, Machine) else load_machine(_name(machine)), threads)
    if isinstance(operators, Sequence):
        return model.estimate(operators)
    return model.estimate([operators])[0]


def machine_names() -> tuple[str, ...]:
    """Names of all machines that :func:`estimate` and :func:`load_machine` know, the user's own included.

    >>> "h100-sxm" in machine_names()
    True
    """
    return tuple(sorted(machine_files()))


def _name(machine: str | os.PathLike[str]) -> str | Path:
    """Return a name unchanged, and a path as :class:`Path` even if it has no folder part."""
    return machine if isinstance(machine, str) else Path(machine)


def _model(machine: Machine, threads: int | None) -> CostModel:
    if machine.kind == "cpu":
        from costmodel.cpu.roofline import RooflineModel

        return RooflineModel(machine, machine.max_threads if threads is None else threads)
    if threads is not None:
        raise InputError(f"threads {threads}: {machine.name} is a GPU; leave it out")
    from costmodel.gpu.factory import gpu_cost_model

    return gpu_cost_model(machine)
