"""Check of our networks on all probes against the reference, before tuning and at the end.

A saturated sigmoid or softmax at the end hides errors before it. So a copy of the model with its argument as a further
output is checked.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import ModelError, ProjectError, TuningError
from costmodel.cost_model import ConfigKey, config_key
from fusion.acceptance.error_budget import RoundedLimit
from fusion.acceptance.output_check import (
    HALF_TOLERANCE,
    TOLERANCE,
    DoubleModel,
    NoReference,
    OutputCheck,
    Verdict,
    prepare_check,
)
from fusion.comparing.engine import ENGINES, REFERENCE, TUNED, EngineWorkload, Unavailable
from fusion.comparing.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.output_errors import OutputErrors, probes
from fusion.model.build_folder import CACHE, MODEL, Executable, make_manifest, write_artifact
from fusion.model.conv_graph import BFLOAT16, INT8, FusionPlan, cover, layers_in, precision_of, select, stored_in
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays
from fusion.relax.onnx.preparation import holds_half
from fusion.tuning.clock import TuningDisplay, reference_seconds
from fusion.tuning.network import Network, careful_configs, complete_configs, plausible_sites

if TYPE_CHECKING:
    from onnx import ModelProto

    from costmodel.operators.layers import Operator
    from fusion.analysis.target_machine import Target
    from fusion.model.conv_graph import Graph, Site
    from fusion.relax.machine_code import CompiledModule, KernelObjects, MemoryPlan
    from fusion.relax.onnx.importer import ImportedModel
    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Config

# Functions whose result is insensitive to large arguments.
SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softmax"})
_MOVE = frozenset({"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Cast"})
# Protobuf is limited to files below 2 GiB.
_LARGEST_COPY = 2**31 - 2**20
CAREFUL = "outputs err too much with fast convolution algorithms: it is built without them"


@dataclass(frozen=True, eq=False)
class Subject:
    """Model to build and run: the user's, or a copy of it in ``path`` with more outputs."""

    path: Path
    model: ImportedModel
    graph: Graph
    sites: list[Site]

    def stored(self, names: Collection[str], dtype: str, cpu: CpuTarget) -> Subject:
        """This subject with the layers ``names`` in ``dtype``."""
        from fusion.model.conv_graph import find_sites

        graph = stored_in(self.graph, names, dtype)
        return replace(self, graph=graph, sites=find_sites(graph, cpu))

    def plan(self, fused: Callable[[Site], bool]) -> FusionPlan:
        """Plan that fuses every site selected by ``fused``; they must not overlap."""
        return cover(self.graph, [site for site in self.sites if fused(site)])


@dataclass(frozen=True, eq=False)
class CheckedNetwork:
    """A network with correct outputs: its library, plan and configurations, memory plan, and maximum time of a run."""

    library: Path
    plan: FusionPlan
    configs: Mapping[Operator, Config]
    memory: MemoryPlan | None
    run_seconds: float = 0.0

    def is_made_of(self, plan: FusionPlan, configs: Mapping[Operator, Config]) -> bool:
        """True if a build of ``plan`` with ``configs`` would be identical."""
        return _parts(self.plan, self.configs) == _parts(plan, configs)


