"""Errors of a script while it is captured: reported with their place and advice, without PyTorch's references to the
meta device; an end to scripts that do not end; tensors too large for any memory.

A long capture prints its progress and is stopped during import, model construction and the step (:func:`watched`).
Without data ``.item()`` never becomes the value that a loop waits for. Such a loop either calls operators endlessly,
detected by their number, or none at all, detected by the processor time that it spends without one: a busy machine
makes a script slower, but no work of it longer.

PyTorch counts bytes of tensors in 64 bits, and its error does not mention the step (:func:`oversized`).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from costmodel.base.errors import InputError, ModelError
from costmodel.base.process import Terminated
from e2e.capture.script_lines import library_folder, script_file

# A training step of 36 layers calls 11,000, one of the 126 layers of Llama 3 405B four times as many.
MOST_CALLS = 400_000
# Limit including the unrecorded calls that make the model and settle the step.
MOST_CALLED = 5 * MOST_CALLS
# Flags that data decide (``while mask.any()``), read without a call of a module between them.
MOST_FLAGS = 10_000
# Equal passes in a row between two steps of an optimizer.
MOST_PASSES = 10_000
# Longest processor time that a script may load data or compute without a call.
SILENT_SECONDS = 180.0
# Longest time without a call in which it does not compute either: it waits for what never comes.
WAITING_SECONDS = 300.0
# Share of a processor below which a process waits rather than computes, on a busy machine too.
_WAITING_SHARE = 0.01
FIRST_NOTE_SECONDS, NOTES_SECONDS, _WAKING_SECONDS = 20.0, 30.0, 2.0
# A signal that is ignored without a handler.
_WAKING = signal.SIGURG


class EndlessStepError(ModelError):
    """Raised for a script that does not end."""

    def __init__(self, what: str = "") -> None:
        super().__init__(
            f"the script {what or 'has called no operator for a long time'} and has not ended: a "
            "loop that waits for data (.item(), .any()) never sees them in a capture; give it a fixed number of "
            "rounds; a layer that goes token by token needs fewer tokens, or --linear-attention fused where its "
            "library has a kernel"
        )


class OtherGpusError(ModelError):
    """Raised where a program is one of another number of ``gpus``."""

    def __init__(self, said: str, gpus: int) -> None:
        super().__init__(said, gpus)
        self.said, self.gpus = said, gpus

    def __str__(self) -> str:
        return f"{self.said}: give --gpus {self.gpus}"


@contextmanager
def watched(count: Callable[[], int]) -> Iterator[None]:
    """Context that prints progress of a long capture on standard error, and raises :class:`EndlessStepError` after too
    much work, or too long a wait, without a call.

    ``count``: function that returns the number of calls so far.
    """
    done, stopped = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(count, done, stopped, threading.get_ident()), daemon=True)
    watcher.start()
    try:
        with _wakeable():
            yield
    except BaseException as error:
        if stopped.is_set() and not isinstance(error, EndlessStepError):
            raise EndlessStepError from None  # errors on its way out
        raise
    finally:
        done.set()
        watcher.join()


def _watch(count: Callable[[], int], done: threading.Event, stopped: threading.Event, watched_thread: int) -> None:
    begin = last_call = time.monotonic()
    spent = time.process_time()
    calls, told = count(), FIRST_NOTE_SECONDS
    while not done.wait(1.0):
        now = time.monotonic()
        if count() != calls:
            calls, last_call, spent = count(), now, time.process_time()
        if now - begin >= told:
            print(f"capturing: {calls:,} operator calls after {now - begin:.0f} s", file=sys.stderr)
            told += NOTES_SECONDS
        silent, worked = now - last_call, time.process_time() - spent
        if worked > SILENT_SECONDS or (silent > WAITING_SECONDS and worked < _WAITING_SHARE * silent):
            stopped.set()
            # The only way to interrupt a loop without calls of this package.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(watched_thread), ctypes.py_object(EndlessStepError)
            )
            _wake(watched_thread, done)
            return


@contextmanager
def _wakeable() -> Iterator[None]:
    """Context in which :data:`_WAKING` ends a wait of the main thread (for a queue, a lock, a socket).

    Python then calls a handler, in which a pending exception is raised.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(_WAKING) is signal.SIG_DFL
    if ours:
        signal.signal(_WAKING, lambda number, frame: None)
    try:
        yield
    finally:
        if ours:
            signal.signal(_WAKING, signal.SIG_DFL)


