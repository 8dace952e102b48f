"""Forward passes of a model spread over GPUs: no gradients, no optimizer, and memory accordingly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism import build_parallel_graph
from e2e.parallelism.spec import parse_parallel
from e2e.sources.predict_request import predict_request
from e2e.sources.requests import Model, SpreadModel
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.options import StepOptions

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
STEP = StepOptions(batch_size=2, sequence_length=128, dtype="bfloat16", attention="flash", mode="inference")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def collectives(graph: ExecutionGraph) -> list[tuple[str, int]]:
    return [(task.collective.kind, rank.rank) for rank in graph.ranks for task in rank.tasks if task.collective]


def test_a_replica_does_what_one_gpu_does(config):
    """The same kernels one after the other, and nothing to meet for; parameters and what one part makes in memory."""
    asked = {"model_config": config, "batch_size": 2, "sequence_length": 128, "mode": "inference", "gpu": "h100-sxm"}
    asked |= {"dtype": "bfloat16", "attention": "flash"}
    alone = predict_request(Model(**asked))
    spread = predict_request(SpreadModel(**asked, gpus=4, parallel=parse_parallel("dp=4")))
    kernels = [[task.name for task in each.graph.ranks[0].tasks if task.operators] for each in (alone, spread)]
    assert kernels[0] == kernels[1]
    assert not collectives(spread.graph)
    assert spread.prediction.iteration_seconds == pytest.approx(alone.prediction.iteration_seconds, rel=0.02)


def test_tensor_parallel_layers_meet_twice_and_once_for_the_words(config):
    graph = build_parallel_graph(config, parse_parallel("tp=4"), STEP).graph
    assert collectives(graph) == [("all_reduce", 0)] * (2 * 4 + 1)


def test_stages_send_forward_alone(config):
    built = build_parallel_graph(config, parse_parallel("pp=2,micro-batches=3"), STEP)
    assert collectives(built.graph) == [("send", 0)] * 3 + [("recv", built.graph.ranks[1].rank)] * 3
    phases = {call.phase for rank in built.graph.ranks for call in rank.calls.values() if call.id in _called(rank)}
    assert phases == {"forward"}


def _called(rank) -> set[int]:
    return {task.call for task in rank.tasks if task.call is not None and task.operators}


def test_memory_is_that_of_parameters_and_one_part(config):
    spec = parse_parallel("tp=2")
    trained, forward = (
        build_parallel_graph(config, spec, replace(STEP, mode=each)).memory[0] for each in ("train", "inference")
    )
    assert forward.breakdown["parameters"] == trained.breakdown["parameters"]
    assert forward.breakdown["gradients"] == forward.breakdown["optimizer_state"] == 0
    # In use besides the workspaces of libraries: parameters and the largest part.
    ours, theirs = (
        each.peak_bytes - each.breakdown["buffers"] - each.breakdown["reserve"] for each in (forward, trained)
    )
    assert ours < theirs / 2


@pytest.mark.parametrize("text", ["fsdp=4", "dp=4,recompute=full", "pp=4,micro-batches=4,schedule=gpipe"])
def test_what_only_training_has_is_refused(config, text):
    with pytest.raises(InputError, match=f"{text.split(',')[-1].split('=')[0]} is about .*--mode inference"):
        build_parallel_graph(config, parse_parallel(text), STEP)
