"""Shards of WebDataset that are not there: archives of empty images with a text and a class."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
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
    with patched_imports({"webdataset.gopen": lambda module: _opening(module, note)}):
        yield


def _opening(module: Any, note: Note) -> Iterator[tuple[Any, str, Any]]:
    original = module.gopen

    def gopen(url: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        local = re.sub(r"^file:(//)?", "", str(url))
        if mode != "rb" or os.path.exists(local) or local == "-":
            return original(url, mode, *args, **kwargs)
        note(f"{url} is not there: shards of {SAMPLES} empty images of {SIDE}x{SIDE} (jpg, png) with txt, json and cls")
        return io.BytesIO(_shard())

    yield module, "gopen", gopen


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
