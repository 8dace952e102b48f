"""``python -m fusion tune``: an ONNX file to a build directory, fused where it measures faster."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.cores import threads_to_use
from costmodel.errors import ModelError, ProjectError, TuningError
from fusion.artifact import CACHE, MODEL, UNFUSED, Artifact, Executable, describe, prepare_directory, write_artifact
from fusion.compare import Comparison, compare_command, require_reference
from fusion.engines.base import Workload
from fusion.progress import TuningDisplay
from fusion.selection import Plan, unfused_plan

if TYPE_CHECKING:
    from costmodel.machine_records import Machine
    from costmodel.operators import Operator
    from fusion.analyzer import Analysis
    from fusion.candidates import Site
    from fusion.graph import Graph
    from fusion.relax.importer import ImportedModel
    from fusion.tuning import TunedKernels
    from schedules.target import CpuTarget
    from schedules.template import Config

RECORDS = "records"
# With a time limit, sites that the roofline predicts to be slower fused by more than this are not measured.
IMPLAUSIBLE = 1.15
# Largest difference from ONNX Runtime, relative to the largest value of an output (of integers: the share of elements
# that differ), that FP32 rounding explains.
TOLERANCE = 5e-4
# The same where some tensor has 16 bits: one rounding is up to 1e-3, and sums are accumulated in other precisions.
HALF_TOLERANCE = 5e-2
# Down to this ratio of the network without fusion to the fused one, one comparison on a shared machine is not believed.
CLOSE = 0.97


@dataclass(frozen=True)
class Request:
    """What the user asks for. ``trials`` per kernel; ``minutes`` of tuning (``None``: until the trials are done)."""

    model: Path
    output: Path
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trials: int = 64
    minutes: float | None = None
    threads: int | None = None
    machine: str | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """What is known of the model before anything is measured."""

    request: Request
    cpu: CpuTarget
    machine: Machine
    model: ImportedModel
    graph: Graph
    sites: list[Site]
    analysis: Analysis


def tune_model(request: Request, display: TuningDisplay) -> dict[str, Any]:
    """Tunes ``request.model`` into ``request.output`` and returns the content of its ``summary.json``.

    Ctrl-C while kernels are tuned builds the best found so far (``interrupted`` in the summary says so). Raises
    ``ProjectError``: nothing but the tuning records is left then.
    """
    started = time.monotonic()
    job = read_model(request, display)
    with output_directory(request.output):
        check_reference(job)
        tuned = tune_kernels(job, display)
        plan = tuned.plan(job.graph, job.sites)
        executables = compile_plans(job, plan, tuned, display)
        with checked_build(job, executables, display) as (build, comparison):
            pays = fusion_pays(plan, comparison) or (
                nearly(plan, comparison) and fusion_pays(plan, compare_again(request, build, display))
            )
            shipped = plan if pays else unfused_plan(job.graph)
            summary = summarize(job, tuned, plan, shipped, comparison, time.monotonic() - started)
            ship(job, build, shipped is plan, summary)
    return summary


def read_model(request: Request, display: TuningDisplay) -> Job:
    """Imports the model and finds and prices its sites."""
    from schedules.target import host_target

    threads_to_use(request.threads, 1)  # refuses more than can be measured, whatever machine is named
    cpu = host_target(request.threads)
    os.environ["TVM_NUM_THREADS"] = str(cpu.threads)  # read when TVM is first used; its default is half of the cores
    from fusion.analyzer import analyze
    from fusion.candidates import find_sites
    from fusion.graph import extract_graph
    from fusion.host import machine_for
    from fusion.relax.importer import import_onnx

    display.say(f"importing {request.model}")
    model = import_onnx(request.model, request.shapes)
    graph = extract_graph(model.mod)
    machine = machine_for(request.machine, cpu.threads, display.say)
    sites = find_sites(graph, cpu)
    analysis = analyze(graph, machine, cpu)
    return Job(request, cpu, machine, model, graph, sites, analysis)


def check_reference(job: Job) -> None:
    """``TuningError`` now, rather than when everything is tuned, if there is nothing to check the outputs against."""
    request = job.request
    require_reference(
        Workload(
            model=request.model,
            model_sha256="",
            inputs=job.model.inputs,
            outputs=job.model.outputs,
            threads=job.cpu.threads,
            build=request.output,
            cache=request.output / CACHE,
        )
    )


def tune_kernels(job: Job, display: TuningDisplay) -> TunedKernels:
    """Measures fused and separate kernels; every result is in the build directory's records at once."""
    from costmodel.learned import ResidualModel
    from costmodel.roofline import RooflineModel
    from fusion.analyzer import network_bytes
    from fusion.tuning import Budget, KernelTuner
    from schedules.database import RecordStore
    from schedules.runner import Runner
    from schedules.templates import config_cost

    roofline = RooflineModel(job.machine, job.cpu.threads, network_bytes(job.graph))
    # One training thread: a pool of them would still spin while a kernel is timed.
    cost_model = ResidualModel(roofline, key=job.cpu.key, config_cost=partial(config_cost, cpu=job.cpu))
    minutes = job.request.minutes
    budget = Budget(job.request.trials, None if minutes is None else 60.0 * minutes)
    distinct = {node.operator for node in job.graph.nodes} | {site.operator for site in job.sites}
    display.say(f"{len(job.graph.nodes)} layers, {len(job.sites)} fusable sites, {len(distinct)} distinct kernels")
    with RecordStore(job.request.output / RECORDS, job.cpu) as store, Runner(job.cpu) as runner:
        tuner = KernelTuner(
            job.graph, plausible_sites(job), store, job.cpu, cost_model, runner, display.trial, display.say
        )
        tuned = tuner.tune(budget)
        display.finish_trials()
    if tuned.trials:
        cost_model.save(job.request.output / RECORDS / "cost_model")
    if tuned.interrupted:
        display.say("stopped: building the best found so far (Ctrl-C again to leave without)")
    return tuned


