"""Target of tuning or analysis: a CPU, and the machine model that predicts its times.

The machine is named by the user, was calibrated before, or is measured now.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property

from costmodel.base.errors import MachineError, ProjectError, Say
from costmodel.base.process import usable_cores
from costmodel.machines.machine_file import HOST_NAME, host_identity, host_machine, load_machine, user_directory
from costmodel.machines.machine_records import Host, Machine
from schedules.contract.cpu_target import CpuTarget, cpu_flags, host_target, required_flags


class Target:
    """A CPU to build kernels for, and the machine model that predicts their times."""

    def __init__(self, cpu: CpuTarget, describe: Callable[[], Machine]) -> None:
        """``describe`` is called on first use of the machine: measuring takes seconds, and requests that are invalid
        without it are rejected first.
        """
        self.cpu = cpu
        self._describe = describe

    @cached_property
    def machine(self) -> Machine:
        """Machine model of this CPU."""
        return self._describe()

    @cached_property
    def machine_differs(self) -> str | None:
        """Warning that the machine is not this CPU (:func:`other_cpu_warning`), or None."""
        return other_cpu_warning(self.machine)

    @cached_property
    def not_run_here(self) -> str | None:
        """Reason why code for this CPU cannot run here, or None."""
        missing = [flag for flag in required_flags(self.cpu.mcpu) if flag not in cpu_flags()]
        if not missing:
            return None
        return f"outputs cannot be checked here: this CPU lacks {', '.join(missing)}, which {self.cpu.mcpu} has"

    @cached_property
    def threads_here(self) -> int:
        """Number of threads here for code built for this CPU, which may have more cores than the local one."""
        return min(self.cpu.threads, usable_cores())


def this_cpu(machine: str | None, threads: int | None, say: Say) -> Target:
    """CPU of this process; ``machine``: name or file of the predicting machine, as in :func:`machine_for`."""
    cpu = host_target(threads)
    return Target(cpu, lambda: machine_for(machine, cpu.threads, say))


def machine_for(name_or_path: str | None, threads: int, say: Say) -> Machine:
    """Load the machine ``name_or_path``; by default this CPU, measured quickly if not calibrated yet.

    Raises ``MachineError`` for an unknown or malformed machine, a GPU, or one not described for ``threads`` threads.
    """
    machine = load_machine(name_or_path, "cpu") if name_or_path is not None else _calibrated(threads, say)
    if machine.kind != "cpu":
        raise MachineError(
            f"{machine.source}: is a {machine.kind.upper()}; kernels are fused for CPUs, name one of those"
        )
    machine.check_threads(threads)
    return machine


def other_cpu_warning(machine: Machine, here: Host | None = None) -> str | None:
    """Warning that ``machine`` is not the CPU that kernels are built for and measured on, or None."""
    own = here or host_identity()
    described = machine.host
    if described is None or (described.architecture, {*described.features}) == (own.architecture, {*own.features}):
        return None
    lacks = [feature for feature in described.features if feature not in own.features]
    adds = [feature for feature in own.features if feature not in described.features]
    differences = [f"this one lacks {', '.join(lacks)}"] * bool(lacks) + [f"it lacks {', '.join(adds)}"] * bool(adds)
    why = "; ".join(differences) or f"{described.architecture}, not {own.architecture}"
    return (
        f"{machine.name} describes another CPU ({why}): kernels are built for this CPU and measured on it; "
        "the machine named only predicts which to try first (--target builds for it)"
    )


def _calibrated(threads: int, say: Say) -> Machine:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine = host_machine(threads)
    for warning in caught:
        say(str(warning.message))
    return machine if machine is not None else _calibrate_now(threads, say)


def _calibrate_now(threads: int, say: Say) -> Machine:
    from costmodel.cpu.calibration import QUICK, calibrate
    from costmodel.machines.machine_file import usable_threads, write_machine

    say("this CPU is not calibrated yet: measuring it quickly (`python -m costmodel calibrate` measures it thoroughly)")
    machine = calibrate(max(threads, usable_threads()), QUICK)
    path = user_directory() / f"{HOST_NAME}.yaml"
    try:
        write_machine(machine, path, "Measured quickly on first use; `python -m costmodel calibrate` replaces it.")
        say(f"written to {path}")
    except (ProjectError, OSError) as error:
        say(f"the calibration is not kept: {error}")
    return machine
