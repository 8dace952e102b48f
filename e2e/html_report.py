"""A prediction as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from pathlib import Path

from costmodel.errors import OutputError
from e2e.prediction import Prediction
from e2e.text_report import milliseconds

ROWS = 25
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}td,th{padding:.2rem .6rem;text-align:left}
th{border-bottom:2px solid #888}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr:nth-child(even){background:#f4f4f4}.bar{background:#4a7;height:.8rem}.warn{background:#fe9;padding:.4rem .8rem}
.big{font-size:2rem;font-weight:600}
"""


def write_report(prediction: Prediction, path: Path) -> None:
    """Writes the page; ``OutputError`` if it cannot."""
    write_page(page(prediction), path)


def write_page(content: str, path: Path) -> None:
    """Writes an HTML page; ``OutputError`` if it cannot."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def page(prediction: Prediction) -> str:
    """The HTML text. Everything from the model is escaped."""
    low, high = prediction.interval_seconds
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(prediction.workload)}</title>",
        f"<style>{STYLE}</style><h1>{text(prediction.workload)} on {text(prediction.machine)}</h1>",
        f"<p class=big>{milliseconds(prediction.iteration_seconds)} per step</p>",
        f"<p>80 % interval {milliseconds(low)} to {milliseconds(high)}</p>",
        *(f"<p>{text(note)}</p>" for note in prediction.notes),
        *(f"<p class=warn>{text(warning)}</p>" for warning in prediction.warnings),
        _facts(prediction),
        "<h2>Critical path</h2>",
        _path(prediction),
        *(
            f"<h2>Device time {text(key.replace('_', ' '))}</h2>{bars(values)}"
            for key, values in prediction.breakdown.items()
        ),
        f"<h2>Host time</h2>{bars(prediction.overheads)}",
        "</html>",
    ]
    return "\n".join(parts)


def _facts(prediction: Prediction) -> str:
    memory = "not known"
    if prediction.peak_memory_bytes is not None:
        memory = f"{prediction.peak_memory_bytes / 2**30:.2f} of {prediction.memory_capacity_bytes / 2**30:.0f} GiB"
        memory += "" if prediction.fits else ": does not fit"
    rows = {
        "forward": milliseconds(prediction.forward_seconds),
        "backward": milliseconds(prediction.backward_seconds),
        "optimizer": milliseconds(prediction.optimizer_seconds),
        "GPU active": milliseconds(prediction.gpu_active_seconds),
        "GPU idle": milliseconds(prediction.gpu_idle_seconds),
        "critical path on the host": f"{prediction.host_bound_fraction:.0%}",
        "peak memory": memory,
        "launches": str(prediction.kernels),
        "coverage": ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items()),
    }
    return table(("", ""), ((name, value) for name, value in rows.items()))


def _path(prediction: Prediction) -> str:
    head = ("kind", "operator", "time", "segments", "waits mostly for")
    rows = (
        (part.kind, part.name, milliseconds(part.seconds), str(part.count), part.waits_for)
        for part in prediction.critical_path
    )
    return table(head, rows)


def bars(values: Mapping[str, float]) -> str:
    """Seconds by name, with their share of the sum as bars."""
    whole = sum(values.values()) or 1.0
    rows = []
    for name, seconds in list(values.items())[:ROWS]:
        bar = f"<div class=bar style='width:{100 * seconds / whole:.1f}%'></div>"
        figures = f"<td class=n>{milliseconds(seconds)}<td class=n>{seconds / whole:.1%}"
        rows.append(f"<tr><td>{text(name)}{figures}<td>{bar}")
    return f"<table><tr><th>name<th class=n>time<th class=n>share<th>{''.join(rows)}</table>"


def table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of text, escaped."""
    title = "".join(f"<th>{text(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{title}{body}</table>"


def text(value: str) -> str:
    """Escaped."""
    return html.escape(value, quote=True)
