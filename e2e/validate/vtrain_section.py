"""The section ``vtrain`` of ``python -m e2e validate``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from e2e.validate.vtrain import CLUSTER, FITTED_HIDDEN, VtrainReport, read_cases, regularity, validate

# What --only is compared with.
CASE = f"{CLUSTER}/vtrain-gpt"


@dataclass(frozen=True)
class VtrainSection:
    """All published iterations, predicted. ``regularity``: see :func:`e2e.validate.vtrain.regularity`."""

    report: VtrainReport
    regularity: float

    def record(self) -> dict[str, Any]:
        """The JSON document."""
        return {**self.report.record(), "regularity": self.regularity}

    def render(self) -> None:
        """The error figures, a line for each group of cases."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
        console.print("GPT iterations of vTrain on A100 (TP x DP x PP), put together from predicted parts")
        table = Table("cases", "number", "MAPE", "geomean", "p90", "worst", "bias", box=None)
        for each in self.report.figures():
            sizes = (f"{value:.1%}" for value in (each.mape, each.geomean, each.p90, each.worst))
            table.add_row(each.name, str(each.count), *sizes, f"{each.bias:+.1%}")
        console.print(table)
        console.print(
            f"the host's time per kernel is fitted on width {FITTED_HIDDEN}; the published times of one node "
            f"are bilinear in layers and micro-batches within {self.regularity:.0e}: put together from profiles of "
            "single layers, without recomputation; several nodes are predicted with it",
            soft_wrap=True,
        )


def vtrain_section(data: Path, only: str = "") -> VtrainSection | None:
    """``None`` if ``only`` names something else; ``InputError`` if the table is not in ``data``."""
    if only not in CASE:
        return None
    cases = read_cases(data)
    return VtrainSection(validate(data, cases=cases), regularity(cases))
