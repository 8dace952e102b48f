"""``tune`` for a CPU that is not this one: its kernels are measured on servers there, or its records are read.

What runs there is compared here only where this CPU has the features. Whole networks are not timed against each other:
fusions are chosen by the times of kernels, those without a record by the cost model. The artifact says both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError
from fusion.acceptance.network_check import CheckCost, NetworkCheck, build_network, first_check, loaded
from fusion.acceptance.precision_choice import PrecisionPlan
from fusion.acceptance.time_limit import FINAL_COMPILATION, StageClock, TimeLimit, end_of
from fusion.acceptance.tune_job import Job, TuneRequest, careful_configs, complete_configs, plausible_sites, read_jobs
from fusion.artifact.build_folder import MODEL, UNFUSED_MODULE, describe
from fusion.artifact.profile_folders import ProfileBuild
from fusion.commands.tune import (
    CHECKING,
    RECORDS,
    announced,
    asked_for,
    batch_file,
    claimed_directory,
    planned,
    predicted_seconds,
    ranking_model,
    scratch_folder,
    write_builds,
)
from fusion.commands.tune_int8 import quantised_request
from fusion.commands.tune_precision import PrecisionReport, checked_precision, on_cpu, tune_mixed
from fusion.model.precision import BFLOAT16, layers_in, precision_of
from fusion.relax.onnx.float_layers import told_in_floats
from fusion.search.progress import TuningDisplay
from schedules.contract.cpu_target import cpu_flags, required_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from costmodel.machines.machine_records import Machine
    from costmodel.operators.layers import Operator
    from fusion.acceptance.error_budget import PrecisionChoice
    from fusion.acceptance.output_check import Verdict
    from fusion.comparing.output_errors import OutputErrors
    from fusion.model.selection import FusionPlan
    from fusion.relax.machine_code import CompiledModule
    from fusion.search.network_tuning import TunedKernels
    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Config
    from schedules.measuring.remote_runner import RemoteRunner

MACHINE_FILE = "machine.yaml"


@dataclass(frozen=True, eq=False)
class Choice:
    """What is built: the plan, the configurations of all kernels, and which kernels have no record."""

    plan: FusionPlan
    configs: dict[Operator, Config]
    unmeasured: tuple[Operator, ...]


def tune_elsewhere(request: TuneRequest, display: TuningDisplay) -> dict[str, Any]:
    """Builds ``request.model`` for the CPU of ``request.target`` or of the servers at ``request.tracker``; returns the
    content of its ``summary.json``. Raises ``ProjectError``.
    """
    started = time.monotonic()
    end = end_of(request.minutes, started)
    display.ends_at(end)
    asked = checked_precision(request, display)
    with ExitStack() as stack:
        stack.enter_context(claimed_directory(request.output))
        runner = None if request.tracker is None else stack.enter_context(_servers(request, display))
        cpu, machine_of = _named(request, display) if runner is None else _remote(request, runner, display)
        asked = on_cpu(asked, cpu, display)
        request, quantised = stack.enter_context(quantised_request(asked, lambda: (cpu, machine_of()), display))
        jobs = read_jobs(request, cpu, machine_of, display)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=CHECKING, dir=request.output)))
        for job in jobs:
            stack.enter_context(batch_file(job))
        why_unchecked = _why_unchecked(cpu)
        if why_unchecked is not None:
            display.say(why_unchecked)
        folders = [scratch_folder(scratch, job) for job in jobs]
        plans = [
            stack.enter_context(planned(job, asked, quantised, folder, announced(job, display)))
            for job, folder in zip(jobs, folders, strict=True)
        ]
        jobs = [asked_for(job, plan) for job, plan in zip(jobs, plans, strict=True)]
        for job, plan in zip(jobs, plans, strict=True):
            _require_budget(job, plan)
        checks: list[NetworkCheck | None] = [None] * len(jobs)
        if why_unchecked is None:
            checks = [
                first_check(job, folder, announced(job, display), None if plan is None else plan.of_all_layers)
                for job, folder, plan in zip(jobs, folders, plans, strict=True)
            ]
        builds: list[ProfileBuild] = []
        for done, (job, check, plan) in enumerate(zip(jobs, checks, plans, strict=True)):
            began = time.monotonic() if done else started
            share = began + (end - began) / (len(jobs) - done)
            stopped = any(build.summary["interrupted"] for build in builds)
            if check is not None and check.careful:
                job = replace(job, guesses=job.guesses.carefully())
            servers = None if stopped else runner
            job, check, tuned, choice = _tuned(job, check, plan, servers, share, stopped, display)
            report = None if plan is None else PrecisionReport(plan, _rounded_errors(job, plan), choice)
            builds.append(_build(job, tuned, check, folders[done], began, why_unchecked, runner, report, display))
        return write_builds(request, builds, started)


def _tuned(
    job: Job,
    check: NetworkCheck | None,
    plan: PrecisionPlan | None,
    runner: RemoteRunner | None,
    end: float,
    stopped: bool,
    display: TuningDisplay,
) -> tuple[Job, NetworkCheck | None, TunedKernels, PrecisionChoice | None]:
    """What is known of the kernels, with the layers in bfloat16 that are worth it by their times; and its check."""
    limit = _limit(check, end)

    def tune(which: Job, seconds: float | None) -> TunedKernels:
        return _kernels(which, runner, seconds, stopped, display)

    if plan is None or plan.of_all_layers is not None:
        return job, check, tune(job, limit.tuning_seconds), None if plan is None else plan.choice
    found = tune_mixed(job, plan, lambda: limit.tuning_seconds, tune, display, StageClock(time.monotonic()))
    if found.mixing is None:
        return job, check, found.plain, found.choice
    mixed = found.mixing.job
    if check is not None:
        check = check.with_rounded(layers_in(mixed.graph, BFLOAT16), plan.limit)
    return mixed, check, found.mixing.tuned, found.choice


def _rounded_errors(job: Job, plan: PrecisionPlan) -> OutputErrors | None:
    """What the layers of ``job`` in bfloat16 do to the outputs, as ONNX Runtime computes it here; of a quantised model
    its quantiser has told it.
    """
    rounded = layers_in(job.graph, BFLOAT16)
    return plan.limit.measured.errors_of(rounded) if rounded and plan.limit.runs is not None else None


def _require_budget(job: Job, plan: PrecisionPlan | None) -> None:
    """:class:`BudgetExceeded` before anything is measured where layers that are settled err more than is allowed."""
    if plan is not None and plan.of_all_layers is not None and (runs := plan.limit.runs) is not None:
        rounded = layers_in(job.graph, BFLOAT16)
        plan.limit.require(job.request.model, "rounded", lambda inputs: runs.outputs(inputs, rounded))


def _servers(request: TuneRequest, display: TuningDisplay) -> RemoteRunner:
    from schedules.measuring.remote_runner import RemoteRunner

    if request.target is not None:
        raise InputError("--target and --tracker: the target of a tracker's servers is asked from them; leave one out")
    assert request.tracker is not None
    if request.key is None:
        raise InputError(f"--tracker {request.tracker}: name the servers with --key")
    return RemoteRunner(request.tracker, request.key, request.threads, display.say)


def _remote(
    request: TuneRequest, runner: RemoteRunner, display: TuningDisplay
) -> tuple[CpuTarget, Callable[[], Machine]]:
    """The servers' CPU, and its machine: named, calibrated there before, or now."""
    from costmodel.machines.machine_catalog import load_machine
    from costmodel.machines.machine_file import write_machine
    from fusion.analysis.target_machine import machine_for

    cpu, host = runner.cpu, runner.host
    file = request.output / MACHINE_FILE

    def machine() -> Machine:
        if request.machine is not None:
            return machine_for(request.machine, cpu.threads, display.say)
        if file.is_file():
            known = load_machine(file)
            if known.host == host and known.max_threads >= cpu.threads:
                return known
        display.say(f"measuring the CPU of {request.key} quickly")
        measured = runner.calibrate(display.say)
        write_machine(measured, file, f"Measured quickly on a server of {request.key!r} by `python -m fusion tune`.")
        return measured

    return cpu, machine


