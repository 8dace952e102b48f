"""Speculative decoding: a draft of a few tokens, verified in one step (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from e2e.serving.served_model import ServedModel

_MOST_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """``tokens`` of ``draft`` are verified in each step; each is accepted with the probability ``acceptance`` if all
    before it were.
    """

    tokens: int
    acceptance: float
    draft: ServedModel

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a sequence in one step: those accepted, and one of the model itself."""
        return sum(self.acceptance**each for each in range(self.tokens + 1))


def read_speculation(text: str, model: ServedModel, named: Callable[[str], ServedModel]) -> Speculation | None:
    """Speculation of ``tokens=3,acceptance=0.7,draft=MODEL``; without ``draft``, layers of ``model`` predict the tokens
    (multi-token prediction). ``named``: the model of a name or file. ``InputError`` for anything else.
    """
    if not text:
        return None
    values = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = [each for each in values if each not in ("tokens", "acceptance", "draft")]
    if unknown or "tokens" not in values or "acceptance" not in values:
        raise InputError(f"--speculate {text}: write tokens=3,acceptance=0.7, and draft=MODEL for a draft model")
    tokens = whole_number(values["tokens"]) or 0
    if not 1 <= tokens <= _MOST_TOKENS:
        raise InputError(f"--speculate tokens={values['tokens']}: must be a whole number from 1 to {_MOST_TOKENS}")
    try:
        acceptance = float(values["acceptance"])
    except ValueError:
        acceptance = -1.0
    if not 0 <= acceptance <= 1:
        raise InputError(f"--speculate acceptance={values['acceptance']}: must be a number from 0 to 1")
    if "draft" in values:
        return Speculation(tokens, acceptance, named(values["draft"]))
    if not model.predicting:
        raise InputError(f"--speculate: {model.name} has no layers that predict further tokens; name a draft=MODEL")
    layer = model.layers[-1][0]
    return Speculation(tokens, acceptance, replace(model, layers=((layer, 1),), tied=True, predicting=0))
