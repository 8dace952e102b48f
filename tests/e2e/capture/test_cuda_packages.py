"""Stand-ins for packages that need CUDA: what they compute, which kernels they stand for, what they refuse."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from costmodel.base.errors import ModelError
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.fitted import packaged_machine
from costmodel.operators.attention import Attention, seen_pairs
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, OptimizerStep, ScaledGemm
from e2e.capture.cuda_packages import mmcv, torchvision_operators
from e2e.capture.cuda_packages.finder import PACKAGES, cuda_packages, missing_package, modules_of
from e2e.capture.imports import patched_imports
from e2e.capture.script import capture_script, load_script
from e2e.lowering.lower_trace import lower, unknown_operators
from e2e.step.execution_graph import RankGraph, Synchronize
from e2e.step.options import SeenGpu, StepOptions

BATCH, LENGTH, HEADS, WIDTH = 2, 256, 4, 64
HALF = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.fixture
def told() -> Iterator[list[str]]:
    lines: list[str] = []
    with cuda_packages(lines.append):
        yield lines


def lowered(make: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> RankGraph:
    options = StepOptions(mode="forward-backward", attention="flash", seen_gpu=SeenGpu(capability=(9, 0)))
    graph = lower(capture_script(load_script(make, options), options))
    assert not unknown_operators(graph)
    return graph


def records(graph: RankGraph, kind: type[Any]) -> list[Any]:
    return [record for task in graph.tasks for record in task.operators if isinstance(record, kind)]


def attended(attend: Callable[..., Any], *shape: int, count: int = 3) -> list[Attention]:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        given = [torch.randn(*shape, requires_grad=True, **HALF) for _ in range(count)]

        def step() -> None:
            attend(*given).sum().backward()
            assert all(each.grad.shape == each.shape for each in given)

        return nn.Identity(), step

    return records(lowered(make), Attention)


def test_flash_attention_is_the_kernel_of_scaled_dot_product_attention(told: list[str]):
    from flash_attn import flash_attn_func, flash_attn_qkvpacked_func  # type: ignore[import-not-found]

    forward, backward = attended(lambda *qkv: flash_attn_func(*qkv, causal=True), BATCH, LENGTH, HEADS, WIDTH)
    own, _ = attended(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), BATCH, HEADS, LENGTH, WIDTH)
    assert (forward.direction, backward.direction, forward.kernel) == ("forward", "backward", "flash2")
    for one, other in ((forward.flops, own.flops), (forward.read_bytes, own.read_bytes), (forward.pairs, own.pairs)):
        assert one == other
    stacked = attended(lambda qkv: flash_attn_qkvpacked_func(qkv, causal=True), BATCH, LENGTH, 3, HEADS, WIDTH, count=1)
    assert stacked == [forward, backward]
    with pytest.raises(RuntimeError, match="only supports fp16 and bf16 data type, these are torch.float32"):
        flash_attn_func(*(torch.empty(BATCH, LENGTH, HEADS, WIDTH, device="meta") for _ in range(3)))
    assert told == ["flash_attn cannot run without a GPU: stood in for, its kernels by name and shape"]


def test_a_library_that_only_looks_for_a_package_leaves_no_note(told: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("e2e.capture.cuda_packages.finder._asking_library", lambda: "accelerate")
    linear = import_module("transformer_engine.pytorch").Linear
    assert not isinstance(nn.Identity(), linear) and not told
    linear(64, 64, device="meta")
    assert told[0].startswith("transformer_engine cannot run without a GPU")
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))  # which the program has imported
    monkeypatch.setattr(sys.modules["bitsandbytes"], "__path__", [], raising=False)
    weight = import_module("bitsandbytes.nn").Params4bit(torch.empty(64, 64, device="meta"), requires_grad=False)
    assert weight.shape and told[1].startswith("bitsandbytes is not installed")


def test_a_library_that_looks_for_a_package_finds_what_it_can_import(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "site-packages").mkdir()
    code = "from importlib.util import find_spec\n\ndef there(name):\n    return find_spec(name) is not None\n"
    (tmp_path / "site-packages" / "looks.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with patched_imports({"apex": lambda module: ()}):
        assert not import_module("looks").there("apex") and find_spec("apex") is not None
    # Diffusers, for who asks for its attention; Transformers and PEFT, for who asks for weights in 4 bits.
    assert import_module("looks").there("xformers") and import_module("looks").there("bitsandbytes") and not told
    del sys.modules["looks"]


def test_a_module_that_was_looked_for_is_patched_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "looked_for.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with patched_imports({"looked_for": lambda module: [(module, "value", 2)]}):
        assert find_spec("looked_for") is not None
        assert import_module("looked_for").value == 2
    del sys.modules["looked_for"]


def test_a_checkout_of_megatron_looks_for_packages_as_the_installed_one(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    code = "try:\n    import transformer_engine\n    HAVE_TE = True\nexcept ImportError:\n    HAVE_TE = False\n"
    for file in ("megatron/core/utils.py", "others.py"):
        (tmp_path / file).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_module("megatron.core.utils").HAVE_TE and not told
    assert import_module("others").HAVE_TE
    spec = tmp_path / "spec.py"
    spec.write_text(
        "try:\n    import absent_cuda\n    from absent_cuda import Spec\nexcept ImportError:\n    pass\nSpec()\n"
    )
    with pytest.raises(NameError) as missing:
        exec(compile(spec.read_text(encoding="utf-8"), str(spec), "exec"), {})
    line = missing_package(missing.value, traceback.extract_tb(missing.value.__traceback__))
    assert line is not None and "spec.py:6: uses Spec, which it has only with absent_cuda" in line
    for name in ("megatron.core.utils", "megatron.core", "megatron", "others"):
        del sys.modules[name]


def test_packed_sequences_have_the_lengths_between_their_bounds(told: list[str]):
    from flash_attn import flash_attn_varlen_func

    def attend(bounds: torch.Tensor) -> Callable[..., Any]:
        return lambda *qkv: flash_attn_varlen_func(*qkv, bounds, bounds, LENGTH, LENGTH, causal=True)

    bounds = torch.tensor([0, 100, 400, 512], dtype=torch.int32)
    known, _ = attended(attend(bounds), 2 * LENGTH, HEADS, WIDTH)
    assert known.pairs == sum(seen_pairs(each, each, True) for each in (100, 300, 112))
    unknown, _ = attended(attend(bounds.to("meta")), 2 * LENGTH, HEADS, WIDTH)
    assert sorted(unknown.packed) == [170, 171, 171]


def test_a_program_divides_a_fused_loss_by_the_targets_that_it_does_not_ignore(told: list[str]):
    from flash_attn.losses.cross_entropy import CrossEntropyLoss  # type: ignore[import-not-found]

    assert CrossEntropyLoss().ignore_index == -100
    assert CrossEntropyLoss(ignore_index=0, reduction="none").ignore_index == 0


def test_windows_count_the_own_key(told: list[str]):
    from flash_attn import flash_attn_func
    from flash_attn_interface import flash_attn_func as third  # type: ignore[import-not-found]

    windowed, _ = attended(
        lambda *qkv: flash_attn_func(*qkv, causal=True, window_size=(31, 0)), BATCH, LENGTH, HEADS, WIDTH
    )
    assert windowed.window == 32
    assert attended(lambda *qkv: third(*qkv, causal=True), BATCH, LENGTH, HEADS, WIDTH)[0].kernel == "flash3"


def test_xformers_takes_flash_attention_where_it_can(told: list[str]):
    from xformers.ops import LowerTriangularMask, memory_efficient_attention  # type: ignore[import-not-found]
    from xformers.ops.fmha import BlockDiagonalCausalMask  # type: ignore[import-not-found]

    shape = (BATCH, LENGTH, HEADS, WIDTH)
    causal, _ = attended(lambda *qkv: memory_efficient_attention(*qkv, attn_bias=LowerTriangularMask()), *shape)
    assert (causal.kernel, causal.causal) == ("flash2", True)
    bias = torch.zeros(BATCH, HEADS, LENGTH, LENGTH, device="meta", dtype=torch.bfloat16)
    assert attended(lambda *qkv: memory_efficient_attention(*qkv, attn_bias=bias), *shape)[0].kernel == "efficient"
    packed = BlockDiagonalCausalMask.from_seqlens([56, 200])
    assert attended(lambda *qkv: memory_efficient_attention(*qkv, packed), 1, *shape[1:])[0].packed == (56, 200)


def trained(module: Callable[[], nn.Module], optimizer: Any = None, context: Any = None) -> RankGraph:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = module().cuda().to(torch.bfloat16)
        update = None if optimizer is None else optimizer(model.parameters())
        data = torch.randn(BATCH, LENGTH, 256, requires_grad=True, **HALF)

        def step() -> None:
            if context is None:
                model(data).sum().backward()
            else:
                with context():
                    loss = model(data).sum()
                loss.backward()
            if update is not None:
                update.step()
                update.zero_grad()

        return model, step

    return lowered(make)


def test_transformer_engine_multiplies_as_pytorch_or_in_8_bits(told: list[str]):
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common.recipe import DelayedScaling  # type: ignore[import-not-found]

    def layer() -> nn.Module:
        made: nn.Module = te.LayerNormLinear(256, 512, params_dtype=torch.bfloat16)
        return made

    plain = trained(lambda: nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512)))
    engine = trained(layer)
    assert records(engine, Gemm) == records(plain, Gemm)
    assert records(engine, Normalization) == records(plain, Normalization)
    eight = trained(layer, context=lambda: te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()))
    assert len(records(eight, ScaledGemm)) == 3 and not records(eight, Gemm)
    whole = trained(lambda: te.TransformerLayer(256, 1024, 4, params_dtype=torch.bfloat16, attn_input_format="bshd"))
    assert [each.kernel for each in records(whole, Attention)] == ["cudnn", "cudnn"]


def test_apex_updates_in_one_pass(told: list[str]):
    from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

    def model() -> nn.Module:
        return nn.Linear(256, 256, bias=False)

    (fused,) = records(trained(model, FusedAdam), OptimizerStep)
    *_, own = records(trained(model, lambda given: torch.optim.AdamW(given, fused=True)), OptimizerStep)
    assert (fused.elements, fused.tensors) == (own.elements, own.tensors)
    # States of 32 bits beside parameters of 16: two more for each of the two that are read and written.
    assert (fused.reads, fused.writes) == (own.reads + 2, own.writes + 2)


@pytest.mark.parametrize("passes", [1, 2])
def test_amp_gives_any_optimizer_copies_in_32_bits(told: list[str], passes: int):
    """Gradients of 16 bits are copied to theirs, or added from the second pass on; copies go back to the parameters."""
    from apex import amp  # type: ignore[import-not-found]

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        model = nn.Linear(256, 256, bias=False).cuda()
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
        (master,) = amp.master_params(optimizer)
        assert (model.weight.dtype, master.dtype) == (torch.float16, torch.float32)
        data = torch.randn(8, 256, device="cuda")

        def step() -> None:
            for _ in range(passes):
                output = model(data)
                assert output.dtype is torch.float32
                with amp.scale_loss(output.sum(), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    graph = lowered(make)
    moved = [task.name for task in graph.tasks if task.name.startswith("aten::_foreach")]
    expected = ["aten::_foreach_copy_", *["aten::_foreach_add_"] * (passes - 1)]
    assert moved[:passes] == expected and moved[-1] == "aten::_foreach_copy_"
    assert sum(isinstance(action, Synchronize) for action in graph.actions()) == passes  # reads of the overflow


def test_apex_reads_the_norms_of_every_parameter_for_its_rate(told: list[str]):
    from apex.parallel.LARC import LARC  # type: ignore[import-not-found]

    def sgd(given: Any, wrap: bool) -> Any:
        optimizer = torch.optim.SGD(given, lr=0.1, weight_decay=0.1)
        return LARC(optimizer, clip=False) if wrap else optimizer

    def waits(wrap: bool) -> int:
        graph = trained(lambda: nn.Linear(256, 256), lambda given: sgd(given, wrap))
        return sum(isinstance(action, Synchronize) for action in graph.actions())

    assert waits(True) - waits(False) == 2 * 2  # weight and bias, two norms each


def test_apex_clips_all_gradients_by_a_few_kernels(told: list[str]):
    from apex.contrib.clip_grad import clip_grad_norm_  # type: ignore[import-not-found]

    def kernels(layers: int) -> int:
        def make() -> tuple[nn.Module, Callable[[], Any]]:
            model = nn.Sequential(*[nn.Linear(64, 64, device="cuda") for _ in range(layers)])
            data = torch.randn(8, 64, device="cuda")

            def step() -> None:
                model(data).sum().backward()
                assert clip_grad_norm_(model.parameters(), 1.0).shape == ()

            return model, step

        return sum(task.name.startswith("aten::_foreach") for task in lowered(make).tasks)

    assert kernels(2) == kernels(6) == 3  # norms in two, scaling


def test_bitsandbytes_moves_states_of_8_bits_and_weights_of_4(told: list[str]):
    modules = import_module("e2e.capture.cuda_packages.bitsandbytes").MODULES
    small = modules["bitsandbytes.optim"]["AdamW8bit"]
    graph = trained(lambda: nn.Linear(256, 256, bias=False), small)
    (update,) = [task for task in graph.tasks if task.name == "package::optimizer_update_8bit_blockwise"]
    moved = sum(each.read_bytes + each.write_bytes for each in update.operators)
    scales = 2 * 4 * 256
    assert moved == pytest.approx(256 * 256 * (2 + 2 * 2 + 2 * 2) + 2 * scales, rel=0.01)
    assert sum(isinstance(action, Synchronize) for action in graph.actions()) == 1  # once for each parameter
    four = trained(lambda: modules["bitsandbytes.nn"]["Linear4bit"](256, 256, bias=False))
    assert [task.name for task in four.tasks].count("package::dequantize_4bit") == 2
    assert len(records(four, Gemm)) == 2  # the frozen weight has no gradient


def test_states_of_a_paged_optimizer_are_told_of(told: list[str]):
    optimizers = import_module("bitsandbytes.optim")
    optimizers.AdamW8bit([nn.Parameter(torch.empty(8))])
    assert not any("paged" in each for each in told)
    optimizers.PagedAdamW8bit([nn.Parameter(torch.empty(8))])
    assert any(each.startswith("states of a paged optimizer are counted as memory of the GPU") for each in told)


def test_an_older_bitsandbytes_calls_its_library_by_name(told: list[str]):
    """Weights are expanded by branches, whose instructions take longer than their bytes; an optimizer updates all."""
    library = import_module("e2e.capture.cuda_packages.bitsandbytes").MODULES["bitsandbytes.cextension"]["lib"]

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        codes = torch.zeros(4096 * 2048, dtype=torch.uint8, device="cuda")
        weight, state = torch.zeros(4096 * 4096, **HALF), torch.zeros(4096 * 4096, device="cuda")

        def step() -> None:
            library.cdequantize_blockwise_bf16_nf4(None, codes, weight, 64)
            library.cdequantize_blockwise_bf16(None, codes, weight, 64)
            library.cadam32bit_grad_bf16(weight, weight.clone(), state, 0.1)

        return nn.Identity(), step

    branches, table, update = [each for each in records(lowered(make), Elementwise) if each.broadcast_elements]
    assert (branches.kind, table.kind) == ("branches", "fused")
    assert branches.read_bytes + branches.write_bytes == 4096 * 4096 * 5 // 2
    assert update.read_bytes + update.write_bytes == 4096 * 4096 * (2 + 2 * (2 + 4))
    machine = packaged_machine("a100-sxm-40gb")
    seconds = [each.seconds for each in gpu_cost_model(machine).estimate([branches, table])]
    assert seconds[0] > 1.5 * seconds[1]


def test_layers_of_state_spaces_are_scans(told: list[str]):
    from mamba_ssm import Mamba, Mamba2  # type: ignore[import-not-found]

    for kind, name in ((Mamba, "scan::selective"), (Mamba2, "scan::linear_attention")):
        names = [task.name for task in trained(lambda kind=kind: kind(256)).tasks]
        assert {name, f"{name}_backward", "scan::causal_conv"} <= set(names)


def test_kernels_of_the_hub_are_those_of_flash_attention(told: list[str]):
    hub = import_module("e2e.capture.cuda_packages.kernels_hub")
    assert hub.get_kernel("kernels-community/flash-attn3").flash_attn_func.__name__ == "flash3_func"
    with pytest.raises(ModelError, match="the kernel someone/activation is not stood in for"):
        hub.get_kernel("someone/activation")


def test_a_part_of_a_package_that_is_patched_when_it_is_imported(told: list[str]):
    with patched_imports({"bitsandbytes": lambda module: []}):
        assert import_module("bitsandbytes").nn.Linear4bit


@pytest.mark.parametrize("package", [each for each in PACKAGES if each not in ("bitsandbytes", "kernels", "triton")])
def test_every_module_of_a_stand_in_can_be_imported(told: list[str], package: str):
    for name, exports in modules_of(package).items():
        module = import_module(name)
        assert all(getattr(module, each) is value for each, value in exports.items())
    assert metadata.version(package) == PACKAGES[package][1]


def test_stand_ins_are_gone_afterwards():
    with cuda_packages(lambda line: None):
        import flash_attn
    assert "flash_attn" not in sys.modules and flash_attn.__version__


def said(code: str) -> str | None:
    try:
        exec(compile(code, "train.py", "exec"), {})
    except (ImportError, RuntimeError) as error:
        return missing_package(error, traceback.extract_tb(error.__traceback__))
    return None


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("\nimport strange_cuda_ops", "train.py:2: imports strange_cuda_ops, which is not installed here"),
        (
            "import strange_cuda_ops",
            "put a strange_cuda_ops.py with these functions, written with torch, on PYTHONPATH",
        ),
        (
            "try: import strange_cuda_ops\nexcept ImportError as error: raise RuntimeError('a part failed') from error",
            "train.py:1: imports strange_cuda_ops, which is not installed here",
        ),
        ("import unsloth", "train.py:1: imports unsloth, which is not predicted: it rewrites models"),
        ("import liger_kernel", "needs no GPU: pip install --no-deps liger-kernel"),
        ("from numpy import nothing", "train.py:1: imports nothing of numpy, which the installed numpy does not have"),
        ("from flash_attn import nothing", "train.py:1: imports nothing of flash_attn, which the stand-in"),
        ("import flash_attn.models.gpt", "imports flash_attn.models, which the stand-in for flash_attn"),
    ],
)
def test_other_packages_are_named_with_what_to_do(told: list[str], code: str, line: str):
    if (
        code.startswith("import")
        and find_spec(code.split()[1].partition(".")[0]) is not None
        and "flash_attn" not in code
    ):
        pytest.skip("it is installed")
    found = said(code)
    assert found is not None and line in found


def test_the_extension_of_mmcv(told: list[str]):
    module = ModuleType("mmcv.utils.ext_loader")
    module.load_ext = None  # type: ignore[attr-defined]
    ((_, _, load),) = mmcv.patches(module)
    extension, tensor = load("_ext", ["nms"]), torch.empty(8, device="meta")
    assert extension.sigmoid_focal_loss_forward(tensor, tensor, tensor, tensor, gamma=2.0) is None
    with pytest.raises(ModelError, match="mmcv.ops: softnms is not stood in for"):
        extension.softnms(tensor, tensor, iou_threshold=0.5)
    value, where = torch.empty(2, 100, 8, 32, device="meta"), torch.empty(2, 30, 8, 4, 4, 2, device="meta")
    attended = extension.ms_deform_attn_forward(value, tensor, tensor, where, where[..., 0], im2col_step=64)
    assert attended.shape == (2, 30, 256)


def test_a_module_that_a_package_has_not_built_is_refused_where_it_takes_tensors(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "unbuilt").mkdir()
    (tmp_path / "unbuilt" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = import_module("unbuilt._C")
    assert told == ["unbuilt._C is not built: its functions are refused where they take tensors"]
    assert not module.has_cuda()
    with pytest.raises(ModelError, match="unbuilt._C.deform_conv_forward is not stood in for"):
        module.deform_conv_forward(torch.empty(1), 3)
    for absent in ("unbuilt.other", "torch._ext"):
        with pytest.raises(ModuleNotFoundError):
            import_module(absent)


def test_regions_are_pooled_by_operators_of_torchvision():
    made = ModuleType("torchvision.ops.roi_align")
    made._roi_align = lambda data, rois, *bins: "by PyTorch"  # type: ignore[attr-defined]
    ((_, _, roi_align),) = torchvision_operators.patches(made)
    boxes = torch.empty(512, 5, device="cpu")
    assert roi_align(boxes, boxes, 0.25, 7, 7, 2, False) == "by PyTorch"

    def pooled() -> tuple[nn.Module, Callable[[], Any]]:
        data, rois = torch.randn(2, 98, 64, 64, device="cuda", requires_grad=True), boxes.cuda()

        def step() -> None:
            shapes = []
            for output in (
                roi_align(data, rois, 0.25, 7, 7, 2, False),
                torch.ops.torchvision.ps_roi_pool(data, rois, 0.25, 7, 7)[0],
            ):
                output.sum().backward()
                shapes.append(output.shape)
            assert shapes == [(512, 98, 7, 7), (512, 2, 7, 7)]
            assert data.grad is not None and data.grad.shape == data.shape

        return nn.Identity(), step

    with torch.library._scoped_library("torchvision", "DEF") as library:
        torchvision_operators.define_operators(library)
        graph = lowered(pooled)
    names = {task.name for task in graph.tasks if task.name.startswith("torchvision")}
    pooling = ("roi_align", "_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward")
    assert names == {f"torchvision::{name}" for name in pooling}


def test_extensions_of_stylegan_resample_and_count_their_instructions(told: list[str]):
    from torch.utils.cpp_extension import load

    filtered, resampled = (load(f"{name}_plugin", [f"{name}.cu"]) for name in ("filtered_lrelu", "upfirdn2d"))
    assert import_module("upfirdn2d_plugin") is resampled and len(told) == 2
    with pytest.raises(ModelError, match="upfirdn2d_plugin.upfirdn3d is not stood in for"):
        resampled.upfirdn3d(torch.empty(1))

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        data, square, taps = (torch.randn(*shape, device="cuda") for shape in ((2, 8, 36, 36), (4, 4), (12,)))
        none = torch.empty(0, device="cpu")

        def step() -> None:
            lower = resampled.upfirdn2d(data, square, 1, 1, 2, 2, 1, 1, 1, 1, False, 1.0)
            assert lower.shape == (2, 8, 18, 18)
            # 36 pixels, of which the filters take 5 on each side, twice as many between them.
            how = (2, 2, 0, 0, 0, 0, 0, 0, 1.0, 0.2, 256.0, False, True)
            output, signs, code = filtered.filtered_lrelu(data, taps, taps, data[0, :, 0, 0], none, *how)
            assert (output.shape, signs.shape, code) == ((2, 8, 25, 25), (2, 8, 61, 16), 0)

        return nn.Identity(), step

    (first, second) = records(lowered(make), Elementwise)
    # 4 x 4 products of three instructions, 12 for the place; of four pixels loaded for each, 14.
    assert (first.elements, first.instructions) == (2 * 8 * 18 * 18, 48 + 12 + 4 * 14)
    # One tile of 32 x 46 for the 25 x 25: 76 x 102 values between the filters, 56.5 x 43.5 before them.
    loaded, between = 14 * 56.5 * 43.5, (10 + 31 / 2) * 76 * 102
    tile = loaded + between + 56.5 * 76 * 31 / 2 + 16 * 102 * (24 + 3.5 + 12) + 32 * 46 * (24 + 12)
    assert second.instructions == round(tile / 25**2)
    model = gpu_cost_model(packaged_machine("a100-sxm-80gb"))
    plain, filtering = (each.seconds for each in model.estimate([replace(second, instructions=0), second]))
    assert filtering > plain


def test_cuda_extensions_of_a_program_are_not_built(told: list[str]):
    from torch.utils.cpp_extension import load, load_inline

    with pytest.raises(RuntimeError, match="the CUDA extension own is not built without a GPU"):
        load("own", ["own.cpp", "own_kernel.cu"])
    with pytest.raises(RuntimeError, match="the CUDA extension mine is not built"):
        load_inline("mine", cpp_sources="", cuda_sources="__global__ void f() {}")
    assert told == [
        f"the CUDA extension {name}, which the program builds, is not built: its kernels are not known here"
        for name in ("own", "mine")
    ]
