"""Execution graph of a sharded step, by rank, in the order of :mod:`e2e.sharding.step_model`.

The dense part is emitted by ``dense``: given seconds for the planner, the captured model for predictions. A rank has
kernels on the compute stream, collectives on a stream of their own, and waits between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from e2e.sharding.step_model import COPIES, COPY_REDUCE, PLACED, ROW_INDICES, ROW_LENGTHS, ROW_OUTPUT, ROWS, State
from e2e.sharding.task import INDICES, LENGTHS, OUTPUT, DensePart
from e2e.step.collective_names import EAGER_CALLS
from e2e.step.execution_graph import (
    Action,
    CallInfo,
    Collective,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    RankWriter,
    Task,
)
from e2e.step.operator_trace import Phase

COMPUTE, COMMUNICATION = 0, 1
GROUP = "world"
NOTHING = Duration(0.0, 0.0, 0.0, "", "analytic")


@dataclass
class ShardedRank:
    """Rank ``rank`` of ``ranks``. ``host``: whether operators cost host time (priced later).

    All collectives are of one group: TorchRec and DDP share it, so that they keep their order.
    """

    rank: int
    ranks: int
    host: bool = False
    _writer: RankWriter = field(init=False)

    def __post_init__(self) -> None:
        self._writer = RankWriter(self.rank)

    def kernel(
        self,
        name: str,
        seconds: float | None = None,
        operators: tuple[Any, ...] = (),
        phase: Phase = "other",
        launches: int = 1,
        operator: str = "",
    ) -> None:
        """Add one kernel that takes ``seconds``, or that is priced by its ``operators``.

        ``launches``: number of launches by the host (a pass of several kernels that are priced as one); ``operator``:
        name of the host's call if it differs.
        """
        call = self._writer.call(operator or name, phase)
        place, duration = self._writer.next_task, _exactly(seconds)
        self._launch(Task(place, name, "kernel", COMPUTE, operators, duration, None, call), launches)

    def collective(
        self,
        name: str,
        kind: str,
        sent: float,
        seconds: float | None = None,
        received: float | None = None,
        behind: bool = True,
        phase: Phase = "other",
    ) -> int:
        """Add a collective of all ranks; return the event of its end.

        ``behind``: True if it waits for all work submitted to the compute stream so far.
        """
        writer = self._writer
        taken = None if received is None else round(received)
        collective = Collective(kind, GROUP, tuple(range(self.ranks)), writer.next_in(GROUP), round(sent), taken)
        call = writer.call(EAGER_CALLS[kind], phase)
        if behind:
            writer.after(COMMUNICATION, COMPUTE)
        place, duration = writer.next_task, _exactly(seconds)
        self._launch(Task(place, name, "collective", COMMUNICATION, (), duration, collective, call))
        return writer.record_event(COMMUNICATION)

    def wait(self, event: int) -> None:
        """Make later work on the compute stream wait for ``event``."""
        self._writer.wait_event(event, COMPUTE)

    def paste(self, actions: tuple[Action, ...], source: RankGraph) -> None:
        """Append launches and host work of another program; their tasks and calls are renumbered."""
        renumbered = _Renumbered(self._writer, source.calls)
        for action in actions:
            if isinstance(action, Launch):
                task = source.tasks[action.task]
                call = renumbered.call(task.call)
                task = replace(task, id=self._writer.next_task, stream=COMPUTE, call=call)
                self._writer.enqueue(task, action.duration)
            elif isinstance(action, HostWork):
                self._writer.append(replace(action, call=renumbered.call(action.call)))

    def graph(self) -> RankGraph:
        """Return the finished rank."""
        return self._writer.finish()

    def _launch(self, task: Task, launches: int = 1) -> None:
        if self.host:
            self._writer.unit(task, launches)
        else:
            self._writer.enqueue(task, NOTHING)


@dataclass
class _Renumbered:
    """Map of another program's calls to new numbers, assigned at their first use."""

    writer: RankWriter
    calls: Mapping[int, CallInfo]
    numbers: dict[int, int] = field(default_factory=dict)

    def call(self, number: int | None) -> int | None:
        if number is None or number not in self.calls:
            return None
        if number not in self.numbers:
            info = self.calls[number]
            self.numbers[number] = self.writer.call(info.name, info.phase)
        return self.numbers[number]


def _exactly(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds, seconds, seconds, "", "analytic")


class DenseProgram(Protocol):
    """Dense part of a step in pieces. Returned events mark the ends of all-reduces of gradients."""

    def bottom_forward(self, rank: ShardedRank) -> None:
        """Add the forward pass of the dense features."""
        ...

    def top_forward(self, rank: ShardedRank) -> None:
        """Add the interaction, the top MLP and the loss."""
        ...

    def top_backward(self, rank: ShardedRank) -> list[int]:
        """Add the backward pass above the interaction; return the events of its all-reduces of gradients."""
        ...

    def interaction_backward(self, rank: ShardedRank) -> None:
        """Add the backward pass of the interaction."""
        ...

    def bottom_backward(self, rank: ShardedRank) -> list[int]:
        """Add the backward pass of the dense features; return the events of its all-reduces of gradients."""
        ...

    def optimizer(self, rank: ShardedRank) -> None:
        """Add the update of the dense parameters."""
        ...


