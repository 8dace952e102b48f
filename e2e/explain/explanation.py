"""Builds the record of a prediction from a simulated step, for one rank or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from costmodel.machines.machine_records import Machine
from e2e.explain.breakdowns import breakdown_of, coverage_of, overheads_of
from e2e.explain.collective_figures import collective_figures, stragglers
from e2e.explain.energy import energy_of
from e2e.explain.intervals import step_interval
from e2e.explain.path_parts import path_parts
from e2e.explain.phase_times import phase_seconds
from e2e.explain.prediction import Prediction
from e2e.explain.range_figures import range_figures
from e2e.explain.rank_figures import RankFigures, fits, fullest, memory_verdict, rank_figures
from e2e.explain.simulated_step import SimulatedStep
from e2e.explain.step_facts import board_of
from e2e.explain.utilisation import beyond_the_peak, utilisation_of
from e2e.step.memory import MemoryUsage
from e2e.step.memory_room import SURE, Verdict, memory_room

# Share of the device time priced by analytic models without measurements from which a warning is given.
_MUCH_ANALYTIC = 0.2


class RankSite(Protocol):
    """Location of the ranks as a report needs it; :class:`costmodel.machines.cluster.Cluster` is one implementation."""

    @property
    def name(self) -> str:
        """Name of the site."""
        ...

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks are spread over."""
        ...


def explain(
    step: SimulatedStep,
    machine: Machine,
    site: RankSite,
    memory: Mapping[int, MemoryUsage],
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Prediction:
    """Make the prediction of ``step``. ``memory``: rank of the graph -> its usage, as far as known."""
    graph, path = step.graph, step.path
    room = memory_room(machine, graph, site)
    ranks = [rank_figures(step, each, step.paths[each.rank], memory.get(each.rank), room) for each in graph.ranks]
    collectives = collective_figures(graph, step.timeline, step.iteration)
    longest = graph.ranks[max(range(len(ranks)), key=lambda place: ranks[place].compute_seconds)]
    phases = phase_seconds(longest, step.timeline, step.iteration)
    activity = step.timeline.activity(longest.rank, step.window)
    coverage = coverage_of(graph)
    full = fullest(ranks)
    used = utilisation_of(graph, machine, step.seconds)
    judged = memory_verdict(ranks, room)
    said = _memory_warning(judged, ranks, memory, machine, room)
    return Prediction(
        workload=graph.source,
        machine=machine.name,
        cluster=site.name,
        gpus=sum(rank.multiplicity for rank in ranks),
        nodes=site.nodes,
        iteration_seconds=step.seconds,
        interval_seconds=step_interval(graph, path, step.seconds, step.host_factor, step.errors),
        critical_path_seconds=path.seconds,
        forward_seconds=phases.forward,
        backward_seconds=phases.backward,
        optimizer_seconds=phases.optimizer,
        other_seconds=phases.other,
        gpu_active_seconds=activity.active,
        gpu_idle_seconds=activity.idle,
        host_bound_fraction=path.host_bound_fraction,
        breakdown=breakdown_of(longest),
        overheads=overheads_of(longest),
        attribution=path.by_kind,
        critical_path=path_parts(path),
        ranks=ranks,
        collectives=collectives,
        stragglers=stragglers(collectives),
        peak_memory_bytes=None if full is None else full.peak_memory_bytes,
        memory_breakdown={} if full is None else full.memory_breakdown or {},
        memory_capacity_bytes=int(machine.memory[-1].capacity_bytes),
        memory_room_bytes=room,
        memory_verdict=judged,
        fits=fits(judged),
        memory_shortage=said if judged == "does not fit" else None,
        coverage=coverage,
        kernels=sum(rank.kernels for rank in ranks),
        operators=sum(rank.operators for rank in ranks),
        warnings=[
            *warnings,
            *([] if said is None else [said]),
            *_unmeasured(coverage),
            *beyond_the_peak(used),
        ],
        notes=tuple(notes),
        board=board_of(machine),
        utilisation=used,
        energy=energy_of(graph, machine, step.seconds),
        ranges=range_figures(longest, path if len(ranks) == 1 else step.paths[longest.rank]),
    )


def _memory_warning(
    judged: Verdict, ranks: Sequence[RankFigures], memory: Mapping[int, MemoryUsage], machine: Machine, room: int
) -> str | None:
    """Return a warning about the fullest rank if it does not fit or may not fit, else ``None``."""
    full = fullest(ranks)
    if full is None or judged not in ("does not fit", "may not fit"):
        return None
    share = (full.allocated_bytes or 0) / room if room else float("inf")
    more = f"{share - 1:.0%} more than there is" if share > 1 else f"{share:.0%} of it, where {SURE:.0%} are sure"
    return f"{judged}: {_need(ranks, full, memory)}, {machine.name} has {room / 2**30:.1f} GiB for tensors: {more}"


def _need(ranks: Sequence[RankFigures], full: RankFigures, memory: Mapping[int, MemoryUsage]) -> str:
    usage = memory[full.rank]
    needed = f"{usage.allocated_bytes / 2**30:.1f} GiB"
    if sum(rank.multiplicity for rank in ranks) == 1:
        return f"{needed} needed at {usage.operator}"
    return f"rank {full.rank} needs {needed}"


def _unmeasured(coverage: Mapping[str, float]) -> list[str]:
    share = coverage.get("analytic", 0.0)
    if share <= _MUCH_ANALYTIC:
        return []
    return [f"{share:.0%} of the device time comes from analytic bounds without measurements"]
