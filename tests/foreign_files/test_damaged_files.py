"""Damaged copies of valid files are read, or refused in one line that names the file; never a traceback or a hang."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import ProjectError
from tests.foreign_files.readers import READERS, Reader, in_time, require

# Readers that import a graph or build a model for each input.
LONG = ("onnx", "configuration", "analyze", "predict")


def check(name: str, examples: int, folder: Path) -> None:
    """Reads each seed of the reader ``name`` as it is, and ``examples`` damaged ones."""
    require(name)
    reader = READERS[name]
    seeds = reader.seeds(folder)
    for number in range(len(seeds)):
        reader.read(reader.case(folder, seeds, number, None))

    # Hypothesis draws what the damage draws at random, and makes a damaged file that fails smaller.
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(number=st.integers(0, len(seeds) - 1), rng=st.randoms(use_true_random=False))
    def read_or_refuse(number: int, rng: random.Random) -> None:
        read_damaged(reader, reader.case(folder, seeds, number, rng))

    read_or_refuse()


def read_damaged(reader: Reader, path: Path) -> None:
    """Fails where the damaged file at ``path`` ends otherwise than in a result or in one line that names it."""
    with in_time(f"{reader.name}: {path.name}"):
        try:
            reader.read(path)
        except ProjectError as error:
            text = str(error)
            assert text and "\n" not in text
            assert not reader.names_file or str(path) in text or path.name in text


# Warnings go to standard error in a command.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in READERS if name not in LONG])
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path):
    check(name, 10, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("name", READERS)
def test_many_more_damaged_files_are_read_or_refused(name: str, tmp_path: Path):
    check(name, 100 if name in LONG else 1000, tmp_path)
