"""``report.html`` of a build: the content of ``summary.json`` as one self-contained page, which can be regenerated.

``tune.html`` lays it out, ``profiles.html`` the page of a build for several shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED, read_text
from costmodel.base.units import format_quantity
from costmodel.pages.charts import PALETTE, inline_chart
from costmodel.pages.document import render, write_page
from fusion.model.build_folder import REPORT, SUMMARY, describe_inputs
from fusion.model.named_arrays import TensorInfo
from fusion.report.console_report import memory_lines, precision_lines, scaled, short_names
from fusion.report.pictures import FUSED, HIGH, WIDE, draw_frontier, draw_roofline, network_picture

_OURS, _APART, _PEER = "#228833", "#4477aa", "#aa3377"
_LABELLED_SITES = 12
_MEMORY = {"activations": "activation_bytes", "tile buffers": "scratch_bytes", "weights": "weight_bytes"}


def write_reports(build: Path) -> list[Path]:
    """Write ``report.html`` into ``build`` and into the folder of every profile, from their ``summary.json``.

    Raises ``InputError`` without a valid summary, ``OutputError`` if a page cannot be written.
    """
    summary = read_summary(build)
    try:
        pages = {build / REPORT: page(summary) if "profiles" not in summary else _index(summary)}
        for profile in summary.get("profiles", ()):
            pages[build / Path(profile["folder"]).name / REPORT] = page(profile)
    except MALFORMED:
        raise InputError(f"{build / SUMMARY}: not what `tune` wrote; tune the model again") from None
    for path, text in pages.items():
        write_page(path, text)
    return list(pages)


def remove_reports(build: Path) -> None:
    """Delete the pages of an earlier build in this folder, which would be outdated."""
    folders = [build, *(build / Path(each["folder"]).name for each in read_summary(build).get("profiles", ()))]
    for folder in folders:
        (folder / REPORT).unlink(missing_ok=True)


def read_summary(build: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a build folder; raise ``InputError`` that names the file."""
    path = build / SUMMARY
    try:
        found = json.loads(read_text(path, "record"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing, so {build} is no finished build; run `tune` (again)") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); tune the model again") from error
    if not isinstance(found, dict) or not ("profiles" in found or "latency_seconds" in found):
        raise InputError(f"{path}: is no summary of `tune`; tune the model again")
    return found


def page(summary: Mapping[str, Any]) -> str:
    """Page of one build."""
    short = _short(summary)
    latency = {name: time for name, time in summary["latency_seconds"].items() if time is not None}
    ours = latency.get("tuned")
    # A build for another CPU has no stages, finals and curve.
    seconds = summary.get("stage_seconds", {})
    stages = dict(zip(seconds, [*PALETTE, *PALETTE], strict=False))
    precision = summary.get("precision", {})
    choice, finals = precision.get("choice"), summary.get("finals", {})
    return render(
        "fusion.report/tune.html",
        summary=summary,
        title=Path(summary["model"]).name,
        ours=ours,
        beside=_beside(latency),
        facts_of_build=_facts(summary),
        engines=[] if ours is None or len(latency) < 2 else _engines(summary, latency),
        engine_colours={"our network": _OURS, "ours, another choice": _APART, "another engine": _PEER},
        picture=network_picture(summary["network"], short),
        fused=FUSED,
        wide=WIDE,
        high=HIGH,
        roofline=_roofline(summary, short),
        sites=_sites(summary, short),
        kernels=_kernels(summary, short),
        layers=_layers(summary, short),
        curve=_curve(summary.get("tuning_curve", ())),
        stage_seconds=seconds,
        stage_colours=stages,
        stage_key={f"{name} {format_quantity(seconds[name], 's', 3)}": colour for name, colour in stages.items()},
        finals=[
            (
                each["name"],
                str(each["fused_sites"]),
                f"{each['median_seconds'] * 1e3:.3f}",
                "shipped" if each["name"] == finals.get("shipped") else "",
            )
            for each in finals.get("networks", ())
        ],
        precision=precision_lines(precision),
        frontier=None
        if choice is None
        else inline_chart("Latency over error", lambda axes: draw_frontier(axes, precision), 4.5),
        memory=memory_lines(summary["memory"]),
        memory_bars=[
            (name.replace("_", " "), {part: row[key] or 0 for part, key in _MEMORY.items()}, "")
            for name, row in summary["memory"].items()
            if row.get("activation_bytes") is not None
        ],
        memory_colours=dict(zip(_MEMORY, ("#4477aa", "#ee7733", "#228833"), strict=True)),
        others=[
            (other["name"], other["operator"].removeprefix("relax."), other["reason"])
            for other in summary["other_operators"]
        ],
    )


def _short(summary: Mapping[str, Any]) -> dict[str, str]:
    """Displayed layer names: shortened separately for layers of sites, which share most words, and for others."""
    sites = {layer["name"] for site in summary["sites"] for layer in site["layers"]}
    others = {layer["name"] for layer in summary["network"]["layers"]} - sites
    return {**short_names(others), **short_names(sites)}


def _together(names: Sequence[str]) -> str:
    """Join layer names, with their common beginning once: ``layer_3: conv_3x3 + reduce_1x1``."""
    head = commonprefix(list(names))
    head = head[: max(head.rfind(mark) for mark in "_/.") + 1]
    if len(names) < 2 or not head:
        return " + ".join(names)
    return f"{head.rstrip('_/.')}: {' + '.join(name[len(head) :] for name in names)}"


def _index(summary: Mapping[str, Any]) -> str:
    """Page of several profiles, with a row and a link for each."""
    rows = [
        (
            _inputs(profile),
            f"{Path(profile['folder']).name}/{REPORT}",
            *(scaled(profile["latency_seconds"].get(engine), 1e3, 3) for engine in ("tuned", "onnxruntime")),
            f"{_fused(profile)} of {len(profile['sites'])}",
        )
        for profile in summary["profiles"]
    ]
    title = f"{Path(summary['model']).name}, tuned for {len(rows)} shapes"
    return render("fusion.report/profiles.html", title=title, rows=rows)


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    machine = summary["machine"]
    return {
        "input": _inputs(summary),
        "machine": f"{machine['name']} ({machine['description']}), {machine['threads']} threads, {machine['mcpu']}",
        "sites fused": f"{_fused(summary)} of {len(summary['sites'])}",
        "stored in": str(summary["precision"]["shipped"]),
        "tuning": f"{summary['trials']:,} kernels measured, {summary['failures']:,} failed, "
        f"{summary['wall_seconds']:.0f} s" + (", stopped early" if summary["interrupted"] else ""),
        "checked": _checked(summary),
    }


def _beside(latency: Mapping[str, float]) -> str | None:
    rivals = {name: time for name, time in latency.items() if _is_peer(name)}
    if "tuned" not in latency or not rivals:
        return None
    best = min(rivals, key=lambda name: rivals[name])
    return f"{rivals[best] / latency['tuned']:.2f} times as fast as {best}, the fastest of the others"


def _checked(summary: Mapping[str, Any]) -> str:
    check = summary.get("check") or {}
    if check.get("reference") is None:
        return str(check.get("why_not") or "no")
    share = check.get("worst_share_of_allowed")
    how = "" if share is None else f", at worst {share:.1%} of the error allowed ({check.get('worst_output')})"
    return f"against {check['reference']} on {len(check.get('inputs', ()))} inputs{how}"


def _engines(summary: Mapping[str, Any], latency: Mapping[str, float]) -> list[tuple[str, dict[str, float], str]]:
    """Bars of the median times, the fastest first."""
    rows = []
    for name, time in sorted(latency.items(), key=lambda item: item[1]):
        kind = "another engine" if _is_peer(name) else "our network" if name == "tuned" else "ours, another choice"
        text = f"{time * 1e3:.3f} ms, {time / latency['tuned']:.2f} times as long"
        if name == "tuned_without_fusion" and not _fused(summary):
            text += " (identical: nothing is fused)"
        rows.append((name.replace("_", " "), {kind: time}, text))
    return rows


def _roofline(summary: Mapping[str, Any], short: Mapping[str, str]) -> str | None:
    """Chart of every measured site before and after fusion, and of the kernels of single layers."""
    network = summary["network"]
    moves: dict[tuple[str, str], list[Any]] = {("measured, kept apart", _PEER): [], ("fused in the network", _OURS): []}
    labels = []
    for site in sorted(summary["sites"], key=_gain):
        before, after = site["measured"]["unfused_seconds"], site["measured"]["fused_seconds"]
        if before and after:
            name = _together([short[layer["name"]] for layer in site["layers"]])
            times = f"{format_quantity(before, 's', 3)} -> {format_quantity(after, 's', 3)}"
            ends = (site["unfused_intensity"], site["flops"] / before), (site["fused_intensity"], site["flops"] / after)
            kind = ("fused in the network", _OURS) if site["fused_in_model"] else ("measured, kept apart", _PEER)
            moves[kind].append((*ends, f"{name}: {times}; {site['decision']}"))
            if site["fused_in_model"]:
                labels.append((name, ends[1]))
    singles = [
        (
            (kernel["intensity"], kernel["flops"] / kernel["seconds"]),
            f"{short[kernel['layers'][0]]}: {format_quantity(kernel['seconds'], 's', 3)}",
        )
        for kernel in network["kernels"]
        if kernel["seconds"] and kernel["flops"] and kernel["intensity"] > 0 and len(kernel["layers"]) == 1
    ]
    if not network["ceilings"]["flops"] or not (any(moves.values()) or singles):
        return None
    return inline_chart(
        "Roofline of the machine with every site before and after fusion",
        lambda axes: draw_roofline(axes, network["ceilings"], moves, singles, labels[: -_LABELLED_SITES - 1 : -1]),
        5.5,
    )


def _gain(site: Mapping[str, Any]) -> float:
    """Seconds saved by fusing; 0 if they were not measured."""
    before, after = site["measured"]["unfused_seconds"], site["measured"]["fused_seconds"]
    return float(before - after) if before and after else 0.0


def _sites(summary: Mapping[str, Any], short: Mapping[str, str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for site in sorted(summary["sites"], key=lambda each: not each["fused_in_model"]):
        predicted, measured = site["predicted"], site["measured"]
        before, after = measured["unfused_seconds"], measured["fused_seconds"]
        rows.append(
            (
                _together([short[layer["name"]] for layer in site["layers"]]),
                "fused" if site["fused_in_model"] else "apart",
                *(scaled(time, 1e6, 1) for time in (predicted["unfused_seconds"], predicted["fused_seconds"])),
                *(scaled(time, 1e6, 1) for time in (before, after)),
                f"{before / after:.2f}" if before and after else "",
                site["decision"],
            )
        )
    return rows


def _kernels(summary: Mapping[str, Any], short: Mapping[str, str]) -> list[Sequence[str]]:
    """Rows of the kernels that were measured, the longest first."""
    measured = [kernel for kernel in summary["network"]["kernels"] if kernel["seconds"]]
    whole = sum(kernel["seconds"] for kernel in measured)
    return [
        (
            _together([short[name] for name in kernel["layers"]]),
            f"{kernel['seconds'] * 1e6:.1f}",
            f"{kernel['seconds'] / whole:.1%}",
            f"{kernel['predicted_seconds'] * 1e6:.1f}",
            f"{kernel['flops'] / kernel['seconds'] / 1e9:.1f}",
            kernel["bound"],
        )
        for kernel in sorted(measured, key=lambda each: -each["seconds"])
    ]


def _layers(summary: Mapping[str, Any], short: Mapping[str, str]) -> list[Sequence[str]]:
    """Rows of layers in comparison with the requested engine, if any."""
    beside = summary["layers"]
    if beside is None:
        return []
    return [
        (
            ", ".join(short.get(name, name) for name in row["layers"]),
            scaled(row["ours_seconds"], 1e6, 1),
            scaled(row["theirs_seconds"], 1e6, 1),
            f"{row['lost_seconds'] * 1e6:+.1f}",
        )
        for row in [*beside["rows"], {**beside["others"], "layers": ["everything else"]}]
    ]


def _curve(points: Sequence[Mapping[str, Any]]) -> str | None:
    """Chart of the sum of the best kernels over the time of tuning."""
    if len(points) < 2:
        return None
    times = [point["elapsed_seconds"] for point in points]
    best = [point["network_seconds"] * 1e3 for point in points]

    def draw(axes: Any) -> None:
        axes.step(times, best, where="post", color=_APART, marker="o", ms=3)
        axes.set(xlabel="seconds since tuning began", ylabel="ms, the best kernels in sum")
        axes.set_title(f"{best[0]:.3g} ms when every kernel had been measured once, {best[-1]:.3g} ms after "
                       f"{points[-1]['trials']:,} trials", size=9)  # fmt: skip

    return inline_chart("The sum of the best kernels over the time of tuning", draw, 3.5)


def _inputs(summary: Mapping[str, Any]) -> str:
    return describe_inputs(
        [TensorInfo(info["name"], tuple(info["shape"]), info["dtype"]) for info in summary["inputs"]]
    )


def _fused(summary: Mapping[str, Any]) -> int:
    return sum(site["fused_in_model"] for site in summary["sites"])


def _is_peer(name: str) -> bool:
    """True if a latency is that of another engine, not of one of our networks."""
    return name != "tuned" and not name.startswith(("tuned_", "float32"))
