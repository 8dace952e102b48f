"""Mixtures of experts: what a rank computes, holds and exchanges when ranks share them, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.base.errors import InputError, ModelError
from costmodel.operators.experts import ExpertRouting
from e2e.parallelism import ParallelGraph, parse_parallel
from e2e.parallelism.expert_parallel import Exchange, parts_met_in_groups
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Duration, ExecutionGraph, HostWork, Launch, Synchronize
from e2e.step.options import StepOptions
from tests.e2e.parallelism.small_models import spread_model

LAYERS, WIDTH, INNER, LENGTH, BATCH = 4, 64, 96, 32, 2
EXPERTS, CHOSEN = 8, 2
ROWS = BATCH * LENGTH * CHOSEN  # tokens of all experts together
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}
# Gate, up and down of all experts of a layer; everything else in it: attention, router, two norms.
EXPERT_PARAMETERS = EXPERTS * 3 * WIDTH * INNER
OTHER_PARAMETERS = WIDTH * WIDTH * (2 + 2 * 2 // 4) + EXPERTS * WIDTH + 2 * WIDTH


def spread(text: str, node_gpus: int | None = None, asked: dict[str, Any] | None = None, **more: Any) -> ParallelGraph:
    step = StepOptions(batch_size=BATCH, sequence_length=LENGTH, dtype="bfloat16", **(asked or {}))
    return spread_model({**MIXTRAL, **more}, text, step, node_gpus=node_gpus)


def grouped(built: ParallelGraph) -> list[Any]:
    tasks = built.graph.ranks[0].tasks
    return [each for task in tasks if task.name == "aten::_grouped_mm" for each in task.operators]


def collectives(built: ParallelGraph, group: str) -> list[Any]:
    tasks = built.graph.ranks[0].tasks
    found = [task.collective for task in tasks if task.collective is not None]
    return [each for each in found if group in each.group]


def test_all_experts_are_one_product_of_equally_many_rows_each():
    found = Counter((each.counts, each.n, each.k, each.wrt) for each in grouped(spread("dp=1")))
    shares = (ROWS // EXPERTS,) * EXPERTS
    assert found == {
        (shares, 2 * INNER, WIDTH, "rows"): LAYERS,  # gate and up
        (shares, WIDTH, INNER, "rows"): LAYERS,  # down
        (shares, INNER, WIDTH, "rows"): LAYERS,  # gradients of the rows
        (shares, WIDTH, 2 * INNER, "rows"): LAYERS,
        (shares, INNER, WIDTH, "weight"): LAYERS,  # and of the weights, which are stored (out, in)
        (shares, WIDTH, 2 * INNER, "weight"): LAYERS,
    }
    forward = 2 * ROWS * 3 * WIDTH * INNER
    assert sum(each.flops for each in grouped(spread("dp=1"))) == 3 * LAYERS * forward


def test_tokens_go_to_their_experts_and_back_in_both_passes():
    built = spread("dp=4,ep=4,micro-batches=2")
    sizes = Counter((each.kind, each.size_bytes) for each in collectives(built, "ep"))
    assert sizes[("all_to_all", ROWS * WIDTH * 2)] == 2 * 4 * LAYERS
    weights = sizes.total() - sizes[("all_to_all", ROWS * WIDTH * 2)]
    assert weights == 2 * 2 * LAYERS, "routing weights go there, their gradients back"
    assert {tuple(each.ranks) for each in collectives(built, "ep")} == {(0, 1, 2, 3)}


def reduced(built: ParallelGraph) -> dict[str, tuple[int, int]]:
    """Group -> ranks, bytes in all; without what is exchanged inside layers."""
    found: dict[str, tuple[int, int]] = {}
    for each in collectives(built, "stage"):
        ranks, size = found.get(f"{each.kind}: {each.group}", (len(each.ranks), 0))
        found[f"{each.kind}: {each.group}"] = (ranks, size + each.size_bytes)
    return found


def test_gradients_of_experts_are_summed_over_those_that_hold_the_same():
    outside = (2 * 512 + 1) * WIDTH  # embedding, head, last norm
    dense, experts = (LAYERS * OTHER_PARAMETERS + outside) * 2, LAYERS * EXPERT_PARAMETERS * 2
    assert reduced(spread("dp=8")) == {"all_reduce: data of stage 0": (8, dense + experts)}
    assert reduced(spread("dp=8,ep=4")) == {
        "all_reduce: data of stage 0": (8, dense),
        "all_reduce: data of experts of stage 0": (2, experts // 4),
    }
    assert reduced(spread("dp=8,ep=8")) == {"all_reduce: data of stage 0": (8, dense)}


def test_shared_experts_are_gathered_from_those_that_hold_the_same():
    found = reduced(spread("fsdp=8,ep=4"))
    assert {group: ranks for group, (ranks, _) in found.items()} == {
        "all_gather: shards of stage 0": 8,
        "all_gather: shards of experts of stage 0": 2,
        "reduce_scatter: gradients of stage 0": 8,
        "reduce_scatter: gradients of experts of stage 0": 2,
    }
    assert found["reduce_scatter: gradients of experts of stage 0"][1] == LAYERS * EXPERT_PARAMETERS * 2 // 4
    (ranks,) = {each.ranks for each in collectives(spread("fsdp=8,ep=4"), "shards of experts")}
    assert ranks == (0, 4)


# Of one rank of two that share the layers and keep their parts of the sequence, with whole experts.
WHOLE = "tp=2,sp=yes,etp=1"


def test_whole_experts_get_the_rows_of_a_part_of_the_sequence_of_every_neighbour():
    """Half of the rows leave a rank that has half of the tokens, to its neighbours of tp first."""
    built = spread(f"dp=2,ep=4,{WHOLE}")
    sizes = Counter((each.kind, each.size_bytes) for each in collectives(built, "ep"))
    assert sizes[("all_to_all", ROWS // 2 * WIDTH * 2)] == 4 * LAYERS
    assert sizes.total() == 6 * LAYERS, "routing weights there, their gradients back"
    assert {tuple(each.ranks) for each in collectives(built, "ep")} == {(0, 1, 2, 3)}
    split = spread("dp=4,ep=4,tp=2,sp=yes")
    assert {tuple(each.ranks) for each in collectives(split, "ep")} == {(0, 2, 4, 6)}
    assert max(each.size_bytes for each in collectives(split, "ep")) == ROWS * WIDTH * 2, "of the whole sequence"


def test_whole_experts_are_computed_by_as_many_ranks():
    whole = grouped(spread("dp=1"))
    apart = grouped(spread(f"dp=2,ep=4,{WHOLE}"))
    assert {len(each.counts) for each in apart} == {EXPERTS // 4}
    assert {(each.n, each.k) for each in apart} == {(each.n, each.k) for each in whole}
    assert sum(each.flops for each in apart) * 2 == sum(each.flops for each in whole)


def test_around_whole_experts_nothing_is_gathered():
    """Of a layer the attention alone gathers its input, in both passes and for its weights' gradients."""

    def gathered(text: str) -> int:
        kinds = Counter(each.kind for each in collectives(spread(text), "tp"))
        return kinds["all_gather"] + kinds["reduce_scatter"]

    # Gathers, scatters of both passes and gathers again of attention and mixture, against attention alone.
    assert gathered("dp=2,ep=2,tp=2,sp=yes") - gathered(f"dp=2,ep=2,{WHOLE}") == 5 * LAYERS


