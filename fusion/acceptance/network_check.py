"""Networks of ours built, run on all probes and compared with the reference: before tuning, and at the end.

A sigmoid or softmax at the end hides what happens before it once it is saturated. So a copy of the model is checked
that gives away its argument too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.cores import usable_cores
from costmodel.base.errors import ModelError, ProjectError, TuningError
from costmodel.model.measurements import config_key
from fusion.acceptance.double_precision import DoubleModel
from fusion.acceptance.output_check import HALF_TOLERANCE, TOLERANCE, OutputCheck, Verdict, prepare_check
from fusion.acceptance.probes import probes
from fusion.acceptance.tune_job import Job, careful_configs, complete_configs, plausible_sites
from fusion.artifact.build_folder import CACHE, MODEL, Executable, describe, write_artifact
from fusion.comparing.compare import PREPARE_TIMEOUT_SECONDS
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import ENGINES, REFERENCE, TUNED
from fusion.comparing.engines.engine_worker import EngineFailed, Worker
from fusion.model.library_messages import sentence
from fusion.model.named_arrays import Arrays
from fusion.model.selection import FusionPlan, cover, select
from fusion.relax.onnx.onnx_precision import holds_half
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from onnx import ModelProto

    from costmodel.operators.layers import Operator
    from fusion.model.candidates import Site
    from fusion.model.conv_graph import Graph
    from fusion.relax.machine_code import CompiledModule
    from fusion.relax.memory_plan import MemoryPlan
    from fusion.relax.onnx.importer import ImportedModel
    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Config

# Functions whose result says little of their argument once that is large.
SATURATING = frozenset({"Sigmoid", "HardSigmoid", "Tanh", "Softmax"})
_MOVE = frozenset({"Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Cast"})
# Protobuf cannot hold a file of 2 GiB.
_LARGEST_COPY = 2**31 - 2**20
CAREFUL = "outputs err too much with fast convolution algorithms: it is built without them"


@dataclass(frozen=True, eq=False)
class Subject:
    """What is built and run: the user's model, or a copy of it in ``path`` with more outputs."""

    path: Path
    model: ImportedModel
    graph: Graph
    sites: list[Site]

    def plan(self, fused: Callable[[Site], bool]) -> FusionPlan:
        """Every site fused that ``fused`` chooses; they must not overlap."""
        return cover(self.graph, [site for site in self.sites if fused(site)])


@dataclass(frozen=True, eq=False)
class CheckedNetwork:
    """A network whose outputs were found right: its library, and what it was made of."""

    library: Path
    plan: FusionPlan
    configs: Mapping[Operator, Config]
    memory: MemoryPlan | None

    def is_made_of(self, plan: FusionPlan, configs: Mapping[Operator, Config]) -> bool:
        """Whether a build of ``plan`` with ``configs`` would be the same."""
        return _parts(self.plan, self.configs) == _parts(plan, configs)


@dataclass(frozen=True, eq=False)
class NetworkCheck:
    """Checks networks of one model. ``subject`` has more outputs than the model, if any are hidden.

    ``seconds``: to build a network, load it and compare its outputs, as measured; ``careful``: fast algorithms round
    more than this model bears; ``first``: that network, if it is the model's own and can be shipped as it is.
    """

    subject: Subject
    outputs: OutputCheck
    cpu: CpuTarget
    scratch: Path
    seconds: float = 0.0
    careful: bool = False
    first: CheckedNetwork | None = None

    @property
    def exposes(self) -> tuple[str, ...]:
        """Arguments of saturating functions that are checked besides the model's own outputs."""
        own = {info.name for info in self.outputs.interface}
        return tuple(info.name for info in self.subject.model.outputs if info.name not in own)

    def require_plan(
        self, network: str, plan: FusionPlan, configs: Mapping[Operator, Config]
    ) -> tuple[Verdict, CheckedNetwork]:
        """Builds the subject as planned; ``TuningError`` if its outputs are wrong, ``ModelError`` if TVM fails."""
        executable = build_network(self.subject.path, self.subject.model, plan, configs, self.cpu)
        directory = Path(tempfile.mkdtemp(prefix="network-", dir=self.scratch))
        with loaded(self.subject.path, self.subject.model, executable, directory, self.cpu) as worker:
            return self.require(network, worker), CheckedNetwork(directory / MODEL, plan, configs, executable.memory)

    def require(self, network: str, worker: Worker) -> Verdict:
        """``TuningError`` if outputs of the network that ``worker`` has loaded are wrong, or it fails."""
        try:
            computed = [worker.run(expected.inputs) for expected in self.outputs.expected]
        except EngineFailed as error:
            raise TuningError(f"{self.outputs.model}: the {network} network failed: {error}") from error
        return self.outputs.require(network, computed)


