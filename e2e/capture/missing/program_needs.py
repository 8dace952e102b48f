"""What a program needs and this machine may lack, together: each context of this folder, and the line for what could
not be made up.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from e2e.capture.missing.arrays import made_up_arrays
from e2e.capture.missing.coco import made_up_annotations
from e2e.capture.missing.hub import Hub, offline_hub
from e2e.capture.missing.hub_datasets import made_up_datasets
from e2e.capture.missing.images import libraries_for_cuda, made_up_images
from e2e.capture.missing.loaders import LoadedBatches, loaders_without_workers
from e2e.capture.missing.shards import made_up_shards
from e2e.capture.missing.sounds import made_up_sounds
from e2e.capture.missing.token_files import searched_files
from e2e.capture.missing.tokenizers import made_up_tokenizers
from e2e.capture.missing.weights import weights_not_read
from e2e.capture.script_lines import users_line
from e2e.capture.stand_ins import Note
from e2e.capture.written_files import MOST_WRITTEN


@contextmanager
def needs_met(made_up: bool, folder: Path, note: Note, batches: LoadedBatches) -> Iterator[Hub]:
    """Context in which weights are not read, and data and tokenizers that are not here are made up if that was asked
    for (``made_up``). ``folder``: place for files; ``batches``: collector of what loaders make.
    """
    hub = Hub(folder / "hub", made_up)

    def made(line: str) -> None:
        hub.stood_in = line
        note(line)

    with ExitStack() as stack:
        loading = loaders_without_workers(batches)
        for each in (offline_hub(hub), libraries_for_cuda(), loading, weights_not_read(hub, note)):
            stack.enter_context(each)
        stack.enter_context(made_up_datasets(made_up, made))
        if made_up:
            stack.enter_context(made_up_images(folder / "images", made))
            for made_up_data in (made_up_arrays, made_up_annotations, made_up_shards, made_up_sounds):
                stack.enter_context(made_up_data(made))
            stack.enter_context(made_up_tokenizers(hub, folder / "tokenizers", note))
        stack.enter_context(searched_files(hub, made_up, folder, made))
        yield hub


def told_missing(error: BaseException, frames: Sequence[Any], hub: Hub) -> str | None:
    """Return what to do about what a program asks for and is not here, or None for other errors."""
    line = users_line(frames)
    place = f"{line}: " if line else ""
    if hub.unknown and any(_OFFLINE.search(f"{type(each).__name__}: {each}") for each in _causes(error)):
        asked = hub.unknown[-1]
        return (
            f"{place}asks the hub for {asked}, which is not in its cache here; where there is a network: "
            f"hf download {asked} --include '*.json' '*.txt' '*.model' (weights are not needed)"
        )
    if "MissingState" in str(error) and hub.states:
        return f"{place}needs the values in {hub.states[-1]}, which is not here; put a file of that form there"
    if any(isinstance(each, OSError) and _is_of_network(each) for each in _causes(error)):
        return f"{place}needs the network ({_shortened(error)}); fetch what it asks for once, where there is one"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"{place}writes a file of more than {MOST_WRITTEN >> 30} GiB; let it write less"
    made_up = "" if hub.made_up else "give --data synthetic, where made-up data will do, or "
    way = f"{made_up}put a file of that form there, as small as the program takes it"
    if hub.searched and isinstance(error, _OF_NOTHING):
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        return f"{place}{said}; it had found no file by {hub.searched[-1]}: {way}"
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return None
    file = error.filename
    if file is None:  # a library has looked for it
        return f"{place}{error}; put it there (weights are not read: of them an empty file will do)"
    return f"{place}opens {file}, which is not here; {way}"


# Errors of programs that go on without the files for which they have looked.
_OF_NOTHING = (AssertionError, IndexError, StopIteration, ValueError, ZeroDivisionError)
# Errors of the hub's libraries for what is not in its cache.
_OFFLINE = re.compile(r"LocalEntryNotFound|OfflineMode|RepositoryNotFound|not a valid model identifier|offline mode")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Names of the errors of libraries that reach no server; Python's own ``TimeoutError`` may be of a queue or a lock.
_NETWORK = re.compile(r"Connect|URLError|HTTPError|Timeout|gaierror")


def _is_of_network(error: BaseException) -> bool:
    return any(kind is not TimeoutError and _NETWORK.search(kind.__name__) for kind in type(error).__mro__)


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]
