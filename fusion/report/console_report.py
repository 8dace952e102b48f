"""Analyses, summaries and comparisons as console text; the same records as printed by ``--json``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusion.analysis.analyzer import (
    NOT_TUNED,
    NetworkAnalysis,
    PrecisionOutlook,
    SiteReport,
    TensorPlace,
    format_bytes,
    window_text,
)
from fusion.comparing.compare import Comparison
from fusion.model.build_folder import describe_inputs
from fusion.model.conv_graph import BFLOAT16, INT8
from fusion.model.named_arrays import TensorInfo

# Maximum number of listed layers.
_LISTED_LAYERS = 12
_NAMED_NODES = 2
# Width of text for a file or a pipe, in which no cell is wrapped.
PLAIN_WIDTH = 160
ERROR_TITLES = ("max error", "mean error", "cosine", "top-1")


def console(*, stderr: bool = False) -> Console:
    """Console on a terminal, or with lines of :data:`PLAIN_WIDTH` for other outputs.

    Markup is off: names and messages of engines may contain brackets.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, width=width)


def _table(head: Sequence[str], texts: Collection[str]) -> Table:
    """Table of numbers; columns in ``texts`` are wrapped texts."""
    table = Table(box=None, pad_edge=False)
    for title in head:
        text = title in texts
        table.add_column(title, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    return table


def print_analysis(analysis: NetworkAnalysis, *, everything: bool = False) -> None:
    """Print a table of the sites, and those worth fusing.

    Sites that ``tune`` never measures are only counted, unless ``everything`` is set.
    """
    out = console()
    analysis = replace(analysis, sites=tuple(_shortened(analysis.sites)))
    fused = sum(site.fuse for site in analysis.sites)
    out.print(
        f"{analysis.kernels} kernels, {len(analysis.sites)} fusable sites, {fused} worth fusing on "
        f"{analysis.machine} with {analysis.threads} threads in {analysis.precision} (predicted; `tune` measures)"
    )
    if len(analysis.precisions) > 1:
        out.print(_precisions_table(analysis.precisions))
    listed = [site for site in analysis.sites if everything or not site.hopeless]
    if listed:
        out.print(_analysis_table(listed))
    hopeless = Counter(site.kind for site in analysis.sites if site.hopeless)
    if hopeless and not everything:
        kinds = ", ".join(f"{count} {kind}" for kind, count in hopeless.most_common())
        out.print(f"{hopeless.total()} sites {NOT_TUNED} ({kinds}); --all lists them")
    print_others(out, [(other.operator, other.reason) for other in analysis.others])
    for note in analysis.notes:
        out.print(f"note: {note}")


def _precisions_table(outlooks: Sequence[PrecisionOutlook]) -> Table:
    """Table of the predictions per precision for the whole network."""
    head = ("precision", "layers", "peak GFLOP/s", "flop/B", "kernels apart us", "fused us", "predicted gain")
    table = _table(head, texts=("precision",))
    for each in outlooks:
        cells = [str(each.layers), f"{each.peak_flops / 1e9:.0f}"]
        if each.missing is not None:
            table.add_row(each.precision, *cells, each.missing)
            continue
        cells.append(f"{each.unfused_intensity:.1f} -> {each.fused_intensity:.1f}")
        cells += [f"{each.unfused_seconds * 1e6:.0f}", f"{each.fused_seconds * 1e6:.0f}", f"{each.gain:.2f}"]
        table.add_row(each.precision, *cells)
    return table


def print_others(out: Console, others: Sequence[tuple[str, str]]) -> None:
    """Print the operators without a template, with counts in total and per reason.

    ``others``: (operator, reason) of each; their names are in the JSON.
    """
    if not others:
        return
    listed = _counted([operator for operator, _ in others])
    out.print(f"not covered by a template, compiled parallel and vectorised: {listed}")
    for reason, _ in Counter(reason for _, reason in others).most_common():
        same = [operator for operator, its_reason in others if its_reason == reason]
        out.print(f"  {reason}: {_counted(same)}")


def _counted(operators: Sequence[str]) -> str:
    counts = Counter(operator.removeprefix("relax.") for operator in operators)
    return ", ".join(f"{count} {operator}" for operator, count in counts.most_common())


def _analysis_table(sites: Sequence[SiteReport]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for title, options in (
        ("site", {"overflow": "fold", "ratio": 4}),
        ("flop/B", {"justify": "right", "no_wrap": True}),
        ("memory levels", {"no_wrap": True}),
        ("predicted us", {"justify": "right", "no_wrap": True}),
        ("bound", {"no_wrap": True}),
        ("decision", {"overflow": "fold", "ratio": 3}),
    ):
        table.add_column(title, **options)  # type: ignore[arg-type]
    for site in sites:
        table.add_row(
            _layers(site),
            f"{site.unfused_intensity:.1f}\n-> {site.fused_intensity:.1f}",
            "\n".join(_place(place) for place in site.tensors),
            f"{site.unfused_seconds * 1e6:.1f}\n-> {site.fused_seconds * 1e6:.1f}",
            "\n".join([*site.unfused_bounds, f"-> {site.fused_bound}"]),
            f"{'fuse' if site.fuse else 'keep apart'}: {site.reason}",
        )
    return table


def _shortened(sites: Sequence[SiteReport]) -> list[SiteReport]:
    """Sites with layer names without their common beginning and end."""
    short = short_names({layer.name for site in sites for layer in site.layers})
    renamed = {site.name: "+".join(short[layer.name] for layer in site.layers) for site in sites}

    def reason(site: SiteReport) -> str:
        rivals = (name for name in renamed if f"overlaps {name}," in site.reason)
        return next((site.reason.replace(name, renamed[name]) for name in rivals), site.reason)

    return [
        replace(
            site,
            name=renamed[site.name],
            layers=tuple(replace(layer, name=short[layer.name]) for layer in site.layers),
            reason=reason(site),
        )
        for site in sites
    ]


def short_names(names: Collection[str]) -> dict[str, str]:
    """Map each name to itself without the words common to the beginning and the end of all.

    Words are separated by ``_``, ``/``, ``.``. Repeated scopes (``a_a_1_a_1_conv``, as PyTorch exports ``a.1.conv``)
    are written once if the names stay distinct.
    """
    words = {name: re.findall(r"[^_/.]+|[_/.]", name) for name in names}
    once = {name: _once(each) for name, each in words.items()}
    if len({tuple(each) for each in once.values()}) == len(names):
        words = once
    if len(words) < 2:
        return {name: name for name in names}
    shortest = min(map(len, words.values())) - 1
    head = next((i for i in range(shortest) if len({tuple(each[: i + 1]) for each in words.values()}) > 1), shortest)
    rest = {name: each[head:] for name, each in words.items()}
    shortest = min(map(len, rest.values())) - 1
    tail = next((i for i in range(shortest) if len({tuple(each[-i - 1 :]) for each in rest.values()}) > 1), shortest)
    return {name: "".join(each[: len(each) - tail]).strip("_/.") for name, each in rest.items()}


def _once(words: list[str]) -> list[str]:
    """Remove leading ``words`` (with separators) that are repeated directly after: ``a / a . 1``."""
    for count in range(1, len(words) // 2, 2):
        head, behind = words[:count], words[count + 1 : 2 * count + 1]
        if head[::2] == behind[::2] and any(any(map(str.isalpha, word)) for word in head[::2]):
            return _once(words[count + 1 :])
    return words


def _place(place: TensorPlace) -> str:
    levels = place.unfused_level
    if place.fused_level != levels:
        levels += f" -> {place.fused_level}"
    return f"{place.tensor} {format_bytes(place.size_bytes)}: {levels}"


def _layers(site: SiteReport) -> str:
    """Kind and input on the first line, then name, window and output of each layer."""
    lines = [f"{site.kind} on {_shape(site.layers[0].input_shape)}"]
    for layer in site.layers:
        window = window_text(layer.kernel, layer.stride, layer.dilation)
        lines.append(f"  {layer.name}: {window} -> {_shape(layer.output_shape)}")
    return "\n".join(lines)


def _shape(shape: Sequence[int]) -> str:
    """Format a shape without a batch of one: ``32x112x112``."""
    return "x".join(map(str, shape[1:] if shape[0] == 1 else shape))


def print_summary(summary: Mapping[str, Any], directory: Path) -> None:
    """Print the results of tuning for every profile."""
    out = console()
    for profile in summary.get("profiles", ()):
        inputs = [TensorInfo(info["name"], tuple(info["shape"]), info["dtype"]) for info in profile["inputs"]]
        out.print(f"profile {describe_inputs(inputs)}")
        print_summary(profile, directory / profile["folder"])
    if "profiles" in summary:
        out.print(
            f"{len(summary['profiles'])} profiles, {summary['trials']} new measurements in "
            f"{summary['wall_seconds']:.0f} s; `fusion.load` picks by the shape of the input\nwritten to {directory}"
        )
        return
    if summary["sites"]:
        out.print(_sites_table(summary["sites"]))
    latency = summary["latency_seconds"]
    table = Table("", "median ms", "times as long as tuned", box=None, pad_edge=False)
    fused = sum(site["fused_in_model"] for site in summary["sites"])
    for name, seconds in latency.items():
        if seconds is None:
            continue
        if name == "tuned_without_fusion" and not fused:
            table.add_row(name.replace("_", " "), "", "identical: nothing fused")
        else:
            table.add_row(name.replace("_", " "), f"{seconds * 1e3:.3f}", f"{seconds / latency['tuned']:.2f}")
    if table.row_count:
        out.print(table)
    if summary.get("layers") is not None:
        _print_layers(out, summary["layers"])
    for line in memory_lines(summary["memory"]):
        out.print(line)
    for line in precision_lines(summary.get("precision", {})):
        out.print(line)
    if (choice := summary.get("precision", {}).get("choice")) is not None:
        out.print(_frontier_table(choice["frontier"], _shorter(summary["precision"])[0]))
    # With layers in shorter types the line of their errors is shown instead: this error is that of one input only.
    error = None if "asked" in summary.get("precision", {}) else summary["max_abs_error"]
    out.print(
        f"{fused} of {len(summary['sites'])} sites fused, {summary['trials']} new measurements in "
        f"{summary['wall_seconds']:.0f} s"
        + ("" if error is None else f", largest error against ONNX Runtime {error:.1e}")
    )
    print_others(out, [(other["operator"], other["reason"]) for other in summary["other_operators"]])
    for note in summary["notes"]:
        out.print(f"note: {note}")
    out.print(f"written to {directory}")


def precision_lines(precision: Mapping[str, Any]) -> list[str]:
    """Lines on number types of layers and their errors; empty for a network in float32."""
    if "asked" not in precision:
        return []
    dtype, stored = _shorter(precision)
    lines = [f"precision: {stored} of {precision['layers']} layers stored in {dtype}"]
    errors = precision["errors"]
    if errors["max_relative_error"] is not None:
        inputs = errors["compared_inputs"]
        told = f"errors over {inputs} input{'s' * (inputs > 1)}, of the largest value of an output: largest "
        told += f"{errors['max_relative_error']:.2g}, mean {errors['mean_relative_error']:.2g}"
        if errors["cosine"] is not None:
            told += f"; cosine {errors['cosine']:.6f}"
        if errors["top1_agreement"] is not None:
            told += f"; the same class on {errors['top1_agreement']:.1%}"
        limit = precision["max_error"]
        lines.append(told + ("" if limit is None else f" (allowed: {limit:g})"))
    kept = precision["float32_layers"]
    if stored and kept:
        short = short_names(set(kept))
        listed = ", ".join(short[name] for name in kept[:_LISTED_LAYERS])
        more = len(kept) - _LISTED_LAYERS
        lines.append(f"in float32: {listed}" + (f" and {more} more, named in summary.json" if more > 0 else ""))
    return lines


def _shorter(precision: Mapping[str, Any]) -> tuple[str, int]:
    """(Number type of layers besides float32, number of layers in it)."""
    dtype = INT8 if f"{INT8}_layers" in precision else BFLOAT16
    return dtype, precision[f"{dtype}_layers"]


def _frontier_table(frontier: Sequence[Mapping[str, Any]], dtype: str) -> Table:
    """Table of latency and error: more layers in the shorter type take less time, and have larger errors.

    ``predicted`` and ``measured``: sums of all kernels and conversions; ``network``: whole networks timed in
    alternation.
    """
    head = (f"layers in {dtype}", "predicted us", "measured us", "network us", *ERROR_TITLES, "")
    table = _table(head, texts=("",))
    for point in frontier:
        times = (point.get(key) for key in ("predicted_seconds", "measured_seconds", "raced_seconds"))
        cells = [str(point["layers"]), *("" if each is None else f"{each * 1e6:.0f}" for each in times)]
        cells += error_cells({**point, "max_relative_error": point["error"]})
        table.add_row(*cells, "chosen" if point["chosen"] else "")
    return table


def memory_lines(memory: Mapping[str, Mapping[str, int | None]]) -> list[str]:
    """Lines on the memory of a run besides the weights, of the networks and of ONNX Runtime."""
    tuned, apart = memory["tuned"], memory["tuned_without_fusion"]
    lines = []
    if tuned.get("activation_bytes") is not None:
        lines.append(
            f"memory: activations {_told(tuned['activation_bytes'])} ({_told(apart['activation_bytes'])} without "
            f"fusion), tile buffers {_told(tuned['scratch_bytes'])}, weights {_told(tuned['weight_bytes'])}"
        )
    grown = [f"{name.replace('_', ' ')} {_told(row['growth_bytes'])}" for name, row in memory.items()]
    ran = any(row["growth_bytes"] is not None for row in memory.values())
    return [*lines, f"memory that the first run took: {', '.join(grown)}"] if ran else lines


def _told(size: int | None) -> str:
    return "not told" if size is None else format_bytes(size)


def _sites_table(sites: Sequence[Mapping[str, Any]]) -> Table:
    """Table of predicted and measured times of every site, unfused and fused."""
    short = short_names({layer["name"] for site in sites for layer in site["layers"]})
    table = _table(("site", "predicted us", "measured us", "ratio", "decision"), texts=("site", "decision"))
    for site in sites:
        predicted, measured = site["predicted"], site["measured"]
        before, after = measured["unfused_seconds"], measured["fused_seconds"]
        table.add_row(
            " + ".join(short[layer["name"]] for layer in site["layers"]),
            " -> ".join(scaled(predicted[key], 1e6, 1) for key in ("unfused_seconds", "fused_seconds")),
            f"{scaled(before, 1e6, 1)} -> {scaled(after, 1e6, 1)}",
            "" if before is None or after is None else f"{before / after:.2f}",
            site["decision"],
        )
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print one row per engine, then the reasons for engines without a row.

    Ratios are given for medians and for minima: on a shared host medians favour the engine with fewer parallel regions.
    """
    out = console()
    head = ["engine", "median ms", "min ms", "ratio to tuned", "of minima", *ERROR_TITLES, "grew by"]
    table = _table((*head, "mode"), texts=("engine", "mode"))
    for row in comparison.rows:
        cells = [row.engine, f"{row.median_seconds * 1e3:.3f}", f"{row.min_seconds * 1e3:.3f}"]
        cells += [f"{row.ratio_to_tuned:.2f}", f"{row.min_seconds / comparison.rows[0].min_seconds:.2f}"]
        cells += [*error_cells(asdict(row)), _told(row.growth_bytes)]
        table.add_row(*cells, row.mode)
    inputs = describe_inputs(comparison.inputs)
    out.print(f"{comparison.model} ({inputs}), {comparison.threads} threads, engines in turns")
    out.print(table)
    compared = next((row.compared_inputs for row in comparison.rows if row.compared_inputs), None)
    if compared:
        out.print(f"errors against ONNX Runtime on {compared} inputs, relative to the largest value of an output")
    for absent in comparison.not_measured:
        out.print(f"{absent.engine} {absent.status}: {absent.reason}")
    if comparison.layers is not None:
        _print_layers(out, asdict(comparison.layers))
    for line in comparison.layers_missing:
        out.print(line)


def _print_layers(out: Console, layers: Mapping[str, Any]) -> None:
    """Print our time and a peer's for each layer, largest loss first; ``layers``: the record of a ``LayerTable``.

    Rows without loss are only summed up (the JSON has them); the row ``others`` is the last.
    """
    engine, rows, others = layers["engine"], layers["rows"], layers["others"]
    lost, gained = layers["lost_seconds"], layers["gained_seconds"]
    medians = layers["ours_network_seconds"], layers["theirs_network_seconds"]
    sums = layers["ours_profiled_seconds"], layers["theirs_profiled_seconds"]
    difference = f"slower than {engine}" if medians[0] > medians[1] else f"faster than {engine}"
    out.print(
        f"by layer, {abs(medians[0] - medians[1]) * 1e6:.0f} us {difference}: {lost * 1e6:.0f} us lost in some, "
        f"{gained * 1e6:.0f} us gained in others"
    )
    short = short_names({name for row in rows for name in row["layers"]})
    kernels = f"kernels of tuned | {engine}"
    table = _table(("layers", "tuned us", f"{engine} us", "lost us", kernels), texts=("layers", kernels))
    losing = [row for row in rows if row["lost_seconds"] > 0]
    for row in losing[:_LISTED_LAYERS]:
        listed = [short[name] or name for name in row["layers"]]
        more = [f"and {len(listed) - _NAMED_NODES} more"] if len(listed) > _NAMED_NODES else []
        table.add_row(" + ".join([*listed[:_NAMED_NODES], *more]), *_layer_cells(row))
    left = [*losing[_LISTED_LAYERS:], *(row for row in rows if row["lost_seconds"] <= 0)]
    if left:
        title = f"{len(left)} more rows, in the JSON" if len(losing) > _LISTED_LAYERS else f"{len(left)} gained"
        table.add_row(title, *_sum_cells(left), "")
    if others["ours_seconds"] is not None or others["theirs_seconds"] is not None:
        table.add_row("others (conversions of layouts, what no node is known of)", *_layer_cells(others))
    out.print(table)
    out.print(
        f"layers of tuned sum to {sums[0] * 1e6:.0f} us of {medians[0] * 1e6:.0f} us, those of {engine} to "
        f"{sums[1] * 1e6:.0f} us of {medians[1] * 1e6:.0f} us; both are scaled to the network's median"
    )


def _layer_cells(row: Mapping[str, Any]) -> list[str]:
    kernels = (", ".join(row["ours_kernels"][:2]), ", ".join(row["theirs_kernels"][:2]))
    return [*_sum_cells([row]), " | ".join(each or "none" for each in kernels)]


def _sum_cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    sides = [[row[side] for row in rows if row[side] is not None] for side in ("ours_seconds", "theirs_seconds")]
    cells = [f"{sum(side) * 1e6:.1f}" if side else "-" for side in sides]
    return [*cells, f"{sum(row['lost_seconds'] for row in rows) * 1e6:.1f}"]


def error_cells(errors: Mapping[str, Any]) -> list[str]:
    """Cells of :data:`ERROR_TITLES` from a record with the fields of an ``OutputErrors``."""
    largest, mean = errors["max_relative_error"], errors["mean_relative_error"]
    cosine, agreement = errors["cosine"], errors["top1_agreement"]
    return [
        "?" if largest is None else f"{largest:.1e}",
        "?" if mean is None else f"{mean:.1e}",
        "" if cosine is None else f"{cosine:.6f}",
        "" if agreement is None else f"{agreement:.0%}",
    ]


def scaled(value: float | None, scale: float, digits: int) -> str:
    """Number in the unit that is 1 / ``scale``; ``?`` if it is not known."""
    return "?" if value is None else f"{value * scale:.{digits}f}"
