"""In which precision an engine really computes, layer by layer: what was asked for is a hint that it may not follow."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.comparing.engines.base import Unavailable


def told_share(precision: str, share: int, layers: int) -> str:
    """``bf16 in 52 of 53 layers``, or the precision alone where all layers are computed in it."""
    return precision if share == layers else f"{precision} in {share} of {layers} layers"


def require_precision(engine: str, precision: str, share: int, layers: int) -> str:
    """The text of :func:`told_share`; ``Unavailable`` where no layer is computed in the precision."""
    if not share:
        raise Unavailable(f"{engine} computes none of the {layers} layers in {precision} on this CPU")
    return told_share(precision, share, layers)


def count_of(counts: Mapping[str, int], names: tuple[str, ...]) -> tuple[int, int]:
    """How many layers have a precision of ``names``, and how many there are; ``counts``: layers by precision."""
    return sum(counts.get(name, 0) for name in names), sum(counts.values())
