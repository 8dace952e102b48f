"""Tuning job of one network; its stages are methods, in order of execution."""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import TuningError
from costmodel.base.output_files import write_whole
from fusion.acceptance.error_budget import BudgetExceeded
from fusion.acceptance.output_check import lost_values
from fusion.comparing.engine import REFERENCE, EngineWorkload
from fusion.comparing.engine_worker import EngineFailed, Worker
from fusion.comparing.layer_table import LostLayers, lost_layers
from fusion.comparing.output_errors import broken_inputs, output_errors
from fusion.model.build_folder import (
    MODEL,
    UNFUSED_MODULE,
    ProfileBuild,
    describe_inputs,
    make_manifest,
    output_directory,
    read_artifact,
)
from fusion.model.conv_graph import BFLOAT16, precision_of
from fusion.model.named_arrays import random_arrays
from fusion.relax.onnx.quantised_model import float_layer_notes
from fusion.tuning.clock import FINAL_COMPILATION, LEAST_FINALISTS, StageClock, TimeLimit, TuningDisplay, race_sampling
from fusion.tuning.finals import (
    FLOAT32_NETWORK,
    UNFUSED_NETWORK,
    FinalNetwork,
    Finals,
    TuneResult,
    check_peers,
    finalists,
    hire_peers,
    race,
)
from fusion.tuning.network import Network, TuneRequest, careful_configs, complete_configs, plausible_sites
from fusion.tuning.network_check import (
    CAREFUL,
    NetworkCheck,
    build_network,
    engine_workload,
    first_check,
    start_in_process,
    start_reference,
)
from fusion.tuning.precision import PrecisionPlan, PrecisionReport, precision_plan, with_raced
from fusion.tuning.quantization import Quantised, quantised_plan
from fusion.tuning.summary import document

if TYPE_CHECKING:
    from fusion.relax.machine_code import CompiledModule, MemoryPlan
    from fusion.tuning.network_tuning import NetworkRunner, NetworkTuner, TunedKernels
    from schedules.tuning.kernel_tuner import Ranker
    from schedules.tuning.tuning_records import RecordStore

RECORDS = "records"
STOPPED_EARLY = "tuning was stopped early; run the same command again to go on from the records"


