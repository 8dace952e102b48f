"""Image models: ResNet-50, Inception-V3, and those of the library ``timm`` by name.

ResNet-50 (He et al., CVPR 2016) is as in common libraries: stride in the 3x3 convolution of a block. Inception-V3
(Szegedy et al., CVPR 2016) has its auxiliary classifier, which runs only in training.

``timm`` is used if it is installed (it is not a dependency of this project). It imports ``torchvision`` for image
loading; its models need only one class of it for comparison. If ``torchvision`` is absent or built for another PyTorch,
empty modules replace it while ``timm`` is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from costmodel.base.errors import InputError, ModelError

RESNET_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
RESNET_EXPANSION = 4


class Bottleneck(nn.Module):
    """Block of 1x1, 3x3, 1x1 convolutions with a shortcut, projected if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * RESNET_EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result = self.relu(self.bn1(self.conv1(data)))
        result = self.relu(self.bn2(self.conv2(result)))
        result = self.bn3(self.conv3(result))
        result += data if self.downsample is None else self.downsample(data)
        return self.relu(result)


class ResNet50(nn.Module):
    """ResNet-50: images (N, 3, 224, 224) to scores (N, classes)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (width, depth) in enumerate(RESNET_STAGES):
            for place in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if place == 0 and stage > 0 else 1))
                channels = width * RESNET_EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        data = self.maxpool(self.relu(self.bn1(self.conv1(data))))
        return self.fc(torch.flatten(self.avgpool(self.blocks(data)), 1))


Size = int | tuple[int, int]


class ConvUnit(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: Size, stride: int = 1, padding: Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn(self.conv(data)), inplace=True)


class PooledUnit(nn.Module):
    """Average pooling over 3x3, then a 1x1 unit."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.unit = ConvUnit(channels, out, 1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.unit(functional.avg_pool2d(data, kernel_size=3, stride=1, padding=1))


class Branches(nn.Module):
    """Branches over the same input, concatenated in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(data) for branch in self.branches], 1)


def chain(*units: nn.Module) -> nn.Module:
    """Combine modules in sequence."""
    return nn.Sequential(*units)


def block_a(channels: int, pooled: int) -> nn.Module:
    """Return a block at 35 x 35: 1x1, 5x5, double 3x3, pooling."""
    return Branches(
        ConvUnit(channels, 64, 1),
        chain(ConvUnit(channels, 48, 1), ConvUnit(48, 64, 5, padding=2)),
        chain(ConvUnit(channels, 64, 1), ConvUnit(64, 96, 3, padding=1), ConvUnit(96, 96, 3, padding=1)),
        PooledUnit(channels, pooled),
    )


def block_b(channels: int) -> nn.Module:
    """Return the block from 35 x 35 to 17 x 17."""
    return Branches(
        ConvUnit(channels, 384, 3, stride=2),
        chain(ConvUnit(channels, 64, 1), ConvUnit(64, 96, 3, padding=1), ConvUnit(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def block_c(channels: int, width: int) -> nn.Module:
    """Return a block at 17 x 17: 7x7 factored into 1x7 and 7x1."""
    row: tuple[tuple[int, int], tuple[int, int]] = ((1, 7), (0, 3))
    column: tuple[tuple[int, int], tuple[int, int]] = ((7, 1), (3, 0))
    return Branches(
        ConvUnit(channels, 192, 1),
        chain(
            ConvUnit(channels, width, 1),
            ConvUnit(width, width, row[0], padding=row[1]),
            ConvUnit(width, 192, column[0], padding=column[1]),
        ),
        chain(
            ConvUnit(channels, width, 1),
            ConvUnit(width, width, column[0], padding=column[1]),
            ConvUnit(width, width, row[0], padding=row[1]),
            ConvUnit(width, width, column[0], padding=column[1]),
            ConvUnit(width, 192, row[0], padding=row[1]),
        ),
        PooledUnit(channels, 192),
    )


def block_d(channels: int) -> nn.Module:
    """Return the block from 17 x 17 to 8 x 8."""
    return Branches(
        chain(ConvUnit(channels, 192, 1), ConvUnit(192, 320, 3, stride=2)),
        chain(
            ConvUnit(channels, 192, 1),
            ConvUnit(192, 192, (1, 7), padding=(0, 3)),
            ConvUnit(192, 192, (7, 1), padding=(3, 0)),
            ConvUnit(192, 192, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def block_e(channels: int) -> nn.Module:
    """Return a block at 8 x 8: 3x3 split into parallel 1x3 and 3x1."""

    def spread() -> nn.Module:
        return Branches(ConvUnit(384, 384, (1, 3), padding=(0, 1)), ConvUnit(384, 384, (3, 1), padding=(1, 0)))

    return Branches(
        ConvUnit(channels, 320, 1),
        chain(ConvUnit(channels, 384, 1), spread()),
        chain(ConvUnit(channels, 448, 1), ConvUnit(448, 384, 3, padding=1), spread()),
        PooledUnit(channels, 192),
    )


class Auxiliary(nn.Module):
    """Auxiliary classifier on the 17 x 17 features."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv0 = ConvUnit(channels, 128, 1)
        self.conv1 = ConvUnit(128, 768, 5)
        self.fc = nn.Linear(768, classes)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        data = functional.avg_pool2d(data, kernel_size=5, stride=3)
        data = functional.adaptive_avg_pool2d(self.conv1(self.conv0(data)), (1, 1))
        return self.fc(torch.flatten(data, 1))


