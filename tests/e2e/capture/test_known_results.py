"""Results that are remembered are those that PyTorch would compute again; captures are the same with and without."""

# ruff: noqa: E402

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from e2e.capture.meta_results import KnownResults
from e2e.capture.models.catalog import build, build_from_config
from e2e.capture.models.configurations import PRESETS
from e2e.capture.session import capture
from e2e.step.operator_trace import OperatorCall, OperatorTrace
from e2e.step.options import StepOptions

aten = torch.ops.aten
SMALL = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 16}
SWITCH = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 8}


def meta(*shape: int, **options: object) -> object:
    return torch.empty(shape, device="meta", **options)


def captured(name: str, config: dict, options: StepOptions):
    return capture(build_from_config(config, 2, 8, options, name), options)


def numbered_from_zero(trace: OperatorTrace) -> list[OperatorCall]:
    """PyTorch counts autograd nodes through all captures of a process."""
    first = min((call.sequence for call in trace.calls if call.sequence is not None), default=0)
    return [call if call.sequence is None else replace(call, sequence=call.sequence - first) for call in trace.calls]


WORKLOADS = {
    "gpt2 train": lambda o: captured("gpt2", {**PRESETS["gpt2"], **SMALL}, o),
    "switch": lambda o: captured("switch", {**PRESETS["switch-base-8"], **SWITCH}, o),
    "resnet": lambda o: capture(build("resnet-50", 1, None, o), o),
    "dlrm": lambda o: capture(build("dlrm-random-4", 8, None, o), o),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in WORKLOADS), ("gpt2 train", "bfloat16")])
def test_a_capture_is_the_same_as_one_that_computes_every_call(name, dtype, monkeypatch):
    options = StepOptions(mode="train", dtype=dtype)
    remembered = WORKLOADS[name](options)
    monkeypatch.setattr(KnownResults, "_makes_results", lambda self, func: False)
    computed = WORKLOADS[name](options)
    assert numbered_from_zero(remembered) == numbered_from_zero(computed)


def test_alike_layers_are_computed_once(monkeypatch):
    seen: list[KnownResults] = []
    run = KnownResults.run

    def noted(self, func, args, kwargs):
        seen.append(self)
        return run(self, func, args, kwargs)

    monkeypatch.setattr(KnownResults, "run", noted)
    trace = captured("gpt2", {**PRESETS["gpt2"], **SMALL, "n_layer": 6}, StepOptions(mode="train"))
    assert seen[0].hits > len(trace.calls) / 4


def test_same_shapes_give_new_tensors_of_the_same_layout():
    known = KnownResults()
    first = known.run(aten.mm.default, (meta(2, 3), meta(3, 4)), {})
    second = known.run(aten.mm.default, (meta(2, 3), meta(3, 4)), {})
    assert known.hits == 1
    assert second.shape == (2, 4)
    assert second.stride() == first.stride()
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_strides_types_and_numbers_tell_calls_apart():
    known = KnownResults()
    calls = [
        (meta(4, 4), 1),
        (meta(4, 4).t(), 1),
        (meta(4, 4, dtype=torch.float16), 1),
        (meta(4, 4, dtype=torch.int64), 1),
        (meta(4, 4, dtype=torch.int64), 1.0),
    ]
    results = [known.run(aten.add.Scalar, call, {}) for call in calls]
    assert known.hits == 0
    assert [result.dtype for result in results[-2:]] == [torch.int64, torch.float32]
    assert results[1].stride() == (1, 4)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, lambda: (meta(4, 4), [16])),
        (aten._unsafe_view.default, lambda: (meta(4, 4), [16])),
        (aten.add_.Tensor, lambda: (meta(4), meta(4))),
        (aten.nonzero.default, lambda: (meta(4),)),
        (aten.any.default, lambda: (meta(4),)),
    ],
)
def test_views_writes_and_what_depends_on_values_are_always_run(func, args):
    known = KnownResults()
    for _ in range(2):
        known.run(func, args(), {})
    assert known.hits == 0


def test_a_view_stays_a_view():
    known = KnownResults()
    for _ in range(2):
        tensor = meta(4, 4)
        result = known.run(aten._unsafe_view.default, (tensor, [16]), {})
        assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