@dataclass(frozen=True)
class CheckCost:
    """Seconds from the plan of a network to checked outputs."""

    # To compile all of its kernels.
    compile_seconds: float
    # For everything else.
    other_seconds: float
    # Maximum time of one run.
    run_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class NetworkCheck:
    """Checks networks of one model."""

    # Has more outputs than the model if arguments of saturating functions are exposed.
    subject: Subject
    outputs: OutputCheck
    target: Target
    scratch: Path
    # Compiled kernels of all networks built so far.
    objects: KernelObjects
    # Measured cost of building a network and comparing its outputs.
    cost: CheckCost = CheckCost(0.0, 0.0)
    # True if fast algorithms have too large rounding errors for this model.
    careful: bool = False
    checked: tuple[Verdict, CheckedNetwork] | None = None
    # Error limit of layers in bfloat16.
    rounded: RoundedLimit | None = None
    # Network name -> check, for networks compared with another reference.
    apart: Mapping[str, NetworkCheck] = field(default_factory=dict)

    def of(self, network: str) -> NetworkCheck:
        """Check of the network ``network``."""
        return self.apart.get(network, self)

    def with_rounded(self, names: Collection[str], limit: RoundedLimit) -> NetworkCheck:
        """Check of networks with the layers ``names`` in bfloat16, with no network checked yet."""
        runs = limit.runs
        assert runs is not None, "layers are rounded by a model that rounds them"
        outputs = self.outputs.with_rounded_layers(lambda inputs: runs.draws(inputs, names))
        subject = self.subject.stored(names, BFLOAT16, self.target.cpu)
        return replace(self, subject=subject, outputs=outputs, rounded=limit, checked=None, careful=False)

    def require_budget(self, network: str, worker: Worker) -> OutputErrors | None:
        """Errors of the network loaded in ``worker`` on the inputs used for errors; None without a limit.

        Raises :class:`BudgetExceeded` if they are above the user's limit.
        """
        if self.rounded is None:
            return None
        try:
            return self.rounded.require(self.outputs.model, network, worker.run)
        except EngineFailed as error:
            raise TuningError(
                f"{self.outputs.model}: the {network} network failed: {error}; "
                "run the same command again, records are kept"
            ) from error

    @property
    def first(self) -> CheckedNetwork | None:
        """The network that was checked first, if it is the unmodified model and can be shipped."""
        return None if self.checked is None or self.exposes else self.checked[1]

    @property
    def exposes(self) -> tuple[str, ...]:
        """Arguments of saturating functions that are checked besides the model's own outputs."""
        own = {info.name for info in self.outputs.interface}
        return tuple(info.name for info in self.subject.model.outputs if info.name not in own)

    def compilation_seconds(self, networks: Iterable[tuple[FusionPlan, Mapping[Operator, Config]]]) -> float:
        """Estimated seconds to compile the kernels of ``networks`` that the first network does not contain."""
        if self.checked is None:
            return 0.0
        first = self.checked[1]
        known = _kernels(first.plan, first.configs)
        fresh = set().union(*(_kernels(plan, configs) for plan, configs in networks)) - known
        return len(fresh) * self.cost.compile_seconds / max(1, len(known))

    def require_plan(
        self, network: str, plan: FusionPlan, configs: Mapping[Operator, Config]
    ) -> tuple[Verdict, CheckedNetwork]:
        """Build and check the subject as planned, unless it is the network checked first.

        Raises ``TuningError`` if its outputs are wrong, ``ModelError`` if TVM fails.
        """
        if self.checked is not None and self.checked[1].is_made_of(plan, configs):
            return self.checked
        executable = build_network(self.subject.path, self.subject.model, plan, configs, self.target.cpu, self.objects)
        return self.require_built(network, plan, configs, executable)

    def require_built(
        self, network: str, plan: FusionPlan, configs: Mapping[Operator, Config], executable: CompiledModule
    ) -> tuple[Verdict, CheckedNetwork]:
        """Check a given build of the subject as planned."""
        directory = Path(tempfile.mkdtemp(prefix="network-", dir=self.scratch))
        with load_in_process(self.subject.path, self.subject.model, executable, directory, self.target) as worker:
            computed, run_seconds = self._computed(network, worker)
            verdict = self.outputs.require(network, computed)
            self.require_budget(network, worker)
        return verdict, CheckedNetwork(directory / MODEL, plan, configs, executable.memory, run_seconds)

    def require(self, network: str, worker: Worker) -> Verdict:
        """Raise ``TuningError`` if outputs of the network loaded in ``worker`` are wrong, or if it fails."""
        return self.outputs.require(network, self._computed(network, worker)[0])

    def _computed(self, network: str, worker: Worker) -> tuple[list[Arrays], float]:
        """Outputs on every input, and seconds of the last run."""
        computed, seconds = [], 0.0
        try:
            for expected in self.outputs.expected:
                began = time.monotonic()
                computed.append(worker.run(expected.inputs))
                seconds = time.monotonic() - began
        except EngineFailed as error:
            raise TuningError(
                f"{self.outputs.model}: the {network} network failed: {error}; "
                "run the same command again, records are kept"
            ) from error
        return computed, seconds