class LookupKernelTimes(Protocol):
    """Lookups of one rank: kernels of ``group`` (placed, rows, copies), forward or backward."""

    def put(self, rank: ShardedRank, group: str, backward: bool) -> None:
        """Add the lookups of ``group`` to ``rank``, or their backward pass."""
        ...


@dataclass(frozen=True)
class GivenDense:
    """Dense part of kernels with given seconds."""

    part: DensePart

    def bottom_forward(self, rank: ShardedRank) -> None:
        _kernel(rank, "bottom MLP", self.part.bottom_forward)

    def top_forward(self, rank: ShardedRank) -> None:
        _kernel(rank, "interaction, top MLP, loss", self.part.top_forward)

    def top_backward(self, rank: ShardedRank) -> list[int]:
        _kernel(rank, "top MLP backward", self.part.top_backward)
        return _reduce(rank, "top MLP", self.part.top_all_reduce)

    def interaction_backward(self, rank: ShardedRank) -> None:
        _kernel(rank, "interaction backward", self.part.interaction_backward)

    def bottom_backward(self, rank: ShardedRank) -> list[int]:
        _kernel(rank, "bottom MLP backward", self.part.bottom_backward)
        return _reduce(rank, "bottom MLP", self.part.bottom_all_reduce)

    def optimizer(self, rank: ShardedRank) -> None:
        _kernel(rank, "optimizer", self.part.optimizer)


def _kernel(rank: ShardedRank, name: str, seconds: float) -> None:
    if seconds > 0:
        rank.kernel(name, seconds)


def _reduce(rank: ShardedRank, name: str, seconds: float) -> list[int]:
    """Add an all-reduce of given time; its size has no effect."""
    return [rank.collective(f"all_reduce of the {name}", "all_reduce", 0, seconds)] if seconds > 0 else []


@dataclass(frozen=True, eq=False)
class PricedLookups:
    """Lookups with given times. ``seconds``: (group, backward) -> seconds of the rank's kernel."""

    seconds: dict[tuple[str, bool], float]

    def put(self, rank: ShardedRank, group: str, backward: bool) -> None:
        """Add the lookups of ``group`` to ``rank``, or their backward pass."""
        seconds = self.seconds.get((group, backward), 0.0)
        if seconds > 0:
            rank.kernel(f"{'backward ' if backward else ''}lookup, {group}", seconds)


def planned_graph(state: State, exact: bool = True) -> ExecutionGraph:
    """Return the graph of a plan with seconds for everything and no host time.

    ``exact``: lookups are priced by the kernel model for all tables of a rank together; else by the sums of the closed
    form.
    """
    problem = state.problem
    dense = GivenDense(problem.task.dense)
    ranks = []
    for rank in range(problem.ranks):
        lookups = PricedLookups(_lookup_seconds(state, rank, exact))
        program = ShardedRank(rank, problem.ranks)
        emit_step(program, state, lookups, dense, transfers_by_name(state))
        ranks.append(program.graph())
    return ExecutionGraph(tuple(ranks), source="sharded step")


def options_of_rank(state: State, rank: int) -> dict[str, list[int]]:
    """Map each group to the options of its tables on ``rank``."""
    options = state.problem.costs.options
    groups: dict[str, list[int]] = {"placed": [], "rows": [], "copies": []}
    for number, ranks in state.choices:
        option = options[number]
        if not option.placed:
            groups["rows" if option.kind == "row-wise" else "copies"].append(number)
        elif rank in ranks:
            groups["placed"].append(number)
    return groups


def _lookup_seconds(state: State, rank: int, exact: bool) -> dict[tuple[str, bool], float]:
    costs = state.problem.costs
    seconds: dict[tuple[str, bool], float] = {}
    for group, numbers in options_of_rank(state, rank).items():
        if not numbers:
            continue
        if exact:
            both = costs.kernel(numbers)
        else:
            load, alone = costs.shard[numbers], costs.alone[numbers].max(axis=0)
            sums = load.sum(axis=0)[:2] + costs.launch
            both = max(float(sums[0]), float(alone[0])), max(float(sums[1]), float(alone[1]))
        seconds[group, False], seconds[group, True] = both
    return seconds


def transfers_by_name(state: State) -> dict[str, float]:
    """Map the names of transfers to seconds, for the whole group."""
    model, peak = state.problem.model, state.loads.max(axis=0)
    move, totals, ranks = model.times.of, state.totals, state.problem.ranks
    row = totals[ROW_OUTPUT]
    return {
        "splits": float(move("all_to_all", 0.0)),
        "lengths": float(move("all_to_all", peak[LENGTHS])),
        "indices": float(move("all_to_all", peak[INDICES])),
        "row lengths": float(move("all_to_all", totals[ROW_LENGTHS])),
        "row indices": float(move("all_to_all", totals[ROW_INDICES])),
        "output": float(move("all_to_all", peak[OUTPUT])),
        "row output": float(move("reduce_scatter", row)),
        "row gradient": float(move("all_gather", row / ranks)),
        "copies": float(totals[COPY_REDUCE]),
    }


