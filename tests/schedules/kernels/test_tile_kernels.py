"""Kernels in the tile registers of AMX: against the reference, by an emulation that refuses what the CPU refuses; what
LLVM makes of them for Sapphire Rapids.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.operators.layers import Dense, Epilogue, FusedConvs
from schedules.contract.cpu_target import CpuTarget, flags_of_mcpu, host_target, target_with, tiles_refused
from schedules.contract.kernel_compilation import compile_function, compile_kernel
from schedules.contract.tile_operations import TILE_BLOCKS, TileNumbers, tile_configuration
from schedules.kernels.pointwise_kernel import TilePointwiseKnobs
from schedules.kernels.template_table import template_for
from schedules.loops.tile_products import tile_shapes
from schedules.measuring.kernel_verification import WrongValues, make_case
from tests.schedules.awkward_operators import AWKWARD, stored_as
from tests.schedules.kernel_cases import conv

HOST = host_target(2)
# What kernels are made for; they run on the CPU at hand, where their instructions are emulated.
FLAGS = ("avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")
SAPPHIRE_RAPIDS = CpuTarget(16, 32, "sapphirerapids", FLAGS, 2, 48 * 1024, 2 * 1024 * 1024)
BIAS, RELU6 = Epilogue(bias=True), Epilogue(bias=True, activation="relu6")
RESIDUAL = Epilogue(bias=True, residual="before_activation")

LAYERS = {
    "1x1": conv(1, 40, 7, 6, 40, 1, epilogue=RELU6),
    "1x1, one block, few pixels": conv(1, 16, 3, 3, 16, 1, epilogue=BIAS),
    "1x1, batch, residual": conv(2, 48, 5, 9, 72, 1, epilogue=RESIDUAL),
    "1x1, five blocks, odd channels": conv(1, 71, 8, 8, 33, 1, epilogue=BIAS),
    "1x1, stride 2": conv(1, 40, 9, 8, 24, 1, 2, epilogue=BIAS),
    "3x3": conv(1, 24, 9, 20, 40, 3, epilogue=RELU6),
    "3x3, short rows": conv(1, 70, 7, 5, 33, 3, epilogue=RESIDUAL),
    "3x3, stride 2, one-sided padding": conv(1, 16, 8, 18, 24, 3, 2, (0, 0, 1, 1), epilogue=BIAS),
    "3x3, without padding": conv(2, 32, 7, 21, 16, 3, 1, (0, 0, 0, 0), epilogue=BIAS),
    "5x5, dilated": conv(1, 20, 12, 11, 16, 5, 1, (4, 4, 4, 4), dilation=(2, 2), epilogue=BIAS),
    "window larger than the image": conv(1, 33, 3, 4, 16, 7, 1, (3, 3, 3, 3), epilogue=BIAS),
    "dense": Dense(20, 70, 40, RELU6),
    "dense, whole tiles, residual": Dense(33, 128, 24, RESIDUAL),
    "dense, few features, few outputs": Dense(5, 13, 10, BIAS),
}
PREPARED = (
    "1x1 behind a gate",
    "1x1 behind a batch norm and a ReLU",
    "1x1 behind a gate and an activation",
    "3x3 behind a batch norm and a ReLU",
    "3x3, stride 2, behind a leaky ReLU",
    "1x1, stride 2, behind a batch norm and a ReLU",
    "5x5 on 3x3 pixels behind a batch norm",
)


def tile_configs(operator, cpu=SAPPHIRE_RAPIDS):
    """Configurations that use tiles, the cheapest first."""
    template = template_for(operator, cpu)
    return template, [config for config in template.space(operator, cpu) if "tile_rows" in config]


def chosen(configs):
    """The cheapest of every depth; of two depths and more the others with another shape of blocks each."""
    found, shapes = {}, set()
    for config in configs:
        shape = config["row_tiles"], config["out_blocks"]
        if config.get("depth_blocks") not in found and (not found or shape not in shapes or shape == (1, 1)):
            found[config.get("depth_blocks")] = config
            shapes.add(shape)
    return list(found.values())


def run(operator, template, config, change=lambda case: None):
    own = template.for_config(config)
    case = make_case(operator, own, SAPPHIRE_RAPIDS, copies=1)
    change(case)
    compile_kernel(own.build(operator, config, SAPPHIRE_RAPIDS), HOST, emulated=True)(*case.rotation[0])
    case.verify()


@pytest.mark.parametrize(("dtype", "name"), one_in(4, itertools.product(("bfloat16", "int8"), LAYERS)))
def test_kernel_equals_the_reference(name, dtype):
    operator = stored_as(LAYERS[name], dtype) if dtype == "bfloat16" else replace(LAYERS[name], dtype="int8")
    if dtype == "int8" and operator.epilogue.activation is not None:
        operator = replace(operator, epilogue=BIAS)  # an activation of bytes is part of their bounds
    template, configs = tile_configs(operator)
    for config in chosen(configs):
        run(operator, template, config)


@pytest.mark.parametrize("name", one_in(2, PREPARED))
def test_what_is_prepared_is_laid_out_in_rows(name):
    operator = stored_as(AWKWARD[name], "bfloat16")
    template, configs = tile_configs(operator)
    run(operator, template, configs[0])


PAIRS = ("depthwise-pointwise", "pointwise-depthwise")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_with_a_depthwise_layer(kind, dtype):
    depthwise = conv(1, 72, 9, 7, 72, 3, 1, groups=72, epilogue=BIAS)
    if kind == "depthwise-pointwise":
        operator = FusedConvs((depthwise, conv(1, 72, 9, 7, 40, 1, epilogue=RESIDUAL)))
    else:
        operator = FusedConvs((conv(1, 40, 9, 7, 72, 1, epilogue=BIAS), replace(depthwise, stride=(2, 2))))
    operator = stored_as(operator, dtype)
    assert operator.kind == kind
    template, configs = tile_configs(operator)
    for config in chosen(configs):
        run(operator, template, config)


@pytest.mark.parametrize("shape", TILE_BLOCKS, ids=str)
def test_every_block_of_tiles(shape):
    """Of a layer that is large enough for each."""
    operator = stored_as(conv(1, 40, 8, 8, 64, 1, epilogue=BIAS), "bfloat16")
    knobs = TilePointwiseKnobs(*shape, tile_rows=13, depth_blocks=2, pixel_block=60, channel_tasks=1, pixel_tasks=1)
    run(operator, template_for(operator, SAPPHIRE_RAPIDS), knobs._asdict())


@pytest.mark.parametrize("name", ["1x1", "3x3", "dense"])
def test_a_wrong_weight_is_noticed(name):
    operator = stored_as(LAYERS[name], "bfloat16")
    template, configs = tile_configs(operator)

    def swap(case):
        weight = case.rotation[0][1]
        values = weight.numpy()
        weight.copyfrom(np.ascontiguousarray(values[..., ::-1]))

    with pytest.raises(WrongValues, match="instead of"):
        run(operator, template, configs[0], swap)


def test_a_product_of_tiles_that_do_not_fit_ends_the_process():
    """As on the CPU: an emulation that took any shape would prove nothing of the configuration."""
    script = """
