"""The machine that predictions are made for: named by the user, calibrated before, or measured now."""

from __future__ import annotations

import warnings

from costmodel.base.errors import MachineError, ProjectError
from costmodel.base.say import Say
from costmodel.machines.machine_catalog import HOST_NAME, host_identity, host_machine, load_machine, user_directory
from costmodel.machines.machine_records import Host, Machine


def machine_for(name_or_path: str | None, threads: int, say: Say) -> Machine:
    """The machine of ``name_or_path``; without one this CPU, measured quickly if it has no calibrated file yet.

    Raises ``MachineError`` for an unknown or malformed machine, a GPU, or one not known for ``threads`` threads.
    """
    machine = load_machine(name_or_path, "cpu") if name_or_path is not None else _calibrated(threads, say)
    if machine.kind != "cpu":
        raise MachineError(
            f"{machine.source}: is a {machine.kind.upper()}; kernels are fused for CPUs, name one of those"
        )
    machine.check_threads(threads)
    return machine


def another_cpu(machine: Machine, here: Host | None = None) -> str | None:
    """In words that ``machine`` is not the CPU kernels are built for and measured on; ``None`` if it may be."""
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
    from costmodel.cpu.calibrate import QUICK, calibrate
    from costmodel.machines.machine_catalog import usable_threads
    from costmodel.machines.machine_file import write_machine

    say("this CPU is not calibrated yet: measuring it quickly (`python -m costmodel calibrate` measures it thoroughly)")
    machine = calibrate(max(threads, usable_threads()), QUICK)
    path = user_directory() / f"{HOST_NAME}.yaml"
    try:
        write_machine(machine, path, "Measured quickly on first use; `python -m costmodel calibrate` replaces it.")
        say(f"written to {path}")
    except (ProjectError, OSError) as error:
        say(f"the calibration is not kept: {error}")
    return machine