def plausible_sites(job: Job) -> list[Site]:
    """The sites worth measuring: all without a time limit, else those not predicted to lose clearly."""
    if job.request.minutes is None:
        return job.sites
    pairs = zip(job.sites, job.analysis.sites, strict=True)
    return [site for site, report in pairs if report.fused_seconds <= IMPLAUSIBLE * report.unfused_seconds]


def complete_configs(job: Job, tuned: TunedKernels, chosen: Mapping[Operator, Config]) -> dict[Operator, Config]:
    """``chosen``, and the first of its space for every node's kernel that has not been measured.

    Kernels that failed in every trial have none: their layers are left to TVM.
    """
    from schedules.templates import template_for

    configs = dict(chosen)
    for node in job.graph.nodes:
        template = template_for(node.operator, job.cpu)
        if template is not None and node.operator not in configs and node.operator not in tuned.unsolved:
            configs[node.operator] = template.space(node.operator, job.cpu)[0]
    return configs


def compile_plans(job: Job, plan: Plan, tuned: TunedKernels, display: TuningDisplay) -> dict[str, Executable]:
    """The model as planned, and without fusion, in the configurations that are best there.

    ``ModelError`` if TVM cannot compile what the templates leave to it.
    """
    from fusion.relax.build import build
    from fusion.relax.lower import lower

    display.say("building")
    executables: dict[str, Executable] = {}
    networks = (
        (MODEL, plan, tuned.chosen_configs()),
        (UNFUSED, unfused_plan(job.graph), tuned.unfused_configs()),
    )
    for name, each, chosen in networks:
        configs = complete_configs(job, tuned, chosen)
        covered = Plan(tuple(group for group in each.groups if group.operator in configs))
        try:
            executables[name] = build(lower(job.model.mod, covered, configs, job.cpu), job.cpu)
        except ProjectError:
            raise
        except Exception as error:  # TVM raises anything on operators that it imports but cannot compile
            raise ModelError(f"{job.request.model}: TVM cannot compile it: {last_line(error)}") from error
    return executables


