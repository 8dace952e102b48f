"""A prediction as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from pathlib import Path

from costmodel.errors import OutputError
from e2e.prediction import Prediction

ROWS = 25
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}td,th{padding:.2rem .6rem;text-align:left}
th{border-bottom:2px solid #888}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr:nth-child(even){background:#f4f4f4}.bar{background:#4a7;height:.8rem}.warn{background:#fe9;padding:.4rem .8rem}
.big{font-size:2rem;font-weight:600}
"""


def write_report(prediction: Prediction, path: Path) -> None:
    """Writes the page; ``OutputError`` if it cannot."""
    try:
        path.write_text(page(prediction), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def page(prediction: Prediction) -> str:
    """The HTML text. Everything from the model is escaped."""
    low, high = prediction.interval_seconds
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(prediction.workload)}</title>",
        f"<style>{_STYLE}</style><h1>{_text(prediction.workload)} on {_text(prediction.machine)}</h1>",
        f"<p class=big>{_ms(prediction.iteration_seconds)} per step</p><p>80 % interval {_ms(low)} to {_ms(high)}</p>",
        *(f"<p class=warn>{_text(warning)}</p>" for warning in prediction.warnings),
        _facts(prediction),
        "<h2>Critical path</h2>",
        _path(prediction),
        *(
            f"<h2>Device time {_text(key.replace('_', ' '))}</h2>{_bars(values)}"
            for key, values in prediction.breakdown.items()
        ),
        f"<h2>Host time</h2>{_bars(prediction.overheads)}",
        "</html>",
    ]
    return "\n".join(parts)


def _facts(prediction: Prediction) -> str:
    memory = "not known"
    if prediction.peak_memory_bytes is not None:
        memory = f"{prediction.peak_memory_bytes / 2**30:.2f} of {prediction.memory_capacity_bytes / 2**30:.0f} GiB"
        memory += "" if prediction.fits else ": does not fit"
    rows = {
        "forward": _ms(prediction.forward_seconds),
        "backward": _ms(prediction.backward_seconds),
        "optimizer": _ms(prediction.optimizer_seconds),
        "GPU active": _ms(prediction.gpu_active_seconds),
        "GPU idle": _ms(prediction.gpu_idle_seconds),
        "critical path on the host": f"{prediction.host_bound_fraction:.0%}",
        "peak memory": memory,
        "launches": str(prediction.kernels),
        "coverage": ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items()),
    }
    return _table(("", ""), ((name, value) for name, value in rows.items()))


def _path(prediction: Prediction) -> str:
    head = ("kind", "operator", "time", "segments", "waits mostly for")
    rows = (
        (part.kind, part.name, _ms(part.seconds), str(part.count), part.waits_for) for part in prediction.critical_path
    )
    return _table(head, rows)


def _bars(values: Mapping[str, float]) -> str:
    whole = sum(values.values()) or 1.0
    rows = []
    for name, seconds in list(values.items())[:ROWS]:
        bar = f"<div class=bar style='width:{100 * seconds / whole:.1f}%'></div>"
        rows.append(f"<tr><td>{_text(name)}<td class=n>{_ms(seconds)}<td class=n>{seconds / whole:.1%}<td>{bar}")
    return f"<table><tr><th>name<th class=n>time<th class=n>share<th>{''.join(rows)}</table>"


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    title = "".join(f"<th>{_text(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{title}{body}</table>"


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
