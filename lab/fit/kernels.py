"""Fit of the GPU models to public tables: a residual per measured GPU and family, and the levels that transfer.

Trees are trained on the ``fit`` split; ``select`` sets the margin of their intervals (features and sizes were chosen on
it); ``report`` is left to :mod:`lab.validate.cost_models`.

Some families have a lattice instead (:mod:`costmodel.gpu.residual`), fitted to the tables of a GPU and of its
twins, which have the same chip (:func:`lab.fit.transfer.are_twins`): one forest is trained on the rows of all, GPUs
weighing equally, on features of one of them so that it cannot distinguish them. The remaining error of a GPU's own rows
shifts its lattice by their size, at most by the spread between samples of one chip. Libraries do take longer for some
smaller products (a kernel for 33 rows may be worse than that for 64), which no non-decreasing lattice can represent. So
the select split decides between it and plain trees (:func:`lattice_if_as_good`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.output_files import StagedFiles, write_whole
from costmodel.collectives.calibration import DIRECTORY as MEASURED
from costmodel.cost_model import Measurement
from costmodel.gpu.families.attention import attention_families, attention_family
from costmodel.gpu.families.convolution import Convolution, convolution_family
from costmodel.gpu.families.family import Family, Gridded
from costmodel.gpu.families.gemm import BatchedSimtGemm, ScaledCasts, ScaledProducts, SimtGemm, TensorGemm, gemm_family
from costmodel.gpu.families.grouped_gemm import GroupedProducts, ScaledGroupedProducts, engine_experts
from costmodel.gpu.families.linear_scans import linear_families
from costmodel.gpu.families.lookups import LookupKernels
from costmodel.gpu.families.memory_bound import MemoryBound
from costmodel.gpu.families.normalization import NormRows, SoftmaxRows
from costmodel.gpu.fitted import (
    TRANSFER,
    Fitted,
    fitted_in,
    forget_fitted,
    level_transfer,
    residuals_for,
    write_fitted,
    write_transfer,
)
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.residual import Lattice, Residual, fit_monotone
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import ConvolutionBackward, Gemm
from costmodel.operators.layers import Conv2d
from lab.data.aiconfigurator import (
    read_aiconfigurator,
    read_attention,
    read_expert_layers,
    read_linear,
    read_scaled,
    read_serving,
)
from lab.data.data_folder import Wanted, everything
from lab.data.engine_tables import read_engine_tables
from lab.data.kernel_table import KernelTable, counted_only, read_measured, sample
from lab.data.profiled_kernels import read_layer_kernels, read_neusight
from lab.data.selection import named_tables
from lab.fit.transfer import KernelRows, disturbed, transfer_of, twins_of, with_grades
from lab.fit.trees import effort_for, middle_of, train

# Largest distance (log units) of a GPU from the joint fit of it and its twins, interpolated between knots of analytic
# seconds: a judgement. H100's and H200's tables differ by 6 to 11 % of products of 0.4 TFLOP and more, which is an
# effect of measurement and not of the chip.
_OWN_MOVE = 0.025
_KNOTS = np.log(np.array([3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]))
_LEAST_ROWS = 20  # rows near a knot needed to shift it
# Advantage (log units, mean) on the select split that makes trees preferable, since they may predict less time for more
# work: a judgement.
_WORTH_OF_RISING = 0.01


def lattice_if_as_good(rows: KernelRows, twins: Sequence[KernelRows]) -> Lattice | None:
    """Lattice of the GPU of ``rows``, or ``None`` if trees of each GPU's own rows, both trained on the fit split, are
    clearly nearer to the select split of it and its ``twins`` (rows of the same family), equally weighted.
    """
    everyone = [rows, *twins]
    lost = [
        _missed_by_lattice(each, [other for other in everyone if other is not each]) - _missed_by_trees(each)
        for each in everyone
    ]
    return fit_lattice(rows, twins) if np.mean(lost) <= _WORTH_OF_RISING else None


def _missed_by_lattice(rows: KernelRows, twins: Sequence[KernelRows]) -> float:
    family: Any = rows.family
    asked = rows.of("select")
    known = fit_lattice(rows.of("fit"), [each.of("fit") for each in twins])
    found = family.from_lattice(asked.operators, known.at(family.sizes(asked.operators)), rows.machine)
    return float(np.abs(np.log(asked.seconds / found)).mean())


def _missed_by_trees(rows: KernelRows) -> float:
    seen, asked = rows.of("fit"), rows.of("select")
    features, there = (each.family.analyse(each.operators, each.machine).matrix() for each in (seen, asked))
    forest = middle_of(features, seen.log_ratio(), effort_for(len(seen.operators)))
    return float(np.abs(asked.log_ratio() - forest.predict(there)).mean())


def fit_lattice(rows: KernelRows, twins: Sequence[KernelRows]) -> Lattice:
    """Lattice of the GPU of ``rows``, with the sizes of all its and its ``twins``' rows as points."""
    family: Any = rows.family
    assert isinstance(family, Gridded)
    everyone = sorted([rows, *twins], key=lambda each: each.machine.name)
    reference = everyone[0].machine
    features = [family.analyse(each.operators, reference).matrix() for each in everyone]  # type: ignore[attr-defined]
    ratios = [each.log_ratio() for each in everyone]
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in ratios])
    matrix, effort = np.concatenate(features), effort_for(len(rows.operators))
    forest = middle_of(matrix, np.concatenate(ratios), effort, weights / weights.mean())
    place = everyone.index(rows)
    moves = _own_moves(rows, ratios[place] - forest.predict(features[place])) if twins else np.zeros(len(_KNOTS))
    sizes = np.concatenate([family.sizes(each.operators) for each in everyone])
    axes = tuple(np.union1d(few, column) for few, column in zip(family.axes, sizes.T, strict=True))
    points = Lattice(axes, np.empty([len(axis) for axis in axes])).points()
    analytic = family.at_sizes(points, rows.machine).seconds
    seen = family.at_sizes(points, reference).matrix()
    seconds = analytic * np.exp(forest.predict(seen) + np.interp(np.log(analytic), _KNOTS, moves))
    return Lattice(axes, fit_monotone(seconds.reshape([len(axis) for axis in axes])))


