"""Models of the measured labels: what is captured is what the label files say was run, operator by operator.

The files list one layer of each model (an FX graph with shapes), besides what surrounds the layers.
"""

from __future__ import annotations

import ast
import csv
import gzip
from collections import Counter
from math import prod

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax
from e2e.capture.models.configurations import PRESETS
from e2e.capture.models.transformer import read_config
from e2e.capture.session import capture
from e2e.lowering import unknown_operators
from e2e.lowering.lower_trace import lower
from e2e.step.execution_graph import RankGraph
from e2e.step.options import StepOptions
from lab.data.data_folder import data_folder
from lab.steps.labelled_models import label_workload

DATA = data_folder() / "neusight"
LAYERS = {"gpt2": "n_layer", "bert": "num_hidden_layers", "opt": "num_hidden_layers"}
FILES = (
    "NVIDIA_A100-PCIE-40GB/bert_large-inf-512-8",
    "NVIDIA_A100-PCIE-40GB/gpt2_large-inf-1024-4",
    "NVIDIA_A100-PCIE-40GB/gpt3_27-inf-2048-8",
    "Tesla_T4/opt_13-inf-2048-2",
    "Tesla_V100-PCIE-32GB/bert_large-train-512-2",
    "Tesla_V100-PCIE-32GB/gpt2_large-train-1024-1",
)
# FX targets (functions, methods, module classes) and the kinds of element-wise records they are.
POINTWISE = {
    "truediv": "div",
    "add": "add",
    "mul": "mul",
    "pow": "pow",
    "tanh": "tanh",
    "Tanh": "tanh",
    "gelu": "gelu",
    "where": "where",
    "max": "maximum",
    "Dropout": "dropout",
    "ReLU": "relu",
}


def graph_of(config: dict, mode: str, batch: int, length: int) -> RankGraph:
    options = StepOptions(mode="inference" if mode == "inf" else "forward-backward")
    return lower(capture(label_workload(config, mode, batch, length, "case"), options))


def shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(shape) for shape in ast.literal_eval(text)]


def listed(name: str, training: bool) -> Counter:
    """What the file lists: (family, sizes) -> how often."""
    found: Counter = Counter()
    with gzip.open(DATA / "model_labels" / f"{name}.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            inputs, output = shapes(row["input_shapes"]), ast.literal_eval(row["output_shape"])
            found.update(_listed(_target(row), inputs, output, training))
    return found


def _target(row: dict[str, str]) -> str:
    if row["op"] == "call_module":
        return row["meta"].split("'nn_module_stack'")[1].rsplit("<class '", 1)[1].split("'")[0].rsplit(".", 1)[1]
    # "<built-in method addmm of ...>", "<function softmax at ...>", "view"
    words = row["target"].strip("<>").split()
    return words[0] if len(words) == 1 else words[2] if words[0] == "built-in" else words[1]


def _listed(target: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], training: bool) -> list:
    if target == "Linear":
        return [("product", 1, prod(output[:-1]), output[-1], inputs[0][-1])]
    if target == "addmm":
        return [("product", 1, *output, inputs[1][1])]
    if target in ("matmul", "bmm"):
        return [("product", prod(output[:-2]), *output[-2:], inputs[0][-1])]
    if target == "softmax":
        return [("softmax", prod(output[:-1]), output[-1])]
    if target == "LayerNorm":
        return [("layer_norm", prod(output[:-1]), output[-1])]
    if target in POINTWISE and (target != "Dropout" or training):
        # Sizes of shapes, counted on the host, are no tensors.
        return [] if prod(output) <= prod(output[:1]) else [(POINTWISE[target], prod(output))]
    return []


def captured(graph: RankGraph, smallest: int) -> Counter:
    """The same of the forward pass that was captured; element-wise work of ``smallest`` elements and above."""
    found: Counter = Counter()
    for task in graph.tasks:
        if task.call is not None and graph.calls[task.call].phase == "backward":
            continue
        for record in task.operators:
            if isinstance(record, Gemm):
                found["product", record.batch, record.m, record.n, record.k] += 1
            elif isinstance(record, Softmax) and record.kind == "softmax":
                found["softmax", record.rows, record.columns] += 1
            elif isinstance(record, Normalization):
                found[record.kind, record.rows, record.columns] += 1
            elif isinstance(record, Elementwise) and record.elements >= smallest:
                found[record.kind, record.elements] += 1
    return found


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared measurements are not at hand")
@pytest.mark.parametrize("name", FILES)
def test_operators_and_shapes_of_one_layer_are_those_of_the_label_file(name):
    model, mode, length, batch = name.split("/")[1].rsplit("-", 3)
    config = read_config(DATA / "model_configs" / f"{model}.json")
    config[LAYERS[config["model_type"]]] = 1
    graph = graph_of(config, mode, int(batch), int(length))
    assert not unknown_operators(graph)
    width = config.get("n_embd", config.get("hidden_size"))
    smallest = int(batch) * int(length) * width
    expected = Counter({key: count for key, count in listed(name, mode == "train").items() if _large(key, smallest)})
    assert captured(graph, smallest) == expected


def _large(key: tuple, smallest: int) -> bool:
    return key[0] in ("product", "softmax", "layer_norm") or key[1] >= smallest


def test_alike_tokens_use_one_expert_or_two_and_no_more_than_they_may_take():
    config = {**PRESETS["switch-xl-4"], "num_layers": 4, "num_decoder_layers": 4, "d_ff": 4096, "vocab_size": 512}
    config |= {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    graph = graph_of(config, "inf", 2, 128)
    products = Counter((record.m, record.k) for record in records(graph) if isinstance(record, Gemm))
    # Four sparse layers use 1, 2, 1 and 2 experts, each for 64 tokens of both sequences; four layers are dense.
    assert products[128, 1024] == 6
    assert products[256, 4096] == 4 + 2 * 4 + 4  # dense layers; outputs of attention, whose width is 4096 too


def records(graph: RankGraph) -> list:
    return [record for task in graph.tasks for record in task.operators]


def test_experts_of_a_built_in_model_take_equal_shares_up_to_their_capacity():
    from e2e.capture.models.catalog import build_from_config

    config = {**PRESETS["switch-base-8"], "num_layers": 2, "num_decoder_layers": 2, "expert_capacity": 16}
    config |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "d_ff": 3072}

    def rows(length: int) -> set[int]:
        options = StepOptions(mode="inference")
        graph = lower(capture(build_from_config(config, 2, length, options, "switch"), options))
        gemms = [record for record in records(graph) if isinstance(record, Gemm) and record.k == 3072]
        return {record.m for record in gemms} - {2 * length}

    assert rows(64) == {2 * 8}  # an eighth of 64 tokens of two sequences
    assert rows(256) == {2 * 16}  # 32 would be an eighth, 16 are the most
