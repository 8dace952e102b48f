"""Lowering: which calls launch, what the host does around launches, what is unknown. Traces are written by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from costmodel.operators.device_work import Elementwise, Gemm, MemoryCopy
from e2e.capture import CapturedWorkload, capture
from e2e.lowering import unknown_operators
from e2e.lowering.lower_trace import lower
from e2e.lowering.operator_table import TABLE
from e2e.step.execution_graph import Await, HostWork, Launch, RankGraph, RecordEvent, Signal, StreamWait, Synchronize
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.traces.execution_trace import read_execution_trace
from lab.data.data_folder import data_folder

TRACES = data_folder() / "traces"


def tensor(number: int, *shape: int, storage: int | None = None, device: str = "cuda:0", **more: object) -> Tensor:
    return Tensor(number, number if storage is None else storage, shape, str(more.get("dtype", "float32")), device)


def call(
    number: int, name: str, *inputs: object, out: object = (), parent: int | None = None, **more: object
) -> OperatorCall:
    outputs = out if isinstance(out, tuple) else (out,)
    thread = int(more.pop("thread", 0))  # type: ignore[call-overload]
    return OperatorCall(number, name, parent, thread, inputs, outputs, attributes=more)  # type: ignore[arg-type]


def lowered(*calls: OperatorCall, **more: object) -> RankGraph:
    return lower(OperatorTrace(calls, **more))  # type: ignore[arg-type]


A, B, C = tensor(1, 8, 4), tensor(2, 4, 6), tensor(3, 8, 6)


def test_overheads_around_one_launch_and_around_none():
    graph = lowered(call(0, "aten::mm", A, B, out=C), call(1, "aten::view", C, (48,), out=tensor(4, 48, storage=3)))
    assert graph.threads == {
        "main": (
            HostWork("T1", 0),
            HostWork("T2", 0),
            Launch(0),
            HostWork("T3", 0),
            HostWork("T1", 1),
            HostWork("T5", 1),
        )
    }
    assert graph.tasks[0].operators == (Gemm(1, 8, 6, 4),)
    assert graph.calls[1].name == "aten::view"


def test_between_two_launches_of_one_operator_is_t5():
    graph = lowered(
        call(0, "aten::linear", A, B, out=C),
        call(1, "aten::mm", A, B, out=C, parent=0),
        call(2, "aten::add_", C, C, out=C, parent=0),
    )
    kinds = [action.kind for action in graph.threads["main"] if isinstance(action, HostWork)]
    assert kinds == ["T1", "T2", "T5", "T3"]
    assert {action.call for action in graph.actions() if isinstance(action, HostWork)} == {0}
    assert [task.call for task in graph.tasks] == [1, 2]


def test_what_surrounds_operators_launches_nothing_of_its_own():
    nested = lowered(
        call(0, "aten::linear", A, B, out=C),
        call(1, "aten::matmul", A, B, out=C, parent=0),
        call(2, "aten::mm", A, B, out=C, parent=1),
    )
    assert [task.name for task in nested.tasks] == ["aten::mm"]


def test_the_same_operator_alone_launches_itself():
    weight = tensor(5, 6, 4)
    assert lowered(call(0, "aten::linear", A, weight, None, out=C)).tasks[0].operators == (
        Gemm(1, 8, 6, 4, transpose_b=True),
    )
    assert [task.name for task in lowered(call(0, "aten::relu", A, out=A)).tasks] == ["aten::relu"]
    both = lowered(call(0, "aten::relu", A, out=C), call(1, "aten::clamp_min", A, 0, out=C, parent=0))
    assert [task.name for task in both.tasks] == ["aten::clamp_min"]


def test_an_operator_that_clears_first_is_complete_in_both_forms():
    scores, target, weight = tensor(1, 16, 10), tensor(2, 16, dtype="int64"), tensor(4)
    arguments = (tensor(3), scores, target, None, 1, -100, weight)
    alone = lowered(call(0, "aten::nll_loss_backward", *arguments, out=tensor(5, 16, 10)))
    assert [task.name for task in alone.tasks] == ["aten::zero_", "aten::nll_loss_backward"]
    nested = lowered(
        call(0, "aten::nll_loss_backward", *arguments, out=tensor(5, 16, 10)),
        call(1, "aten::zero_", tensor(5, 16, 10), out=tensor(5, 16, 10), parent=0),
        call(2, "aten::fill_", tensor(5, 16, 10), 0, out=tensor(5, 16, 10), parent=1),
    )
    assert Counter(task.name for task in nested.tasks) == {"aten::fill_": 1, "aten::nll_loss_backward": 1}


def test_marked_ranges_are_no_units_but_their_operators_are():
    graph = lowered(
        call(0, "Optimizer.step#SGD.step"),
        call(1, "aten::add_", A, A, out=A, parent=0),
        call(2, "aten::add_", A, A, out=A, parent=0),
    )
    assert [action.call for action in graph.actions() if isinstance(action, HostWork) and action.kind == "T1"] == [1, 2]


def test_backward_runs_on_the_autograd_thread_while_the_main_one_waits():
    graph = lowered(
        call(0, "aten::mm", A, B, out=C),
        call(1, "autograd::engine::evaluate_function: MmBackward0", thread=1),
        call(2, "MmBackward0", parent=1, thread=1),
        call(3, "aten::mm", A, B, out=C, parent=2, thread=1),
        call(4, "aten::add_", A, A, out=A),
    )
    main, autograd = graph.threads["main"], graph.threads["autograd"]
    assert [type(action) for action in main[4:6]] == [Signal, Await]
    assert isinstance(autograd[0], Await) and isinstance(autograd[-1], Signal)
    assert (main[4].flag, main[5].flag) == (autograd[0].flag, autograd[-1].flag)
    assert [action.task for action in autograd if isinstance(action, Launch)] == [1]
    assert {action.call for action in autograd if isinstance(action, HostWork)} == {1}
    assert isinstance(main[-1], HostWork)


def test_a_trace_that_ends_in_backward_still_comes_back():
    graph = lowered(call(0, "autograd::engine::evaluate_function: X", thread=1))
    assert graph.threads["main"] == (Signal(0), Await(1))
    assert graph.threads["autograd"][-1] == Signal(1)


def test_reading_a_value_waits_for_the_stream():
    graph = lowered(call(0, "aten::_local_scalar_dense", tensor(1), out=1.5))
    assert graph.tasks[0].kind == "copy"
    assert graph.tasks[0].operators == (MemoryCopy(4, "device_to_host"),)
    assert Synchronize(stream=0, call=0) in graph.threads["main"]
    on_host = lowered(call(0, "aten::_local_scalar_dense", tensor(1, device="cpu"), out=1.5))
    assert not on_host.tasks
    assert not any(isinstance(action, Synchronize) for action in on_host.actions())


def test_waiting_for_the_device_waits_for_all_streams():
    graph = lowered(call(0, "cudaDeviceSynchronize"))
    assert Synchronize(call=0) in graph.threads["main"]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_from_the_host(non_blocking: bool):
    """What the host does not wait for comes from pinned memory, at twice the rate of pageable memory."""
    source, target = tensor(1, 1024, device="cpu"), tensor(2, 1024)
    graph = lowered(call(0, "aten::copy_", target, source, non_blocking, out=target))
    assert graph.tasks[0].operators == (MemoryCopy(4096, "host_to_device", pinned=non_blocking),)
    assert any(isinstance(action, Synchronize) for action in graph.actions()) is not non_blocking


def test_an_unknown_operator_is_one_task_that_is_listed():
    graph = lowered(call(0, "mylib::fancy", A, B, out=C), call(1, "mylib::fancy", A, B, out=C))
    assert unknown_operators(graph) == {"mylib::fancy": 2}
    assert graph.tasks[0].operators == (Elementwise("unknown", 48, 0, 1, 32 + 24),)


def test_an_unknown_signature_is_as_unknown_as_an_unknown_name():
    assert unknown_operators(lowered(call(0, "aten::mm", A, "B", out=C))) == {"aten::mm": 1}


@pytest.mark.parametrize("mistake", [TypeError, KeyError, AttributeError])
def test_a_mistake_of_the_table_is_no_unknown_signature(monkeypatch: pytest.MonkeyPatch, mistake: type[Exception]):
    """It would hide behind a warning, and the operator would be priced by the bytes that it moves."""

    def mistaken(call: OperatorCall, context: object) -> list[object]:
        raise mistake("ours")

    monkeypatch.setitem(TABLE, "aten::mm", mistaken)
    with pytest.raises(mistake, match="ours"):
        lowered(call(0, "aten::mm", A, B, out=C))


def test_an_unknown_view_and_host_work_launch_nothing():
    graph = lowered(
        call(0, "mylib::alias", A, out=tensor(9, 4, 8, storage=1)),
        call(1, "mylib::tokenize", tensor(5, 8, device="cpu"), out=tensor(6, 8, device="cpu")),
        call(2, "aten::mul", tensor(1, 0, 8), 2, out=tensor(2, 0, 8)),
    )
    assert not graph.tasks
    assert not unknown_operators(graph)


def test_an_unknown_operator_in_place_does_work():
    assert unknown_operators(lowered(call(0, "mylib::update_", A, out=A))) == {"mylib::update_": 1}


def test_the_stream_of_a_trace_is_kept():
    assert lowered(call(0, "aten::mm", A, B, out=C, stream=7)).tasks[0].stream == 7


def test_a_collective_runs_beside_and_its_user_waits():
    graph = lowered(
        call(0, "aten::mm", A, B, out=C),
        call(1, "c10d::allreduce_", (C,), out=(C,), process_group="dp"),
        call(2, "nccl:all_reduce", C, parent=1),
        call(3, "aten::mm", A, B, out=tensor(9, 8, 6)),
        call(4, "aten::add_", C, C, out=C),
        process_groups={"dp": (0, 2)},
        world_size=4,
    )
    collective = graph.tasks[1].collective
    assert collective is not None
    assert (collective.kind, collective.ranks, collective.sequence, collective.size_bytes) == (
        "all_reduce",
        (0, 2),
        0,
        192,
    )
    assert [task.kind for task in graph.tasks] == ["kernel", "collective", "kernel", "kernel"]
    actions = graph.threads["main"]
    waits = [place for place, action in enumerate(actions) if isinstance(action, StreamWait)]
    launches = [place for place, action in enumerate(actions) if isinstance(action, Launch)]
    assert actions[waits[0]].stream == graph.tasks[1].stream != 0
    assert launches[2] < waits[1] < launches[3]
    assert sum(isinstance(action, RecordEvent) for action in actions) == 2


def test_collectives_of_a_group_are_numbered():
    graph = lowered(*(call(n, "c10d::allgather_", (A,), out=(A,), process_group=g) for n, g in enumerate("aab")))
    assert [task.collective.sequence for task in graph.tasks] == [0, 1, 0]  # type: ignore[union-attr]


def test_a_captured_step_lowers_to_one_launch_per_task():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).to("meta")
    data = torch.empty(4, 8, device="meta")

    def step() -> None:
        model.zero_grad()
        model(data).sum().backward()

    trace = capture(CapturedWorkload("toy", model, step))
    graph = lower(trace)
    assert Counter(task.name for task in graph.tasks) == {
        "aten::addmm": 1,
        "aten::gelu": 1,
        "aten::native_layer_norm": 1,
        "aten::sum": 2,
        "aten::ones_like": 1,
        "aten::native_layer_norm_backward": 2,
        "aten::gelu_backward": 1,
        "aten::mm": 1,
    }
    assert set(graph.threads) == {"main", "autograd"}


def recorded(name: str) -> RankGraph:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"{path} is absent: the public traces are not on this machine")
    return lower(read_execution_trace(path))


def test_launches_of_a_recorded_step_are_those_of_its_profile():
    """The counts on the right are kernels per iteration of the profile taken in the same run (40 iterations)."""
    graph = recorded("linear_2080Ti/linear_et.json.gz")
    counts = Counter(task.name for task in graph.tasks)
    expected = {
        "aten::addmm": 21,
        "aten::mm": 41,
        "aten::clamp_min": 21,
        "aten::threshold_backward": 21,
        "aten::sum": 21,
        "aten::_foreach_add_": 2,
        "aten::_softmax": 1,
        "aten::_log_softmax": 1,
        "aten::_log_softmax_backward_data": 1,
        "aten::nll_loss_forward": 1,
        "aten::nll_loss_backward": 1,
        "aten::mul": 1,
    }
    assert {name: counts[name] for name in expected} == expected
    assert not unknown_operators(graph)
    products = [task.operators[0] for task in graph.tasks if task.name == "aten::addmm"]
    assert set(products) == {Gemm(1, 512, 1024, 1024, transpose_b=True, bias=True)}


@pytest.mark.parametrize(
    ("name", "convolutions", "norms"),
    [
        ("execution_traces/resnet_1gpu_et.json.tar.gz", 159, 159),
        ("execution_traces/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz", 159, 159),
        ("execution_traces/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz", 159, 159),
    ],
)
def test_recorded_convolutional_networks(name: str, convolutions: int, norms: int):
    """Three iterations of ResNet-50: 53 convolutions each, all gradients but that of the pictures."""
    graph = recorded(name)
    counts = Counter(task.name for task in graph.tasks)
    assert counts["aten::cudnn_convolution"] == convolutions
    assert counts["aten::convolution_backward"] == 2 * convolutions - 3
    assert counts["aten::cudnn_batch_norm"] == counts["aten::cudnn_batch_norm_backward"] == norms
    assert not unknown_operators(graph)


def test_a_recorded_transformer():
    graph = recorded("execution_traces/hf_GPT2_et.json.tar.gz")
    counts = Counter(task.name for task in graph.tasks)
    assert (counts["aten::mm"], counts["aten::bmm"], counts["aten::addmm"]) == (291, 216, 144)
    assert not unknown_operators(graph)


def test_recorded_calls_tell_what_is_inside_pieces_and_between_which_ranges():
    """linear(t, mm(launch)), then an optimizer's step: half a record for each begin and each end."""
    around = {"annotations": ("ProfilerStep#3", "## forward ##")}
    graph = lowered(
        call(0, "aten::linear", A, B, out=C, rf_id=1, **around),
        call(1, "aten::t", A, out=A, parent=0, rf_id=2, **around),
        call(2, "aten::mm", A, B, out=C, parent=0, rf_id=3, **around),
        call(3, "aten::mul_", C, 2.0, out=C, rf_id=4, annotations=("ProfilerStep#3", "Optimizer.step#SGD.step")),
    )
    pieces = [
        (graph.calls[each.call].name, each.kind, each.records) for each in graph.actions() if isinstance(each, HostWork)
    ]
    assert pieces == [
        ("annotation", "T1", None),  # the forward range begins; the profiler's own is no part of a step
        ("aten::linear", "T2", 1.5),  # t begins and ends, mm begins
        ("aten::linear", "T3", 1.0),  # mm and linear end
        ("Optimizer.step", "T1", None),
        ("aten::mul_", "T2", 0.0),
        ("aten::mul_", "T3", 0.5),
    ]


def test_a_captured_optimizer_begins_with_its_gap():
    graph = lowered(
        call(0, "aten::mm", A, B, out=C), OperatorCall(1, "aten::mul_", None, 0, (C, 2.0), (C,), "optimizer")
    )
    gaps = [graph.calls[each.call].name for each in graph.actions() if isinstance(each, HostWork) and each.kind == "T1"]
    assert gaps == ["aten::mm", "Optimizer.step"]
