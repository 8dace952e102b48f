"""Kernels of several networks are compiled once, several at a time, and linked into each."""

# ruff: noqa: E402

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

tvm = pytest.importorskip("tvm")
from tvm.relax import op
from tvm.tirx import PrimFunc

from costmodel.base.errors import OutputError
from fusion.model.conv_graph import unfused_plan
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import KernelObjects, build_executable
from schedules.kernels.template_table import template_for
from tests.fusion.relax_models import CPU, assert_close, inputs_of, module


def network(width: int):
    """Two equal layers, one of ``width``, and a softmax that no template covers."""

    def body(net, x):
        first = net.conv(x, 32, name="first")
        second = net.conv(first, 32, name="second")
        return net(op.nn.softmax(net.conv(second, width, 3, name="third"), axis=1))

    mod = module((1, 32, 12, 12), body)
    plan = unfused_plan(extract_graph(mod))
    configs = {each: template_for(each, CPU).space(each, CPU)[0] for each in plan.operators}
    return mod, lower(mod, plan, configs, CPU)


def test_a_network_of_linked_kernels_computes_the_same(tmp_path):
    mod, lowered = network(48)
    objects = KernelObjects(tmp_path / "kernels", CPU, threads=2)
    linked, alone = build_executable(lowered, CPU, objects), build_executable(lowered, CPU)
    arrays = inputs_of(mod)
    assert_close(linked(*arrays), alone(*arrays))
    assert linked.memory == alone.memory and linked.leftovers == alone.leftovers
    linked.export_library(tmp_path / "model.so")
    loaded = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    assert_close((loaded["main"](*map(tvm.runtime.tensor, arrays)).numpy(),), alone(*arrays))


def test_only_what_is_new_is_compiled(tmp_path):
    objects = KernelObjects(tmp_path, CPU)
    build_executable(network(48)[1], CPU, objects)
    first = set(tmp_path.iterdir())
    assert objects.seconds > 0
    build_executable(network(48)[1], CPU, objects)
    assert set(tmp_path.iterdir()) == first
    build_executable(network(64)[1], CPU, objects)
    more = {path.name.rpartition("_")[0].rpartition("_")[0] for path in set(tmp_path.iterdir()) - first}
    assert more and not any("32x12x12_32x12x12" in name for name in more)  # the 1x1 layers are there already


def test_a_kernel_for_which_there_is_no_room_is_told(tmp_path):
    """LLVM itself would end the process, from one of the threads."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("good")
        x = T.arg("x", T.buffer((4,), "float32"))
        T.buffer_store(x, T.float32(0), [0])
    (path,) = [each.path for each in KernelObjects(tmp_path / "a", CPU).compile({"good": builder.get()}).values()]
    assert path.read_bytes().startswith(b"\x7fELF")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / path.name).symlink_to("/dev/full")
    with pytest.raises(OutputError, match="a compiled kernel cannot be written: No space left on device"):
        KernelObjects(tmp_path / "full", CPU).compile({"good": builder.get()})


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("bad")
        x = T.arg("x", T.buffer((4,), "float32"))
        T.evaluate(T.call_extern("int32", "no_such_function", x[0]))
    objects = KernelObjects(tmp_path / "a-file" / "below", CPU)
    (tmp_path / "a-file").write_text("")
    with pytest.raises(OutputError, match="a compiled kernel cannot be written: Not a directory"):
        objects.compile({"bad": builder.get()})


def test_a_job_that_ends_compiles_no_more(tmp_path):
    objects = KernelObjects(tmp_path, CPU)
    objects.stop()
    kernels = {name.name_hint: each for name, each in network(48)[1].functions.items() if isinstance(each, PrimFunc)}
    with pytest.raises(CancelledError):
        objects.compile(kernels)
    assert kernels and not list(tmp_path.iterdir())


def test_a_kernel_of_many_fused_operators_has_a_file_of_a_name_that_fits(tmp_path):
    """TVM joins the names of what it fuses: a concatenation of eight pieces of a TensorFlow model had 300 letters."""
    function = next(each for each in network(48)[1].functions.values() if isinstance(each, PrimFunc))
    made = KernelObjects(tmp_path, CPU).compile({"fused_concatenate" * 20: function})
    (kernel,) = made.values()
    assert kernel.path.is_file() and kernel.symbol.startswith("fused_concatenate")
