"""Selective recomputation: parts of a layer by their names in Megatron-Core's ``recompute_modules``. Imports
``torch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodel.base.errors import InputError
from e2e.parallelism.layers.pieces import ATTENTIONS, Repeats
from e2e.parallelism.layers.tensor_parallel import ATTENTION, EXPERTS

GATE = "moe::gate"
_UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")


def repeats(names: Sequence[str], layers: Any, source: str) -> Repeats:
    """Return the predicate of the parts ``names`` in ``layers``; raise ``InputError`` for a part, other than attention,
    that no layer has.

    ``core_attn``: attention with all operators of its module itself; ``mla_up_proj``: queries, keys and values of
    latents, and their rotation; ``layernorm``: norms between the parts of a layer; ``mlp``: one without experts;
    ``moe_act``: the activation of experts.
    """
    inside = [{name for name, _ in layer.named_modules()} for layer in layers]
    attention = {block for each in inside for block in ATTENTION if block in each}
    dropouts = {f"{block}.{dropout}" for block in attention for dropout in ("attn_dropout", "dropout")}
    projections = {f"{block}.{name}" for block in attention for name in _UP_PROJECTIONS}
    norms = {name for each in inside for name in each if "." not in name and "norm" in name}
    dense = {place for place, each in enumerate(inside) if "mlp" in each and EXPERTS not in each}
    known: dict[str, tuple[bool, Repeats]] = {
        "core_attn": (True, lambda _, module, __: module in attention or module in dropouts),
        "mla_up_proj": (
            any(projections & each for each in inside),
            lambda _, module, name: module in projections or (module in attention and name not in ATTENTIONS),
        ),
        "layernorm": (bool(norms), lambda _, module, __: module in norms),
        "mlp": (bool(dense), lambda place, module, _: place in dense and module.split(".")[0] == "mlp"),
        "moe_act": (any(EXPERTS in each for each in inside), lambda _, __, name: name == GATE),
    }
    for name in names:
        if not known[name][0]:
            raise InputError(f"{source}: recompute-modules={name}: its layers have no such part; leave it out")
    chosen = [known[name][1] for name in names]
    return lambda place, module, name: any(each(place, module, name) for each in chosen)