def emit_step(
    rank: ShardedRank,
    state: State,
    lookups: LookupKernelTimes,
    dense: DenseProgram,
    seconds: dict[str, float] | None = None,
) -> None:
    """Add a step to ``rank``. ``seconds`` of transfers; ``None``: they are priced later, by their bytes."""
    exchange = _Exchange(rank, state, seconds)
    dense.bottom_forward(rank)
    placed, rows, copies = (bool(state.totals[column] > 0) for column in (PLACED, ROWS, COPIES))
    outputs = []
    if placed:
        lookups.put(rank, "placed", False)
        outputs.append(exchange.output(False))
    if rows:
        lookups.put(rank, "rows", False)
        outputs.append(exchange.rows_output())
    if copies:
        lookups.put(rank, "copies", False)
    for event in outputs:
        rank.wait(event)
    dense.top_forward(rank)
    exchange.next_inputs()
    reduces = dense.top_backward(rank)
    dense.interaction_backward(rank)
    rows_gradient = exchange.rows_gradient() if rows else None
    gradient = exchange.output(True) if placed else None
    if copies:
        lookups.put(rank, "copies", True)
        reduces.append(exchange.copies())
    if rows_gradient is not None:
        rank.wait(rows_gradient)
        lookups.put(rank, "rows", True)
    if gradient is not None:
        rank.wait(gradient)
        lookups.put(rank, "placed", True)
    reduces += dense.bottom_backward(rank)
    for event in reduces:
        rank.wait(event)
    dense.optimizer(rank)


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Transfers of a rank, with the bytes that it sends and receives."""

    rank: ShardedRank
    state: State
    seconds: dict[str, float] | None

    def next_inputs(self) -> None:
        """Add the inputs of the next batch: sizes first, then lengths and indices of each group.

        No kernel of this step depends on them, nor they on any; the next step's lookups and gradients follow
        them.
        """
        totals, load = self.state.totals, self.state.loads
        mine, all_ranks = load[self.rank.rank], load.sum(axis=0) / self.rank.ranks
        placed, rows = totals[PLACED] > 0, totals[ROWS] > 0
        if placed or rows:
            self._input("splits", 0.0)
        if placed:
            self._input("lengths", all_ranks[LENGTHS], mine[LENGTHS])
            self._input("indices", all_ranks[INDICES], mine[INDICES])
        if rows:
            self._input("row lengths", totals[ROW_LENGTHS])
            self._input("row indices", totals[ROW_INDICES])

    def output(self, gradient: bool) -> int:
        """Exchange the outputs of placed tables: a rank sends its lookups and receives its samples'.

        Gradients the reverse.
        """
        mine = self.state.loads[self.rank.rank, OUTPUT]
        share = self.state.loads[:, OUTPUT].sum() / self.rank.ranks
        sent, received = (share, mine) if gradient else (mine, share)
        if gradient:
            return self._move("output", "all_to_all", "backward", sent, received, " gradients")
        return self._move("output", "all_to_all", "forward", sent, received)

    def rows_output(self) -> int:
        """Reduce and scatter the partial sums of blocks of rows."""
        return self._move("row output", "reduce_scatter", "forward", self.state.totals[ROW_OUTPUT])

    def rows_gradient(self) -> int:
        """Gather the gradients of all samples for all blocks of rows."""
        return self._move("row gradient", "all_gather", "backward", self.state.totals[ROW_OUTPUT] / self.rank.ranks)

    def copies(self) -> int:
        """All-reduce the dense gradients of data-parallel tables."""
        options, tables = self.state.problem.costs.options, self.state.problem.task.tables
        size = sum(
            tables[options[number].table].rows * tables[options[number].table].dim * 4
            for number, _ in self.state.choices
            if options[number].kind == "data-parallel"
        )
        return self._move("copies", "all_reduce", "backward", float(size))

    def _input(self, name: str, sent: float, received: float | None = None) -> None:
        seconds = None if self.seconds is None else self.seconds[name]
        title = f"all_to_all of {_WORDS[name]}"
        self.rank.collective(title, "all_to_all", sent, seconds, received, behind=False, phase="data")

    def _move(self, name: str, kind: str, phase: Phase, sent: Any, received: Any = None, suffix: str = "") -> int:
        seconds = None if self.seconds is None else self.seconds[name]
        title = f"{kind} of {_WORDS[name]}{suffix}"
        return self.rank.collective(title, kind, sent, seconds, received, phase=phase)


_WORDS = {
    "splits": "sizes",
    "lengths": "lengths",
    "indices": "indices",
    "row lengths": "lengths (row-wise)",
    "row indices": "indices (row-wise)",
    "output": "lookups",
    "row output": "lookups (row-wise)",
    "row gradient": "lookup gradients (row-wise)",
    "copies": "table gradients (data-parallel)",
}
