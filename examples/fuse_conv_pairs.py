"""``FuseConvPairs`` in a pipeline of one's own, on a model from ``torch.export``.

    python examples/fuse_conv_pairs.py [--machine NAME] [--records DIRECTORY]

Without records the roofline of the machine decides (default: this CPU, measured on first use); with the ``records``
directory of ``python -m fusion tune`` exactly what measured faster is fused. Needs the extras ``fusion`` and ``peers``.
"""

from __future__ import annotations

import argparse
import logging

import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from fusion.analysis.fuse_conv_pairs import FuseConvPairs
from fusion.relax import Canonicalize
from schedules.contract.cpu_target import host_target
from schedules.contract.kernel_compilation import pass_context


def network() -> torch.nn.Module:
    """Two depthwise-separable blocks of a MobileNet."""

    def separable(inputs: int, outputs: int, stride: int) -> list[torch.nn.Module]:
        return [
            torch.nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            torch.nn.BatchNorm2d(inputs),
            torch.nn.ReLU6(),
            torch.nn.Conv2d(inputs, outputs, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU6(),
        ]

    torch.manual_seed(0)
    model = torch.nn.Sequential(*separable(32, 64, 1), *separable(64, 128, 2), torch.nn.Flatten()).eval()
    for layer in model:
        if isinstance(layer, torch.nn.BatchNorm2d):  # as if trained: statistics that are not 0 and 1
            torch.nn.init.normal_(layer.running_mean, std=0.1)
            torch.nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model


def calls(mod: tvm.IRModule) -> str:
    """The operators and kernels that ``main`` calls, in order."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                call = binding.value
                names.append(call.args[0].name_hint if call.op.name == "relax.call_tir" else call.op.name)
    return ", ".join(name.removeprefix("relax.") for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="name or YAML file of a machine; default: this CPU")
    parser.add_argument("--records", help="directory of tuning records")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    model, image = network(), torch.randn(1, 32, 56, 56)
    program = torch.export.export(model, (image,)).run_decompositions()
    mod = Canonicalize()(from_exported_program(program, unwrap_unit_return_tuple=True))
    print("before:", calls(mod))

    target = host_target().tvm_target()
    fuse = FuseConvPairs(options.records, machine=options.machine)
    with target:
        fused = fuse(mod)
        print("after:", calls(fused))
        # Any pipeline may follow; this is TVM's own. The settings keep the kernels' sums in registers.
        with pass_context():
            executable = tvm.compile(relax.get_pipeline("zero")(fused), target)

    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(image.numpy())).numpy()
    with torch.no_grad():
        difference = (torch.from_numpy(result) - model(image)).abs().max().item()
    print("largest difference:", difference)


if __name__ == "__main__":
    main()
