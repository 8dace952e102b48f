"""This process: the CPU cores it may use, its early end, and its garbage collection.

Cores are those of the affinity mask, limited by the CPU quota of the container. ``docker run --cpus 2`` and
Kubernetes limits leave all cores of the host in the affinity mask and stop the whole process as soon as its share
of a period of 100 ms is used up: threads beyond the quota only make all of them wait.

A process ends early by a signal, or because its parent process has ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import FrameType

from costmodel.base.errors import InputError

_ROOT = Path("/")
_GROUPS = PurePosixPath("sys/fs/cgroup")


def usable_cores(root: Path = _ROOT) -> int:
    """Number of cores in the affinity mask, at most the whole cores of the CPU quota of every enclosing control
    group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_memory_bytes() -> int | None:
    """Available memory in bytes (Linux), else total memory; ``None`` if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def threads_to_use(asked: int | None, default: int) -> int:
    """Return ``asked``, or ``default`` limited to the number of usable cores: more threads would spin waiting for each
    other.

    Raises ``InputError`` if ``asked`` exceeds the usable cores.
    """
    cores = usable_cores()
    if asked is not None and asked > cores:
        raise InputError(f"--threads {asked}: this process may use {cores} core{'s' * (cores > 1)}")
    return min(default, cores) if asked is None else asked


def core_quota(root: Path = _ROOT) -> float | None:
    """CPU quota of the control groups (version 1 or 2), in processor seconds per second; ``None`` if unlimited.

    ``root``: folder that holds ``proc`` and ``sys``.
    """
    quotas = [quota for folder in _folders(root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups that may limit its CPU time, up to the root of the hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            mounts = [_GROUPS, _GROUPS / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [_GROUPS / controllers, _GROUPS / "cpu"]
        else:
            continue
        # Inside a container the path may be the host's; then only its end, or nothing of it, is mounted here.
        inside = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            yield from (root / mount / each for each in (inside, *inside.parents))


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such controller, or "max"
        return None


# Signals, besides Ctrl-C, that request termination: `kill`, schedulers and `timeout`; a closed terminal.
ASKING = (signal.SIGTERM, signal.SIGHUP)
_LONGEST_CHAIN = 20  # longest chain of exception causes to follow, since it may be cyclic
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Terminated(BaseException):
    """Request to terminate this process. Like ``KeyboardInterrupt`` it is not caught by handlers of errors; resources
    are released as it propagates, and the process ends. Its text is the signal's name.
    """

    @property
    def status(self) -> int:
        """Exit status that shells report for such an end."""
        return 128 + signal.Signals[str(self)]


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread, once, on SIGTERM and SIGHUP within the block, so that children are
    ended and temporary folders removed, unlike with a signal's default action. Does nothing in other threads, and for a
    signal that is already handled or ignored (``nohup``).
    """
    ours: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        for each in ours:  # `timeout` sends two; the clean-up must not be interrupted
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        ours += [each for each in ASKING if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ours:
            if signal.getsignal(each) is end:
                signal.signal(each, signal.SIG_DFL)


def ending_behind(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """The termination request that ``error`` is or was caused by, or ``None``: an extension module that is being loaded
    when a signal arrives fails with ``SystemError`` or ``ImportError``, caused by the signal's exception.
    """
    seen: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if seen is None or isinstance(seen, KeyboardInterrupt | Terminated):
            return seen
        seen = seen.__cause__
    return None


def pass_ending(error: BaseException) -> None:
    """Raise the termination request that caused ``error``, if any: for handlers that treat any error as a result or as
    a fault of an input.
    """
    end = ending_behind(error)
    if end is not None:
        raise end from None


@contextmanager
def interruptible_start() -> Iterator[None]:
    """End the program on Ctrl-C in one line with status 130 while it is being loaded, as its commands do later. After
    the block, Ctrl-C ends the process silently: during interpreter shutdown it would be reported as an error.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(ending_behind(error), KeyboardInterrupt):
            raise
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        heard = threading.current_thread() is threading.main_thread()
        if heard and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when the thread that started it ends, however it ends: inside a compiler or a
    timed kernel it would not notice for minutes.

    ``parent``: process ID of the parent, which may have ended before this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, and block it for good in processes that are started within: a process that
    is still loading when the whole process group gets it would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Freeze existing objects for the block, so that collections scan new objects only; afterwards all objects are
    scanned again.

    Libraries leave hundreds of thousands of objects, among which a full collection finds nothing to free. Does nothing
    if other code has frozen objects, since they would be unfrozen at the end.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
