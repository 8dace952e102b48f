from __future__ import annotations

import json

import pytest

from costmodel.base.input_files import decoded


def test_what_json_says_is_what_the_library_says():
    for text in ('{"a": [1, -2.5e3, null, "ü"]}', "[]", "3", '"x"'):
        assert decoded(text) == decoded(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "1" * 301, f"[{'9' * 5000}]", b"\xff\xfe\xfa"]
)
def test_whatever_is_wrong_is_a_value_error(text):
    with pytest.raises(ValueError):
        decoded(text)
