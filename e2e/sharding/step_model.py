"""Step time from the loads of the ranks: closed form of the simulated step of :mod:`e2e.sharding.step_graph`.

:class:`State` is a plan during the search: option and ranks of every table, and the resulting loads.

Order of a TorchRec DLRM step with its sparse pipeline (``TrainPipelineSparseDist``), as recorded on 8 V100
(facebookresearch/param); collectives run one after another on a stream of their own, beside the kernels:

  kernels                                               collectives
  bottom MLP
  lookups of placed tables, of blocks of rows, copies   all_to_all after the first, reduce_scatter after the second
  interaction, top MLP, loss                            sizes, lengths, indices of the next batch: all_to_all
  top MLP backward                                      all_reduce of its gradients
  interaction backward                                  all_gather for blocks of rows, all_to_all for placed tables
  backward lookups of copies                            all_reduce of their gradients
  backward lookups of blocks of rows, placed tables
  bottom MLP backward                                   all_reduce of its gradients
  optimizer

A collective waits for the last rank, so the largest load of each kind counts. If one rank has the most forward and
another the most backward work, the form is an upper bound of the simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from e2e.sharding.placement import TablePlacement
from e2e.sharding.task import (
    BACKWARD,
    FORWARD,
    INDICES,
    LENGTHS,
    LOADS,
    MEMORY,
    OUTPUT,
    DensePart,
    OptionCosts,
    ShardingTask,
    TransferTimes,
)
from e2e.step.arrays import Floats

# Columns of the totals of a plan, over all its tables.
(PLACED, ROWS, ROW_FORWARD, ROW_BACKWARD, ROW_INDICES, ROW_LENGTHS, ROW_OUTPUT) = range(7)
(COPIES, COPY_FORWARD, COPY_BACKWARD, COPY_REDUCE) = range(7, 11)
SUMS = 11
# Shards alone, forward and backward; combined by maximum, not by sum.
(PLACED_ALONE, ROW_ALONE, COPY_ALONE) = range(11, 17, 2)
TOTALS = 17


def option_totals(costs: OptionCosts) -> Floats:
    """Contribution of each option to the totals, shape (options, 17).

    Columns from ``SUMS`` on are combined by maximum.
    """
    totals = np.zeros((len(costs.options), TOTALS))
    for place, option in enumerate(costs.options):
        load = costs.shard[place]
        if option.placed:
            totals[place, PLACED] = 1
            totals[place, PLACED_ALONE : PLACED_ALONE + 2] = costs.alone[place]
        elif option.kind == "row-wise":
            totals[place, ROWS] = 1
            totals[place, ROW_ALONE : ROW_ALONE + 2] = costs.alone[place]
            totals[place, ROW_FORWARD : ROW_OUTPUT + 1] = load[[FORWARD, BACKWARD, INDICES, LENGTHS, OUTPUT]]
        else:
            totals[place, COPIES] = 1
            totals[place, COPY_ALONE : COPY_ALONE + 2] = costs.alone[place]
            totals[place, [COPY_FORWARD, COPY_BACKWARD]] = load[[FORWARD, BACKWARD]]
            totals[place, COPY_REDUCE] = costs.all_reduce[place]
    return totals


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Pieces of a step in seconds, arrays of one shape."""

    splits: Floats
    placed_input: Floats
    row_input: Floats
    placed_forward: Floats
    row_forward: Floats
    copy_forward: Floats
    placed_output: Floats
    row_output: Floats
    row_gradient: Floats
    copy_backward: Floats
    row_backward: Floats
    placed_backward: Floats
    copy_reduce: Floats


