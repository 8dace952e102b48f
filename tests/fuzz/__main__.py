"""``python -m tests.fuzz --minutes 60``: damaged inputs for every reader, new ones in every round, until the time ends.

Exit status 1 where something was found; each line names the reader and the case, and ``--reader NAME --case NUMBER``
writes that input into a file and reads it once, with the traceback.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import Bench, FuzzReport, serve
from tests.fuzz.readers import ALL_READERS, READERS

_ROUND = 500


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all, over all readers")
    parser.add_argument("--reader", choices=sorted(ALL_READERS), action="append", help="these alone; repeatable")
    parser.add_argument("--case", type=int, help="this input alone, of one --reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--cases", type=int, help="inputs of each reader, instead of as many as the time allows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.reader or list(READERS)
    if asked.worker:
        serve(names)
        return 0
    if asked.case is not None:
        return _once(names[0], asked.case)
    with Bench(names) as bench:
        reports = _rounds(bench, names, asked.minutes * 60, asked.first, asked.cases)
    for report in reports.values():
        _print(report)
    return 1 if any(report.findings for report in reports.values()) else 0


def _rounds(bench: Bench, names: list[str], seconds: float, first: int, cases: int | None) -> dict[str, FuzzReport]:
    """Rounds over all readers; the time that is left is shared evenly, and a round is at most 500 inputs of each."""
    until, reports = time.monotonic() + seconds, {name: FuzzReport(name) for name in names}
    done = 0
    while time.monotonic() < until and (cases is None or done < cases):
        count = _ROUND if cases is None else min(_ROUND, cases - done)
        for place, name in enumerate(names):
            share = max((until - time.monotonic()) / (len(names) - place), 1.0)
            _add(reports[name], bench.fuzz(name, count, share, first + done))
        done += count
    return reports


def _add(whole: FuzzReport, part: FuzzReport) -> None:
    whole.outcomes += part.outcomes
    whole.findings += part.findings
    whole.slowest = max(whole.slowest, part.slowest)
    whole.peak_bytes = max(whole.peak_bytes, part.peak_bytes)
    whole.whole_bytes = max(whole.whole_bytes, part.whole_bytes)
    whole.seconds += part.seconds
    for finding in part.findings:
        print(f"{finding.reader} --case {finding.case}: {finding.what}\n{finding.detail}", flush=True)


def _print(report: FuzzReport) -> None:
    counts = ", ".join(f"{count} {what}" for what, count in report.outcomes.most_common())
    print(
        f"{report.reader:16} {report.cases:6} inputs in {report.seconds:5.0f} s: {counts}; "
        f"longest {report.slowest[0]:.2f} s, memory +{report.peak_bytes / 2**20:.0f} MiB "
        f"({report.whole_bytes / 2**20:.0f} with all libraries); "
        f"{len(report.findings)} findings"
    )


def _once(name: str, case: int) -> int:
    reader, folder = ALL_READERS[name], Path(tempfile.mkdtemp(prefix="fuzz-"))
    seeds = reader.seeds(folder)
    path = reader.case(folder, seeds, case, random.Random(f"{name} {case}"))
    print(f"{path}: {path.stat().st_size if path.is_file() else 0} bytes", flush=True)
    print(reader.read(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
