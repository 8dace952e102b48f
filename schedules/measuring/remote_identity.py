"""Identity and capabilities of the CPU of a server of TVM's RPC, read and measured there."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

from costmodel.base.cores import core_quota
from costmodel.base.errors import MachineError
from costmodel.base.say import Say
from costmodel.cpu.caches import Cache, find_caches, parse_cpu_list
from costmodel.cpu.calibrate import QUICK, CpuFacts, calibrate_with, model_name
from costmodel.cpu.microbenchmark import Microbenchmarks, build_program, described
from costmodel.machines.machine_catalog import features_of
from costmodel.machines.machine_records import Host, Machine
from schedules.contract.cpu_target import TILE_FLAG, CpuTarget, flags_of, target_with, without_tiles
from schedules.measuring.remote_server import RemoteServer

_CACHES = 8  # upper bound of the number of cache indices of a CPU
_CACHE_FILES = ("type", "level", "size", "shared_cpu_list")
_QUOTAS = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")


def remote_facts(server: RemoteServer) -> tuple[CpuFacts, frozenset[str]]:
    """CPU description from the server's operating system, and all CPU flags, without AMX if the system refuses it.

    Raises ``MachineError`` if it is not x86-64.
    """
    cpuinfo = server.read("/proc/cpuinfo")
    flags = flags_of(cpuinfo)
    if "lm" not in flags:  # "long mode"
        raise MachineError(
            "kernels are generated for x86-64 CPUs: a server of the tracker has another one; give it a key of its own"
        )
    if TILE_FLAG in flags and not server.may_use_tiles():
        flags = without_tiles(flags)
    with tempfile.TemporaryDirectory(prefix="remote-") as directory:
        root = Path(directory)
        caches = _caches(server, root)
        threads = _cores(server, root)
    available = re.search(r"^MemAvailable:\s+(\d+) kB", server.read("/proc/meminfo"), re.MULTILINE)
    host = Host("x86_64", features_of(cpuinfo), threads)
    memory = None if available is None else 1024 * int(available.group(1))
    return CpuFacts(model_name(cpuinfo) or "CPU of a server", host, caches, memory), flags


def remote_target(facts: CpuFacts, flags: frozenset[str], threads: int | None) -> CpuTarget:
    """Target description of the server's CPU."""
    sizes = {cache.level: cache.capacity_bytes for cache in facts.caches}
    return target_with(flags, threads or facts.host.threads, sizes.get(1, 32 * 1024), sizes.get(2, 1024 * 1024))


def calibrate_remote(server: RemoteServer, facts: CpuFacts, cpu: CpuTarget, say: Say) -> Machine:
    """Machine model of the server, measured quickly with the microbenchmarks of ``python -m costmodel calibrate``.

    They are compiled here for its CPU.
    """
    with tempfile.TemporaryDirectory(prefix="remote-") as directory:
        say("compiling the microbenchmarks")
        machine_flags = ((f"-march={cpu.mcpu}", "-static"), (f"-march={cpu.mcpu}",), ())
        program, compiler = build_program(Path(directory), machine_flags)
        server.session.upload(str(program), program.name)
    command = f"./{program.name}"
    server.run(f"chmod +x {command}")
    here = described(Path(command), compiler, server.run(f"{command} list"))
    fields = {name: getattr(here, name) for name in Microbenchmarks.__dataclass_fields__}
    return calibrate_with(_RemoteMicrobenchmarks(server, fields), cpu.threads, QUICK, say, facts)


class _RemoteMicrobenchmarks(Microbenchmarks):
    """The microbenchmark program on a server."""

    def __init__(self, server: RemoteServer, fields: dict[str, object]) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        object.__setattr__(self, "_server", server)

    def printed(self, *arguments: str) -> str:
        return self._server.run(" ".join(["timeout", "60", f"./{self.program}", *arguments]))  # type: ignore[attr-defined]


def _caches(server: RemoteServer, root: Path) -> list[Cache]:
    """Caches of the server's first CPU, from a local copy of its system files."""
    for index in range(_CACHES):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        if not server.read(f"{folder}/type"):
            break
        for name in _CACHE_FILES:
            _mirror(server, root, f"{folder}/{name}")
    _mirror(server, root, "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    # Never those of this machine: the files must have been found on the server.
    caches = find_caches(root / "sys/devices/system/cpu") if (root / "sys").is_dir() else ()
    return [replace(cache, origin=cache.origin.replace(str(root), "")) for cache in caches]


def _cores(server: RemoteServer, root: Path) -> int:
    """Number of usable cores, counted as by :func:`costmodel.base.cores.usable_cores` for this process."""
    allowed = re.search(r"^Cpus_allowed_list:\s*(.*)$", server.read("/proc/self/status"), re.MULTILINE)
    cores = 1 if allowed is None else len(parse_cpu_list(allowed.group(1)))
    groups = _mirror(server, root, "/proc/self/cgroup")
    inner = {PurePosixPath("/")} | {PurePosixPath(line.split(":", 2)[-1]) for line in groups.splitlines() if line}
    for path in {each for group in inner for each in (group, *group.parents)}:
        for mount in ("", "/cpu", "/unified", "/cpu,cpuacct"):
            for name in _QUOTAS:
                _mirror(server, root, f"/sys/fs/cgroup{mount}{path}/{name}".replace("//", "/"))
    quota = core_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _mirror(server: RemoteServer, root: Path, path: str) -> str:
    """Read a file on the server and copy it below ``root``; empty if there is none."""
    text = server.read(path)
    if text:
        copy = root / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    return text
