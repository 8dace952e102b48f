"""Scripts whose sizes or values depend on data, and recurrent layers: captured as CUDA would run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from costmodel.base.errors import ModelError
from costmodel.operators.device_work import Elementwise, Gemm
from e2e.capture.possible_values import true_share
from e2e.capture.script import capture_script, load_script
from e2e.lowering.lower_trace import lower, unknown_operators
from e2e.sources.built_in_model import assumptions
from e2e.step.execution_graph import RankGraph, Synchronize
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import StepOptions


def captured(
    step: Callable[[torch.Tensor], Any], *shape: int, module: nn.Module | None = None, selected: float = 1.0
) -> OperatorTrace:
    def make() -> tuple[nn.Module, Callable[[], Any]]:
        data = torch.randn(*shape, device="cuda")
        return module or nn.Identity(), lambda: step(data)

    options = StepOptions(mode="forward-backward", attention="flash", selected=selected)
    return capture_script(load_script(make), options)


def names(graph: RankGraph) -> list[str]:
    return [task.name for task in graph.tasks]


def test_item_under_inference_mode_waits_and_products_stay_products():
    layer = nn.Linear(64, 32, device="meta")

    def step(data: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found = layer(data)
            return found * found.sum().item()

    graph = lower(captured(step, 8, 64, module=layer))
    assert names(graph) == ["aten::addmm", "aten::sum", "Memcpy DtoH", "aten::mul"]
    assert graph.tasks[0].operators == (Gemm(1, 8, 32, 64, transpose_b=True, bias=True),)


def test_boxes_are_sorted_compared_and_kept():
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        if not hasattr(torch.ops.torchvision, "nms"):
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        trace = captured(lambda data: torch.ops.torchvision.nms(data, data[:, 0], 0.5), 1000, 4)
    assert not unknown_operators(lower(trace))
    assert assumptions([trace])


@pytest.mark.parametrize(
    "select",
    [
        lambda data: data[data[:, 0] > 0],
        lambda data: torch.masked_select(data, data > 0),
        lambda data: data[(data[:, 0] > 0).nonzero()[:, 0]],
        lambda data: torch.unique(data),
    ],
)
def test_selections_are_found_awaited_and_gathered(select: Callable[[torch.Tensor], torch.Tensor]):
    trace = captured(select, 1000, 4)
    graph = lower(trace)
    assert not unknown_operators(graph)
    order = names(graph)
    assert order.index("aten::nonzero") < order.index("Memcpy DtoH") < order.index("aten::index")
    (line,) = assumptions([trace])
    assert "1 selections by data" in line and "x[:k]" in line


@pytest.mark.parametrize("mask", [False, True], ids=["numbers", "mask"])
def test_an_index_of_the_host_is_copied_and_awaited_in_both_passes(mask: bool):
    rows = torch.arange(16, device="cpu")
    index = rows % 2 == 0 if mask else rows[::2]

    def step(data: torch.Tensor) -> None:
        data.requires_grad_()[index].sum().backward()

    trace = captured(step, 16, 8)
    graph = lower(trace)
    assert not assumptions([trace]) and "aten::nonzero" not in names(graph)
    found = [name for name in names(graph) if name in ("Memcpy HtoD", "aten::index", "aten::index_put")]
    assert found == ["Memcpy HtoD", "aten::index", "Memcpy HtoD", "aten::index_put"]
    assert sum(isinstance(action, Synchronize) for action in graph.actions()) == 2
    (gathered,) = [task for task in graph.tasks if task.name == "aten::index"]
    assert sum(each.write_bytes for each in gathered.operators) == 8 * 8 * 4  # type: ignore[union-attr, misc]


def test_a_mask_selects_all_or_the_share_that_is_said():
    sizes: list[torch.Size] = []

    def step(data: torch.Tensor) -> None:
        sizes.append(data[data[:, 0] > 0].shape)
        with true_share(0.25):
            sizes.append(data[data[:, 0] > 0].shape)

    captured(step, 1000, 4)
    assert sizes[-2:] == [(1000, 4), (250, 4)]
    trace = captured(step, 1000, 4, selected=0.5)
    assert sizes[-2:] == [(500, 4), (250, 4)]
    (line,) = assumptions([trace], selected=0.5)
    assert "find 50% of what they could (--selected)" in line and "where fewer" not in line
    (line,) = assumptions([trace], selected=0.0012)
    assert "find 0.12% of what they could" in line


def test_sizes_of_a_selection_that_is_taken_to_be_whole_are_told():
    def step(data: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(data, data > 0).view(8, 4)

    assert captured(step, 8, 8, selected=0.5)
    with pytest.raises(ModelError, match="invalid for input of size 64; selections by data .*--selected says which"):
        captured(step, 8, 8)
    with pytest.raises(ModelError, match="invalid for input of size 64; mend it"):
        captured(lambda data: data.view(8, 4), 8, 8)


def test_a_mask_written_at_some_places_selects_no_more():
    sizes: list[torch.Size] = []

    def step(data: torch.Tensor) -> None:
        positive = torch.where(data[:, 0] > 0)[0]
        first, second = (torch.zeros(data.shape[0], dtype=torch.uint8, device="cuda") for _ in range(2))
        first[positive[:128]] = 1
        second[positive[100:400]] = 1
        for mask in (first | second, torch.cat([first, second]), first & second, first.bool() & (data[:, 1] > 0)):
            sizes.append(torch.where(mask)[0].shape)
        second.bitwise_or_(positive.to(torch.uint8))
        sizes.append(torch.where(second)[0].shape)

    captured(step, 100_000, 4)
    assert [size.numel() for size in sizes[-5:]] == [428, 428, 128, 128, 100_000]


def test_a_sample_of_labelled_boxes_has_no_more_positive_ones_than_were_drawn():
    sizes: list[int] = []

    def find(mask: torch.Tensor) -> torch.Tensor:
        (found,) = torch.where(mask)
        sizes.append(found.numel())
        return found

    def step(data: torch.Tensor) -> None:
        labels = torch.tensor([3, 5], device="cuda")[data.argmax(1)]
        labels[data[:, 0] < 0.5] = 80
        labels[data[:, 0] < 0.4] = -1
        positive, negative = find((labels != -1) & (labels != 80)), find(labels == 80)
        drawn = torch.cat([found[torch.randperm(found.numel(), device="cuda")[:most]] for found, most in (
            (positive, 128), (negative, 384))])  # fmt: skip
        sample = torch.cat([labels[drawn], labels[drawn]])
        for mask in ((sample >= 0) & (sample < 80), sample == 80, sample == -1, sample >= 0):
            find(mask)
        # The same by a mask of the places, and after labels were written: anything again.
        chosen = torch.zeros_like(labels, dtype=torch.uint8)
        chosen[drawn] = 1
        find(labels[find(chosen)] != 80)
        labels.copy_(data[:, 1])
        find(labels[drawn] != 80)
        # Labels of sampled places, others ignored.
        labels.fill_(-1)
        labels.scatter_(0, drawn[:128], 1)
        labels.scatter_(0, drawn[128:], 0)
        for mask in (labels == 1, labels >= 0, labels == -1, labels == 2):
            find(mask)
        # Labels of a sample, of which the first are written as a whole.
        sample = torch.full((512,), 80, device="cuda")
        sample[:128] = data[:128, 0].long()
        find(sample != 80)

    captured(step, 2000, 2)
    assert sizes[-14:-5] == [2000, 2000, 256, 768, 0, 1024, 512, 128, 512]
    assert sizes[-5:] == [128, 512, 2000, 0, 128]


def test_every_level_has_its_share_of_the_boxes():
    sizes: list[int] = []

    def step(data: torch.Tensor) -> None:
        level = torch.clamp(torch.floor(data[:, 0].log2()), min=2, max=5).to(torch.int64) - 2
        sizes.extend(torch.where(level == each)[0].numel() for each in range(5))
        expert = data.softmax(1).topk(2)[1]
        sizes.extend(torch.where(expert == each)[0].numel() for each in range(4))

    captured(step, 1000, 4)
    assert sizes[-9:] == [250, 250, 250, 250, 0, *[500] * 4]


def test_few_real_numbers_are_equal_to_maxima():
    sizes: list[int] = []

    def step(data: torch.Tensor) -> None:
        sizes.append((data == data.max(0, keepdim=True)[0]).nonzero().shape[0])

    captured(step, 1000, 4)
    assert sizes[-1] == 4


def test_rows_without_a_visible_point_are_not_selected():
    """Three objects of two points each; the third has none that is visible."""
    sizes: list[int] = []
    points = torch.tensor([[[1.0, 2, 2], [3, 4, 2]], [[5, 6, 2], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]], device="cpu")

    def step(data: torch.Tensor) -> None:
        found = points.to("cuda")[data[:, :3].argmax(1)]
        inside = (found[:, :, 0] > data[:, 1:2]) & (found[:, :, 1] > data[:, 2:3])
        visible = inside & (found[:, :, 2] > 0)
        sizes.append(torch.where(visible.any(dim=1))[0].numel())
        sizes.append(torch.nonzero(visible.long().view(-1).to(torch.uint8)).shape[0])

    captured(step, 300, 4)
    assert sizes[-2:] == [200, 300]


def test_values_on_the_host_are_copied_there_and_back():
    def step(data: torch.Tensor) -> torch.Tensor:
        array = (data * 2).cpu().numpy()
        assert array.shape == (16, 4)
        return torch.zeros(16, 4).to("cuda") + data

    def on_host(data: torch.Tensor) -> torch.Tensor:
        return torch.randn(16, 4, device="cpu").to("cuda") + data

    assert names(lower(captured(step, 16, 4)))[:2] == ["aten::mul", "Memcpy DtoH"]
    assert names(lower(captured(on_host, 16, 4))) == ["Memcpy HtoD", "aten::add"]


def test_an_lstm_is_one_call_each_way_and_its_launches_are_those_of_time_steps():
    """Two layers of 16 units, 10 steps of 4 samples of 8 features."""
    network = nn.LSTM(8, 16, num_layers=2, device="meta")
    trace = captured(lambda data: network(data)[0].sum().backward(), 10, 4, 8, module=network)
    calls = Counter(call.name for call in trace.calls)
    assert calls["aten::_cudnn_rnn"] == calls["aten::_cudnn_rnn_backward"] == 1
    assert calls["CudnnRnnBackward0"] == 1  # PyTorch's node, by which measured hosts know it
    graph = lower(trace)
    forward = [task for task in graph.tasks if task.name == "aten::_cudnn_rnn"]
    backward = [task for task in graph.tasks if task.name == "aten::_cudnn_rnn_backward"]
    assert len(forward) == 2 * (1 + 2 * 10) and len(backward) == 2 * (2 * 10 + 3)
    assert forward[0].operators == (Gemm(1, 40, 64, 8, transpose_b=True),)
    assert forward[1].operators == (Gemm(1, 4, 64, 16, transpose_b=True),)
    # Products: twice as many floating-point operations backward as forward, but for the state before the first step.
    flops = [
        sum(op.flops for task in tasks for op in task.operators if isinstance(op, Gemm))
        for tasks in (forward, backward)
    ]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.01)
    # The first parameters' gradients are there, as an optimizer needs them.
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_packed_sequences_are_one_call_too_and_their_steps_have_fewer_and_fewer_rows():
    network = nn.LSTM(8, 16, device="meta")

    def step(data: torch.Tensor) -> None:
        packed = nn.utils.rnn.pack_padded_sequence(data, torch.tensor([5, 3, 3], device="cpu"))
        output, _ = nn.utils.rnn.pad_packed_sequence(network(packed)[0])
        assert output.shape == (5, 3, 16)
        output.sum().backward()

    trace = captured(step, 5, 3, 8, module=network)
    calls = Counter(call.name for call in trace.calls)
    assert calls["aten::_cudnn_rnn"] == calls["aten::_cudnn_rnn_backward"] == 1
    products: dict[str, list[int]] = {"aten::_cudnn_rnn": [], "aten::_cudnn_rnn_backward": []}
    for task in lower(trace).tasks:
        products.get(task.name, []).extend(each.m for each in task.operators if isinstance(each, Gemm))
    assert products["aten::_cudnn_rnn"] == [11, 3, 3, 3, 1, 1]
    assert products["aten::_cudnn_rnn_backward"] == [1, 1, 3, 3, 3, 11, 64, 64]


@pytest.mark.parametrize("host", [True, False])
def test_ctc_takes_its_lengths_from_the_host_and_goes_step_by_step(host: bool):
    place = "cpu" if host else "meta"
    layer = nn.Linear(8, 32, device="meta")

    def step(data: torch.Tensor) -> None:
        targets = torch.randint(1, 32, (60,) if host else (3, 20), device=place)
        lengths = torch.full((3,), 10, device=place), torch.full((3,), 20, device=place)
        loss = nn.functional.ctc_loss(layer(data).log_softmax(-1), targets, *lengths, zero_infinity=True)
        assert loss.shape == ()
        loss.backward()

    graph = lower(captured(step, 10, 3, 8, module=layer))
    steps = (Elementwise("fused", 3 * 41, 3, 1, 0, "float32"),) * 10
    tasks = [task.operators for task in graph.tasks if "_ctc_loss" in task.name]
    assert tasks == [steps, steps, (Elementwise("fused", 10 * 3 * 32, 2, 1, 0, "float32"),)]
    assert layer.weight.grad is not None


def test_the_inverse_of_a_spectrogram_is_taken_to_have_a_proper_window():
    window = torch.ones(16, device="meta")

    def step(data: torch.Tensor) -> None:
        there = torch.stft(data, 16, 4, window=window, return_complex=True)
        assert torch.istft(there, 16, 4, window=window).shape == (2, 64)

    assert "aten::_fft_c2r" in names(lower(captured(step, 2, 64)))


def test_samples_of_a_beta_distribution_have_gradients():
    layer = nn.Linear(8, 2, device="meta")

    def step(data: torch.Tensor) -> None:
        first, second = layer(data).exp().unbind(-1)
        torch.distributions.Beta(first, second).rsample().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.shape == (2, 8)

    assert "aten::_dirichlet_grad" in names(lower(captured(step, 4, 8, module=layer)))


def test_a_gru_in_both_directions_gives_the_right_shapes():
    network = nn.GRU(8, 16, bidirectional=True, batch_first=True, device="meta")
    shapes: list[torch.Size] = []

    def step(data: torch.Tensor) -> None:
        output, last = network(data)
        shapes.extend([output.shape, last.shape])

    graph = lower(captured(step, 4, 10, 8, module=network))
    assert shapes[-2:] == [(4, 10, 32), (2, 4, 16)]
    assert sum(name == "aten::_cudnn_rnn" for name in names(graph)) == 2 * (1 + 2 * 10)


@pytest.mark.parametrize(("kind", "gates", "sums"), [(nn.LSTMCell, 4, 1), (nn.GRUCell, 3, 2)])
def test_a_cell_is_two_products_and_one_fused_kernel(kind: type, gates: int, sums: int):
    cell = kind(8, 16, device="meta")

    def step(data: torch.Tensor) -> None:
        state = cell(data)
        hidden = cell(data, state)
        (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()

    trace = captured(step, 4, 8, module=cell)
    graph = lower(trace)
    fused = f"aten::_thnn_fused_{kind.__name__.lower().replace('cell', '_cell')}"
    tasks = Counter(task.name for task in graph.tasks)
    assert tasks[fused] == tasks[f"{fused}_backward"] == 2
    # Two products forward; backward the weights' two, and the state's of the second cell.
    assert tasks["aten::mm"] == 2 * 2 + 2 * 2 + 1 and tasks["aten::sum"] == 2 * sums + 1
    assert not any("sigmoid" in name or "tanh" in name for name in tasks)
    first = next(task.operators[0] for task in graph.tasks if task.name == fused)
    assert first == Elementwise("fused", 4 * 16, 2 * gates + 1, 6, 0, "float32")
    assert all(each.grad is not None and each.grad.shape == each.shape for each in cell.parameters())


@pytest.mark.parametrize("recurs", [True, False])
def test_layers_without_their_library_are_named_and_others_of_their_name_are_not(recurs: bool):
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.zeros(4))
            self.project = nn.Linear(4, 4)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.project(data) * (-self.decay.exp() if recurs else self.decay)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Mixer()

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return (-data.exp()) + self.mixer(data)

    with torch.device("meta"):
        module = Layer()
    found = assumptions([captured(module, 8, 4, module=module)])
    assert len(found) == recurs
    assert all("selective scan" in line and "mamba_ssm" in line for line in found)


def test_experts_of_each_token_are_as_many_as_were_set_and_share_them_evenly():
    """As a router of Megatron-LM marks them: two of six experts for each of ten tokens."""
    counts, rows = [], []

    def step(data: torch.Tensor) -> None:
        chosen = torch.zeros_like(data).int().scatter(1, data.topk(2, dim=1).indices, 1).bool()
        counts.append(chosen.sum(dim=0).tolist())
        counts.append(chosen.sum(dim=0).reshape(2, 3).sum(1).tolist())
        places = torch.arange(10, device="cuda").expand(6, 10)
        rows.append(places.masked_select(chosen.T.contiguous()).shape[0])

    trace = captured(step, 10, 6)
    assert counts[-2:] == [[4, 4, 3, 3, 3, 3], [11, 9]] and rows[-1] == 20
    (told,) = assumptions([trace])  # the selection finds what was set
    assert told.startswith("2 counts of data (bincount, histc, sums of masks) are taken to be even")


def test_sums_of_a_mask_by_comparison_are_not_known():
    trace = captured(lambda data: (data > 0).sum(dim=0) + 1, 10, 6)
    assert not assumptions([trace])
