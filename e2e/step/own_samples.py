"""Whether a rank of a distributed step works on samples of its own, or shares them with other ranks."""

from __future__ import annotations

from math import prod

from e2e.step.call_phases import settled_phases
from e2e.step.collective_names import FUNCTIONAL, kind_of
from e2e.step.operator_trace import OperatorTrace, tensors

# What a forward pass exchanges of activations, which parameters (gathered, broadcast) never are. Tokens on their way to
# experts and lookups to their tables (all_to_all) are still a rank's own.
_SHARING = frozenset(("all_reduce", "reduce_scatter", "send", "recv"))
# Smaller ones are figures to be shown: a loss, a norm.
_FIGURES = 4096


def has_own_samples(trace: OperatorTrace) -> bool:
    """Whether no other rank works on the same samples: data parallelism, with or without shards of parameters.

    Ranks that split layers or sequences, or hand activations on, exchange them in the forward pass: the library's own
    tensor parallelism by functional collectives, others by sums, scatters and messages.
    """
    phases = settled_phases(trace.calls)
    for call in trace.calls:
        kind = kind_of(call.name)
        if kind is None or phases[call.id] != "forward":
            continue
        size = max((prod(tensor.shape) for tensor in tensors(call.inputs)), default=0)
        if size > _FIGURES and (kind in _SHARING or call.name.startswith(FUNCTIONAL)):
            return False
    return True
