"""Fits the shared tables of host overheads from the public profiles: ``python -m e2e.price.overhead_fitting DATA OUT``.

``DATA`` holds ``traces/`` as described in the data folder's README; ``OUT`` is
``costmodel/calibration/host_overheads``, where the inflation model that the tables use lies too.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from costmodel.base.errors import InputError, ProjectError
from costmodel.datasets.data_folder import FETCH
from e2e.price.overhead_files import load_inflation, save_table
from e2e.price.overhead_samples import OverheadSamples, extract
from e2e.price.overheads import OverheadTable, fit_table
from e2e.traces.formats.json_stream import archive_members
from e2e.traces.formats.kineto import read_kineto

# The table of all public profiles, for a host of which nothing is known. Its factor: one host left out, the others
# predict its time (`python benchmarks/host_overheads.py`).
SHARED_NAME = "shared"
HOSTS_DIFFER = 1.5
INFLATION_FILE = "profiler_inflation.json"
# Kept out of the shared table, which stands for a host of which nothing is known. The A100's host takes seven times as
# long per ResNet-50 operator as the V100's (220 ms a step against 31 ms), which no GPU explains; it was recorded with
# stacks or on a debugging build. The host of the RTX 2080 Ti takes three times as long as both V100 servers' and twice
# as long as NeuSight's; without it each left-out server is predicted better (`python benchmarks/host_overheads.py`).
NOT_SHARED = frozenset({"a100-resnet50-ddp", "rtx-2080-ti-linear"})
# Table -> profiles of one software stack on one kind of host; an archive stands for all its members.
STACKS = {
    "rtx-2080-ti-linear": ("traces/linear_2080Ti/linear_kineto.json.gz",),
    "v100-resnet50": ("traces/resnet50_V100/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",),
    "a100-resnet50-ddp": ("traces/resnet50_A100_ddp/nccl_data.json.gz",),
    "v100-torchrec-dlrm": ("traces/dlrm_8xV100/dlrm_kineto.tar.gz",),
}


def fit_shared_tables(data: Path, output: Path) -> list[OverheadTable]:
    """One table per stack and the shared one of all but ``NOT_SHARED``, written to ``output`` as ``<name>.json``.

    :class:`InputError` names a profile or the inflation model that is missing.
    """
    inflation = load_inflation(output / INFLATION_FILE)
    profiles = {name: [_extract(data, file) for file in _files(data, stack)] for name, stack in STACKS.items()}
    tables = [fit_table(name, samples, inflation) for name, samples in profiles.items()]
    everything = [samples for name, group in profiles.items() if name not in NOT_SHARED for samples in group]
    tables.append(replace(fit_table(SHARED_NAME, everything, inflation), factor=HOSTS_DIFFER))
    for table in tables:
        save_table(table, output / f"{table.name}.json")
    return tables


def _files(data: Path, stack: tuple[str, ...]) -> list[str]:
    files: list[str] = []
    for file in stack:
        if not (data / file).is_file():
            raise InputError(f"{data / file}: missing; {FETCH} brings it, or give the folder that holds traces/")
        members = sorted(archive_members(data / file)) if ".tar" in file else []
        files += [f"{file}/{member}" for member in members] or [file]
    return files


def _extract(data: Path, file: str) -> OverheadSamples:
    return replace(extract(read_kineto(data / file)), source=file)


def main(arguments: list[str]) -> int:
    """Command line; exit status 2 and one line for what a user can cause."""
    if len(arguments) != 2:
        print("usage: python -m e2e.price.overhead_fitting DATA OUT", file=sys.stderr)
        return 2
    try:
        tables = fit_shared_tables(Path(arguments[0]), Path(arguments[1]))
    except ProjectError as error:
        print(error, file=sys.stderr)
        return 2
    for table in tables:
        means = ", ".join(f"{kind} {mean.seconds * 1e6:.1f}" for kind, mean in table.defaults.items())
        print(f"{table.name}: {len(table.sources)} profiles; mean us {means}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