def _named(request: TuneRequest, display: TuningDisplay) -> tuple[CpuTarget, Callable[[], Machine]]:
    """The CPU of ``--target``, and the machine that predicts for it."""
    from fusion.analysis.target_machine import machine_for
    from schedules.contract.named_target import machine_target, parse_target
    from schedules.records.recorded_cpus import recorded_cpus

    text = request.target
    assert text is not None
    if text.split()[:1] != ["llvm"]:
        described = machine_for(request.machine or text, 1, display.say)
        named = described if request.machine is None else machine_for(text, 1, display.say)
        cpu = machine_target(named, request.threads)
    elif request.machine is None:
        raise InputError(f"--target {text}: name a machine file with --machine; it chooses where there are no records")
    else:
        described = machine_for(request.machine, 1, display.say)
        cpu = parse_target(text, request.threads, described, recorded_cpus(request.output / RECORDS))
    described.check_threads(cpu.threads)
    return cpu, lambda: described


def _why_unchecked(cpu: CpuTarget) -> str | None:
    """Why code for ``cpu`` cannot be run here; ``None`` if it can."""
    missing = [flag for flag in required_flags(cpu.mcpu) if flag not in cpu_flags()]
    if not missing:
        return None
    return f"outputs cannot be checked here: this CPU lacks {', '.join(missing)}, which {cpu.mcpu} has"


