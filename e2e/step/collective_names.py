"""Names of collectives and point-to-point calls: the simulator's kinds, and the names in frameworks and profiles.

Kinds are those of :class:`e2e.step.execution_graph.Collective`.
"""

from __future__ import annotations

from functools import lru_cache

EAGER, FUNCTIONAL = "c10d::", "_c10d_functional::"
# Prefixes of annotations around NCCL calls and of NCCL kernels.
ANNOTATION, KERNELS = "nccl:", ("nccl", "void nccl")
WAIT_TENSOR, SCATTER = f"{FUNCTIONAL}wait_tensor", f"{EAGER}scatter_"
POINT_TO_POINT = frozenset({"send", "recv"})

# Short name without a trailing ``_`` -> kind: below ``c10d::`` in eager mode, below ``_c10d_functional::``, in
# annotations and metadata of profiles. NCCL builds ``gather`` and ``scatter`` from sends and receives: the root's links
# carry as much as in an all-gather of the parts and in a broadcast of the whole.
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "scatter": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}

# Eager calls whose first argument is the output and whose second is the input; for all others the first is the input.
OUTPUT_FIRST = frozenset(
    f"{EAGER}{name}"
    for name in (
        "allgather_",
        "_allgather_base_",
        "allgather_into_tensor_coalesced_",
        "gather_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "scatter_",
    )
)

# Kind -> eager call, as named in profiles and in tables of host overheads.
EAGER_CALLS = {
    "all_reduce": f"{EAGER}allreduce_",
    "all_gather": f"{EAGER}_allgather_base_",
    "reduce_scatter": f"{EAGER}_reduce_scatter_base_",
    "all_to_all": f"{EAGER}alltoall_base_",
    "send": f"{EAGER}send",
    "recv": f"{EAGER}recv_",
    "barrier": f"{EAGER}barrier",
}

# Functional form -> eager call made by its C++ body.
BELOW_FUNCTIONAL = {
    "all_reduce": "allreduce_",
    "all_reduce_": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "all_reduce_coalesced_": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "broadcast_": "broadcast_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_out": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_out": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
}

# Operators of communication inside a layer, as in captures of parallel models -> kind and ranks that take part: ``tp``
# shares the layer, ``cp`` the sequences, ``ep`` divides the experts, also split into the ranks inside a node and the
# ranks at the same place in every node. ``GATHERED_AGAIN`` gathers data that the next kernel does not need yet:
# Megatron-LM gathers the input of a product again while it computes the gradient of that input.
LIBRARY = "parallel"
GATHERED_AGAIN = f"{LIBRARY}::all_gather_again"
# Other communication that the next kernel does not wait for: keys of other ranks during the block of the rank's own
# keys, and gradients of keys sent during the next block.
EARLY = frozenset((GATHERED_AGAIN, f"{LIBRARY}::context_all_gather_early", f"{LIBRARY}::context_all_to_all"))
INSIDE_NODES, ACROSS_NODES = "ep inside nodes", "ep across nodes"
INSIDE_LAYERS = {
    f"{LIBRARY}::all_reduce": ("all_reduce", "tp"),
    f"{LIBRARY}::all_gather": ("all_gather", "tp"),
    GATHERED_AGAIN: ("all_gather", "tp"),
    f"{LIBRARY}::reduce_scatter": ("reduce_scatter", "tp"),
    f"{LIBRARY}::context_all_gather": ("all_gather", "cp"),
    f"{LIBRARY}::context_reduce_scatter": ("reduce_scatter", "cp"),
    f"{LIBRARY}::context_all_gather_early": ("all_gather", "cp"),
    f"{LIBRARY}::context_all_to_all": ("all_to_all", "cp"),
    f"{LIBRARY}::context_heads": ("all_to_all", "cp"),
    f"{LIBRARY}::expert_all_to_all": ("all_to_all", "ep"),
    f"{LIBRARY}::expert_inside": ("all_to_all", INSIDE_NODES),
    f"{LIBRARY}::expert_across": ("all_to_all", ACROSS_NODES),
}


@lru_cache(maxsize=4096)  # traces contain many distinct annotations
def kind_of(name: str) -> str | None:
    """Return the kind of the collective that the operator or annotation ``name`` starts, or None for any other name."""
    for namespace in (EAGER, FUNCTIONAL, ANNOTATION):
        if name.startswith(namespace):
            return kind_of_short(name.removeprefix(namespace))
    return None


def kind_of_short(name: str) -> str | None:
    """Return the kind of a collective by its name without namespace, as in profiles, or None."""
    return _KINDS.get(name.removesuffix("_"))


def same_kind(one: str, other: str) -> bool:
    """True if two calls can be sides of one collective: a send matches a receive, any other kind itself."""
    return one != other if {one, other} <= POINT_TO_POINT else one == other
