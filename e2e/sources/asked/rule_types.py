"""What a table of options and sources is made of: a rule per cell, a row per option, rules between options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from e2e.sources.asked.request import PredictRequest

Effect = Literal["used", "needed", "refused", "without effect"]


@dataclass(frozen=True)
class OptionRule:
    """What an option does for a source. ``sentence``: what the user is told (``{value}``: what was given, ``{given}``:
    the sources that were); ``allowed``: values that are as good as none where others are refused or do nothing.
    """

    effect: Effect
    sentence: str = ""
    allowed: tuple[Any, ...] = ()


def needed(sentence: str) -> OptionRule:
    """The rule of an option that must be given; ``sentence`` is what the user is told otherwise."""
    return OptionRule("needed", sentence)


def refused(sentence: str, *allowed: Any) -> OptionRule:
    """The option is an error, but for ``allowed`` values."""
    return OptionRule("refused", sentence, allowed)


def without_effect(sentence: str, *allowed: Any) -> OptionRule:
    """The option is told to do nothing, but for ``allowed`` values, which do something."""
    return OptionRule("without effect", sentence, allowed)


@dataclass(frozen=True)
class OptionRow:
    """``option`` as on the command line, its ``place`` in a request, its rules by the name of a source."""

    option: str
    place: str
    otherwise: OptionRule
    cells: Mapping[str, OptionRule] = field(default_factory=dict)

    def value(self, request: PredictRequest) -> Any:
        """What ``request`` says for the option."""
        return attrgetter(self.place)(request)

    def given(self, request: PredictRequest) -> bool:
        """Whether it says something else than a request in which nothing is given."""
        return bool(self.value(request) != self.value(PredictRequest()))


@dataclass(frozen=True)
class PairRule:
    """Of ``source``: ``broken`` tells requests whose options do not go together, ``when`` in words what it tells."""

    source: str
    when: str
    broken: Callable[[PredictRequest], bool]
    sentence: str
