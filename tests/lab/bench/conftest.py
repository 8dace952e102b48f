"""Fixtures of the tests of ``fusion``: a tiny model, a build of it, short rounds."""

from tests.fusion.conftest import short_rounds, tiny_build, tiny_model

__all__ = ["short_rounds", "tiny_build", "tiny_model"]
