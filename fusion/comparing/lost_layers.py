"""Layers in which a peer is faster; profiles are taken after the timing, and only if needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion.comparing.engines.base import LayerTime, Unavailable
from fusion.comparing.engines.engine_worker import EngineFailed, Worker
from fusion.comparing.layer_table import LayerTable, join_layers, read_nodes
from fusion.model.named_arrays import Arrays

# Duration of the profiled runs in seconds, per engine.
PROFILE_SECONDS = 0.5


@dataclass(frozen=True)
class LostLayers:
    """Layer times against the fastest peer in question with a profile; ``missing``: reasons for peers without one."""

    table: LayerTable | None = None
    missing: tuple[str, ...] = ()


def lost_layers(
    model: Path,
    inputs: Arrays,
    ours: tuple[Worker, float],
    peers: Mapping[str, tuple[Worker, float]],
    asked: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> LostLayers:
    """Compare our layers with those of the fastest peer, if a peer is faster than ours or ``asked`` is set.

    ``ours`` and each of ``peers``: an engine and its median seconds. Engines that fail are closed; none is needed
    afterwards.
    """
    worker, seconds = ours
    order = sorted((name for name in peers if asked or peers[name][1] < seconds), key=lambda name: peers[name][1])
    if not order:
        return LostLayers()
    say("timing layers")
    try:
        own = worker.layers(inputs, PROFILE_SECONDS)
    except (EngineFailed, Unavailable) as error:
        return LostLayers(None, (f"no times of our layers: {error}",))
    missing: list[str] = []
    for name in order:
        try:
            theirs: Sequence[LayerTime] = peers[name][0].layers(inputs, PROFILE_SECONDS)
        except (EngineFailed, Unavailable) as error:
            missing.append(f"no times of the layers of {name}: {error}")
            continue
        return LostLayers(join_layers(name, read_nodes(model), own, theirs, seconds, peers[name][1]), tuple(missing))
    return LostLayers(None, tuple(missing))