def _limit(check: NetworkCheck | None, end: float) -> TimeLimit:
    # Both final networks are built here, nothing is raced.
    cost = CheckCost(0.0, 0.0) if check is None else check.cost
    return TimeLimit(end, cost.other_seconds, most_compile_seconds=FINAL_COMPILATION * cost.compile_seconds)


def _kernels(
    job: Job, runner: RemoteRunner | None, seconds: float | None, stopped: bool, display: TuningDisplay
) -> TunedKernels:
    """What is known of the kernels: measured on the servers, for ``seconds`` at most, or from the records."""
    from fusion.search.network_tuning import NetworkTuner, TuningBudget
    from schedules.measuring.measure_runner import Runner
    from schedules.records.record_store import RecordStore

    with RecordStore(job.request.output / RECORDS, job.cpu, job.guesses.allows) as store:
        measuring = runner if runner is not None else Runner(job.cpu)  # that one is never started
        tuner = NetworkTuner(
            job.graph,
            plausible_sites(job),
            store,
            job.cpu,
            ranking_model(job),
            measuring,
            display.trial,
            guesses=job.guesses,
            predicted=predicted_seconds(job),
        )
        if runner is None:
            return tuner.known(interrupted=stopped)
        store.claim()
        tuned = tuner.tune(TuningBudget(job.request.trials, seconds))
        display.finish_trials()
    return tuned


def choose(job: Job, tuned: TunedKernels) -> Choice:
    """The network of the kernels' times; of kernels without a record the time and the configuration are predicted."""
    from costmodel.model.measurements import Measurement
    from fusion.model.selection import select
    from schedules.kernels.template_table import template_for

    model = ranking_model(job)
    model.update([Measurement(each, tuned.configs[each], seconds) for each, seconds in tuned.seconds.items()])
    operators: dict[Operator, None] = {}
    operators.update(dict.fromkeys(node.operator for node in job.graph.nodes))
    sites = plausible_sites(job)
    operators.update(dict.fromkeys(site.operator for site in sites))
    unknown = [each for each in operators if each not in tuned.seconds and each not in tuned.unsolved]
    estimates = model.estimate(unknown) if unknown else []
    seconds: dict[Operator, float] = dict(tuned.seconds)
    seconds.update((each, found.seconds) for each, found in zip(unknown, estimates, strict=True))
    plan = select(job.graph, sites, {each: time for each, time in seconds.items() if each not in tuned.unsolved})
    configs = dict(tuned.configs)
    for operator in unknown:
        template = template_for(operator, job.cpu)
        if template is not None:
            space = template.space(operator, job.cpu)
            configs[operator] = space[list(model.rank(operator, space))[0]]
    return Choice(plan, complete_configs(plan, job.guesses, configs, tuned.unsolved), tuple(unknown))


