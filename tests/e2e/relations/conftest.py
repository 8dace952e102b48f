"""Captures and machine files are read once for all relations: most of them change what a capture does not depend on."""

from __future__ import annotations

import functools

import pytest

from costmodel.machines import machine_file
from tests.e2e.relations.relation_rows import CAPTURES

MOST_HELD = 16


# By module: no other test of a worker meets what is put in place of the programs' own functions here.
@pytest.fixture(scope="module", autouse=True)
def shared_captures():
    single_gpu = pytest.importorskip("e2e.sources.built_in_model")
    from e2e.sources import built_in_model

    capture, held = single_gpu.capture, {}

    def captured(model, options):
        key = (model.name, model.samples, model.sequence_length, options)
        held[key] = held.pop(key) if key in held else capture(model, options)
        if len(held) > MOST_HELD:  # a capture has tens of megabytes
            del held[next(iter(held))]
        return held[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(single_gpu, "capture", captured)
        patched.setattr(
            built_in_model, "prepare_spread", functools.partial(built_in_model.prepare_spread, captures=CAPTURES)
        )
        patched.setattr(machine_file, "read_machine", functools.cache(machine_file.read_machine))
        yield
