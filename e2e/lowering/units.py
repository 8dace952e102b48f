"""Which calls are units of host work, and on which thread they are.

Ranges that a person or a library marked (``ProfilerStep#3``, ``Optimizer.step#AdamW.step``) are no units; what is
inside them is. The autograd engine's ``evaluate_function`` is one, as in the traces from which overheads are fitted.
"""

from __future__ import annotations

from e2e.lowering.generated_kernels import is_generated
from e2e.step.collective_names import ANNOTATION
from e2e.step.operator_trace import OperatorCall
from e2e.step.rank_writer import AUTOGRAD, MAIN

THREAD_NAMES = {0: MAIN, 1: AUTOGRAD}


def thread_of(call: OperatorCall) -> str:
    """The name of the thread on which ``call`` was made."""
    return THREAD_NAMES.get(call.thread, f"thread {call.thread}")


def is_annotation(call: OperatorCall) -> bool:
    """A marked range, not an operator: operators have a namespace, kernels of a compiler a backend."""
    named = "::" in call.name or call.name.startswith(("cuda", "hip", ANNOTATION))
    return not named and not is_generated(call)