def _own_moves(rows: KernelRows, left: np.ndarray) -> np.ndarray:
    """Median of the residual log times ``left`` (rows,) near each knot."""
    logs = np.log(rows.family.analyse(rows.operators, rows.machine).seconds)
    edges = np.concatenate([[-np.inf], (_KNOTS[1:] + _KNOTS[:-1]) / 2, [np.inf]])
    near = [left[(logs >= low) & (logs < high)] for low, high in zip(edges[:-1], edges[1:], strict=True)]
    moves = [float(np.median(each)) if len(each) >= _LEAST_ROWS else 0.0 for each in near]
    return np.clip(moves, -_OWN_MOVE, _OWN_MOVE)


MAXIMUM_ROWS = 40000  # of one table: all of a grid of products, so that twins share its rows
MINIMUM_ROWS = 60  # of a family: fewer move the model of others (:mod:`costmodel.gpu.residual`) rather than grow trees
_COMMAND = "python -m lab.fit"
_SPLITS = "fit 70 %, select 15 %; report 15 % unseen"
_SELECTION = (
    "of the files named, rows that tell about the kernel rather than about the host (`counted`), at most 40,000 of a "
    "table, evenly; of grids of twins those that the twin does not show to be disturbed"
)
_LICENCES = ", ".join(
    (
        "sitar-lab/NeuSight (MIT)",
        "ai-dynamo/aiconfigurator (Apache-2.0)",
        "casys-kaist/LLMServingSim (MIT)",
        "microsoft/vidur (MIT)",
    )
)

FAMILIES: dict[str, Family[Any]] = {
    "bmm": BatchedSimtGemm(),
    "linear": SimtGemm(),
    "gemm-bf16": TensorGemm(),
    "conv": Convolution(),
    "ln": NormRows(),
    "softmax": SoftmaxRows(),
    "embedding": LookupKernels(),
    "moe": GroupedProducts(),
    "moe-8bit": ScaledGroupedProducts(),
    "gemm-8bit": ScaledProducts(),
    "quantize": ScaledCasts(),
    **dict.fromkeys(("add", "mul", "div", "gelu", "relu", "tanh"), MemoryBound()),
    **attention_families(),
    **{each.name: each for each in engine_experts().values()},
    **linear_families(),
}
# Tables of kernels that ran within layers: those of GPUs without another table of products are fitted to, the others
# measure how far models of single kernels can be trusted there.
LAYERS: dict[str, Family[Any]] = {
    "gemm-bf16": FAMILIES["gemm-bf16"],
    "rms-norm": FAMILIES["ln"],
    **dict.fromkeys(("add", "gated-activation", "rotary", "embedding-rows"), FAMILIES["add"]),
}
FITTED_LAYERS = ("rtx-3090", "rtx-4090", "a6000")
_LAYER_ROWS = 300  # of one kind and file
# Kernels within layers by libraries of Hopper's first year (CUDA 12.1, by the README of Sarathi-Serve, whose kernels
# Vidur profiled): products of 256 to 1,024 rows take 1.4 times the time of those in the tables, and of LLMServingSim's
# H100; products of up to 64 rows take the same time. This is an effect of libraries, not of differences between
# laboratories.
OF_FIRST_LIBRARIES = ("gemm-bf16", "h100-sxm", "vidur")


