"""Small valid inputs of every reader, as trees, messages, texts and arrays."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parents[2] / "costmodel"

# --- execution traces -----------------------------------------------------------------------------

_TENSOR = [5, 6, 0, 32, 4, "cuda:0"]
_ATTRIBUTES = ("tid", "scope", "fw_tid", "seq_id", "rf_id", "op_schema")


def _flat(number: int, name: str, parent: int, thread: int = 1, scope: int = 0, **fields: Any) -> dict[str, Any]:
    """A node as of schema 1.0.1."""
    node = {"id": number, "name": name, "parent": parent, "tid": thread, "scope": scope, "fw_tid": 0, "seq_id": -1}
    for side in ("input", "output"):
        node |= {f"{side}s": [], f"{side}_shapes": [], f"{side}_types": []}
    return node | {"rf_id": number, "op_schema": ""} | fields


def _nested(node: dict[str, Any]) -> dict[str, Any]:
    """The same node as of schema 1.0.3 and later."""
    return {
        "id": node["id"],
        "name": node["name"],
        "ctrl_deps": node["parent"],
        "inputs": {
            "values": node["inputs"],
            "shapes": node["input_shapes"],
            "types": node["input_types"],
            "strides": [_strides(shape) for shape in node["input_shapes"]],
        },
        "outputs": {"values": node["outputs"], "shapes": node["output_shapes"], "types": node["output_types"]},
        "attrs": [{"name": name, "type": "", "value": node[name]} for name in _ATTRIBUTES],
    }


def _strides(shape: list[Any]) -> list[Any]:
    return [_strides(each) if isinstance(each, list) else 1 for each in shape]


def _arguments(shapes: list[list[int]], result: list[int], kind: str = "Tensor(float)") -> dict[str, Any]:
    return {
        "inputs": [[number + 1, number + 1, 0, 32, 4, "cuda:0"] for number in range(len(shapes))],
        "input_shapes": shapes,
        "input_types": [kind] * len(shapes),
        "outputs": [_TENSOR],
        "output_shapes": [result],
        "output_types": [kind],
    }


_NODES = [
    _flat(1, "[pytorch|profiler|execution_graph|process]", 1, thread=0, scope=7),
    _flat(2, "[pytorch|profiler|execution_graph|thread]", 1, scope=7),
    _flat(3, "## forward ##", 2, scope=7),
    _flat(4, "aten::linear", 3, seq_id=7, op_schema="aten::linear(Tensor input) -> Tensor"),
    _flat(
        5,
        "aten::addmm",
        4,
        op_schema="aten::addmm(Tensor self, Tensor mat1, Tensor mat2) -> Tensor",
        **_arguments([[8], [4, 8], [8, 8]], [4, 8]),
    ),
    _flat(6, "aten::relu", 3, op_schema="aten::relu(Tensor self) -> Tensor", **_arguments([[4, 8]], [4, 8])),
    _flat(
        7,
        "aten::cat",
        3,
        inputs=[[[1, 1, 0, 32, 4, "cuda:0"], [2, 2, 0, 32, 4, "cuda:0"]], 0],
        input_shapes=[[[4, 8], [4, 8]], []],
        input_types=["GenericList[Tensor(float),Tensor(float)]", "Int"],
        outputs=[_TENSOR],
        output_shapes=[[8, 8]],
        output_types=["Tensor(float)"],
    ),
    _flat(8, "Optimizer.step#SGD.step", 2, scope=7),
    _flat(9, "aten::add_", 8, **_arguments([[4, 8], [4, 8]], [4, 8])),
    _flat(10, "[pytorch|profiler|execution_graph|thread]", 1, thread=2, scope=7),
    _flat(11, "autograd::engine::evaluate_function: ReluBackward0", 10, thread=2),
    _flat(12, "aten::threshold_backward", 11, thread=2, scope=1, **_arguments([[4, 8], [4, 8]], [4, 8])),
]
_GROUPS = json.dumps([{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4}])
_COLLECTIVE = [
    _flat(13, "## process_group:init ##", 2, inputs=[_GROUPS], input_shapes=[[]], input_types=["String"]),
    _flat(14, "record_param_comms", 2, **_arguments([[4, 8]], [4, 8])),
]


def _job_node() -> dict[str, Any]:
    node = _nested(_COLLECTIVE[1])
    told = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 32, "out_msg_nelems": 32}
    told |= {"pg_name": "0", "pg_size": 4}
    node["attrs"] += [{"name": name, "type": "", "value": value} for name, value in told.items()]
    return node


EXECUTION_TRACES = [
    {"schema": "1.0.1", "pid": 42, "start_ts": 1, "nodes": _NODES, "finish_ts": 2},
    {"schema": "1.0.3", "pid": 42, "nodes": [_nested(node) for node in _NODES]},
    {"schema": "1.1.0", "pid": 42, "nodes": [*map(_nested, _NODES), _nested(_COLLECTIVE[0]), _job_node()]},
]

# --- profiles -------------------------------------------------------------------------------------


def _event(category: str, name: str, start: float, duration: float, tid: int = 100, **args: Any) -> dict[str, Any]:
    pid = 0 if category in ("kernel", "gpu_memcpy") else 100
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}
    return event | {"args": args}


_EVENTS = [
    _event("user_annotation", "ProfilerStep#1", 0.0, 200.0),
    _event("cpu_op", "aten::mm", 1, 50, **{"External id": 1, "Record function id": 1, "Sequence number": 3}),
    _event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
    _event("kernel", "gemm", 20, 60, 7, correlation=1, stream=7, device=0, **{"External id": 1}),
    _event("cpu_op", "aten::copy_", 60, 30, **{"External id": 2, "Input Dims": [[4, 8], []]}),
    _event("cuda_runtime", "cudaMemcpyAsync", 62, 5, correlation=2),
    _event("gpu_memcpy", "Memcpy DtoH", 85, 5, 7, correlation=2, stream=7, device=0, bytes=128),
    _event("cuda_runtime", "cudaStreamSynchronize", 70, 30, correlation=3),
    _event("cuda_sync", "Stream Sync", 70, 30, -1, cuda_sync_kind="Stream Sync", correlation=3, stream=7),
    _event("cpu_op", "aten::relu_", 110, 20, 101, **{"External id": 3, "Fwd thread id": 1}),
    _event("cuda_runtime", "cudaLaunchKernel", 112, 5, 101, correlation=4),
    _event("kernel", "relu", 120, 10, 7, correlation=4, stream=7, device=0),
]
_TOLD = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
    "In msg nelems": 32,
    "dtype": "Float",
}
_HEADER = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-16GB", "totalGlobalMem": 16}],
    "displayTimeUnit": "ms",
}
_GROUP = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": 1, "ranks": [0]}
KINETO_TRACES = [
    {**_HEADER, "traceEvents": _EVENTS},
    {
        **_HEADER,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1, "pg_config": [_GROUP]},
        "traceEvents": [
            *_EVENTS,
            _event("cpu_op", "record_param_comms", 140, 20, **{"External id": 5}, **_TOLD),
            _event("cuda_runtime", "cudaLaunchKernel", 142, 5, correlation=5),
            _event("kernel", "ncclDevKernel_AllReduce_Sum", 150, 20, 8, correlation=5, stream=8, device=0, **_TOLD),
        ],
    },
]


# --- YAML -----------------------------------------------------------------------------------------


def _yaml_file(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def machine_documents() -> list[Any]:
    """A GPU, a variant of one, a CPU."""
    machines = SHIPPED / "machines"
    files = ("gpu/t4.yaml", "gpu/h100-sxm-96gb.yaml", "cpu/xeon-amx-2c.yaml")
    return [_yaml_file(machines / name) for name in files]


CLUSTERS = [
    _yaml_file(SHIPPED / "machines" / "cluster" / "dgx-h100.yaml"),
    _yaml_file(SHIPPED / "machines" / "cluster" / "dgx-1v.yaml"),
    _yaml_file(SHIPPED / "machines" / "network" / "infiniband-ndr.yaml"),
]
TABLES = [
    {
        "origin": "drawn",
        "defaults": {"dim": 64, "pooling": 10, "optimizer": "rowwise_adagrad", "distribution": {"zipf": 1.05}},
        "tables": [
            {"name": "user", "rows": 5000, "dtype": "float16"},
            {"name": "item", "rows": 2000, "count": 3, "distribution": "uniform"},
            {"name": "country", "rows": 200, "pooling": 1.5, "dim": 32},
        ],
        "model": {"bottom": [32, 64], "top": [128, 1]},
    }
]


def source_lists() -> list[Any]:
    """The first data set of the shipped manifest with three of its files."""
    whole = _yaml_file(SHIPPED.parent / "lab" / "data" / "sources.yaml")
    name, first = next(iter(whole["datasets"].items()))
    return [{"datasets": {name: {**first, "files": dict(list(first["files"].items())[:3])}}}]


# --- folders --------------------------------------------------------------------------------------


def record_folders() -> list[dict[str, Any]]:
    """Tuning records as MetaSchedule's database has them."""
    from importlib.metadata import version

    from costmodel.operators.any_operator import to_record
    from costmodel.operators.layers import Conv2d, Dense, Epilogue
    from schedules.contract.cpu_target import target_with
    from schedules.contract.template import TEMPLATE_REVISION

    flags = ("avx2", "fma", "f16c", "bmi1", "bmi2")
    cpu = target_with(flags, 2, 32768, 1 << 20)
    where = {"cpu": cpu.key, "tvm": version("apache-tvm"), "templates": str(TEMPLATE_REVISION)}
    operators = [Dense(3, 17, 5, Epilogue(bias=True)), Conv2d(1, 8, 7, 7, 8, (3, 3), (2, 2), (1, 1, 1, 1), groups=8)]
    lines, failures = [], []
    for place, operator in enumerate(operators):
        text = json.dumps(
            {"operator": to_record(operator), "config": {"tile": 2}, "confirmed": False, **where}, sort_keys=True
        )
        trace = [[["Annotate", ["b0", f'"{text}"'], ["fusion.config"], []]], []]
        lines.append([place, [trace, [1e-3, 2e-3], {"kind": "llvm"}, []]])
        failed = {"operator": to_record(operator), "config": {"tile": 3}, "error": "crash", "message": "x"}
        failures.append({**failed, **where})
    return [
        {
            "database_tuning_record.json": lines,
            "database_workload.json": [["hash", "module"], ["hash2", "module"]],
            "failures.jsonl": failures,
        }
    ]


