"""Table of operator name -> function that describes its device work."""

from __future__ import annotations

from e2e.lowering.families import (
    convolutions,
    element_wise,
    embedding_operators,
    expert_operators,
    fbgemm,
    megatron_operators,
    movement,
    normalizations,
    optimizer_operators,
    products,
    recurrent_networks,
    reductions,
    scaled_operators,
    sharded_parameters,
    stack_operators,
)
from e2e.lowering.families.pooling import TABLE as POOLING_TABLE
from e2e.lowering.families.scan_operators import TABLE as LINEAR_ATTENTION_TABLE
from e2e.lowering.families.work import Lowering

TABLE: dict[str, Lowering] = {
    **element_wise.TABLE,
    **products.TABLE,
    **convolutions.TABLE,
    **normalizations.TABLE,
    **POOLING_TABLE,
    **embedding_operators.TABLE,
    **fbgemm.TABLE,
    **reductions.TABLE,
    **movement.TABLE,
    **optimizer_operators.TABLE,
    **sharded_parameters.TABLE,
    **megatron_operators.TABLE,
    **stack_operators.TABLE,
    **expert_operators.TABLE,
    **scaled_operators.TABLE,
    **recurrent_networks.TABLE,
    **LINEAR_ATTENTION_TABLE,
}

# Operators that launch their own kernels in addition to those of nested calls (which clear, sum or count for them). Any
# other operator with a nested launch only passes its arguments on.
KEEP_OWN_WORK = frozenset(
    (
        *fbgemm.TABLE,
        "aten::nll_loss_backward",
        "aten::nll_loss2d_backward",
        "aten::embedding_dense_backward",
        "aten::_embedding_bag_dense_backward",
        "aten::convolution_backward",
        "aten::max_pool2d_with_indices_backward",
        "aten::native_layer_norm_backward",
        "aten::_index_put_impl_",
        "aten::nonzero",
        "aten::_adaptive_avg_pool2d_backward",
        "aten::avg_pool2d_backward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::native_group_norm_backward",
        "aten::mse_loss",
        "aten::binary_cross_entropy",
    )
)
