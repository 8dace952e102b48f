"""Pruning of a template's candidates to its space: distinct, cheapest first, without hopeless ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from costmodel.model.measurements import Config, ConfigKey, config_key

# The analytic cost is approximate: drop only candidates above this multiple of the smallest cost.
_FAR = 2.0


def cheapest_first(configs: Iterable[Config], cost: Callable[[Config], float]) -> tuple[Config, ...]:
    """Distinct configurations, the cheapest first; those far from the cheapest are dropped. Empty if ``configs`` is."""
    seen: dict[ConfigKey, Config] = {}
    for config in configs:
        seen.setdefault(config_key(config), config)
    costs = {key: cost(config) for key, config in seen.items()}
    limit = _FAR * min(costs.values(), default=0.0)
    kept = sorted((value, key) for key, value in costs.items() if value <= limit)
    return tuple(seen[key] for _, key in kept)
