"""The Triton kernels' arithmetic, in a process where Triton interprets from its start on."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "interpreted_triton_tables.py"


@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("triton") is None, reason="Triton (extra dev) or torch is not installed"
)
def test_interpreted_kernels_do_what_numpy_does():
    """Whatever imported Triton here before would have compiled its library for GPUs; hence another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout
