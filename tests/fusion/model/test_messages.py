"""Messages of libraries: whole, one line, without their stacks."""

from __future__ import annotations

import pytest

from fusion.model.library_messages import sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        (
            "Got invalid dimensions for input: x for the following indices\n index: 3 Got: 192 Expected: 48\n",
            "Got invalid dimensions for input: x for the following indices index: 3 Got: 192 Expected: 48",
        ),
        (
            'Traceback (most recent call last):\n  File "/a/b.cc", line 7, in f\n    f(x)\nValueError: no such axis\n',
            "ValueError: no such axis",
        ),
        ("Stack trace:\n  File 'x.cc'\nInternalError: cannot handle it\n", "InternalError: cannot handle it"),
        ("[10:11:12] /src/a.cc:7: InternalError: Check failed: (a == b) is false: sizes differ\n", "sizes differ"),
        ("Check failed: (it != end) is false: \n", "an internal check failed"),
        ("  0: tvm::relax::f\n  1: 0x00\n[bt] (3) lib.so\nkept", "kept"),
        (
            'In ir.Op(span=None, name="relax.add", arguments=(ir.ArgumentInfo(name="x1"),), support_level=10), the '
            "first is T.int64(13), the second is T.int64(-1)",
            "In relax.add, the first is 13, the second is -1",
        ),
        ("", "RuntimeError"),
    ],
)
def test_a_message_is_whole_and_has_no_stack(text, expected):
    assert sentence(RuntimeError(text)) == expected
