"""``costmodel.estimate``: the models behind it, one operator or several, any kind of machine."""

from __future__ import annotations

import pytest

import costmodel
from costmodel.base.errors import InputError, MachineError, UnsupportedOperatorError
from costmodel.cpu.roofline import RooflineModel
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.machine_file import PACKAGED_DIRECTORY
from costmodel.operators.device_work import Gemm
from costmodel.operators.layers import Conv2d, Dense

PRODUCT = Gemm(1, m=512, n=512, k=512, dtype="bfloat16")
CONV = Conv2d(batch=1, in_channels=16, height=12, width=12, out_channels=16, kernel=(1, 1))


def test_a_gpu_is_priced_by_the_models_of_its_kernels():
    machine = costmodel.load_machine("h100-sxm")
    expected = gpu_cost_model(machine).estimate([PRODUCT, CONV])
    assert costmodel.estimate([PRODUCT, CONV]) == costmodel.estimate((PRODUCT, CONV), machine) == expected
    assert costmodel.estimate(CONV, "h100-sxm") == expected[1] and isinstance(expected[1], costmodel.Estimate)
    assert costmodel.estimate([], "h100-sxm") == []


def test_a_cpu_is_priced_by_the_roofline():
    machine = costmodel.load_machine("xeon-amx-2c")
    dense = Dense(1, 512, 512)
    for threads, asked in ((machine.max_threads, None), (1, 1)):
        expected = RooflineModel(machine, threads).estimate([dense])[0]
        assert costmodel.estimate(dense, "xeon-amx-2c", threads=asked) == expected
    assert costmodel.estimate(dense, PACKAGED_DIRECTORY / "cpu" / "xeon-amx-2c.yaml").seconds > 0


def test_names_are_those_that_load():
    names = costmodel.machine_names()
    assert {"h100-sxm", "xeon-amx-2c"} <= set(names) and list(names) == sorted(names)
    assert {costmodel.load_machine(name).kind for name in names} == {"cpu", "gpu"}


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ((PRODUCT, "h100"), MachineError, "machine 'h100' may be h100-pcie"),
        ((PRODUCT, "xeon-amx-2c"), UnsupportedOperatorError, "does not cover operator Gemm"),
        ((Dense(1, 2, 3), "h100-sxm"), UnsupportedOperatorError, "no cost model for operator Dense"),
        (("gemm", "h100-sxm"), UnsupportedOperatorError, "no cost model for operator str"),
    ],
)
def test_what_cannot_be_priced_is_said(asked, kind, words):
    with pytest.raises(kind, match=words) as caught:
        costmodel.estimate(*asked)
    assert isinstance(caught.value, costmodel.ProjectError)


def test_threads_are_those_of_a_cpu():
    with pytest.raises(InputError, match="t4 is a GPU"):
        costmodel.estimate(PRODUCT, "t4", threads=2)
    with pytest.raises(MachineError, match="99"):
        costmodel.estimate(CONV, "xeon-amx-2c", threads=99)
