"""How a process that computes cells begins. Nothing is imported here that takes long: until it has asked to end with
the process that started it, it would outlive that one, and loading PyTorch takes seconds.
"""

from __future__ import annotations

import os
import signal

from costmodel.base.termination import end_with_parent


def prepare_worker(parent: int) -> None:
    """One thread: two processes with as many threads as cores each would fight for them. Ctrl-C is for the process that
    asked, ``parent``, which ends this one; and without which this one would wait for ever.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
