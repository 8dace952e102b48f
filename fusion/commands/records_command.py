"""``python -m fusion records``: the measurements shipped with the project, and the ranking trained on them.

measure NETWORK... measure more configurations of every kernel of builds or ONNX files, into their folders, for training
collect BUILD...   folders of `tune` on this CPU -> records.jsonl.gz, and machine.yaml beside it
train              records.jsonl.gz -> ranking.json.gz; or, without some networks, both in another folder
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError
from costmodel.base.output_files import write_whole

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from schedules.records.tuning_records import RecordStore
    from schedules.tuning.kernel_ranking import SamplingProgress

app = typer.Typer(help="Kernel measurements that are shipped, and the ranking learned from them.", no_args_is_help=True)

Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="Folder of all CPUs' records; default: that of the package, or $FUSION_RECORDS."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@dataclass(frozen=True)
class CollectedSummary:
    """Result of ``collect``; ``left_out``: reason -> number of records not in the file."""

    path: str
    size_bytes: int
    networks: list[str]
    kernels: int
    records: int
    left_out: dict[str, int]


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
    json_: JsonOption = False,
) -> None:
    """Measure configurations of every kernel, half of them expected to be fast, for `collect` and `train`."""
    import time

    until = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    state = measure_records(networks, output, configurations, until, threads)
    if json_:
        typer.echo(json.dumps(asdict(state), indent=2))
        return
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
    json_: JsonOption = False,
) -> None:
    """Take the records of this CPU from build folders into the file that is shipped."""
    summary = collect_records(builds, directory, note, leave_out or (), rows, machine, add)
    if json_:
        typer.echo(json.dumps(asdict(summary), indent=2))
        return
    typer.echo(f"{summary.path}: {summary.size_bytes / 1e3:.0f} kB")
    typer.echo(f"{summary.records} configurations of {summary.kernels} kernels of {', '.join(summary.networks)}")
    for reason, count in summary.left_out.items():
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
    from costmodel.base.process import threads_to_use
    from schedules.contract.cpu_target import host_target
    from schedules.measuring.measure_runner import Runner
    from schedules.records.shipped_records import records_folder
    from schedules.records.tuning_records import RecordStore
    from schedules.tuning.kernel_ranking import measure_samples, sampled_kernels

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


def kernels_of(model: Path, folder: Path, threads: int | None) -> list[Operator]:
    """Kernels that `tune` would measure for an ONNX file: those of its layers, and of plausible sites."""
    from fusion.analysis.target_machine import this_cpu
    from fusion.tuning.clock import TuningDisplay
    from fusion.tuning.network import TuneRequest, plausible_sites, read_networks

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
        import time

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
) -> CollectedSummary:
    """Write the records of this CPU in ``builds``, and the machine file of the predictions, into ``directory``.

    ``add``: merge with the existing records, whose ``note`` is kept by default; raises ``InputError`` if there are
    none.
    """
    from costmodel.base.process import usable_cores
    from costmodel.machines.machine_file import write_machine
    from fusion.analysis.target_machine import machine_for
    from schedules.contract.cpu_target import host_target
    from schedules.records import shipped_records
    from schedules.records.shipped_records import collect as collected_from

    for name in leave_out:
        if not re.fullmatch(r"[\w.-]+", name):
            raise InputError(f"--leave-out {name}: expected the name of a network, the stem of its ONNX file")
    cpu = host_target()
    found = collected_from(builds, cpu, note, lambda network: network not in leave_out, rows)
    content = found.content
    machine = machine_for(machine_name, usable_cores(), lambda line: typer.echo(line, err=True))
    folder = (directory or shipped_records.records_directory()) / folder_name(content.cpu.chip, content.cpu.mcpu)
    path = folder / shipped_records.RECORDS_FILE
    if add:
        before = shipped_records.read_records(path)
        if (before.tvm, before.templates) != (content.tvm, content.templates):
            raise InputError(f"{path}: made by another version of TVM or of the templates; collect without --add")
        kernels = shipped_records.merged([*before.kernels, *content.kernels], rows)
        content = replace(content, kernels=kernels, note=note or before.note)
    shipped_records.write_records(path, content)
    write_machine(machine, folder / shipped_records.MACHINE_FILE, "The CPU of the records beside this file.")
    return CollectedSummary(
        path=str(path),
        size_bytes=path.stat().st_size,
        networks=list(content.networks),
        kernels=len(content.kernels),
        records=sum(len(kernel.records) for kernel in content.kernels),
        left_out=dict(found.left_out),
    )


def train_records(directory: Path | None, leave_out: Sequence[str], output: Path | None) -> tuple[Path, list[str]]:
    """Train the ranking on the records of this CPU; return its file and its kernel families.

    It is written beside the records. With ``leave_out``, the records without these networks and their ranking are
    written into ``output``. Raises ``InputError`` for a network without records.
    """
    from costmodel.machines.machine_file import read_machine
    from schedules.records.shipped_records import MACHINE_FILE, RECORDS_FILE, write_records
    from schedules.tuning.kernel_ranking import train_ranking, write_ranking

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


def records_here(directory: Path | None) -> Any:
    """Return the :class:`schedules.records.shipped_records.FoundRecords` of this CPU, or raise ``InputError``."""
    from schedules.contract.cpu_target import host_target
    from schedules.records.shipped_records import find_records, records_directory

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
