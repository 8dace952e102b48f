"""Start of a worker process.

Nothing slow is imported at module level: until the worker is tied to the process that started it, it would outlive that
one, and loading PyTorch takes seconds.
"""

from __future__ import annotations

import os
import signal

from costmodel.base.process import end_with_parent


def tie_worker(parent: int) -> None:
    """Limit the worker to one thread and tie it to ``parent``.

    Several processes with as many threads as cores each would compete for them. Ctrl-C is handled by ``parent``, which
    ends this process; without ``parent`` this process would wait forever.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


def prepare_worker(parent: int) -> None:
    """Tie the worker to ``parent`` as :func:`tie_worker`, and limit PyTorch to one thread."""
    tie_worker(parent)
    import torch

    torch.set_num_threads(1)