def _build(
    job: Job,
    tuned: TunedKernels,
    check: NetworkCheck | None,
    scratch: Path,
    began: float,
    why_unchecked: str | None,
    runner: RemoteRunner | None,
    report: PrecisionReport | None,
    display: TuningDisplay,
) -> ProfileBuild:
    """The chosen network and the one without fusion, checked where they run here."""
    import tvm

    from fusion.model.selection import unfused_plan
    from fusion.relax.kernel_objects import KernelObjects

    display.stage("building")
    choice = choose(job, tuned)
    apart = complete_configs(unfused_plan(job.graph), job.guesses, choice.configs, tuned.unsolved)
    chosen: Mapping[Operator, Config] = choice.configs
    if check is not None and check.careful:
        chosen, apart = (careful_configs(each, job.cpu, tuned.careful) for each in (chosen, apart))
    objects = KernelObjects(scratch / "kernels", job.cpu) if check is None else check.objects
    networks: dict[str, CompiledModule] = {
        MODEL: build_network(job.file, job.model, choice.plan, chosen, job.cpu, objects),
        UNFUSED_MODULE: build_network(job.file, job.model, unfused_plan(job.graph), apart, job.cpu, objects),
    }
    verdicts = [] if check is None else [_verdict(job, check, scratch, each) for each in networks.values()]
    summary = _summary(job, tuned, choice, networks, check, verdicts, began, why_unchecked, runner, report)
    manifest = describe(
        job.file, job.model.inputs, job.model.outputs, job.cpu, tvm.__version__,
        measured=False, checked=check is not None, precision=precision_of(job.graph),
    )  # fmt: skip
    return ProfileBuild(job.folder.name, manifest, networks, summary)


def _verdict(job: Job, check: NetworkCheck, scratch: Path, network: CompiledModule) -> Verdict:
    with (
        tempfile.TemporaryDirectory(prefix="final-", dir=scratch) as directory,
        loaded(job.file, job.model, network, Path(directory), job.cpu) as worker,
    ):
        return check.require("built", worker)


def _summary(
    job: Job,
    tuned: TunedKernels,
    choice: Choice,
    networks: dict[str, CompiledModule],
    check: NetworkCheck | None,
    verdicts: Sequence[Verdict],
    began: float,
    why_unchecked: str | None,
    runner: RemoteRunner | None,
    report: PrecisionReport | None,
) -> dict[str, Any]:
    from fusion.commands.network_record import network_record
    from fusion.commands.summary import TuningEffort, document, site_rows

    rows = ("tuned", "tuned_without_fusion")
    memory: dict[str, dict[str, int | None]] = {}
    for row, network in zip(rows, networks.values(), strict=True):
        memory[row] = {**(asdict(network.memory) if network.memory is not None else {}), "growth_bytes": None}
    checked: dict[str, Any] = {"reference": None, "why_not": why_unchecked}
    if check is not None:
        checked = check.outputs.to_json(max(verdicts, key=lambda each: each.share), check.exposes)
    return document(
        model=str(job.request.model),
        inputs=job.model.inputs,
        machine=job.machine,
        cpu=job.cpu,
        sites=site_rows(job.analysis, job.sites, tuned, choice.plan, choice.plan),
        latency=dict.fromkeys((*rows, "onnxruntime")),
        finals={"shipped": "selected", "decided": False, "networks": []},
        check=checked,
        errors=None,
        memory=memory,
        others=job.analysis.others,
        notes=_notes(job, tuned, choice, why_unchecked, runner),
        effort=TuningEffort(tuned.trials, tuned.failures, time.monotonic() - began, tuned.interrupted),
        precision={"shipped": precision_of(job.graph), **({} if report is None else report.to_json(job))},
        network=network_record(job.graph, choice.plan, tuned.seconds, job.machine, job.cpu.threads),
        curve=tuned.curve,
    )


def _notes(
    job: Job, tuned: TunedKernels, choice: Choice, why_unchecked: str | None, runner: RemoteRunner | None
) -> list[str]:
    where = "" if runner is None else f"; kernels were measured on {runner.servers} server(s) of {job.request.key}"
    built = f"built for {job.cpu.mcpu} with {job.cpu.threads} threads, not for this CPU"
    found = [f"{built}: whole networks were not timed{where}"]
    if tuned.interrupted:
        found.append("tuning was stopped early; run the same command again to go on from the records")
    used = [operator for operator in choice.plan.operators if operator in choice.unmeasured]
    if used:
        found.append(f"{len(used)} of {len(choice.plan.operators)} kernels have no record: the cost model chose them")
    if tuned.unsolved:
        failed = [node.name for node in job.graph.nodes if node.operator in tuned.unsolved]
        found.append(f"no kernel of ours worked for {', '.join(failed)}: left to TVM")
    if why_unchecked is not None:
        found.append(why_unchecked)
    return [*found, *told_in_floats(job.model.in_floats)]