def _wake(thread: int, done: threading.Event) -> None:
    if not done.wait(_WAKING_SECONDS) and callable(signal.getsignal(_WAKING)):
        signal.pthread_kill(thread, _WAKING)


_SAID = re.compile(
    r"(?:size calculation|multiplication|unpacking long).*?overflow\w*|overflow\w* when unpacking long", re.I
)
_SIZES = re.compile(r"sizes=(\[[^\]]*\])")


def oversized(error: Exception) -> str | None:
    """Return a message about ``error`` if it is of a tensor too large for any memory, or None."""
    said = str(error)
    if not _SAID.search(said):
        return None
    sizes = _SIZES.search(said)
    of = f" of {sizes[1]} elements" if sizes else ""
    return f"a tensor{of} is larger than any memory; give a smaller batch, shorter sequences or a smaller model"


@contextmanager
def oversized_told() -> Iterator[None]:
    """Context that raises ``InputError`` for errors that :func:`oversized` recognises."""
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        told = oversized(error)
        if told is None:
            raise
        raise InputError(told) from None


# What to do about an error of a program.
_ADVICE = "its traceback is above: mend it, or install the versions of packages that the program was written for"
# Escape sequences of terminals, by which libraries emphasise parts of their messages.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Folders of code whose frames say nothing about the script.
_OURS = Path(__file__).parent
_PYTORCH = Path(torch.__file__).parent
# For an operator missing on a device PyTorch lists its kernels elsewhere: a screen of lines about its own sources.
_DISPATCHER = re.compile(r": (?:fallthrough )?registered at .*\[(?:backend fallback|kernel|autograd kernel)\]$")


class NotYetSent(BaseException):
    """Raised when a rank waits for the object number ``place`` from ``source``, or for those that ``source`` gives to a
    group as ``name``. Not caught by ``except Exception`` of a script.
    """

    def __init__(self, source: int, place: int, name: str | None = None) -> None:
        super().__init__(source, place, name)
        self.source, self.place, self.name = source, place, name


@contextmanager
def reporting(reference: str) -> Iterator[None]:
    """Context that prints the script's own traceback, without frames of this package, and raises an error of one
    line.
    """
    try:
        with patch.object(os, "_exit", _exit_of(os.getpid())):
            yield
    except EndlessStepError as error:
        place = _place(reference, error)
        if place.rpartition(":")[0] not in str(error):
            error.args = (f"{place}: {error}",)
        raise
    except InputError:
        raise
    except ModelError as error:
        place = _place(reference, error)
        if str(error).startswith((place, reference)) or place == reference:
            raise
        if isinstance(error, OtherGpusError):
            raise OtherGpusError(f"{place}: {error.said}", error.gpus) from error
        raise ModelError(f"{place}: {error}") from error
    except SystemExit as error:
        said = f" saying {error.code!r}" if isinstance(error.code, str) else ""
        raise ModelError(
            f"{reference}: the script ended the program (sys.exit, os._exit or argparse){said}; it must return from "
            "the function and from the step"
        ) from None
    except (KeyboardInterrupt, GeneratorExit, Terminated, NotYetSent):
        raise
    except BaseException as error:
        summary = _translated(error)
        if summary is not None:
            raise ModelError(f"{_place(reference, error)}: {summary}") from error
        file = reference.rpartition(":")[0]
        frames = traceback.extract_tb(error.__traceback__)
        first = next((place for place, frame in enumerate(frames) if Path(frame.filename).name == Path(file).name), 0)
        lines = ["Traceback (most recent call last):\n"]  # not by print, which programs replace on other ranks
        own = [frame for frame in frames[first:] if _OURS not in Path(frame.filename).parents]
        while len(own) > 1 and _PYTORCH in Path(own[-1].filename).parents:
            own.pop()  # the frame in PyTorch that rejected its arguments
        lines += traceback.format_list(own)
        said = "".join(traceback.format_exception_only(error))
        lines += [f"{line}\n" for line in said.splitlines() if not _DISPATCHER.search(line)]
        sys.stderr.writelines(lines)
        said = str(error) or (frames[-1].line or "" if frames else "")  # such as the condition of an assertion
        if "Traceback (most recent call last)" in said:  # passed on from another process
            said = said.strip().rpartition("\n")[2]
        summary = " ".join(_COLOURS.sub("", said).split())[:200] + _hint(frames)
        summary += "".join(getattr(error, "__notes__", ()))
        advice = "mend it there: it runs without a GPU and without data" if file else _ADVICE
        place = reference if file else _place(reference, error)
        raise ModelError(f"{place}: the script failed with {type(error).__name__}: {summary}; {advice}") from error


