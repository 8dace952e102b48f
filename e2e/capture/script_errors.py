"""Reports of errors in a script: their place and advice, without PyTorch's references to the meta device."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from costmodel.base.errors import InputError, ModelError
from costmodel.base.termination import Terminated
from e2e.capture.oversized_tensors import oversized
from e2e.capture.watch import EndlessStepError

# Folders of code whose frames say nothing about the script.
_OURS = Path(__file__).parent
_PYTORCH = Path(torch.__file__).parent
# For an operator missing on a device PyTorch lists its kernels elsewhere: a screen of lines about its own sources.
_DISPATCHER = re.compile(r": (?:fallthrough )?registered at .*\[(?:backend fallback|kernel|autograd kernel)\]$")


class NotYetSent(BaseException):
    """Raised when a rank waits for the object number ``place`` from ``source``. Not caught by ``except Exception`` of a
    script.
    """

    def __init__(self, source: int, place: int) -> None:
        super().__init__(f"object {place} from rank {source}")
        self.source, self.place = source, place


@contextmanager
def reporting(reference: str) -> Iterator[None]:
    """Context that prints the script's own traceback, without frames of this package, and raises an error of one
    line.
    """
    try:
        with patch.object(os, "_exit", _exit_of(os.getpid())):
            yield
    except EndlessStepError as error:
        if reference.rpartition(":")[0] not in str(error):
            error.args = (f"{_place(reference, error)}: {error}",)
        raise
    except InputError:
        raise
    except ModelError as error:
        place = _place(reference, error)
        if str(error).startswith((place, reference)) or place == reference:
            raise
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
        print("Traceback (most recent call last):", file=sys.stderr)
        own = [frame for frame in frames[first:] if _OURS not in Path(frame.filename).parents]
        while len(own) > 1 and _PYTORCH in Path(own[-1].filename).parents:
            own.pop()  # the frame in PyTorch that rejected its arguments
        print("".join(traceback.format_list(own)), end="", file=sys.stderr)
        said = "".join(traceback.format_exception_only(error))
        print("\n".join(line for line in said.splitlines() if not _DISPATCHER.search(line)), file=sys.stderr)
        summary = " ".join(str(error).split())[:200] + _hint(frames)
        raise ModelError(
            f"{reference}: the script failed with {type(error).__name__}: {summary}; "
            "mend it there: it runs without a GPU and without data"
        ) from error


def _place(reference: str, error: BaseException) -> str:
    """Return file and line of the script where the error was raised, or the script's name."""
    file = Path(reference.rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
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
    (r"libcuda\.so cannot found", "a kernel is compiled for a GPU while the script is loaded; do so inside the step"),
)


def _hint(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return advice for a script of several ranks that was captured as one of a single GPU."""
    distributed = any("torch/distributed/" in frame.filename for frame in frames)
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return "; it starts a process group: say with --gpus on how many GPUs" if distributed and alone else ""
