"""Small transformers spread over GPUs: what is communicated, held and computed, by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError, ProjectError
from costmodel.machines.cluster import single_gpu
from costmodel.machines.machine_file import load_machine
from e2e.explain.predictor import Setting, predict_graph
from e2e.lowering.lower_trace import lower_step
from e2e.parallelism import ParallelGraph, build_parallel_graph, parse_parallel
from e2e.parallelism.rewrites import Condenser
from e2e.price.host_overheads import load_overheads
from e2e.step.execution_graph import Launch, RankGraph, Synchronize, Task
from e2e.step.options import StepOptions

LAYERS, WIDTH, LENGTH, VOCABULARY = 4, 64, 32, 512
BATCH = 2
ACTIVATIONS = BATCH * LENGTH * WIDTH * 2  # bytes in bfloat16
LAYER = 12 * WIDTH * WIDTH + 13 * WIDTH  # parameters: 4 products, their biases, two layer norms
STEP = StepOptions(batch_size=BATCH, sequence_length=LENGTH, dtype="bfloat16")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("gpt"), {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return write(tmp_path_factory.mktemp("llama"), {"model_type": "llama", "num_key_value_heads": 2, **sizes})


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "vocab_size": VOCABULARY, "n_positions": LENGTH}), encoding="utf-8")
    return path


@cache
def spread(model: Path, text: str, step: StepOptions = STEP) -> ParallelGraph:
    return build_parallel_graph(model, parse_parallel(text), step, captures=model.parent / "captures")


def collectives(built: ParallelGraph, rank: int = 0, group: str = "") -> list[tuple[str, int]]:
    """(kind, bytes) of the collectives of one rank of the graph whose group contains ``group``."""
    tasks = built.graph.ranks[rank].tasks
    found = [task.collective for task in tasks if task.collective is not None]
    return [(each.kind, each.size_bytes) for each in found if group in each.group]


def test_one_gpu_is_the_single_gpu_prediction(gpt: Path) -> None:
    from e2e.capture import build_from_file, capture
    from e2e.step.options import StepOptions

    options = StepOptions(dtype="bfloat16")
    trace = capture(build_from_file(gpt, BATCH, LENGTH, options), options)
    setting = Setting(load_machine("h100-sxm"), load_overheads())
    lowered = lower_step(trace, StepOptions(compile=setting.compiled))
    cluster = single_gpu(setting.machine)
    alone = predict_graph(lowered.graph, setting, cluster, lowered.memory).prediction
    built = spread(gpt, "dp=1")
    spread_out = predict_graph(built.graph, setting, cluster).prediction
    assert spread_out.kernels == alone.kernels
    assert spread_out.iteration_seconds == pytest.approx(alone.iteration_seconds, rel=1e-3)
    assert spread_out.gpu_active_seconds == pytest.approx(alone.gpu_active_seconds, rel=1e-6)
    assert collectives(built) == []
    # Workspaces are counted per thread in a capture, and once here.
    held, held_alone = (
        usage.allocated_bytes - usage.breakdown["buffers"] for usage in (built.memory[0], lowered.memory[0])
    )
    assert held == pytest.approx(held_alone, rel=0.02)


def test_tensor_parallel_volume_of_a_layer(gpt: Path) -> None:
    """Two all-reduces of the activations forward and two backward per layer and micro-batch; one behind the embedding,
    one in front of the head, three of a float per token for the loss."""
    for count in (1, 3):
        found = Counter(collectives(spread(gpt, f"tp=2,micro-batches={count}"), group="tp"))
        assert found == {
            ("all_reduce", ACTIVATIONS): count * (4 * LAYERS + 2),
            ("all_reduce", BATCH * LENGTH * 4): count * 3,
        }


def test_sequence_parallel_moves_the_same_in_halves(gpt: Path) -> None:
    """All-gather and reduce-scatter instead of all-reduce, of embedding and head too: (n-1)/n of the activations each.
    What is all-reduced is left of the loss alone. The inputs of attention and MLP are gathered once more for the
    backward pass, each for all products that read it."""
    found = Counter(kind for kind, _ in collectives(spread(gpt, "tp=2,sp=yes"), group="tp"))
    assert found["all_reduce"] == 3
    assert found["all_gather"] == (4 + 2) * LAYERS + 2 and found["reduce_scatter"] == 4 * LAYERS + 2
    sizes = {(kind, size) for kind, size in collectives(spread(gpt, "tp=2,sp=yes"), group="tp") if kind != "all_reduce"}
    assert sizes == {("all_gather", ACTIVATIONS // 2), ("reduce_scatter", ACTIVATIONS)}


def test_the_gradient_of_an_input_is_computed_while_the_input_is_gathered_again(gpt: Path) -> None:
    """Of the products behind the gather the first does not wait for it, the next one does."""
    rank = spread(gpt, "tp=2,sp=yes").graph.ranks[0]
    tasks = {task.id: task for task in rank.tasks}
    actions = rank.threads["autograd"]
    names = [tasks[each.task].name if isinstance(each, Launch) else type(each).__name__ for each in actions]
    again = [place for place, each in enumerate(actions) if isinstance(each, Launch) and _again(rank, tasks[each.task])]
    assert len(again) == 2 * LAYERS
    for place in again:
        following = [
            name for name in names[place + 1 :] if name in ("aten::mm", "StreamWait", "c10d::_allgather_base_")
        ]
        assert following[:3] == ["aten::mm", "StreamWait", "aten::mm"]


def _again(rank: RankGraph, task: Task) -> bool:
    return task.call is not None and rank.calls[task.call].name == "parallel::all_gather_again"


@pytest.mark.parametrize("text", ["tp=2", "tp=2,sp=yes"])
def test_recomputed_attention_communicates_no_more(gpt: Path, llama: Path, text: str) -> None:
    """Selective recomputation repeats the attention's core alone (Korthikanti et al., section 5): it is inside one
    rank. Full recomputation runs whole layers again, with their communication: once more as much as forward (with
    sequence parallelism also the scatter in front of the first layer)."""
    for model in (gpt, llama):
        plain = Counter(collectives(spread(model, text), group="tp"))
        assert Counter(collectives(spread(model, f"{text},recompute=selective"), group="tp")) == plain
        full = Counter(collectives(spread(model, f"{text},recompute=full"), group="tp"))
        again = 4 * LAYERS + 1 if "sp" in text else 2 * LAYERS
        assert sum(full.values()) == sum(plain.values()) + again


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "opt", "hidden_size": WIDTH, "ffn_dim": 256, "word_embed_proj_dim": WIDTH}, "tp=2"),
        ({"model_type": "opt", "hidden_size": WIDTH, "ffn_dim": 256, "word_embed_proj_dim": WIDTH}, "tp=2,sp=yes"),
        ({"model_type": "bert", "hidden_size": WIDTH, "intermediate_size": 256}, "tp=4"),
    ],
)
def test_other_families_move_the_same(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    more = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    found = Counter(collectives(spread(write(tmp_path, {**config, **more}), text), group="tp"))
    if "sp" in text:
        assert found[("reduce_scatter", ACTIVATIONS)] == 4 * LAYERS + 2
    else:
        assert found[("all_reduce", ACTIVATIONS)] == 4 * LAYERS + 2


def test_lists_with_an_entry_per_layer_are_cut_too(tmp_path: Path) -> None:
    """Configurations that newer versions of the library write have them."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 128, "layer_types": ["full_attention"] * LAYERS}
    found = Counter(collectives(spread(write(tmp_path, {"model_type": "qwen2", **sizes, **more}), "tp=2"), group="tp"))
    assert found[("all_reduce", ACTIVATIONS)] == 4 * LAYERS + 2


