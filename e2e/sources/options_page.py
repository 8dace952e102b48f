"""What the table of options and sources says, for people: notes in the help, and ``docs/options.md``.

``python -m e2e.sources.options_page > docs/options.md`` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Annotated, get_type_hints

from e2e.sources.asked.option_table import (
    BUILT_IN,
    CONFIGURATION,
    PAIR_RULES,
    PARALLEL,
    RANKS_OF_SCRIPT,
    SCRIPT,
    TABLE,
)
from e2e.sources.asked.rule_types import OptionRow, OptionRule
from e2e.sources.registry import SOURCES, StepSource, chosen

_HEAD = """# Options of `predict` by source

Generated from the table that checks them (`e2e/sources/asked/option_table.py`): `python -m e2e.sources.options_page`.

A step comes from one source, the first of these that the given options choose:

{choices}

**used**: the option counts. **needed**: it must be given. **refused** and **no effect**: as the numbered sentence says;
values in brackets are taken all the same. **-> source**: the option makes it this source. `--price`, `--report`,
`--timeline` and `--json` go with every source, `--advice` with all but a recorded run.

{table}

{sentences}

Options that do not go together, by source:

{pairs}
"""


# Sources on one GPU -> what the same step is from on several: an option that is for these is no less for the model.
_ON_SEVERAL = {BUILT_IN: PARALLEL, CONFIGURATION: PARALLEL, SCRIPT: RANKS_OF_SCRIPT}


def page() -> str:
    """The page as it must be on disk."""
    sentences: dict[str, int] = {}
    table = "\n".join(_table(sentences))
    return _HEAD.format(
        choices="\n".join(_choices()),
        table=table,
        sentences="\n".join(f"{number}. {_readable(text)}" for text, number in sentences.items()),
        pairs="\n".join(_pairs()),
    )


def with_notes(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command whose options are those of the table: their help says for which sources they are."""
    hints = get_type_hints(command, include_extras=True)
    options = {row.option for row in TABLE}
    for name, hint in hints.items():
        for place, info in enumerate(getattr(hint, "__metadata__", ())):
            option = next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")
            if option in options:
                told = copy(info)
                told.help = f"{info.help} {note(option)}".strip()
                others = hint.__metadata__
                hints[name] = Annotated[(hint.__origin__, *others[:place], told, *others[place + 1 :])]
    command.__annotations__ = hints
    return command


def note(option: str) -> str:
    """For which sources ``option`` is, in brackets; nothing where it is for all, or where it chooses the source."""
    if any(option in options for source in SOURCES for options in source.chosen_by if options == {option}):
        return ""
    row = next(row for row in TABLE if row.option == option)
    possible = [source for source in SOURCES if _becomes(source, option) is None]
    users = [source.title for source in possible if _counts_for(source.rule(row))]
    names = [source.name for source in possible if _counts_for(source.rule(row))]
    others = [source.title for source in possible if not {source.name, _ON_SEVERAL.get(source.name)} & {*names}]
    if not others:
        return ""
    return f"(Not for: {', '.join(others)}.)" if len(others) < len(users) else f"(For: {', '.join(users)}.)"


def _counts_for(rule: OptionRule) -> bool:
    """Whether the option does anything; one GPU and one node are as good as none."""
    return rule.effect in ("used", "needed") or any(value != 1 for value in rule.allowed)


def _choices() -> Iterator[str]:
    for number, source in enumerate(SOURCES, 1):
        ways = " or ".join(" with ".join(f"`{option}`" for option in sorted(each)[::-1]) for each in source.chosen_by)
        yield f"{number}. {source.title}: {ways}"


def _becomes(source: StepSource, option: str) -> StepSource | None:
    """The other source that ``option`` chooses besides those that choose ``source``; ``None``: it stays."""
    other = chosen({*source.chosen_by[0], option})
    return None if other is source else other


def _table(sentences: dict[str, int]) -> Iterator[str]:
    titles = [source.title for source in SOURCES]
    yield f"| option | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 1) + "|"
    for row in TABLE:
        cells = (_cell(source, row, sentences) for source in SOURCES)
        yield f"| `{row.option}` | {' | '.join(cells)} |"


def _cell(source: StepSource, row: OptionRow, sentences: dict[str, int]) -> str:
    other = _becomes(source, row.option)
    if other is None:
        return _effect(source.rule(row), sentences)
    # What else is given decides whether the other source takes it.
    refusing = [other.rule(each) for each in TABLE if each.option in source.chosen_by[0]]
    against = next((rule for rule in refusing if rule.effect == "refused" and not rule.allowed), None)
    return f"-> {other.title}" if against is None else _effect(against, sentences)


def _effect(rule: OptionRule, sentences: dict[str, int]) -> str:
    if rule.effect == "used":
        return "used"
    number = sentences.setdefault(rule.sentence, len(sentences) + 1)
    but = f" ({', '.join(str(each) for each in rule.allowed)})" if rule.allowed else ""
    return f"{'no effect' if rule.effect == 'without effect' else rule.effect}{but} {number}"


def _pairs() -> Iterator[str]:
    titles = {source.name: source.title for source in SOURCES}
    for pair in PAIR_RULES:
        yield f"- {titles[pair.source]}, {pair.when}: {pair.sentence}"


def _readable(sentence: str) -> str:
    return sentence.format(value="N", given="...")


if __name__ == "__main__":
    print(page(), end="")
