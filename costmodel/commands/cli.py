"""Command line ``python -m costmodel machines | calibrate | measure | fit``.

Text output and ``--json`` are made from the same record.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from costmodel.base.command_line import ProgramGroup, guarded, program_name, version_command
from costmodel.base.errors import InputError, ProjectError
from costmodel.base.output_files import check_writable
from costmodel.base.units import format_quantity
from costmodel.cpu.calibration import QUICK, CalibrationEffort, calibrate
from costmodel.machines.cluster_file import (
    ClusterFile,
    NetworkFile,
    cluster_files,
    find_cluster,
    find_network,
    network_files,
    read_cluster,
    read_network,
)
from costmodel.machines.machine_file import (
    HOST_NAME,
    load_machine,
    machine_files,
    machine_record,
    user_directory,
    write_machine,
)
from costmodel.machines.machine_records import Machine

_UNITS = {"bandwidth": "B/s", "datasheet": "B/s", "latency": "s"}


def listing() -> list[dict[str, str]]:
    """Name, kind, description and file of every cluster and network; a malformed file gives a row with its error."""
    rows = [_row(name, path, "cluster") for name, path in sorted(cluster_files().items())]
    return rows + [_row(name, path, "network") for name, path in sorted(network_files().items())]


def _row(name: str, path: Path, kind: str) -> dict[str, str]:
    try:
        description = (read_cluster(path) if kind == "cluster" else read_network(path)).description
    except ProjectError as error:
        kind, description = "?", f"not usable: {error}"
    return {"name": name, "kind": kind, "description": description, "file": str(path)}


def cluster_record(name_or_path: str) -> dict[str, Any] | None:
    """Record of the cluster or network named ``name_or_path``, or of a cluster file; ``None`` for anything else."""
    if name_or_path in network_files():
        return _record(find_network(name_or_path), "network")
    file = find_cluster(name_or_path)
    return None if file is None else _record(file, "cluster")


def _record(file: ClusterFile | NetworkFile, kind: str) -> dict[str, Any]:
    content = {name: value for name, value in dataclasses.asdict(file).items() if value not in (None, "")}
    written = {
        name: format_quantity(value, _UNITS[name]) if name in _UNITS else value for name, value in content.items()
    }
    return {"name": written["name"], "kind": kind, **{key: each for key, each in written.items() if key != "name"}}


app = typer.Typer(
    name="costmodel",
    cls=ProgramGroup,
    help="What operators cost on a machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(version_command)
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.command("machines")
@guarded()
def machines_command(
    name: Annotated[str | None, typer.Argument(help="Machine to show: a name, or the path of a file.")] = None,
    as_json: _Json = False,
) -> None:
    """List the machines, clusters and networks known by name, or show one."""
    if name is not None:
        cluster = cluster_record(name)
        if cluster is None:
            _show_machine(load_machine(name), as_json)
        else:
            _show_cluster(cluster, as_json)
        return
    records = [_listing(known, path) for known, path in sorted(machine_files().items())] + listing()
    if as_json:
        _print_json({"machines": records})
        return
    table = Table("name", "kind", "description", "file", box=None)
    for record in records:
        table.add_row(record["name"], record["kind"], record["description"], record["file"])
    _console().print(table)


@app.command("fit")
@guarded()
def fit_command(
    machine: Annotated[str, typer.Option(help="Your GPU; with --nccl-log your cluster (a name or file) or GPU.")],
    table: Annotated[
        list[Path] | None, typer.Option(help="Kernels of the GPU that `measure` timed (.csv); may be repeated.")
    ] = None,
    steps: Annotated[Path | None, typer.Option(help="Kernels and times of whole steps measured on the GPU.")] = None,
    nccl_log: Annotated[
        list[Path] | None, typer.Option(help="Output of nccl-tests from your cluster; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write; default: where predictions look.")
    ] = None,
    collective: Annotated[str | None, typer.Option(help="Collective of --nccl-log, if the log does not say.")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks of --nccl-log, if the log does not say.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of --nccl-log, if the log does not say.")] = None,
    as_json: _Json = False,
) -> None:
    """Fit the models of your own GPU to its measurements, or of your own cluster to logs of nccl-tests."""
    progress = partial(Console(stderr=True, highlight=False, markup=False).print, soft_wrap=True)
    given = {"--table": table or None, "--steps": steps, "--nccl-log": nccl_log or None}
    measured = [name for name, value in given.items() if value is not None]
    if len(measured) != 1:
        raise InputError(f"fit: give one of {', '.join(given)}: what was measured on {machine}")
    if not nccl_log:
        of_logs = {"--collective": collective, "--ranks": ranks, "--nodes": nodes}
        _require_none(measured[0], of_logs)
    if output is not None:
        check_writable(output / "fitted.json", "-o", makes_folder=True)
    if nccl_log:
        from costmodel.collectives.own_cluster import fit_logs
        from costmodel.collectives.sweep_logs import Given

        path = fit_logs(nccl_log, machine, Given(collective, ranks, nodes), output, progress)
    elif steps:
        from costmodel.gpu.own_gpu import fit_to_steps

        path = fit_to_steps(steps, machine, output, progress)
    else:
        from costmodel.gpu.own_gpu import fit_to_tables

        path = fit_to_tables(table or [], machine, output, progress)
    size = path.stat().st_size
    if as_json:
        _print_json({"files": [{"file": str(path), "bytes": size}]})
    else:
        print(f"{path}  {size} B")


def _require_none(what: str, options: Mapping[str, object]) -> None:
    """Raise ``InputError`` for a given option that is incompatible with ``what``."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value}: does not go with {what}; leave one of them out")