def first_check(
    network: Network, scratch: Path, display: TuningDisplay, limit: RoundedLimit | None = None
) -> NetworkCheck:
    """Evaluate the reference and check a first network before tuning, so that a rejection costs only seconds.

    ``limit``: error limit of a network with layers in a shorter type. The first network fuses the sites expected to
    gain, by records and ranking or else by the roofline; every kernel has the configuration guessed to be fastest. It
    is compiled while the reference is evaluated.
    """
    from fusion.relax.machine_code import KernelObjects

    objects = KernelObjects(scratch / "kernels", network.cpu)
    subject, static = subject_of(network, scratch)
    predicted = expected_sites(network)
    plan = subject.plan(lambda site: site.name in predicted)
    configs = complete_configs(plan, network.guesses, {})
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(_timed_build, subject, plan, configs, network.cpu, objects)
        try:
            check = network_check(network, subject, static, objects, scratch, display)
            if limit is not None and limit.runs is None:
                check = replace(check, rounded=limit)  # the model file defines the rounding of layers
            elif limit is not None:
                check = check.with_rounded(layers_in(network.graph, BFLOAT16), limit)
        except BaseException:
            objects.stop()
            raise
        error = building.exception()
    if check.outputs.unchecked is not None:
        display.say(f"outputs are compared with ONNX Runtime's alone: {check.outputs.unchecked}")
    if error is not None and not isinstance(error, ModelError):
        raise error
    started = time.monotonic()
    build_seconds = 0.0
    try:
        if error is not None:
            # Possibly one kernel cannot be built in its first configuration; the tuner finds others.
            checked = check.require_plan("first", plan, {})
        else:
            executable, build_seconds = building.result()
            checked = check.require_built("first", plan, configs, executable)
    except TuningError:
        careful = careful_configs(configs, network.cpu)
        if error is not None or careful == configs:
            raise
        started, build_seconds = time.monotonic(), 0.0
        checked = check.require_plan("first", plan, careful)
        check = replace(check, careful=True)
        display.say(CAREFUL)
    seconds = build_seconds + time.monotonic() - started
    cost = CheckCost(objects.seconds, max(0.0, seconds - objects.seconds), checked[1].run_seconds)
    return replace(check, cost=cost, checked=checked)


def _timed_build(
    subject: Subject, plan: FusionPlan, configs: Mapping[Operator, Config], cpu: CpuTarget, objects: KernelObjects
) -> tuple[CompiledModule, float]:
    started = time.monotonic()
    return build_network(subject.path, subject.model, plan, configs, cpu, objects), time.monotonic() - started


def expected_sites(network: Network) -> set[str]:
    """Names of the sites worth fusing by expected kernel times, else by the roofline.

    Empty with the roofline only and no measurements to come: that network is shipped.
    """
    seconds: dict[Operator, float | None] = {}
    seconds.update((node.operator, network.guesses.seconds(node.operator)) for node in network.graph.nodes)
    if None in seconds.values():
        return (
            set() if network.request.minutes == 0 else {report.name for report in network.analysis.sites if report.fuse}
        )
    sites = plausible_sites(network)
    seconds.update((site.operator, network.guesses.seconds(site.operator)) for site in sites)
    known = {operator: each for operator, each in seconds.items() if each is not None}
    plan = select(network.graph, sites, known)
    return {site.name for site in sites if plan.fuses(site)}


def _kernels(plan: FusionPlan, configs: Mapping[Operator, Config]) -> set[tuple[Operator, ConfigKey]]:
    return {(operator, config_key(configs[operator])) for operator in plan.operators if operator in configs}


def _parts(plan: FusionPlan, configs: Mapping[Operator, Config]) -> list[tuple[object, ...]]:
    """Groups and configurations of a network, which determine its code."""
    return [
        (
            tuple(node.name for node in group.nodes),
            config_key(configs[group.operator]) if group.operator in configs else None,
        )
        for group in plan.groups
    ]


def subject_of(network: Network, scratch: Path) -> tuple[Subject, ModelProto]:
    """Subject of the check, and its ONNX model."""
    from fusion.relax.onnx.preparation import static_model

    static = static_model(network.request.model, network.profile.shapes, network.profile.batch)
    exposed = expose(static)
    if exposed is None:
        return Subject(network.file, network.model, network.graph, network.sites), static
    subject = import_exposed(exposed, scratch / "exposed.onnx", network.cpu)
    return subject.stored(layers_in(network.graph, BFLOAT16), BFLOAT16, network.cpu), exposed