def test_what_stands_beside_whole_experts_gathers_its_input_itself():
    kinds = {
        text: Counter(each.kind for each in collectives(spread(text, **{**DEEPSEEK, **ALONE}), "tp"))
        for text in ("tp=2,sp=yes", WHOLE)
    }
    assert kinds[WHOLE] == kinds["tp=2,sp=yes"], "the mixture itself does not, instead"


def test_packed_products_beside_the_experts_are_split_too():
    whole, half = (spread(text, asked={"stack": "megatron"}, **{**DEEPSEEK, **ALONE}) for text in ("dp=1", WHOLE))
    # Gate and up of the shared expert in one product, whose width no other has.
    widths = [
        {each.n for task in built.graph.ranks[0].tasks for each in task.operators if hasattr(each, "n")}
        for built in (whole, half)
    ]
    assert 2 * INNER in widths[0] and INNER in widths[1]


def test_gradients_of_whole_experts_are_summed_over_those_that_hold_the_same():
    experts = LAYERS * EXPERT_PARAMETERS * 2

    def of_experts(text: str) -> list[tuple[tuple[int, ...], int]]:
        found: Counter[tuple[int, ...]] = Counter()
        for each in collectives(spread(f"{text},{WHOLE}"), "data of experts"):
            found[tuple(each.ranks)] += each.size_bytes
        return list(found.items())

    assert of_experts("dp=2") == [((0, 1, 2, 3), experts)]
    assert of_experts("dp=4,ep=4") == [((0, 4), experts // 4)]
    assert of_experts("dp=2,ep=4") == []
    # Two ranks hold all: those of tp. The same ranks sum them as everything else.
    (dense,) = {tuple(each.ranks) for each in collectives(spread(f"dp=4,ep=2,{WHOLE}"), "data of stage")}
    assert dense == (0, 2, 4, 6) and of_experts("dp=4,ep=2") == []
    shared = collectives(spread(f"fsdp=4,ep=4,{WHOLE}"), "shards of experts")
    assert {each.ranks for each in shared} == {(0, 4)}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp=2,sp=no,etp=1", "etp=1 needs sp=yes"),
        ("tp=4,sp=yes,etp=2", r"etp=2: experts are whole \(etp=1\) or split as the layers are \(etp=4\)"),
        (f"dp=2,ep=8,{WHOLE}", "ep=8 does not divide dp x cp x tp = 4"),
        (f"fsdp=2,ep=8,{WHOLE}", "ep=8 does not divide fsdp x cp x tp = 4"),
    ],
)
def test_whole_experts_that_contradict_the_rest_are_named(text, named):
    with pytest.raises(InputError, match=named):
        parse_parallel(text)


