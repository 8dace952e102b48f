"""The section ``vision`` of ``python -m lab.validate``: predictions of measured steps of image models.

The steps are timm's results in the data folder and figures published by NVIDIA. All but ResNet-50 need timm to build
the models (:mod:`e2e.capture.models.image_models`); if it is absent the section reports that and skips them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from costmodel.base.errors import InputError, ProjectError
from costmodel.cost_model import Estimate
from lab.data.data_folder import BROUGHT
from lab.data.timm_steps import TimmStep, read_timm, timm_files
from lab.validate.cost_models import Accuracy, accuracy

if TYPE_CHECKING:
    from e2e.sources.known_requests import Script
    from lab.steps.image_steps import PublishedStep

    MeasuredStep = TimmStep | PublishedStep


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
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
        if self.skipped:
            console.print(f"vision: not all of it: {self.skipped}", soft_wrap=True)
        if len(self.results) <= _FEW:
            console.print(self._cases())
        table = Table("image models", "", "cases", "MAPE", "median", "p90", "bias", "in interval", box=None)
        for name, kind, each in self.figures():
            errors = (f"{value:.1%}" for value in (each.mape, each.median, each.p90))
            table.add_row(name, kind, str(each.count), *errors, f"{each.bias:+.1%}", f"{each.interval:.0%}")
        console.print(table)
        for name, reason in self.left_out.items():
            console.print(f"left out: {name}: {reason}", soft_wrap=True)

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


def validate_vision(steps: Iterable[MeasuredStep]) -> VisionSection:
    """Predict ``steps`` one by one by the public interface (``predict`` of a script); one that cannot be captured is
    skipped with the reason.
    """
    from e2e.sources.predict_request import predict_request

    results: list[VisionResult] = []
    left_out: dict[str, str] = {}
    for count, step in enumerate(steps, 1):
        family, held_out, request = _asked(step)
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


def _asked(step: MeasuredStep) -> tuple[str, bool, Script]:
    """Family, whether it is held out, and the request."""
    if isinstance(step, TimmStep):
        from lab.steps.image_steps import family_of, fitted_on, timm_request

        return family_of(step.model), not fitted_on(step), timm_request(step)
    from lab.steps.image_steps import published_request

    return "published", True, published_request(step)
