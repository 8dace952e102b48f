"""``report.html`` of a build: the content of ``summary.json`` as one self-contained page, which can be regenerated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED, read_text
from costmodel.pages.charts import Axis, Chart, around, seconds_text, stacked_rows, with_prefix
from costmodel.pages.document import (
    BarCell,
    Cell,
    Html,
    NumberCell,
    contents,
    document,
    facts,
    joined,
    legend,
    section,
    table,
    tag,
    write_page,
)
from fusion.model.build_folder import REPORT, SUMMARY, describe_inputs
from fusion.model.named_arrays import TensorInfo
from fusion.report.console_report import memory_lines, precision_lines, short_names
from fusion.report.pictures import FUSED, network_picture

_OURS, _APART, _PEER, _SOFT = "#228833", "#4477aa", "#aa3377", "#9aa3ad"
_OLDER = "This build is older than what is shown here; `tune` makes it anew from its records."
_LABELLED_SITES = 12
# Extend the roofline below the slowest kernel of the network by this factor.
_ROOM_BELOW = 2.0


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
    """Page of one build, with all names escaped. Fields missing in summaries of older versions are left out."""
    short = _short(summary)
    parts: list[tuple[str, str, Html | None]] = [
        ("engines", "Beside other engines", _engines(summary)),
        ("network", "Network", _network(summary, short)),
        ("roofline", "Roofline", _roofline(summary, short)),
        ("sites", "Sites", _sites(summary, short)),
        ("layers", "Time per layer", _layers(summary, short)),
        ("tuning", "Tuning", _tuning(summary)),
        ("precision", "Precision", _precision(summary)),
        ("memory", "Memory", _memory(summary)),
        ("rest", "Everything else", _rest(summary)),
    ]
    there = [(name, title, content) for name, title, content in parts if content is not None]
    name = Path(summary["model"]).name
    body = [
        _head(summary),
        contents([(identifier, title) for identifier, title, _ in there]),
        *(section(title, content, identifier=identifier) for identifier, title, content in there),
    ]
    return document(f"{name}, tuned", body)


def _short(summary: Mapping[str, Any]) -> dict[str, str]:
    """Displayed layer names: shortened separately for layers of sites, which share most words, and for others."""
    sites = {layer["name"] for site in summary["sites"] for layer in site["layers"]}
    others = {layer["name"] for layer in (summary.get("network") or {}).get("layers", ())} - sites
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
    rows: list[Sequence[Cell]] = []
    for profile in summary["profiles"]:
        latency = profile["latency_seconds"]
        folder = Path(profile["folder"]).name
        rows.append(
            (
                tag("a", _inputs(profile), href=f"{folder}/{REPORT}"),
                _seconds(latency.get("tuned")),
                _seconds(latency.get("onnxruntime")),
                NumberCell(f"{_fused(profile)} of {len(profile['sites'])}", _fused(profile)),
            )
        )
    name = Path(summary["model"]).name
    body = (
        tag("h1", f"{name}, tuned for {len(rows)} shapes"),
        table(("profile", "tuned", "ONNX Runtime", "sites fused"), rows),
    )
    return document(f"{name}, tuned", body)


def _head(summary: Mapping[str, Any]) -> Html:
    latency = summary["latency_seconds"]
    ours = latency.get("tuned")
    rivals = {name: time for name, time in latency.items() if _is_peer(name) and time is not None}
    machine = summary["machine"]
    told = {
        "input": _inputs(summary),
        "machine": f"{machine['name']} ({machine['description']}), {machine['threads']} threads, {machine['mcpu']}",
        "sites fused": f"{_fused(summary)} of {len(summary['sites'])}",
        "stored in": str((summary.get("precision") or {}).get("shipped", "float32")),
        "tuning": f"{summary['trials']:,} kernels measured, {summary['failures']:,} failed, "
        f"{summary['wall_seconds']:.0f} s" + (", stopped early" if summary["interrupted"] else ""),
        "checked": _checked(summary),
    }
    answer = "not timed on this machine" if ours is None else seconds_text(ours)
    best = min(rivals, key=lambda name: rivals[name], default=None)
    beside = None
    if ours is not None and best is not None:
        beside = tag("p", f"{rivals[best] / ours:.2f} times as fast as {best}, the fastest of the others")
    return joined(
        (
            tag("h1", f"{Path(summary['model']).name} on {machine['name']}"),
            tag("p", answer, class_="answer"),
            beside,
            facts(told),
            *(tag("p", note, class_="soft") for note in summary["notes"]),
        )
    )


def _checked(summary: Mapping[str, Any]) -> str:
    check = summary.get("check") or {}
    if check.get("reference") is None:
        return str(check.get("why_not") or "no")
    share = check.get("worst_share_of_allowed")
    how = "" if share is None else f", at worst {share:.1%} of the error allowed ({check.get('worst_output')})"
    return f"against {check['reference']} on {len(check.get('inputs', ()))} inputs{how}"


def _engines(summary: Mapping[str, Any]) -> Html | None:
    latency = {name: time for name, time in summary["latency_seconds"].items() if time is not None}
    if len(latency) < 2 or latency.get("tuned") is None:
        return None
    ours = latency["tuned"]
    longest = max(latency.values())
    rows = []
    for name, time in sorted(latency.items(), key=lambda item: item[1]):
        colour = _PEER if _is_peer(name) else _OURS if name == "tuned" else _APART
        told = name.replace("_", " ")
        if name == "tuned_without_fusion" and not _fused(summary):
            told += " (identical: nothing is fused)"
        rows.append((told, _seconds(time), NumberCell(f"{time / ours:.2f}", time), BarCell(time / longest, colour)))
    return table(("engine", "median", "times as long", ""), rows)


def _network(summary: Mapping[str, Any], short: Mapping[str, str]) -> Html | None:
    network = summary.get("network")
    if not network:
        return tag("p", _OLDER, class_="soft")
    return joined(
        (
            tag("p", "Each box is a layer; the white line at its foot is the time of its kernel. What lies on one "
                     "orange block is computed by one kernel.", class_="soft"),
            network_picture(network, short),
        )
    )  # fmt: skip


def _roofline(summary: Mapping[str, Any], short: Mapping[str, str]) -> Html | None:
    """Chart of every site before and after fusion under the machine's ceilings; other kernels as faint dots."""
    network = summary.get("network")
    if not network or not network["ceilings"]["flops"]:
        return None
    moves = []
    for site in summary["sites"]:
        before, after = site["measured"]["unfused_seconds"], site["measured"]["fused_seconds"]
        if before and after and "flops" in site:
            name = _together([short[layer["name"]] for layer in site["layers"]])
            moves.append(
                (
                    name,
                    (site["unfused_intensity"], site["flops"] / before),
                    (site["fused_intensity"], site["flops"] / after),
                    site,
                )
            )
    alone = [
        (kernel["intensity"], kernel["flops"] / kernel["seconds"], kernel)
        for kernel in network["kernels"]
        if kernel["seconds"] and kernel["flops"] and kernel["intensity"] > 0 and len(kernel["layers"]) == 1
    ]
    if not moves and not alone:
        return None
    across = [point[0] for _, *ends, _ in moves for point in ends] + [x for x, _, _ in alone]
    up = [point[1] for _, *ends, _ in moves for point in ends] + [y for _, y, _ in alone]
    ceilings, bandwidths = network["ceilings"]["flops"], network["ceilings"]["bandwidths"]
    highest = max(ceilings.values())
    up = [*up, highest * 1.15]
    # A rejected fused kernel may be a hundred times as slow: such dots are drawn at the lower edge.
    worth_room = [
        rate for _, before, after, site in moves for rate in (before[1], after[1])[: 1 + site["fused_in_model"]]
    ]
    low = max(min(up), min([*worth_room, *(rate for _, rate, _ in alone), highest]) / _ROOM_BELOW, highest * 1e-3)
    x = Axis("flop per byte that enters or leaves the kernel", *around(across, logarithmic=True), logarithmic=True)
    y = Axis("flop/s", *around([low, *(rate for rate in up if rate >= low)], logarithmic=True), logarithmic=True)
    chart = Chart(x, y, height=460.0)
    for name, rate in bandwidths.items():
        first, last = max(x.low, y.low / rate), min(x.high, highest / rate)
        if first < last:
            chart.line([(first, first * rate), (last, last * rate)], _SOFT, width=1.2)
            middle = math.sqrt(first * last) if first > x.low else first * (last / first) ** 0.04
            chart.label(middle, middle * rate, f"{name} {with_prefix(rate, 'B/s')}")
    for dtype, rate in ceilings.items():
        chart.line([(x.low, rate), (x.high, rate)], _SOFT, width=1.2)
        chart.note(x.high, rate, f"{dtype} {with_prefix(rate, 'flop/s')}", anchor="end")
    chart.points(
        (
            (flops, rate, f"{short.get(kernel['layers'][0], kernel['layers'][0])}: {seconds_text(kernel['seconds'])}")
            for flops, rate, kernel in alone
            if rate >= y.low
        ),
        _SOFT,
        radius=3.0,
        faint=True,
    )
    moves = [(name, (before[0], max(before[1], low)), (after[0], max(after[1], low)), site)
             for name, before, after, site in moves]  # fmt: skip
    moves.sort(key=lambda move: (move[3]["fused_in_model"], _gain(move[3])))  # most important sites on top
    for name, before, after, site in moves:
        colour = _OURS if site["fused_in_model"] else _PEER
        told = (f"{name}: {seconds_text(site['measured']['unfused_seconds'])} -> "
                f"{seconds_text(site['measured']['fused_seconds'])}; {site['decision']}")  # fmt: skip
        chart.line([before, after], colour, width=1.4)
        chart.rings([(*before, f"before: {told}")], colour)
        chart.points([(*after, f"after: {told}")], colour)
    for name, _, after, site in moves[: -_LABELLED_SITES - 1 : -1]:
        if site["fused_in_model"]:
            chart.label(*after, name, _OURS)
    return joined(
        (
            tag("p", "A ring is a site before fusion, its layers one after another; the dot at the other end of the "
                     "line is the one kernel. Names are in the tips.", class_="soft"),
            chart.svg("Roofline of the machine with every site before and after fusion"),
            legend({"fused in the network": _OURS, "measured, kept apart": _PEER, "kernels of single layers": _SOFT}),
        )
    )  # fmt: skip