def test_layers_without_experts_have_none_to_keep_whole():
    with pytest.raises(InputError, match="etp=1: the layers of model type 'llama' have no experts"):
        spread(WHOLE, model_type="llama")


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        ("dp=3,ep=3", {}, "ep=3 does not divide 8 experts"),
        ("dp=4,ep=3", {}, "ep=3 does not divide dp x cp = 4"),
        ("dp=4,fsdp=2,ep=4", {}, "ep=4 does not divide fsdp x cp = 2"),
        ("dp=4,ep=4", {"model_type": "llama"}, "model type 'llama' have no experts to divide"),
    ],
)
def test_what_cannot_be_divided_is_said(text, more, named):
    with pytest.raises(InputError, match=named):
        spread(text, **more)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": INNER,
    "intermediate_size": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


# All layers alike, each with a shared expert.
ALONE = {"first_k_dense_replace": 0, "n_shared_experts": 1}


@pytest.mark.parametrize("text", ["dp=2,ep=2", "tp=2,sp=yes", "cp=2", "pp=2,micro-batches=2"])
def test_dense_layers_at_the_front_have_no_experts(text):
    """Two of four: DeepSeek-V3 has three of 61, as many as are captured."""
    built = spread(text, **DEEPSEEK, first_k_dense_replace=2)
    ranks = built.graph.ranks
    count = sum(task.name == "aten::_grouped_mm" for rank in ranks for task in rank.tasks)
    passes = 2 if "micro" in text else 1
    assert count == passes * 2 * 6, "two products, each with two of its gradients, in two layers"


def test_layers_of_other_kinds_hold_other_parameters():
    def held(dense: int) -> int:
        return spread("dp=1", **DEEPSEEK, first_k_dense_replace=dense).memory[0].breakdown["parameters"]

    # A dense MLP of three products instead of experts, one shared expert, the router and its bias (a buffer in FP32).
    change = 3 * WIDTH * (EXPERTS * INNER + INNER - 128) + EXPERTS * WIDTH
    assert held(1) - held(2) == pytest.approx(2 * change, abs=64) and held(2) - held(3) == held(1) - held(2)


def test_dense_layers_elsewhere_are_refused():
    with pytest.raises(InputError, match="first_k_dense_replace=4: --parallel takes dense layers at the front alone"):
        spread("dp=2", **DEEPSEEK, first_k_dense_replace=4)
    with pytest.raises(InputError, match=r"mlp_only_layers=\[3\]"):
        spread("dp=2", model_type="qwen3_moe", num_experts=EXPERTS, mlp_only_layers=[3])


def test_a_product_that_no_rule_splits_is_named():
    """Before, every rank would have computed it whole without a word."""
    with pytest.raises(
        InputError, match=r"layers of model type 'phi3' \(self_attn.qkv_proj\) cannot be split; use tp=1"
    ):
        spread("tp=2", model_type="phi3", pad_token_id=0)


def test_experts_elsewhere_are_not_left_whole():
    with pytest.raises(InputError, match=r"'granitemoe' \(block_sparse_moe.experts.down_proj, .*\) cannot be split"):
        spread("tp=2", model_type="granitemoe")