@app.command("calibrate")
@guarded()
def calibrate_command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: host.yaml of the user's directory.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Measure 1 to T threads; default: all usable cores.")] = None,
    quick: Annotated[bool, typer.Option(help="Few repetitions and small buffers: seconds, less exact.")] = False,
    as_json: _Json = False,
) -> None:
    """Measure this CPU (under a minute) and write a machine file with the origin of each number."""
    path = output or user_directory() / f"{HOST_NAME}.yaml"
    check_writable(path, "-o", makes_folder=True)
    progress = Console(stderr=True, highlight=False, markup=False)
    machine = calibrate(
        threads, QUICK if quick else CalibrationEffort(), lambda line: progress.print(line, soft_wrap=True)
    )
    write_machine(machine, path, "Measured by `python -m costmodel calibrate` on the machine it describes.")
    progress.print(f"written to {path}", soft_wrap=True)
    _show_machine(load_machine(path), as_json)


@app.command("measure")
@guarded("stopped; what was measured is kept, --resume continues it")
def measure_command(
    suite: Annotated[str, typer.Option(help="kernels, overheads, embedding or collectives (under torchrun).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the tables and traces.")],
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the code.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Time budget; what is measured by then is kept.")] = 8.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the tables that -o holds.")] = False,
) -> None:
    """Measure kernels, host overheads, lookups or collectives on the GPUs at hand (needs torch alone)."""
    from costmodel.measure.suites import measure

    progress = Console(stderr=True, highlight=False, markup=False)
    measure(suite, device, output, minutes, resume, lambda line: progress.print(line, soft_wrap=True))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns exit status 0, or 2 with one line on standard error for a user error."""
    try:
        return app(args=arguments, prog_name=program_name("costmodel"), standalone_mode=True) or 0
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 2
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _listing(name: str, path: Path) -> dict[str, str]:
    """Row of the machine list. A malformed file gives a row with its error, so that the others are still listed."""
    try:
        machine = load_machine(path)
    except ProjectError as error:
        return {"name": name, "kind": "?", "description": f"not usable: {error}", "file": str(path)}
    return {"name": name, "kind": machine.kind, "description": machine.description, "file": str(path)}


def _show_machine(machine: Machine, as_json: bool) -> None:
    record = {**machine_record(machine), "file": machine.source}
    if as_json:
        _print_json(record)
        return
    console = _console()
    console.print(f"{record['name']} ({record['kind']}): {record['description']}")
    console.print(f"file: {record['file']}", soft_wrap=True)
    threads = sorted({count for rate in record["compute"].values() for count in rate["sustained"]})
    table = Table("quantity", *(f"{count} thread{'s' if count > 1 else ''}" for count in threads), "origin", box=None)
    for label, values, origin in _rows(record):
        table.add_row(label, *(values.get(count, "") for count in threads), origin)
    console.print(table)


def _show_cluster(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(record)
        return
    for key, value in record.items():
        _console().print(f"{key}: {value}", soft_wrap=True, markup=False)


def _rows(record: dict[str, Any]) -> list[tuple[str, dict[int, str], str]]:
    rows: list[tuple[str, dict[int, str], str]] = []
    for dtype, rate in record["compute"].items():
        rows.append((f"{dtype} rate", rate["sustained"], rate["origin"]))
        if "burst" in rate:
            rows.append((f"{dtype} rate, burst", {1: rate["burst"]}, ""))
    for level in record["memory"]:
        kind = "shared" if level["shared"] else "per core"
        rows.append((f"{level['name']} read ({level['capacity']} {kind})", level["bandwidth"], level["origin"]))
        if "write_bandwidth" in level:
            rows.append((f"{level['name']} write", level["write_bandwidth"], ""))
        if "datasheet" in level:
            rows.append((f"{level['name']} read, datasheet", {1: level["datasheet"]}, ""))
    region = record["parallel_region"]
    rows.append(("parallel region", region["seconds"], region["origin"]))
    return [*rows, *_gpu_rows(record)]


def _gpu_rows(record: dict[str, Any]) -> list[tuple[str, dict[int, str], str]]:
    """Rows for GPU-only properties; empty for a CPU."""
    gpu = record.get("gpu", {})
    rows = [(f"gpu {name}", {1: str(value)}, "") for name, value in gpu.items() if name != "origin"]
    links = record.get("links", [])
    return rows + [(f"{link['kind']}, one direction", {1: link["bandwidth"]}, link["origin"]) for link in links]


def _console() -> Console:
    """Console that prints plain, unwrapped lines if standard output is not a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(highlight=False, markup=False, width=1000, no_color=True)


def _print_json(record: Any) -> None:
    print(json.dumps(record, indent=2))