_LIBRARY = b"a library"
_DIGEST = hashlib.sha256(_LIBRARY).hexdigest()
_INTERFACE = {"name": "x", "shape": [1, 3, 8, 8], "dtype": "float32"}
BUILD_MANIFEST: dict[str, Any] = {
    "manifest.json": {
        "model_path": "/models/a.onnx",
        "model_sha256": _DIGEST,
        "inputs": [_INTERFACE],
        "outputs": [{"name": "y", "shape": [1, 10], "dtype": "bfloat16"}],
        "mcpu": "haswell",
        "cpu_flags": ["sse4_2"],
        "threads": 2,
        "tvm_version": "0.27.0",
        "files": {"model.so": _DIGEST, "model_unfused.so": _DIGEST},
        "format": 1,
        "measured": True,
        "checked": True,
        "precision": "float32",
        "layers": {"model.so": ["conv", "dense"]},
    },
    "model.so": _LIBRARY,
    "model_unfused.so": _LIBRARY,
}
_WHOLE = json.dumps(BUILD_MANIFEST["manifest.json"]).encode()
PROFILE_INDEX: dict[str, Any] = {
    "manifest.json": {"format": 1, "profiles": {"1x3x8x8": hashlib.sha256(_WHOLE).hexdigest()}},
    "1x3x8x8/manifest.json": _WHOLE,
    "1x3x8x8/model.so": _LIBRARY,
    "1x3x8x8/model_unfused.so": _LIBRARY,
}
SWEEP_RESULTS: dict[str, Any] = {
    "results.jsonl": [
        {
            "key": f"key{number}",
            "gpu": "h100-sxm",
            "gpus": 8,
            "nodes": 1,
            "parallel": "dp=8",
            "status": "ok",
            "reason": "",
            "iteration_seconds": 0.1,
            "interval_seconds": [0.09, 0.11],
            "samples": 8,
        }
        for number in range(3)
    ]
}

