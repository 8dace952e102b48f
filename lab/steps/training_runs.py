"""Predictions of published training steps, in separate processes; results are cached on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from costmodel.base.errors import ProjectError
from costmodel.base.output_files import user_folder, write_whole
from costmodel.base.process import usable_cores
from e2e.explain.intervals import Deviations
from e2e.parallelism.capture_cache import capture_key
from e2e.price.speed_band import SpeedBand, StepErrors, chip_name, load_speed_band
from lab.command_line import show_progress
from lab.steps.training import BF16, AskedStep, TrainingRow, asked_step

if TYPE_CHECKING:
    from e2e.sources.prepared_step import PreparedStep

# Kinds of the critical path that run on multiprocessors.
KERNEL_KINDS = ("compute", "memory", "kernel")


@dataclass(frozen=True)
class PredictedStep:
    """Prediction of one row, without parameters fitted to whole steps."""

    seconds: float = 0.0
    interval_seconds: tuple[float, float] = (0.0, 0.0)
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int = 0
    # Memory that does not fit.
    shortage: str | None = None
    coverage: Mapping[str, float] | None = None
    # Seconds of the critical path by kind.
    parts: Mapping[str, float] | None = None
    # Error message of `predict`.
    failure: str | None = None
    # Peak without the allocator's reserve.
    allocated_bytes: int | None = None
    # By family of kernels on the critical path, and of the host: seconds by which they may be faster and slower, and
    # their time (:class:`e2e.explain.intervals.Deviations`).
    below: Mapping[str, float] = field(default_factory=dict)
    above: Mapping[str, float] = field(default_factory=dict)
    taken: Mapping[str, float] = field(default_factory=dict)
    # See :func:`e2e.price.speed_band.chip_name`.
    chip: str = ""
    warnings: Sequence[str] = ()
    # The same step simulated with kernels that take `1 + lost` times as long.
    lost: float = 0.0
    banded: Mapping[str, Any] | None = None

    @property
    def kernel_share(self) -> float:
        """Share of the critical path that slows down on a slower GPU."""
        parts = self.parts or {}
        whole = sum(parts.values())
        return sum(parts.get(kind, 0.0) for kind in KERNEL_KINDS) / whole if whole else 0.0

    def slowed(self, slowdown: float) -> PredictedStep:
        """The step with kernels that take ``1 + slowdown`` times as long: from the simulation with that slowdown if
        available, else with an unchanged critical path, so that transfers that slower kernels would hide stay exposed.
        """
        if self.banded is not None and math.isclose(slowdown, self.lost, abs_tol=1e-9):
            return replace(self, **self.banded)
        factor = 1.0 + slowdown * self.kernel_share
        sums = ({name: value * factor for name, value in each.items()} for each in (self.below, self.above, self.taken))
        below, above, taken = sums
        return replace(self, seconds=self.seconds * factor, below=below, above=above, taken=taken)

    def interval(self, errors: StepErrors | None = None) -> tuple[float, float]:
        """Interval of the step according to ``errors``."""
        return Deviations(self.below, self.above, self.taken).around(self.seconds, errors)


def predict_steps(
    steps: Sequence[AskedStep], kept: Path, workers: int | None = None, *, banded: bool = True
) -> Iterator[PredictedStep]:
    """Predictions of every step, in their order. ``kept``: folder for captures and results of this version of the
    program; ``workers``: processes (``None``: one per core); ``banded``: with the band of speeds too.
    """
    from e2e.sweeps.worker_process import each_in_processes

    known = ((place, _known(step, kept, banded)) for place, step in enumerate(steps))
    found = {place: answer for place, answer in known if answer is not None}
    missing = {place: (step, kept, banded) for place, step in enumerate(steps) if place not in found}
    for place, answer in each_in_processes(predict_step, missing, workers or usable_cores()):
        found[place] = answer
        show_progress(len(found), len(steps), steps[place].row.name)
    for place in range(len(steps)):
        yield found.get(place, PredictedStep(failure="its process died, most likely for lack of memory"))


def predict_step(task: tuple[AskedStep, Path, bool]) -> PredictedStep:
    """Prediction of one step, as made by ``python -m e2e predict``; cached in the folder of ``task``."""
    step, kept, banded = task
    try:
        bare = _known(step, kept, False) or _predicted(step, kept)
        answer = _with_band(bare, step, kept) if banded and bare.failure is None else bare
    except ProjectError as error:
        answer = PredictedStep(failure=str(error))
    path = kept / f"{_key(step, banded)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(vars(answer)).encode())
    return answer


def prepared(step: AskedStep, kept: Path) -> PreparedStep:
    """Step of a row, checked and prepared by ``predict`` but unpriced; captures are cached in ``kept``."""
    from e2e.sources.built_in_model import prepare_spread
    from e2e.sources.requests import SpreadModel

    request = SpreadModel(
        model_config=_configuration(step, kept),
        batch_size=step.batch_size,
        sequence_length=step.sequence_length,
        document_length=step.document_length,
        dtype="bfloat16",
        attention=step.attention,
        compile=step.compiled,
        cuda_graph=step.cuda_graph,
        parallel=step.spec,
        stack=step.stack,
        lora=step.lora,
        precision=step.precision,
        routing=step.routing,
        gpu=step.row.gpu,
        gpus=step.row.gpus,
    )
    return prepare_spread(request, kept)


def _predicted(step: AskedStep, kept: Path) -> PredictedStep:
    from e2e.sources.prepared_step import run_step

    # Parameters fitted to whole steps are excluded here: the validation decides which steps they are fitted to.
    ready = prepared(step, kept)
    answer = run_step(replace(ready, band=None))
    found, deviations = answer.prediction, answer.deviations
    return PredictedStep(
        found.iteration_seconds,
        found.interval_seconds,
        found.peak_memory_bytes,
        found.memory_capacity_bytes,
        found.memory_shortage,
        dict(found.coverage),
        dict(found.attribution),
        below=dict(deviations.below),
        above=dict(deviations.above),
        taken=dict(deviations.taken),
        chip=chip_name(ready.setting.machine),
        allocated_bytes=max((rank.allocated_bytes for rank in found.ranks if rank.allocated_bytes), default=None),
        warnings=list(found.warnings),
    )


def _with_band(bare: PredictedStep, step: AskedStep, kept: Path) -> PredictedStep:
    """``bare`` with the same step simulated with the band fitted without its source."""
    from e2e.sources.prepared_step import run_step

    band = left_out_band(step.row.family)
    own = None if band is None else band.on(bare.chip)
    lost = 0.0 if own is None else own.slowdown(step.row.gpus)
    if not lost:
        return bare
    again = run_step(replace(prepared(step, kept), band=own))
    slower = again.deviations
    banded = {
        "seconds": again.prediction.iteration_seconds,
        "below": dict(slower.below),
        "above": dict(slower.above),
        "taken": dict(slower.taken),
    }
    return replace(bare, lost=lost, banded=banded)


def left_out_band(source: str) -> SpeedBand | None:
    """Shipped band of speeds, or the one fitted to the other sources' steps if ``source`` contributed to it."""
    band = load_speed_band()
    return None if band is None else band.left_out.get(source, band)


