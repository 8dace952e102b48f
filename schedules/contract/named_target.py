"""Target CPUs other than this one, by LLVM name or machine file."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from costmodel.base.errors import InputError, MachineError
from costmodel.base.units import whole_number
from costmodel.machines.machine_records import Machine
from schedules.contract.cpu_target import CpuTarget, target_with
from schedules.contract.llvm_features import flags_of_mcpu

# Default cache sizes without a machine file: the smallest of current x86-64 CPUs.
_L1_BYTES, _L2_BYTES = 32 * 1024, 512 * 1024


def parse_target(text: str, threads: int | None, machine: Machine, recorded: Sequence[CpuTarget]) -> CpuTarget:
    """Parse a target such as ``llvm -mcpu=znver4 -num-cores 8``; ``threads`` override ``-num-cores``.

    Caches are taken from a CPU with records (``recorded``) of the same name and threads, otherwise from ``machine``.
    Raises ``InputError`` for other options.
    """
    options = _options(text)
    mcpu = options["mcpu"]
    count = threads if threads is not None else _count(text, options.get("num-cores"))
    flags = flags_of_mcpu(mcpu)
    like = [cpu for cpu in recorded if cpu.mcpu == mcpu and cpu.threads == count]
    if len(like) == 1:
        return like[0]
    return target_with(flags, count, *_caches(machine), mcpu)


def machine_target(machine: Machine, threads: int | None) -> CpuTarget:
    """CPU described by a machine file; raises ``MachineError`` if its features are missing."""
    host = machine.host
    if host is None:
        raise MachineError(f"{machine.source}: has no `host`, so that kernels cannot be built for it; add its features")
    if host.architecture not in ("x86_64", "AMD64"):
        raise MachineError(
            f"{machine.source}: is {host.architecture}; kernels are generated for x86-64 CPUs; "
            "name a machine that has one"
        )
    return target_with(_with_unlisted(host.features), threads or host.threads, *_caches(machine))


def _with_unlisted(features: Collection[str]) -> frozenset[str]:
    """Add features that machine files do not list: bit manipulation, introduced with AVX2."""
    return frozenset(features) | (frozenset(("bmi1", "bmi2")) if "avx2" in features else frozenset())


def _caches(machine: Machine) -> tuple[int, int]:
    sizes = {level.name: int(level.capacity_bytes) for level in machine.memory}
    return sizes.get("L1", _L1_BYTES), sizes.get("L2", _L2_BYTES)


def _options(text: str) -> dict[str, str]:
    wanted = f'--target {text}: expected "llvm -mcpu=NAME -num-cores N" or the name of a machine file'
    try:
        words = shlex.split(text.replace("=", " "))
    except ValueError:  # unterminated quotation
        raise InputError(wanted) from None
    if len(words) % 2 == 0 or words[0] != "llvm":
        raise InputError(wanted)
    options = {name.lstrip("-"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    if "mcpu" not in options or options.keys() - {"mcpu", "num-cores"}:
        raise InputError(wanted)
    return options


def _count(text: str, value: str | None) -> int:
    cores = whole_number(value or "")
    if not cores:
        raise InputError(f"--target {text}: say for how many cores, such as -num-cores 8")
    return cores
