"""Image models by other libraries' names, and by layout."""

from __future__ import annotations

import importlib
import sys

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.layers import Conv2d
from e2e.capture.models import image_models
from e2e.capture.models.catalog import build
from e2e.capture.session import capture
from e2e.lowering.lower_trace import lower
from e2e.step.options import StepOptions


def test_torchvision_can_be_imported_from_while_it_is_stood_in_for(monkeypatch):
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    with image_models._without_torchvision():
        misc = importlib.import_module("torchvision.ops.misc")
        modes = importlib.import_module("torchvision.transforms").InterpolationMode
        assert not isinstance(3, misc.FrozenBatchNorm2d)
        assert len({modes.NEAREST: 0, modes.BICUBIC: 1}) == 2
    assert "torchvision" not in sys.modules


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    image_models.timm_library.cache_clear()
    try:
        with pytest.raises(InputError, match="pip install --no-deps timm"):
            build("timm/resnet18", 1)
        assert not image_models.has_timm()
    finally:
        image_models.timm_library.cache_clear()


@pytest.mark.parametrize(("layout", "expected"), [("contiguous", False), ("channels-last", True)])
def test_the_layout_of_a_built_in_model_is_that_of_all_its_convolutions(layout, expected):
    options = StepOptions(mode="inference", layout=layout)
    graph = lower(capture(build("resnet50", 4, options=options), options))
    found = [each.channels_last for task in graph.tasks for each in task.operators if isinstance(each, Conv2d)]
    assert len(found) == 53 and set(found) == {expected}
