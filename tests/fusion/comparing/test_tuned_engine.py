"""Our own builds as engines: what their rows in a comparison say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fusion.comparing import apache_tvm


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_the_mode_names_another_precision_than_float32(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    artifact = SimpleNamespace(
        manifest=SimpleNamespace(precision=precision, outputs=(), layers={}), library=lambda file: file
    )
    monkeypatch.setattr(apache_tvm, "read_artifact", lambda folder: artifact)
    monkeypatch.setattr(apache_tvm, "load_compiled", lambda artifact, file, threads: None)
    session = apache_tvm.TUNED.prepare(SimpleNamespace(build="build", threads=1), lambda line: None)  # type: ignore[arg-type]
    assert session.mode.endswith(f", {precision}") == (precision != "float32")