def _gain(site: Mapping[str, Any]) -> float:
    """Seconds saved by fusing."""
    return float(site["measured"]["unfused_seconds"] - site["measured"]["fused_seconds"])


def _sites(summary: Mapping[str, Any], short: Mapping[str, str]) -> Html | None:
    if not summary["sites"]:
        return tag("p", "No two convolutions of this network can be computed by one kernel.")
    rows: list[Sequence[Cell]] = []
    for site in sorted(summary["sites"], key=lambda each: not each["fused_in_model"]):
        predicted, measured = site["predicted"], site["measured"]
        before, after = measured["unfused_seconds"], measured["fused_seconds"]
        ratio = before / after if before and after else None
        rows.append(
            (
                _together([short[layer["name"]] for layer in site["layers"]]),
                "fused" if site["fused_in_model"] else "apart",
                _seconds(predicted["unfused_seconds"]),
                _seconds(predicted["fused_seconds"]),
                _seconds(before),
                _seconds(after),
                NumberCell("" if ratio is None else f"{ratio:.2f}", ratio or 0.0),
                site["decision"],
            )
        )
    head = ("site", "shipped", "predicted apart", "fused", "measured apart", "fused", "gain", "decision")
    return table(head, rows)


def _layers(summary: Mapping[str, Any], short: Mapping[str, str]) -> Html | None:
    """Table of the network's kernels by time, and of layers in comparison with the requested engine."""
    network, beside = summary.get("network"), summary.get("layers")
    if not network and not beside:
        return None
    found = []
    if network:
        measured = [kernel for kernel in network["kernels"] if kernel["seconds"]]
        longest = max((kernel["seconds"] for kernel in measured), default=0.0) or 1.0
        whole = sum(kernel["seconds"] for kernel in measured) or 1.0
        rows = [
            (
                _together([short.get(name, name) for name in kernel["layers"]]),
                _seconds(kernel["seconds"]),
                NumberCell(f"{kernel['seconds'] / whole:.1%}", kernel["seconds"]),
                BarCell(kernel["seconds"] / longest, FUSED if len(kernel["layers"]) > 1 else _APART),
                _seconds(kernel["predicted_seconds"]),
                NumberCell(with_prefix(kernel["flops"] / kernel["seconds"], "flop/s"),
                           kernel["flops"] / kernel["seconds"]),
                kernel["bound"],
            )
            for kernel in sorted(measured, key=lambda each: -each["seconds"])
        ]  # fmt: skip
        if rows:
            found.append(legend({"one fused kernel": FUSED, "one layer": _APART}))
            found.append(table(("kernel", "time", "share", "", "roofline", "rate", "limited by"), rows))
    if beside:
        told = [
            (
                ", ".join(short.get(name, name) for name in row["layers"]),
                _seconds(row["ours_seconds"]),
                _seconds(row["theirs_seconds"]),
                NumberCell(f"{row['lost_seconds'] * 1e6:+.1f} µs", row["lost_seconds"]),
            )
            for row in [*beside["rows"], {**beside["others"], "layers": ["everything else"]}]
        ]
        found.append(tag("h3", f"Beside {beside['engine']}"))
        found.append(table(("layers", "ours", "theirs", "lost"), told))
    return joined(found) if found else None


