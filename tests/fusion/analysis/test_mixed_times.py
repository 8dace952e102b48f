"""What a network with layers in two number types takes: its kernels, and conversions where they meet."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

tvm = pytest.importorskip("tvm")
pytest.importorskip("ml_dtypes")
from tvm.relax import op

from costmodel.machines.machine_records import (
    ComputeRate,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
)
from fusion.model.conv_graph import BFLOAT16, FLOAT32, in_dtype, layers_covered
from fusion.relax.extract import extract_graph
from fusion.tuning.precision import MixedTimes, comparable, followers, predicted_in
from tests.fusion.bfloat16_models import CPU, casts, lowered
from tests.fusion.relax_models import kernel_names, module

FLAT = PerThreads(((1, 1e9), (2, 1e9)))
MACHINE = Machine(
    name="slow",
    kind="cpu",
    description="1 GB/s read, half of that written, 1e9 flop/s in both types, nothing to start a region",
    compute=dict.fromkeys((FLOAT32, BFLOAT16), ComputeRate(FLAT, "invented")),
    memory=(MemoryLevel("DRAM", 1e12, True, FLAT, "invented", PerThreads(((1, 5e8), (2, 5e8)))),),
    parallel_region=ParallelRegion(PerThreads(((1, 0.0), (2, 0.0))), "invented"),
)


def chain(net, x):
    """A stem that reads the image, a depthwise layer, pooling, two layers that read the pooled tensor."""
    x = net.relu6(net.conv(x, 32, 3, "stem"))
    x = net.relu6(net.depthwise(x, 3, "dw"))
    x = net(op.nn.max_pool2d(x, (2, 2), (2, 2)), "pool")
    return net(op.add(net.conv(x, 48, 1, "one"), net.conv(x, 48, 3, "other")))


@pytest.fixture(scope="module")
def graph():
    return extract_graph(module((1, 3, 18, 18), chain))


def times(graph, seconds=None) -> MixedTimes:
    covered = layers_covered(graph, BFLOAT16, CPU)
    known = predicted_in(graph, MACHINE, 2, BFLOAT16) if seconds is None else seconds
    return MixedTimes(graph, MACHINE, CPU, BFLOAT16, covered, known)


def zeros(graph) -> dict:
    return {in_dtype(node.operator, each): 0.0 for node in graph.nodes for each in (FLOAT32, BFLOAT16)}


IMAGE, WIDE, POOLED, ADDED = 3 * 18 * 18, 32 * 18 * 18, 32 * 9 * 9, 48 * 9 * 9


@pytest.mark.parametrize(
    ("rounded", "converted"),
    [
        ((), []),
        (("stem", "dw", "one", "other"), [IMAGE]),
        (("dw",), [WIDE, POOLED]),
        (("one",), [POOLED, ADDED]),  # what it adds to that of the other
        (("one", "other"), [POOLED]),
        (("stem",), [WIDE, IMAGE]),
    ],
)
def test_a_tensor_of_two_number_types_is_converted_once(graph, rounded, converted):
    found = times(graph)
    assert sorted(found.converted_values(rounded)) == sorted(converted)
    # 4 bytes of every value are read at 1 GB/s, 2 written at 0.5 GB/s.
    assert times(graph, zeros(graph))(rounded) == pytest.approx(8e-9 * sum(converted))


@pytest.mark.parametrize("keep", [(), ("dw",), ("stem",), ("one", "other"), ("stem", "dw", "pool", "one", "other")])
def test_what_is_priced_is_what_is_compiled(graph, keep):
    """Casts by themselves in the compiled network; the result, which is no layer's input, is the last of them."""
    mod = module((1, 3, 18, 18), chain)
    names = {node.name for node in graph.nodes if not any(part in node.name for part in keep)}
    compiled = lowered(mod, keep=keep)
    own = casts(compiled)
    rounded = names - followers(graph)
    assert len(own) == len(times(graph).converted_values(rounded)), kernel_names(compiled)


def test_pooling_follows_the_layer_before_it(graph):
    pool = next(iter(followers(graph)))
    assert pool in times(graph).with_followers({"dw"}) and pool not in times(graph).with_followers({"one"})


def test_measured_times_count_where_both_types_were_measured(graph):
    predicted = predicted_in(graph, MACHINE, 2, BFLOAT16)
    node = graph.nodes[0]
    single, half = in_dtype(node.operator, FLOAT32), in_dtype(node.operator, BFLOAT16)
    assert comparable(graph, predicted, {single: 1.0}, BFLOAT16) == predicted
    both = comparable(graph, predicted, {single: 1.0, half: 0.25}, BFLOAT16)
    assert both[single] == 1.0 and both[half] == 0.25
    whole = times(graph)
    assert not whole.known({"stem"}, {half: 0.25}) and whole.known((), {n.operator: 1.0 for n in graph.nodes})