@dataclass(frozen=True, eq=False)
class StepModel:
    """Closed form of the step. ``launch`` (2,): fixed cost of the kernel of a group of tables."""

    times: TransferTimes
    dense: DensePart
    launch: Floats
    ranks: int

    def pieces(self, peak: Floats, totals: Floats) -> StepTimes:
        """Return the pieces.

        ``peak`` (..., 5 or 6): largest load of any rank by placed tables; ``totals`` (..., 17).
        """
        placed, rows, copies = (totals[..., place] > 0 for place in (PLACED, ROWS, COPIES))
        forward, backward = self.launch
        return StepTimes(
            placed_forward=placed * np.maximum(peak[..., FORWARD] + forward, totals[..., PLACED_ALONE]),
            row_forward=rows * np.maximum(totals[..., ROW_FORWARD] + forward, totals[..., ROW_ALONE]),
            copy_forward=copies * np.maximum(totals[..., COPY_FORWARD] + forward, totals[..., COPY_ALONE]),
            copy_backward=copies * np.maximum(totals[..., COPY_BACKWARD] + backward, totals[..., COPY_ALONE + 1]),
            row_backward=rows * np.maximum(totals[..., ROW_BACKWARD] + backward, totals[..., ROW_ALONE + 1]),
            placed_backward=placed * np.maximum(peak[..., BACKWARD] + backward, totals[..., PLACED_ALONE + 1]),
            **self.transfers(peak, totals),
        )

    def transfers(self, peak: Floats, totals: Floats) -> dict[str, Floats]:
        """Return the transfers among the pieces, by their names in :class:`StepTimes`."""
        move = self.times.of
        placed, rows, copies = (totals[..., place] > 0 for place in (PLACED, ROWS, COPIES))
        row_output = totals[..., ROW_OUTPUT]
        return {
            "splits": (placed | rows) * move("all_to_all", 0.0),
            "placed_input": placed * (move("all_to_all", peak[..., LENGTHS]) + move("all_to_all", peak[..., INDICES])),
            "row_input": rows
            * (move("all_to_all", totals[..., ROW_LENGTHS]) + move("all_to_all", totals[..., ROW_INDICES])),
            "placed_output": placed * move("all_to_all", peak[..., OUTPUT]),
            "row_output": rows * move("reduce_scatter", row_output),
            "row_gradient": rows * move("all_gather", row_output / self.ranks),
            "copy_reduce": copies * totals[..., COPY_REDUCE],
        }

    def seconds(self, peak: Floats, totals: Floats) -> Floats:
        """Step time, in the common shape of the leading axes."""
        return self.combine(self.pieces(peak, totals))

    def combine(self, at: StepTimes) -> Floats:
        """Combine the pieces to the time of a step."""
        dense = self.dense
        looked_up = dense.bottom_forward + at.placed_forward
        exchanged = looked_up + at.placed_output
        rows_done = looked_up + at.row_forward
        exchanged = np.where(at.row_output > 0, np.maximum(exchanged, rows_done) + at.row_output, exchanged)
        inputs = exchanged + at.splits + at.placed_input + at.row_input
        top = np.maximum(exchanged, rows_done + at.copy_forward) + dense.top_forward + dense.top_backward
        begin = top + dense.interaction_backward
        queue = np.maximum(inputs, top) + dense.top_all_reduce if dense.top_all_reduce > 0 else inputs
        gathered = np.maximum(begin, queue) + at.row_gradient
        arrived = gathered + at.placed_output
        copies_done = begin + at.copy_backward
        rows_done = np.where(at.row_gradient > 0, np.maximum(copies_done, gathered), copies_done) + at.row_backward
        placed_done = np.where(at.placed_output > 0, np.maximum(rows_done, arrived), rows_done) + at.placed_backward
        bottom_done = placed_done + dense.bottom_backward
        reduced = np.maximum(arrived, copies_done) + at.copy_reduce
        reduced = np.where(at.copy_reduce > 0, reduced, arrived)
        if dense.bottom_all_reduce > 0:
            reduced = np.maximum(reduced, bottom_done) + dense.bottom_all_reduce
        return np.asarray(np.maximum(reduced, bottom_done) + dense.optimizer)

    def weights(self, peak: Floats) -> Floats:
        """Approximate seconds per unit of each load, shape (6,); 0 for memory."""
        slopes = [self.times.line("all_to_all", peak[load] / 2, peak[load])[1] for load in (INDICES, LENGTHS, OUTPUT)]
        return np.array([1.0, 1.0, slopes[0], slopes[1], 2 * slopes[2], 0.0])


Choice = tuple[int, tuple[int, ...]]
NOWHERE: Choice = (-1, ())


