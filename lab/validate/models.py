"""The sections ``models`` and ``vision`` of ``python -m lab.validate``: predictions of measured steps of one GPU.

**models**: the public labels of NeuSight (ASPLOS 2025), read in place. Cases are named model-mode-sequence-batch; FP32,
TF32 off, eager attention, Hugging Face modules; ``train`` there is forward + backward. Compiled (``-fusion``) cases are
predicted with ``compiled`` and summed up apart.

**vision**: timm's results in the data folder and figures published by NVIDIA. All but ResNet-50 need timm to build the
models (:mod:`e2e.capture.models.image_models`); if it is absent the section reports that and skips them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from costmodel.base.errors import InputError, ProjectError
from costmodel.cost_model import Estimate
from e2e.step.operator_trace import OperatorTrace
from lab.command_line import with_progress
from lab.data.data_folder import BROUGHT, reading
from lab.data.timm_steps import TimmStep, read_timm, timm_files
from lab.validate.errors import Accuracy, accuracy, error_table, print_left_out, section_console

if TYPE_CHECKING:
    from e2e.sources.requests import Script
    from lab.steps.image_steps import PublishedStep

    MeasuredStep = TimmStep | PublishedStep

LABELS = Path("neusight/model_labels")
CONFIGS = Path("neusight/model_configs")
MACHINES = {
    "NVIDIA_A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA_A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA_A100_80GB_PCIe": "a100-pcie-80gb",
    "NVIDIA_H100_80GB_HBM3": "h100-sxm",
    "NVIDIA_L4": "l4",
    "Tesla_P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla_P4": "p4",
    "Tesla_T4": "t4",
    "Tesla_V100-PCIE-32GB": "v100-pcie-32gb",
}
# Configurations missing in the data folder.
_BUILT_IN = {"switchxl4": "switch-xl-4"}


@dataclass(frozen=True)
class LabelledCase:
    """One measured model: seconds of a step of ``batch_size`` sequences of ``sequence_length`` tokens."""

    gpu: str
    model: str
    mode: str
    sequence_length: int
    batch_size: int
    measured_seconds: float
    compiled: bool = False

    @property
    def name(self) -> str:
        """Model, mode, sequence length and batch size, and ``compiled`` for compiled cases."""
        sizes = f"{self.model}-{self.mode}-{self.sequence_length}-{self.batch_size}"
        return f"{sizes}-compiled" if self.compiled else sizes


@dataclass(frozen=True)
class CaseResult:
    """Prediction of one case. ``error``: (predicted - measured) / measured."""

    case: LabelledCase
    predicted_seconds: float
    interval_seconds: tuple[float, float]
    error: float
    coverage: Mapping[str, float]


@dataclass(frozen=True)
class Validation:
    """All cases, their errors, and the reasons for skipped ones."""

    results: Sequence[CaseResult]
    left_out: Mapping[str, str]

    @property
    def summary(self) -> Accuracy | None:
        """Errors of the eager steps."""
        return _accuracy([each for each in self.results if not each.case.compiled])

    @property
    def compiled_summary(self) -> Accuracy | None:
        """Errors of the compiled steps."""
        return _accuracy([each for each in self.results if each.case.compiled])

    @property
    def batches(self) -> Mapping[str, float]:
        """Error by ``GPU/case from B`` of ``--what-if batch=`` applied to the step measured with batch ``B``: its time
        multiplied by the predicted ratio of the two. For every two batches of one model, in both directions.
        """
        found = {}
        for known in self.results:
            for asked in self.results:
                one, other = known.case, asked.case
                if one != other and one == replace(
                    other, batch_size=one.batch_size, measured_seconds=one.measured_seconds
                ):
                    ratio = asked.predicted_seconds / known.predicted_seconds
                    seconds = one.measured_seconds * ratio
                    name = f"{other.gpu}/{other.name} from {one.batch_size}"
                    found[name] = seconds / other.measured_seconds - 1.0
        return found

    def record(self) -> dict[str, Any]:
        """JSON document of the validation."""
        rows = [{**asdict(each), "case": each.case.name, "gpu": each.case.gpu} for each in self.results]
        summaries = {"summary": self.summary, "compiled_summary": self.compiled_summary}
        found = {name: summary and asdict(summary) for name, summary in summaries.items()}
        return {"cases": rows, **found, "batches": dict(self.batches), "left_out": dict(self.left_out)}

    def render(self) -> None:
        """Print all cases and the error figures, by GPU and of all."""
        console = section_console()
        table = Table("GPU", "case", "measured ms", "predicted ms", "error", box=None)
        for each in self.results:
            measured, predicted = each.case.measured_seconds * 1e3, each.predicted_seconds * 1e3
            table.add_row(each.case.gpu, each.case.name, f"{measured:.1f}", f"{predicted:.1f}", f"{each.error:+.1%}")
        console.print(table)
        eager = [each for each in self.results if not each.case.compiled]
        groups = {
            gpu: [each for each in eager if each.case.gpu == gpu] for gpu in dict.fromkeys(e.case.gpu for e in eager)
        }
        figures = {gpu: _accuracy(some) for gpu, some in groups.items()}
        figures |= {"all, eager": self.summary, "all, compiled": self.compiled_summary}
        rows = [((name,), each) for name, each in figures.items() if each is not None]
        console.print(error_table(("models",), rows))
        print_left_out(console, self.left_out)
        batches = [abs(error) for error in self.batches.values()]
        if batches:
            console.print(
                f"{len(batches)} pairs of batches, one predicted from what the other was measured to take: mean error "
                f"{sum(batches) / len(batches):.1%}, worst {max(batches):.1%}",
                soft_wrap=True,
            )


def _accuracy(results: Sequence[CaseResult]) -> Accuracy | None:
    estimates = [
        Estimate(each.predicted_seconds, each.interval_seconds[0], each.interval_seconds[1], "step", {}, "fitted")
        for each in results
    ]
    if not results:
        return None
    errors = accuracy(estimates, [each.case.measured_seconds for each in results])
    return replace(errors, coverage=_coverage(results))


def _coverage(results: Sequence[CaseResult]) -> dict[str, float]:
    """Share of the predicted time of all steps by the source of its price."""
    total = sum(each.predicted_seconds for each in results)
    sources = sorted({source for each in results for source in each.coverage})
    return {
        source: sum(each.coverage.get(source, 0.0) * each.predicted_seconds for each in results) / total
        for source in sources
    }


def cases(data: Path) -> Iterator[LabelledCase]:
    """Yield the measured cases in ``data`` of the GPUs in ``MACHINES``. ``InputError`` if the folder does not exist, or
    for a malformed file.
    """
    labels = data / LABELS
    if not labels.is_dir():
        raise InputError(f"{labels}: no measured models there; {BROUGHT}")
    for path in sorted(labels.glob("*/*.json")):
        if path.parent.name in MACHINES:
            yield _case(path)


def _case(path: Path) -> LabelledCase:
    compiled = path.stem.endswith("-fusion")
    with reading(path, "a measured model"):
        model, mode, length, batch = path.stem.removesuffix("-fusion").rsplit("-", 3)
        seconds = float(json.loads(path.read_text(encoding="utf-8"))["e2e_latency"]) / 1e3
        return LabelledCase(MACHINES[path.parent.name], model, mode, int(length), int(batch), seconds, compiled)


def models_section(data: Path, only: str = "") -> Validation | None:
    """Predict every case whose ``gpu/name`` contains ``only``, ``None`` if there is none; each model is captured once
    per shape.
    """
    from costmodel.machines.cluster import single_gpu
    from costmodel.machines.machine_file import load_machine
    from e2e.explain.predictor import Setting, predict_graph
    from e2e.lowering.lower_trace import lower_step
    from e2e.price.host_overheads import load_overheads
    from e2e.step.options import StepOptions

    traces: dict[tuple[str, str, int, int], OperatorTrace] = {}
    results: list[CaseResult] = []
    left_out: dict[str, str] = {}
    wanted = [case for case in cases(data) if only in f"{case.gpu}/{case.name}"]
    if not wanted:
        return None
    for case in with_progress(wanted, lambda case: f"{case.gpu}/{case.name}"):
        where = f"{case.gpu}/{case.name}"
        key = (case.model, case.mode, case.sequence_length, case.batch_size)
        try:
            if key not in traces:
                traces[key] = capture_case(data, case)
        except InputError as reason:
            left_out[where] = str(reason)
            continue
        gpu = load_machine(case.gpu)
        setting = Setting(gpu, load_overheads(architecture=gpu.chip().architecture), compiled=case.compiled)
        lowered = lower_step(traces[key], StepOptions(compile=setting.compiled))
        prediction = predict_graph(lowered.graph, setting, single_gpu(setting.machine), lowered.memory).prediction
        error = prediction.iteration_seconds / case.measured_seconds - 1.0
        results.append(
            CaseResult(case, prediction.iteration_seconds, prediction.interval_seconds, error, prediction.coverage)
        )
    if not results:
        raise InputError(f"{data / LABELS}: no case can be predicted: {next(iter(left_out.values()))}")
    return Validation(results, left_out)


def capture_case(data: Path, case: LabelledCase) -> OperatorTrace:
    """Operators of the measured case; see :mod:`lab.steps.labelled_models`."""
    from e2e.capture.models.configurations import PRESETS
    from e2e.capture.models.transformer import read_config
    from e2e.capture.session import capture
    from e2e.step.options import StepOptions
    from lab.steps.labelled_models import label_workload

    options = StepOptions(mode="inference" if case.mode == "inf" else "forward-backward")
    path = data / CONFIGS / f"{case.model}.json"
    known = _BUILT_IN.get(case.model)
    config = PRESETS[known] if known and not path.exists() else read_config(path)
    return capture(label_workload(config, case.mode, case.batch_size, case.sequence_length, case.name), options)


# --- image models ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class VisionResult:
    """Measured step and its prediction. ``held_out``: no factor was fitted on it or on similar ones; ``error``:
    (predicted - measured) / measured.
    """

    step: MeasuredStep
    family: str
    held_out: bool
    predicted_seconds: float
    interval_seconds: tuple[float, float]
    error: float
    coverage: Mapping[str, float]

    @property
    def estimate(self) -> Estimate:
        """The prediction as one estimate."""
        return Estimate(self.predicted_seconds, *self.interval_seconds, "step", {}, "fitted")


@dataclass(frozen=True)
class VisionSection:
    """All cases; ``left_out``: reason for a missing prediction by name; ``skipped``: reason for skipped cases, or
    empty.
    """

    results: Sequence[VisionResult]
    left_out: Mapping[str, str]
    skipped: str = ""

    def figures(self) -> list[tuple[str, str, Accuracy]]:
        """(group, fitted on or held out, errors) by card, mode, layout and PyTorch, then of all."""
        groups: dict[tuple[str, str], list[VisionResult]] = {}
        for each in self.results:
            kind = "held out" if each.held_out else "fitted on"
            step = each.step
            source = f"pt{step.version}" if isinstance(step, TimmStep) else "nvidia"
            groups.setdefault((f"{step.machine} {step.group} {source}", kind), []).append(each)
            groups.setdefault((f"~all of {'timm' if source != 'nvidia' else 'nvidia'}{_how(step)}", kind), []).append(
                each
            )
        return [
            (name.lstrip("~"), kind, accuracy([e.estimate for e in some], [e.step.seconds for e in some]))
            for (name, kind), some in sorted(groups.items())
        ]

    def record(self) -> dict[str, Any]:
        """JSON document of the section."""
        rows = [{**asdict(each), "case": each.step.name} for each in self.results]
        figures = [{"group": name, "kind": kind, **asdict(each)} for name, kind, each in self.figures()]
        return {"figures": figures, "cases": rows, "left_out": dict(self.left_out), "skipped": self.skipped}

    def render(self) -> None:
        """Print the error figures, a line for each group of cases, and every case if there are few."""
        console = section_console()
        if self.skipped:
            console.print(f"vision: not all of it: {self.skipped}", soft_wrap=True)
        if len(self.results) <= _FEW:
            console.print(self._cases())
        console.print(error_table(("image models", ""), [((name, kind), each) for name, kind, each in self.figures()]))
        print_left_out(console, self.left_out)

    def _cases(self) -> Table:
        table = Table("case", "family", "", "measured ms", "predicted ms", "error", box=None)
        for each in self.results:
            measured, predicted = each.step.seconds * 1e3, each.predicted_seconds * 1e3
            kind = "held out" if each.held_out else "fitted on"
            times = (f"{measured:.1f}", f"{predicted:.1f}", f"{each.error:+.1%}")
            table.add_row(each.step.name, each.family, kind, *times)
        return table


_FEW = 60  # largest number of cases listed individually


def _how(step: MeasuredStep) -> str:
    return ", compiled" if step.compiled else ", eager"


def vision_section(data: Path, only: str = "") -> VisionSection | None:
    """Section of the image models; ``None`` if no case contains ``only``; without timm a section that states the
    requirement.
    """
    from e2e.capture.models.catalog import IMAGES
    from e2e.capture.models.image_models import timm_library
    from lab.steps.image_steps import PUBLISHED, all_steps, chosen

    published = [step for step in PUBLISHED if only in step.name]
    try:
        timm_library()
    except InputError as reason:
        named = any(only in step.name for path in timm_files(data) for step in read_timm(path))
        if not published and not named:
            return None
        found = validate_vision([step for step in published if step.model in IMAGES])
        return VisionSection(found.results, found.left_out, f"{reason}")
    steps = all_steps(data)
    cases: list[MeasuredStep] = [*chosen(steps, only), *published]
    if not cases:
        return None
    if not steps:
        raise InputError(f"{data / 'timm'}: no measured image models there; {BROUGHT}")
    return validate_vision(cases)


def validate_vision(steps: Sequence[MeasuredStep]) -> VisionSection:
    """Predict ``steps`` one by one by the public interface (``predict`` of a script); one that cannot be captured is
    skipped with the reason.
    """
    from e2e.sources.predict_request import predict_request

    results: list[VisionResult] = []
    left_out: dict[str, str] = {}
    for count, step in enumerate(with_progress(steps, lambda step: step.name), 1):
        family, held_out, request = _vision_request(step)
        try:
            found = predict_request(request).prediction
        except (ProjectError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as reason:
            left_out[step.name] = f"{reason}".partition("\n")[0] or type(reason).__name__
            continue
        seconds = found.iteration_seconds
        error = seconds / step.seconds - 1.0
        results.append(VisionResult(step, family, held_out, seconds, found.interval_seconds, error, found.coverage))
        if count % 50 == 0:
            gc.collect()  # captured models refer to themselves
    return VisionSection(results, left_out)


def _vision_request(step: MeasuredStep) -> tuple[str, bool, Script]:
    """Family, whether it is held out, and the request."""
    if isinstance(step, TimmStep):
        from lab.steps.image_steps import family_of, fitted_on, timm_request

        return family_of(step.model), not fitted_on(step), timm_request(step)
    from lab.steps.image_steps import published_request

    return "published", True, published_request(step)
