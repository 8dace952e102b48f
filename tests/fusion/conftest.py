from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["TVM_NUM_THREADS"] = "2"
# Tests begin from nothing, also on a CPU whose records are shipped.
os.environ["FUSION_RECORDS"] = os.devnull

import pytest

from fusion.model.build_folder import MODEL, UNFUSED_MODULE, Artifact, TensorInfo, make_manifest, write_artifact
from schedules.contract.cpu_target import host_target

SHAPE = (2, 3)
INPUTS = (TensorInfo("a", SHAPE, "float32"), TensorInfo("b", SHAPE, "float32"))
OUTPUTS = (TensorInfo("sum", SHAPE, "float32"), TensorInfo("file", SHAPE, "float32"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX: ``sum`` = a + b, ``file`` = relu(a * b), all of shape (2, 3)."""
    from onnx import TensorProto, helper, save

    graph = helper.make_graph(
        [
            helper.make_node("Add", ["a", "b"], ["sum"]),
            helper.make_node("Mul", ["a", "b"], ["product"]),
            helper.make_node("Relu", ["product"], ["file"]),
        ],
        "tiny",
        [helper.make_tensor_value_info(info.name, TensorProto.FLOAT, SHAPE) for info in INPUTS],
        [helper.make_tensor_value_info(info.name, TensorProto.FLOAT, SHAPE) for info in OUTPUTS],
    )
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.fixture(scope="session")
def tiny_build(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A build directory of the tiny model, compiled by TVM without tuning. Shared: tests copy it to change it."""
    import tvm
    from tvm import relax

    builder = relax.BlockBuilder()
    a, b = (relax.Var(info.name, relax.TensorType(SHAPE, info.dtype)) for info in INPUTS)
    with builder.function("main", [a, b]):
        total = builder.emit(relax.op.add(a, b))
        product = builder.emit(relax.op.nn.relu(relax.op.multiply(a, b)))
        builder.emit_func_output(relax.Tuple([total, product]))
    cpu = host_target(2)
    executable = tvm.compile(builder.get(), cpu.tvm_target())
    manifest = make_manifest(tiny_model, INPUTS, OUTPUTS, cpu, tvm.__version__)
    executables = {MODEL: executable, UNFUSED_MODULE: executable}
    return write_artifact(tmp_path_factory.mktemp("tiny") / "build", manifest, executables, {"made": "for tests"})


@pytest.fixture(scope="module")
def short_rounds() -> Iterator[None]:
    """Networks and engines of this process take turns in 5 rounds of 20 ms each, not in 15 of 150 ms: a toy's runs take
    microseconds, and which of two is faster is nothing that a test asks.
    """
    from fusion.comparing.timing import Sampling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling.__init__, "__defaults__", (5, 0.02, 5, 5))
        assert Sampling() == Sampling(rounds=5, seconds=0.02, calls=5, warmup=5)
        yield
