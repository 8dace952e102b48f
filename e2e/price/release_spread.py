"""How far a step moves with the release of its libraries, where tables of kernels know another release.

Tables of products and attention on tensor cores are of 2025 and 2026. What a step took with the libraries of 2023 is
known of few kernels and of no whole step besides those that predictions are judged by. Of image models it is: timm's
results hold a thousand on one card under PyTorch 2.4 with CUDA 12.4 and again under 2.9 with 12.8. The half interval,
in log units, that holds 80 % of these is what a step's interval is wider by if its libraries are told to be older
(``older_libraries`` of :class:`e2e.capture.models.stacks.Stack`). The prediction itself stays: which kernels would be
slower is not known, nor whether two years change more than one.

costmodel/calibration/release_spread.json    the half interval, the pairs and the files they are from; written by
                                             ``python -m e2e.validate.fit_release_spread``
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from costmodel.base.errors import InputError

RELEASE_SPREAD = Path(__file__).parents[2] / "costmodel" / "calibration" / "release_spread.json"
FIT_COMMAND = "python -m e2e.validate.fit_release_spread"
OLDER_NOTE = (
    "the libraries of this stack are older than those that kernels were measured with: its interval is wider by what "
    "whole steps change from release to release"
)


@lru_cache(maxsize=4)
def release_spread(path: Path = RELEASE_SPREAD) -> float:
    """The half interval in ``path``, log units; 0 without the file. ``InputError`` names a corrupt one."""
    if not path.exists():
        return 0.0
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["spread"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a spread of releases ({error!r}); write it anew: {FIT_COMMAND}") from None