# --- JSON -----------------------------------------------------------------------------------------

_RANK = {"tables": 1, "forward_seconds": 1e-3, "backward_seconds": 2e-3, "received_index_bytes": 100}
_RANK |= {"sent_output_bytes": 200, "memory_bytes": 300}
_TABLE = {"rows": 10, "dim": 64, "dtype": "float32", "optimizer": "sgd"}
PLAN = {
    "format": 1,
    "machine": "toy",
    "gpus": 2,
    "nodes": 1,
    "batch_size": 8,
    "tables": [
        {"table": "whole", "kind": "table-wise", "ranks": [1], **_TABLE},
        {"table": "columns", "kind": "column-wise", "ranks": [1, 0], **_TABLE},
        {"table": "rows", "kind": "row-wise", "ranks": [0, 1], **_TABLE},
    ],
    "ranks": [{"rank": rank, **_RANK} for rank in range(2)],
    "generator": "local search",
    "step_seconds": 1e-3,
    "dense_seconds": 0.0,
    "bound_seconds": 9e-4,
    "memory_limit_bytes": 1000,
    "greedy_seconds": {"size": 2e-3, "lookup": None},
}
HF_CONFIGS = [
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32},
    {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 32,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "is_decoder": True,
    },
]


def _overhead_table() -> Any:
    path = SHIPPED / "calibration" / "host_overheads" / "rtx-2080-ti-linear.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    means = {kind: dict(list(each.items())[:3]) for kind, each in whole["means"].items()}
    return {**whole, "means": means}


