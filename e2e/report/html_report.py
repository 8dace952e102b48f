"""A prediction as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from costmodel.base.errors import OutputError
from costmodel.base.whole_file import write_whole
from e2e.explain.prediction import Prediction
from e2e.report.fact_lines import (
    ADVICE_HEAD,
    advice_remarks,
    advice_rows,
    heading,
    overhead_meanings,
    speeds,
)
from e2e.report.html_parts import STYLE, bars, table, text
from e2e.report.rank_page import collectives_section, ranks_section
from e2e.report.text_report import memory_parts, milliseconds, peak_memory, phases, title


def write_report(prediction: Prediction, path: Path) -> None:
    """Writes the page; ``OutputError`` if it cannot."""
    try:
        write_whole(path, page(prediction))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def page(prediction: Prediction) -> str:
    """The HTML text. Everything from the model is escaped."""
    low, high = prediction.interval_seconds
    several = prediction.gpus > 1
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(prediction.workload)}</title>",
        f"<style>{STYLE}</style><h1>{text(title(prediction))}</h1>",
        f"<p class=big>{milliseconds(prediction.iteration_seconds)} per step</p>",
        f"<p>80 % interval {milliseconds(low)} to {milliseconds(high)}</p>",
        table(("", ""), [*heading(prediction), *speeds(prediction)]),
        _advice(prediction),
        *(f"<p>{text(note)}</p>" for note in prediction.notes),
        *(f"<p class=warn>{text(warning)}</p>" for warning in prediction.warnings),
        _facts(prediction),
        "<h2>Critical path across ranks</h2>" + bars(prediction.attribution) if several else "<h2>Critical path</h2>",
        _path(prediction),
        ranks_section(prediction) if several else "",
        collectives_section(prediction) if prediction.collectives else "",
        *(
            f"<h2>Device time {text(key.replace('_', ' '))}</h2>{bars(values)}"
            for key, values in prediction.breakdown.items()
        ),
        f"<h2>Host time</h2>{bars(prediction.overheads)}<p>{text(overhead_meanings(prediction))}</p>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part)


def _facts(prediction: Prediction) -> str:
    rows = {
        **{name: milliseconds(seconds) for name, seconds in phases(prediction).items()},
        "GPU active": milliseconds(prediction.gpu_active_seconds),
        "GPU idle": milliseconds(prediction.gpu_idle_seconds),
        "critical path on the host": f"{prediction.host_bound_fraction:.0%}",
        "peak memory": peak_memory(prediction) or "not known",
        "memory of the fullest rank": memory_parts(prediction) or "not known",
        "launches": str(prediction.kernels),
        "coverage": ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items()),
    }
    if prediction.gpus > 1:
        rows["cluster"] = f"{prediction.cluster}, {prediction.nodes} nodes"
    if len(prediction.ranks) > 1:
        rows["phases, GPU, device and host time"] = (
            f"of rank {prediction.longest_computing.rank}, which computes longest"
        )
    return table(("", ""), rows.items())


def _advice(prediction: Prediction) -> str:
    """What to change, where that was asked."""
    if prediction.advice is None:
        return ""
    rows = advice_rows(prediction.advice)
    listed = table(ADVICE_HEAD, rows) if rows else ""
    return f"<h2>What to change</h2>{listed}" + "".join(
        f"<p>{text(line)}</p>" for line in advice_remarks(prediction.advice, prediction.fits)
    )


def _path(prediction: Prediction) -> str:
    head = ("kind", "operator", "time", "segments", "waits mostly for")
    rows = (
        (part.kind, part.name, milliseconds(part.seconds), str(part.count), part.waits_for)
        for part in prediction.critical_path
    )
    return table(head, rows)
