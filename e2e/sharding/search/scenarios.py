"""Scenarios of model errors: costs drawn from the intervals of the models.

A plan that is perfectly even by the models' times is uneven by the true ones, and the step waits for the slowest rank.
So plans are judged by the mean over draws: tables cut over all ranks, or copied, cannot make ranks uneven, and errors
of many small tables on a rank average out more than those of a few large ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from e2e.sharding.problem.option_costs import OptionCosts
from e2e.sharding.problem.state import Problem
from e2e.sharding.problem.transfers import KINDS
from e2e.step.arrays import Floats

# Half-width of the 80 % interval of a normal distribution, in standard deviations.
_DEVIATIONS = 1.2816
# An interval covers the error common to all tables of a GPU (its level), which no placement can change, and the error
# of one table. In measured families the latter is this share: GEMM errs by 8.2 % on shapes left out, by 18.1 % on a GPU
# left out (`python -m lab.validate kernels`).
OWN_SHARE = 0.45
# Share of a table's error that depends on its cut; the rest is common to all cuts.
_CUT_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Scenarios:
    """Drawn scenarios, ``draws`` of them; the first is the nominal one."""

    draws: int
    # Seconds that a shard adds to each stage of its kernels, and the least time of the stage with it, shapes (options,
    # stages, draws).
    added: Floats
    longest: Floats
    # Number of stages of the forward pass.
    forward: int
    # Kind -> factors of its times, shape (draws,).
    transfers: Mapping[str, Floats]


def uncertain(problem: Problem) -> bool:
    """True if the models give any interval at all."""
    return bool(problem.costs.half_width.max(initial=0.0) > 0 or max(problem.times.half_width.values()) > 0)


def draw(problem: Problem, draws: int, seed: int) -> Scenarios:
    """Draw ``draws`` scenarios (an odd number: the nominal one, and antithetic pairs) of lognormal factors.

    There are factors for each table and direction, each way to cut it, and each kind of collective.
    """
    generator = np.random.default_rng([seed, draws])
    costs, tables = problem.costs, [option.table for option in problem.costs.options]
    pairs = draws // 2

    def normal(*shape: int) -> Floats:
        half = generator.standard_normal((*shape, pairs))
        return np.concatenate([np.zeros((*shape, 1)), half, -half], axis=-1)

    deviation = costs.half_width / _DEVIATIONS * OWN_SHARE / np.hypot(1.0, _CUT_SHARE)
    errors = normal(len(problem.of_table), 2)[tables] + _CUT_SHARE * normal(len(tables), 2)
    factors = np.exp(deviation[:, :, None] * errors)
    added, longest, forward = _stages(costs)
    of_stage = factors[:, [0] * forward + [1] * (added.shape[1] - forward)]
    widths = problem.times.half_width
    transfers: dict[str, Floats] = {kind: np.exp(widths[kind] / _DEVIATIONS * normal()) for kind in KINDS}
    return Scenarios(1 + 2 * pairs, added[:, :, None] * of_stage, longest[:, :, None] * of_stage, forward, transfers)


def _stages(costs: OptionCosts) -> tuple[Floats, Floats, int]:
    """Added and longest seconds, shape (options, stages) each, and the number of stages of the forward pass.

    The dense updates of copies are a stage of their own.
    """
    lookups, pieces = costs.lookups, costs.pieces
    passes = [
        (added[used][:, pieces], longest[used][:, pieces])
        for added, longest in (lookups.forward_stages, lookups.backward_stages)
        for used in [(added.max(axis=1, initial=0.0) > 0) | (longest.max(axis=1, initial=0.0) > 0)]
    ]
    added = np.concatenate([passes[0][0], passes[1][0], costs.update[None]]).T
    longest = np.concatenate([passes[0][1], passes[1][1], np.zeros((1, len(pieces)))]).T
    return added, longest, len(passes[0][0])
