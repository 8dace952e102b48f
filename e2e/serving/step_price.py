"""Seconds of a serving step: kernels priced by the cost model, tabulated over rows, sequences and contexts."""

from __future__ import annotations

import bisect
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.collectives import collective_cost_model
from costmodel.cost_model import CostModel, Estimate
from costmodel.gpu.factory import gpu_cost_model
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.serving.deployment import Deployment
from e2e.serving.engines import Engine
from e2e.serving.step_work import StepWork, Work

# Rows for which steps are priced; between them time is interpolated.
_SMALL = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
_LARGE = (
    576, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288,
    16384, 20480, 24576, 32768,
)  # fmt: skip
_ROWS = _SMALL + _LARGE
_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_CONTEXTS = tuple(sorted({round(2 ** (place / 2)) for place in range(8, 41)}))


@dataclass(frozen=True)
class Prompt:
    """``queries`` new tokens of a prompt after ``prior`` ones that are in the cache."""

    queries: int
    prior: int = 0


class StepPrice:
    """Seconds of the steps of one deployment, on the device and on the host."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.engine = deployment, deployment.engine
        self.work = StepWork(deployment)
        machine = deployment.cluster.machine
        self._kernels = gpu_cost_model(machine)
        self._collectives: CostModel = collective_cost_model(deployment.cluster)
        self.copies = deployment.parallel.attention_dp
        self._rows: dict[int, float] = {}
        self._own: dict[int, float] = {}
        self._decoding: dict[tuple[int, int], float] = {}
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}
        self._prompts: dict[tuple[int, int, int], float] = {}
        self._known: dict[object, Estimate] = {}
        self._launches = self.work.kernels(64)
        draft, self._verified = deployment.draft, 1 + getattr(deployment.speculation, "tokens", 0)
        self._draft = StepPrice(draft) if draft else None

    def with_engine(self, engine: Engine) -> StepPrice:
        """The same kernels, whose tables are shared, with other host times and limits of the engine."""
        found = copy.copy(self)
        found.engine = engine
        found.deployment = replace(self.deployment, engine=engine)
        return found

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding sequence gets in one step."""
        speculation = self.deployment.speculation
        return speculation.tokens_per_step if speculation else 1.0

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the cache that a sequence takes beside its own."""
        return self.deployment.sequence_tokens

    def step_seconds(self, sequences: int, context: float, prompts: Sequence[Prompt] = ()) -> float:
        """Seconds of one step: ``sequences`` decode one token each after ``context`` tokens on average, beside
        ``prompts``.
        """
        device = self.device_seconds(sequences, context, prompts)
        own, engine = -(-sequences // self.copies), self.engine
        if prompts or own > engine.graph_sequences:
            device = max(device, self._launches * engine.launch)
        return device + engine.step + engine.sequence * (own - (-len(prompts) // self.copies))

    def device_seconds(self, sequences: int, context: float, prompts: Sequence[Prompt] = ()) -> float:
        """Seconds of the GPU in a step: every sequence has one row, and one for each token of a draft."""
        parts = self.deployment.parallel.pp
        if parts > 1:
            sequences = -(-sequences // parts)
            prompts = [replace(each, queries=-(-each.queries // parts)) for each in prompts]
        rows = sequences * self._verified + sum(each.queries for each in prompts)
        found = self.rows_seconds(rows, graph=not prompts)
        if prompts and self.copies > 1:  # a prompt is all of one copy's; the others wait for the busiest
            own = -(-sequences // self.copies) * self._verified
            own += -(-len(prompts) // self.copies) * sum(each.queries for each in prompts) // len(prompts)
            found += self._own_seconds(own) - self._own_seconds(-(-rows // self.copies))
        if sequences:
            found += self.decoding_seconds(sequences, context)
        if prompts:
            found += self.prompt_seconds(prompts)
        if self._draft:
            found += self._draft.device_seconds(sequences, context, prompts)
            found += (self._verified - 2) * self._draft.device_seconds(sequences, context) if sequences else 0.0
        return found

    def listed(self, sequences: int, context: int, prompts: Sequence[Prompt] = ()) -> list[Work]:
        """Work of the GPU in a step whose prompts are cut as they are, that of the draft model included."""
        tokens = sequences * self._verified + sum(each.queries for each in prompts)
        found = list(self.work.rows(tokens, min(tokens, 256)))
        if sequences:
            found += self.work.decoding(sequences, context, self._verified)
        for each, count in Counter(prompts).items():
            found += self.work.prompts(-(-count // self.copies), each.queries, each.prior)
        if self._draft:
            found += self._draft.listed(sequences, context, prompts)
            found += (self._verified - 2) * self._draft.listed(sequences, context) if sequences else []
        return found

    def rows_seconds(self, rows: int, graph: bool = False) -> float:
        """Seconds of everything but attention for ``rows`` tokens."""
        return self._of_rows(rows, self._rows, lambda each: self.work.rows(each, min(each, 256)), graph)

    def _own_seconds(self, own: int) -> float:
        """Seconds of the layers of attention, without attention itself, for the ``own`` rows of a rank."""
        return self._of_rows(own, self._own, self.work.own_rows)

    def _of_rows(
        self, rows: int, table: dict[int, float], work: Callable[[int], Iterable[Work]], graph: bool = False
    ) -> float:
        def at(rows: int) -> float:
            if rows not in table:
                most = max(self.engine.token_budget, rows)
                near = _SMALL if rows <= _SMALL[-1] else [each for each in _LARGE if each <= most]
                self._fill(table, {each: work(each) for each in near})
            return table[rows]

        place = bisect.bisect_left(_ROWS, rows)
        if place == len(_ROWS):
            return at(_ROWS[-1]) * rows / _ROWS[-1]
        if _ROWS[place] == rows or (graph and rows <= self.engine.graph_sequences * self.copies):
            return at(_ROWS[place])
        low, high = _ROWS[place - 1], _ROWS[place]
        share = (rows - low) / (high - low)
        return (1 - share) * at(low) + share * at(high)

    def _fill(self, table: dict[Any, float], work: Mapping[Any, Iterable[Work]]) -> None:
        """Price a part of a table at once: one call for many kernels is far faster than one for each."""
        listed = {key: list(each) for key, each in work.items()}
        self._learn([each.operator for parts in listed.values() for each in parts])
        table.update((key, self.priced(parts)) for key, parts in listed.items())

    def decoding_seconds(self, sequences: int, context: float) -> float:
        """Seconds of the attention of ``sequences`` single tokens."""
        place = min(max(bisect.bisect_left(_CONTEXTS, context), 1), len(_CONTEXTS) - 1)
        line = self._lines.get((sequences, place))
        if line is None:
            line = self._lines[sequences, place] = self._line(sequences, place)
        return line[0] + line[1] * max(context, _CONTEXTS[0])

    def _line(self, sequences: int, place: int) -> tuple[float, float]:
        """Seconds of ``sequences`` single tokens at context 0 and per token of it, between two contexts of the grid."""
        low, high, share = _between(_SEQUENCES, sequences)
        near, far = _CONTEXTS[place - 1], _CONTEXTS[place]
        first = (1 - share) * self._at(low, near) + share * self._at(high, near)
        slope = ((1 - share) * self._at(low, far) + share * self._at(high, far) - first) / (far - near)
        return first - slope * near, slope

    def _at(self, sequences: int, context: int) -> float:
        key = (sequences, context)
        if key not in self._decoding:
            counts = {sequences, *(each for each in _SEQUENCES if each <= max(self.engine.sequences, sequences))}
            work = {(each, context): self.work.decoding(each, context, self._verified) for each in counts}
            self._fill(self._decoding, work)
        return self._decoding[key]

    def prompt_seconds(self, prompts: Sequence[Prompt]) -> float:
        """Seconds of the attention of ``prompts``, by the mean of their lengths."""
        queries = max(sum(each.queries for each in prompts) // len(prompts), 1)
        prior = sum(each.prior for each in prompts) // len(prompts)
        count = -(-len(prompts) // self.copies)
        nearest = _SEQUENCES[min(bisect.bisect_left(_SEQUENCES, count), len(_SEQUENCES) - 1)]
        at = (nearest, _near(queries), _near(prior) if prior else 0)
        if at not in self._prompts:
            near = {at[1], *(_near(round(at[1] * 2 ** (step / 8))) for step in range(-4, 5) if not at[2])}
            most = max(self.engine.token_budget, at[0] * at[1])
            asked = [(each, length, at[2]) for each in _SEQUENCES for length in near if each * length <= most]
            self._fill(self._prompts, {each: self.work.prompts(*each) for each in {at, *asked}})
        pairs = sum(each.queries * (each.prior + each.queries / 2) for each in prompts) * count / len(prompts)
        return self._prompts[at] * pairs / (at[0] * at[1] * (at[2] + at[1] / 2))

    def priced(self, work: Iterable[Work]) -> float:
        """Seconds of ``work``."""
        return sum(each.count * estimate.seconds for each, estimate in self.estimates(work))

    def estimates(self, work: Iterable[Work]) -> list[tuple[Work, Estimate]]:
        """Each of ``work`` with the estimate of its operator, at the clock that all of it together allows."""
        listed = list(work)
        self._learn([each.operator for each in listed])
        kernels = [each for each in listed if not isinstance(each.operator, CollectiveTransfer)]
        counts = [max(round(each.count), 1) for each in kernels]
        settled = self._kernels.settle([self._known[each.operator] for each in kernels], counts)
        clocked = dict(zip(kernels, settled, strict=True))
        return [(each, clocked.get(each, self._known[each.operator])) for each in listed]

    def _learn(self, operators: Sequence[object]) -> None:
        new = [each for each in dict.fromkeys(operators) if each not in self._known]
        transfers = [each for each in new if isinstance(each, CollectiveTransfer)]
        self._known |= dict(zip(transfers, self._collectives.estimate(transfers), strict=True))
        kernels: list[AnyOperator] = [each for each in new if each not in self._known]  # type: ignore[misc]
        self._known |= dict(zip(kernels, self._kernels.estimate(kernels), strict=True))


class _ExactPrice(StepPrice):
    """Prices of steps without the table; what the other one priced is known."""

    def __init__(self, price: StepPrice) -> None:
        self.__dict__.update(price.__dict__)

    def rows_seconds(self, rows: int, graph: bool = False) -> float:
        if graph and rows <= self.engine.graph_sequences * self.copies:
            return super().rows_seconds(rows, graph)
        return self.priced(self.work.rows(rows, min(rows, 256)))

    def _own_seconds(self, own: int) -> float:
        return self.priced(self.work.own_rows(own))

    def decoding_seconds(self, sequences: int, context: float) -> float:
        return self.priced(self.work.decoding(sequences, round(context), self._verified))

    def prompt_seconds(self, prompts: Sequence[Prompt]) -> float:
        whole = sum(self.priced(self.work.prompts(1, each.queries, each.prior)) for each in prompts)
        return whole * -(-len(prompts) // self.copies) / len(prompts)


def table_error(
    price: StepPrice, sequences: int, contexts: tuple[int, int], prompt: int, steps: int = 12
) -> tuple[float, float]:
    """Median and largest relative error of tabulated steps against steps that are priced one by one: drawn ones of 1 to
    ``sequences`` sequences with ``contexts``, every third one beside a part of a ``prompt``.
    """
    exact, drawn, asked = _ExactPrice(price), np.random.default_rng(5), []
    for each in range(steps):
        step = int(drawn.integers(1, sequences + 1)), int(drawn.integers(contexts[0], contexts[1] + 1))
        tokens = int(drawn.integers(1, min(prompt, price.engine.token_budget) + 1)) if each % 3 == 2 else 0
        asked.append((*step, [Prompt(tokens)] if tokens else []))
    exact._learn([work.operator for each in asked for work in exact.listed(*each)])  # all at once
    found = [abs(price.step_seconds(*each) / exact.step_seconds(*each) - 1) for each in asked]
    return float(np.median(found)), max(found)


def _between(grid: Sequence[int], value: float) -> tuple[int, int, float]:
    """Grid points around ``value`` and its place between them; beyond the last one the slope goes on."""
    place = min(max(bisect.bisect_left(grid, value), 1), len(grid) - 1)
    low, high = grid[place - 1], grid[place]
    return low, high, max((value - low) / (high - low), 0.0)


def _near(length: int) -> int:
    """The nearest of eight lengths per octave, so that few attention shapes are priced."""
    if length <= 16:
        return max(length, 1)
    step = 1 << max(length.bit_length() - 4, 0)
    return max(round(length / step) * step, 1)