class InceptionV3(nn.Module):
    """Inception-V3: images (N, 3, 299, 299) to scores (N, classes); in training also the auxiliary scores."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = chain(
            ConvUnit(3, 32, 3, stride=2),
            ConvUnit(32, 32, 3),
            ConvUnit(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            ConvUnit(64, 80, 1),
            ConvUnit(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed5 = chain(block_a(192, 32), block_a(256, 64), block_a(288, 64))
        self.mixed6 = chain(block_b(288), block_c(768, 128), block_c(768, 160), block_c(768, 160), block_c(768, 192))
        self.auxiliary = Auxiliary(768, classes)
        self.mixed7 = chain(block_d(768), block_e(1280), block_e(2048))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(2048, classes)

    def forward(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        data = self.mixed6(self.mixed5(self.stem(data)))
        auxiliary = self.auxiliary(data) if self.training else None
        data = functional.adaptive_avg_pool2d(self.mixed7(data), (1, 1))
        return self.fc(torch.flatten(self.dropout(data), 1)), auxiliary


TIMM_NEEDED = "pip install --no-deps timm"
_ABSENT = "torchvision"


class _Anything(type):
    """Class whose attributes are such classes: members of enumerations, nested functions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(cls, name, made)
        return made


class _StandIn(ModuleType):
    """Package from which any name can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finder of :class:`_StandIn` for ``torchvision`` and its submodules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


@contextmanager
def _without_torchvision() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if each.partition(".")[0] == _ABSENT]:
            del sys.modules[name]


@cache
def timm_library() -> Any:
    """Return the module ``timm``; raise ``InputError`` with installation advice if it is absent."""
    try:
        importlib.import_module(_ABSENT)
        return importlib.import_module("timm")
    except (ImportError, RuntimeError):
        for name in [each for each in sys.modules if each.partition(".")[0] in (_ABSENT, "timm")]:
            del sys.modules[name]
    try:
        with _without_torchvision():
            return importlib.import_module("timm")
    except ImportError as error:
        raise InputError(f"timm is not installed ({error}); it is optional: {TIMM_NEEDED}") from None


def has_timm() -> bool:
    """True if models of ``timm`` can be built here."""
    try:
        timm_library()
    except InputError:
        return False
    return True


def timm_module(
    name: str, side: int | None = None, *, fused_attention: bool = True, fast_norm: bool = False, **arguments: Any
) -> tuple[torch.nn.Module, int]:
    """Return the model ``name`` on the meta device, and the side of its images in pixels.

    ``side``: replaces the model's own. ``fused_attention``: as since PyTorch 2, by ``scaled_dot_product_attention``.
    ``fast_norm``: layer and group norm in the type of autocast instead of FP32 (timm's ``--fast-norm``). ``arguments``:
    further arguments of the model. Raise ``InputError`` for an unknown name, ``ModelError`` for a model that cannot be
    built without data.
    """
    timm = timm_library()
    if not timm.is_model(name.partition(".")[0]):
        raise InputError(f"model {name!r} is not known to timm {timm.__version__}; timm.list_models() lists them all")
    timm.layers.set_fused_attn(fused_attention)
    timm.layers.set_fast_norm(fast_norm)
    own = timm.get_pretrained_cfg(name)
    size = own.input_size[-1] if own is not None else 224
    try:
        model = _made(timm, name, None if side in (None, size) else side, arguments)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"timm's {name} cannot be built without data: {error}; choose another model") from None
    return model, side or size


def _made(timm: Any, name: str, side: int | None, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Build the model; models of a fixed size take it as an argument, which the others do not have."""
    with torch.device("meta"):
        if side is not None:
            try:
                return timm.create_model(name, img_size=side, **arguments)
            except TypeError:
                pass
        return timm.create_model(name, **arguments)
