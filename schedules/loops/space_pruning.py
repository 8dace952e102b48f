"""Pruning of a template's candidates to its space: distinct, cheapest first, without hopeless ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from costmodel.model.measurements import Config, ConfigKey, config_key

# Limit relative to the cheapest: the analytic cost is an estimate, so only candidates far behind are dropped
# unmeasured.
_FAR = 2.0


def cheapest_first(configs: Iterable[Config], cost: Callable[[Config], float]) -> tuple[Config, ...]:
    """Return distinct configurations, the cheapest first, without those far from the cheapest. Empty if
    ``configs`` is.
    """
    seen: dict[ConfigKey, Config] = {}
    for config in configs:
        seen.setdefault(config_key(config), config)
    costs = {key: cost(config) for key, config in seen.items()}
    limit = _FAR * min(costs.values(), default=0.0)
    kept = sorted((value, key) for key, value in costs.items() if value <= limit)
    return tuple(seen[key] for _, key in kept)