def last_line(error: BaseException) -> str:
    """Of TVM's messages, which begin with a stack, the end."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


@contextmanager
def checked_build(
    job: Job, executables: Mapping[str, Executable], display: TuningDisplay
) -> Iterator[tuple[Artifact, Comparison]]:
    """A build beside the output, checked and timed against ONNX Runtime. ``TuningError`` if an output is wrong."""
    import tvm

    request = job.request
    manifest = describe(request.model, job.model.inputs, job.model.outputs, job.cpu, tvm.__version__)
    with tempfile.TemporaryDirectory(prefix=".checking-", dir=request.output) as directory:
        artifact = write_artifact(Path(directory), manifest, executables, {})
        display.say("checking the outputs and timing the network against ONNX Runtime")
        comparison = compare_command(Path(directory), ["onnxruntime", "tvm-unfused"], model=request.model)
        check_outputs(request.model, comparison, tolerance(job.model))
        yield artifact, comparison


def tolerance(model: ImportedModel) -> float:
    """The largest relative difference from ONNX Runtime that rounding explains in the precisions of ``model``."""
    from tvm import relax

    types = [binding.var.ty for block in model.mod["main"].body.blocks for binding in block.bindings]
    types += [parameter.ty for parameter in model.mod["main"].params]
    half = any(isinstance(ty, relax.TensorType) and str(ty.dtype) in ("float16", "bfloat16") for ty in types)
    return HALF_TOLERANCE if half else TOLERANCE


def check_outputs(model: Path, comparison: Comparison, allowed: float = TOLERANCE) -> None:
    """``TuningError`` unless both of our modules compute what ONNX Runtime does, but for the ``allowed`` difference."""
    for absent in comparison.not_measured:
        raise TuningError(f"{model}: {absent.engine} {absent.status}, nothing is written: {absent.reason}")
    for row in comparison.rows:
        if row.max_relative_error is None or not row.max_relative_error <= allowed:
            raise TuningError(
                f"{model}: outputs of {row.engine} differ from ONNX Runtime by {row.max_abs_error} "
                f"(relative {row.max_relative_error}, allowed {allowed}); nothing is written, the records are kept"
            )


def fusion_pays(plan: Plan, comparison: Comparison) -> bool:
    """Whether the whole network is not clearly slower with the selected sites fused, round by round."""
    if not any(group.is_fused for group in plan.groups):
        return True  # both modules are the same: the ratio is noise
    return _unfused_ratio(comparison) >= 1.0


def _unfused_ratio(comparison: Comparison) -> float:
    return next(row.ratio_to_tuned for row in comparison.rows if row.engine == "tvm-unfused")


def nearly(plan: Plan, comparison: Comparison) -> bool:
    """Whether the difference is so small that another comparison may find the opposite."""
    return _unfused_ratio(comparison) >= CLOSE and any(group.is_fused for group in plan.groups)


def compare_again(request: Request, build: Artifact, display: TuningDisplay) -> Comparison:
    """Fused against separate kernels once more; inside the network, kernel by kernel, the fused ones were faster."""
    display.say("fused and separate kernels are close: comparing them again")
    return compare_command(build.directory, ["tvm-unfused"], model=request.model)


def summarize(
    job: Job, tuned: TunedKernels, selected: Plan, shipped: Plan, comparison: Comparison, seconds: float
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    from fusion.summary import Effort, document, site_rows

    rows = {row.engine: row for row in comparison.rows}
    ours = rows["tuned" if shipped is selected else "tvm-unfused"]
    return document(
        model=str(job.request.model),
        machine=job.machine,
        cpu=job.cpu,
        sites=site_rows(job.analysis, job.sites, tuned, selected, shipped),
        latency={
            "tuned": ours.median_seconds,
            "tuned_without_fusion": rows["tvm-unfused"].median_seconds,
            "onnxruntime": rows["onnxruntime"].median_seconds,
        },
        errors=(ours.max_abs_error or 0.0, ours.max_relative_error or 0.0),
        others=job.analysis.others,
        notes=notes(job, tuned, selected, shipped),
        effort=Effort(tuned.trials, tuned.failures, seconds, tuned.interrupted),
    )


def notes(job: Job, tuned: TunedKernels, selected: Plan, shipped: Plan) -> list[str]:
    """What the user should know about this result."""
    found = []
    if tuned.interrupted:
        found.append("tuning was stopped early; run the same command again to go on from the records")
    failed = [node.name for node in job.graph.nodes if node.operator in tuned.unsolved]
    if failed:
        found.append(f"no kernel of ours worked for {', '.join(failed)}: left to TVM")
    untuned = [node.name for node in job.graph.nodes if node.operator not in {*tuned.configs, *tuned.unsolved}]
    if untuned:
        found.append(f"{len(untuned)} layers with kernels that were not measured yet, such as {untuned[0]}")
    if shipped is not selected:
        found.append("the whole network was not faster with the selected sites fused: it is shipped without fusion")
    return found


def ship(job: Job, build: Artifact, with_fusion: bool, summary: Mapping[str, Any]) -> None:
    """Writes the checked modules, manifest and summary into the output directory."""
    unfused = build.directory / UNFUSED
    best = build.directory / MODEL if with_fusion else unfused
    modules = {MODEL: _Compiled(best), UNFUSED: _Compiled(unfused)}
    write_artifact(job.request.output, build.manifest, modules, summary)


@dataclass(frozen=True)
class _Compiled:
    """A library that exists already, as an :class:`Executable`."""

    path: Path

    def export_library(self, file_name: str) -> None:
        shutil.copyfile(self.path, file_name)


@contextmanager
def output_directory(directory: Path) -> Iterator[None]:
    """``directory``, proved writable; taken away again if it was made here and nothing is kept in it."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    prepare_directory(directory)
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise
