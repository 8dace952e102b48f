"""Cost models of operators, and descriptions of machines.

::

    import costmodel
    from costmodel.operators.device_work import Gemm

    costmodel.estimate(Gemm(1, m=4096, n=4096, k=4096, dtype="bfloat16"), machine="h100-sxm").seconds

Operators are imported from where they are defined (``costmodel.operators.layers``, ``.device_work``, ``.lookups``).
Nothing is loaded before it is used. docs/api.md has more.
"""

from typing import TYPE_CHECKING

from costmodel.base.lazy_names import lazy_names

__all__ = ["Estimate", "Machine", "ProjectError", "estimate", "load_machine", "machine_names"]

if TYPE_CHECKING:
    from costmodel.base.errors import ProjectError
    from costmodel.commands.costmodel_api import estimate, machine_names
    from costmodel.cost_model import Estimate
    from costmodel.machines.machine_file import load_machine
    from costmodel.machines.machine_records import Machine
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Estimate": "costmodel.cost_model",
            "Machine": "costmodel.machines.machine_records",
            "ProjectError": "costmodel.base.errors",
            "estimate": "costmodel.commands.costmodel_api",
            "load_machine": "costmodel.machines.machine_file",
            "machine_names": "costmodel.commands.costmodel_api",
        },
    )
