"""Records of measured kernels: operator, configuration, time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from costmodel.base.plain_json import MALFORMED

if TYPE_CHECKING:
    from costmodel.operators.any_operator import AnyOperator

# Knob -> value: one way to build a kernel; JSON-able. Its key is hashable.
Config = Mapping[str, int]
ConfigKey = tuple[tuple[str, int], ...]


def config_key(config: Config) -> ConfigKey:
    """Hashable key of a configuration, independent of the order of its knobs."""
    return tuple(sorted(config.items()))


@dataclass(frozen=True)
class Measurement:
    """Time of ``operator`` in seconds with the knob values ``config`` (empty: the implementation has none)."""

    operator: AnyOperator
    config: Config = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a measured time must be finite and above zero, got {self.seconds}")
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))

    def __hash__(self) -> int:
        return hash((self.operator, config_key(self.config), self.seconds))

    def __reduce__(self) -> tuple[Any, ...]:
        return Measurement, (self.operator, dict(self.config), self.seconds)


def measurement_to_record(measurement: Measurement) -> dict[str, Any]:
    """JSON-able content of ``measurement``."""
    from costmodel.operators.serialization import to_record

    return {
        "operator": to_record(measurement.operator),
        "config": {knob: int(value) for knob, value in measurement.config.items()},
        "seconds": measurement.seconds,
    }


def measurement_from_record(record: Any) -> Measurement:
    """Inverse of :func:`measurement_to_record`; ``ValueError`` for malformed content."""
    from costmodel.operators.serialization import from_record

    try:
        return Measurement(
            operator=from_record(record["operator"]),
            config={str(knob): int(value) for knob, value in record["config"].items()},
            seconds=float(record["seconds"]),
        )
    except MALFORMED as error:
        raise ValueError(f"malformed measurement: {error!r}") from None