def first_check(job: Job, scratch: Path, display: TuningDisplay) -> NetworkCheck:
    """The reference, and a first network checked against it: a refusal costs seconds, not the tuning.

    Fused are the sites that are expected to gain, by records and ranking or else by the roofline; every kernel has the
    configuration that is guessed to be its fastest.
    """
    check = network_check(job, scratch, display)
    if check.outputs.unchecked is not None:
        display.say(f"outputs are compared with ONNX Runtime's alone: {check.outputs.unchecked}")
    predicted = expected_sites(job)
    plan = check.subject.plan(lambda site: site.name in predicted)
    configs = complete_configs(plan, job.guesses, {})
    started = time.monotonic()
    try:
        _, first = check.require_plan("first", plan, configs)
    except ModelError:
        # Perhaps one kernel cannot be built in its first configuration; the tuner finds others.
        _, first = check.require_plan("first", plan, {})
    except TuningError:
        careful = careful_configs(configs, job.cpu)
        if careful == configs:
            raise
        started = time.monotonic()
        _, first = check.require_plan("first", plan, careful)
        check = replace(check, careful=True)
        display.say(CAREFUL)
    seconds = time.monotonic() - started
    return replace(check, seconds=seconds, first=None if check.exposes else first)


def expected_sites(job: Job) -> set[str]:
    """Names of the sites that are worth fusing: by what is expected of every kernel, else by the roofline."""
    sites = plausible_sites(job)
    operators = [node.operator for node in job.graph.nodes] + [site.operator for site in sites]
    expected = {operator: job.guesses.guess(operator).seconds for operator in dict.fromkeys(operators)}
    seconds = {operator: time for operator, time in expected.items() if time is not None}
    if any(node.operator not in seconds for node in job.graph.nodes):
        return {report.name for report in job.analysis.sites if report.fuse}
    plan = select(job.graph, sites, seconds)
    return {site.name for site in sites if plan.fuses(site)}


def _parts(plan: FusionPlan, configs: Mapping[Operator, Config]) -> list[tuple[object, ...]]:
    """What decides the code of a network: its groups and their configurations."""
    return [
        (
            tuple(node.name for node in group.nodes),
            config_key(configs[group.operator]) if group.operator in configs else None,
        )
        for group in plan.groups
    ]


def network_check(job: Job, scratch: Path, display: TuningDisplay) -> NetworkCheck:
    """Evaluates the reference. ``TuningError`` without ONNX Runtime."""
    from fusion.relax.onnx.onnx_prepare import static_model

    path, cpu, model = job.file, job.cpu, job.model
    static = static_model(job.request.model, job.profile.shapes, job.profile.batch)
    exposed = expose(static)
    subject = Subject(path, model, job.graph, job.sites)
    if exposed is not None:
        static, subject = exposed, exposed_subject(exposed, scratch / "exposed.onnx", cpu)
    with reference_worker(path, subject.model, cpu, scratch, subject.path) as worker:

        def runtime(inputs: Arrays) -> Arrays:
            try:
                return worker.run(inputs)
            except EngineFailed as error:
                raise TuningError(_not_run(path, str(error))) from error

        display.say("checking a first build against the model in double precision")
        quantised = any(node.op_type == "QuantizeLinear" for node in static.graph.node)
        # A value that rounding takes to the next of 256 steps is off by all of a step.
        tolerance = HALF_TOLERANCE if quantised or holds_half(static.graph) else TOLERANCE
        inputs = probes(model.inputs)
        outputs = prepare_check(path, lambda: DoubleModel(static), inputs, runtime, tolerance, model.outputs)
    return NetworkCheck(subject, outputs, cpu, scratch)