def _configuration(step: AskedStep, kept: Path) -> Path:
    """Configuration file of the model with the row's changes."""
    from e2e.capture.models.configurations import PRESETS

    text = json.dumps({**PRESETS[step.model], **step.config}, indent=1)
    path = kept / "-".join([step.model, *map(str, step.config.values())])
    path = path.with_name(path.name + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text.encode())
    return path


def _key(step: AskedStep, banded: bool) -> str:
    band = left_out_band(step.row.family) if banded else None
    record: dict[str, Any] = {"step": str(step), "band": None if band is None else [band.width, band.widths]}
    return f"step-{capture_key(record)}"


def _known(step: AskedStep, kept: Path, banded: bool) -> PredictedStep | None:
    try:
        record = json.loads((kept / f"{_key(step, banded)}.json").read_text(encoding="utf-8"))
        return PredictedStep(**{**record, "interval_seconds": tuple(record["interval_seconds"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


class BareStep(NamedTuple):
    """Published step and its prediction without parameters fitted to any step."""

    asked: AskedStep
    predicted: PredictedStep

    @property
    def teaches(self) -> bool:
        """True if the band is fitted to such steps."""
        return teaches(self.asked.row)


def teaches(row: TrainingRow) -> bool:
    """True if the band is fitted to such rows: dense models in 16 bits, on several GPUs, not held out."""
    return row.precision.lower() in BF16 and row.gpus > 1 and row.ep <= 1 and not row.held_out


def predicted_steps(
    rows: Sequence[TrainingRow], only: str = "", *, banded: bool = True
) -> tuple[list[BareStep], dict[str, str], dict[str, str]]:
    """Selected rows with their predictions; reasons for rows without a request; errors of ``predict``, by row.
    ``banded``: with the band of speeds too.
    """
    chosen = [row for row in rows if only in f"{row.gpu}/{row.name}"]
    asked = [(row, asked_step(row)) for row in chosen]
    steps = [step for _, step in asked if isinstance(step, AskedStep)]
    left_out = {f"{row.gpu}/{row.name}": step for row, step in asked if isinstance(step, str)}
    found, failed = [], {}
    for step, answer in zip(steps, predict_steps(steps, answers_folder(), banded=banded), strict=True):
        if answer.failure is None:
            found.append(BareStep(step, answer))
        else:
            failed[f"{step.row.gpu}/{step.row.name}"] = answer.failure
    return found, left_out, failed


def answers_folder() -> Path:
    """Cache folder, ``$XDG_CACHE_HOME/costmodel/validate``, else below ``~/.cache``; results are keyed by a digest of
    this program.
    """
    return user_folder("cache") / "validate"
