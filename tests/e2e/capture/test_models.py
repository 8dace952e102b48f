"""Built-in models against the parameter and flop counts of their papers and libraries."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from costmodel.base.errors import InputError, ModelError
from costmodel.operators.device_work import Attention, ConvolutionBackward, Gemm
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from e2e.capture import build, capture, known_models
from e2e.capture.models.catalog import build_dlrm, build_from_config, build_from_file
from e2e.capture.models.configurations import PRESETS
from e2e.capture.models.dlrm import CONFIGS, Dlrm, DlrmConfig, random_tables
from e2e.lowering import unknown_operators
from e2e.lowering.lower_trace import lower
from e2e.step.execution_graph import RankGraph
from e2e.step.options import StepOptions
from tests.case_lists import one_in

INFERENCE = StepOptions(mode="inference")

# Sizes published with each model: torchvision (ResNet-50, Inception-V3 with auxiliary classifier), the Hugging Face
# model cards and checkpoints (tied output embeddings counted once), Llama 2 and 3 papers.
PARAMETERS = {
    "resnet-50": 25_557_032,
    "inception-v3": 27_161_264,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "opt-1.3b": 1_315_758_080,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
}


def flops(graph: RankGraph) -> int:
    """Of all products and convolutions."""
    kinds = (Gemm, Conv2d, ConvolutionBackward, Attention)
    return sum(record.flops for task in graph.tasks for record in task.operators if isinstance(record, kinds))


def parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build(name, 1, None, INFERENCE).module.parameters())


@pytest.mark.parametrize("name", one_in(2, PARAMETERS))
def test_parameter_count(name: str):
    assert parameters(name) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "width", "layers", "inner"), [("xlnet-base", 768, 12, 3072), ("xlnet-large", 1024, 24, 4096)]
)
def test_xlnet_parameter_count_by_its_paper(name: str, width: int, layers: int, inner: int):
    """Yang et al. (2019): five projections and five bias or segment vectors of attention, then the feed-forward."""
    attention = 5 * width * width + 5 * width
    feed_forward = 2 * width * inner + inner + width
    norms = 4 * width
    assert parameters(name) == layers * (attention + feed_forward + norms) + 32000 * width + width + 32000


def test_switch_parameter_count_by_its_paper():
    """Fedus et al. (2022): T5-base in which every other feed-forward layer is a router and eight experts."""
    width, inner, layers, experts = 768, 3072, 12, 8
    attention = 4 * width * width * (layers + 2 * layers)
    dense = 2 * width * inner
    feed_forward = layers * dense + layers * (experts * dense + experts * width)
    norms = (2 * layers + 3 * layers + 2) * width
    positions = 2 * 32 * 12
    assert parameters("switch-base-8") == 32128 * width + attention + feed_forward + norms + positions


@pytest.mark.parametrize("name", ["gpt3-xl", "gpt3-2.7b"])
def test_gpt3_parameter_count_by_formula(name: str):
    """12 L d^2 in the products, 13 L d in biases and norms, 2 d at the end, tokens and positions."""
    config = build(name, 1, 64, INFERENCE).module.config
    d, layers = config.n_embd, config.n_layer
    expected = 12 * layers * d * d + 13 * layers * d + 2 * d + (config.vocab_size + config.n_positions) * d
    assert parameters(name) == expected


# Multiply-accumulates of one picture: torchvision's table, 4.09 and 5.71 G.
@pytest.mark.parametrize(("name", "macs"), [("resnet-50", 4.089e9), ("inception-v3", 5.713e9)])
def test_flops_of_convolutional_networks(name: str, macs: float):
    batch = 2
    assert flops(lower(capture(build(name, batch, None, INFERENCE), INFERENCE))) == pytest.approx(
        2 * batch * macs, rel=1e-3
    )


def gpt_flops(batch: int, length: int, width: int, layers: int, words: int) -> int:
    """Narayanan et al. (SC 2021), appendix: 24 B s l h^2 (1 + s / 6h) and the output layer, forward alone."""
    return (
        24 * batch * length * layers * width**2
        + 4 * batch * length**2 * layers * width
        + 2 * batch * length * width * words
    )


@pytest.mark.parametrize(("attention", "dtype"), [("eager", "float32"), ("flash", "bfloat16"), ("flash", "float32")])
def test_flops_of_gpt2(attention: str, dtype: str):
    options = StepOptions(mode="inference", attention=attention, dtype=dtype)
    graph = lower(capture(build("gpt2", 2, 256, options), options))
    expected = gpt_flops(2, 256, 768, 12, 50257)
    # The causal kernel skips the pairs above the diagonal, s (s - 1) / 2 of s^2.
    skipped = 4 * 2 * 256 * 255 // 2 * 768 * 12 if attention == "flash" else 0
    assert flops(graph) == expected - skipped


def test_backward_has_twice_the_flops_of_forward():
    options = StepOptions(mode="forward-backward")
    graph = lower(capture(build("gpt2", 1, 128, options), options))
    assert flops(graph) == 3 * gpt_flops(1, 128, 768, 12, 50257)


def test_kernels_of_resnet_are_those_of_a_profile():
    """Per iteration of the public profile of ResNet-50 on a V100 (PyTorch, float32; data parallel copies left out)."""
    graph = lower(capture(build("resnet-50", 32)))
    counts = Counter(task.name for task in graph.tasks)
    assert counts["aten::cudnn_convolution"] == counts["aten::cudnn_batch_norm"] == 53
    assert counts["aten::cudnn_batch_norm_backward"] == 53
    assert counts["aten::relu_"] == counts["aten::threshold_backward"] == 49
    assert counts["aten::add_"] == 85  # batches counted by 53 norms, 16 shortcuts, 16 gradients of shortcuts
    assert (counts["aten::_foreach_mul_"], counts["aten::_foreach_add_"]) == (3, 6)
    assert counts["aten::max_pool2d_with_indices"] == counts["aten::max_pool2d_with_indices_backward"] == 1
    assert counts["aten::mm"] == 2


def test_training_flops_of_resnet():
    """Three passes, less the gradient of the pictures, which nobody wants."""
    options = StepOptions(mode="forward-backward")
    graph = lower(capture(build("resnet-50", 1, None, options), options))
    first = 2 * 64 * 112 * 112 * 3 * 7 * 7
    assert flops(graph) == pytest.approx(3 * 2 * 4.089e9 - first, rel=1e-3)


@pytest.mark.parametrize("name", ["dlrm", "dlrm-ddp", "dlrm-mlperf"])
def test_dlrm_parameters_and_flops(name: str):
    config, batch = CONFIGS[name], 64
    vectors = len(config.rows) + 1
    top = (config.dim + vectors * (vectors - 1) // 2, *config.top)
    layers = [*zip(config.bottom, config.bottom[1:], strict=False), *zip(top, top[1:], strict=False)]
    workload = build(name, batch, None, INFERENCE)
    assert sum(p.numel() for p in workload.module.parameters()) == sum(i * o + o for i, o in layers)
    tables = next(buffer for key, buffer in workload.module.named_buffers() if key.endswith("weights"))
    assert tables.shape == (sum(config.rows), config.dim)
    products = sum(2 * batch * i * o for i, o in layers) + 2 * batch * vectors**2 * config.dim
    assert flops(lower(capture(workload, INFERENCE))) == products


def test_dlrm_looks_up_all_tables_at_once_and_updates_them_in_the_backward_pass():
    graph = lower(capture(build("dlrm", 2048)))
    lookups = [r for task in graph.tasks for r in task.operators if isinstance(r, EmbeddingLookup)]
    forward = EmbeddingLookup(1_000_000, 64, 204_800, 2048, tables=8)
    assert lookups[0] == forward
    assert (lookups[1].direction, lookups[1].fused_optimizer) == ("backward", "sgd")
    assert len(lookups) == 2


def test_dlrm_with_one_embedding_bag_per_table():
    config = DlrmConfig((100, 200), 8, (4, 8), (8, 1), 5, embedding="bags")
    graph = lower(capture(build_dlrm(config, 16, StepOptions())))
    lookups = [r for task in graph.tasks for r in task.operators if isinstance(r, EmbeddingLookup)]
    assert [(r.rows, r.indices, r.bags, r.direction) for r in lookups] == [
        (100, 80, 16, "forward"),
        (200, 80, 16, "forward"),
        (200, 80, 16, "backward"),
        (100, 80, 16, "backward"),
    ]


def test_random_tables_are_reproducible():
    assert random_tables(12, 3) == random_tables(12, 3) != random_tables(12, 4)
    assert all(1_000 <= rows < 10_000_000 for rows in random_tables(50, 0).rows)
    with torch.device("meta"):
        model = Dlrm(random_tables(6, 1))
    assert build("dlrm-random-6-1", 8).module.tables.weights.shape == model.tables.weights.shape


# How many layers a configuration has, where that is not `num_hidden_layers`. Of Switch every other one has experts, of
# DeepSeek-V3 those from the fourth on: five hold all kinds.
FEW_LAYERS = {
    "gpt2": {"n_layer": 5},
    "xlnet": {"n_layer": 5},
    "switch_transformers": {"num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2,
                            "num_sparse_decoder_layers": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, known_models()))
def test_every_model_lowers_without_unknown_operators(name: str):
    """Transformers with their first few layers: the others, up to 126 of them, are of the same kinds."""
    if name in PRESETS:
        config = {**PRESETS[name], **FEW_LAYERS.get(PRESETS[name]["model_type"], {"num_hidden_layers": 5})}
        length = 64 if name.startswith(("llama", "xlnet", "switch", "gpt", "opt", "bert")) else None
        workload = build_from_config(config, 2, length, INFERENCE, name)
    else:
        workload = build(name, 2, None, INFERENCE)
    graph = lower(capture(workload, INFERENCE))
    assert graph.tasks
    assert not unknown_operators(graph)


def test_experts_share_the_tokens_equally():
    graph = lower(capture(build("switch-base-8", 1, 64, INFERENCE), INFERENCE))
    experts = [
        record
        for task in graph.tasks
        for record in task.operators
        if isinstance(record, Gemm) and (record.m, record.n, record.k) == (8, 3072, 768)
    ]
    assert len(experts) == 8 * (6 + 6)


def test_an_unknown_name_offers_near_ones():
    with pytest.raises(InputError, match=r"gpt2-large"):
        build("gpt2-larg", 1)


def test_a_model_without_fused_attention_says_so():
    with pytest.raises(InputError, match="no fused attention for xlnet; use eager"):
        build("xlnet-base", 1, 16, StepOptions(attention="flash"))


def test_impossible_sizes():
    with pytest.raises(InputError, match="batch size 0"):
        build("gpt2", 0)
    with pytest.raises(InputError, match="beyond its 1024 positions"):
        build("gpt2", 1, 2048)


def test_configuration_files(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100}))
    workload = build_from_file(path, 1, 16, INFERENCE)
    assert len(workload.module.transformer.h) == 2
    for text, error, message in (
        ("{", InputError, "not valid JSON"),
        ("{}", InputError, "must have a model_type"),
        ('{"model_type": "gpt9"}', ModelError, "not known to transformers"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', ModelError, "cannot build it"),
        ('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}', InputError, "takes pixel_values"),
        ('{"model_type": "distilbert"}', InputError, "no causal language model; name its class in architectures"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message) as caught:
            build_from_file(path, 1, 16)
        assert str(path) in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        build_from_file(tmp_path / "none.json", 1)
