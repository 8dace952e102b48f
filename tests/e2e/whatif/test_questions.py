"""Texts of ``--what-if``: what they mean, what they may not be, which of them go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.whatif.questions import (
    BatchChange,
    BatchedLookups,
    BucketChange,
    FasterHost,
    FasterKernels,
    FusedOperators,
    OtherHost,
    all_together,
    parse_what_if,
)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("batch=512", BatchChange(512)),
        ("bucket-mb=12.5", BucketChange(12.5)),
        ("batch-embeddings", BatchedLookups()),
        ("fuse:add|gelu", FusedOperators("add|gelu")),
        ("fuse:a+b", FusedOperators("a+b")),
        ("kernels:gemm=2x", FasterKernels("gemm", 2.0)),
        ("kernels:x=y=1.5", FasterKernels("x=y", 1.5)),
        ("host=1.5x", FasterHost(1.5)),
        ("host=2", FasterHost(2.0)),
        ("host=h200-server", OtherHost(Path("h200-server"))),
        ("host=tables/mine.json", OtherHost(Path("tables/mine.json"))),
    ],
)
def test_a_text_is_one_change(text, change):
    question = parse_what_if(text)
    assert question.changes == (change,) and question.texts == (text,)


def test_changes_are_joined_by_a_plus_and_made_in_an_order_of_their_own():
    question = parse_what_if("host=2x+kernels:gemm=2x+fuse:a+b+batch=8")
    assert question.changes == (FasterHost(2), FasterKernels("gemm", 2), FusedOperators("a+b"), BatchChange(8))
    assert [type(each) for each in question.ordered] == [BatchChange, FusedOperators, FasterKernels, FasterHost]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing"),
        ("faster", "'faster' is none of batch=N, kernels:FAMILY=Kx"),
        ("batch=0", "batch= takes a number of samples"),
        ("batch=two", "such as batch=512"),
        ("batch=32:512", "batch= takes a number of samples"),
        ("kernels:gemm", "kernels: needs a name|kernels: takes NAME=Kx"),
        ("kernels:gemm=0x", "kernels: takes NAME=Kx"),
        ("kernels:(=2x", "is no regular expression"),
        ("host=", "host= takes Kx"),
        ("host=-2x", None),
        ("stream:embedding=2", "is none of batch=N"),
        ("fuse:", "fuse: needs a name"),
        ("bucket-mb=nan", "bucket-mb= takes a size"),
        ("kernels:gemm=1e308x", r"1e308x: K must be from 1e-06 to 1e\+06"),
        ("host=.00000001x", "K must be from 1e-06"),
        ("batch=\u00b2", "batch= takes a number of samples"),
        ("batch=2+batch=4", "batch twice in one step"),
        ("host=2x+host=h200-server", "host twice in one step"),
    ],
)
def test_other_texts_are_refused_in_one_line(text, message):
    if message is None:
        assert isinstance(parse_what_if(text).changes[0], OtherHost)  # a file may be called so; it is looked for later
        return
    with pytest.raises(InputError, match=message) as caught:
        parse_what_if(text)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"--what-if {text}")


def test_questions_go_together_unless_one_has_all_or_two_contradict_each_other():
    first, second, both = (parse_what_if(text) for text in ("host=2x", "fuse:add", "host=2x+fuse:add"))
    every = all_together([first, second])
    assert every is not None and set(every.changes) == set(both.changes)
    assert all_together([first, second, both]) is None
    assert all_together([first]) is None
    assert all_together([parse_what_if("batch=2"), parse_what_if("batch=4")]) is None