def exposed_subject(model: ModelProto, path: Path, cpu: CpuTarget) -> Subject:
    """``model`` written to ``path`` and imported."""
    from fusion.model.candidates import find_sites
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx

    path.write_bytes(model.SerializeToString())
    imported = import_onnx(path)
    graph = extract_graph(imported.mod)
    return Subject(path, imported, graph, find_sites(graph, cpu))


def expose(static: ModelProto) -> ModelProto | None:
    """A copy with the arguments of saturating functions before its outputs as outputs; ``None`` if there are none."""
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
    path: Path, model: ImportedModel, plan: FusionPlan, configs: Mapping[Operator, Config], cpu: CpuTarget
) -> CompiledModule:
    """The model as planned; groups without a configuration are TVM's. ``ModelError`` if it cannot compile them."""
    from fusion.relax.layout_lowering import lower
    from fusion.relax.machine_code import build

    covered = FusionPlan(tuple(group for group in plan.groups if group.operator in configs))
    try:
        return build(lower(model.mod, covered, configs, cpu), cpu)
    except ProjectError:
        raise
    except Exception as error:  # TVM raises anything on operators that it imports but cannot compile
        raise ModelError(f"{path}: TVM cannot compile it: {sentence(error)}") from error


@contextmanager
def loaded(
    path: Path, model: ImportedModel, executable: Executable, directory: Path, cpu: CpuTarget
) -> Iterator[Worker]:
    """A build in ``directory``, loaded in a process of its own."""
    import tvm

    manifest = describe(path, model.inputs, model.outputs, cpu, tvm.__version__)
    write_artifact(directory, manifest, {MODEL: executable}, {})
    with Worker(ENGINES[TUNED], threads_here(cpu)) as worker:
        try:
            worker.prepare(workload(path, model, cpu, directory), PREPARE_TIMEOUT_SECONDS)
        except (Unavailable, EngineFailed) as error:
            raise TuningError(f"{path}: the compiled model cannot be loaded: {error}") from error
        yield worker


@contextmanager
def reference_worker(
    path: Path, model: ImportedModel, cpu: CpuTarget, scratch: Path, file: Path | None = None
) -> Iterator[Worker]:
    """ONNX Runtime with the model (in ``file``, if not in ``path``) loaded; ``TuningError`` if it does not run it."""
    spec = ENGINES[REFERENCE]
    reason = spec.missing()
    if reason is not None:
        raise TuningError(_not_run(path, reason))
    with Worker(spec, threads_here(cpu)) as worker:
        try:
            worker.prepare(workload(file or path, model, cpu, scratch), PREPARE_TIMEOUT_SECONDS)
        except (Unavailable, EngineFailed) as error:
            raise TuningError(_not_run(path, str(error))) from error
        yield worker


def _not_run(path: Path, reason: str) -> str:
    return f"{path}: ONNX Runtime, which checks the outputs, does not run the model: {reason}"


def threads_here(cpu: CpuTarget) -> int:
    """With how many threads code for ``cpu``, which may have more cores than this one, runs here."""
    return min(cpu.threads, usable_cores())


def workload(path: Path, model: ImportedModel, cpu: CpuTarget, build: Path) -> EngineWorkload:
    """The model as an engine sees it."""
    return EngineWorkload(
        model=path,
        model_sha256="",
        inputs=model.inputs,
        outputs=model.outputs,
        threads=threads_here(cpu),
        build=build,
        cache=build / CACHE,
    )
