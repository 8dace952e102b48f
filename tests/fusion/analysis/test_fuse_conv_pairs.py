"""``FuseConvPairs`` before and after, with and without records, inside pipelines of TVM."""

# ruff: noqa: E402

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from costmodel.base.errors import InputError, MachineError
from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_file import load_machine
from costmodel.operators.layers import FusedConvs
from fusion.analysis.analyzer import analyze
from fusion.analysis.fuse_conv_pairs import FuseConvPairs
from fusion.model.conv_graph import find_sites
from fusion.relax import Canonicalize
from fusion.relax.extract import extract_graph
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import template_for
from schedules.tuning.tuning_records import RecordStore
from tests.fusion.relax_models import CPU, Net, assert_close, inputs_of, kernel_names, module, stock

ROOT = Path(__file__).resolve().parents[3]


class Prices(CostModel):
    """One second for every convolution, ``fused`` seconds for any fused kernel of ``layers`` layers."""

    def __init__(self, fused: float, layers: int = 2) -> None:
        self.fused, self.layers = fused, layers

    def estimate(self, operators):
        return [self._price(operator) for operator in operators]

    def _price(self, operator) -> Estimate:
        seconds = 1.0
        if isinstance(operator, FusedConvs):
            seconds = self.fused if len(operator.convs) == self.layers else 100.0
        return Estimate(seconds, seconds, seconds, "compute", {}, "analytic")


def pair(net, x):
    """A depthwise and a pointwise convolution between operators that are none of our business."""
    x = net(op.tanh(x), "before")
    x = net.relu6(net.depthwise(x, 3, "dw", strides=(2, 2)))
    return net(op.tanh(net.relu6(net.conv(x, 40, name="pw"))), "after")


def two_pairs(net, x):
    x = net.relu6(net.conv(net.relu6(net.depthwise(x)), 40))
    return net(op.add(net.conv(net.relu6(net.depthwise(x)), 40), x))


SHAPE = (2, 24, 9, 7)


def fuse(mod, fused: float = 0.5, **options):
    return FuseConvPairs(cpu=CPU, cost_model=Prices(fused), **options)(mod)


def test_a_pair_becomes_one_kernel_between_conversions():
    before = module(SHAPE, pair)
    assert kernel_names(before) == [
        "relax.tanh", "relax.nn.conv2d", "relax.add", "relax.clip", "relax.nn.conv2d", "relax.add", "relax.clip",
        "relax.tanh",
    ]  # fmt: skip
    after = fuse(before)
    assert kernel_names(after) == [
        "relax.tanh", "to_blocked", "depthwise_pointwise_24x9x7_40x5x4", "to_plain", "relax.tanh",
    ]  # fmt: skip
    relax.analysis.well_formed(after)
    arrays = inputs_of(before)
    assert_close(stock(after, arrays), stock(before, arrays))


def test_the_kernel_is_an_s_tir_function_with_packed_constants():
    after = fuse(module(SHAPE, pair))
    call = next(
        binding.value
        for block in after["main"].body.blocks
        for binding in block.bindings
        if binding.var.name and "depthwise_pointwise" in str(binding.value)
    )
    function = after[call.args[0]]
    assert function.attrs["fusion.template"] == "depthwise-pointwise"
    arguments = [*call.args[1].fields, call]
    assert len(function.params) == len(arguments) == 6
    for parameter, argument in zip(function.params, arguments, strict=True):
        assert [int(size) for size in parameter.shape] == [int(size) for size in argument.ty.shape]
    assert function.attrs["s_tir"]


def test_neighbours_exchange_blocked_tensors_residual_included():
    before = module(SHAPE, two_pairs)
    after = fuse(before)
    names = kernel_names(after)
    assert [name.rstrip("0123456789x_") for name in names[:4]] == [
        "to_blocked", "depthwise_pointwise", "depthwise_pointwise", "to_plain",
    ]  # fmt: skip
    assert len(names) in (4, 5)
    arrays = inputs_of(before)
    assert_close(stock(after, arrays), stock(before, arrays))


def test_what_is_not_worth_fusing_is_untouched():
    before = module(SHAPE, pair)
    tvm.ir.assert_structural_equal(fuse(before, fused=2.5), before)