def test_numbers_of_heads_are_split():
    """gpt-oss has a sink for every head, and experts of (in, out) with biases."""
    more = {"model_type": "gpt_oss", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    whole, half = (grouped(spread(text, **more)) for text in ("dp=1", "tp=2"))
    assert sum(each.flops for each in half) * 2 == sum(each.flops for each in whole) > 0
    assert {len(each.counts) for each in grouped(spread("dp=2,ep=2", **more))} == {EXPERTS // 2}


def test_a_rank_that_cannot_run_its_part_is_an_error_of_one_line():
    """OLMo normalises the queries of all heads together."""
    with pytest.raises(ModelError, match=r"config.json: the model cannot be run: .*; use tp=1") as caught:
        spread("tp=2", model_type="olmoe")
    assert "\n" not in str(caught.value)


def work(built: ParallelGraph) -> float:
    """Operations of all ranks in products, per sequence."""
    ranks, alike = built.graph.ranks, built.graph.multiplicity
    return (
        sum(
            alike[rank.rank] * operator.flops
            for rank in ranks
            for task in rank.tasks
            for operator in task.operators
            if type(operator).__name__ in ("Gemm", "GroupedGemm", "Attention")
        )
        / built.samples
    )


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,ep=2,sp=yes",
        "fsdp=2,cp=2,ep=4,micro-batches=2",
        "cp=2,tp=2,pp=2,zero=2,ep=2,micro-batches=2,schedule=interleaved",
        "dp=2,pp=3,first-layers=0,last-layers=0,micro-batches=3",
    ],
)
def test_however_a_model_is_spread_its_products_stay_the_same(text):
    """The router alone is computed by every tensor-parallel rank."""
    assert work(spread(text)) == pytest.approx(work(spread("dp=1")), rel=0.03)


def test_a_token_is_sent_once_to_a_rank_that_has_both_of_its_experts():
    """Two of eight experts on four ranks of two: both are on one rank for one in seven tokens."""
    built = spread("dp=4,ep=4,ep-dispatch=deepep")
    sent = round(BATCH * LENGTH * (1 + 6 / 7))
    sizes = Counter((each.kind, each.size_bytes) for each in collectives(built, "ep"))
    assert sizes == {("all_to_all", sent * WIDTH * 2): 4 * LAYERS}
    assert work(built) == pytest.approx(work(spread("dp=4,ep=4")))


def test_a_token_crosses_the_network_once_per_node():
    """Four ranks on two nodes: four of eight experts are on a node, so that 3/7 of the pairs are on one."""
    built = spread("dp=4,ep=4,ep-dispatch=deepep", node_gpus=2)
    across, inside = (collectives(built, f"ep {where} nodes") for where in ("across", "inside"))
    assert {tuple(each.ranks) for each in across} == {(0, 2)} and {tuple(each.ranks) for each in inside} == {(0, 1)}
    assert {each.size_bytes for each in across} == {round(BATCH * LENGTH * (1 + 4 / 7)) * WIDTH * 2}
    assert {each.size_bytes for each in inside} == {round(BATCH * LENGTH * (1 + 6 / 7)) * WIDTH * 2}
    assert len(across) == len(inside) == 4 * LAYERS


@pytest.mark.parametrize("overlap", ["", ",micro-batches=2,ep-overlap=yes"])
def test_both_hops_of_a_token_go_at_once(overlap):
    """What arrives in a node is handed on while the rest arrives: a layer waits for the longer hop, not for both."""
    built = spread(f"dp=4,ep=4,ep-dispatch=deepep{overlap}", node_gpus=2)

    def step(across: float, inside: float) -> float:
        seconds = {"ep across nodes": across, "ep inside nodes": inside}
        return simulate(timed(built.graph, seconds)).step_seconds

    exchanges = 4 * LAYERS * (2 if overlap else 1)
    assert step(3.0, 1.0) == step(3.0, 3.0) == step(1.0, 3.0) == pytest.approx(3.0 * exchanges)


def timed(graph: ExecutionGraph, seconds: dict[str, float]) -> ExecutionGraph:
    """``graph`` where nothing but collectives of the groups named takes time."""
    nothing = Duration.measured(0.0)

    def task(each: Any) -> Any:
        group = "" if each.collective is None else each.collective.group
        return replace(
            each, duration=Duration.measured(sum(s for name, s in seconds.items() if group.startswith(name)))
        )

    def action(each: Any) -> Any:
        known = not isinstance(each, HostWork | Launch | Synchronize) or each.duration is not None
        return each if known else replace(each, duration=nothing)

    ranks = tuple(
        replace(
            rank,
            tasks=tuple(map(task, rank.tasks)),
            threads={name: tuple(map(action, actions)) for name, actions in rank.threads.items()},
        )
        for rank in graph.ranks
    )
    return replace(graph, ranks=ranks)