OVERHEADS = _overhead_table()


def collective_calibrations() -> list[Any]:
    """One shipped calibration."""
    return [json.loads((SHIPPED / "calibration" / "dgx-h100" / "collectives.json").read_text(encoding="utf-8"))]


def kernel_calibrations() -> list[Any]:
    """The smallest family of one shipped GPU."""
    whole = json.loads((SHIPPED / "calibration" / "gpu" / "t4.json").read_text(encoding="utf-8"))
    return [{"t4.json": {**whole, "families": {"softmax": whole["families"]["softmax"]}, "provenance": {}}}]


# --- text -----------------------------------------------------------------------------------------

_DEVICES = """\
#  Rank  0 Group  0 Pid 221423 on    gpu-1 device  0 [0009:01:00] NVIDIA H100
#  Rank  1 Group  0 Pid 221421 on    gpu-1 device  1 [0019:01:00] NVIDIA H100
#  Rank  2 Group  0 Pid 201122 on    gpu-2 device  0 [0009:01:00] NVIDIA H100
#  Rank  3 Group  0 Pid 201121 on    gpu-2 device  1 [0019:01:00] NVIDIA H100
"""
NCCL_LOGS = [
    f"""\
# nccl-tests version 2.17.6 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
# Using devices
{_DEVICES}#
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     0.15    0.00    0.00       0     0.12    0.00    0.00       0
        4096           256     float    none      -1    45.33    0.02    0.04       0    37.98    0.03    0.05     N/A
       16384          1024     float    none      -1    257.0   0.05    0.10       0    38.30    0.05    0.10     N/A
       65536          4096     float    none      -1    457.0   0.05    0.10       0    38.30    0.05    0.10     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 20.6323
""",
]
_TIMED = {"time": 45.3, "alg_bw": 0.1, "bus_bw": 0.1, "nwrong": 0}
NCCL_JSON = [
    {
        "args": ["/opt/all_reduce_perf", "-J", "x.json"],
        "nccl_version": 22703,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "devices": [
                {"group": 0, "rank": rank, "hostname": f"gpu-{rank // 2}", "device": rank} for rank in range(4)
            ],
        },
        "results": [
            {"size": size, "count": size // 4, "type": "float", "out_of_place": _TIMED, "in_place": _TIMED}
            for size in (1024, 4096, 16384)
        ],
    }
]
MEASURED_TABLE = (SHIPPED / "calibration" / "h100-pcie" / "measured" / "published_gemm.csv").read_text(encoding="utf-8")
OPTION_TEXTS = [
    "parallel\ndp=2,tp=2,pp=2,micro-batches=8,schedule=interleaved,virtual-stages=2\n",
    "parallel\nfsdp=4,tp=2,sp=yes,recompute=full,offload-optimizer=1,master-weights=yes\n",
    "routing\npower-law=1.2,capacity=1.25\n",
    "ranks\n0,7\n",
    "counts\n8,64,512\n",
    "names\nh100-sxm,h200-sxm\n",
    "shape\nx=1,3,224,224\n",
    "target\nllvm -mcpu=znver4 -num-cores 8\n",
]


