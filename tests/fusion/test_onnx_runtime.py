"""ONNX Runtime on models whose exporters name dimensions as they like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from fusion.comparing.engine import EngineWorkload
from fusion.comparing.onnx_runtime import OnnxRuntimeEngine, _open, _symbols
from fusion.model.build_folder import TensorInfo


def workload(path: Path, names: tuple, out: tuple, shape: tuple, result: tuple) -> EngineWorkload:
    """Swaps height and width."""
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["y"], perm=[0, 1, 3, 2])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, names)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    inputs, outputs = (TensorInfo("x", shape, "float32"),), (TensorInfo("y", result, "float32"),)
    return EngineWorkload(path, "", inputs, outputs, 1, path.parent, path.parent)


@pytest.mark.parametrize("names", [("n", 3, "?", "?"), ("n", 3, "side", "side"), ("n", 3, "h", "w")])
def test_a_name_of_several_extents_forces_none(tmp_path, names):
    out = (*names[:2], names[3], names[2])
    given = workload(tmp_path / "m.onnx", names, out, (1, 3, 48, 192), (1, 3, 192, 48))
    session = OnnxRuntimeEngine().prepare(given, lambda message: None)
    x = np.random.default_rng(0).standard_normal((1, 3, 48, 192)).astype(np.float32)
    np.testing.assert_array_equal(session.run({"x": x})["y"], x.transpose(0, 1, 3, 2))


def test_names_of_one_extent_are_replaced_by_it(tmp_path):
    given = workload(tmp_path / "m.onnx", ("n", 3, "h", "w"), ("n", 3, "w", "h"), (2, 3, 4, 5), (2, 3, 5, 4))
    session = _open(given, onnxruntime.SessionOptions())
    assert _symbols(session, given) == {"n": 2, "h": 4, "w": 5}
