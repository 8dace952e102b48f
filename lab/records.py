"""``python -m lab.records``: the kernel measurements shipped with the project, and the ranking trained on them.

measure NETWORK... measure more configurations of every kernel of builds or ONNX files, into their folders, for training
collect BUILD...   folders of `tune` on this CPU -> records.jsonl.gz, and machine.yaml beside it
train              records.jsonl.gz -> ranking.json.gz; or, without some networks, both in another folder

A tuner measures what it expects to be fast, which yields few and similar configurations per kernel; a ranking trained
on those cannot recognise slow ones. In ``measure`` every kernel gets the same number, half of them in the order of the
template's analytic cost and half drawn from the rest of its space. Kernels alternate, so that an interrupted run has a
similar number for each.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError
from costmodel.base.input_files import decoded, read_text
from costmodel.base.output_files import write_whole
from costmodel.base.process import threads_to_use, usable_cores
from costmodel.cost_model import Config, ConfigKey, config_key
from costmodel.machines.machine_file import read_machine, write_machine
from costmodel.operators.any_operator import to_record
from costmodel.operators.layers import Operator
from fusion.analysis.target_machine import machine_for, this_cpu
from fusion.tuning.clock import TuningDisplay
from fusion.tuning.network import TuneRequest, plausible_sites, read_networks
from lab.command_line import run
from schedules.contract.cpu_target import CpuTarget, host_target
from schedules.contract.template import template_revision
from schedules.kernels.template_table import template_for
from schedules.measuring.measure_runner import Runner
from schedules.tuning.kernel_ranking import train_ranking, write_ranking
from schedules.tuning.kernel_tuner import MeasuringRunner
from schedules.tuning.shipped_records import (
    MACHINE_FILE,
    RECORDS_FILE,
    CpuRecords,
    FoundRecords,
    KernelRecords,
    find_records,
    identity_of,
    read_records,
    records_directory,
    write_records,
)
from schedules.tuning.tuning_records import RECORDS, Record, RecordStore, environment, parse_line, read_lines

app = typer.Typer(
    help="Kernel measurements that are shipped, and the ranking learned from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="Folder of all CPUs' records; default: that of the package, or $FUSION_RECORDS."),
]


@app.command()
@guarded("stopped: what was measured is kept, the same command goes on")
def measure(
    networks: Annotated[
        list[Path], typer.Argument(help="Folders that `tune` wrote, or ONNX files.", metavar="NETWORK...")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the records of ONNX files, one in it for each.")
    ] = None,
    configurations: Annotated[int, typer.Option(min=2, help="Configurations of each kernel.")] = 20,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time limit; default: none.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of threads; default: all cores.")] = None,
) -> None:
    """Measure configurations of every kernel, half of them expected to be fast, for `collect` and `train`."""
    until = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    state = measure_records(networks, output, configurations, until, threads)
    typer.echo(f"{state.measured} of {state.wanted} configurations are measured, {state.failures} failed now")


@app.command()
@guarded("stopped: nothing is written")
def collect(
    builds: Annotated[list[Path], typer.Argument(help="Folders that `tune` wrote.", metavar="BUILD...")],
    directory: Directory = None,
    note: Annotated[str, typer.Option(help="Origin of the measurements, in words.")] = "",
    leave_out: Annotated[list[str] | None, typer.Option(help="Network to leave out; repeatable.")] = None,
    rows: Annotated[int, typer.Option(min=8, help="Configurations kept of each kernel.")] = 200,
    machine: Annotated[str | None, typer.Option(help="Machine file or name; default: this one.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Keep what the file holds, and add to it.")] = False,
) -> None:
    """Take the records of this CPU from build folders into the file that is shipped."""
    path, found = collect_records(builds, directory, note, leave_out or (), rows, machine, add)
    kernels, networks = found.content.kernels, ", ".join(found.content.networks)
    records = sum(len(kernel.records) for kernel in kernels)
    typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    typer.echo(f"{records} configurations of {len(kernels)} kernels of {networks}")
    for reason, count in found.left_out.items():
        typer.echo(f"left out: {count} records {reason}")


@app.command()
@guarded("stopped: nothing is written")
def train(
    directory: Directory = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Network whose kernels are not learned from; repeatable. Needs --output.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Another folder for the records that are left and their ranking ($FUSION_RECORDS)."),
    ] = None,
) -> None:
    """Learn the ranking of configurations from the records of this CPU."""
    path, families = train_records(directory, leave_out or (), output)
    typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB, families: {', '.join(families)}")


def measure_records(
    networks: Sequence[Path], output: Path | None, configurations: int, end: float, threads: int | None = None
) -> SamplingProgress:
    """Measure ``configurations`` of every kernel of ``networks`` on this CPU until ``end`` (``time.monotonic``).

    A kernel shared by several networks is measured once for all. Raises ``InputError`` for a network without kernels.
    """
    threads_to_use(threads, 1)
    cpu = host_target(threads)
    with ExitStack() as stack:
        kernels: list[tuple[RecordStore, list[Operator]]] = []
        for network in networks:
            is_model = network.suffix == ".onnx"
            if is_model and output is None:
                raise InputError(f"{network}: name a folder for its records with --output")
            folder = output / network.stem / "records" if is_model and output else records_folder(network)
            store = stack.enter_context(RecordStore(folder, cpu))
            operators = kernels_of(network, folder, threads) if is_model else store.operators()
            if not operators:
                raise InputError(f"{network}: no kernels of this CPU on {cpu.threads} threads; tune it here first")
            kernels.append((store, operators))
        for store, _ in kernels:
            store.claim()
        sampled = sampled_kernels(kernels, cpu, configurations)
        runner = stack.enter_context(Runner(cpu))
        return measure_samples(sampled, runner, end, SamplingLine(len(sampled)))


# Configurations of a kernel per turn: machines drift between turns, and verification data are created for each turn.
TURN = 8


@dataclass(frozen=True)
class SamplingProgress:
    """``measured`` of ``wanted`` configurations including earlier runs; ``kernels``: number of complete kernels."""

    measured: int
    wanted: int
    kernels: int
    failures: int


@dataclass
class SampledKernel:
    """A kernel with its pending configurations, and the stores of the networks that contain it.

    ``done``: configurations of its sample that are measured or have failed.
    """

    operator: Operator
    pending: list[Config]
    stores: tuple[RecordStore, ...]
    done: int


def sample(operator: Operator, space: Sequence[Config], count: int) -> list[Config]:
    """At most ``count`` of ``space``, alternating between the next in order and a random one; deterministic."""
    fast = list(space[: -(-count // 2)])
    others = list(space[len(fast) :])
    drawn = random.Random(_name(operator)).sample(others, min(count - len(fast), len(others))) if others else []
    mixed = [config for pair in zip(fast, drawn, strict=False) for config in pair]
    return [*mixed, *fast[len(drawn) :]]


def sampled_kernels(
    stores: Iterable[tuple[RecordStore, Iterable[Operator]]], cpu: CpuTarget, count: int
) -> list[SampledKernel]:
    """Distinct kernels of the networks, with ``count`` configurations each or the whole space.

    ``stores``: the records of each network, and its kernels. Kernels without a template are left out.
    """
    found: dict[Operator, list[RecordStore]] = {}
    for store, operators in stores:
        for operator in dict.fromkeys(operators):
            if template_for(operator, cpu) is not None:
                found.setdefault(operator, []).append(store)
    kernels = [_sampled(operator, tuple(own), cpu, count) for operator, own in found.items()]
    # Shuffle, so that limited time is spread over kernels of all networks and kinds.
    random.Random(0).shuffle(kernels)
    return kernels


def _sampled(operator: Operator, stores: tuple[RecordStore, ...], cpu: CpuTarget, count: int) -> SampledKernel:
    template = template_for(operator, cpu)
    assert template is not None, "only kernels of a template are measured"
    wanted = sample(operator, template.space(operator, cpu), count)
    known = {config_key(record.config) for store in stores for record in store.all(operator)}
    known |= {config_key(failure.config) for store in stores for failure in store.failures(operator)}
    pending = [config for config in wanted if config_key(config) not in known]
    return SampledKernel(operator, pending, stores, len(wanted) - len(pending))


def measure_samples(
    kernels: Sequence[SampledKernel],
    runner: MeasuringRunner,
    end: float = math.inf,
    progress: Callable[[SamplingProgress], None] = lambda _: None,
) -> SamplingProgress:
    """Measure pending configurations until ``end`` (``time.monotonic``), kernels with the fewest results first.

    Every result is on disk at once. Kernels are compiled on all cores and timed alone.
    """
    failures = 0

    def state() -> SamplingProgress:
        done = sum(kernel.done for kernel in kernels)
        left = sum(len(kernel.pending) for kernel in kernels)
        return SamplingProgress(done, done + left, sum(not kernel.pending for kernel in kernels), failures)

    while (unfinished := [kernel for kernel in kernels if kernel.pending]) and time.monotonic() < end:
        kernel = min(unfinished, key=lambda each: each.done)
        batch, kernel.pending = kernel.pending[:TURN], kernel.pending[TURN:]
        waiting = {config_key(config): config for config in batch}
        best = [record.seconds for store in kernel.stores if (record := store.best(kernel.operator)) is not None]
        for config, outcome in runner.measure_batch(kernel.operator, batch, min(best, default=None)):
            for store in kernel.stores:
                if outcome.seconds is None:
                    store.add_failure(kernel.operator, config, outcome.error or "run", outcome.message)
                else:
                    store.add(kernel.operator, config, outcome.seconds)
            failures += outcome.seconds is None
            kernel.done += 1
            del waiting[config_key(config)]
            if time.monotonic() >= end:
                break
        kernel.pending = [*waiting.values(), *kernel.pending]
        progress(state())
    return state()


def _name(operator: Operator) -> str:
    return json.dumps(to_record(operator), sort_keys=True)


def kernels_of(model: Path, folder: Path, threads: int | None) -> list[Operator]:
    """Kernels that `tune` would measure for an ONNX file: those of its layers, and of plausible sites."""
    display = TuningDisplay()
    request = TuneRequest(model, folder.parent, threads=threads, minutes=1.0)
    (network,) = read_networks(request, this_cpu(None, threads, display.say), display)
    return [*(node.operator for node in network.graph.nodes), *(site.operator for site in plausible_sites(network))]


class SamplingLine:
    """Prints the progress of measurements on standard error, at most every ``SECONDS``."""

    SECONDS = 10.0

    def __init__(self, kernels: int) -> None:
        self._kernels = kernels
        self._said = 0.0

    def __call__(self, state: SamplingProgress) -> None:
        if time.monotonic() - self._said >= self.SECONDS:
            self._said = time.monotonic()
            kernels = f"{state.kernels} of {self._kernels} kernels are done"
            typer.echo(f"{state.measured} of {state.wanted} configurations, {kernels}", err=True)


def collect_records(
    builds: Sequence[Path],
    directory: Path | None,
    note: str,
    leave_out: Sequence[str],
    rows: int,
    machine_name: str | None = None,
    add: bool = False,
) -> tuple[Path, Collected]:
    """Write the records of this CPU in ``builds``, and the machine file of the predictions, into ``directory``; return
    the file and its content.

    ``add``: merge with the existing records, whose ``note`` is kept by default; raises ``InputError`` if there are
    none.
    """
    for name in leave_out:
        if not re.fullmatch(r"[\w.-]+", name):
            raise InputError(f"--leave-out {name}: expected the name of a network, the stem of its ONNX file")
    cpu = host_target()
    found = collect_builds(builds, cpu, note, lambda network: network not in leave_out, rows)
    content = found.content
    machine = machine_for(machine_name, usable_cores(), lambda line: typer.echo(line, err=True))
    folder = (directory or records_directory()) / folder_name(content.cpu.chip, content.cpu.mcpu)
    path = folder / RECORDS_FILE
    if add:
        before = read_records(path)
        if (before.tvm, before.templates) != (content.tvm, content.templates):
            raise InputError(f"{path}: made by another version of TVM or of the templates; collect without --add")
        kernels = merged([*before.kernels, *content.kernels], rows)
        content = replace(content, kernels=kernels, note=note or before.note)
    write_records(path, content)
    write_machine(machine, folder / MACHINE_FILE, "The CPU of the records beside this file.")
    return path, replace(found, content=content)


def thinned(records: Sequence[Record], limit: int) -> list[Record]:
    """At most ``limit`` records: all winners of comparisons, the fastest half, and an even selection of the others."""
    ordered = sorted(records, key=lambda each: (not each.confirmed, each.seconds, config_key(each.config)))
    if len(ordered) <= limit:
        return ordered
    head = max(limit // 2, sum(record.confirmed for record in ordered))
    rest, places = ordered[head:], max(0, limit - head)
    return ordered[:head] + [rest[index * len(rest) // places] for index in range(places)]


def merged(kernels: Iterable[KernelRecords], limit: int) -> tuple[KernelRecords, ...]:
    """Merge equal (operator, threads), with at most ``limit`` configurations each.

    For a configuration measured several times, a winner of a comparison is preferred, then the smallest time.
    """
    together: dict[tuple[Operator, int], list[KernelRecords]] = {}
    for kernel in kernels:
        together.setdefault((kernel.operator, kernel.threads), []).append(kernel)
    found = []
    for (operator, threads), group in together.items():
        records: dict[Any, Record] = {}
        for record in (record for kernel in group for record in kernel.records):
            known = records.setdefault(config_key(record.config), record)
            if (not record.confirmed, record.seconds) < (not known.confirmed, known.seconds):
                records[config_key(record.config)] = record
        networks = tuple(sorted({network for kernel in group for network in kernel.networks}))
        measured = max(kernel.measured for kernel in group)
        found.append(KernelRecords(operator, threads, networks, measured, tuple(thinned([*records.values()], limit))))
    return tuple(found)


# Configurations kept per kernel: more add little information, and the file is part of the package.
ROWS_PER_KERNEL = 200


@dataclass(frozen=True)
class Collected:
    """Records to ship; ``left_out``: reason -> number of records not included."""

    content: CpuRecords
    left_out: Counter[str] = field(default_factory=Counter)


def collect_builds(
    folders: Sequence[Path],
    cpu: CpuTarget,
    note: str = "",
    keep: Callable[[str], bool] = lambda network: True,
    rows: int = ROWS_PER_KERNEL,
) -> Collected:
    """Collect the records of ``cpu``, on any number of threads, in build folders of ``tune`` (or folders of records).

    ``keep``: selects networks by name. Records of another CPU, TVM or revision of the templates are left out and
    counted. Raises ``InputError`` for a folder without records, or if nothing is left.
    """
    own = environment(cpu)
    identity = identity_of(cpu)
    left_out: Counter[str] = Counter()
    kernels: list[KernelRecords] = []
    for folder in folders:
        path = records_folder(folder) / RECORDS
        network = network_name(folder)
        if not keep(network):
            left_out[f"of {network}"] += sum(1 for _ in read_lines(path, parse_line))
            continue
        measured = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
        last: dict[tuple[Operator, int], dict[ConfigKey, Record]] = {}
        for record, made in _ours(path, left_out):
            here = {**own, "templates": template_revision(record.operator.dtype)}
            reason = _reason(made, here, lambda threads: identity.target(threads).key)
            if reason is not None:
                left_out[reason] += 1
                continue
            known = last.setdefault((record.operator, _threads(made["cpu"])), {})
            known[config_key(record.config)] = record
        kernels += [
            KernelRecords(operator, threads, (network,), measured, tuple(records.values()))
            for (operator, threads), records in last.items()
        ]
    if not kernels:
        raise InputError(
            f"{', '.join(map(str, folders))}: no records of this CPU and this version of the templates; "
            "`python -m fusion tune` here makes some"
        )
    return Collected(CpuRecords(identity, own["tvm"], own["templates"], note, merged(kernels, rows)), left_out)


def network_name(folder: Path) -> str:
    """Stem of the ONNX file in the folder's summary; without a summary the name of the folder."""
    try:
        return Path(decoded(read_text(folder / "summary.json", "record"))["model"]).stem
    except (OSError, ValueError, KeyError, TypeError):
        return folder.resolve().name


