"""Recipes of 8-bit training by name: casts, scales and their frequency.

torchao (``float8`` training) casts weights in every pass, Transformer Engine once per step. Delayed scaling uses the
scale of earlier steps and finds the maximum during the cast; scaling by the current tensor reads it twice; scales of
rows, blocks and groups of 32 values are found in the casting kernel. All three products of a linear layer are in 8
bits; the head, the router, attention, norms and the optimizer are unchanged. Block scales: DeepSeek-V3 (arXiv
2412.19437, section 3.3). MX: OCP Microscaling Formats 1.0, on GPUs from Blackwell on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine

Precision = Literal["fp8-tensorwise", "fp8-rowwise", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8"]


@dataclass(frozen=True)
class Recipe:
    """Recipe of 8-bit training."""

    name: Precision
    # Values that share a scale (:mod:`costmodel.operators.scaled_work`).
    scaling: Literal["tensor", "row", "block", "mx"]
    # True if a separate pass searches for the maximum.
    search: bool
    # True if one cast also writes the transposed copy for the gradients; otherwise operands are cast again, in the
    # other direction, when the gradients need them.
    both: bool
    # True if cast weights are kept for a whole step.
    weights_kept: bool
    # True if products of experts are in 8 bits as well.
    experts: bool


# torchao: float8/config.py (recipes tensorwise, rowwise) of pytorch/ao. Transformer Engine: DelayedScaling,
# Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling of transformer_engine/common/recipe.
RECIPES: dict[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("fp8-tensorwise", "tensor", True, False, False, False),
        Recipe("fp8-rowwise", "row", False, False, False, False),
        Recipe("fp8-delayed", "tensor", False, True, True, True),
        Recipe("fp8-current", "tensor", True, True, True, True),
        Recipe("fp8-block", "block", False, True, True, True),
        Recipe("mxfp8", "mx", False, True, True, True),
    )
}


def check_units(name: str | None, machine: Machine) -> None:
    """Raise ``InputError`` if ``machine`` has no units for the recipe ``name``."""
    if name is None or name not in RECIPES:
        return
    if "float8" not in machine.compute:
        known = ", ".join(machine.compute)
        raise InputError(
            f"--precision {name}: {machine.name} has no rate for float8 ({known}); leave it "
            "out, or choose a GPU that has one"
        )
    if RECIPES[name].scaling == "mx" and not machine.chip().architecture.startswith("blackwell"):
        raise InputError(
            f"--precision {name}: {machine.name} has no units for MX formats, which came with Blackwell; choose "
            "fp8-block, or a GPU such as b200-sxm"
        )


def recipe_of(name: str | None, dtype: str) -> Recipe | None:
    """Return the recipe ``name``; raise ``InputError`` if it is unknown or the model is not 16-bit."""
    if name is None:
        return None
    if name not in RECIPES:
        raise InputError(f"precision {name!r} is not known; choose one of {', '.join(get_args(Precision))}")
    if dtype not in ("bfloat16", "float16"):
        raise InputError(f"--precision {name} is for models of 16 bits; give --dtype bfloat16")
    return RECIPES[name]
