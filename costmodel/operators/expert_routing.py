"""How many rows of tokens each expert of a mixture gets, where the values that decide it are not known.

``balanced``: equal shares, as with forced balancing or a well-trained router. ``power-law``: a few experts get most,
drawn much as the tables of aiconfigurator draw them (``collector/helper.py`` of ai-dynamo/aiconfigurator, Apache-2.0),
with the density x^-alpha from 1 on; up to 0.8 of the rows here, of the tokens there. The shares are the quantiles of
that density instead of random numbers, in a fixed shuffled order, so that the same question has the same answer
(:mod:`costmodel.operators.expert_shares`, imported when somebody counts: a request names a routing long before).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertRouting:
    """``alpha``: exponent of the power law, ``None`` for equal shares. ``capacity``: factor of the equal share beyond
    which an expert drops rows, ``None`` where none are dropped.
    """

    alpha: float | None = None
    capacity: float | None = None

    def counts(self, rows: int, experts: int) -> tuple[int, ...]:
        """Rows of each of ``experts`` that share ``rows``; without a capacity they add up to ``rows``."""
        from costmodel.operators.expert_shares import shares

        return shares(rows, experts, self.alpha, self.capacity)

    def slowest(self, rows: int, experts: int, ranks: int) -> tuple[int, ...]:
        """Rows of each expert of the rank that gets most, where ``ranks`` hold ``experts / ranks`` each and ``rows``
        is what all of them share: the mean over several orders of the experts, largest expert first.
        """
        from costmodel.operators.expert_shares import slowest_shares

        return slowest_shares(rows, experts, ranks, self.alpha, self.capacity)

    def imbalance(self, experts: int, ranks: int, rows: int = 2**20) -> float:
        """Rows of the rank that gets most over the mean of all ``ranks``."""
        return sum(self.slowest(rows, experts, ranks)) * ranks / rows


BALANCED = ExpertRouting()