class TuningJob:
    """One network tuned for this CPU, in float32 or in a precision settled before kernels are measured.

    The stages, in order: :meth:`prepare`, :meth:`check_first`, :meth:`search`, :meth:`finals`, :meth:`build`.
    """

    def __init__(self, network: Network, scratch: Path, clock: StageClock, display: TuningDisplay) -> None:
        """``scratch``: a temporary folder that no other job uses."""
        self.network = network
        self.scratch = scratch
        self.clock = clock
        self.display = display
        self.end = 0.0  # end of the whole job (`time.monotonic`); set by `search`
        self.stopped = False  # Ctrl-C came while another network was tuned: measure nothing more
        self.plan: PrecisionPlan | None = None
        self.report: PrecisionReport | None = None
        self.check: NetworkCheck
        self.tuned: TunedKernels
        self.result: TuneResult

    def announce(self) -> None:
        """Show the input shapes of this network if there are several profiles."""
        if self.network.folder != self.network.request.output:
            self.display.say(f"profile {describe_inputs(self.network.model.inputs)}")

    # --- before measurements: a rejection here costs only seconds -------------------------------------

    def prepare(self, stack: ExitStack, asked: TuneRequest, quantised: Quantised | None) -> None:
        """Prepare measuring the errors of number types. ``asked``: the user's request, before its model was
        ``quantised``.
        """
        request = self.network.request
        stack.enter_context(batch_file(self.network))
        check_peers(self.workload(), request.against, request.quantized)
        self.announce()
        if quantised is None:
            plan = precision_plan(self.network, self.scratch, self.display)
        else:
            plan = quantised_plan(self.network, asked, quantised, self.scratch)
        self.plan = stack.enter_context(plan)
        if self.plan is not None and self.plan.settled_limit is not None and self.plan.dtype == BFLOAT16:
            self.network = self.network.stored(self.plan.layers, BFLOAT16)

    def check_first(self) -> None:
        """Check a first build against the model in double precision."""
        self.announce()
        limit = None if self.plan is None else self.plan.settled_limit
        self.check = first_check(self.network, self.scratch, self.display, limit)

    # --- kernels -----------------------------------------------------------------------------------

    def search(self, end: float) -> None:
        """Measure kernels, alone and inside the network, until the time reserved for the finals before ``end``."""
        self.end = end
        self.announce()
        self.avoid_rounding()
        self.tuned = self.measure(
            self.network,
            self.time_limit().tuning_seconds,
            lambda known: self.finals_limit(known).tuning_seconds,
        )
        self.clock.ended("tuning")

    def avoid_rounding(self) -> None:
        """Exclude algorithms that the first check rejected, so that no trials are spent on them."""
        if self.check.careful:  # without Winograd's algorithm
            self.network = self.network.carefully()

    def measure(
        self,
        network: Network,
        seconds: float | None,
        spare: Callable[[TunedKernels], float | None] | None = None,
    ) -> TunedKernels:
        """Measure kernels of ``network``, fused and separate, for at most ``seconds``; results are stored at once.

        ``spare``: see :class:`fusion.tuning.network_tuning.TuningBudget`.
        """
        from fusion.tuning.network_tuning import TuningBudget
        from schedules.measuring.measure_runner import Runner
        from schedules.tuning.tuning_records import RecordStore

        display, output = self.display, network.request.output
        cost_model = network.ranking_model()
        layers, sites, kernels = len(network.graph.nodes), len(network.sites), len(network.operators)
        display.say(f"{layers} layers, {sites} fusable sites, {kernels} distinct kernels")
        with RecordStore(output / RECORDS, network.cpu, network.guesses.allows) as store, Runner(network.cpu) as runner:
            store.claim()
            tuner = self.tuner(network, store, cost_model, runner)
            budget = TuningBudget(network.request.trials, seconds, spare)
            tuned = tuner.known(interrupted=True) if self.stopped else tuner.tune(budget)
            display.finish_trials()
        if tuned.interrupted and not self.stopped:
            display.say("stopped: building the best found so far (Ctrl-C again to leave without)")
        return tuned

    def tuner(self, network: Network, store: RecordStore, cost_model: Ranker, runner: NetworkRunner) -> NetworkTuner:
        """Create the tuner of the kernels of ``network``."""
        from fusion.tuning.network_tuning import NetworkTuner

        return NetworkTuner(
            network.graph,
            plausible_sites(network),
            store,
            network.cpu,
            cost_model,
            runner,
            self.display.trial,
            self.display.say,
            network.guesses,
            network.predicted_seconds(),
        )

    def time_limit(self) -> TimeLimit:
        """Time limit with the largest need of the finals: that of building and checking the network with all of
        its kernels changed.
        """
        cost, fusable = self.check.cost, bool(plausible_sites(self.network))
        return TimeLimit(
            end=self.end,
            check_seconds=cost.other_seconds,
            extra_checks=len(self.check.exposes[:1]),
            run_seconds=cost.run_seconds,
            finalists=LEAST_FINALISTS if fusable else 1,
            most_compile_seconds=(FINAL_COMPILATION if fusable else 1.0) * cost.compile_seconds,
        )

    def finals_limit(self, tuned: TunedKernels) -> TimeLimit:
        """Time limit with the needs of the finals for the present results: their networks, and the kernels to
        compile.
        """
        networks = finalists(self.network.graph, self.network.sites, tuned)
        compilation = self.check.compilation_seconds((each.plan, each.configs) for each in networks)
        return replace(self.time_limit(), compile_seconds=compilation, finalists=len(networks))

    # --- whole networks ----------------------------------------------------------------------------

    def finals(self) -> None:
        """Build the candidate networks and time them in alternation: the fastest is shipped."""
        limit = self.finals_limit(self.tuned)
        networks = finalists(
            self.network.graph,
            self.network.sites,
            self.tuned,
            with_partly=limit.allows(LEAST_FINALISTS + 1),
            with_unfused=limit.allows(LEAST_FINALISTS),
        )
        self.result = self.race(networks, limit.race_end)
        if self.plan is not None:
            seconds = self.result.finals.entry(self.result.finals.winner).median_seconds
            choice = self.plan.choice and with_raced(self.plan.choice, seconds)
            self.report = PrecisionReport(self.plan, self.result.rounded_errors, choice)

    def race(self, networks: Sequence[FinalNetwork], end: float) -> TuneResult:
        """Build ``networks``, check the outputs of each, and time them and ONNX Runtime in alternation, until ``end``.

        If one has too large errors, all are built without fast algorithms.
        """
        networks = [replace(each, configs=self._complete(each)) for each in networks]
        failure: TuningError | None = None
        if not self.check.careful:
            try:
                return self._race(networks, end, careful=False)
            except BudgetExceeded:
                raise
            except TuningError as error:
                failure = error
        careful = [replace(each, configs=self._careful(each.configs)) for each in networks]
        if failure is not None:
            if all(map(FinalNetwork.same_as, networks, careful)):
                raise failure
            self.display.say(CAREFUL)
        return self._race(careful, end, careful=True)

    def _race(self, networks: Sequence[FinalNetwork], end: float, careful: bool) -> TuneResult:
        """Do :meth:`race` for these ``networks`` once; raise ``TuningError`` if outputs of one are wrong."""
        request, check = self.network.request, self.check
        self.display.stage("building")
        with ExitStack() as stack:
            loaded = self._load(stack, networks)
            self.clock.ended("final builds")
            self.display.stage("checking the outputs, and timing whole networks and ONNX Runtime in turns")
            verdicts = {name: check.of(name).require(name, worker) for name, worker in loaded.workers.items()}
            rounded = {name: check.of(name).require_budget(name, worker) for name, worker in loaded.workers.items()}
            self.clock.ended("final checks")
            peers = hire_peers(stack, self.workload(), request.against, request.quantized, self.display.say)
            rivals = {REFERENCE: loaded.runtime, **peers.workers}
            finals, outputs = self._time(networks, loaded.workers, rivals, end)
            winner = next(each for each in networks if each.name == finals.winner)
            unkept = self._lost_values(loaded.workers[winner.name], loaded.runtime)
            processes = {**loaded.workers, REFERENCE: loaded.runtime}
            growth = {name: worker.growth() for name, worker in processes.items()}
            lost = LostLayers(missing=("no time left to time layers; `compare --layers` does",))
            if time.monotonic() < end or request.minutes == 0:
                lost = lost_layers(
                    self.network.file,
                    random_arrays(self.network.model.inputs),
                    (loaded.workers[winner.name], finals.entry(winner.name).median_seconds),
                    {name: (rivals[name], seconds) for name, seconds in finals.others.items()},
                    say=self.display.say,
                )
            self.clock.ended("final comparison")
        verdict = verdicts[winner.name]
        own = check.of(winner.name)
        if own.exposes:  # saturated final functions hide errors: also compare their arguments
            groups = {tuple(node.name for node in group.nodes) for group in winner.plan.groups}
            plan = own.subject.plan(lambda site: tuple(node.name for node in site.nodes) in groups)
            configs = self._complete(replace(winner, plan=plan))
            if careful:
                configs = self._careful(configs)
            verdict = max(verdict, own.require_plan(winner.name, plan, configs)[0], key=lambda each: each.share)
            self.clock.ended("last check")
        return TuneResult(
            networks={network.name: network for network in networks},
            libraries=loaded.libraries,
            finals=finals,
            verdict=verdict,
            errors=output_errors(outputs[winner.name], outputs[REFERENCE]),
            memory=loaded.memory,
            growth=growth,
            careful=careful,
            peers=peers,
            rounded_errors=rounded[winner.name],
            lost=lost,
            unkept=unkept,
        )

    def _complete(self, network: FinalNetwork) -> Mapping[Any, Any]:
        """Configurations for every kernel of ``network`` that has not failed."""
        return complete_configs(network.plan, self.network.guesses, network.configs, self.tuned.unsolved)

    def _careful(self, configs: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """``configs`` without fast algorithms."""
        return careful_configs(configs, self.network.cpu, self.tuned.careful)

    def _load(self, stack: ExitStack, networks: Sequence[FinalNetwork]) -> _Loaded:
        """Build ``networks``, and load them and ONNX Runtime in processes that end with ``stack``."""
        file, model, target, check = self.network.file, self.network.model, self.network.target, self.check
        # Start the processes in this thread: they end with the thread that started them.
        loading = stack.enter_context(ThreadPoolExecutor(len(networks) + 1))
        runtime, load = stack.enter_context(start_reference(file, model, target, check.scratch))
        pending = [loading.submit(load)]
        loaded = _Loaded(runtime, {}, {}, {})
        for network in networks:
            directory = Path(tempfile.mkdtemp(prefix="final-", dir=check.scratch))
            executable: BuiltLibrary | CompiledModule
            first = check.of(network.name).first
            if first is not None and first.is_made_of(network.plan, network.configs):
                executable = BuiltLibrary(first.library, first.memory)
            else:
                executable = build_network(file, model, network.plan, network.configs, target.cpu, check.objects)
            worker, load = stack.enter_context(start_in_process(file, model, executable, directory, target))
            pending.append(loading.submit(load))
            loaded.workers[network.name] = worker
            loaded.libraries[network.name] = directory / MODEL
            loaded.memory[network.name] = executable.memory
        for each in pending:
            each.result()
        return loaded

    def _time(
        self,
        networks: Sequence[FinalNetwork],
        workers: Mapping[str, Worker],
        rivals: Mapping[str, Worker],
        end: float,
    ) -> tuple[Finals, dict[str, Any]]:
        """Finals of the networks with ``rivals``, and outputs of all networks and ONNX Runtime on random inputs.

        Raises ``TuningError`` if one fails.
        """
        inputs = random_arrays(self.network.model.inputs)
        everyone = {**workers, REFERENCE: rivals[REFERENCE]}
        sampling = race_sampling(self.check.cost.run_seconds)
        try:
            outputs = {name: worker.bind(inputs)[1] for name, worker in everyone.items()}
            candidates = {network.name: (network.fused_sites, workers[network.name]) for network in networks}
            return race(candidates, rivals, end, sampling, self.display.say), outputs
        except EngineFailed as error:
            raise TuningError(
                f"{self.network.request.model}: a network failed while it was timed: {error}; "
                "run the same command again, records are kept"
            ) from error

    def _lost_values(self, winner: Worker, runtime: Worker) -> list[str]:
        """Warnings for numbers in outputs of the winner where ONNX Runtime has NaN, on inputs with NaN or infinity."""
        try:
            return [
                line
                for name, inputs in broken_inputs(self.network.model.inputs).items()
                for line in lost_values(name, winner.run(inputs), runtime.run(inputs))
            ]
        except EngineFailed as error:
            return [f"on an input with NaN or infinity an engine failed: {error}"]

    # --- output ---------------------------------------------------------------------------------------

    def build(self) -> ProfileBuild:
        """Return the checked modules, manifest and summary."""
        import tvm

        network, result = self.network, self.result
        manifest = make_manifest(
            network.file, network.model.inputs, network.model.outputs, network.cpu, tvm.__version__,
            precision=precision_of(network.graph),
        )  # fmt: skip
        modules = {MODEL: BuiltLibrary(result.libraries[result.shipped.name])}
        if UNFUSED_NETWORK in result.libraries:
            modules[UNFUSED_MODULE] = BuiltLibrary(result.libraries[UNFUSED_NETWORK])
        if not result.shipped.fused_sites:
            modules[UNFUSED_MODULE] = modules[MODEL]  # the faster of two networks without fusion
        return ProfileBuild(network.folder.name, manifest, modules, self.summary())

    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``."""
        network, tuned, result = self.network, self.tuned, self.result
        finals = result.finals
        seconds = {entry.name: entry.median_seconds for entry in finals.entries}
        latency = {"tuned": seconds[finals.winner]}
        if result.separate_name is not None:
            latency["tuned_without_fusion"] = seconds[result.separate_name]
        if FLOAT32_NETWORK in seconds:
            latency[FLOAT32_NETWORK] = seconds[FLOAT32_NETWORK]
        latency["onnxruntime"] = finals.others[REFERENCE]
        latency |= {name: finals.others[name] for name in result.peers.rows if name in finals.others}
        found = document(
            network,
            tuned,
            selected=tuned.plan(network.graph, network.sites),
            shipped=result.shipped.plan,
            seconds=tuned.comparable_seconds(),
            latency=latency,
            finals=finals.to_json(),
            check=self.check.outputs.to_json(result.verdict, self.check.exposes),
            memory=result.memory_rows(),
            precision={} if self.report is None else self.report.to_json(network),
            notes=[*self.notes(), *([] if self.report is None else self.report.notes)],
            wall_seconds=time.monotonic() - self.clock.started,
            errors=result.errors,
            peers=result.peers.to_json(finals.others),
            layers=result.lost.table,
        )
        return {**found, "stage_seconds": dict(self.clock.seconds)}

    def notes(self) -> list[str]:
        """Messages about this result."""
        network, tuned, result = self.network, self.tuned, self.result
        found = [*self.tuning_notes()]
        untuned = [node.name for node in network.graph.nodes if node.operator not in {*tuned.configs, *tuned.unsolved}]
        if untuned:
            found.append(f"{len(untuned)} layers with kernels that were not measured yet, such as {untuned[0]}")
        if result.finals.winner == FLOAT32_NETWORK:
            found.append(
                "the network in float32 was the fastest: it is shipped, with the fusions that were found for it"
            )
        elif UNFUSED_NETWORK not in result.networks:
            found.append(
                "no time to build the network without fusion: which sites are fused is predicted, not measured"
            )
        fused = result.shipped.fused_sites
        selected = sum(group.is_fused for group in tuned.plan(network.graph, network.sites).groups)
        if fused < selected:
            how = f"with {fused} of them alone" if fused else "without fusion"
            found.append(
                f"the whole network was not faster with all {selected} selected sites fused: it is shipped {how}"
            )
        if network.target.machine_differs is not None:
            found.append(network.target.machine_differs)
        if result.careful:
            found.append(CAREFUL)
        found += [*result.peers.notes, *result.lost.missing, *float_layer_notes(network.model.in_floats)]
        if not result.finals.differ_clearly and len(result.finals.entries) > 1:
            found.append("the networks compared at the end cannot be told apart on this machine as it is now")
        found += [*self.check.outputs.nothing_finite(), *result.unkept]
        if self.check.outputs.unchecked is not None:
            found.append(f"outputs were compared with ONNX Runtime's alone: {self.check.outputs.unchecked}")
        return found

    def tuning_notes(self) -> list[str]:
        """Messages about the search."""
        found = [STOPPED_EARLY] if self.tuned.interrupted else []
        failed = [node.name for node in self.network.graph.nodes if node.operator in self.tuned.unsolved]
        if failed:
            found.append(f"no kernel of ours worked for {', '.join(failed)}: left to TVM")
        return found

    # --- helpers -----------------------------------------------------------------------------------

    def workload(self) -> EngineWorkload:
        """Workload of the model for other engines."""
        return engine_workload(self.network.file, self.network.model, self.network.target, self.scratch)

    def of(self, network: Network, tuned: TunedKernels, check: NetworkCheck) -> TuningJob:
        """This job for ``network``, the model with other layers in a shorter type."""
        other = copy.copy(self)
        other.network, other.tuned, other.check = network, tuned, check
        return other


@dataclass(frozen=True, eq=False)
class _Loaded:
    """Loaded networks of the finals by name: processes, libraries and planned memory; and ONNX Runtime's process."""

    runtime: Worker
    workers: dict[str, Worker]
    libraries: dict[str, Path]
    memory: dict[str, MemoryPlan | None]


@dataclass(frozen=True)
class BuiltLibrary:
    """An existing library, as a :class:`fusion.model.build_folder.Executable`."""

    path: Path
    memory: MemoryPlan | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers computed by its kernels, from the manifest beside it."""
        return read_artifact(self.path.parent).manifest.layers.get(self.path.name, ())

    def export_library(self, file_name: str) -> None:
        shutil.copyfile(self.path, file_name)


@contextmanager
def batch_file(network: Network) -> Iterator[None]:
    """Write the copy of the model for another batch, which the build's comparisons read; delete it on failure."""
    from fusion.relax.onnx.preparation import static_model

    if network.file == network.request.model:
        yield
        return
    static = static_model(network.request.model, network.profile.shapes, network.profile.batch)
    with output_directory(network.folder):
        known = network.file.exists()  # an existing build may need it
        write_whole(network.file, static.SerializeToString())
        try:
            yield
        except BaseException:
            if not known:
                network.file.unlink(missing_ok=True)
            raise