def records_folder(folder: Path) -> Path:
    """Records folder of a build folder, or the folder itself if it has records; raises ``InputError`` without any."""
    for path in (folder / "records", folder):
        if (path / RECORDS).is_file():
            return path
    raise InputError(f"{folder}: holds no tuning records; name folders that `python -m fusion tune` wrote")


def _ours(path: Path, left_out: Counter[str]) -> Iterator[tuple[Record, dict[str, str]]]:
    for entry in read_lines(path, parse_line):
        if entry is None:
            left_out["not of this project"] += 1
        else:
            yield entry


def _reason(made: dict[str, str], own: dict[str, str], key: Callable[[int], str]) -> str | None:
    """Reason why records of the environment ``made`` are not valid here, or None."""
    if made["templates"] != own["templates"]:
        return f"of revision {made['templates']} of the templates, not {own['templates']}"
    if made["tvm"] != own["tvm"]:
        return f"of TVM {made['tvm']}, not {own['tvm']}"
    return None if made["cpu"] == key(_threads(made["cpu"])) else "of another CPU"


def _threads(key: str) -> int:
    return int(key.rpartition("threads=")[2])


def train_records(directory: Path | None, leave_out: Sequence[str], output: Path | None) -> tuple[Path, list[str]]:
    """Train the ranking on the records of this CPU; return its file and its kernel families.

    It is written beside the records. With ``leave_out``, the records without these networks and their ranking are
    written into ``output``. Raises ``InputError`` for a network without records.
    """
    found = records_here(directory)
    content, folder = found.content, found.directory
    if leave_out and output is None:
        raise InputError(f"--leave-out {leave_out[0]}: name a folder for the records that are left with --output")
    for network in leave_out:
        if network not in found.content.networks:
            raise InputError(f"--leave-out {network}: there are records of {', '.join(found.content.networks)}")
        content = content.without(network)
    if not content.kernels:
        raise InputError(f"--leave-out {', '.join(leave_out)}: no records are left to learn from; leave fewer out")
    machine_file = found.directory / MACHINE_FILE
    machine = read_machine(machine_file)
    if output is not None:
        folder = output / found.directory.name
        write_records(folder / RECORDS_FILE, content)
        write_whole(folder / MACHINE_FILE, machine_file.read_bytes())
    trees = train_ranking(content, machine)
    return write_ranking(folder, content, trees), list(trees)


def records_here(directory: Path | None) -> FoundRecords:
    """Records of this CPU; raises ``InputError`` without any."""
    place = directory or records_directory()
    found = find_records(host_target(), place)
    if found is None:
        raise InputError(
            f"{place}: no records of this CPU, this TVM and these templates; "
            "`python -m fusion records collect` makes them"
        )
    return found


def folder_name(chip: str, mcpu: str) -> str:
    """Folder name of one CPU's records, e.g. ``authenticamd-25-17-1-cooperlake``."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{chip} {mcpu}".lower()).strip("-")


if __name__ == "__main__":
    sys.exit(run(app, "lab.records"))