def _tuning(summary: Mapping[str, Any]) -> Html | None:
    found = []
    curve = summary.get("tuning_curve") or []
    if len(curve) > 1:
        times = [point["elapsed_seconds"] for point in curve]
        best = [point["network_seconds"] * 1e3 for point in curve]
        x = Axis("seconds since tuning began", 0.0, max(times) * 1.02 or 1.0)
        chart = Chart(x, Axis("ms, the best kernels in sum", *around(best)))
        chart.line(list(zip(times, best, strict=True)), _APART, steps=True)
        chart.points(
            (
                (point["elapsed_seconds"], point["network_seconds"] * 1e3,
                 f"after {point['trials']:,} trials: {seconds_text(point['network_seconds'])}")
                for point in curve
            ),
            _APART,
            radius=2.5,
        )  # fmt: skip
        chart.label(times[-1], best[-1], f"{best[-1]:.3g} ms after {curve[-1]['trials']:,} trials")
        chart.label(times[0], best[0], f"{best[0]:.3g} ms when every kernel had been measured once")
        told = "Every kernel by itself; what counts inside the network is compared there afterwards."
        found += [tag("p", told, class_="soft"), chart.svg("The sum of the best kernels over the time of tuning")]
    stages = summary.get("stage_seconds") or {}
    if stages:
        colours = dict(zip(stages, _stage_colours(), strict=False))
        axis = Axis("of the whole command", 0.0, sum(stages.values()) or 1.0, told=seconds_text)
        found += [stacked_rows([("stages", dict(stages))], colours, axis), legend(
            {f"{name} {seconds_text(seconds)}": colours[name] for name, seconds in stages.items()})]  # fmt: skip
    finals = (summary.get("finals") or {}).get("networks") or []
    if finals:
        rows = [
            (
                each["name"],
                NumberCell(str(each["fused_sites"]), each["fused_sites"]),
                _seconds(each["median_seconds"]),
                "shipped" if each["name"] == summary["finals"].get("shipped") else "",
            )
            for each in finals
        ]
        found += [tag("h3", "Whole networks, timed in turns"), table(("network", "fused", "median", ""), rows)]
    return joined(found) if found else None


