"""Damaged copies of valid inputs: trees of JSON and YAML, protobuf messages, lines of text, bytes, archives of arrays.

Structure-aware: what comes out is mostly well-formed, so that the checks behind a parser are reached and not the parser
alone. Every function takes the ``random.Random`` that decides, and nothing else: a case is told by its number.
"""

from __future__ import annotations

import copy
import io
import json
import random
import string
from collections.abc import Iterator
from typing import Any

import numpy as np

Tree = Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e300, -1e300, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "0", "-1", "nan", "inf", "null", "x", "float99", "float32", "int4", "aten::add", "cuda:0", "cuda:x"),
    *("../../etc/passwd", "/", "a\0b", "ä☃\U0001f600", "%s%n", "{}", "[]", "[[1,2],[3", "[1, 2, 3]", "1e999", "0x10"),
    *("1_000", "2001-13-45", "12:34:99", "~", "yes", "Tensor(", "Tensor(float)", "GenericList[", "9" * 5000),
)
# Texts that are written as they are, where a tree cannot hold them: nested as deep as no parser goes.
DEPTHS = (200, 3_000, 100_000)
_HOLE = "hole in the text"


def mutated_tree(tree: Tree, rng: random.Random) -> Tree:
    """A copy of ``tree`` (mappings, lists, scalars) with one to four changes somewhere in it."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(root))
        holder, key = rng.choice(places)
        _change(holder, key, rng, places)
    return root[0]


def json_text(tree: Tree, rng: random.Random) -> bytes:
    """``tree`` as JSON (with NaN and infinities), a hole in it filled with brackets nested deeply."""
    return _filled(json.dumps(tree), rng, ("[", "]"), ('{"a":', "}"))


def yaml_text(tree: Tree, rng: random.Random) -> bytes:
    """``tree`` as YAML, a hole in it filled with what only YAML has."""
    import yaml

    text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    odd = (
        "&a [*a, *a]",
        "!!python/object/apply:os.getcwd []",
        "!!binary x",
        "!!timestamp x",
        "2001-13-45",
        "{? [1, 2] : 3}",
        "*b",
        "<<: 3",
        "!!int x",
        "|\n  a",
        "[&x [a, a], &y [*x, *x], &z [*y, *y], [*z, *z]]",
    )
    if f"'{_HOLE}'" not in text and _HOLE in text and rng.random() < 0.5:
        return text.replace(_HOLE, rng.choice(odd)).encode()
    return _filled(text, rng, ("[", "]"), ("{a: ", "}"), quote="")


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """``data`` with bits flipped, pieces cut out, doubled, moved or replaced, or its end missing."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        if not found:
            break
        begin = rng.randrange(len(found))
        end = min(len(found), begin + rng.choice((1, 2, 4, 16, 64, 512)))
        kind = rng.randrange(6)
        if kind == 0:
            found[begin] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[begin:end]
        elif kind == 2:
            found[begin:begin] = found[begin:end]
        elif kind == 3:
            del found[begin:]
        elif kind == 4:
            found[begin:end] = bytes(rng.choice((0, 0x7F, 0x80, 0xFF, 0x22, 0x5B)) for _ in range(end - begin))
        else:
            place = rng.randrange(len(found) + 1)
            found[place:place] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 3, 9))))
    return bytes(found)


