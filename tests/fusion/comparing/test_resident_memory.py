"""Growth of a process's memory, seen by a process that allocates what the test knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import numpy as np
from fusion.comparing.engine_worker import peak_growth, start_of_growth
before = np.ones(40 * 2**20, np.uint8)  # loaded: not growth
del before
start = start_of_growth()
kept = np.ones(8 * 2**20, np.uint8)
passing = np.ones(16 * 2**20, np.uint8)
del passing
print("not told" if start is None else peak_growth(start))
"""


def test_growth_is_the_peak_over_what_was_loaded():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    if done.stdout.strip() == "not told":
        return  # a system whose peaks cannot be counted anew
    # The kernel counts pages in batches for each core.
    assert 23 * 2**20 <= int(done.stdout) < 28 * 2**20