@dataclass(frozen=True, eq=False)
class Problem:
    """Task with the costs of its options. ``of_table``: option numbers of each table."""

    task: ShardingTask
    costs: OptionCosts
    times: TransferTimes
    model: StepModel = field(init=False)
    totals: Floats = field(init=False)
    of_table: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        groups: list[list[int]] = [[] for _ in self.task.tables]
        for place, option in enumerate(self.costs.options):
            groups[option.table].append(place)
        model = StepModel(self.times, self.task.dense, self.costs.launch, self.task.ranks)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "totals", option_totals(self.costs))
        object.__setattr__(self, "of_table", tuple(map(tuple, groups)))

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.task.ranks

    @property
    def capacity(self) -> float:
        """Bytes on a rank for tables and their buffers."""
        return float(self.task.memory_bytes)


class State:
    """Choice of every table: (option, ranks); ``NOWHERE`` while it has none.

    ``loads`` (ranks, 6): of placed tables; ``totals`` (17,): of the plan; ``common_memory``: bytes on every rank.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices: list[Choice] = [NOWHERE] * len(problem.task.tables)
        self.loads: Floats = np.zeros((problem.ranks, LOADS))
        self.totals: Floats = np.zeros(TOTALS)
        self.common_memory = 0.0
        self._largest: Floats = np.zeros((len(self.choices), TOTALS - SUMS))

    def copy(self) -> State:
        """Return an independent copy."""
        other = State.__new__(State)
        other.problem, other.choices = self.problem, list(self.choices)
        other.loads, other.totals = self.loads.copy(), self.totals.copy()
        other.common_memory, other._largest = self.common_memory, self._largest.copy()
        return other

    def put(self, table: int, choice: Choice) -> None:
        """Move ``table`` to another place (``NOWHERE``: remove it)."""
        self._add(self.choices[table], -1.0)
        self.choices[table] = choice
        self._add(choice, 1.0)
        self._largest[table] = self.problem.totals[choice[0], SUMS:] if choice[0] >= 0 else 0.0
        self.totals[SUMS:] = self._largest.max(axis=0)

    def _add(self, choice: Choice, sign: float) -> None:
        option, ranks = choice
        if option < 0:
            return
        costs = self.problem.costs
        self.totals[:SUMS] += sign * self.problem.totals[option, :SUMS]
        self.common_memory += sign * costs.everywhere[option]
        if costs.options[option].placed:
            self.loads[list(ranks)] += sign * costs.shard[option]
        else:
            self.common_memory += sign * costs.shard[option, MEMORY]

    def seconds(self) -> float:
        """Return the time of a step."""
        return float(self.problem.model.seconds(self.loads.max(axis=0), self.totals))

    def memory(self) -> Floats:
        """Bytes of tables and buffers on every rank, shape (ranks,)."""
        return self.loads[:, MEMORY] + self.common_memory

    def fits(self) -> bool:
        """True if every table has a place and no rank exceeds its memory."""
        complete = all(option >= 0 for option, _ in self.choices)
        return complete and float(self.memory().max()) <= self.problem.capacity * (1 + 1e-12)

    def placements(self) -> tuple[TablePlacement, ...]:
        """Return the placements as in a plan."""
        options, tables = self.problem.costs.options, self.problem.task.tables
        return tuple(
            TablePlacement(table.name, options[option].kind, tuple(ranks))
            for table, (option, ranks) in zip(tables, self.choices, strict=True)
        )


def state_of(problem: Problem, placements: tuple[TablePlacement, ...]) -> State:
    """Return the state of a plan; raises ``KeyError`` for a placement that is not among the problem's options."""
    options = problem.costs.options
    known = {(options[at].table, options[at].kind, options[at].shards): at for at in range(len(options))}
    state = State(problem)
    for table, placement in enumerate(placements):
        state.put(table, (known[table, placement.kind, len(placement.ranks)], placement.ranks))
    return state


def all_ranks(problem: Problem) -> tuple[int, ...]:
    """Return the ranks of an option that is on all of them."""
    return tuple(range(problem.ranks))
