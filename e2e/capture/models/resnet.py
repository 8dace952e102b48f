"""ResNet-50 (He et al., CVPR 2016) as in common libraries: stride in the 3x3 convolution of a block."""

from __future__ import annotations

import torch
from torch import nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


class Bottleneck(nn.Module):
    """Block of 1x1, 3x3, 1x1 convolutions with a shortcut, projected if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
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
        for stage, (width, depth) in enumerate(STAGES):
            for place in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if place == 0 and stage > 0 else 1))
                channels = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        data = self.maxpool(self.relu(self.bn1(self.conv1(data))))
        return self.fc(torch.flatten(self.avgpool(self.blocks(data)), 1))
