"""Text report of a plan."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from e2e.report.text_report import plain_console
from e2e.sharding.explanation import Explanation, explain
from e2e.sharding.plan import TablePlan
from e2e.sharding.planner import Planning

ROWS = 16
GIB = 2**30


def render_plan(planning: Planning, plan: TablePlan, path: Path, console: Console | None = None) -> None:
    """Print the step, the ranks, the bottlenecks, and the gain over the greedy plans."""
    out = console or plain_console()
    found = explain(planning)
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.items())
    out.print(f"{len(plan.tables)} tables on {plan.gpus} x {plan.machine}, {plan.batch_size} samples per GPU")
    out.print(f"placed      {kinds} (by {plan.generator}); written to {path}")
    dense = f", of it {_ms(plan.dense_seconds)} dense kernels" if plan.dense_seconds else ", without a dense part"
    out.print(f"step        {_ms(plan.step_seconds)} by simulation without host time{dense}")
    if planning.gap is not None:
        out.print(
            f"bound       no plan takes less than {_ms(planning.bound)} (closed form; this one "
            f"{_ms(planning.best.seconds)}, {planning.gap:.1%} above)"
        )
    _uncertainty(out, planning)
    out.print(f"search      {planning.search_seconds:.1f} s{_exact_search(planning.solver)}")
    _gains(out, found)
    _ranks(out, plan, found)
    _bottlenecks(out, found)


# Explanations of CP-SAT's status.
_SOLVER = {
    "optimal": "has proven its plan the best of its form",
    "feasible": "found plans and has proven none to be the best",
    "unknown": "found no plan in its time",
}


def _exact_search(word: str) -> str:
    """Describe the result of the exact search.

    ``word``: CP-SAT's status, or the number of subproblems it was run on.
    """
    if not word:
        return ""
    told = f"was asked for {word}" if word[0].isdigit() else _SOLVER.get(word, f"says {word}")
    return f"; the exact search (CP-SAT) {told}"


def _uncertainty(out: Console, planning: Planning) -> None:
    best, fastest = planning.best, planning.fastest
    if planning.confidence is None:
        return
    out.print(
        f"uncertain   {_ms(best.expected)} on average where the models are wrong as they may be; faster than every "
        f"greedy plan in {planning.confidence:.0%} of the cases"
    )
    if best is not fastest:
        out.print(
            f"            where the models are right, the plan by {fastest.generator} takes {_ms(fastest.simulated)} "
            f"({_ms(fastest.expected)} on average)"
        )


def _gains(out: Console, found: Explanation) -> None:
    table = Table("greedy generator", "step is shorter by", box=None)
    for name, gain in found.gains.items():
        table.add_row(name, "does not fit" if gain is None else f"{gain:.1%}")
    out.print(table)


def _ranks(out: Console, plan: TablePlan, found: Explanation) -> None:
    table = Table("rank", "tables", "forward ms", "backward ms", "sent MB", "waits ms", "memory GiB", box=None)
    order = sorted(plan.ranks, key=lambda rank: -(rank.forward_seconds + rank.backward_seconds))
    for load in order[:ROWS]:
        table.add_row(
            str(load.rank),
            str(load.tables),
            f"{load.forward_seconds * 1e3:.3f}",
            f"{load.backward_seconds * 1e3:.3f}",
            f"{load.sent_output_bytes / 1e6:.1f}",
            f"{found.waiting[load.rank] * 1e3:.3f}",
            f"{load.memory_bytes / GIB:.2f}",
        )
    out.print(table)
    if len(order) > ROWS:
        out.print(f"... and {len(order) - ROWS} ranks with less; all are in the plan")
    fullest = max(load.memory_bytes for load in plan.ranks) / GIB
    room = f"{plan.memory_limit_bytes / GIB:.1f} GiB of each are for tables and buffers"
    out.print(f"memory      {fullest:.1f} GiB on the fullest GPU; {room}")


def _bottlenecks(out: Console, found: Explanation) -> None:
    for each in found.bottlenecks:
        tables = f", most of it from {', '.join(each.tables)}" if each.tables else ""
        out.print(
            f"{each.load}: rank {each.rank} has the most, {_ms(each.seconds)}, {each.ratio:.2f} times the mean{tables}"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
