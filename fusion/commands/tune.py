"""``python -m fusion tune``: an ONNX file to a build directory, fused where it measures faster."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import TuningError
from costmodel.base.folder_lock import lock_folder
from costmodel.base.whole_file import remove_partials, write_whole
from fusion.acceptance.error_budget import BudgetExceeded
from fusion.acceptance.final_networks import UNFUSED_NETWORK, FinalNetwork, Finals, finalists, race, to_json
from fusion.acceptance.network_check import (
    CAREFUL,
    NetworkCheck,
    build_network,
    first_check,
    started,
    started_reference,
    workload,
)
from fusion.acceptance.output_check import Verdict, lost_values
from fusion.acceptance.peer_engines import HiredPeers, check_peers, hire_peers
from fusion.acceptance.precision_choice import PrecisionPlan
from fusion.acceptance.time_limit import (
    FINAL_COMPILATION,
    LEAST_FINALISTS,
    StageClock,
    TimeLimit,
    end_of,
    race_sampling,
)
from fusion.acceptance.tune_job import Job, TuneRequest, careful_configs, complete_configs, plausible_sites, read_model
from fusion.analysis.target_machine import another_cpu
from fusion.artifact.build_folder import MODEL, STAGING, UNFUSED_MODULE, describe, prepare_directory, read_artifact
from fusion.artifact.profile_folders import ProfileBuild, describe_inputs, write_profiles, write_single
from fusion.commands.result_pictures import draw_frontiers
from fusion.commands.tune_int8 import QUANTISING, Quantised, quantised_plan, quantised_request
from fusion.commands.tune_precision import (
    FLOAT32_NETWORK,
    PrecisionReport,
    checked_precision,
    precision_plan,
    with_raced,
)
from fusion.comparing.engines.engine_table import REFERENCE
from fusion.comparing.engines.engine_worker import EngineFailed, Worker
from fusion.comparing.lost_layers import LostLayers, lost_layers
from fusion.comparing.output_errors import OutputErrors, output_errors
from fusion.comparing.probes import broken_inputs
from fusion.model.named_arrays import random_arrays
from fusion.model.precision import BFLOAT16, precision_of
from fusion.relax.onnx.float_layers import told_in_floats
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from costmodel.cpu.learned_residual import ResidualModel
    from costmodel.machines.machine_records import Machine
    from costmodel.operators.layers import Operator
    from fusion.comparing.rounds import Sampling
    from fusion.relax.machine_code import CompiledModule
    from fusion.relax.memory_plan import MemoryPlan
    from fusion.search.network_tuning import TunedKernels
    from schedules.contract.cpu_target import CpuTarget

RECORDS = "records"
CHECKING = ".checking-"  # how the name of a temporary folder begins
PLANNED_BYTES = ("activation_bytes", "weight_bytes", "scratch_bytes")


@dataclass(frozen=True, eq=False)
class TuneResult:
    """The finals of a job: networks by name, their libraries, and what was found. ``errors``: of the winner, against
    ONNX Runtime on random inputs.

    ``memory``: planned for each network; ``growth``: what each engine's process took more when it first ran, in bytes
    (``None``: not told). ``careful``: built without fast algorithms, which round too much for this model. ``peers``:
    other engines that were asked for. ``rounded_errors``: of the winner where layers are in bfloat16, on the inputs
    that count. ``lost``: by which layers another engine is faster than the winner; ``unkept``: where NaN goes in and
    does not come out.
    """

    networks: Mapping[str, FinalNetwork]
    libraries: Mapping[str, Path]
    finals: Finals
    verdict: Verdict
    errors: OutputErrors
    memory: Mapping[str, MemoryPlan | None]
    growth: Mapping[str, int | None]
    careful: bool = False
    peers: HiredPeers = HiredPeers()
    rounded_errors: OutputErrors | None = None
    lost: LostLayers = LostLayers()
    unkept: Sequence[str] = ()

    @property
    def shipped(self) -> FinalNetwork:
        """The network that was written."""
        return self.networks[self.finals.winner]


def tune_model(request: TuneRequest, display: TuningDisplay) -> dict[str, Any]:
    """Tunes ``request.model`` into ``request.output`` and returns the content of its ``summary.json``.

    Ctrl-C while kernels are tuned builds the best found so far (``interrupted`` in the summary says so). Raises
    ``ProjectError``: nothing but the tuning records is left then.
    """
    started = time.monotonic()
    clock = StageClock(started)
    end = end_of(request.minutes, started)
    display.ends_at(end)
    asked = checked_precision(request, display)
    with ExitStack() as stack:
        stack.enter_context(claimed_directory(request.output))
        request, quantised = stack.enter_context(quantised_request(asked, lambda: _described(asked, display), display))
        if quantised is not None:
            clock.ended("quantising")
        jobs = read_model(request, display)
        clock.ended("read")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=CHECKING, dir=request.output)))
        for job in jobs:
            stack.enter_context(batch_file(job))
            check_peers(workload(job.file, job.model, job.cpu, scratch), request.against, request.quantized)
        folders = [scratch_folder(scratch, job) for job in jobs]
        plans = [
            stack.enter_context(planned(job, asked, quantised, folder, announced(job, display)))
            for job, folder in zip(jobs, folders, strict=True)
        ]
        jobs = [asked_for(job, plan) for job, plan in zip(jobs, plans, strict=True)]
        # All of them before any is tuned: a refusal costs seconds.
        checks = [
            first_check(job, folder, announced(job, display), None if plan is None else plan.of_all_layers)
            for job, folder, plan in zip(jobs, folders, plans, strict=True)
        ]
        clock.ended("first check")
        builds: list[ProfileBuild] = []
        for done, (job, check, plan) in enumerate(zip(jobs, checks, plans, strict=True)):
            began = time.monotonic() if done else started
            clock = StageClock(began) if done else clock
            # What one profile leaves of its share goes to the others.
            share = began + (end - began) / (len(jobs) - done)
            stopped = any(build.summary["interrupted"] for build in builds)
            job, tuned, result, report = tune_planned(job, check, plan, share, stopped, announced(job, display), clock)
            summary = summarize(job, tuned, check, result, time.monotonic() - began, report)
            builds.append(profile_build(job, result, {**summary, "stage_seconds": dict(clock.seconds)}))
        return write_builds(request, builds, started)


def write_builds(request: TuneRequest, builds: Sequence[ProfileBuild], started: float) -> dict[str, Any]:
    """Writes one build, or several profiles and what they have in common; returns the content of ``summary.json``."""
    if len(builds) == 1:
        write_single(request.output, builds[0])
        draw_frontiers({request.output: builds[0].summary})
        return dict(builds[0].summary)
    from fusion.commands.summary import profiles_document

    document = profiles_document({build.folder: build.summary for build in builds}, time.monotonic() - started)
    write_profiles(request.output, builds, document)
    draw_frontiers({request.output / build.folder: build.summary for build in builds})
    return document


def planned(
    job: Job, asked: TuneRequest, quantised: Quantised | None, scratch: Path, display: TuningDisplay
) -> AbstractContextManager[PrecisionPlan | None]:
    """What ``job`` is asked for besides float32, as it was ``asked`` by the user."""
    return (
        precision_plan(job, scratch, display) if quantised is None else quantised_plan(job, asked, quantised, scratch)
    )


def asked_for(job: Job, plan: PrecisionPlan | None) -> Job:
    """``job`` with the layers in bfloat16 that are to be there whatever is measured."""
    settled = plan is not None and plan.of_all_layers is not None and plan.dtype == BFLOAT16
    return job.stored(plan.layers, BFLOAT16) if plan is not None and settled else job


def _described(request: TuneRequest, display: TuningDisplay) -> tuple[CpuTarget, Machine]:
    """This CPU and its machine."""
    from fusion.analysis.target_machine import machine_for
    from schedules.contract.cpu_target import host_target

    cpu = host_target(request.threads)
    return cpu, machine_for(request.machine, cpu.threads, display.say)


def tune_planned(
    job: Job,
    check: NetworkCheck,
    plan: PrecisionPlan | None,
    end: float,
    stopped: bool,
    display: TuningDisplay,
    clock: StageClock,
) -> tuple[Job, TunedKernels, TuneResult, PrecisionReport | None]:
    """:func:`tune_profile` in the precision that is asked for; the job of what was shipped comes first."""
    if plan is not None and plan.of_all_layers is None:
        from fusion.commands.tune_auto import tune_auto

        return tune_auto(job, check, plan, end, stopped, display, clock)
    tuned, result = tune_profile(job, check, end, stopped, display, clock)
    if plan is None:
        return job, tuned, result, None
    choice = plan.choice and with_raced(plan.choice, result.finals.entry(result.finals.winner).median_seconds)
    return job, tuned, result, PrecisionReport(plan, result.rounded_errors, choice)


def tune_profile(
    job: Job, check: NetworkCheck, end: float, stopped: bool, display: TuningDisplay, clock: StageClock
) -> tuple[TunedKernels, TuneResult]:
    """Tunes the kernels of one profile and holds its finals, until ``end`` on the clock of ``time.monotonic``."""
    limit = time_limit(job, check, end)
    if check.careful:  # no trial is spent on what cannot be shipped
        job = replace(job, guesses=job.guesses.carefully())
    tuned = tune_kernels(
        job, limit.tuning_seconds, display, stopped, lambda known: finals_limit(job, check, limit, known).tuning_seconds
    )
    clock.ended("tuning")
    limit = finals_limit(job, check, limit, tuned)
    networks = finalists(
        job.graph,
        job.sites,
        tuned,
        with_partly=limit.allows(LEAST_FINALISTS + 1),
        with_unfused=limit.allows(LEAST_FINALISTS),
    )
    return tuned, run_finals(job, networks, tuned, check, limit.race_end, display, clock)


def time_limit(job: Job, check: NetworkCheck, end: float) -> TimeLimit:
    """What the finals may need at most, as far as the first network tells: every kernel is another one by then."""
    cost, fusable = check.cost, bool(plausible_sites(job))
    return TimeLimit(
        end=end,
        check_seconds=cost.other_seconds,
        extra_checks=len(check.exposes[:1]),
        run_seconds=cost.run_seconds,
        finalists=LEAST_FINALISTS if fusable else 1,
        most_compile_seconds=(FINAL_COMPILATION if fusable else 1.0) * cost.compile_seconds,
    )


def finals_limit(job: Job, check: NetworkCheck, limit: TimeLimit, tuned: TunedKernels) -> TimeLimit:
    """``limit`` for the finals of what is known by now: so many networks, of so many kernels to compile."""
    networks = finalists(job.graph, job.sites, tuned)
    compilation = check.compilation_seconds((each.plan, each.configs) for each in networks)
    return replace(limit, compile_seconds=compilation, finalists=len(networks))


def announced(job: Job, display: TuningDisplay) -> TuningDisplay:
    """``display``, after the name of the profile where there are several."""
    if job.folder != job.request.output:
        display.say(f"profile {describe_inputs(job.model.inputs)}")
    return display


def scratch_folder(scratch: Path, job: Job) -> Path:
    """A folder inside ``scratch`` that no other profile uses."""
    if job.folder == job.request.output:
        return scratch
    folder = scratch / job.folder.name
    folder.mkdir()
    return folder


def tune_kernels(
    job: Job,
    seconds: float | None,
    display: TuningDisplay,
    stopped: bool = False,
    spare: Callable[[TunedKernels], float | None] | None = None,
) -> TunedKernels:
    """Measures fused and separate kernels, for ``seconds`` at most; every result is in the build directory's records
    at once. ``stopped``: nothing more is measured, the records are read. ``spare``: as of a
    :class:`fusion.search.network_tuning.TuningBudget`.
    """
    from fusion.search.network_tuning import NetworkTuner, TuningBudget
    from schedules.measuring.measure_runner import Runner
    from schedules.records.record_store import RecordStore

    cost_model = ranking_model(job)
    budget = TuningBudget(job.request.trials, seconds, spare)
    distinct = {node.operator for node in job.graph.nodes} | {site.operator for site in job.sites}
    display.say(f"{len(job.graph.nodes)} layers, {len(job.sites)} fusable sites, {len(distinct)} distinct kernels")
    records = RecordStore(job.request.output / RECORDS, job.cpu, job.guesses.allows)
    with records as store, Runner(job.cpu) as runner:
        store.claim()
        tuner = NetworkTuner(
            job.graph,
            plausible_sites(job),
            store,
            job.cpu,
            cost_model,
            runner,
            display.trial,
            display.say,
            job.guesses,
            predicted_seconds(job),
        )
        tuned = tuner.known(interrupted=True) if stopped else tuner.tune(budget)
        display.finish_trials()
    if tuned.trials:
        cost_model.save(job.request.output / RECORDS / "cost_model")
    if tuned.interrupted and not stopped:
        display.say("stopped: building the best found so far (Ctrl-C again to leave without)")
    return tuned


def predicted_seconds(job: Job) -> dict[Operator, float]:
    """The roofline of every kernel in question: with which ones to begin, before any is measured."""
    from costmodel.cpu.roofline import RooflineModel
    from fusion.analysis.analyzer import network_bytes

    operators = [node.operator for node in job.graph.nodes] + [site.operator for site in job.sites]
    distinct = list(dict.fromkeys(operators))
    estimates = RooflineModel(job.machine, job.cpu.threads, network_bytes(job.graph)).estimate(distinct)
    return {operator: estimate.seconds for operator, estimate in zip(distinct, estimates, strict=True)}


def ranking_model(job: Job) -> ResidualModel:
    """The cost model that says which configurations to try first, and learns from those that were."""
    from costmodel.cpu.learned_residual import ResidualModel
    from costmodel.cpu.roofline import RooflineModel
    from fusion.analysis.analyzer import network_bytes
    from schedules.kernels.template_table import config_terms

    roofline = RooflineModel(job.machine, job.cpu.threads, network_bytes(job.graph))
    # One training thread: a pool of them would still spin while a kernel is timed.
    terms = partial(config_terms, cpu=job.cpu)
    return ResidualModel(roofline, key=job.cpu.key, config_terms=terms, before=job.guesses.ranking)


def run_finals(
    job: Job,
    networks: Sequence[FinalNetwork],
    tuned: TunedKernels,
    check: NetworkCheck,
    end: float,
    display: TuningDisplay,
    clock: StageClock,
) -> TuneResult:
    """Builds the networks, checks the outputs of each, and times them and ONNX Runtime in turns.

    Without fast algorithms where one of them errs too much.
    """
    networks = [
        replace(each, configs=complete_configs(each.plan, job.guesses, each.configs, tuned.unsolved))
        for each in networks
    ]
    failure: TuningError | None = None
    if not check.careful:
        try:
            return race_networks(job, networks, tuned, check, end, display, clock)
        except BudgetExceeded:
            raise
        except TuningError as error:
            failure = error
    careful = [replace(each, configs=careful_configs(each.configs, job.cpu, tuned.careful)) for each in networks]
    if failure is not None:
        if all(map(FinalNetwork.same_as, networks, careful)):
            raise failure
        display.say(CAREFUL)
    return race_networks(job, careful, tuned, replace(check, careful=True), end, display, clock)


def race_networks(
    job: Job,
    networks: Sequence[FinalNetwork],
    tuned: TunedKernels,
    check: NetworkCheck,
    end: float,
    display: TuningDisplay,
    clock: StageClock,
) -> TuneResult:
    """:func:`run_finals` of these ``networks`` alone; ``TuningError`` if outputs of one are wrong."""
    display.stage("building")
    libraries: dict[str, Path] = {}
    memory: dict[str, MemoryPlan | None] = {}
    with ExitStack() as stack:
        # Processes are started by this thread: they end with the one that made them.
        loading = stack.enter_context(ThreadPoolExecutor(len(networks) + 1))
        runtime, load = stack.enter_context(started_reference(job.file, job.model, job.cpu, check.scratch))
        pending = [loading.submit(load)]
        workers: dict[str, Worker] = {}
        for network in networks:
            directory = Path(tempfile.mkdtemp(prefix="final-", dir=check.scratch))
            executable: _Compiled | CompiledModule
            first = check.of(network.name).first
            if first is not None and first.is_made_of(network.plan, network.configs):
                executable = _Compiled(first.library, first.memory)
            else:
                executable = build_network(job.file, job.model, network.plan, network.configs, job.cpu, check.objects)
            build = started(job.file, job.model, executable, directory, job.cpu)
            workers[network.name], load = stack.enter_context(build)
            pending.append(loading.submit(load))
            libraries[network.name] = directory / MODEL
            memory[network.name] = executable.memory
        for each in pending:
            each.result()
        clock.ended("final builds")
        display.stage("checking the outputs, and timing whole networks and ONNX Runtime in turns")
        verdicts = {name: check.of(name).require(name, worker) for name, worker in workers.items()}
        rounded = {name: check.of(name).require_budget(name, worker) for name, worker in workers.items()}
        clock.ended("final checks")
        sampling = race_sampling(check.cost.run_seconds)
        seen = workload(job.file, job.model, job.cpu, check.scratch)
        peers = hire_peers(stack, seen, job.request.against, job.request.quantized, display.say)
        rivals = {REFERENCE: runtime, **peers.workers}
        finals, outputs = time_networks(job, networks, workers, rivals, end, sampling, display)
        unkept = lost_in(job, workers[finals.winner], runtime)
        growth = {name: worker.growth() for name, worker in {**workers, REFERENCE: runtime}.items()}
        lost = LostLayers(missing=("no time left to time layers; `compare --layers` does",))
        if time.monotonic() < end or job.request.minutes == 0:
            lost = lost_layers(
                job.file,
                random_arrays(job.model.inputs),
                (workers[finals.winner], finals.entry(finals.winner).median_seconds),
                {name: (rivals[name], seconds) for name, seconds in finals.others.items()},
                say=display.say,
            )
        clock.ended("final comparison")
    winner = {network.name: network for network in networks}[finals.winner]
    verdict = verdicts[winner.name]
    own = check.of(winner.name)
    if own.exposes:  # what saturates at the end hides the rest: look before it as well
        groups = {tuple(node.name for node in group.nodes) for group in winner.plan.groups}
        plan = own.subject.plan(lambda site: tuple(node.name for node in site.nodes) in groups)
        configs = complete_configs(plan, job.guesses, winner.configs, tuned.unsolved)
        if check.careful:
            configs = careful_configs(configs, job.cpu, tuned.careful)
        verdict = max(verdict, own.require_plan(winner.name, plan, configs)[0], key=lambda each: each.share)
        clock.ended("last check")
    errors = output_errors(outputs[winner.name], outputs[REFERENCE])
    found = {network.name: network for network in networks}
    return TuneResult(
        found, libraries, finals, verdict, errors, memory, growth, check.careful, peers, rounded[winner.name], lost,
        unkept,
    )  # fmt: skip


def lost_in(job: Job, winner: Worker, runtime: Worker) -> list[str]:
    """Where the winner has a number and ONNX Runtime NaN, on inputs with NaN or infinity in them."""
    try:
        return [
            line
            for name, inputs in broken_inputs(job.model.inputs).items()
            for line in lost_values(name, winner.run(inputs), runtime.run(inputs))
        ]
    except EngineFailed as error:
        return [f"on an input with NaN or infinity an engine failed: {error}"]


def time_networks(
    job: Job,
    networks: Sequence[FinalNetwork],
    workers: Mapping[str, Worker],
    rivals: Mapping[str, Worker],
    end: float,
    sampling: Sampling,
    display: TuningDisplay,
) -> tuple[Finals, dict[str, Any]]:
    """The finals, among ``rivals`` that are no candidates, and what every network and ONNX Runtime compute on random
    inputs. ``TuningError`` if one of these fails.
    """
    inputs = random_arrays(job.model.inputs)
    everyone = {**workers, REFERENCE: rivals[REFERENCE]}
    try:
        outputs = {name: worker.bind(inputs)[1] for name, worker in everyone.items()}
        candidates = {network.name: (network.fused_sites, workers[network.name]) for network in networks}
        return race(candidates, rivals, end, sampling, display.say), outputs
    except EngineFailed as error:
        raise TuningError(
            f"{job.request.model}: a network failed while it was timed: {error}; "
            "run the same command again, records are kept"
        ) from error


def summarize(
    job: Job,
    tuned: TunedKernels,
    check: NetworkCheck,
    result: TuneResult,
    seconds: float,
    report: PrecisionReport | None = None,
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    from fusion.commands.network_record import network_record
    from fusion.commands.summary import TuningEffort, document, site_rows

    finals, selected = result.finals, tuned.plan(job.graph, job.sites)
    # Without a fused site both modules are the same file; without time the network without fusion was not built.
    compared = [name for name in result.networks if name == UNFUSED_NETWORK]
    apart = finals.entry(finals.winner if not result.shipped.fused_sites else (compared or [finals.winner])[0])
    separate = {"tuned_without_fusion": apart.median_seconds} if compared or not result.shipped.fused_sites else {}
    return document(
        model=str(job.request.model),
        inputs=job.model.inputs,
        machine=job.machine,
        cpu=job.cpu,
        sites=site_rows(job.analysis, job.sites, tuned, selected, result.shipped.plan),
        latency={
            "tuned": finals.entry(finals.winner).median_seconds,
            **separate,
            **{entry.name: entry.median_seconds for entry in finals.entries if entry.name == FLOAT32_NETWORK},
            "onnxruntime": finals.others[REFERENCE],
            **{name: finals.others[name] for name in result.peers.rows if name in finals.others},
        },
        peers=result.peers.to_json(finals.others),
        layers=result.lost.table,
        finals=to_json(finals),
        check=check.outputs.to_json(result.verdict, check.exposes),
        errors=result.errors,
        memory=memory_rows(result),
        others=job.analysis.others,
        notes=[*notes(job, tuned, check, result), *([] if report is None else report.notes)],
        effort=TuningEffort(tuned.trials, tuned.failures, seconds, tuned.interrupted),
        precision={"shipped": precision_of(job.graph), **({} if report is None else report.to_json(job))},
        network=network_record(
            job.graph, result.shipped.plan, tuned.comparable_seconds(), job.machine, job.cpu.threads
        ),
        curve=tuned.curve,
    )


def memory_rows(result: TuneResult) -> dict[str, dict[str, int | None]]:
    """Bytes that the shipped network, the one without fusion and ONNX Runtime take."""
    apart = UNFUSED_NETWORK if result.shipped.fused_sites else result.finals.winner
    rows: dict[str, dict[str, int | None]] = {}
    for row, name in (("tuned", result.finals.winner), ("tuned_without_fusion", apart), (REFERENCE, REFERENCE)):
        plan = result.memory.get(name)
        planned = dict.fromkeys(PLANNED_BYTES) if plan is None else asdict(plan)
        rows[row] = {**planned, "growth_bytes": result.growth.get(name)}
    return rows


def notes(job: Job, tuned: TunedKernels, check: NetworkCheck, result: TuneResult) -> list[str]:
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
    if result.finals.winner == FLOAT32_NETWORK:
        found.append("the network in float32 was the fastest: it is shipped, with the fusions that were found for it")
    elif UNFUSED_NETWORK not in result.networks:
        found.append("no time to build the network without fusion: which sites are fused is predicted, not measured")
    shipped = result.shipped
    selected = sum(group.is_fused for group in tuned.plan(job.graph, job.sites).groups)
    if shipped.fused_sites < selected:
        how = f"with {shipped.fused_sites} of them alone" if shipped.fused_sites else "without fusion"
        found.append(f"the whole network was not faster with all {selected} selected sites fused: it is shipped {how}")
    if (difference := another_cpu(job.machine)) is not None:
        found.append(difference)
    if result.careful:
        found.append(CAREFUL)
    found += [*result.peers.notes, *result.lost.missing, *told_in_floats(job.model.in_floats)]
    if not result.finals.told_apart and len(result.finals.entries) > 1:
        found.append("the networks compared at the end cannot be told apart on this machine as it is now")
    found += [*check.outputs.nothing_finite(), *result.unkept]
    if check.outputs.unchecked is not None:
        found.append(f"outputs were compared with ONNX Runtime's alone: {check.outputs.unchecked}")
    return found


def profile_build(job: Job, result: TuneResult, summary: Mapping[str, Any]) -> ProfileBuild:
    """The checked modules, manifest and summary of one profile."""
    import tvm

    precision = precision_of(job.graph)
    manifest = describe(
        job.file, job.model.inputs, job.model.outputs, job.cpu, tvm.__version__, precision=precision
    )  # fmt: skip
    modules = {MODEL: _Compiled(result.libraries[result.shipped.name])}
    if UNFUSED_NETWORK in result.libraries:
        modules[UNFUSED_MODULE] = _Compiled(result.libraries[UNFUSED_NETWORK])
    if not result.shipped.fused_sites:
        modules[UNFUSED_MODULE] = modules[MODEL]  # the faster one of two networks without fusion
    return ProfileBuild(job.folder.name, manifest, modules, summary)


@contextmanager
def batch_file(job: Job) -> Iterator[None]:
    """The copy of the model for another batch, which the build's comparisons read; taken away again by a failure."""
    from fusion.relax.onnx.onnx_prepare import static_model

    if job.file == job.request.model:
        yield
        return
    static = static_model(job.request.model, job.profile.shapes, job.profile.batch)
    with output_directory(job.folder):
        known = job.file.exists()  # then a build that is there already may need it
        write_whole(job.file, static.SerializeToString())
        try:
            yield
        except BaseException:
            if not known:
                job.file.unlink(missing_ok=True)
            raise


@dataclass(frozen=True)
class _Compiled:
    """A library that exists already, as an :class:`Executable`."""

    path: Path
    memory: MemoryPlan | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """What its kernels compute, from the manifest beside it."""
        return read_artifact(self.path.parent).manifest.layers.get(self.path.name, ())

    def export_library(self, file_name: str) -> None:
        shutil.copyfile(self.path, file_name)


@contextmanager
def claimed_directory(directory: Path) -> Iterator[None]:
    """:func:`output_directory` for this process alone: ``OutputError`` names another one that tunes into it. Temporary
    folders of those that were killed are taken away.
    """
    with output_directory(directory), lock_folder(directory, "a build") as lock:
        lock.clear(f"{CHECKING}*", f"{STAGING}*", f"{QUANTISING}*")
        remove_partials(directory)
        yield


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