def read_tables(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """Wanted tables of ``data``, and our own, for fitting trees, thinned, counted rows only."""
    layers = [each for each in read_layer_kernels(data, wanted) if _to_fit(each)]
    public = [*read_neusight(data, wanted), *read_aiconfigurator(data, wanted), *layers, *read_attention(data, wanted)]
    public += [*read_scaled(data, wanted), *read_expert_layers(data, wanted)]
    tables = [*public, *(table for table, _ in _own_tables())]
    return [sample(each, MAXIMUM_ROWS) for each in counted_only(tables)]


def read_scans(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """Wanted tables of linear attention, which has a separate fit, thinned, counted rows only."""
    return [sample(each, MAXIMUM_ROWS) for each in counted_only(list(read_linear(data, wanted)))]


def read_engines(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """Wanted tables of kernels only in serving engines, which have a separate fit, thinned."""
    return [sample(each, MAXIMUM_ROWS) for each in counted_only(list(read_serving(data, wanted)))]


def read_own_engines(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """Wanted tables of attention and experts as each serving engine runs them, which have a separate fit."""
    return counted_only(list(read_engine_tables(data, wanted)))


def read_layers(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """Kernels within layers to which no model is fitted, thinned."""
    tables = counted_only([each for each in read_layer_kernels(data, wanted) if not _to_fit(each)])
    return [sample(each, _LAYER_ROWS) for each in tables]


def _to_fit(table: KernelTable) -> bool:
    return table.name == "gemm-bf16" and table.machine in FITTED_LAYERS


def read_points() -> list[KernelTable]:
    """Other measurements, our own or published: small tables, and dtypes for which no trees are trained."""
    return counted_only([points for _, points in _own_tables()])


def _own_tables() -> Iterable[tuple[KernelTable, KernelTable]]:
    """Yield each of our own tables, split into rows for trees (if enough) and the others."""
    for table in read_measured():
        if table.name not in FAMILIES:  # attention by the kernel that PyTorch chose, which the table does not name
            continue
        family = FAMILIES[table.name]
        covered = np.array([family.covers(each) for each in table.operators], dtype=bool)
        if covered.sum() < MINIMUM_ROWS:
            covered[:] = False
        yield table.only(covered), table.only(~covered)


def rows_by_family(tables: Iterable[KernelTable]) -> list[KernelRows]:
    """Rows of the tables grouped by family and machine, in a fixed order."""
    groups: dict[tuple[str, str], list[KernelTable]] = {}
    for table in tables:
        groups.setdefault((FAMILIES[table.name].name, table.machine), []).append(table)
    return [_merge(group, FAMILIES) for _, group in sorted(groups.items())]


def told_apart(rows: Sequence[KernelRows]) -> tuple[list[KernelRows], list[KernelRows]]:
    """Split ``rows`` into those to learn from and validate on, and those that a twin's table shows to be disturbed."""
    masks = [disturbed(each, twins_of(each, rows) if isinstance(each.family, Gridded) else []) for each in rows]
    kept = [each.only(~mask) if mask.any() else each for each, mask in zip(rows, masks, strict=True)]
    return kept, [each.only(mask) for each, mask in zip(rows, masks, strict=True) if mask.any()]


def layer_rows(tables: Iterable[KernelTable]) -> list[KernelRows]:
    """Rows of the tables of :func:`read_layers` grouped by kind, machine and collection, in a fixed order."""
    groups: dict[tuple[str, str, str], list[KernelTable]] = {}
    for table in tables:
        groups.setdefault(collection_of(table), []).append(table)
    return [_merge(group, LAYERS) for _, group in sorted(groups.items())]


def collection_of(table: KernelTable) -> tuple[str, str, str]:
    """Kind of kernel, machine and laboratory of a table of :func:`read_layers`."""
    return table.name, table.machine, "vidur" if "vidur" in Path(table.source).parts else "llmservingsim"


def _merge(tables: Sequence[KernelTable], families: Mapping[str, Family[Any]]) -> KernelRows:
    operators = tuple(each for table in tables for each in table.operators)
    seconds = np.concatenate([table.seconds for table in tables])
    splits = np.concatenate([table.splits() for table in tables])
    return KernelRows(families[tables[0].name], load_machine(tables[0].machine), operators, seconds, splits)


def fit(data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything) -> list[Path]:
    """Write the model files to ``output`` once all are made; returns them. Takes a minute or two on two cores; an
    interrupted run is resumed.

    Order: the machines with tables, then the transfer levels, then the machines with few points. Each file names the
    tables it came from, the transfer file all of them.
    """
    return _fit(read_tables(data, wanted), read_layers(data, wanted), read_points(), data, output, progress)


def fit_scans(data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything) -> list[Path]:
    """:func:`fit` for linear attention, from its tables only, so that nothing else is affected."""
    return _fit(read_scans(data, wanted), [], [], data, output, progress)


def fit_serving(data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything) -> list[Path]:
    """:func:`fit` for kernels only in serving engines."""
    return _fit(read_engines(data, wanted), [], [], data, output, progress)


def fit_engines(data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything) -> list[Path]:
    """:func:`fit` for attention and experts as each serving engine runs them."""
    return _fit(read_own_engines(data, wanted), [], [], data, output, progress)


def _fit(
    tables: Sequence[KernelTable],
    layers: Sequence[KernelTable],
    points: Sequence[KernelTable],
    data: Path,
    output: Path,
    progress: Callable[[str], None],
) -> list[Path]:
    if not (tables or layers or points):
        progress(f"{data}: no tables of these kernels; nothing is written for them")
        return []
    made_from = _provenance([*tables, *layers, *points], data)
    with StagedFiles(output, "fitted models", made_from) as staged:
        written = staged.install(_fit_staged(tables, layers, points, data, staged, progress))
    forget_fitted()
    return written


def _fit_staged(
    tables: Sequence[KernelTable],
    layers: Sequence[KernelTable],
    points: Sequence[KernelTable],
    data: Path,
    staged: StagedFiles,
    progress: Callable[[str], None],
) -> list[str]:
    """Make the models' files in the folder of ``staged``; returns their names."""
    (rows, _), groups = told_apart(rows_by_family(tables)), _by_machine(points)
    grown = staged.folder / "grown"  # models of trees, before points of the same machines are added

    def grow(name: str) -> None:
        own = [each for each in rows if each.machine.name == name]
        progress(f"{name}: {', '.join(f'{each.family.name} ({len(each.operators)} rows)' for each in own)}")
        known = _provenance([table for table in tables if table.machine == name], data)
        write_fitted(_fit_machine(own, rows, known), grown)

    def carry_over() -> None:
        kernels = sum(len(each.operators) for each in layers)
        progress(f"grades: {kernels} kernels of whole layers, each GPU left out in turn")
        attention = [each for each in points if isinstance(each.operators[0], Attention)]
        known_rows = [*rows, *rows_by_family(attention)]
        today = [each for each in layers if collection_of(each) != OF_FIRST_LIBRARIES]
        carried = with_grades(transfer_of(known_rows), rows, fitted_in(grown), layer_rows(today))
        write_transfer(replace(carried, provenance=_provenance([*tables, *layers, *attention], data)), grown)

    def adapt(name: str) -> None:
        if name in groups:
            progress(f"{name}: {', '.join(f'{each.name} ({len(each.operators)} points)' for each in groups[name])}")
            write_fitted(_adapted(load_machine(name), groups[name], grown), staged.folder)
        else:
            write_whole(staged.folder / f"{name}.json", (grown / f"{name}.json").read_bytes())

    measured = sorted({each.machine.name for each in rows})
    kept = [name for name in measured if not staged.once(f"grown/{name}.json", partial(grow, name))]
    if not staged.once(f"grown/{TRANSFER}.json", carry_over):
        kept.append("grades")
    names = [*measured, *sorted(groups.keys() - set(measured))]
    for name in names:
        if not staged.once(f"{name}.json", partial(adapt, name)) and name not in kept:
            kept.append(name)
    if kept:
        progress(f"as the run before this one left them: {', '.join(kept)}")
    staged.once(f"{TRANSFER}.json", partial(adapt, TRANSFER))
    return [f"{name}.json" for name in (*names, TRANSFER)]


def _by_machine(tables: Iterable[KernelTable]) -> dict[str, list[KernelTable]]:
    groups: dict[str, list[KernelTable]] = {}
    for table in tables:
        groups.setdefault(table.machine, []).append(table)
    return groups


def _adapted(machine: Machine, points: Sequence[KernelTable], output: Path) -> Fitted:
    """The model of ``machine`` in ``output``, or an empty one, adapted to ``points`` for the families they
    belong to.
    """

    def family_of(operator: AnyOperator) -> Family[Any]:
        if isinstance(operator, Gemm):
            return gemm_family(operator, machine)
        if isinstance(operator, (Conv2d, ConvolutionBackward)):
            return convolution_family(operator, machine)
        if isinstance(operator, Attention):
            return attention_family(operator, machine)
        return next(FAMILIES[each.name] for each in points if operator in each.operators)

    measurements = [
        Measurement(operator, seconds=float(seconds))
        for table in points
        for operator, seconds in zip(table.operators, table.seconds, strict=True)
    ]
    model = KernelModel(machine, family_of, residuals_for(machine, output), level_transfer(output))
    model.fit(measurements)
    chip = machine.chip()
    known = fitted_in(output).get(machine.name)
    provenance: dict[str, Any] = dict(known.provenance) if known else {"command": _COMMAND}
    provenance["points"] = named_tables(_rows_by_file(points), MEASURED)["own"]
    families = known.families if known else {}
    return Fitted(machine.name, chip.architecture, chip.power_limited, families, provenance, model.adaptations)


def _fit_machine(rows: Sequence[KernelRows], every: Sequence[KernelRows], provenance: Mapping[str, Any]) -> Fitted:
    """Model of one machine from its ``rows``; for families with lattices also from those of twins among ``every``."""
    machine = rows[0].machine
    families = {}
    for each in rows:
        seen = each.of("fit", "select")
        analysis, known, expected = seen.family.analyse(seen.operators, machine), None, None
        twins: list[KernelRows] = []
        if isinstance(each.family, Gridded):
            twins = [twin.of("fit", "select") for twin in twins_of(each, every)]
            known = lattice_if_as_good(seen, twins)
        if known is None:
            twins = []
        elif isinstance(each.family, Gridded):
            expected = each.family.from_lattice(seen.operators, known.at(each.family.sizes(seen.operators)), machine)
        ratio = np.log(seen.seconds / (analysis.seconds if expected is None else expected))
        learned = train(analysis.features, ratio, seen.splits == "select", known=known)
        families[each.family.name] = _reaching(learned, twins, machine)
    chip = machine.chip()
    return Fitted(machine.name, chip.architecture, chip.power_limited, families, provenance)


def _reaching(learned: Residual, twins: Sequence[KernelRows], machine: Machine) -> Residual:
    """``learned`` with its feature ranges extended by the rows of ``twins``."""
    for each in twins:
        features = each.family.analyse(each.operators, machine).matrix()
        lowest, highest = features.min(axis=0), features.max(axis=0)
        lowest, highest = np.minimum(learned.lowest, lowest), np.maximum(learned.highest, highest)
        learned = replace(learned, lowest=lowest, highest=highest)
    return learned


def _provenance(tables: Sequence[KernelTable], data: Path) -> dict[str, Any]:
    from importlib import metadata

    return {
        "command": _COMMAND,
        "sources": _LICENCES,
        "selection": _SELECTION,
        **named_tables(_rows_by_file(tables), data),
        "splits": _SPLITS,
        "xgboost": metadata.version("xgboost-cpu"),
    }


def _rows_by_file(tables: Iterable[KernelTable]) -> dict[Path, int]:
    """Number of rows of each file, which may hold several tables."""
    rows: Counter[Path] = Counter()
    for table in tables:
        rows[Path(table.source)] += len(table.operators)
    return dict(rows)
