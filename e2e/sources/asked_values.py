"""What a prediction says it was asked: every option that counts, as given or by the default that was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from e2e.explain.step_facts import AskedValue
from e2e.sources.request import Request
from e2e.step.option_fields import options_of


def asked_values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> tuple[AskedValue, ...]:
    """The options of ``request``. ``taken``: by option, what was taken where nothing was asked; ``meant``: what a value
    means on the machine at hand, asked or not.
    """
    return tuple(_values(request, taken, meant))


def _values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> Iterator[AskedValue]:
    options = options_of(type(request)).values()
    # What is computed comes first.
    for each in sorted(options, key=lambda each: not each.words.source):
        value, flag = getattr(request, each.name), each.flag
        given = each.asks(value)
        if given:
            yield AskedValue(flag, meant.get(flag, each.text(value)), True)
        # Of --parallel a recipe sets the keys that are not given.
        if not given or flag == "--parallel":
            default = taken.get(flag, "" if given else each.words.default_text)
            default = default if given else meant.get(flag, default)
            if default:
                yield AskedValue(flag, default, False)
