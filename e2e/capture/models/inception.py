"""Inception-V3 (Szegedy et al., CVPR 2016) with its auxiliary classifier, which runs only in training."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

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
