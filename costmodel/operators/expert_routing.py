"""Number of token rows per expert of a mixture, for unknown router outputs.

``balanced``: equal shares, as with forced balancing or a well-trained router. ``power-law``: a few experts get most
rows, much as in the tables of aiconfigurator (``collector/helper.py`` of ai-dynamo/aiconfigurator, Apache-2.0), with
the density x^-alpha from 1 on; up to 0.8 of the rows here, of the tokens there. The shares are the quantiles of that
density instead of random numbers, in a fixed shuffled order, so that results are deterministic
(:mod:`costmodel.operators.expert_shares`, imported only for counting: a request names a routing long before).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertRouting:
    """Routing of tokens. ``alpha``: exponent of the power law, ``None`` for equal shares. ``capacity``: multiple of the
    equal share beyond which an expert drops rows, ``None`` without dropping.
    """

    alpha: float | None = None
    capacity: float | None = None

    def counts(self, rows: int, experts: int) -> tuple[int, ...]:
        """Rows of each of ``experts`` experts; without a capacity they add up to ``rows``."""
        from costmodel.operators.expert_shares import shares

        return shares(rows, experts, self.alpha, self.capacity)

    def slowest(self, rows: int, experts: int, ranks: int) -> tuple[int, ...]:
        """Rows of each expert of the busiest rank, if ``ranks`` hold ``experts / ranks`` each and share ``rows`` in
        all: the mean over several orders of the experts, largest expert first.
        """
        from costmodel.operators.expert_shares import slowest_shares

        return slowest_shares(rows, experts, ranks, self.alpha, self.capacity)

    def imbalance(self, experts: int, ranks: int, rows: int = 2**20) -> float:
        """Rows of the busiest rank relative to the mean of all ``ranks``."""
        return sum(self.slowest(rows, experts, ranks)) * ranks / rows


BALANCED = ExpertRouting()