def network_check(
    network: Network,
    subject: Subject,
    static: ModelProto,
    objects: KernelObjects,
    scratch: Path,
    display: TuningDisplay,
) -> NetworkCheck:
    """Evaluate the reference, the model ``static`` of ``subject``. Raises ``TuningError`` without ONNX Runtime."""
    path, model, target = network.file, network.model, network.target
    file = _in_whole_numbers(network, subject, static, scratch)
    with reference_worker(path, subject.model, target, scratch, file) as worker:

        def runtime(inputs: Arrays) -> Arrays:
            try:
                return worker.run(inputs)
            except EngineFailed as error:
                raise TuningError(_not_run(path, str(error))) from error

        display.stage("checking a first build against the model in double precision")
        quantised = any("QuantizeLinear" in node.op_type or "QLinear" in node.op_type for node in static.graph.node)
        whole = quantised and precision_of(network.graph) == INT8 and not rounds_otherwise(network.graph)

        def double() -> DoubleModel:
            if layers_in(network.graph, INT8):
                raise NoReference("between layers that round to whole numbers no digits are left to compare")
            return DoubleModel(static)

        # A value rounded to the next of 256 steps has an error of a whole step.
        tolerance = HALF_TOLERANCE if quantised or holds_half(static.graph) else TOLERANCE
        outputs = prepare_check(
            path,
            double,
            probes(model.inputs),
            runtime,
            tolerance,
            model.outputs,
            reference_seconds(network.request.minutes),
            in_steps=whole,
        )
    return NetworkCheck(subject, outputs, target, scratch, objects)


def rounds_otherwise(graph: Graph) -> bool:
    """True if ONNX Runtime may round values of a quantised ``graph`` to another byte than our kernels.

    It sums floats where an activation is rounded only with its layer, and computes operators that are floats here too
    in another order.
    """
    from costmodel.operators.layers import Conv2d, Dense
    from fusion.relax.bindings import is_float32
    from fusion.relax.extract import CHANNELS, MOVES, QUANTISED

    layers = [node.operator for node in graph.nodes if isinstance(node.operator, Conv2d | Dense)]
    others = (other for other in graph.others if other.reason not in (CHANNELS, MOVES, QUANTISED))
    in_floats = any(is_float32(other.output) for other in others)
    return in_floats or any(each.dtype == INT8 and each.epilogue.activation is not None for each in layers)


def _in_whole_numbers(network: Network, subject: Subject, static: ModelProto, scratch: Path) -> Path:
    """Model file for ONNX Runtime in the check: for integer layers an equivalent one that it computes in integers."""
    from fusion.relax.onnx.quantised_rewrites import in_whole_numbers

    if not layers_in(network.graph, INT8) or static.ByteSize() > _LARGEST_COPY:
        return subject.path
    equal = in_whole_numbers(static)
    if equal is None:
        return subject.path
    file = scratch / "in_whole_numbers.onnx"
    file.write_bytes(equal.SerializeToString())
    return file


def import_exposed(model: ModelProto, path: Path, cpu: CpuTarget) -> Subject:
    """Write ``model`` to ``path`` and import it."""
    from fusion.model.conv_graph import find_sites
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx

    path.write_bytes(model.SerializeToString())
    imported = import_onnx(path, whole_numbers=cpu.lacks(INT8) is None)
    graph = extract_graph(imported.mod)
    return Subject(path, imported, graph, find_sites(graph, cpu))


def expose(static: ModelProto) -> ModelProto | None:
    """Copy with the arguments of final saturating functions as further outputs, or None if there are none."""
    from onnx import ModelProto, helper

    if static.ByteSize() > _LARGEST_COPY:
        return None
    made_by = {name: node for node in static.graph.node for name in node.output}
    present = {value.name for value in static.graph.output}
    hidden: dict[str, int] = {}
    for value in static.graph.output:
        node = made_by.get(value.name)
        while node is not None and node.op_type in _MOVE:
            node = made_by.get(node.input[0])
        if node is not None and node.op_type in SATURATING and node.input[0] in made_by:
            hidden[node.input[0]] = value.type.tensor_type.elem_type
    if not hidden.keys() - present:
        return None
    copy = ModelProto()
    copy.CopyFrom(static)
    for name in hidden.keys() - present:
        copy.graph.output.append(helper.make_tensor_value_info(name, hidden[name], None))
    return copy


