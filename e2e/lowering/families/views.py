"""Operators without launches: views, metadata, allocation. They cost only host time (T5)."""

from __future__ import annotations

ALIASES = (
    ("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "expand", "expand_as", "slice", "select")
    + ("split", "split_with_sizes", "unsafe_split", "chunk", "narrow", "unsqueeze", "squeeze", "as_strided", "detach")
    + ("alias", "unbind", "unflatten", "flatten", "view_as", "reshape", "movedim", "swapaxes", "diagonal", "unfold")
    + ("lift_fresh", "lift", "view_as_real", "view_as_complex", "numpy_T", "mT", "adjoint", "swapdims", "squeeze_")
    + ("unsqueeze_", "transpose_", "t_", "detach_", "as_strided_", "set_", "resize_", "set_data", "requires_grad_")
    + ("broadcast_to", "broadcast_tensors", "atleast_1d", "atleast_2d", "tensor_split", "hsplit", "vsplit", "real")
    + (
        "imag",
        "conj",
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "_conj",
        "resolve_conj",
        "resolve_neg",
        "positive",
        "moveaxis",
        "expand_copy_",
        "meshgrid",
        "_indices",
        "_values",
        "indices",
        "values",
        "_unpack_dual",
    )
)
ALLOCATIONS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_empty_affine_quantized",
    "empty_permuted",
    "_efficientzerotensor",
)
METADATA = (
    ("result_type", "size", "stride", "numel", "is_nonzero", "item", "sym_size", "sym_stride", "dim", "is_same_size")
    + ("_has_compatible_shallow_copy_type", "_version", "is_pinned", "record_stream", "_assert_async", "equal")
    + ("can_cast", "_nested_tensor_size", "is_floating_point", "is_complex", "_debug_has_internal_overlap")
    + ("_fused_sdp_choice", "_assert_scalar", "_assert_tensor_metadata", "output_nr", "retain_grad")
)

NO_LAUNCH = frozenset(f"aten::{name}" for name in ALIASES + ALLOCATIONS + METADATA)
# Calls of other namespaces that launch nothing themselves.
QUIET_PREFIXES = ("autograd::", "torch::autograd::", "torch::distributed::", "torch.distributed.", "profiler::")


def launches_nothing(name: str) -> bool:
    """True if calls of ``name`` are known to launch nothing themselves."""
    return name in NO_LAUNCH or name.startswith(QUIET_PREFIXES) or "::" not in name