import sys
sys.path[:0] = sys.argv[1:]
import schedules.loops.tile_products as tiles
from tests.schedules.kernels import test_tile_kernels as test
right = tiles.tile_configuration
operator = test.stored_as(test.LAYERS["1x1"], "bfloat16")
template, configs = test.tile_configs(operator)
config = next(each for each in configs if each["depth_blocks"] == 2)
tiles.tile_configuration = lambda *given: [*right(*given)[:13], 0x01010101, 0, 0]
print("compiled", flush=True)
test.run(operator, template, config)
print("survived")
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]
    done = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, timeout=120)
    assert "compiled" in done.stdout and "survived" not in done.stdout and done.returncode < 0, done.stderr


def assembly(operator, emulated=False, **knobs):
    template, configs = tile_configs(operator)
    config = next(each for each in configs if knobs.items() <= each.items())
    function = template.for_config(config).build(operator, config, SAPPHIRE_RAPIDS)
    return compile_function(function, SAPPHIRE_RAPIDS, emulated).mod.inspect_source("asm")


@pytest.mark.parametrize(
    ("name", "dtype", "instruction"),
    [("1x1", "bfloat16", "tdpbf16ps"), ("3x3", "int8", "tdpbusd"), ("dense", "bfloat16", "tdpbf16ps")],
)
def test_instructions_are_the_cpus(name, dtype, instruction):
    operator = replace(LAYERS[name], dtype=dtype)
    native = assembly(operator)
    for each in (instruction, "ldtilecfg", "tilezero", "tileloadd", "tilestored", "tilerelease"):
        assert each in native, each
    assert "fusion_tile" not in native.replace("fusion_request_tiles", ""), "calls are inlined"
    emulated = assembly(operator, emulated=True)
    assert instruction not in emulated and "fusion_request_tiles" not in emulated


