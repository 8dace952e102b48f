"""Where a prediction's step comes from: the registry of sources, and which of them a request means.

A new source is a file with a function ``prepare(request) -> PreparedStep`` and one line in :data:`SOURCES`. What its
options do is in the table (:mod:`e2e.sources.asked.option_table`); one that is added from outside brings its own
``cells``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from e2e.sources.asked.option_table import (
    BUILT_IN,
    CONFIGURATION,
    PARALLEL,
    RANKS_OF_SCRIPT,
    RECORDING,
    SCRIPT,
    SHARDED,
    TABLE,
    TRACE,
)
from e2e.sources.asked.request import PredictRequest
from e2e.sources.asked.rule_types import OptionRow, OptionRule

if TYPE_CHECKING:
    from e2e.sources.prepared_step import PreparedStep


@dataclass(frozen=True)
class StepSource:
    """``title`` for people; ``home``: ``module:function`` that prepares the step, imported when it is used;
    ``chosen_by``: sets of options, any of which, given whole, means this source; ``cells``: its rules where they are
    not those of the table.
    """

    name: str
    title: str
    home: str
    chosen_by: tuple[frozenset[str], ...]
    cells: Mapping[str, OptionRule] = field(default_factory=dict)

    def prepare(self, request: PredictRequest) -> PreparedStep:
        """The step that ``request`` means; errors are those of the source."""
        module, _, function = self.home.partition(":")
        made: Callable[[PredictRequest], PreparedStep] = getattr(import_module(module), function)
        return made(request)

    def rule(self, row: OptionRow) -> OptionRule:
        """What the option of ``row`` does here."""
        return self.cells.get(row.option) or row.cells.get(self.name) or row.otherwise


def _source(name: str, title: str, home: str, *chosen_by: str) -> StepSource:
    return StepSource(name, title, f"e2e.sources.{home}", tuple(frozenset(each.split()) for each in chosen_by))


# The first that the given options choose is meant.
SOURCES: list[StepSource] = [
    _source(RECORDING, "recorded run", "recorded_job:prepare", "--kineto"),
    _source(SHARDED, "sharded DLRM", "sharded_model:prepare", "--sharding", "--config"),
    _source(PARALLEL, "model spread over GPUs", "spread_model:prepare", "--parallel"),
    _source(RANKS_OF_SCRIPT, "script on several GPUs", "user_script:prepare_ranks", "--script --gpus"),
    _source(TRACE, "execution trace", "traced_job:prepare", "--trace"),
    _source(SCRIPT, "script", "user_script:prepare", "--script"),
    _source(CONFIGURATION, "configuration", "single_gpu:prepare_configuration", "--model-config"),
    _source(BUILT_IN, "built-in model", "single_gpu:prepare_built_in", "--model"),
]


def chosen(given: Collection[str]) -> StepSource | None:
    """The source that the options ``given`` mean."""
    return next((each for each in SOURCES if any(options <= set(given) for options in each.chosen_by)), None)


def source_of(request: PredictRequest) -> StepSource:
    """The source that ``request`` means; ``InputError`` if it names none."""
    source = chosen([row.option for row in TABLE if row.given(request)])
    if source is None:
        raise InputError(
            "give exactly one of --model, --model-config, --script and --trace, or --kineto for a recorded run"
        )
    return source
