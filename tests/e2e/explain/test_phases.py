"""To which phase calls belong and how long phases last: drawn graphs, and captures of what training scripts do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.explain.prediction import Prediction
from e2e.step.execution_graph import AUTOGRAD as AUTOGRAD_THREAD
from e2e.step.execution_graph import Await, CallInfo, Duration, Signal
from e2e.step.operator_trace import MarkedCall, Phase, settled_phases
from e2e.traces.kineto import read_kineto
from e2e.traces.recorded_graph import recorded_graph
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.recorded_traces import AUTOGRAD, Profile
from tests.e2e.toy_predictions import predict_ranks, predict_step, setting


def drawn(phases: str, rank: int = 0) -> Drawing:
    """A kernel for each letter: forward 1 s, backward 2 s, optimizer 4 s, data 8 s, other 16 s, no call at all 32 s."""
    names: dict[str, Phase] = {"f": "forward", "b": "backward", "o": "optimizer", "d": "data", "x": "other"}
    drawing = Drawing(rank)
    for place, letter in enumerate(phases):
        if letter in names:
            drawing.calls[place] = CallInfo(place, letter, names[letter])
        drawing.kernel(letter, float(2 ** "fbodx-".index(letter)), launch=0, call=place)
    return drawing


def seconds(prediction: Prediction) -> tuple[float, ...]:
    return (
        prediction.forward_seconds,
        prediction.backward_seconds,
        prediction.optimizer_seconds,
        prediction.other_seconds,
    )


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ("ffbbo", (2, 4, 4, 0)),
        ("fbfbfbo", (3, 6, 4, 0)),  # accumulated gradients
        ("fbox", (1, 2, 4, 16)),
        ("dfbo", (1, 2, 4, 8)),
        ("fbo-", (1, 2, 4, 32)),
        ("fff", (3, 0, 0, 0)),
    ],
)
def test_phases_may_take_turns_and_sum_to_the_step(phases, expected):
    prediction = predict_ranks(together(drawn(phases))).prediction
    assert seconds(prediction) == pytest.approx(expected)
    assert sum(seconds(prediction)) == pytest.approx(prediction.critical_path_seconds)


def test_interleaved_passes_are_the_same_on_one_gpu_and_on_several():
    one = predict_ranks(together(drawn("fbfbfbo"))).prediction
    folded = predict_ranks(together(drawn("fbfbfbo"), multiplicity={0: 4})).prediction
    two = predict_ranks(together(drawn("fbfbfbo"), drawn("fbfbfbo", rank=1))).prediction
    assert seconds(one) == seconds(folded) == seconds(two) == pytest.approx((3, 6, 4, 0))
    assert (one.gpus, folded.gpus, two.gpus) == (1, 4, 2)


def test_what_runs_beside_a_pass_takes_no_time_from_it():
    """The inputs of the next step come on a stream of their own: 16 s while the backward pass runs, then alone."""
    drawing = Drawing()
    for place, phase in enumerate(("forward", "other", "backward")):
        drawing.calls[place] = CallInfo(place, phase, phase)
    drawing.kernel("f", 1.0, launch=0, call=0)
    drawing.kernel("inputs", 16.0, stream=9, launch=0, kind="copy", call=1)
    drawing.kernel("b", 20.0, launch=0, call=2)
    drawing.synchronize()
    beside = predict_ranks(together(drawing)).prediction
    assert seconds(beside) == pytest.approx((1, 20, 0, 0))
    drawing.tasks[2] = replace(drawing.tasks[2], duration=Duration.measured(9.0))
    longer = predict_ranks(together(drawing)).prediction
    assert seconds(longer) == pytest.approx((1, 9, 0, 6))


def test_a_layer_that_is_recomputed_is_part_of_the_backward_pass():
    """Its calls are those of the forward pass, launched by autograd's thread: 1 s forward, 1 + 2 s backward."""
    drawing = Drawing()
    drawing.calls = {0: CallInfo(0, "layer", "forward"), 1: CallInfo(1, "its gradient", "backward")}
    drawing.kernel("f", 1.0, launch=0, call=0)
    drawing.add(Signal(0), Await(1))
    drawing.add(Await(0), thread=AUTOGRAD_THREAD)
    drawing.kernel("f", 1.0, launch=0, call=0, thread=AUTOGRAD_THREAD)
    drawing.kernel("b", 2.0, launch=0, call=1, thread=AUTOGRAD_THREAD)
    drawing.add(Signal(1), thread=AUTOGRAD_THREAD)
    assert seconds(predict_ranks(together(drawing)).prediction) == pytest.approx((1, 3, 0, 0))


@pytest.mark.parametrize(
    ("marked", "settled"),
    [
        # Letters: phase as marked; a capital F is differentiated.
        ("fFbo", "ffbo"),
        ("fFbfoo", "ffbooo"),  # clipping
        ("fFbffFbo", "ffbfffbo"),  # the next micro-batch, with what is done to its data
        ("fFboff", "ffboxx"),  # averages of weights, reading the loss
        ("fFbff", "ffbxx"),  # no optimizer
        ("fFbofFbo", "ffboffbo"),  # two networks in turns
        ("fFbdfFbo", "ffbdffbo"),
        ("ff", "ff"),  # inference
        ("", ""),
    ],
)
def test_undifferentiated_calls_serve_what_comes_next(marked, settled):
    names: dict[str, Phase] = {"f": "forward", "b": "backward", "o": "optimizer", "d": "data", "x": "other"}
    differentiated = [place for place, letter in enumerate(marked) if letter == "F"]
    calls = []
    for place, letter in enumerate(marked):
        sequence = None if letter in "do" else place
        if letter == "b":
            sequence = max(each for each in differentiated if each < place)
        calls.append(MarkedCall(place, names[letter.lower()], sequence))
    found = settled_phases(calls)
    assert [found[place] for place in range(len(marked))] == [names[letter] for letter in settled]