def test_the_slowest_rank_of_an_uneven_routing_computes_and_receives_more():
    uneven = spread("dp=4,ep=4", asked={"routing": ExpertRouting(alpha=1.2)})
    even = spread("dp=4,ep=4")
    assert work(uneven) > 1.2 * work(even)
    largest = [max(each.size_bytes for each in collectives(built, "ep")) for built in (even, uneven)]
    assert largest[1] > largest[0]


def test_the_form_of_the_library_sorts_and_gathers():
    names = [
        {task.name for task in spread("dp=1", asked={"moe": form}).graph.ranks[0].tasks}
        for form in ("grouped", "huggingface")
    ]
    assert "moe::permute" in names[0] and "aten::index_put_" not in names[0]
    assert "moe::permute" not in names[1] and "aten::index_put" in " ".join(names[1])
    with pytest.raises(InputError, match="ep-dispatch=deepep needs --moe grouped"):
        spread("dp=4,ep=4,ep-dispatch=deepep", asked={"moe": "huggingface"})


def test_overlapped_exchanges_hold_up_the_next_exchange_alone():
    """Between an exchange and the wait for it there is work."""

    def waits(text: str) -> list[int]:
        from e2e.step.execution_graph import Launch, StreamWait

        rank = spread(text).graph.ranks[0]
        between, counted = 0, []
        for action in (each for thread in rank.threads.values() for each in thread):
            if isinstance(action, Launch):
                task = rank.tasks[action.task]
                exchange = task.collective is not None and "ep" in task.collective.group
                between = 0 if exchange else between + 1
            elif isinstance(action, StreamWait) and action.stream == 0:
                counted.append(between)
        return counted

    apart, beside = waits("dp=4,ep=4,micro-batches=2"), waits("dp=4,ep=4,micro-batches=2,ep-overlap=yes")
    assert apart.count(0) > beside.count(0)
    with pytest.raises(InputError, match="ep-overlap=yes needs micro-batches=2"):
        spread("dp=4,ep=4,ep-overlap=yes")


def products(built: ParallelGraph) -> Counter[str]:
    return Counter(type(each).__name__ for task in built.graph.ranks[0].tasks for each in task.operators)


def test_linear_layers_and_experts_are_trained_in_8_bits():
    """Four projections of attention and two products of experts per layer, three products each."""
    plain, eight = (products(spread("dp=1", asked={"precision": precision})) for precision in (None, "fp8-delayed"))
    assert eight["ScaledGemm"] == 3 * 4 * LAYERS and eight["GroupedGemm"] == plain["GroupedGemm"]
    assert plain["Gemm"] - eight["Gemm"] == 3 * 4 * LAYERS
    assert {each.dtype for each in grouped(spread("dp=1"))} == {"bfloat16"}
    names = [
        task.operators[0]
        for task in spread("dp=1", asked={"precision": "fp8-delayed"}).graph.ranks[0].tasks
        if task.name.startswith("float8::grouped")
    ]
    assert len(names) == 6 * LAYERS and {each.dtype for each in names} == {"float8"}


