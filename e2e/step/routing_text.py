"""Text of ``--routing``, the distribution of tokens over experts: ``balanced``, ``power-law=1.2``, ``capacity=1.25``,
or both of the latter separated by a comma.
"""

from __future__ import annotations

from costmodel.base.errors import InputError
from costmodel.operators.expert_routing import ExpertRouting

FIELDS = {"power-law": "alpha", "capacity": "capacity"}


def routing_text(routing: ExpertRouting) -> str:
    """Return the ``--routing`` text of ``routing``; the inverse of :func:`parse_routing`."""
    values = {name: getattr(routing, field) for name, field in FIELDS.items()}
    default = ExpertRouting()
    told = [f"{name}={value:g}" for name, value in values.items() if value != getattr(default, FIELDS[name])]
    return ",".join(told) or "balanced"


def parse_routing(text: str) -> ExpertRouting:
    """Parse the text of ``--routing``; raise ``InputError`` naming the wrong part."""
    values: dict[str, float] = {}
    for part in (piece.strip() for piece in text.split(",")):
        name, separator, number = part.partition("=")
        if part == "balanced":
            continue
        if name not in FIELDS or not separator:
            raise InputError(
                f"--routing {text!r}: {part!r} is none of balanced, power-law=1.2, capacity=1.25; write one of these"
            )
        try:
            value = float(number)
        except ValueError:
            raise InputError(f"--routing {text!r}: {name}={number} is no number; write such as {name}=1.25") from None
        if not 0 < value < float("inf"):
            raise InputError(f"--routing {text!r}: {name} must be more than 0")
        if FIELDS[name] in values:
            raise InputError(f"--routing {text!r}: {name} is given twice; leave one out")
        values[FIELDS[name]] = value
    return ExpertRouting(**values)