def _place(reference: str, error: BaseException) -> str:
    """Return file and line of the script where the error was raised, or the script's name."""
    file = Path(reference.rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    if not file.name:  # a program with any number of files
        named = [each for each in frames if script_file(each.filename)]
        own = [each for each in named if library_folder(each.filename) is None]
        if not own:
            return reference
        inside = "" if own[-1] is named[-1] else f" (in {script_file(named[-1].filename)}:{named[-1].lineno})"
        return f"{script_file(own[-1].filename)}:{own[-1].lineno}{inside}"
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == file.name]
    return f"{file}:{lines[-1]}" if lines else reference


def _exit_of(process: int) -> Callable[[int], object]:
    """Return a replacement of ``os._exit``, which in ``process`` itself would silently end the prediction; children may
    call it.
    """
    end = os._exit

    def exit(status: int) -> object:
        if os.getpid() != process:
            end(status)
        raise SystemExit(status)

    return exit


def _translated(error: BaseException) -> str | None:
    """Return advice for an error caused by the capture rather than the script, or None."""
    if isinstance(error, Exception) and (told := oversized(error)) is not None:
        return told
    said = str(error)
    for pattern, advice in _TRANSLATIONS:
        found = re.search(pattern, said)
        if found:
            return advice.format(*found.groups())
    return None


_ON_GPU = "a tensor on the CPU meets one on the GPU, which PyTorch refuses; move it with .to('cuda')"
# PyTorch's message -> advice for the script's author.
_TRANSLATIONS = (
    (r"Tensor on device (?:meta|cpu) is not on the expected device (?:meta|cpu)", _ON_GPU),
    (r"Expected all tensors to be on the same device.*meta", _ON_GPU),
    (r"tensors? .*found at least two devices, .*meta", _ON_GPU),
    (r"expected to be (?:in|on) the same device.*(?:meta.*cpu|cpu.*meta)", _ON_GPU),
    (
        r"can't convert meta device type tensor to numpy",
        "a tensor on the GPU has no .numpy(); write .cpu().numpy() (zeros, in a capture)",
    ),
    (
        r"(?:Cannot copy out of meta tensor|Tensor\.item\(\) cannot be called on meta tensors)",
        "the values of a tensor on the GPU are read, which a capture does not have; read them by .item() or .cpu()",
    ),
    (
        r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)>",
        "the custom operator {0} does not say what it returns; register that with @OPERATOR.register_fake",
    ),
    (
        r"(aten::[\w.]+): attempted to run this operator with Meta tensors",
        "{0} cannot be captured: PyTorch does not know what it returns without running it; leave it out of the step, "
        "or wrap it in torch.library.custom_op with a register_fake",
    ),
    (
        r"Could not run '(aten::[\w.]+)' with arguments from the '(Sparse\w*)Meta' backend",
        "{0} of sparse tensors ({1}) is not captured; write it with dense tensors (index_select, index_add) or wrap "
        "it in torch.library.custom_op with a register_fake",
    ),
    (
        r"Could not run '(\w+::[\w.]+)' with arguments from the 'Meta' backend",
        "{0} cannot be captured: it does not say what it returns without running; register a fake implementation "
        "(torch.library.register_fake)",
    ),
    (
        r"cannot repeat_interleave a meta tensor without output_size",
        "repeat_interleave by counts that data decide, which a capture does not have: give output_size, or counts "
        "that the script writes",
    ),
    (
        r"Can't pickle .*: (?:import of module|it's not the same object|attribute lookup)",
        "a function goes to another process by its module's name, which a library has too or which is not at the top "
        "of the file; rename the file, or move the function",
    ),
    (
        r"(deepspeed[\w.]*) of DeepSpeed is not captured",
        "uses {0}, which the stand-in for DeepSpeed does not have; choose the program's way without it",
    ),
    (r"libcuda\.so cannot found", "a kernel is compiled for a GPU while the script is loaded; do so inside the step"),
)


def _hint(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return advice for a script of several ranks that was captured as one of a single GPU."""
    distributed = any("torch/distributed/" in frame.filename for frame in frames)
    alone = not torch.distributed.is_available() or not torch.distributed.distributed_c10d._world.pg_map
    return "; it starts a process group: say with --gpus on how many GPUs" if distributed and alone else ""
