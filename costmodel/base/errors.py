"""Every error a user can cause, in one tree, and the callback by which long work reports its progress.

    ProjectError                      anything a user can cause; one clear line, exit status 2
    ├── MachineError                  a machine file is missing, unknown or malformed
    ├── ModelError                    the model file cannot be read or imported
    │   └── UnsupportedOperatorError  an operator or opset that no importer covers
    ├── InputError                    arguments, shapes, dtypes or array files of the user
    │   └── ShortageError             a step or a served model needs more memory than there is; exit status 4
    ├── TuningError                   no candidate of a kernel could be built, run and verified
    ├── SimulationError               an execution graph cannot be run to its end (not priced, deadlock, mismatch)
    ├── OutputError                   results cannot be written (permission, disk full)
    └── MissingDependencyError        an optional part is not installed

Command lines print ``str(error)`` and exit with status 2; the message names the file and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class ProjectError(Exception):
    """Base of all errors that a user can cause. ``status``: exit status of the command."""

    status = 2


class MachineError(ProjectError):
    """A machine description is missing, unknown or malformed."""


class ModelError(ProjectError):
    """A model file cannot be read or imported."""


class UnsupportedOperatorError(ModelError):
    """The model uses an operator or opset that the importer does not cover."""


class InputError(ProjectError):
    """Arguments, shapes, dtypes or array files of the user do not fit."""


class ShortageError(InputError):
    """A predicted step or a served model needs more memory than its GPU has. ``record``: the figures, as JSON."""

    status = 4

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.record = record


class TuningError(ProjectError):
    """No candidate of a kernel could be built, run and verified."""


class SimulationError(ProjectError):
    """An execution graph cannot be run to its end: work without a price, a deadlock, collectives that do not match."""


class OutputError(ProjectError):
    """Results cannot be written."""


class MissingDependencyError(ProjectError):
    """An optional part of the project is not installed."""


Say = Callable[[str], None]
