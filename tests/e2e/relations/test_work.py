"""More work is never faster; types, kernels and compilers that are made to save time save it."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.e2e.relations.relation_rows import (
    EXACT,
    Relation,
    answer,
    as_it_is,
    both,
    clearly_slower,
    held,
    in_use,
    no_faster,
    no_less_memory,
    no_more_memory,
    no_slower,
    one_gpu,
    roughly,
    same,
    same_flops,
    same_memory,
    several,
    spread,
    times,
    to,
)

more = both(no_faster, no_less_memory)
less = both(no_slower, no_more_memory)
TENSOR_CORES = ("h100-sxm", "a100-sxm-80gb", "l40s", "rtx-4090", "b200-sxm")
HALF = {"recipe": "pure-bf16"}


def no_dearer_per_sample(before, after):
    one, other = (found.iteration_seconds / found.throughput.samples for found in (before, after))
    return other <= one * 1.05


def proportional_flops(before, after):
    one, other = (found.utilisation.model_flops / found.throughput.samples for found in (before, after))
    return other == pytest.approx(one, rel=EXACT)


SIZE = [
    Relation(
        "a larger batch takes longer and more memory",
        one_gpu(),
        (as_it_is, times("batch_size", 2), times("batch_size", 4)),
        more,
    ),
    Relation(
        "a larger batch is no dearer per sample",
        one_gpu(config="llama"),
        (as_it_is, times("batch_size", 2), times("batch_size", 4)),
        no_dearer_per_sample,
    ),
    Relation(
        "a larger batch has as many FLOPs per sample", one_gpu(), (as_it_is, times("batch_size", 2)), proportional_flops
    ),
    Relation("longer sequences take longer and more memory", one_gpu(), (as_it_is, times("sequence_length", 2)), more),
    Relation(
        "a sequence of twice the length is no faster than two",
        one_gpu(),
        (times("batch_size", 2), times("sequence_length", 2)),
        no_faster,
    ),
    Relation(
        "more layers take longer and more memory",
        one_gpu(config="llama"),
        (as_it_is, to(config="llama-4-layers"), to(config="llama-6-layers")),
        more,
    ),
    Relation(
        "wider layers take longer and more memory", one_gpu(config="llama"), (as_it_is, to(config="llama-wide")), more
    ),
    Relation(
        "more words take longer and more memory", one_gpu(config="llama"), (as_it_is, to(config="llama-words")), more
    ),
    Relation(
        "longer documents take longer",
        one_gpu(config="llama", gpu=TENSOR_CORES, attention="flash2"),
        (to(document_length=128), to(document_length=512), as_it_is),
        no_faster,
    ),
    Relation(
        "a longer cache takes longer and more memory",
        one_gpu(config="llama", mode="inference", sequence_length=1, attention="flash2", gpu=TENSOR_CORES),
        (to(cache_length=512), to(cache_length=4096), to(cache_length=12000)),
        more,
    ),
    Relation(
        "more tokens behind a cache take longer",
        one_gpu(config=("gpt2", "llama"), mode="inference", sequence_length=1, cache_length=2048),
        (as_it_is, to(sequence_length=4), to(sequence_length=512)),
        no_faster,
    ),
    Relation(
        "more micro-batches take longer, and no less memory",
        several(),
        (as_it_is, spread(micro_batches=2), spread(micro_batches=4)),
        more,
    ),
    Relation(
        "inference, gradients, training", one_gpu(), (to(mode="inference"), to(mode="forward-backward"), as_it_is), more
    ),
    Relation(
        "adapters train faster than weights, wider ones slower",
        one_gpu(config="llama"),
        (to(lora=8), to(lora=256)),
        more,
    ),
    Relation("adapters train faster than all weights", one_gpu(config="llama"), (to(lora=8), as_it_is), more),
    Relation(
        "three times the layers take clearly longer and more memory",
        one_gpu(config="llama", batch_size=8),
        (as_it_is, to(config="llama-6-layers")),
        lambda before, after: clearly_slower(before, after, 1.3) and in_use(after) > 1.3 * in_use(before),
    ),
    Relation(
        "four times the batch takes two to four times as long where the GPU rules",
        one_gpu(config="llama-wide", batch_size=2, sequence_length=2048, mode="forward-backward"),
        (as_it_is, times("batch_size", 4)),
        lambda before, after: 2 < after.iteration_seconds / before.iteration_seconds < 4.2,
    ),
]


def test_layers_take_the_same_time_each():
    setting = {"gpu": "h100-sxm", "batch_size": 8, "sequence_length": 2048}
    four, eight, twelve = (
        answer(setting | {"config": each}).iteration_seconds for each in ("llama", "llama-4-layers", "llama-6-layers")
    )
    assert twelve - eight == pytest.approx(eight - four, rel=0.02)


TYPES = [
    Relation(
        "FP32, TF32, 16 bits, 8 bits",
        one_gpu(config="llama", gpu=TENSOR_CORES, batch_size=8),
        (to(dtype="float32"), to(dtype="tf32"), to(recipe="pure-bf16")),
        no_slower,
    ),
    Relation(
        "8 bits are faster than 16 where products are large",
        one_gpu(config="llama-wide", gpu=("h100-sxm", "h200-sxm", "b200-sxm"), batch_size=8, sequence_length=2048),
        (as_it_is, to(precision="fp8-delayed")),
        no_slower,
    ),
    Relation(
        "both 16-bit types are as fast",
        one_gpu(mode="inference", gpu=TENSOR_CORES),
        (to(dtype="float16"), to(dtype="bfloat16")),
        roughly(same, 0.02),
    ),
    Relation(
        "16 bits without masters take less than with them",
        one_gpu(gpu=TENSOR_CORES),
        (as_it_is, to(recipe="pure-bf16")),
        less,
    ),
    Relation(
        "16 bits take less memory than 32",
        one_gpu(mode="forward-backward", gpu=TENSOR_CORES),
        (to(dtype="float32"), to(dtype="bfloat16")),
        no_more_memory,
    ),
    Relation(
        "TF32 without its units is FP32",
        one_gpu(gpu=("t4", "v100-sxm2-32gb", "p100-pcie-16gb")),
        (to(dtype="float32"), to(dtype="tf32")),
        same,
    ),
    Relation(
        "32 bits are clearly slower than 16 where products are large",
        one_gpu(config="llama-wide", batch_size=8, sequence_length=2048, gpu=TENSOR_CORES),
        (as_it_is, to(dtype="float32")),
        partial(clearly_slower, factor=2.0),
    ),
]

KERNELS = [
    Relation(
        "attention: apart, efficient, FlashAttention 1 and 2",
        one_gpu(config="llama", gpu=TENSOR_CORES),
        (to(attention="eager"), to(attention="efficient"), to(attention="flash2")),
        no_slower,
    ),
    Relation(
        "attention of Hopper: FlashAttention 1, 2 and 3",
        one_gpu(config="llama", gpu=("h100-sxm", "h200-sxm")),
        (to(attention="flash1"), to(attention="flash2"), to(attention="flash3")),
        no_slower,
    ),
    Relation(
        "cuDNN's attention and FlashAttention 3 are alike",
        one_gpu(config="llama", gpu=("h100-sxm", "h200-sxm")),
        (to(attention="cudnn"), to(attention="flash3")),
        lambda one, other: other.iteration_seconds == pytest.approx(one.iteration_seconds, rel=0.1),
    ),
    Relation(
        "fused attention takes no more memory than scores",
        one_gpu(gpu=TENSOR_CORES),
        (to(attention="eager"), to(attention="flash")),
        no_more_memory,
    ),
    Relation(
        "no kernel of attention moves the FLOPs of a model",
        one_gpu(config="llama", gpu=("h100-sxm", "a100-sxm-80gb")),
        (to(attention="eager"), to(attention="math"), to(attention="efficient"), to(attention="flash2")),
        same_flops,
    ),
    Relation("compiled is no slower", one_gpu(), (as_it_is, to(compile=True)), no_slower),
    Relation("compiled is no slower on several GPUs", several(), (as_it_is, to(compile=True)), no_slower),
    Relation("compiled takes no more memory", one_gpu(), (as_it_is, to(compile=True)), no_more_memory),
    Relation(
        "one launch of all kernels is no slower and takes the same memory",
        one_gpu(),
        (as_it_is, to(cuda_graph=True)),
        both(no_slower, same_memory),
    ),
    Relation("a fused optimizer is no slower", one_gpu(), (to(optimizer="foreach"), to(optimizer="fused")), no_slower),
    Relation(
        "Transformer Engine's kernels are no slower than the library's",
        one_gpu(config="llama"),
        (as_it_is, to(stack="te")),
        no_slower,
    ),
    Relation(
        "Megatron's kernels are no slower than without its fused loss",
        one_gpu(config="llama"),
        (to(stack="megatron-lm"), to(stack="megatron")),
        no_slower,
    ),
    Relation(
        "Liger never has all scores", one_gpu(config="llama-words"), (as_it_is, to(stack="liger")), no_more_memory
    ),
    Relation(
        "grouped experts are no slower than the library's loop",
        one_gpu(config="mixtral"),
        (to(moe="huggingface"), to(moe="grouped")),
        no_slower,
    ),
    Relation(
        "scores of long sequences are clearly slower and larger than fused attention",
        one_gpu(config="llama", sequence_length=8192, gpu=TENSOR_CORES),
        (to(attention="flash"), to(attention="eager")),
        lambda before, after: clearly_slower(before, after, 1.2) and in_use(after) > 1.2 * in_use(before),
    ),
]

test_size, test_size_thoroughly = held(SIZE)
test_types, test_types_thoroughly = held(TYPES)
test_kernels, test_kernels_thoroughly = held(KERNELS)
