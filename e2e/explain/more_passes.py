"""Prediction of a step that accumulates gradients over many equal passes, from two predictions with few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from e2e.explain.critical_path import HOST_KINDS
from e2e.explain.prediction import Prediction


def with_more_passes(step: Prediction, fewer: Prediction, more: int) -> Prediction:
    """Return the prediction of ``step`` with ``more`` passes, each as long as one makes it longer than ``fewer``.

    Times and counts grow in proportion, once the host's lead over the device is steady; shares are those of the times.
    Collectives are listed as they are in ``step``.
    """
    found: Prediction = _grown(replace(step, collectives=()), replace(fewer, collectives=()), more)
    path = found.critical_path_seconds
    host = sum(found.attribution.get(kind, 0.0) for kind in HOST_KINDS)
    device = [sum(each.breakdown["by_kind"].values()) for each in (step, fewer, found)]
    shares = {
        source: (share * device[0] * (1 + more) - fewer.coverage.get(source, 0.0) * device[1] * more) / device[2]
        for source, share in step.coverage.items()
        if device[2]
    }
    return replace(
        found,
        collectives=step.collectives,
        host_bound_fraction=host / path if path else 0.0,
        coverage=shares,
        utilisation=_at_its_rate(found, step, "utilisation", ("model_flops", "mfu"), ("executed_flops", "hfu")),
        energy=_at_its_rate(found, step, "energy", ("joules", "mean_watts")),
    )


def _at_its_rate(found: Prediction, step: Prediction, name: str, *rates: tuple[str, str]) -> Any:
    """Return a record of ``found`` whose rates follow from its amounts: pairs of amount and rate."""
    record, known = getattr(found, name), getattr(step, name)
    if record is None:
        return None
    for amount, rate in rates:
        if getattr(known, rate) is not None and getattr(known, amount):
            times = getattr(record, amount) / getattr(known, amount)
            longer = found.iteration_seconds / step.iteration_seconds
            record = replace(record, **{rate: getattr(known, rate) * times / longer})
    return record


def _grown(step: Any, fewer: Any, more: int) -> Any:
    """Return ``step`` with every number increased ``more`` times by its difference to ``fewer``."""
    if isinstance(step, bool) or not isinstance(fewer, type(step)):
        return step
    if isinstance(step, (int, float)):
        return max(step + more * (step - fewer), type(step)(0))
    if is_dataclass(step):
        names = [field.name for field in fields(step)]
        return replace(step, **{name: _grown(getattr(step, name), getattr(fewer, name), more) for name in names})  # type: ignore[type-var]
    if isinstance(step, Mapping):
        return {key: _grown(value, fewer.get(key, type(value)()), more) for key, value in step.items()}
    if isinstance(step, Sequence) and not isinstance(step, str):
        before = {_key(each, place): each for place, each in enumerate(fewer)}
        return type(step)(_grown(each, before.get(_key(each, place)), more) for place, each in enumerate(step))  # type: ignore[call-arg]
    return step


def _key(each: Any, place: int) -> Any:
    """Return what tells an entry of a list from others: its rank, its name, or its place."""
    told: Callable[[str], Any] = lambda name: getattr(each, name, None)  # noqa: E731
    names = (told("kind"), told("name"), told("rank"))
    return names if any(name is not None for name in names) else place