def test_a_module_without_a_site_is_untouched():
    before = module(SHAPE, lambda net, x: net(op.nn.softmax(net.conv(x, 8, 3), axis=1)))
    tvm.ir.assert_structural_equal(FuseConvPairs(cpu=CPU)(before), before)


def test_weights_that_are_not_constant_are_untouched():
    before = module(SHAPE, lambda net, x, w: net.conv(net(op.nn.conv2d(x, w, groups=24)), 8), (24, 1, 1, 1))
    tvm.ir.assert_structural_equal(fuse(before), before)


def test_every_relax_function_is_rewritten():
    mod = module(SHAPE, pair)
    mod["second"] = mod["main"].with_attr("global_symbol", "second")
    after = fuse(mod)
    for name in ("main", "second"):
        assert "depthwise_pointwise" in str(after[name])


def test_a_pair_in_two_blocks_stays_apart():
    """What the first convolution reads is no more to be seen in the second block."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    net = Net(builder)
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(op.nn.relu(net.depthwise(net(op.tanh(x)))))
        between = net(op.sigmoid(x))
        with builder.dataflow():
            second = builder.emit_output(op.nn.relu(net.conv(first, 40)))
        builder.emit_func_output(relax.Tuple([second, between]))
    before = builder.get()
    after = fuse(before)
    relax.analysis.well_formed(after)
    tvm.ir.assert_structural_equal(after, before)


@pytest.fixture
def records(tmp_path):
    """A store in which fusing pays (0.5 against 2), the second configuration being the best."""
    graph = extract_graph(module(SHAPE, pair))
    (site,) = find_sites(graph, CPU)
    with RecordStore(tmp_path, CPU) as store:
        for node in graph.nodes:
            store.add(node.operator, template_for(node.operator, CPU).space(node.operator, CPU)[0], 1.0)
        space = template_for(site.operator, CPU).space(site.operator, CPU)
        store.add(site.operator, space[0], 0.9)
        store.add(site.operator, space[1], 0.5)
    return tmp_path, site.operator, space[1]


def test_a_database_decides_and_gives_the_configuration(records):
    directory, operator, config = records
    mod = module(SHAPE, pair)
    # The model would refuse; the measurements decide.
    after = FuseConvPairs(directory, cpu=CPU, cost_model=Prices(100.0))(mod)
    (name,) = [name for name in kernel_names(after) if name.startswith("depthwise_pointwise")]
    expected = template_for(operator, CPU).build(operator, config, CPU)
    tvm.ir.assert_structural_equal(after[name].body.block.body, expected.body, map_free_vars=True)
    arrays = inputs_of(mod)
    assert_close(stock(after, arrays), stock(mod, arrays))
    with RecordStore(directory, CPU) as store:
        tvm.ir.assert_structural_equal(FuseConvPairs(store, cpu=CPU)(mod), after, map_free_vars=True)


def test_what_the_database_has_not_measured_is_not_fused(tmp_path, caplog):
    mod = module(SHAPE, pair)
    with caplog.at_level(logging.INFO):
        tvm.ir.assert_structural_equal(FuseConvPairs(tmp_path, cpu=CPU, cost_model=Prices(0.1))(mod), mod)
    assert "dw+pw: not fused: no records of its kernels" in caplog.text


def test_decisions_are_logged_with_both_times(caplog):
    with caplog.at_level(logging.INFO):
        fuse(module(SHAPE, pair))
    assert "dw+pw: fused: 500000.0 us fused, 2000000.0 us apart" in caplog.text


def test_a_machine_decides_by_its_roofline_as_the_analyzer_says():
    cpu = replace(CPU, threads=1)
    for shape in (SHAPE, (1, 24, 56, 56)):
        mod = module(shape, pair)
        (site,) = analyze(extract_graph(mod), load_machine("toy"), cpu).sites
        names = kernel_names(FuseConvPairs(machine="toy", cpu=cpu)(mod))
        assert any(name.startswith("depthwise_pointwise") for name in names) == site.fuse


def test_a_dense_pair_that_saves_nothing_stays_apart(caplog):
    def body(net, x):
        return net(op.nn.relu(net.conv(net(op.nn.relu(net.conv(x, 256, 3))), 256, 3)))

    mod = module((1, 256, 7, 7), body)
    with caplog.at_level(logging.INFO):
        tvm.ir.assert_structural_equal(FuseConvPairs(machine="xeon-amx-2c", cpu=CPU)(mod), mod)
    assert "not fused: it would save nothing" in caplog.text


def test_bad_arguments_are_refused_when_the_pass_is_made(tmp_path):
    with pytest.raises(MachineError, match="absent"):
        FuseConvPairs(machine="absent", cpu=CPU)
    with pytest.raises(MachineError, match="threads"):
        FuseConvPairs(machine="toy", cpu=replace(CPU, threads=64))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="needs? a directory"):
        FuseConvPairs(tmp_path / "file", cpu=CPU)
    with pytest.raises(InputError, match="no such directory of tuning records"):
        FuseConvPairs(tmp_path / "absent", cpu=CPU)


def test_a_build_directory_is_told_from_its_records(records):
    directory, *_ = records
    (directory.parent / "build").mkdir()
    directory.rename(directory.parent / "build" / "records")
    with pytest.raises(InputError, match="its tuning records are in .*build/records"):
        FuseConvPairs(str(directory.parent / "build"), cpu=CPU)
    assert FuseConvPairs(directory.parent / "build" / "records", cpu=CPU).store is not None


def test_a_row_that_cannot_be_shared_is_fused_all_the_same():
    """With 8 lanes every split of its 10 output blocks computes the depthwise part, most of the work, twice."""
    if CPU.lanes < 8:
        pytest.skip("needs AVX2")
    avx2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)

    def body(net, x):
        row = net(op.nn.conv2d(x, net.weight(64, 1, 1, 31), groups=64, padding=(0, 15, 0, 15)))
        return net.conv(row, 80)

    before = module((1, 64, 1, 1000), body)
    after = FuseConvPairs(cpu=avx2, cost_model=Prices(0.5))(before)
    assert any(name.startswith("depthwise_pointwise") for name in kernel_names(after))
    arrays = inputs_of(before)
    assert_close(stock(after, arrays, avx2), stock(before, arrays))


def test_it_works_in_a_users_own_pipeline():
    mod = module(SHAPE, two_pairs)
    pipeline = tvm.transform.Sequential(
        [
            Canonicalize(),
            FuseConvPairs(cpu=CPU, cost_model=Prices(0.5)),
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
        ]
    )
    with CPU.tvm_target():
        after = pipeline(mod)
    arrays = inputs_of(mod)
    assert_close(stock(after, arrays), stock(mod, arrays))


def test_a_module_of_torch_export():
    torch = pytest.importorskip("torch")
    from tvm.relax.frontend.torch import from_exported_program

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.depthwise = torch.nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24, bias=False)
            self.first_norm = torch.nn.BatchNorm2d(24)
            self.pointwise = torch.nn.Conv2d(24, 40, 1, bias=False)
            self.second_norm = torch.nn.BatchNorm2d(40)

        def forward(self, x):
            x = torch.nn.functional.hardswish(self.first_norm(self.depthwise(x)))
            return torch.nn.functional.relu6(self.second_norm(self.pointwise(x)))

    torch.manual_seed(0)
    block = Block().eval()
    image = torch.randn(*SHAPE)
    with torch.no_grad():
        expected = block(image).numpy()
        program = torch.export.export(block, (image,)).run_decompositions()
    mod = from_exported_program(program, unwrap_unit_return_tuple=True)
    after = tvm.transform.Sequential([Canonicalize(), FuseConvPairs(cpu=CPU, cost_model=Prices(0.5))])(mod)
    assert kernel_names(after) == ["to_blocked", "depthwise_pointwise_24x9x7_40x5x4", "to_plain"]
    assert_close(stock(after, [image.numpy()]), [expected])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_example_runs():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TVM_NUM_THREADS": "2"}
    command = [sys.executable, "examples/fuse_conv_pairs.py", "--machine", "toy"]
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    before, after = run.stdout.split("after: ")
    assert "conv2d" in before and ("depthwise_pointwise" in after or "pointwise_depthwise" in after)
    difference = float(run.stdout.split("largest difference: ")[1].split()[0])
    assert difference < 1e-4 and np.isfinite(difference)
