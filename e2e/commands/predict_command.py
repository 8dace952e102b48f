"""``python -m e2e predict``, its options built from the request classes, and options shared by other commands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.base.errors import InputError
from e2e.sources.requests import ANSWER_PANEL, SOURCES, Request, all_options, sources_with
from e2e.step.option_fields import OptionField
from e2e.step.options import ClusterOptions, GpuOptions

PriceOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ANSWER_PANEL,
        help="Price in dollars per GPU and hour, or a YAML file of prices: adds the cost.",
    ),
]
AdviceOption = Annotated[
    bool,
    typer.Option(
        "--advice",
        rich_help_panel=ANSWER_PANEL,
        help="Predict other settings too: what to change, and the largest batch that fits (takes longer).",
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(rich_help_panel=ANSWER_PANEL, help="Write the timeline for ui.perfetto.dev (.json or .json.gz)."),
]
ReportOption = Annotated[
    Path | None, typer.Option(rich_help_panel=ANSWER_PANEL, help="Write a self-contained HTML report.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=ANSWER_PANEL, help="Print one JSON document on standard output.")
]


def shared(name: str) -> Any:
    """Return the option ``name`` of ``predict`` for the command line of another command."""
    each = all_options()[name]
    return typer.Option(each.flag, help=each.words.help, min=each.words.least, **_choice(each))


def _choice(each: OptionField) -> dict[str, Any]:
    """Arguments of ``typer.Option`` for choices whose error suggests a replacement for other tools' values."""
    if each.words.instead is None:
        return {}

    def read(value: str) -> Any:
        try:
            return each.convert(value)
        except InputError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{each.flag} ")) from None

    return {"parser": read, "metavar": f"[{'|'.join(each.choices)}]"}


def with_options(
    options: Iterable[OptionField], note: Callable[[str], str] = lambda name: ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with ``**options``, replacing these by ``options``; ``note``: what the help of one adds."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        written = inspect.signature(command, eval_str=True).parameters.values()
        own = [_parameter(each, note(each.name)) for each in options]
        parameters = [*own, *(each for each in written if each.kind is not each.VAR_KEYWORD)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _in_order() -> list[OptionField]:
    """Return the options by sections of the help: those of the sources, then the shared ones."""
    options = list(all_options().values())
    panels = list(dict.fromkeys([record.panel for record in SOURCES] + [each.panel for each in options]))
    return sorted(options, key=lambda each: (panels.index(each.panel), not each.words.source))


def _parameter(each: OptionField, note: str) -> inspect.Parameter:
    kind: Any = each.kind if each.simple else str
    default = None if each.needed else each.default
    if each.words.several:
        kind, default = list[str], None
    elif each.words.as_text:
        kind = str
    elif not each.simple and default is not None:
        default = each.text(default) or None
    told = typer.Option(
        each.flag, help=f"{each.words.help}{note}", min=each.words.least, rich_help_panel=each.panel, **_choice(each)
    )
    hint = Annotated[kind if default is not None else kind | None, told]  # type: ignore[valid-type]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def note(option: str) -> str:
    """Note, in brackets, of the sources that have ``option``; empty if all have it, or if it selects the source."""
    users, each = sources_with(option), all_options()[option]
    others = [record for record in SOURCES if record not in users and not _on_several(record, users)]
    said = each.words.source or any((option,) in record.chosen_by for record in SOURCES)
    if not others or said or users == [record for record in SOURCES if record.panel == each.panel]:
        return ""  # evident from the section of the help
    few, word = (others, "Not for") if len(others) < len(users) else (users, "For")
    return f" ({word}: {', '.join(record.title for record in few)}.)"


def _on_several(record: type[Request], users: Sequence[type[Request]]) -> bool:
    """True if ``record`` is for one GPU and ``users`` has its variant for several GPUs."""
    alone = issubclass(record, GpuOptions) and not issubclass(record, ClusterOptions)
    return alone and any(each.panel == record.panel and issubclass(each, ClusterOptions) for each in users)


# Exit status if a step may not fit; ShortageError has that of a step that does not fit.
MAY_NOT_FIT = 3


@with_options(_in_order(), note)
def predict_command(
    *,
    price: PriceOption = None,
    advice: AdviceOption = False,
    timeline: TimelineOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Predict one steady step of a model, program, script or recording, on one GPU or many."""
    import e2e.sources.predict_request  # noqa: F401 (libraries are loaded before their objects are spared)
    from costmodel.base.process import old_objects_spared
    from e2e.commands.e2e_api import predict
    from e2e.report.text_report import show

    # Output of a script goes to standard error. The process ends after its answer, so garbage collection can wait.
    with redirect_stdout(sys.stderr), old_objects_spared():
        prediction = predict(price=price, advice=tell if advice else False, timeline=timeline, report=report, **options)
    show(prediction, as_json)
    if prediction.memory_verdict == "may not fit":
        raise typer.Exit(MAY_NOT_FIT)


def tell(line: str) -> None:
    """Print progress to standard error."""
    print(line, file=sys.stderr, flush=True)
