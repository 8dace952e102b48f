"""Shards of WebDataset that are not there: archives of empty images with a text and a class."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from e2e.capture.imports import patched_imports
from e2e.capture.stand_ins import Note

SAMPLES = 512
SIDE = 512


@contextmanager
def made_up_shards(note: Note) -> Iterator[None]:
    """Context in which shards of WebDataset that are not there are made up."""
    told: list[Any] = []

    def instead_of(opening: Callable[..., Any]) -> Callable[..., Any]:
        def opened(url: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
            local = re.sub(r"^file:(//)?", "", str(url))
            if mode != "rb" or os.path.exists(local) or local == "-":
                return opening(url, mode, *args, **kwargs)
            if not told:
                told.append(url)
                note(
                    f"{url} and others are not there: {SAMPLES} empty images of {SIDE}x{SIDE} each (jpg, png; txt, cls)"
                )
            return io.BytesIO(_shard())

        return opened

    patches = {
        "webdataset.gopen": lambda module: [(module, "gopen", instead_of(module.gopen))],
        "webdataset.cache": lambda module: [(module, "open", instead_of(open))],
    }
    with patched_imports(patches):
        yield


@cache
def _shard() -> bytes:
    image, files = import_module("PIL.Image").new("RGB", (SIDE, SIDE)), {}
    for kind, form in (("jpg", "JPEG"), ("png", "PNG")):
        file = io.BytesIO()
        image.save(file, form)
        files[kind] = file.getvalue()
    text = b"an image with nothing in it"
    files |= {"txt": text, "cls": b"0", "json": json.dumps({"caption": text.decode()}).encode()}
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for number in range(SAMPLES):
            for kind, content in files.items():
                member = tarfile.TarInfo(f"{number:06}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()
