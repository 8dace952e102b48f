"""Where a prediction's operators come from: a built-in model, a configuration, the user's script or a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from e2e.operators import OperatorTrace


@dataclass(frozen=True)
class Source:
    """Exactly one of ``model`` (built-in name), ``model_config`` (Hugging Face file), ``script`` (``FILE.py:FUNCTION``)
    and ``trace`` (execution trace). The rest describes the step; a trace brings its own. ``None`` for a size: the
    default of the script's function; else a batch of 1 and as many tokens as the model is made for, 1024 at most.
    """

    model: str | None = None
    model_config: Path | None = None
    script: str | None = None
    trace: Path | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    mode: Any = "train"
    dtype: Any = "float32"
    attention: Any = "eager"


def read_source(source: Source) -> OperatorTrace:
    """The operators of one step. ``InputError`` unless exactly one source is given."""
    given = [name for name in ("model", "model_config", "script", "trace") if getattr(source, name) is not None]
    if len(given) != 1:
        found = f", got {' and '.join(given)}" if given else ""
        raise InputError(f"give exactly one of --model, --model-config, --script and --trace{found}")
    if source.trace is not None:
        from e2e.traces.chakra import is_chakra, read_chakra
        from e2e.traces.steps import last_step
        from e2e.traces.survey import read_last_step

        return last_step(read_chakra(source.trace)) if is_chakra(source.trace) else read_last_step(source.trace)
    return _captured(source)


def _captured(source: Source) -> OperatorTrace:
    from e2e.capture.catalog import build, build_from_file
    from e2e.capture.options import CaptureOptions
    from e2e.capture.script import Fallback, capture_script, load_script
    from e2e.capture.session import capture

    options = CaptureOptions(mode=source.mode, dtype=source.dtype, attention=source.attention)
    length = source.sequence_length
    size = Fallback(1) if source.batch_size is None else source.batch_size
    if source.script is not None:
        parameters = {"batch_size": size, "sequence_length": length}
        return capture_script(load_script(source.script, options, **parameters), options)
    if source.model_config is not None:
        return capture(build_from_file(source.model_config, size, length, options), options)
    assert source.model is not None
    return capture(build(source.model, size, length, options), options)