# --- ONNX -----------------------------------------------------------------------------------------


def onnx_models() -> list[Any]:
    """A small convolutional network, and one with what is folded, sliced and reshaped."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    def model(nodes: list[Any], weights: dict[str, Any], inputs: list[int], outputs: list[int]) -> Any:
        graph = helper.make_graph(
            nodes,
            "small",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    ones = np.ones
    network = model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], "stem", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
            helper.make_node("BatchNormalization", ["c", "b", "b", "b", "v"], ["n"], "norm", epsilon=1e-5),
            helper.make_node("Clip", ["n", "low", "high"], ["r"], "relu6"),
            helper.make_node("Conv", ["r", "d"], ["e"], "depthwise", group=4, pads=[1, 1, 1, 1]),
            helper.make_node("Add", ["e", "r"], ["s"], "residual"),
            helper.make_node("MaxPool", ["s"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("GlobalAveragePool", ["p"], ["g"], "average"),
            helper.make_node("Flatten", ["g"], ["f"], "flatten", axis=1),
            helper.make_node("Gemm", ["f", "m"], ["y"], "dense", transB=1, alpha=1.0),
        ],
        {
            "w": ones((4, 3, 3, 3), np.float32),
            "b": ones(4, np.float32),
            "v": ones(4, np.float32),
            "d": ones((4, 1, 3, 3), np.float32),
            "m": ones((2, 4), np.float32),
            "low": np.float32(0),
            "high": np.float32(6),
        },
        [1, 3, 8, 8],
        [1, 2],
    )
    shapes = model(
        [
            helper.make_node("Constant", [], ["k"], "constant", value=numpy_helper.from_array(ones(1, np.float32))),
            helper.make_node("Mul", ["x", "k"], ["a"], "scale"),
            helper.make_node("Slice", ["a", "start", "end", "axes"], ["b"], "slice"),
            helper.make_node("Reshape", ["b", "shape"], ["c"], "reshape"),
            helper.make_node("Transpose", ["c"], ["d"], "transpose", perm=[0, 2, 1]),
            helper.make_node("Softmax", ["d"], ["e"], "softmax", axis=-1),
            helper.make_node("ReduceMean", ["e", "axes"], ["y"], "mean", keepdims=0),
        ],
        {
            "start": np.array([0]),
            "end": np.array([2]),
            "axes": np.array([1]),
            "shape": np.array([1, 2, -1]),
        },
        [1, 4, 4, 4],
        [1, 2],
    )
    return [network, shapes]