def test_a_profile_tells_what_follows_the_optimizer(tmp_path):
    """A copy back to the host behind the step: by itself in a profile it looks like forward."""
    profile = Profile()
    profile.host("user_annotation", "ProfilerStep#1", 0, 1000)
    profile.operator("aten::addmm", 10, 20, **{"Sequence number": 5, "Fwd thread id": 0})
    profile.launch(15, 5, 30, 50)
    profile.operator(
        "autograd::engine::evaluate_function: AddmmBackward0", 100, 20, AUTOGRAD,
        **{"Sequence number": 5, "Fwd thread id": 1},
    )  # fmt: skip
    profile.launch(105, 5, 130, 100, thread=AUTOGRAD)
    profile.operator("aten::linalg_vector_norm", 300, 20)
    profile.launch(305, 5, 320, 10)
    profile.host("user_annotation", "Optimizer.step#SGD.step", 400, 50)
    profile.operator("aten::_foreach_add_", 410, 20)
    profile.launch(415, 5, 430, 40)
    profile.operator("aten::item", 500, 60)
    profile.launch(505, 5, 520, 10, call="cudaMemcpyAsync", name="Memcpy DtoH", category="gpu_memcpy")
    step = recorded_graph(read_kineto(profile.write(tmp_path / "trace.json")))
    calls = step.graph.ranks[0].calls
    found = {info.name.rpartition("::")[2]: info.phase for info in calls.values()}
    assert [found[name] for name in ("addmm", "linalg_vector_norm", "_foreach_add_", "item")] == [
        "forward", "optimizer", "optimizer", "other",
    ]  # fmt: skip


# --- captured scripts ----------------------------------------------------------------------------

PLAIN = """
import torch

def make_step(batch_size=8):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    data = torch.randn(batch_size, 32, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()

    return model, step
"""


def predicted(folder: Path, text: str = PLAIN, **options: bool) -> Prediction:
    """Every kernel takes a second, the host next to nothing: a phase lasts as long as it has kernels."""
    pytest.importorskip("torch")
    from e2e.capture import load_script
    from e2e.capture.script import capture_script

    (folder / "train.py").write_text(text, encoding="utf-8")
    trace = capture_script(load_script(f"{folder / 'train.py'}:make_step"))
    return predict_step(trace, setting(kernel=1.0, host=1e-9, **options)).prediction


def changed(old: str, new: str) -> str:
    assert old in PLAIN
    return PLAIN.replace(old, new)


def test_a_plain_step_has_three_phases(tmp_path):
    prediction = predicted(tmp_path)
    assert min(seconds(prediction)[:3]) >= 1 and prediction.other_seconds == 0
    assert sum(seconds(prediction)) == pytest.approx(prediction.iteration_seconds)


LAST = "        optimizer.step()\n"
BACKWARD = "        loss.backward()\n"
CLIPPED = BACKWARD + "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
SCALED = "        scaler.scale(loss).backward()\n"
SCALER_STEP = "        scaler.step(optimizer)\n        scaler.update()\n"
AVERAGED = (
    LAST
    + """
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters()):
                average.mul_(0.9).add_(parameter, alpha=0.1)
"""
)


def test_clipping_of_gradients_belongs_to_the_optimizer(tmp_path):
    plain, prediction = predicted(tmp_path), predicted(tmp_path, changed(BACKWARD, CLIPPED))
    assert seconds(prediction)[:2] == pytest.approx(seconds(plain)[:2])
    assert prediction.optimizer_seconds > plain.optimizer_seconds + 2
    assert prediction.other_seconds == 0


def test_a_scaler_checks_gradients_for_the_optimizer_and_is_updated_after_it(tmp_path):
    text = changed(BACKWARD, SCALED).replace(LAST, SCALER_STEP)
    plain, prediction = predicted(tmp_path), predicted(tmp_path, text)
    # The loss is multiplied by the scale, which the first step has made, and so is its gradient.
    assert seconds(prediction)[:2] == pytest.approx((plain.forward_seconds + 1, plain.backward_seconds + 1))
    assert prediction.optimizer_seconds > plain.optimizer_seconds + 2
    assert 0 < prediction.other_seconds < 5
    assert sum(seconds(prediction)) == pytest.approx(prediction.iteration_seconds)


@pytest.mark.parametrize("compiled", [False, True])
def test_averages_of_weights_after_the_optimizer_belong_to_no_pass(tmp_path, compiled):
    """Nor are they compiled with the model: two kernels for each of four parameters."""
    plain = predicted(tmp_path, compiled=compiled)
    prediction = predicted(tmp_path, changed(LAST, AVERAGED), compiled=compiled)
    assert seconds(prediction)[:3] == pytest.approx(seconds(plain)[:3])
    assert prediction.other_seconds == pytest.approx(2 * 4)


def test_inference_is_all_forward(tmp_path):
    text = changed(BACKWARD, "        loss.item()\n").replace(LAST, "")
    prediction = predicted(tmp_path, text)
    assert prediction.forward_seconds == pytest.approx(prediction.iteration_seconds)
    assert seconds(prediction)[1:] == (0, 0, 0)
