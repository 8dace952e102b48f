"""Request of ``tune``, and the data of a network before measurements."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError, Say
from costmodel.base.input_files import find_refusal
from fusion.model.build_folder import profile_names
from fusion.model.conv_graph import BFLOAT16, FLOAT32, INT8, PRECISIONS, FusionPlan, Precision, stored_in
from fusion.tuning.clock import TuningDisplay

if TYPE_CHECKING:
    from costmodel.cpu.learned_residual import ResidualModel
    from costmodel.cpu.roofline import RooflineModel
    from costmodel.machines.machine_records import Machine
    from costmodel.operators.layers import Operator
    from fusion.analysis.analyzer import NetworkAnalysis
    from fusion.analysis.target_machine import Target
    from fusion.model.conv_graph import Graph, Site
    from fusion.relax.onnx.importer import ImportedModel
    from schedules.contract.cpu_target import CpuTarget
    from schedules.contract.template import Config
    from schedules.tuning.kernel_ranking import KernelGuesses


@dataclass(frozen=True)
class InputProfile:
    """Input shapes of a network: shapes of open inputs by name, and the leading dimension of all inputs."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch: int | None = None


@dataclass(frozen=True)
class TuneRequest:
    """Options of the user."""

    model: Path
    output: Path
    profiles: Sequence[InputProfile] = (InputProfile(),)  # every profile gets its own network
    trials: int = 64  # per kernel
    minutes: float | None = None  # of the whole job; None: until the trials are done
    threads: int | None = None
    machine: str | None = None
    target: str | None = None  # another CPU to build for from its records, without measuring
    tracker: str | None = None  # `HOST:PORT` of servers of TVM's RPC that measure kernels on their CPU
    key: str | None = None  # of those servers
    precision: Precision = "float32"  # number types of layers
    max_error: float | None = (
        None  # allowed output error of shorter types, relative to the largest value of each output
    )
    calibration: Path | None = None  # NPZ file of inputs for measuring errors
    against: Sequence[str] = ()  # engines to time at the end besides ONNX Runtime
    quantized: Path | None = None  # file run by INT8 engines

    @property
    def elsewhere(self) -> bool:
        """True if the build is for another CPU."""
        return self.target is not None or self.tracker is not None

    def require_valid(self) -> None:
        """Raise ``InputError`` for an unknown precision, or for incompatible options."""
        if self.minutes is not None and not 0 <= self.minutes < math.inf:
            raise InputError(f"--minutes {self.minutes}: must be 0 or more")
        if self.against and self.elsewhere:
            raise InputError(
                "--against: engines are timed where the network runs, not with --target or --tracker; leave one out"
            )
        if self.key is not None and self.tracker is None:
            raise InputError(
                f"--key {self.key}: names servers of a tracker; say where that is with --tracker HOST:PORT"
            )
        self._require_valid_precision()

    def _require_valid_precision(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"--precision {self.precision}: choose one of {', '.join(PRECISIONS)}")
        if self.max_error is not None and not 0 < self.max_error <= 1:
            raise InputError(
                f"--max-error {self.max_error:g}: must be above 0 and at most 1; 0.01: a hundredth of the largest "
                "output"
            )
        if self.precision == FLOAT32:
            for option, value in (("--max-error", self.max_error), ("--calibration", self.calibration)):
                if value is not None:
                    raise InputError(
                        f"{option} {value}: says how far a shorter type may err; choose --precision bfloat16, int8 or "
                        "auto"
                    )
        if self.calibration is not None:
            refusal = find_refusal(self.calibration, "arrays")
            if refusal is not None:
                raise InputError(f"--calibration {self.calibration}: {refusal}; check the path")
        if self.precision == INT8 and self.calibration is None:
            raise InputError("--precision int8: quantising needs samples, some hundred of them: --calibration DATA.npz")

    def on_cpu(self, cpu: CpuTarget, say: Say) -> TuneRequest:
        """Return the request with a precision supported by ``cpu``.

        Raises ``InputError`` if ``cpu`` lacks the requested one; ``auto`` falls back to float32.
        """
        reason = cpu.lacks(INT8 if self.precision == INT8 else BFLOAT16)
        if reason is None or self.precision == FLOAT32:
            return self
        if self.precision != "auto":
            raise InputError(f"--precision {self.precision}: {reason}; choose --precision float32")
        say(f"all layers stay in float32: {reason}")
        return replace(self, precision=FLOAT32, max_error=None, calibration=None)