def build_network(
    path: Path,
    model: ImportedModel,
    plan: FusionPlan,
    configs: Mapping[Operator, Config],
    cpu: CpuTarget,
    objects: KernelObjects | None = None,
) -> CompiledModule:
    """Build the model as planned; TVM compiles groups without a configuration.

    Raises ``ModelError`` if it cannot. ``objects``: compiled kernels of other networks, to which new ones are added.
    """
    from fusion.relax.layout_lowering import lower
    from fusion.relax.machine_code import build_executable

    covered = FusionPlan(tuple(group for group in plan.groups if group.operator in configs))
    try:
        return build_executable(lower(model.mod, covered, configs, cpu), cpu, objects)
    except ProjectError:
        raise
    except Exception as error:  # TVM raises anything on operators that it imports but cannot compile
        raise ModelError(f"{path}: TVM cannot compile it: {sentence(error)}; report it with the model") from error


@contextmanager
def load_in_process(
    path: Path, model: ImportedModel, executable: Executable, directory: Path, target: Target
) -> Iterator[Worker]:
    """A build in ``directory``, loaded in its own process."""
    with start_in_process(path, model, executable, directory, target) as (worker, load):
        load()
        yield worker


@contextmanager
def start_in_process(
    path: Path, model: ImportedModel, executable: Executable, directory: Path, target: Target
) -> Iterator[tuple[Worker, Callable[[], None]]]:
    """A build in ``directory``, its process, and a function that loads it there and can be called from any thread."""
    import tvm

    manifest = make_manifest(path, model.inputs, model.outputs, target.cpu, tvm.__version__)
    write_artifact(directory, manifest, {MODEL: executable}, {})
    with Worker(ENGINES[TUNED], target.threads_here) as worker:

        def load() -> None:
            try:
                worker.prepare(engine_workload(path, model, target, directory), PREPARE_TIMEOUT_SECONDS)
            except (Unavailable, EngineFailed) as error:
                raise TuningError(
                    f"{path}: the compiled model cannot be loaded: {error}; "
                    "`python -m fusion doctor` looks for what is missing"
                ) from error

        yield worker, load


@contextmanager
def reference_worker(
    path: Path, model: ImportedModel, target: Target, scratch: Path, file: Path | None = None
) -> Iterator[Worker]:
    """ONNX Runtime with the model (in ``file`` or ``path``) loaded, in its most exact mode.

    Raises ``TuningError`` if it cannot run the model.
    """
    with start_reference(path, model, target, scratch, file, exact=True) as (worker, load):
        load()
        yield worker


@contextmanager
def start_reference(
    path: Path, model: ImportedModel, target: Target, scratch: Path, file: Path | None = None, exact: bool = False
) -> Iterator[tuple[Worker, Callable[[], None]]]:
    """A process of ONNX Runtime, and a function that loads the model there and can be called from any thread.

    ``exact``: see :class:`EngineWorkload`; off for timing, to compute as for its users.
    """
    spec = ENGINES[REFERENCE]
    reason = spec.missing()
    if reason is not None:
        raise TuningError(_not_run(path, reason))
    with Worker(spec, target.threads_here) as worker:

        def load() -> None:
            try:
                given = replace(engine_workload(file or path, model, target, scratch), exact=exact)
                worker.prepare(given, PREPARE_TIMEOUT_SECONDS)
            except (Unavailable, EngineFailed) as error:
                raise TuningError(_not_run(path, str(error))) from error

        yield worker, load


def _not_run(path: Path, reason: str) -> str:
    return f"{path}: ONNX Runtime, which checks the outputs, does not run the model: {reason}; export it again"


def engine_workload(path: Path, model: ImportedModel, target: Target, build: Path) -> EngineWorkload:
    """Engine workload of the model."""
    return EngineWorkload(
        model=path,
        model_sha256="",
        inputs=model.inputs,
        outputs=model.outputs,
        threads=target.threads_here,
        build=build,
        cache=build / CACHE,
    )
