"""Predicted against measured whole models: the public labels of NeuSight (ASPLOS 2025), read in place.

Cases are named model-mode-sequence-batch; FP32, TF32 off, eager attention, Hugging Face modules; ``train`` there is
forward + backward. Compiled (``-fusion``) cases are predicted with ``compiled`` and summed up apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from costmodel.base.errors import InputError
from costmodel.cost_model import Estimate
from e2e.step.operator_trace import OperatorTrace
from lab.data.data_folder import AGAIN, BROUGHT
from lab.validate.cost_models import Accuracy, accuracy

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
    try:
        model, mode, length, batch = path.stem.removesuffix("-fusion").rsplit("-", 3)
        seconds = float(json.loads(path.read_text(encoding="utf-8"))["e2e_latency"]) / 1e3
        return LabelledCase(MACHINES[path.parent.name], model, mode, int(length), int(batch), seconds, compiled)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a measured model ({error!r}); {AGAIN}") from None


def validate_models(data: Path, only: str = "") -> Validation:
    """Predict every case whose ``gpu/name`` contains ``only``; each model is captured once per shape."""
    from costmodel.machines.cluster import single_gpu
    from costmodel.machines.machine_file import load_machine
    from e2e.explain.predictor import Setting, predict
    from e2e.lowering.lower_trace import lower_step
    from e2e.price.host_overheads import load_overheads
    from e2e.step.options import StepOptions

    traces: dict[tuple[str, str, int, int], OperatorTrace] = {}
    results: list[CaseResult] = []
    left_out: dict[str, str] = {}
    for case in cases(data):
        where = f"{case.gpu}/{case.name}"
        if only not in where:
            continue
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
        prediction = predict(lowered.graph, setting, single_gpu(setting.machine), lowered.memory).prediction
        error = prediction.iteration_seconds / case.measured_seconds - 1.0
        results.append(
            CaseResult(case, prediction.iteration_seconds, prediction.interval_seconds, error, prediction.coverage)
        )
    if not results:
        raise InputError(f"{data / LABELS}: no case contains {only!r}; leave --only out to see all")
    return Validation(results, left_out)


def capture_case(data: Path, case: LabelledCase) -> OperatorTrace:
    """Operators of the measured case; see :mod:`lab.steps.labelled_models`."""
    from e2e.capture.models.transformer import PRESETS, read_config
    from e2e.capture.session import capture
    from e2e.step.options import StepOptions
    from lab.steps.labelled_models import label_workload

    options = StepOptions(mode="inference" if case.mode == "inf" else "forward-backward")
    path = data / CONFIGS / f"{case.model}.json"
    known = _BUILT_IN.get(case.model)
    config = PRESETS[known] if known and not path.exists() else read_config(path)
    return capture(label_workload(config, case.mode, case.batch_size, case.sequence_length, case.name), options)


def _by_gpu(results: Sequence[CaseResult]) -> Table:
    """Table of the errors of the eager steps of each GPU."""
    table = Table("GPU", "cases", "MAPE", "median", "p90", "worst", "bias", box=None)
    eager = [each for each in results if not each.case.compiled]
    for gpu in dict.fromkeys(each.case.gpu for each in eager):
        figures = _accuracy([each for each in eager if each.case.gpu == gpu])
        if figures is not None:
            errors = (figures.mape, figures.median, figures.p90, figures.worst)
            table.add_row(gpu, str(figures.count), *(f"{each:.1%}" for each in errors), f"{figures.bias:+.1%}")
    return table


def render_validation(validation: Validation) -> None:
    """Print the table of all cases and the error figures."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
    table = Table("GPU", "case", "measured ms", "predicted ms", "error", box=None)
    for each in validation.results:
        measured, predicted = each.case.measured_seconds * 1e3, each.predicted_seconds * 1e3
        table.add_row(each.case.gpu, each.case.name, f"{measured:.1f}", f"{predicted:.1f}", f"{each.error:+.1%}")
    console.print(table)
    console.print(_by_gpu(validation.results))
    for where, reason in validation.left_out.items():
        console.print(f"left out: {where}: {reason}", soft_wrap=True)
    batches = [abs(error) for error in validation.batches.values()]
    if batches:
        console.print(
            f"{len(batches)} pairs of batches, one predicted from what the other was measured to take: mean error "
            f"{sum(batches) / len(batches):.1%}, worst {max(batches):.1%}",
            soft_wrap=True,
        )
    for kind, figures in (("eager", validation.summary), ("compiled", validation.compiled_summary)):
        if figures is not None:
            console.print(
                f"{figures.count} {kind} cases: MAPE {figures.mape:.1%}, median {figures.median:.1%}, "
                f"p90 {figures.p90:.1%}, worst {figures.worst:.1%}, bias {figures.bias:+.1%}; "
                f"{figures.interval:.0%} inside their interval; time from "
                + ", ".join(f"{name} {share:.0%}" for name, share in figures.coverage.items()),
                soft_wrap=True,
            )
