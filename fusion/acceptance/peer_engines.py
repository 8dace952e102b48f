"""Other engines that ``tune --against`` times in turns with the networks that it leaves in question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion.comparing.crew import Crew, NotMeasured
from fusion.comparing.engines.base import EngineWorkload
from fusion.comparing.engines.engine_table import ENGINES, REFERENCE, TUNED, UNFUSED_ENGINE, select_engines
from fusion.comparing.output_errors import errors_json
from fusion.comparing.probes import error_inputs
from fusion.comparing.quantized_file import quantized_file

if TYPE_CHECKING:
    from costmodel.base.say import Say
    from fusion.comparing.engines.engine_worker import Worker

# They are timed in any case, as what they are here.
_OWN = (TUNED, UNFUSED_ENGINE, REFERENCE)


@dataclass(frozen=True)
class HiredPeers:
    """Engines that are loaded; ``rows``: how each runs the model, and the errors of its outputs; ``absent``: why others
    are not.
    """

    workers: Mapping[str, Worker] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    absent: Sequence[NotMeasured] = ()

    @property
    def notes(self) -> list[str]:
        """Why engines that were asked for have no time."""
        return [f"{entry.engine} {entry.status}: {entry.reason}" for entry in self.absent]

    def to_json(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """JSON-able, for ``summary.json``: those that have ``seconds``."""
        return {name: {"median_seconds": seconds[name], **row} for name, row in self.rows.items() if name in seconds}


def peer_names(against: Sequence[str]) -> list[str]:
    """Names of the engines to load besides ours and ONNX Runtime. ``InputError`` for an unknown one."""
    return [spec.name for spec in select_engines(against) if spec.name not in _OWN]


def check_peers(workload: EngineWorkload, against: Sequence[str], quantized: Path | None) -> None:
    """``ProjectError`` for what is known before anything is tuned: an unknown engine, a ``quantized`` file of another
    model or none at all.
    """
    peer_names(against)
    if quantized is not None:
        quantized_file(workload.model, workload.inputs, workload.outputs, quantized, workload.cache)


def hire_peers(
    stack: ExitStack, workload: EngineWorkload, against: Sequence[str], quantized: Path | None, say: Say
) -> HiredPeers:
    """Loads the engines called ``against``, and ONNX Runtime beside them for their errors; they end with ``stack``.

    ``quantized``: as for ``compare``.
    """
    names = peer_names(against)
    if not names:
        return HiredPeers()

    def file_of_integers() -> Path:
        return quantized_file(workload.model, workload.inputs, workload.outputs, quantized, workload.cache)

    with ExitStack() as own:
        crew = Crew(own, workload, error_inputs(workload.inputs), say, file_of_integers)
        for name in (REFERENCE, *names):
            crew.hire(ENGINES[name])
        if REFERENCE in crew.hired:
            crew.hired[REFERENCE].worker.close()
        stack.enter_context(own.pop_all())
    rows = {
        name: {"mode": hired.mode, **errors_json(hired.errors)}
        for name, hired in crew.hired.items()
        if name != REFERENCE
    }
    absent = [entry for entry in crew.absent.values() if entry.engine != REFERENCE]
    return HiredPeers(crew.workers(names), rows, absent)
