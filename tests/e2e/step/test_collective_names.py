"""Names of collectives: every framework's name means one kind, and every kind has a name."""

from __future__ import annotations

import pytest

from e2e.step.collective_names import (
    BELOW_FUNCTIONAL,
    EAGER,
    EAGER_CALLS,
    FUNCTIONAL,
    INSIDE_LAYERS,
    OUTPUT_FIRST,
    kind_of,
    kind_of_short,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::recv_", "recv"),
        ("c10d::scatter_", "broadcast"),
        ("_c10d_functional::reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("nccl:all_to_all", "all_to_all"),
        ("_c10d_functional::wait_tensor", None),
        ("c10d::recv_any_source_", None),
        ("aten::add", None),
        ("allreduce_", None),
    ],
)
def test_operators_and_annotations(name: str, kind: str | None):
    assert kind_of(name) == kind


def test_names_of_profiles_have_no_namespace():
    names = {"_allgather_base": "all_gather", "_broadcast_oop": "broadcast", "alltoallv": None, "": None}
    assert {name: kind_of_short(name) for name in names} == names


def test_the_tables_agree():
    assert {kind: kind_of(name) for kind, name in EAGER_CALLS.items()} == {kind: kind for kind in EAGER_CALLS}
    assert all(kind_of(name) for name in OUTPUT_FIRST)
    for functional, eager in BELOW_FUNCTIONAL.items():
        functional = functional.removesuffix("_out")
        assert kind_of(f"{FUNCTIONAL}{functional}") == kind_of(f"{EAGER}{eager}")
    assert {kind for kind, _ in INSIDE_LAYERS.values()} <= EAGER_CALLS.keys()