def test_products_and_as_many_loads_stand_in_the_loop():
    """Two by two tiles of sums: and nothing else that touches memory, sums stay in their tiles."""
    text = assembly(replace(conv(1, 1024, 14, 14, 256, 1), dtype="bfloat16"), row_tiles=2, out_blocks=2, depth_blocks=2)
    blocks = re.findall(r"^(\.LBB\d+_\d+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    loops = [body.partition(f"\t{label}\n") for label, body in blocks]
    inner = [body for body, again, _ in loops if again and "tdpbf16ps" in body]
    assert len(inner) == 1
    assert inner[0].count("tdpbf16ps") == inner[0].count("tileloadd") and inner[0].count("tdpbf16ps") % 4 == 0
    assert not re.search(r"tilestored|tilezero|call|mov\w*\t", inner[0])


@pytest.mark.parametrize("shape", TILE_BLOCKS, ids=str)
def test_tiles_of_a_block_are_eight_at_most_and_none_is_two_things(shape):
    numbers = TileNumbers(*shape)
    sums = [numbers.sums(*place) for place in numbers.order]
    data = {numbers.data(row) for row in range(shape[0])}
    weights = {numbers.weights(out) for out in range(shape[1])}
    assert len(set(sums)) == len(sums) == shape[0] * shape[1]
    assert not data & weights and not set(sums) & (data | weights) and max({*sums, *data, *weights}) < 8


def test_configuration_is_the_cpus_structure():
    """Palette 1; bytes of a row as 16-bit numbers from byte 16 on, rows from byte 48 on (Intel's manual)."""
    raw = np.array(tile_configuration(TileNumbers(2, 2), rows=13, depth_bytes=32), np.uint32).view(np.uint8)
    assert raw[0] == 1 and not raw[1:16].any()
    assert raw[16:48].view(np.uint16).tolist() == [64, 64, 64, 64, 32, 32, 64, 64] + [0] * 8
    assert raw[48:].tolist() == [13, 13, 13, 13, 13, 13, 8, 8] + [0] * 8
    for rows, depth_bytes in ((17, 64), (0, 64), (16, 68), (16, 30)):
        with pytest.raises(ValueError, match="16 rows of 64 bytes"):
            tile_configuration(TileNumbers(1, 1), rows, depth_bytes)


def test_shapes_stay_within_rows():
    assert {(each.row_tiles, each.rows) for each in tile_shapes(1, columns=7, depth_bytes=64)} == {(1, 7)}
    below = {(each.row_tiles, each.rows) for each in tile_shapes(1, columns=7, depth_bytes=64, rows=4)}
    assert below == {(1, 7), (2, 7), (3, 7), (4, 7)}


def test_only_cpus_with_the_instructions_have_such_kernels():
    operator = stored_as(LAYERS["1x1"], "bfloat16")
    assert SAPPHIRE_RAPIDS.tile_products == ("bfloat16", "int8")
    assert tile_configs(operator)[1] and not tile_configs(LAYERS["1x1"])[1]
    renamed = replace(SAPPHIRE_RAPIDS, mcpu="cooperlake")  # LLVM would not make the instruction
    older = replace(SAPPHIRE_RAPIDS, features=tuple(each for each in FLAGS if each != "amx_bf16"))
    assert renamed.tile_products == () and older.tile_products == ("int8",)
    for cpu in (renamed, older):
        template, configs = tile_configs(operator, cpu)
        assert not configs and template.space(operator, cpu), "kernels in vector registers are left"


@pytest.mark.parametrize("mcpu", ["sapphirerapids", "graniterapids"])
def test_cpus_by_llvms_name_have_tiles(mcpu):
    assert target_with(flags_of_mcpu(mcpu), 8, 48 * 1024, 2**21, mcpu).tile_products == ("bfloat16", "int8")
    assert target_with(flags_of_mcpu("znver4"), 8, 32 * 1024, 2**20, "znver4").tile_products == ()


def test_tiles_are_the_first_choice_of_large_products():
    for operator in (conv(1, 256, 14, 14, 256, 1), conv(1, 128, 28, 28, 128, 3), Dense(64, 1024, 1024)):
        narrow = stored_as(operator, "bfloat16")
        first = template_for(narrow, SAPPHIRE_RAPIDS).space(narrow, SAPPHIRE_RAPIDS)[0]
        assert "tile_rows" in first, operator


def test_a_library_asks_for_the_tiles_when_it_is_loaded(tmp_path):
    """And says so where the answer is no, which is what this process is answered too."""
    operator = stored_as(LAYERS["1x1"], "bfloat16")
    template, configs = tile_configs(operator)
    function = template.for_config(configs[0]).build(operator, configs[0], SAPPHIRE_RAPIDS)
    library = tmp_path / "kernel.so"
    compile_function(function, SAPPHIRE_RAPIDS).export_library(str(library))
    script = f"import ctypes, os; ctypes.CDLL({str(library)!r}, mode=os.RTLD_LAZY)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused = "this library needs the tile registers of AMX" in done.stderr
    assert refused == (tiles_refused() is not None)
    assert done.stderr.count("\n") <= 1
