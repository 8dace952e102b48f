"""Token files that a program looks for by a pattern (``data/fineweb_train_*.bin``) and that are not there. They are
made up in llm.c's format: a header of 256 words of 32 bits, which begins with a magic number, the version and the
number of tokens; then 16 bits a token.
"""

from __future__ import annotations

import builtins
import glob
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from e2e.capture.missing.arrays import is_missing
from e2e.capture.missing.hub import Hub
from e2e.capture.script_lines import library_folder, script_file
from e2e.capture.stand_ins import Note

_MAGIC, _VERSION, _HEADER = 20240520, 1, 256
TOKENS = 1 << 25
# GPT-2's mark between documents, and FineWeb's documents: 690 tokens in the mean, of widely different lengths.
_MARK, _MEAN, _SPREAD = 50256, 690, 1.0
_NAME = re.compile(r"(train|val|valid|validation|test)[^/]*\.bin$")
_WILD = re.compile(r"[*?]|\[[^]]*\]")


@contextmanager
def searched_files(hub: Hub, made_up: bool, folder: Path, note: Note) -> Iterator[None]:
    """Context in which a pattern that matches no file is noted in ``hub``. Instead, a pattern of token files matches
    two files, if data may be ``made_up``; they are written to ``folder`` when the program opens them.
    """

    def search_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def search(*given: Any, **options: Any) -> Any:
            found = original(*given, **options)
            first, caller = list(islice(found, 1)), sys._getframe(1).f_code.co_filename
            if first:  # a generator goes on as it is asked, through a large folder too
                return found if isinstance(found, list) else chain(first, found)
            if given and script_file(caller):
                kind, whole = type(given[0]), os.path.join(*map(str, given))
                if made_up and _NAME.search(whole) and _WILD.search(whole):
                    first = [kind(_WILD.sub(f"{number:06}", whole)) for number in (1, 2)]
                elif library_folder(caller) is None:
                    hub.searched.append(whole)
            return first if isinstance(found, list) else iter(first)

        return search

    def instead(path: Any) -> Any:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not isinstance(name, str) or not _NAME.search(name) or not is_missing(name):
            return path
        file = folder / "tokens.bin"
        if not file.exists():
            _write(file)
        note(f"{name} is not there: {TOKENS:,} tokens in llm.c's format, zeros in documents of {_MEAN} in the mean")
        return str(file)

    def reading(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(file: Any, *args: Any, **kwargs: Any) -> Any:
            mode = args[0] if args else kwargs.get("mode", "r")
            return original(instead(file) if mode in ("rb", False) else file, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for owner, name in ((Path, "glob"), (Path, "rglob"), (glob, "glob"), (glob, "iglob")):
            stack.enter_context(patch.object(owner, name, search_of(getattr(owner, name))))
        for owner, name in ((builtins, "open"), (io, "open"), (torch, "from_file")) if made_up else ():
            stack.enter_context(patch.object(owner, name, reading(getattr(owner, name))))
        yield


def _write(file: Path) -> None:
    numpy = import_module("numpy")
    header = numpy.zeros(_HEADER, numpy.int32)
    header[:3] = _MAGIC, _VERSION, TOKENS
    tokens = numpy.zeros(TOKENS, numpy.uint16)
    random = numpy.random.default_rng(0)
    lengths = random.lognormal(numpy.log(_MEAN) - _SPREAD**2 / 2, _SPREAD, 2 * TOKENS // _MEAN)
    starts = numpy.cumsum(numpy.maximum(lengths, 2).astype(numpy.int64))
    tokens[0] = _MARK
    tokens[starts[starts < TOKENS]] = _MARK
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as out:
        out.write(header.tobytes())
        out.write(tokens.tobytes())
