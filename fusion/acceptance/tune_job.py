"""What ``tune`` is asked for, and what is known of the model before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.cores import threads_to_use
from fusion.artifact.profile_folders import profile_names
from fusion.model.precision import INT8, Precision, stored_in
from fusion.model.selection import FusionPlan
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from costmodel.machines.machine_records import Machine
    from costmodel.operators.layers import Operator
    from fusion.analysis.analyzer import NetworkAnalysis
    from fusion.model.candidates import Site
    from fusion.model.conv_graph import Graph
    from fusion.relax.onnx.importer import ImportedModel
    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Config
    from schedules.tuning.kernel_guesses import KernelGuesses


@dataclass(frozen=True)
class InputProfile:
    """Input shapes that a network is built for: those of open inputs by name, and the leading dimension of all."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch: int | None = None


@dataclass(frozen=True)
class TuneRequest:
    """What the user asks for. ``trials`` per kernel; ``minutes`` of the whole job (``None``: until the trials are
    done). ``profiles``: every one gets a network of its own. ``target``: another CPU to build for, from its records and
    without measuring; ``tracker`` (``HOST:PORT``) and ``key``: servers of TVM's RPC on whose CPU kernels are measured.

    ``precision``: in which number types layers are stored; ``max_error``: how far outputs may be off then, relative to
    the largest value of each; ``calibration``: an NPZ file of inputs on which that is measured.
    ``against``: names of engines to time at the end beside ONNX Runtime; ``quantized``: what those of INT8 run.
    """

    model: Path
    output: Path
    profiles: Sequence[InputProfile] = (InputProfile(),)
    trials: int = 64
    minutes: float | None = None
    threads: int | None = None
    machine: str | None = None
    target: str | None = None
    tracker: str | None = None
    key: str | None = None
    precision: Precision = "float32"
    max_error: float | None = None
    calibration: Path | None = None
    against: Sequence[str] = ()
    quantized: Path | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """What is known of the model for one profile before anything is measured. ``folder``: where its build goes."""

    request: TuneRequest
    profile: InputProfile
    folder: Path
    cpu: CpuTarget
    machine: Machine
    model: ImportedModel
    graph: Graph
    sites: list[Site]
    analysis: NetworkAnalysis
    guesses: KernelGuesses

    @property
    def file(self) -> Path:
        """The ONNX file that other engines run: the user's, or a copy of it for another batch."""
        batch = self.profile.batch
        return self.request.model if batch is None else self.folder / f"model-batch{batch}.onnx"

    def stored(self, names: Collection[str], dtype: str) -> Job:
        """The same with the layers called ``names`` stored in ``dtype``."""
        from fusion.analysis.analyzer import analyze
        from fusion.model.candidates import find_sites

        graph = stored_in(self.graph, names, dtype)
        analysis, sites = analyze(graph, self.machine, self.cpu), find_sites(graph, self.cpu)
        return replace(self, graph=graph, sites=sites, analysis=analysis)


def read_model(request: TuneRequest, display: TuningDisplay) -> list[Job]:
    """Imports the model and finds and prices its sites on this CPU, for every profile. ``InputError`` for two alike."""
    from schedules.contract.cpu_target import host_target

    threads_to_use(request.threads, 1)  # refuses more than can be measured, whatever machine is named
    cpu = host_target(request.threads)
    os.environ["TVM_NUM_THREADS"] = str(cpu.threads)  # read when TVM is first used; its default is half of the cores
    from fusion.analysis.target_machine import another_cpu, machine_for
    from schedules.tuning.kernel_guesses import guesses_for

    def machine() -> Machine:
        found = machine_for(request.machine, cpu.threads, display.say)
        if (difference := another_cpu(found)) is not None:
            display.say(difference)
        return found

    return read_jobs(request, cpu, machine, display, guesses_for(cpu))


def read_jobs(
    request: TuneRequest,
    cpu: CpuTarget,
    machine_of: Callable[[], Machine],
    display: TuningDisplay,
    guesses: KernelGuesses | None = None,
) -> list[Job]:
    """One job for every profile, for ``cpu``, which ``machine_of()`` describes: asked once the model has been read.

    ``guesses``: what is known of its kernels beforehand.
    """
    from fusion.analysis.analyzer import analyze
    from fusion.model.candidates import find_sites
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.onnx_file import require_loaded
    from schedules.tuning.kernel_guesses import KernelGuesses

    display.stage(f"importing {request.model}")
    whole = cpu.lacks(INT8) is None
    models = [import_onnx(request.model, each.shapes, each.batch, whole) for each in request.profiles]
    require_loaded(request.model)
    folders = [request.output]
    if len(models) > 1:
        folders = [request.output / name for name in profile_names([model.inputs for model in models])]
    machine = machine_of()
    known = guesses or KernelGuesses(cpu)
    jobs = []
    for profile, folder, model in zip(request.profiles, folders, models, strict=True):
        graph = extract_graph(model.mod)
        analysis, sites = analyze(graph, machine, cpu), find_sites(graph, cpu)
        jobs.append(Job(request, profile, folder, cpu, machine, model, graph, sites, analysis, known))
    if known.origin:
        kernels = {node.operator for job in jobs for node in job.graph.nodes}
        recorded = f" ({len(kernels & known.recorded.keys())} of {len(kernels)} kernels are among them)"
        display.say(known.origin + recorded * bool(known.recorded))
    return jobs


def plausible_sites(job: Job) -> list[Site]:
    """The sites worth measuring: none without hope, and with a time limit none predicted to lose clearly."""
    unhurried = job.request.minutes is None
    pairs = zip(job.sites, job.analysis.sites, strict=True)
    return [site for site, report in pairs if not report.hopeless and (unhurried or not report.loses_clearly)]


def complete_configs(
    plan: FusionPlan,
    guesses: KernelGuesses,
    chosen: Mapping[Operator, Config],
    unsolved: Collection[Operator] = (),
) -> dict[Operator, Config]:
    """``chosen``, and the best guess for every kernel of ``plan`` that has not been measured.

    Kernels that failed in every trial (``unsolved``) have none: their layers are left to TVM.
    """
    from schedules.kernels.template_table import template_for

    configs = dict(chosen)
    for operator in plan.operators:
        template = template_for(operator, guesses.cpu)
        if template is not None and operator not in configs and operator not in unsolved:
            configs[operator] = guesses.guess(operator).config
    return configs


def careful_configs(
    configs: Mapping[Operator, Config], cpu: CpuTarget, measured: Mapping[Operator, Config] | None = None
) -> dict[Operator, Config]:
    """``configs`` without algorithms that round more than a sum of products one by one.

    In their place the configuration in ``measured``, or the first of the space that does not.
    """
    from schedules.kernels.template_table import template_for

    careful = dict(configs)
    for operator, config in configs.items():
        template = template_for(operator, cpu)
        if template is None or template.relative_rounding(config) <= 1.0:
            continue
        others = (each for each in template.space(operator, cpu) if template.relative_rounding(each) <= 1.0)
        careful[operator] = (measured or {}).get(operator) or next(others)
    return careful