def test_tokens_that_keep_to_some_groups_of_experts_meet_fewer_nodes():
    """Eight of 256 experts: 5.3 of eight nodes; from four of eight groups, all four of them but seldom."""
    free = Exchange(64, "deepep")
    kept = Exchange(64, "deepep", groups=(4, 8))
    assert parts_met_in_groups(free, 256, 8, 8) == pytest.approx(5.30, abs=0.05)
    assert parts_met_in_groups(kept, 256, 8, 8) == pytest.approx(4 * (1 - 0.0942), abs=0.02)
    assert parts_met_in_groups(kept, 256, 8, 1) == parts_met_in_groups(free, 256, 8, 1) == 1


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16, 32])
def test_ranks_that_a_token_meets_are_those_of_drawn_tokens(parts: int) -> None:
    """256 experts in 8 groups, 4 of which a token may choose 8 experts from: 20,000 tokens drawn."""
    draw = np.random.default_rng(0)
    groups = draw.random((20_000, 8)).argsort(axis=1)[:, :4]
    scores = draw.random((20_000, 8, 32))
    allowed = np.zeros((20_000, 8, 1), dtype=bool)
    np.put_along_axis(allowed[:, :, 0], groups, True, axis=1)
    chosen = np.where(allowed, scores, -1.0).reshape(20_000, 256).argsort(axis=1)[:, -8:]
    found = np.mean([len(set(row)) for row in (chosen // (256 // parts)).tolist()])
    assert parts_met_in_groups(Exchange(parts, groups=(4, 8)), 256, 8, parts) == pytest.approx(found, rel=0.01)


def tasks_named(built: ParallelGraph, name: str) -> list[Any]:
    return [task for task in built.graph.ranks[0].tasks if task.name == name]


def test_transformer_engine_launches_a_product_for_every_expert():
    """As much work as in one launch; gate and up, down, the gradients of their rows and of their weights."""
    apart, together = (spread("dp=1", asked={"stack": stack}) for stack in ("megatron", "torchtitan"))
    each = [task.operators[0] for name in ("moe::each_mm", "moe::each_gradient") for task in tasks_named(apart, name)]
    assert len(each) == 6 * EXPERTS * LAYERS and not grouped(apart)
    assert {tuple(sorted((work.m, work.n, work.k))) for work in each} == {
        tuple(sorted((ROWS // EXPERTS, WIDTH, inner))) for inner in (INNER, 2 * INNER)
    }
    assert sum(work.flops for work in each) == sum(work.flops for work in grouped(together)) > 0
    # Gradients of weights sum over the rows, whose number no kernel needs to divide: stored rows are as wide as layers.
    gradients = [task.operators[0] for task in tasks_named(apart, "moe::each_gradient")]
    assert {work.k for work in each if work.transpose_a} == {ROWS // EXPERTS}
    assert [work.transpose_a for work in gradients].count(True) == len(gradients) == 2 * EXPERTS * LAYERS


def test_casts_that_seek_their_scale_are_one_for_every_expert_and_others_one_for_all():
    """`Float8CurrentScaling` has a scale for each expert's rows, of the present tensor; delayed scaling knows them."""
    found = {}
    for precision in ("fp8-current", "fp8-delayed"):
        built = spread("dp=1", asked={"precision": precision, "stack": "megatron"})
        found[precision] = [len(tasks_named(built, f"float8::each_{name}")) for name in ("amax", "cast_both", "mm")]
        sums = [
            [task.operators[0].split_sums for task in tasks_named(built, f"float8::each_{name}")]
            for name in ("mm", "gradient")
        ]
        assert sum(sums[0]) == len(sums[0]) / 2 and all(sums[1])  # gradients of rows and of matrices alone
        # Inputs of two products and their gradients; the search is a kernel, and the scale from it another.
    assert found["fp8-current"] == [2 * 4 * EXPERTS * LAYERS, 4 * EXPERTS * LAYERS, 4 * EXPERTS * LAYERS]
    assert found["fp8-delayed"] == [0, 0, 4 * EXPERTS * LAYERS]


def waits_for_counts(built: ParallelGraph) -> int:
    copies = [task.operators[0] for task in tasks_named(built, "Memcpy DtoH")]
    return sum(each.size_bytes == 4 * EXPERTS for each in copies)


def test_the_host_waits_for_the_numbers_of_rows_that_it_must_know():
    """To exchange rows, and to launch products one by one; not where all experts are padded to a capacity."""
    assert waits_for_counts(spread("dp=4")) == 0
    for text in ("dp=4,ep=4", "dp=4,ep=4,ep-dispatch=deepep"):
        assert waits_for_counts(spread(text)) == LAYERS
        capacity = {"routing": ExpertRouting(capacity=1.0)}
        assert waits_for_counts(spread(text, asked=capacity)) == 0
    assert waits_for_counts(spread("dp=1", asked={"stack": "megatron"})) == LAYERS


def test_rows_are_copied_to_a_padded_place_in_8_bits():
    """Before and after the products, and so are their gradients; a capacity is a multiple already."""

    def copies(text: str = "dp=4,ep=4", **asked: Any) -> int:
        built = spread(text, asked={"stack": "megatron", **asked})
        return len(tasks_named(built, "moe::permute")) + len(tasks_named(built, "moe::unpermute"))

    assert copies(precision="fp8-current") == copies() + 4 * LAYERS
    assert copies(precision="fp8-current", routing=ExpertRouting(capacity=1.0)) == copies()
    deepep = "dp=4,ep=4,ep-dispatch=deepep"
    assert copies(deepep, precision="fp8-current") == copies(deepep)
