"""Check whether each rank of a distributed step works on separate samples, or shares them with other ranks."""

from __future__ import annotations

from math import prod

from e2e.step.call_phases import settled_phases
from e2e.step.collective_names import FUNCTIONAL, kind_of
from e2e.step.operator_trace import OperatorTrace, tensors

# Collectives over activations in a forward pass, which are never used on parameters (gathered, broadcast). Tokens sent
# to experts and lookups sent to their tables (all_to_all) still belong to one rank.
_SHARING = frozenset(("all_reduce", "reduce_scatter", "send", "recv"))
# Largest tensor, in elements, that counts as a figure for display: a loss, a norm.
_FIGURES = 4096


def has_own_samples(trace: OperatorTrace) -> bool:
    """True if no other rank works on the same samples: data parallelism, with or without sharded parameters.

    Ranks that split layers or sequences, or pass on activations, communicate in the forward pass: PyTorch's tensor
    parallelism by functional collectives, others by sums, scatters and messages.
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
