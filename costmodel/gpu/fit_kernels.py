"""Fits the GPU models from public tables: a residual per measured GPU and family, and the levels that carry over.

Trees see the ``fit`` split; ``select`` sets the margin of their intervals (features and sizes were chosen on it);
``report`` is left to :mod:`costmodel.gpu.validate_kernels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.datasets.aiconfigurator import read_aiconfigurator
from costmodel.datasets.csv_table import KernelTable, counted_only, sample
from costmodel.datasets.expert_tables import read_expert_layers
from costmodel.datasets.named_files import Wanted, everything, named_tables
from costmodel.datasets.neusight import read_neusight
from costmodel.datasets.own_tables import DIRECTORY as MEASURED
from costmodel.datasets.own_tables import read_measured
from costmodel.datasets.scaled_tables import read_scaled
from costmodel.gpu.families.convolution import Convolution
from costmodel.gpu.families.family import Family
from costmodel.gpu.families.gemm import BatchedSimtGemm, SimtGemm, TensorGemm, gemm_family
from costmodel.gpu.families.grouped_gemm import GroupedProducts, ScaledGroupedProducts
from costmodel.gpu.families.memory_bound import MemoryBound
from costmodel.gpu.families.row_wise import NormRows, SoftmaxRows
from costmodel.gpu.families.scaled_products import ScaledCasts, ScaledProducts
from costmodel.gpu.kernel_model import KernelModel
from costmodel.gpu.lookups.lookup_family import LookupKernels
from costmodel.gpu.residuals.fitted import (
    ANY_POWER,
    Fitted,
    Level,
    LevelTransfer,
    all_fitted,
    power_class,
    residuals_for,
    transfer,
    write_fitted,
    write_transfer,
)
from costmodel.gpu.residuals.forest import Forest
from costmodel.gpu.residuals.residual import boost, train
from costmodel.machines.machine_catalog import load_machine
from costmodel.machines.machine_records import Machine
from costmodel.model.measurements import Measurement
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Gemm

# Families whose deviation from the analytic model depends on the shape in the same way on all GPUs: on the select
# split, left-out GPUs improve with it. GEMM's does not.
SHAPED = ("convolution", "normalization", "softmax")
_SHAPE_DEPTH, _SHAPE_ROUNDS = 2, 60
MAXIMUM_ROWS = 16000  # of one table: more make the files larger, hardly the errors smaller
MINIMUM_ROWS = (
    60  # of a family: fewer move the model of others (:mod:`costmodel.gpu.residuals.adaptation`) rather than grow trees
)
_COMMAND = "python -m costmodel fit"
_SPLITS = "fit 70 %, select 15 %; report 15 % unseen"
_SELECTION = (
    "of the files named, rows that tell about the kernel rather than about the host (`counted`), at most 16,000 of a "
    "table, evenly"
)
_LICENCES = "sitar-lab/NeuSight (MIT), ai-dynamo/aiconfigurator (Apache-2.0)"

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
}


@dataclass(frozen=True)
class KernelRows:
    """Rows of one family on one machine, of one or more tables."""

    family: Family[Any]
    machine: Machine
    operators: tuple[AnyOperator, ...]
    seconds: np.ndarray
    splits: np.ndarray

    def log_ratio(self, shape: Forest | None = None) -> np.ndarray:
        """log(measured / analytic), less what ``shape`` says about it."""
        analysis = self.family.analyse(self.operators, self.machine)
        ratio: np.ndarray = np.log(self.seconds / analysis.seconds)
        return ratio if shape is None else ratio - shape.predict(analysis.matrix())

    def of(self, *names: str) -> KernelRows:
        """The rows of these splits."""
        mask = np.isin(self.splits, names)
        kept = tuple(each for each, keep in zip(self.operators, mask, strict=True) if keep)
        return KernelRows(self.family, self.machine, kept, self.seconds[mask], self.splits[mask])


def read_tables(data: Path, wanted: Wanted = everything) -> list[KernelTable]:
    """The wanted tables of ``data``, and our own, that trees are fitted to, thinned, counted rows alone."""
    public = [*read_neusight(data, wanted), *read_aiconfigurator(data, wanted)]
    public += [*read_scaled(data, wanted), *read_expert_layers(data, wanted)]
    tables = [*public, *(table for table, _ in _own_tables())]
    return [sample(each, MAXIMUM_ROWS) for each in counted_only(tables)]


def read_points() -> list[KernelTable]:
    """What else was measured by us or taken from publications: small tables, and dtypes that no trees are made for."""
    return counted_only([points for _, points in _own_tables()])


def _own_tables() -> Iterable[tuple[KernelTable, KernelTable]]:
    """Each table of our own as the rows for trees, if enough, and the others."""
    for table in read_measured():
        family = FAMILIES[table.name]
        covered = np.array([family.covers(each) for each in table.operators], dtype=bool)
        if covered.sum() < MINIMUM_ROWS:
            covered[:] = False
        yield table.only(covered), table.only(~covered)


def rows_by_family(tables: Iterable[KernelTable]) -> list[KernelRows]:
    """Tables of one family and machine together, in a fixed order."""
    groups: dict[tuple[str, str], list[KernelTable]] = {}
    for table in tables:
        groups.setdefault((FAMILIES[table.name].name, table.machine), []).append(table)
    return [_merge(group) for _, group in sorted(groups.items())]


def _merge(tables: Sequence[KernelTable]) -> KernelRows:
    operators = tuple(each for table in tables for each in table.operators)
    seconds = np.concatenate([table.seconds for table in tables])
    splits = np.concatenate([table.splits() for table in tables])
    return KernelRows(FAMILIES[tables[0].name], load_machine(tables[0].machine), operators, seconds, splits)


def fit(data: Path, output: Path, progress: Callable[[str], None], wanted: Wanted = everything) -> list[Path]:
    """Writes the model files into ``output``; returns them. A minute or two on two cores.

    First the machines with tables, then what carries over, then the machines of which few points are known. Each file
    names the tables it came from, the one of what carries over all of them.
    """
    tables = read_tables(data, wanted)
    rows = rows_by_family(tables)
    written = []
    for name in sorted({each.machine.name for each in rows}):
        own = [each for each in rows if each.machine.name == name]
        progress(f"{name}: {', '.join(f'{each.family.name} ({len(each.operators)} rows)' for each in own)}")
        known = _provenance([table for table in tables if table.machine == name], data)
        written.append(write_fitted(_fit_machine(own, known), output))
    carried = replace(transfer_of(rows), provenance=_provenance(tables, data))
    written.append(write_transfer(carried, output))
    groups: dict[str, list[KernelTable]] = {}
    for table in read_points():
        groups.setdefault(table.machine, []).append(table)
    for name, points in sorted(groups.items()):
        progress(f"{name}: {', '.join(f'{each.name} ({len(each.operators)} points)' for each in points)}")
        written.append(write_fitted(_adapted(load_machine(name), points, output), output))
    return list(dict.fromkeys(written))


def _adapted(machine: Machine, points: Sequence[KernelTable], output: Path) -> Fitted:
    """The model in ``output`` of ``machine``, or none, with what ``points`` say about the families they belong to."""

    def family_of(operator: AnyOperator) -> Family[Any]:
        if isinstance(operator, Gemm):
            return gemm_family(operator, machine)
        return next(FAMILIES[each.name] for each in points if operator in each.operators)

    measurements = [
        Measurement(operator, seconds=float(seconds))
        for table in points
        for operator, seconds in zip(table.operators, table.seconds, strict=True)
    ]
    model = KernelModel(machine, family_of, residuals_for(machine, output), transfer(output))
    model.fit(measurements)
    chip = machine.chip()
    known = all_fitted(output).get(machine.name)
    provenance: dict[str, Any] = dict(known.provenance) if known else {"command": _COMMAND}
    provenance["points"] = named_tables(_rows_by_file(points), MEASURED)["own"]
    families = known.families if known else {}
    return Fitted(machine.name, chip.architecture, chip.power_limited, families, provenance, model.adaptations)


def _fit_machine(rows: Sequence[KernelRows], provenance: Mapping[str, Any]) -> Fitted:
    machine = rows[0].machine
    families = {}
    for each in rows:
        seen = each.of("fit", "select")
        analysis = seen.family.analyse(seen.operators, machine)
        families[each.family.name] = train(
            analysis.features, np.log(seen.seconds / analysis.seconds), seen.splits == "select"
        )
    chip = machine.chip()
    return Fitted(machine.name, chip.architecture, chip.power_limited, families, provenance)


def transfer_of(rows: Sequence[KernelRows]) -> LevelTransfer:
    """What carries over from the machines of ``rows`` to others; every machine weighs the same in a level."""
    shapes = {family: shape for family in SHAPED if (shape := _shape([r for r in rows if r.family.name == family]))}
    return LevelTransfer(_levels(rows, shapes), shapes, {})


def _shape(members: Sequence[KernelRows]) -> Forest | None:
    """How the log ratio depends on the shape, each machine's own level taken off; ``None`` without rows."""
    if not members:
        return None
    seen = [each.of("fit", "select") for each in members]
    features = np.concatenate([each.family.analyse(each.operators, each.machine).matrix() for each in seen])
    ratios = [each.log_ratio() for each in seen]
    targets = np.concatenate([ratio - np.median(ratio) for ratio in ratios])
    return boost(features, targets, _SHAPE_DEPTH, _SHAPE_ROUNDS, {"objective": "reg:absoluteerror"})


def _levels(rows: Sequence[KernelRows], shapes: Mapping[str, Forest]) -> dict[str, dict[str, Level]]:
    groups: dict[tuple[str, str], list[KernelRows]] = {}
    for each in rows:
        power = power_class(each.machine) if each.family.clock_bound else ANY_POWER
        groups.setdefault((each.family.name, power), []).append(each)
    levels: dict[str, dict[str, Level]] = {}
    for (family, name), members in sorted(groups.items()):
        levels.setdefault(family, {})[name] = _level(members, shapes.get(family))
    return levels


def _level(members: Sequence[KernelRows], shape: Forest | None) -> Level:
    ratios = [each.of("fit", "select").log_ratio(shape) for each in members]
    middle = float(np.median([np.median(ratio) for ratio in ratios]))
    lower = min(float(np.quantile(ratio, 0.1)) for ratio in ratios)
    upper = max(float(np.quantile(ratio, 0.9)) for ratio in ratios)
    names = tuple(each.machine.name for each in members)
    return Level(round(middle, 5), round(lower, 5), round(upper, 5), names)


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
    """Rows of each file, which may hold several tables."""
    rows: Counter[Path] = Counter()
    for table in tables:
        rows[Path(table.source)] += len(table.operators)
    return dict(rows)
