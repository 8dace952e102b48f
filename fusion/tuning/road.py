"""Procedure of ``tune``: from a request to a build folder."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from costmodel.base.cores import threads_to_use
from costmodel.base.folder_lock import lock_folder
from costmodel.base.whole_file import remove_partials
from fusion.analysis.target_machine import this_cpu
from fusion.artifact.build_folder import STAGING, output_directory
from fusion.artifact.profile_folders import ProfileBuild, write_profiles, write_single
from fusion.report.result_pictures import draw_frontiers
from fusion.tuning.another_cpu import AnotherCpuJob, another_cpu
from fusion.tuning.job import TuningJob
from fusion.tuning.mixed_job import MixedJob
from fusion.tuning.network import Network, TuneRequest, read_networks
from fusion.tuning.progress import TuningDisplay
from fusion.tuning.quantization import QUANTISING, quantised_request
from fusion.tuning.summary import profiles_document
from fusion.tuning.time_limit import StageClock, end_of
from schedules.contract.lean_import import tvm_threads

CHECKING = ".checking-"  # name prefix of a temporary folder


def tune_model(request: TuneRequest, display: TuningDisplay) -> dict[str, Any]:
    """Tune ``request.model`` into ``request.output``; return the content of its ``summary.json``.

    Ctrl-C while kernels are tuned builds the best network found so far (``interrupted`` in the summary). Raises
    ``ProjectError``: only the tuning records are kept then.
    """
    clock = StageClock(time.monotonic())
    end = end_of(request.minutes, clock.started)
    display.ends_at(end)
    request.require_valid()
    with ExitStack() as stack:
        if request.elsewhere:
            target, runner = another_cpu(request, stack, display)
        else:
            threads_to_use(request.threads, 1)  # reject a number of threads that cannot be measured, for any machine
            target, runner = this_cpu(request.machine, request.threads, display.say), None
        asked = request.on_cpu(target.cpu, display.say)
        stack.enter_context(tvm_threads(target.threads_here))
        stack.enter_context(claimed_directory(request.output))
        request, quantised = stack.enter_context(quantised_request(asked, target, display))
        if quantised is not None:
            clock.ended("quantising")
        networks = read_networks(request, target, display)
        clock.ended("read")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=CHECKING, dir=request.output)))
        jobs: list[TuningJob] = []
        for network in networks:
            place = (network, scratch_folder(scratch, network), clock, display)
            if request.elsewhere:
                jobs.append(AnotherCpuJob(*place, runner))
            else:
                jobs.append(MixedJob(*place) if asked.precision == "auto" else TuningJob(*place))
        for job in jobs:
            job.prepare(stack, asked, quantised)
        for job in jobs:  # check all of them before tuning: a rejection costs only seconds
            job.check_first()
        clock.ended("first check")
        builds: list[ProfileBuild] = []
        for done, job in enumerate(jobs):
            if done:
                job.clock = StageClock(time.monotonic())
            job.stopped = any(build.summary["interrupted"] for build in builds)
            # Time left over by one profile is shared by the others.
            job.search(job.clock.started + (end - job.clock.started) / (len(jobs) - done))
            job.finals()
            builds.append(job.build())
        return write_builds(request, builds, clock.started)


def scratch_folder(scratch: Path, network: Network) -> Path:
    """A folder inside ``scratch`` that no other profile uses."""
    if network.folder == network.request.output:
        return scratch
    folder = scratch / network.folder.name
    folder.mkdir()
    return folder


def write_builds(request: TuneRequest, builds: Sequence[ProfileBuild], started: float) -> dict[str, Any]:
    """Write one build, or several profiles and their index; return the content of ``summary.json``."""
    if len(builds) == 1:
        write_single(request.output, builds[0])
        draw_frontiers({request.output: builds[0].summary})
        return dict(builds[0].summary)
    document = profiles_document({build.folder: build.summary for build in builds}, time.monotonic() - started)
    write_profiles(request.output, builds, document)
    draw_frontiers({request.output / build.folder: build.summary for build in builds})
    return document


@contextmanager
def claimed_directory(directory: Path) -> Iterator[None]:
    """:func:`output_directory` locked for this process; raises ``OutputError`` that names another process tuning into
    it.

    Temporary folders of killed processes are deleted.
    """
    with output_directory(directory), lock_folder(directory, "a build") as lock:
        lock.clear(f"{CHECKING}*", f"{STAGING}*", f"{QUANTISING}*")
        remove_partials(directory)
        yield