def test_master_weights_cost_copies_and_memory(gpt: Path) -> None:
    """Moments and weights in FP32 are six times the parameters; in FP16 the host waits for the overflow check."""
    plain, mixed = spread(gpt, "dp=1"), spread(gpt, "dp=1,master-weights=yes")
    parameters = plain.memory[0].breakdown["parameters"]
    assert plain.memory[0].breakdown["optimizer_state"] == 2 * parameters
    # Blocks of 512 bytes: small parameters waste more of them in 16 bits.
    assert mixed.memory[0].breakdown["optimizer_state"] == pytest.approx(6 * parameters, rel=0.02)
    # Copies of the gradients in FP32 while the optimizer runs: more than what the small activations took.
    assert mixed.memory[0].operator == "optimizer"
    assert mixed.memory[0].breakdown["temporary"] >= 2 * parameters
    half = spread(
        gpt, "dp=1,master-weights=yes", StepOptions(batch_size=BATCH, sequence_length=LENGTH, dtype="float16")
    )

    def waits(built: ParallelGraph) -> int:
        return sum(isinstance(action, Synchronize) for action in built.graph.ranks[0].actions())

    names = Counter(task.name for task in mixed.graph.ranks[0].tasks)
    assert names["aten::_foreach_copy_"] >= 1
    assert waits(half) == waits(mixed) + 1


