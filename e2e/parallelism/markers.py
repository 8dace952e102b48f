"""Names under which communication inside a layer appears in a capture: the collective, and the ranks that take part.

A name that ends in ``_again`` gathers what the next kernel does not need yet: Megatron-LM gathers the input of a
product anew while it computes the gradient of that input.

``tp``: that share the layer; ``cp``: that share the sequences; ``ep``: among which the experts are divided.
"""

from __future__ import annotations

MARKERS = {
    "parallel::all_reduce": ("all_reduce", "tp"),
    "parallel::all_gather": ("all_gather", "tp"),
    "parallel::all_gather_again": ("all_gather", "tp"),
    "parallel::reduce_scatter": ("reduce_scatter", "tp"),
    "parallel::context_all_gather": ("all_gather", "cp"),
    "parallel::context_reduce_scatter": ("reduce_scatter", "cp"),
    "parallel::expert_all_to_all": ("all_to_all", "ep"),
}
