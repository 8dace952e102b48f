"""Kernels of bfloat16: against the reference at every border, by the CPU's instructions and by their emulation."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.operators.layers import Conv2d, Dense, FusedConvs, Pool2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import VECTOR_ATTRIBUTE, compile_function, compile_kernel
from schedules.contract.operator_reference import reference, rounded_to
from schedules.contract.operator_workload import workload
from schedules.contract.template import Signature, TensorSpec
from schedules.kernels.template_table import TEMPLATES, template_for
from schedules.loops import emit
from schedules.loops.dot_products import DotProduct
from schedules.measuring.kernel_verification import WrongValues, make_case, tolerance
from tests.schedules.awkward_operators import AWKWARD, RELU6, separable, stored_as
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, random_gate

# What kernels are made for; where they run on less, their instructions are emulated.
COOPERLAKE = CpuTarget(16, 32, "cooperlake", ("avx512f", "avx512_bf16", "avx512_vnni"), 2, 32 * 1024, 1024 * 1024)
NATIVE = "bfloat16" in CPU.dot_products
NARROW = {name: stored_as(operator, "bfloat16") for name, operator in AWKWARD.items()}


def run(operator, emulated=not NATIVE):
    """Runs one configuration, chosen at random (the same every time), on arguments with values behind the channels;
    ``WrongValues`` if it errs.
    """
    template = template_for(operator, COOPERLAKE)
    config = random.Random(repr(operator)).choice(list(template.space(operator, COOPERLAKE)))
    own = template.for_config(config)
    case = make_case(operator, own, COOPERLAKE, copies=1)
    compile_kernel(own.build(operator, config, COOPERLAKE), CPU, emulated)(*case.rotation[0])
    case.verify()


@pytest.mark.parametrize("operator", one_in(3, NARROW.values()), ids=NARROW.keys())
def test_kernel_equals_the_reference(operator):
    run(operator)


EMULATED = ("1x1", "first layer, 3 channels", "3x3, odd size, batch 2", "dense", "depthwise 3x3", "inverted residual")


@pytest.mark.skipif(not NATIVE, reason="everything is emulated here anyway")
@pytest.mark.parametrize("name", EMULATED)
def test_the_emulation_equals_the_reference(name):
    run(NARROW[name], emulated=True)


@pytest.mark.parametrize(
    "operator",
    [
        conv(1, 17, 7, 6, 40, 1, epilogue=RELU6),
        conv(1, 17, 9, 7, 24, 3, 2, epilogue=RELU6),
        conv(2, 5, 9, 9, 24, 3, 2),
        conv(1, 3, 8, 37, 40, 3, 2, epilogue=RELU6),
        conv(1, 1, 9, 40, 16, 5),
        conv(1, 34, 9, 7, 34, 3, groups=2),
        Dense(2, 101, 40),
        Dense(3, 33, 17),
        Dense(1, 1, 5),
        Pool2d("average", 1, 17, 7, 7, (7, 7)),
        separable(17, 33),
    ],
    ids=repr,
)
def test_odd_numbers_of_channels(operator):
    run(stored_as(operator, "bfloat16"))


@pytest.mark.parametrize("name", ["1x1", "3x3, stride 2", "dense", "first layer, 3 channels", "depthwise-pointwise"])
def test_a_wrong_pairing_of_channels_is_noticed(monkeypatch, name):
    right = DotProduct.pack_steps

    def swapped(self, weight):
        packed = right(self, weight)
        pairs = packed.reshape(*packed.shape[:-1], -1, self.group)
        return np.ascontiguousarray(pairs[..., ::-1]).reshape(packed.shape)

    monkeypatch.setattr(DotProduct, "pack_steps", swapped)
    with pytest.raises(WrongValues, match="instead of"):
        run(NARROW[name])


@pytest.mark.parametrize("name", ["1x1", "depthwise 3x3", "max pool", "channel norm", "dense"])
def test_what_is_stored_is_the_nearest_value(name):
    """Of the sums in the reference, but for those that lie half-way between two within the error of summation."""
    operator = NARROW[name]
    template = template_for(operator, COOPERLAKE)
    config = template.space(operator, COOPERLAKE)[0]
    own = template.for_config(config)
    case = make_case(operator, own, COOPERLAKE, copies=1)
    compile_kernel(own.build(operator, config, COOPERLAKE), CPU, not NATIVE)(*case.rotation[0])
    case.verify()
    actual = case.output.array.astype(np.float32)
    if case.output_spec.layout == "blocked":
        batch, _, height, width, _ = actual.shape
        actual = actual.transpose(0, 1, 4, 2, 3).reshape(batch, -1, height, width)[:, : case.expected.shape[1]]
    nearest = rounded_to(case.expected, "bfloat16")
    assert (actual.reshape(nearest.shape) == nearest).mean() > 0.99


def test_every_template_makes_kernels_of_it():
    families = {template_for(operator, COOPERLAKE).family for operator in NARROW.values()}
    assert families == {template.family for template in TEMPLATES}


WINOGRAD = ("3x3, odd size, batch 2", "3x3 behind a batch norm and a ReLU", "3x3, 1x1", "3x3, 3x3")


@pytest.mark.parametrize(("name", "outputs"), list(zip(WINOGRAD, (2, 4, 4, 2), strict=True)))
def test_winograd_between_narrow_tensors_equals_the_reference(name, outputs):
    operator = NARROW[name]
    space = template_for(operator, COOPERLAKE).space(operator, COOPERLAKE)
    config = next(each for each in space if each.get("winograd_outputs") == outputs)
    own = template_for(operator, COOPERLAKE).for_config(config)
    case = make_case(operator, own, COOPERLAKE, copies=1)
    compile_kernel(own.build(operator, config, COOPERLAKE), CPU, not NATIVE)(*case.rotation[0])
    case.verify()


def test_cpus_without_the_instruction_have_no_kernels_and_say_why():
    operator = NARROW["1x1"]
    avx2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
    plain = replace(COOPERLAKE, mcpu="skylake-avx512", features=("avx512f",))
    renamed = replace(COOPERLAKE, mcpu="skylake-avx512")  # LLVM would not make the instruction
    for cpu in (avx2, plain, renamed):
        assert cpu.dot_products == () and template_for(operator, cpu) is None
        assert "avx512_bf16" in cpu.lacks("bfloat16") and cpu.mcpu in cpu.lacks("bfloat16")
        assert template_for(AWKWARD["1x1"], cpu) is not None and cpu.lacks("float32") is None
    assert "bfloat16" in COOPERLAKE.dot_products and COOPERLAKE.lacks("bfloat16") is None
    assert "float16" in COOPERLAKE.lacks("float16")
    assert replace(COOPERLAKE, mcpu="znver4").dot_products == ("bfloat16", "int8")


def assembly(operator, emulated, **knobs):
    template = template_for(operator, COOPERLAKE)
    config = next(each for each in template.space(operator, COOPERLAKE) if knobs.items() <= each.items())
    own = template.for_config(config)
    return compile_function(own.build(operator, config, COOPERLAKE), COOPERLAKE, emulated).mod.inspect_source("asm")


@pytest.mark.parametrize("name", ["1x1", "first layer, 3 channels", "dense"])
def test_instructions_are_the_cpus_and_stand_in_the_loop(name):
    native, emulated = (assembly(NARROW[name], each) for each in (False, True))
    assert "vdpbf16ps" in native and re.search("vcvtne(2ps|ps)2bf16", native)
    assert "vdpbf16ps" not in emulated and "vcvtne" not in emulated
    assert "fusion_" not in native and "fusion_" not in emulated, "calls are inlined"


def test_sums_stay_in_registers():
    """An inner loop of a 1x1 that stores nothing."""
    text = assembly(stored_as(Conv2d(1, 256, 14, 14, 256, (1, 1)), "bfloat16"), False, out_blocks=2, unroll=2)
    blocks = re.findall(r"^(\.LBB\d+_\d+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    loops = [body.partition(f"\t{label}\n") for label, body in blocks]
    inner = [body for body, again, _ in loops if again and "vdpbf16ps" in body]
    assert inner
    for body in inner:
        assert not re.search(r"v?mov\w*\t%[xyz]mm\d+, ", body), "a register is stored or copied"


@pytest.mark.parametrize("name", ["1x1", "depthwise 3x3", "dense", "average pool", "1x1 behind a gate", "channel norm"])
def test_the_reference_rounds_what_is_stored(name):
    """PyTorch on rounded arguments, rounded."""
    operator = NARROW[name]
    data, parameters, residual = random_case(operator)
    gate = random_gate(operator)
    actual = reference(operator, data, parameters, residual, gate)

    def near(array):
        return None if array is None else array.astype(ml_dtypes.bfloat16).astype(np.float32)

    weights = [each if name == "channel norm" else replace(each, weight=near(each.weight)) for each in parameters]
    if gate is None:
        expected = pytorch(operator, near(data), weights, near(residual))
    else:
        expected = pytorch(operator, near(near(data) * near(gate)), weights, near(residual))
    assert (actual == near(actual)).all()
    np.testing.assert_allclose(actual, expected, rtol=2.0**-8, atol=1e-5)
    assert not np.allclose(actual, reference(AWKWARD[name], data, parameters, residual, gate), rtol=1e-5, atol=1e-5)


def test_a_chain_rounds_what_a_dense_layer_reads_and_not_what_a_depthwise_does():
    first, second, third = NARROW["inverted residual, 5x5"].convs
    data, parameters, _ = random_case(FusedConvs((first, second, third)))
    wide = reference(first, data, parameters[:1], rounded=False)
    middle = reference(
        replace(second, dtype="float32"),
        wide,
        [replace(parameters[1], weight=rounded_to(parameters[1].weight, "bfloat16"))],
    )
    expected = reference(third, middle, parameters[2:])
    np.testing.assert_array_equal(reference(FusedConvs((first, second, third)), data, parameters), expected)


@pytest.mark.parametrize("name", ["1x1", "depthwise 3x3", "dense", "average pool", "channel norm", "inverted residual"])
def test_the_workload_of_a_record_computes_the_same(name):
    import tvm

    operator = NARROW[name]
    data, parameters, residual = random_case(operator)
    function = tvm.compile(workload(operator), target="llvm")["main"]
    arguments = [data.astype(ml_dtypes.bfloat16)]
    for each in parameters:
        dtype = np.float32 if name == "channel norm" else ml_dtypes.bfloat16
        arguments += [each.weight.astype(dtype), *([] if each.bias is None else [each.bias])]
    if residual is not None:
        arguments.append(residual.astype(ml_dtypes.bfloat16))
    arguments.append(np.zeros(operator.output_shape, ml_dtypes.bfloat16))
    tensors = [tvm.runtime.tensor(array) for array in arguments]
    function(*tensors)
    expected = reference(operator, data, parameters, residual, rounded=False)
    actual = tensors[-1].numpy().astype(np.float32)
    np.testing.assert_allclose(actual, expected, rtol=2 * tolerance(operator), atol=2 * tolerance(operator))


VALUES = np.concatenate([np.linspace(-12, 12, 4000), [-100, -88, -40, 40, 88, 100], np.zeros(10)]).astype(np.float32)
EXACT = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x]),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


@pytest.mark.parametrize("emulated", [False, True] if NATIVE else [True])
@pytest.mark.parametrize("activation", EXACT)
def test_activations_are_as_exact_as_what_is_rounded_to_bfloat16(activation, emulated):
    """Within a twentieth of half a unit in the last place (GELU: a quarter) of the value and 0.02, where it saturates
    too.
    """
    import tvm

    rows = VALUES.reshape(-1, 16)

    def body(data, output):
        with emit.loop(len(rows)) as row:
            value = emit.activate(emit.load(data, row, lanes=16), activation, 16, coarse=True)
            emit.store(output, value, row, lanes=16)

    tensor = TensorSpec(rows.shape)
    function = emit.kernel("activation", Signature(tensor, (), None, tensor), body)
    function = function.with_attr(VECTOR_ATTRIBUTE, "bfloat16")
    run, result = compile_kernel(function, CPU, emulated), tvm.runtime.tensor(np.zeros_like(rows))
    run(tvm.runtime.tensor(rows), result)
    with np.errstate(over="ignore"):
        exact = EXACT[activation](VALUES.astype(np.float64))
    error = np.abs(result.numpy().reshape(-1) - exact) / (np.abs(exact) + 0.02)
    assert np.isfinite(result.numpy()).all() and error.max() < (0.25 if activation == "gelu" else 0.06) * 2.0**-9
