"""A request against the table of options and sources: an error, or the options that do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.base.errors import InputError
from e2e.sources.asked.option_table import PAIR_RULES, TABLE
from e2e.sources.asked.request import PredictRequest
from e2e.sources.asked.rule_types import OptionRow, OptionRule
from e2e.sources.registry import SOURCES, StepSource


def check(request: PredictRequest, source: StepSource) -> list[str]:
    """What to say of options without effect; ``InputError`` for the first that is refused, missing or goes with no
    other.
    """
    cells = [(row, source.rule(row)) for row in TABLE]
    for row, rule in cells:
        if rule.effect == "refused" and _counts(row, rule, request):
            raise InputError(_sentence(row, rule, request))
    for row, rule in cells:
        if rule.effect == "needed" and not row.given(request):
            raise InputError(_sentence(row, rule, request))
    for pair in PAIR_RULES:
        if pair.source == source.name and pair.broken(request):
            raise InputError(pair.sentence)
    return list(_ignored(cells, request))


def _counts(row: OptionRow, rule: OptionRule, request: PredictRequest) -> bool:
    return row.given(request) and row.value(request) not in rule.allowed


def _ignored(cells: list[tuple[OptionRow, OptionRule]], request: PredictRequest) -> Iterator[str]:
    """One line per reason."""
    reasons: dict[str, list[str]] = {}
    for row, rule in cells:
        if rule.effect == "without effect" and _counts(row, rule, request):
            reasons.setdefault(rule.sentence, []).append(row.option)
    for reason, options in reasons.items():
        yield f"{', '.join(options)}: without effect, {reason}"


def _sentence(row: OptionRow, rule: OptionRule, request: PredictRequest) -> str:
    sources = {option for source in SOURCES for options in source.chosen_by for option in options}
    given = [each.option for each in TABLE if each.option in sources and each.given(request)]
    return rule.sentence.format(value=row.value(request), given=" and ".join(given))
