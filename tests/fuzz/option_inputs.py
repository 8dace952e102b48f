"""Files that options are given instead of what they ask for: empty, of bytes, of another encoding, unreadable, a
folder, and models and arrays that are valid for something else.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.fuzz.seeds import EXECUTION_TRACES, KINETO_TRACES, OVERHEADS, PLAN

EXTENSIONS = ("json", "yaml", "onnx", "npz", "py", "json.gz", "tar.gz", "html", "svg")
NOBODY = 65534  # may read what all may, and write nowhere
TINY = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 128,
    "n_positions": 64,
    "architectures": ["GPT2LMHeadModel"],
}
MIXTURE = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "architectures": ["MixtralForCausalLM"],
}
TABLES = """origin: us
tables:
- {name: a, rows: 1000, dim: 16, pooling: 2}
- {name: b, rows: 5000, dim: 32, pooling: 2}
"""


def write_inputs(place: Path) -> None:
    """All of them, in ``place``, which others may read then."""
    place.chmod(0o755)
    rng = random.Random(1)
    for name in ("folder", "empty-folder", "unwritable"):
        (place / name).mkdir()
    for extension in EXTENSIONS:
        (place / f"empty.{extension}").write_bytes(b"")
        (place / f"binary.{extension}").write_bytes(rng.randbytes(3000))
        (place / f"latin.{extension}").write_bytes(b"# caf\xe9 \xff\xfe\nx: 1\n")
        (place / f"utf16.{extension}").write_bytes('{"a": 1}'.encode("utf-16"))
        (place / f"folder.{extension}").mkdir()
        (place / f"secret.{extension}").write_text("{}")
        (place / f"secret.{extension}").chmod(0)
    write_arrays(place)
    _write_texts(place)
    (place / "unwritable").chmod(0o555)


def paths(place: Path, extension: str) -> list[str]:
    """Files that are not what is read, or are not there."""
    there = [f"{kind}.{extension}" for kind in ("folder", "empty", "binary", "latin", "utf16", "secret")]
    inside = [str(place / each) for each in [*there, f"empty.{extension}/x"]]
    return [f"missing.{extension}", *inside, f"{'x' * 300}.{extension}", "", "/dev/null", f"ø☃.{extension}"]


def outputs(place: Path, extension: str) -> list[str]:
    """Files that cannot be written."""
    inside = [str(place / each) for each in (f"folder.{extension}", f"unwritable/x.{extension}", "tiny.json/x")]
    return [*inside, f"/nonexistent/x.{extension}", f"/proc/x.{extension}", "", "/dev/full", f"{'x' * 300}.{extension}"]


def user_of(words: Sequence[str]) -> int | None:
    """Whose rights a command line is tried with: root may read and write anything."""
    return NOBODY if any("secret." in word or "unwritable" in word for word in words) else None


def _write_texts(place: Path) -> None:
    models = {"tiny": TINY, "mixture": MIXTURE, "plan": PLAN, "overheads": OVERHEADS, "list": [1, 2]}
    traces = {"trace": EXECUTION_TRACES[0], "profile": KINETO_TRACES[0]}
    for name, content in {**models, **traces}.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    (place / "tables.yaml").write_text(TABLES)
    (place / "price.yaml").write_text("date: 2026-01-01\norigin: us\nper_gpu_hour:\n  t4: 1.0\n")


def write_arrays(place: Path) -> None:
    """Archives: ``x.npz`` and ``samples.npz`` are of ``m.onnx``, the others of nothing."""
    image = (3, 16, 16)
    arrays: Mapping[str, Mapping[str, np.ndarray]] = {
        "x": {"x": np.zeros((1, *image), np.float32)},
        "samples": {"x": np.random.default_rng(0).random((20, *image), np.float32)},
        "none": {},
        "other": {"y": np.zeros(3)},
        "nan": {"x": np.full((4, *image), np.nan, np.float32)},
        "objects": {"x": np.array([{}], dtype=object)},
        "strings": {"x": np.array(["a"])},
        "scalar": {"x": np.float32(1) * np.ones(())},
        "zero": {"x": np.zeros((0, *image), np.float32)},
    }
    for name, content in arrays.items():
        np.savez(place / f"{name}.npz", **content)  # type: ignore[arg-type]
    np.save(place / "plain.npy", np.zeros((1, *image), np.float32))


def array_files(place: Path) -> list[str]:
    """Archives of arrays that are of another model, or hold no numbers."""
    names = ("none", "other", "nan", "objects", "strings", "scalar", "zero")
    return [*(str(place / f"{name}.npz") for name in names), str(place / "plain.npy")]


def write_networks(place: Path) -> None:
    """ONNX files: ``m.onnx`` is a network of two convolutions, ``open.onnx`` has open sizes; the others are refused."""
    import onnx
    from onnx import helper

    onnx.save(_network(), place / "m.onnx")
    onnx.save(_network(shape=("n", 3, "h", "w")), place / "open.onnx")
    onnx.save(_network(), place / "mødel ☃.onnx")
    onnx.save(_network(shape=(1, 3, 10**6, 10**6)), place / "immense.onnx")
    onnx.save(_network(shape=(0, 3, 16, 16)), place / "nothing.onnx")
    onnx.save(_network([helper.make_node("Relu", ["x"], ["y"])]), place / "no-convolution.onnx")
    onnx.save(_network([helper.make_node("NoSuchOp", ["x"], ["y"])]), place / "unknown.onnx")
    newer = _network()
    newer.opset_import[0].version = 99
    onnx.save(newer, place / "newer.onnx")
    whole = (place / "m.onnx").read_bytes()
    (place / "cut.onnx").write_bytes(whole[: len(whole) // 2])


def networks(place: Path) -> list[str]:
    """Those that are refused, but for three: open sizes, a name of other letters, and none to be fused."""
    names = ("open", "mødel ☃", "immense", "nothing", "no-convolution", "unknown", "newer", "cut")
    return [str(place / f"{name}.onnx") for name in names]


def _network(nodes: Sequence[object] | None = None, shape: Sequence[object] = (1, 3, 16, 16)) -> object:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {"wide": (8, 3, 3, 3), "narrow": (8, 8, 1, 1)}
    nodes = nodes or [
        helper.make_node("Conv", ["x", "wide"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "narrow"], ["y"], kernel_shape=[1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "options",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.random(size, np.float32), name) for name, size in weights.items()],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model


def harmless_home(place: Path) -> dict[str, str]:
    """Environment: nothing of the user's own is read or written."""
    home = place / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    own = {"HOME": home, "XDG_CACHE_HOME": home / "cache", "XDG_CONFIG_HOME": home / "config"}
    own["FUSION_RECORDS"] = place / "empty-folder"  # reading those that are shipped takes most of a refusal's time
    return {**{name: os.fspath(path) for name, path in own.items()}, "HF_HUB_OFFLINE": "1"}