def mutated_lines(text: str, rng: random.Random) -> bytes:
    """``text`` with lines dropped, doubled, moved or cut, and words replaced by extreme ones."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(lines))
        kind = rng.randrange(7)
        if kind == 0 and len(lines) > 1:
            del lines[place]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[place])
        elif kind == 2:
            lines[place] = lines[place][: rng.randrange(len(lines[place]) + 1)]
        elif kind == 3:
            lines[place] = lines[place].replace(",", rng.choice((";", "", ",,")))
        else:
            words = lines[place].split(" ")
            words[rng.randrange(len(words))] = _scalar(rng, text=True)
            lines[place] = " ".join(words)
    joined = rng.choice(("\n", "\n", "\n", "\r\n")).join(lines).encode()
    return mutated_bytes(joined, rng) if rng.random() < 0.1 else joined


def mutated_message(message: Any, rng: random.Random) -> Any:
    """A copy of a protobuf message with one to four fields, somewhere in it, changed, dropped, doubled or moved."""
    found = type(message)()
    found.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_fields(found))
        if places:
            _change_field(*rng.choice(places), rng)
    return found


def mutated_arrays(arrays: dict[str, np.ndarray], rng: random.Random) -> bytes:
    """An ``.npz`` of ``arrays``: names, shapes, types and values changed, or bytes of the archive."""
    found = dict(arrays)
    name = rng.choice(list(found))
    array = found[name]
    kind = rng.randrange(8)
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[rng.choice((*found, "x", "a.b.c", ".", "a."))] = array
    elif kind == 2:
        kinds = (
            ("float64", "int8", "bool", "U5", "complex64", "S3", "uint64") if array.dtype.kind in "iufb" else ("S3",)
        )
        found[name] = array.astype(rng.choice(kinds))
    elif kind == 3:
        found[name] = array.reshape(rng.choice(((-1,), (1, -1), (-1, 1, 1)))) if array.size else array
    elif kind == 4:
        found[name] = array[..., :0] if array.ndim else np.zeros(0)
    elif kind == 5:
        number = rng.choice(NUMBERS)
        found[name] = np.full(array.shape, number if isinstance(number, float) else float(number))
    elif kind == 6:
        found[name] = np.array([None, {}], dtype=object)
    stream = io.BytesIO()
    rng.choice((np.savez, np.savez_compressed))(stream, **found)
    return mutated_bytes(stream.getvalue(), rng) if kind == 7 else stream.getvalue()


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything inside ``node``."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _change(holder: Any, key: Any, rng: random.Random, places: list[tuple[Any, Any]]) -> None:
    kind = rng.randrange(9)
    if kind == 0 and len(holder) > (0 if isinstance(holder, dict) else 1):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice((str(key) + "x", "", "format", str(key).upper(), "0"))] = copy.deepcopy(holder[key])
    elif kind == 1:
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 2:
        other, place = rng.choice(places)
        try:
            holder[key] = copy.deepcopy(other[place])
        except (KeyError, IndexError, RecursionError):
            holder[key] = None
    elif kind == 3:
        holder[key] = _HOLE
    elif kind == 4:
        holder[key] = rng.choice(([], {}, [[]], [None], {"": None}, [holder[key]], {"a": holder[key]}, None, True))
    elif kind == 5 and isinstance(holder[key], str) and holder[key]:
        holder[key] = _damaged(holder[key], rng)
    elif kind == 6 and isinstance(holder[key], list) and holder[key]:
        holder[key] = holder[key] * rng.choice((2, 50))
    else:
        holder[key] = _scalar(rng)


def _damaged(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text))
    return rng.choice(
        (
            text[:place],
            text[:place] + rng.choice(string.printable) + text[place + 1 :],
            text * 2,
            text + rng.choice(TEXTS),
            text.replace(text[place], "9"),
        )
    )


def _scalar(rng: random.Random, text: bool = False) -> Any:
    found = rng.choice((*NUMBERS, *TEXTS)) if rng.random() < 0.9 else rng.choice((True, False, None, "x" * 100_000))
    return str(found) if text else found


def _filled(text: str, rng: random.Random, *brackets: tuple[str, str], quote: str = '"') -> bytes:
    hole = f"{quote}{_HOLE}{quote}"
    if hole not in text:
        return text.encode("utf-8", "surrogatepass")
    (opening, closing), depth = rng.choice(brackets), rng.choice(DEPTHS)
    return text.replace(hole, opening * depth + "1" + closing * depth, 1).encode()


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """(message, descriptor) of every field that is set, here or deeper."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is None:
            continue
        for each in value if _repeated(field) else (value,):
            if hasattr(each, "ListFields"):
                yield from _fields(each)


def _change_field(message: Any, field: Any, rng: random.Random) -> None:
    value = getattr(message, field.name)
    kind = rng.randrange(4)
    if kind == 0:
        message.ClearField(field.name)
    elif _repeated(field):
        if not len(value):
            return
        place = rng.randrange(len(value))
        if kind == 1:
            del value[place]
        elif kind == 2:
            value.extend([value[place]] * rng.choice((1, 1, 30)))
        elif field.message_type is None:
            value[place] = _fitting(field, value[place], rng)
        else:
            value[place].CopyFrom(value[rng.randrange(len(value))])
    elif field.message_type is None:
        setattr(message, field.name, _fitting(field, value, rng))


def _fitting(field: Any, old: Any, rng: random.Random) -> Any:
    """Another value of the field's type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, str):
        changed = _damaged(old, rng) if old and rng.random() < 0.5 else str(_scalar(rng))
        return changed.encode("utf-8", "replace").decode()
    if isinstance(old, bytes):
        return mutated_bytes(old, rng)
    if isinstance(old, float):
        return float(rng.choice([each for each in NUMBERS if abs(each) < 1e38 or each != each]))
    if field.enum_type is not None:
        return rng.choice([each.number for each in field.enum_type.values])
    bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32, field.CPPTYPE_ENUM) else 64
    low = 0 if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else -(2 ** (bits - 1))
    wanted = [each for each in (*NUMBERS, old + 1, old - 1, old * 2) if isinstance(each, int)]
    return rng.choice([each for each in wanted if low <= each < 2 ** (bits - 1)])


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)
