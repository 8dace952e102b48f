"""Sites are chains of convolutions with private intermediates that one template covers."""

from __future__ import annotations

from costmodel.operators.layers import Conv2d, Dense, Epilogue, Pool2d
from fusion.model.conv_graph import Graph, Node, find_sites
from schedules.contract.cpu_target import CpuTarget

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
PLAIN = Epilogue(bias=True, activation="relu6")
LINEAR = Epilogue(bias=True)
ADDS = Epilogue(bias=True, residual="before_activation")


def pointwise(inputs: int, outputs: int, epilogue: Epilogue = PLAIN) -> Conv2d:
    return Conv2d(1, inputs, 14, 14, outputs, (1, 1), epilogue=epilogue)


def depthwise(channels: int, epilogue: Epilogue = PLAIN) -> Conv2d:
    return Conv2d(1, channels, 14, 14, channels, (3, 3), padding=(1, 1, 1, 1), groups=channels, epilogue=epilogue)


def node(name: str, operator, data: str, residual: str | None = None) -> Node:
    return Node(name, operator, data, residual, (), f"{name}.out", ())


def graph(*nodes: Node, outputs: tuple[str, ...] = ()) -> Graph:
    """The last node's output is returned, and those of ``outputs`` too."""
    returned = (nodes[-1].output, *outputs)
    counts = {name: returned.count(name) for name in returned}
    for member in nodes:
        for name in (member.data, member.residual):
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
    return Graph(nodes, (), counts)


def names(sites) -> list[str]:
    return [site.name for site in sites]


def test_an_inverted_residual_offers_both_pairs_and_they_overlap():
    block = graph(
        node("expand", pointwise(16, 96), "x"),
        node("dw", depthwise(96), "expand.out"),
        node("project", pointwise(96, 16, ADDS), "dw.out", residual="x"),
    )
    sites = find_sites(block, CPU)
    assert {"expand+dw", "dw+project"} <= set(names(sites))
    by_name = {site.name: site for site in sites}
    assert by_name["expand+dw"].kind == "pointwise-depthwise"
    assert by_name["dw+project"].kind == "depthwise-pointwise"
    assert by_name["dw+project"].operator.epilogue == ADDS


def test_an_intermediate_with_a_second_user_is_no_site():
    second_user = graph(
        node("dw", depthwise(32), "x"),
        node("pw", pointwise(32, 32, ADDS), "dw.out", residual="dw.out"),
    )
    returned = graph(node("dw", depthwise(32), "x"), node("pw", pointwise(32, 64), "dw.out"), outputs=("dw.out",))
    alone = graph(node("dw", depthwise(32), "x"), node("pw", pointwise(32, 64), "dw.out"))
    assert names(find_sites(second_user, CPU)) == []
    assert names(find_sites(returned, CPU)) == []
    assert names(find_sites(alone, CPU)) == ["dw+pw"]


def test_a_residual_inside_is_no_site():
    """The projection adds a residual, so nothing may be fused behind it."""
    block = graph(node("project", pointwise(96, 16, ADDS), "y", residual="x"), node("dw", depthwise(16), "project.out"))
    assert names(find_sites(block, CPU)) == []


def test_a_branch_is_followed_on_each_side_of_the_split():
    """x feeds two depthwise convolutions; each has its own pointwise one."""
    branches = graph(
        node("a.dw", depthwise(32), "x"),
        node("b.dw", depthwise(32), "x"),
        node("a.pw", pointwise(32, 64), "a.dw.out"),
        node("b.pw", pointwise(32, 64, ADDS), "b.dw.out", residual="a.pw.out"),
    )
    assert names(find_sites(branches, CPU)) == ["a.dw+a.pw", "b.dw+b.pw"]


def test_a_stem_is_a_site_with_what_reads_it():
    stem = Conv2d(1, 3, 28, 28, 32, (3, 3), stride=(2, 2), padding=(0, 0, 1, 1), epilogue=PLAIN)
    for follower, kind in (
        (pointwise(32, 16), "conv-pointwise"),
        (depthwise(32), "conv-depthwise"),
        (Conv2d(1, 32, 14, 14, 24, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1)), "conv-conv"),
    ):
        (site,) = find_sites(graph(node("stem", stem, "x"), node("next", follower, "stem.out")), CPU)
        assert (site.name, site.kind) == ("stem+next", kind)


def test_what_no_template_fuses_is_no_site():
    grouped = Conv2d(1, 32, 14, 14, 32, (3, 3), padding=(1, 1, 1, 1), groups=2, epilogue=PLAIN)
    chain = graph(
        node("grouped", grouped, "x"),
        node("pw", pointwise(32, 32), "grouped.out"),
        node("pool", Pool2d("average", 1, 32, 14, 14, (14, 14)), "pw.out"),
        node("classifier", Dense(1, 32, 10, LINEAR), "pool.out"),
    )
    assert names(find_sites(chain, CPU)) == []
