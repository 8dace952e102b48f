"""Protection of the user's files: when the program ends, files that it overwrote, moved or deleted are as they were at
its start, and those that it created are gone. A prediction must not lose a checkpoint.

What it writes can be read again while it runs. Files of temporary folders and of caches are left to the program, and
of checkpoints (``torch.save``) only an empty file is there while it runs: their tensors have no values.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from e2e.capture.script_lines import script_line

Note = Callable[[str], None]
_WRITING = frozenset("wax+")
# Bytes that a program may write to a file.
MOST_WRITTEN = 8 << 30
# Variables of the environment that name folders of caches.
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


class WrittenFiles:
    """Files that a program has written."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder.resolve(), scratch
        # File that was there -> what the program has made of it.
        self.copies: dict[str, str] = {}
        self.made: set[str] = set()
        named = [os.environ.get(name, "") for name in _CACHES]
        places = [tempfile.gettempdir(), "~/.cache", "/dev", "/proc", *filter(None, named)]
        self._left = [Path(place).expanduser().resolve() for place in places]

    def place(self, path: Any, writing: bool = False) -> Any:
        """Return the path at which ``path`` is opened."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        name = os.path.abspath(os.fspath(path))
        if name in self.copies:
            return self.copies[name]
        if not writing or not self.protects(name):
            return path
        if name not in self.made:
            if os.path.isfile(name):
                copy = os.path.join(self.scratch, f"{len(self.copies)}-{os.path.basename(name)}")
                shutil.copyfile(name, copy)
                self.copies[name] = copy
                return copy
            if not os.path.exists(name):
                self.made.add(name)
        return path

    def protects(self, name: str) -> bool:
        """True for files that must be as they were."""
        path = Path(name)
        return self.folder in path.parents or not any(place in path.parents for place in self._left)

    def undo(self) -> None:
        """Remove the files and empty folders that the program has made."""
        for name in sorted(self.made, reverse=True):  # what is in a folder before the folder
            with suppress(OSError):
                os.rmdir(name) if os.path.isdir(name) else os.remove(name)


def _moved(kept: Any, map_location: Any) -> Any:
    """Return what was saved with its tensors on the GPU, if ``torch.load`` was told to put them there."""
    if not isinstance(map_location, (str, torch.device)) or torch.device(map_location).type != "cuda":
        return kept
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), kept)


@contextmanager
def kept_files(folder: Path, scratch: Path, note: Note) -> Iterator[WrittenFiles]:
    """Context in which a program started in ``folder`` changes no file that was there; its writes go to ``scratch``.

    Created files are removed on leaving the context; a process that exits inside it must call
    :meth:`WrittenFiles.undo`.
    """
    files = WrittenFiles(folder, scratch)
    open_file, open_number, make, save, load = io.open, os.open, os.mkdir, torch.save, torch.load
    saved: dict[str, Any] = {}
    remove, rename, tree = os.remove, os.rename, shutil.rmtree
    numpy = import_module("numpy")
    map_file = numpy.memmap.__new__

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return open_file(files.place(file, bool(_WRITING & set(mode))), mode, *args, **kwargs)

    def created(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        number = open_number(path, flags, *args, **kwargs)
        if flags & os.O_CREAT and flags & os.O_EXCL and not kwargs.get("dir_fd"):  # as in ``tempfile``
            name = os.path.abspath(os.fspath(path))
            if files.protects(name):
                files.made.add(name)
        return number

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        name = os.path.abspath(os.fspath(path))
        if files.protects(name):
            files.made.add(name)

    def is_kept(path: Any) -> bool:
        name = os.path.abspath(os.fspath(path))
        return files.protects(name) and name not in files.made and os.path.exists(name)

    def removed(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        if dir_fd is not None or not is_kept(path):  # a file of an open folder, which is removed as a whole
            remove(path, *args, dir_fd=dir_fd, **kwargs)

    def mapped(cls: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
        # NumPy's default is to write. Token files are large: their pages are copied when they are written, if ever.
        if mode in ("r+", "readwrite") and isinstance(filename, (str, os.PathLike)) and is_kept(filename):
            mode = "c"
        return map_file(cls, filename, dtype, mode, *args, **kwargs)

    def renamed(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if is_kept(dst):
            files.copies[os.path.abspath(os.fspath(dst))] = os.fspath(files.place(src))
        elif is_kept(src):
            shutil.copyfile(files.place(src), files.place(dst, writing=True))
        else:
            rename(src, dst, *args, **kwargs)
            source, target = (os.path.abspath(os.fspath(path)) for path in (src, dst))
            for inside in [name for name in list(files.made) if name.startswith(source + os.sep)]:
                files.made.add(target + inside[len(source) :])
            for inside in [name for name in list(saved) if name == source or name.startswith(source + os.sep)]:
                saved[target + inside[len(source) :]] = saved.pop(inside)
            if files.protects(target) or source in files.made:
                files.made.add(target)

    def emptied(path: Any, *args: Any, **kwargs: Any) -> None:
        if not is_kept(path):
            tree(path, *args, **kwargs)

    def keep(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            note(f"{script_line()} writes {os.fspath(f)}: not written")
            name = os.path.abspath(os.fspath(f))
            saved[name] = obj
            if not os.path.exists(name):
                with suppress(OSError), open_file(name, "xb"):  # programs look whether it is there
                    files.made.add(name)
        else:
            save(obj, f, *args, **kwargs)

    def fetch(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = os.path.abspath(os.fspath(f)) if isinstance(f, (str, os.PathLike)) else None
        return _moved(saved[name], map_location) if name in saved else load(f, map_location, *args, **kwargs)

    with ExitStack() as stack:
        for target, name, value in (
            (builtins, "open", opened), (io, "open", opened), (os, "open", created), (os, "mkdir", made),
            (os, "remove", removed),
            (os, "unlink", removed), (os, "rename", renamed), (os, "replace", renamed), (shutil, "rmtree", emptied),
            (torch, "save", keep), (torch, "load", fetch), (numpy.memmap, "__new__", staticmethod(mapped)),
        ):  # fmt: skip
            stack.enter_context(patch.object(target, name, value))
        try:
            yield files
        finally:
            files.undo()