def test_data_parallel_reduces_every_gradient_once(gpt: Path) -> None:
    total = (LAYERS * LAYER + (VOCABULARY + LENGTH) * WIDTH + 2 * WIDTH) * 2
    found = collectives(spread(gpt, "dp=8,bucket-mb=0.1,micro-batches=2"))
    assert {kind for kind, _ in found} == {"all_reduce"}
    assert sum(size for _, size in found) == total
    assert collectives(spread(gpt, "dp=8,overlap=no")) == [("all_reduce", total)]


def test_runs_are_longer_where_there_are_more_kernels(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are about as many tasks however many kernels: here some 3,000 in runs of 2, 4, 8 and 16."""

    def runs(limit: int) -> int:
        monkeypatch.setattr("e2e.parallelism.parallel_graph.MANY_KERNELS", limit)
        condenser = Condenser(load_overheads(), kernels=2)
        built = build_parallel_graph(gpt, parse_parallel("dp=1,micro-batches=8"), STEP, condenser=condenser)
        return len(built.graph.ranks[0].tasks)

    counts = [runs(limit) for limit in (10**6, 1500, 750, 375, 188)]
    assert counts[0] > 2500
    assert counts == sorted(set(counts), reverse=True) and counts[-1] < counts[1] / 3, counts


def test_stages_share_the_tied_embedding_and_exchange_activations(gpt: Path) -> None:
    built = spread(gpt, "pp=2,micro-batches=4")
    assert [rank.rank for rank in built.graph.ranks] == [0, 1]
    for rank in (0, 1):
        assert collectives(built, rank, "embedding") == [("all_reduce", VOCABULARY * WIDTH * 2)]
        messages = [each for each in collectives(built, rank) if each[0] in ("send", "recv")]
        assert sorted(messages) == [("recv", ACTIVATIONS)] * 4 + [("send", ACTIVATIONS)] * 4


def test_a_world_of_thousands_folds_to_the_same_ranks(gpt: Path) -> None:
    few, many = spread(gpt, "dp=2,tp=2,pp=2,micro-batches=2"), spread(gpt, "dp=1024,tp=2,pp=2,micro-batches=2")
    assert [len(rank.tasks) for rank in few.graph.ranks] == [len(rank.tasks) for rank in many.graph.ranks]
    assert many.graph.multiplicity == {0: 2048, 2048: 2048}
    assert many.samples == BATCH * 2 * 1024
    sharded = spread(gpt, "fsdp=4096")
    assert len(sharded.graph.ranks) == 1 and sharded.graph.multiplicity == {0: 4096}


def test_groups_are_numbered_as_megatron_does(gpt: Path) -> None:
    """Tensor-parallel neighbours, then replicas, then stages."""
    built = spread(gpt, "tp=2,dp=3,pp=2,micro-batches=2")
    second = built.graph.ranks[1]
    assert second.rank == 6
    groups = {task.collective.group: task.collective.ranks for task in second.tasks if task.collective is not None}
    assert groups["tp of rank 6"] == (6, 7)
    assert groups["data of stage 1"] == (6, 8, 10)
    assert groups["activations 0-1"] == (0, 6)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp=3", "tp=3 does not divide 4 attention heads"),
        ("pp=3", "4 layers do not divide into 3 parts"),
        ("pp=2,micro-batches=2,schedule=interleaved,virtual-stages=4", "4 layers do not divide into 8 parts"),
    ],
)
def test_sizes_that_do_not_divide(gpt: Path, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        spread(gpt, text)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llama", "intermediate_size": 129}, "tp=2 does not divide mlp.gate_proj.weight, 129 x 64"),
        ({"model_type": "olmo2", "intermediate_size": 128}, "the model cannot be run: .*; use tp=1"),
    ],
)
def test_layers_that_are_not_split_whole_are_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = write(tmp_path, {**config, **sizes})
    with pytest.raises(ProjectError, match=named):
        spread(model, "tp=2")
    assert collectives(spread(model, "dp=2"))


def test_heads_of_keys_must_divide(llama: Path) -> None:
    with pytest.raises(InputError, match="2 key-value heads"):
        spread(llama, "tp=4")


def test_models_that_cannot_be_spread(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no transformer"):
        build_parallel_graph("resnet-50", parse_parallel("dp=2"))
    with pytest.raises(InputError, match="is not known; nearest"):
        build_parallel_graph("gpt9", parse_parallel("dp=2"))
    with pytest.raises(InputError, match="not alike"):
        build_parallel_graph("switch-base-8", parse_parallel("dp=2"))
    with pytest.raises(InputError, match="--dtype bfloat16 or float16"):
        build_parallel_graph("gpt2", parse_parallel("dp=2,master-weights=yes"))


def seconds_of(built: ParallelGraph) -> float:
    setting = Setting(load_machine("h100-sxm"), load_overheads())
    return predict_graph(built.graph, setting, single_gpu(setting.machine)).prediction.gpu_active_seconds


def test_compiled_layers_have_fewer_kernels_the_same_gradients_and_keep_less(llama: Path) -> None:
    plain = spread(llama, "dp=2")
    compiled = spread(llama, "dp=2", replace(STEP, compile=True))
    assert len(compiled.graph.ranks[0].tasks) < 0.6 * len(plain.graph.ranks[0].tasks)
    assert sum(size for _, size in collectives(compiled)) == sum(size for _, size in collectives(plain))
    assert compiled.memory[0].breakdown["activations"] < plain.memory[0].breakdown["activations"]
    assert seconds_of(spread(llama, "dp=1", replace(STEP, compile=True))) < seconds_of(spread(llama, "dp=1"))


def test_a_recomputed_layer_stops_where_nothing_more_is_needed(llama: Path) -> None:
    """The last product and the addition behind it are left out, once for each layer."""
    whole, stopping = (spread(llama, "recompute=full", replace(STEP, stack=each)) for each in (None, "huggingface"))
    tasks = [Counter(task.name for task in built.graph.ranks[0].tasks) for built in (whole, stopping)]
    assert tasks[0]["aten::mm"] - tasks[1]["aten::mm"] == LAYERS


def test_weight_gradients_that_products_add_up_need_no_addition(llama: Path) -> None:
    """Of a second micro-batch; the gradients are held as they are summed over the ranks, and no buckets besides."""
    ways = (("te", ""), ("megatron", ""), ("megatron", ",reduce-dtype=float32"))
    plain, fused, in_fp32 = (
        spread(llama, f"dp=2,micro-batches=2{more}", replace(STEP, stack=stack)) for stack, more in ways
    )
    additions = [sum(task.name == "aten::add_" for task in each.graph.ranks[0].tasks) for each in (plain, fused)]
    assert additions[0] - additions[1] >= 6 * LAYERS
    usual, narrow, wide = (each.memory[0].breakdown["gradients"] for each in (plain, fused, in_fp32))
    assert wide == pytest.approx(2 * usual, rel=0.02) and narrow == pytest.approx(usual, rel=0.02)
    assert plain.memory[0].breakdown["buffers"] >= usual


def test_sharded_weights_in_fp32_have_no_copy_of_their_own(llama: Path) -> None:
    """8 bytes of moments, where 16-bit parameters with master weights in shares have 12; weights of 4 bytes, not 2."""
    texts = ("fsdp=8,zero=2,master-weights=yes", "fsdp=8,master-weights=yes", "fsdp=8")
    copies, own, plain = (spread(llama, text).memory[0].breakdown for text in texts)
    elements = copies["optimizer_state"] / 12
    assert own["optimizer_state"] == pytest.approx(8 * elements, rel=0.02)
    assert own["parameters"] - plain["parameters"] == pytest.approx(2 * elements, rel=0.1)  # in blocks of 512 bytes


def test_frozen_weights_have_no_gradients_to_reduce_and_no_optimizer_state(llama: Path) -> None:
    """Per layer, rank 4 of queries (64 wide), keys and values (32 wide each)."""
    adapted = spread(llama, "dp=2", replace(STEP, lora=4))
    elements = LAYERS * 4 * (3 * WIDTH + WIDTH + 2 * WIDTH // 2)
    assert sum(size for _, size in collectives(adapted)) == 2 * elements
    assert adapted.memory[0].breakdown["optimizer_state"] == 2 * 2 * elements
    assert adapted.memory[0].breakdown["parameters"] > 10 * adapted.memory[0].breakdown["optimizer_state"]
    with pytest.raises(InputError, match="adapters are not split over ranks"):
        spread(llama, "tp=2", replace(STEP, lora=4))


def test_frozen_shards_are_gathered_all_the_same(llama: Path) -> None:
    whole, adapted = (collectives(spread(llama, "fsdp=2", replace(STEP, lora=each))) for each in (None, 4))
    gathered = [sum(size for kind, size in each if kind == "all_gather") for each in (whole, adapted)]
    scattered = [sum(size for kind, size in each if kind == "reduce_scatter") for each in (whole, adapted)]
    assert gathered[1] > gathered[0] and scattered[1] < 0.1 * scattered[0]


def test_documents_of_packed_sequences_shorten_attention_alone(llama: Path) -> None:
    from costmodel.operators.attention import Attention

    def operators(step: StepOptions) -> list[Any]:
        tasks = spread(llama, "dp=2", step).graph.ranks[0].tasks
        return [record for task in tasks for record in task.operators]

    fused = replace(STEP, attention="flash2")
    whole, packed = operators(fused), operators(replace(fused, document_length=8))
    assert [type(each) for each in whole] == [type(each) for each in packed]
    seen = [each.pairs for each in packed if isinstance(each, Attention)]
    assert seen and set(seen) == {4 * 36}  # of 32 tokens, 528 for one document
    assert [each for each in whole if not isinstance(each, Attention)] == [
        each for each in packed if not isinstance(each, Attention)
    ]
    with pytest.raises(InputError, match="ranks share whole sequences; use cp=1"):
        spread(llama, "cp=2", replace(fused, document_length=8))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_layer_keeps_what_it_was_given(compiled: bool, tmp_path: Path) -> None:
    """Compiled code keeps much in registers, but not what one layer hands to the next."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}

    def activations(layers: int) -> int:
        folder = tmp_path / str(layers)
        folder.mkdir()
        model = write(folder, {"model_type": "llama", "num_hidden_layers": layers, **sizes})
        step = replace(STEP, batch_size=64, compile=compiled, stack="torchtitan")
        return spread(model, "fsdp=2,recompute=full", step).memory[0].breakdown["activations"]

    assert activations(12) - activations(6) == 6 * 64 * LENGTH * WIDTH * 2


def test_compiled_layers_keep_of_named_operators_what_is_needed(tmp_path: Path) -> None:
    """Per layer eager code keeps its input, queries, values, what attention gives, gate and the result of the last
    product, which nothing behind it needs: compiled code does not keep that."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}

    def activations(layers: int, compiled: bool) -> int:
        folder = tmp_path / f"{layers}-{compiled}"
        folder.mkdir()
        model = write(folder, {"model_type": "llama", "num_hidden_layers": layers, **sizes})
        step = replace(STEP, batch_size=64, compile=compiled, stack="torchtitan", attention="flash2")
        return spread(model, "fsdp=2,recompute=operators", step).memory[0].breakdown["activations"]

    eager, compiled = ((activations(12, each) - activations(6, each)) / 6 for each in (False, True))
    assert eager - compiled == 64 * LENGTH * WIDTH * 2
    assert compiled == 64 * LENGTH * 2 * (3 * WIDTH + WIDTH // 2 + 128)


def test_the_loss_of_dtensor_keeps_logarithms_and_makes_its_gradient_of_three_more(llama: Path) -> None:
    """Where ranks share the classes; sums over them as always."""
    step = replace(STEP, batch_size=256, stack="torchtitan")
    shared, alone = (spread(llama, f"tp=2,sp=yes,micro-batches=2{each}", step) for each in ("", ",pp=2"))
    found = Counter(collectives(shared, group="tp"))
    assert found["all_reduce", 4 * 256 * LENGTH] == 2 * 3, "of every token its maximum, sum and label's score"
    scores = 4 * 256 * LENGTH * VOCABULARY // 2
    usual = spread(llama, "tp=2,sp=yes,micro-batches=2", replace(step, stack="huggingface"))
    more = shared.memory[0].allocated_bytes - usual.memory[0].allocated_bytes
    assert more == pytest.approx(scores, rel=0.1), "four of the size of the scores at a time, and not three"
    assert max(each.allocated_bytes for each in alone.memory.values()) > 4 * scores


def test_products_of_megatron_add_to_gradients_as_they_are_summed(llama: Path) -> None:
    def adding(stack: str, text: str) -> Counter[str]:
        tasks = spread(llama, text, replace(STEP, stack=stack)).graph.ranks[0].tasks
        found = Counter(getattr(each, "accumulates", "") for task in tasks for each in task.operators)
        return Counter({dtype: count for dtype, count in found.items() if dtype})

    # Queries, keys and values together, what is behind attention, gate and up together, down; and the head.
    assert adding("megatron", "dp=2") == {"bfloat16": 4 * LAYERS + 1} and not adding("te", "dp=2")
    assert adding("megatron", "dp=2,reduce-dtype=float32") == {"float32": 4 * LAYERS + 1}
