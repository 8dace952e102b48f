"""Procedure of ``tune``: from a request to a build folder, for this CPU or for another one.

For another CPU kernels are measured on remote servers, or taken from records. Outputs are compared here only if this
CPU has the required features. Whole networks are not timed: fusions are selected by kernel times, those without a
record by the cost model. The summary of the build states both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError
from costmodel.base.output_files import lock_folder, remove_partials
from costmodel.base.process import threads_to_use
from costmodel.machines.machine_file import load_machine, write_machine
from fusion.analysis.target_machine import Target, machine_for, this_cpu
from fusion.model.build_folder import (
    MODEL,
    STAGING,
    UNFUSED_MODULE,
    ProfileBuild,
    make_manifest,
    output_directory,
    write_profiles,
    write_single,
)
from fusion.model.conv_graph import BFLOAT16, FusionPlan, layers_in, precision_of, select, unfused_plan
from fusion.relax.onnx.quantised_model import float_layer_notes
from fusion.tuning.clock import FINAL_COMPILATION, StageClock, TimeLimit, TuningDisplay, end_of
from fusion.tuning.job import RECORDS, TuningJob
from fusion.tuning.mixed_job import MixedJob, search_mixed
from fusion.tuning.network import (
    Network,
    TuneRequest,
    careful_configs,
    complete_configs,
    plausible_sites,
    read_networks,
)
from fusion.tuning.network_check import CheckCost, NetworkCheck, build_network, load_in_process
from fusion.tuning.precision import PrecisionReport
from fusion.tuning.quantization import QUANTISING, quantised_request
from fusion.tuning.summary import document, profiles_document
from schedules.contract.tvm_import import tvm_threads

if TYPE_CHECKING:
    from costmodel.machines.machine_records import Machine
    from costmodel.operators.layers import Operator
    from fusion.acceptance.output_check import Verdict
    from fusion.relax.machine_code import CompiledModule
    from fusion.tuning.network_tuning import TunedKernels
    from schedules.contract.template import Config
    from schedules.measuring.remote_runner import RemoteRunner


MACHINE_FILE = "machine.yaml"


@dataclass(frozen=True, eq=False)
class PredictedNetwork:
    """Network selected by kernel times: its plan, the configurations of all kernels, and the kernels without a
    record.
    """

    plan: FusionPlan
    configs: dict[Operator, Config]
    unmeasured: tuple[Operator, ...]


class AnotherCpuJob(TuningJob):
    """One network tuned for another CPU, on the servers of ``runner`` or, without one, from its records."""

    def __init__(
        self,
        network: Network,
        scratch: Path,
        clock: StageClock,
        display: TuningDisplay,
        runner: RemoteRunner | None,
    ) -> None:
        super().__init__(network, scratch, clock, display)
        self.runner = runner
        self.checked: NetworkCheck | None = None  # None: the build does not run here
        self.choice: PredictedNetwork
        self.verdict: Verdict  # of the worse of both networks, if they run here
        self.built: dict[str, CompiledModule] = {}

    def check_first(self) -> None:
        """Check as for this CPU if the code runs here; errors of rounded layers are measured by ONNX Runtime in any
        case.
        """
        plan, rounded = self.plan, layers_in(self.network.graph, BFLOAT16)
        if plan is not None and plan.settled_limit is not None and (runs := plan.limit.runs) is not None:
            plan.limit.require(self.network.request.model, "rounded", lambda inputs: runs.outputs(inputs, rounded))
        if self.network.target.not_run_here is None:
            super().check_first()
            self.checked = self.check

    def search(self, end: float) -> None:
        self.end = end
        if self.checked is not None:
            self.avoid_rounding()
        plan = self.plan
        if plan is None or plan.settled_limit is not None:
            self.tuned = self.measure(self.network, self.time_limit().tuning_seconds)
            choice = None if plan is None else plan.choice
        else:
            found = search_mixed(self, plan, lambda: self.time_limit().tuning_seconds)
            self.tuned, choice = found.plain, found.choice
            if found.mixed is not None:
                self.network, self.tuned = found.mixed.network, found.mixed.tuned
                if self.checked is not None:
                    self.checked = self.checked.with_rounded(layers_in(self.network.graph, BFLOAT16), plan.limit)
        if plan is not None:
            # Errors by ONNX Runtime here; for a quantised model its quantiser has measured them.
            rounded = layers_in(self.network.graph, BFLOAT16)
            errors = plan.limit.measured.errors_of(rounded) if rounded and plan.limit.runs is not None else None
            self.report = PrecisionReport(plan, errors, choice)

    def time_limit(self) -> TimeLimit:
        """Time limit with the compilation of both final networks, without a race."""
        cost = CheckCost(0.0, 0.0) if self.checked is None else self.checked.cost
        return TimeLimit(self.end, cost.other_seconds, most_compile_seconds=FINAL_COMPILATION * cost.compile_seconds)

    def measure(
        self,
        network: Network,
        seconds: float | None,
        spare: Callable[[TunedKernels], float | None] | None = None,
    ) -> TunedKernels:
        """Results for the kernels: measured on the servers for at most ``seconds``, or from the records."""
        from fusion.tuning.network_tuning import TuningBudget
        from schedules.measuring.measure_runner import Runner
        from schedules.tuning.tuning_records import RecordStore

        request = network.request
        with RecordStore(request.output / RECORDS, network.cpu, network.guesses.allows) as store:
            runner = self.runner or Runner(network.cpu)  # the local runner is never started
            tuner = self.tuner(network, store, network.ranking_model(), runner)
            if self.runner is None or self.stopped:
                return tuner.known(interrupted=self.stopped)
            store.claim()
            tuned = tuner.tune(TuningBudget(request.trials, seconds, spare))
            self.display.finish_trials()
        return tuned

    def finals(self) -> None:
        """Build the chosen network and the one without fusion; check them if they run here."""
        from fusion.relax.machine_code import KernelObjects

        self.display.stage("building")
        network, tuned, check = self.network, self.tuned, self.checked
        self.choice = choice = choose_network(network, tuned)
        plain = unfused_plan(network.graph)
        apart = complete_configs(plain, network.guesses, choice.configs, tuned.unsolved)
        chosen: Mapping[Operator, Config] = choice.configs
        if check is not None and check.careful:
            chosen, apart = (careful_configs(each, network.cpu, tuned.careful) for each in (chosen, apart))
        objects = KernelObjects(self.scratch / "kernels", network.cpu) if check is None else check.objects
        self.built = {
            name: build_network(network.file, network.model, plan, configs, network.cpu, objects)
            for name, plan, configs in ((MODEL, choice.plan, chosen), (UNFUSED_MODULE, plain, apart))
        }
        if check is not None:
            self.verdict = max(
                (self._verdict(check, each) for each in self.built.values()), key=lambda each: each.share
            )

    def _verdict(self, check: NetworkCheck, built: CompiledModule) -> Verdict:
        """Check the outputs of ``built``; raise ``TuningError`` if they are wrong."""
        network = self.network
        with (
            tempfile.TemporaryDirectory(prefix="final-", dir=self.scratch) as directory,
            load_in_process(network.file, network.model, built, Path(directory), network.target) as worker,
        ):
            return check.require("built", worker)

    def build(self) -> ProfileBuild:
        import tvm

        network = self.network
        summary = self.summary()
        manifest = make_manifest(
            network.file, network.model.inputs, network.model.outputs, network.cpu, tvm.__version__,
            measured=False, checked=self.checked is not None, precision=precision_of(network.graph),
        )  # fmt: skip
        return ProfileBuild(network.folder.name, manifest, self.built, summary)

    def summary(self) -> dict[str, Any]:
        network, tuned, check = self.network, self.tuned, self.checked
        rows = ("tuned", "tuned_without_fusion")
        memory: dict[str, dict[str, int | None]] = {}
        for row, built in zip(rows, self.built.values(), strict=True):
            memory[row] = {**(asdict(built.memory) if built.memory is not None else {}), "growth_bytes": None}
        checked: dict[str, Any] = {"reference": None, "why_not": network.target.not_run_here}
        if check is not None:
            checked = check.outputs.to_json(self.verdict, check.exposes)
        return document(
            network,
            tuned,
            selected=self.choice.plan,
            shipped=self.choice.plan,
            seconds=tuned.seconds,
            latency=dict.fromkeys((*rows, "onnxruntime")),
            finals={"shipped": "selected", "decided": False, "networks": []},
            check=checked,
            memory=memory,
            precision={} if self.report is None else self.report.to_json(network),
            notes=self.notes(),
            wall_seconds=time.monotonic() - self.clock.started,
        )

    def notes(self) -> list[str]:
        network, used = self.network, self.choice.plan.operators
        where = ""
        if self.runner is not None:
            where = f"; kernels were measured on {self.runner.servers} server(s) of {network.request.key}"
        built = f"built for {network.cpu.mcpu} with {network.cpu.threads} threads, not for this CPU"
        found = [f"{built}: whole networks were not timed{where}", *self.tuning_notes()]
        unmeasured = [operator for operator in used if operator in self.choice.unmeasured]
        if unmeasured:
            found.append(f"{len(unmeasured)} of {len(used)} kernels have no record: the cost model chose them")
        if network.target.not_run_here is not None:
            found.append(network.target.not_run_here)
        return [*found, *float_layer_notes(network.model.in_floats)]


def choose_network(network: Network, tuned: TunedKernels) -> PredictedNetwork:
    """Network selected by kernel times; for kernels without a record, time and configuration are predicted."""
    from costmodel.cost_model import Measurement
    from schedules.kernels.template_table import template_for

    model = network.ranking_model()
    model.update([Measurement(each, tuned.configs[each], seconds) for each, seconds in tuned.seconds.items()])
    operators: dict[Operator, None] = {}
    operators.update(dict.fromkeys(node.operator for node in network.graph.nodes))
    sites = plausible_sites(network)
    operators.update(dict.fromkeys(site.operator for site in sites))
    unknown = [each for each in operators if each not in tuned.seconds and each not in tuned.unsolved]
    estimates = model.estimate(unknown) if unknown else []
    seconds: dict[Operator, float] = dict(tuned.seconds)
    seconds.update((each, found.seconds) for each, found in zip(unknown, estimates, strict=True))
    plan = select(network.graph, sites, {each: time for each, time in seconds.items() if each not in tuned.unsolved})
    configs = dict(tuned.configs)
    for operator in unknown:
        template = template_for(operator, network.cpu)
        if template is not None:
            space = template.space(operator, network.cpu)
            configs[operator] = space[list(model.rank(operator, space))[0]]
    return PredictedNetwork(plan, complete_configs(plan, network.guesses, configs, tuned.unsolved), tuple(unknown))


def open_other_cpu(
    request: TuneRequest, stack: ExitStack, display: TuningDisplay
) -> tuple[Target, RemoteRunner | None]:
    """CPU of ``request.target``, or of the servers at ``request.tracker`` with a runner that is open until ``stack``
    ends.

    Raises ``InputError`` for incompatible options.
    """
    runner = None if request.tracker is None else stack.enter_context(_servers(request, display))
    target = _named(request, display) if runner is None else _remote(request, runner, display)
    if target.not_run_here is not None:
        display.say(target.not_run_here)
    return target, runner


def _servers(request: TuneRequest, display: TuningDisplay) -> RemoteRunner:
    from schedules.measuring.remote_runner import RemoteRunner

    if request.target is not None:
        raise InputError("--target and --tracker: the target of a tracker's servers is asked from them; leave one out")
    assert request.tracker is not None
    if request.key is None:
        raise InputError(f"--tracker {request.tracker}: name the servers with --key")
    return RemoteRunner(request.tracker, request.key, request.threads, display.say)


def _remote(request: TuneRequest, runner: RemoteRunner, display: TuningDisplay) -> Target:
    """CPU of the servers, and its machine model: named, calibrated there before, or calibrated now."""
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
        measured = runner.calibrate()
        write_machine(measured, file, f"Measured quickly on a server of {request.key!r} by `python -m fusion tune`.")
        return measured

    return Target(cpu, machine)


def _named(request: TuneRequest, display: TuningDisplay) -> Target:
    """CPU of ``--target``, and its machine model."""
    from schedules.contract.cpu_target import machine_target, parse_target
    from schedules.tuning.tuning_records import recorded_cpus

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
    return Target(cpu, lambda: described)


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
            target, runner = open_other_cpu(request, stack, display)
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
        return dict(builds[0].summary)
    document = profiles_document({build.folder: build.summary for build in builds}, time.monotonic() - started)
    write_profiles(request.output, builds, document)
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
