"""Report of a prediction's options: every relevant option, with the given value or the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from e2e.explain.step_facts import AskedValue
from e2e.sources.request import Request
from e2e.step.option_fields import options_of


def asked_values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> tuple[AskedValue, ...]:
    """Return the options of ``request``.

    ``taken``: by option, the default that was used where no value was given; ``meant``: by option, the meaning of its
    value on this machine, given or not.
    """
    return tuple(_values(request, taken, meant))


def _values(request: Request, taken: Mapping[str, str], meant: Mapping[str, str]) -> Iterator[AskedValue]:
    options = options_of(type(request)).values()
    # The source of the step comes first.
    for each in sorted(options, key=lambda each: not each.words.source):
        value, flag = getattr(request, each.name), each.flag
        given = each.asks(value)
        if given:
            yield AskedValue(flag, meant.get(flag, each.text(value)), True)
        # A recipe sets the keys of --parallel that are not given.
        if not given or flag == "--parallel":
            default = taken.get(flag, "" if given else each.words.default_text)
            default = default if given else meant.get(flag, default)
            if default:
                yield AskedValue(flag, default, False)