def _stage_colours() -> Sequence[str]:
    from costmodel.pages.charts import PALETTE

    return [*PALETTE, *PALETTE]


def _precision(summary: Mapping[str, Any]) -> Html | None:
    lines = precision_lines(summary.get("precision") or {})
    choice = (summary.get("precision") or {}).get("choice")
    if not lines:
        return None
    found = [tag("p", line) for line in lines]
    frontier = [] if choice is None else [point for point in choice["frontier"] if point["seconds"]]
    if len(frontier) > 1:
        errors = [point["error"] for point in frontier]
        times = [point["seconds"] * 1e3 for point in frontier]
        chart = Chart(Axis("error of the outputs, of the largest value", *around(errors, from_zero=True)),
                      Axis("ms, kernels in sum", *around(times)))  # fmt: skip
        chart.line(list(zip(errors, times, strict=True)), _APART)
        for point, error, time in zip(frontier, errors, times, strict=True):
            told = f"{point['layers']} layers in bfloat16: {time:.3g} ms, error {error:.2g}"
            chart.points([(error, time, told)], _OURS if point["chosen"] else _APART)
            if point["chosen"]:
                chart.label(error, time, f"chosen: {point['layers']} layers in bfloat16", _OURS)
        found.append(chart.svg("Time over error: layers in bfloat16"))
    return joined(found)


def _memory(summary: Mapping[str, Any]) -> Html | None:
    rows = []
    colours = {"activations": "#4477aa", "tile buffers": "#ee7733", "weights": "#228833"}
    keys = dict(zip(colours, ("activation_bytes", "scratch_bytes", "weight_bytes"), strict=True))
    for name, row in summary["memory"].items():
        if row.get("activation_bytes") is not None:
            rows.append((name.replace("_", " "), {part: (row[key] or 0) / 2**20 for part, key in keys.items()}))
    found = [tag("p", line) for line in memory_lines(summary["memory"])]
    if rows:
        most = max(sum(parts.values()) for _, parts in rows)
        axis = Axis("MiB, as planned", 0.0, most or 1.0, told=lambda value: f"{value:.4g}")
        found = [stacked_rows(rows, colours, axis), legend(colours), *found]
    return joined(found) if found else None


def _rest(summary: Mapping[str, Any]) -> Html | None:
    found = []
    if summary["other_operators"]:
        rows = [(other["name"], other["operator"].removeprefix("relax."), other["reason"])
                for other in summary["other_operators"]]  # fmt: skip
        told = "Operators that no template covers; TVM compiles them, parallel and vectorised."
        found += [tag("p", told), table(("operator", "kind", "why"), rows, shown=8)]
    found.append(facts(summary["versions"]))
    return joined(found)


def _inputs(summary: Mapping[str, Any]) -> str:
    return describe_inputs(
        [TensorInfo(info["name"], tuple(info["shape"]), info["dtype"]) for info in summary["inputs"]]
    )


def _fused(summary: Mapping[str, Any]) -> int:
    return sum(site["fused_in_model"] for site in summary["sites"])


def _is_peer(name: str) -> bool:
    """True if a latency is that of another engine, not of one of our networks."""
    return name != "tuned" and not name.startswith(("tuned_", "float32"))


def _seconds(value: float | None) -> NumberCell:
    return NumberCell("?", 0.0) if value is None else NumberCell(seconds_text(value), value)