@dataclass(frozen=True, eq=False)
class Network:
    """The network of one input profile, with the data known before measurements."""

    request: TuneRequest
    profile: InputProfile
    folder: Path  # build folder
    target: Target
    model: ImportedModel
    graph: Graph
    sites: list[Site]
    analysis: NetworkAnalysis
    guesses: KernelGuesses

    @property
    def cpu(self) -> CpuTarget:
        """Target CPU of its kernels."""
        return self.target.cpu

    @property
    def machine(self) -> Machine:
        """Machine model that predicts their times."""
        return self.target.machine

    @property
    def file(self) -> Path:
        """ONNX file run by other engines: the user's, or a copy of it for another batch."""
        batch = self.profile.batch
        return self.request.model if batch is None else self.folder / f"model-batch{batch}.onnx"

    @property
    def operators(self) -> list[Operator]:
        """Distinct kernels in question: those of layers, then those of sites."""
        found = [node.operator for node in self.graph.nodes] + [site.operator for site in self.sites]
        return list(dict.fromkeys(found))

    def stored(self, names: Collection[str], dtype: str) -> Network:
        """This network with the layers ``names`` in ``dtype``."""
        from fusion.analysis.analyzer import analyze
        from fusion.model.conv_graph import find_sites

        graph = stored_in(self.graph, names, dtype)
        analysis, sites = analyze(graph, self.machine, self.cpu), find_sites(graph, self.cpu)
        return replace(self, graph=graph, sites=sites, analysis=analysis)

    def carefully(self) -> Network:
        """This network without algorithms whose rounding errors exceed those of a plain sum of products."""
        return replace(self, guesses=self.guesses.carefully())

    def roofline(self) -> RooflineModel:
        """Roofline model of its kernels."""
        from costmodel.cpu.roofline import RooflineModel
        from fusion.analysis.analyzer import network_bytes

        return RooflineModel(self.machine, self.cpu.threads, network_bytes(self.graph))

    def predicted_seconds(self) -> dict[Operator, float]:
        """Roofline prediction of every kernel in question, for their initial order."""
        operators = self.operators
        estimates = self.roofline().estimate(operators)
        return {operator: estimate.seconds for operator, estimate in zip(operators, estimates, strict=True)}

    def ranking_model(self) -> ResidualModel:
        """Cost model that ranks configurations, trained on the measured ones."""
        from costmodel.cpu.learned_residual import ResidualModel
        from schedules.kernels.template_table import config_terms

        # One training thread: a pool would still spin while kernels are timed.
        terms = partial(config_terms, cpu=self.cpu)
        return ResidualModel(self.roofline(), config_terms=terms, before=self.guesses.ranking)


def read_networks(request: TuneRequest, target: Target, display: TuningDisplay) -> list[Network]:
    """Import the model, and find and predict its sites for ``target``: one network per profile.

    Raises ``InputError`` for two equal profiles.
    """
    from fusion.analysis.analyzer import analyze
    from fusion.model.conv_graph import find_sites
    from fusion.relax.extract import extract_graph
    from fusion.relax.onnx.importer import import_onnx
    from fusion.relax.onnx.model_file import require_loaded
    from schedules.tuning.kernel_ranking import KernelGuesses, guesses_for

    cpu = target.cpu
    guesses = KernelGuesses(cpu) if request.elsewhere else guesses_for(cpu)
    display.stage(f"importing {request.model}")
    whole = cpu.lacks(INT8) is None
    models = [import_onnx(request.model, each.shapes, each.batch, whole) for each in request.profiles]
    require_loaded(request.model)
    folders = [request.output]
    if len(models) > 1:
        folders = [request.output / name for name in profile_names([model.inputs for model in models])]
    machine = target.machine
    if not request.elsewhere and target.machine_differs is not None:
        display.say(target.machine_differs)
    networks = []
    for profile, folder, model in zip(request.profiles, folders, models, strict=True):
        graph = extract_graph(model.mod)
        analysis, sites = analyze(graph, machine, cpu), find_sites(graph, cpu)
        networks.append(Network(request, profile, folder, target, model, graph, sites, analysis, guesses))
    if guesses.origin:
        kernels = {node.operator for network in networks for node in network.graph.nodes}
        recorded = f" ({len(kernels & guesses.recorded.keys())} of {len(kernels)} kernels are among them)"
        display.say(guesses.origin + recorded * bool(guesses.recorded))
    return networks


def plausible_sites(network: Network) -> list[Site]:
    """Sites worth measuring: not hopeless, and with a time limit not predicted to lose clearly."""
    unhurried = network.request.minutes is None
    pairs = zip(network.sites, network.analysis.sites, strict=True)
    return [site for site, report in pairs if not report.hopeless and (unhurried or not report.loses_clearly)]


def complete_configs(
    plan: FusionPlan,
    guesses: KernelGuesses,
    chosen: Mapping[Operator, Config],
    unsolved: Collection[Operator] = (),
) -> dict[Operator, Config]:
    """``chosen``, plus the best guess for every unmeasured kernel of ``plan``.

    Kernels that failed in every trial (``unsolved``) get none: TVM compiles their layers.
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
    """``configs`` without algorithms whose rounding errors exceed those of a plain sum of products.

    Replacements are taken from ``measured``, or are the first suitable configuration of the space.
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
