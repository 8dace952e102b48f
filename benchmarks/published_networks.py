"""Networks that neither `fusion.modelzoo` nor timm has, written from their papers: inputs of `benchmarks/models.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ConvNormActivation(nn.Sequential):
    """A convolution without bias, its batch norm, an activation where there is one; (N, C, H, W) to (N, C', H', W')."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1,
        activation: Callable[[], nn.Module] | None = nn.ReLU,
    ) -> None:  # fmt: skip
        layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)]
        layers += [nn.BatchNorm2d(outputs)] + ([] if activation is None else [activation()])
        super().__init__(*layers)


class ShuffleUnit(nn.Module):
    """A block of ShuffleNetV2 (Ma et al., ECCV 2018): half of the channels passes, both halves are interleaved."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        if stride == 2:
            self.skip = nn.Sequential(
                ConvNormActivation(inputs, inputs, 3, 2, inputs, activation=None), ConvNormActivation(inputs, half)
            )
        self.body = nn.Sequential(
            ConvNormActivation(inputs if stride == 2 else half, half),
            ConvNormActivation(half, half, 3, stride, half, activation=None),
            ConvNormActivation(half, half),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        passed, taken = (self.skip(x), x) if self.stride == 2 else x.chunk(2, dim=1)
        joined = torch.cat((passed, self.body(taken)), dim=1)
        batch, channels, height, width = joined.shape
        return joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


def shufflenet_v2() -> nn.Module:
    """ShuffleNetV2 1.0x: (1, 3, 224, 224) to 1,000 classes."""
    blocks: list[nn.Module] = [ConvNormActivation(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
        for index in range(repeats):
            blocks.append(ShuffleUnit(inputs, outputs, 2 if index == 0 else 1))
            inputs = outputs
    blocks += [ConvNormActivation(inputs, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*blocks)


class CrossStage(nn.Module):
    """The C2f block of YOLOv8: every bottleneck's output is kept and all are concatenated."""

    def __init__(self, inputs: int, outputs: int, repeats: int, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.shortcut = shortcut
        self.opening = ConvNormActivation(inputs, outputs, activation=nn.SiLU)
        self.bottlenecks = nn.ModuleList(
            nn.Sequential(*(ConvNormActivation(half, half, 3, activation=nn.SiLU) for _ in range(2)))
            for _ in range(repeats)
        )
        self.closing = ConvNormActivation((2 + repeats) * half, outputs, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, outputs, H, W)."""
        parts = list(self.opening(x).chunk(2, dim=1))
        for bottleneck in self.bottlenecks:
            made = bottleneck(parts[-1])
            parts.append(parts[-1] + made if self.shortcut else made)
        return self.closing(torch.cat(parts, dim=1))


class PooledPyramid(nn.Module):
    """The SPPF block: three max poolings in a row, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.opening = ConvNormActivation(channels, channels // 2, activation=nn.SiLU)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.closing = ConvNormActivation(channels * 2, channels, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        parts = [self.opening(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.closing(torch.cat(parts, dim=1))


class YoloV8Nano(nn.Module):
    """Backbone, neck and convolutions of the heads of YOLOv8n (Ultralytics, 2023), before boxes are decoded."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        down = [(3, 16), (16, 32), (32, 64), (64, 128), (128, 256)]
        self.down = nn.ModuleList(ConvNormActivation(a, b, 3, 2, activation=nn.SiLU) for a, b in down)
        stages = [(32, 1), (64, 2), (128, 2), (256, 1)]
        self.stages = nn.ModuleList(CrossStage(width, width, repeats, True) for width, repeats in stages)
        self.pyramid = PooledPyramid(256)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.neck = nn.ModuleList(
            CrossStage(a, b, 1, False) for a, b in [(384, 128), (192, 64), (192, 128), (384, 256)]
        )
        self.shrink = nn.ModuleList(ConvNormActivation(c, c, 3, 2, activation=nn.SiLU) for c in (64, 128))
        self.boxes = nn.ModuleList(self._head(width, 64, 64) for width in (64, 128, 256))
        self.classes = nn.ModuleList(self._head(width, 80, classes) for width in (64, 128, 256))

    @staticmethod
    def _head(inputs: int, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            ConvNormActivation(inputs, width, 3, activation=nn.SiLU),
            ConvNormActivation(width, width, 3, activation=nn.SiLU),
            nn.Conv2d(width, outputs, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 3, H, W) to three maps of (N, 144, H / s, W / s), s of 8, 16 and 32."""
        x = self.down[0](x)
        kept = []
        for down, stage in zip(list(self.down)[1:], self.stages, strict=True):
            x = stage(down(x))
            kept.append(x)
        deep = self.pyramid(x)
        middle = self.neck[0](torch.cat((self.up(deep), kept[2]), dim=1))
        fine = self.neck[1](torch.cat((self.up(middle), kept[1]), dim=1))
        middle = self.neck[2](torch.cat((self.shrink[0](fine), middle), dim=1))
        deep = self.neck[3](torch.cat((self.shrink[1](middle), deep), dim=1))
        levels = zip((fine, middle, deep), self.boxes, self.classes, strict=True)
        return tuple(torch.cat((boxes(level), classes(level)), dim=1) for level, boxes, classes in levels)


class UNet(nn.Module):
    """U-Net (Ronneberger et al., MICCAI 2015) with padded convolutions and batch norms, as it is used today."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.decoder = nn.ModuleList(self._pair(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(ConvNormActivation(inputs, outputs, 3), ConvNormActivation(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, classes, H, W)."""
        kept = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            kept.append(x)
        for grow, block, skipped in zip(self.grow, self.decoder, reversed(kept[:-1]), strict=True):
            x = block(torch.cat((skipped, grow(x)), dim=1))
        return self.last(x)


# Name: how it is made, height and width of its pictures.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "shufflenet_v2": (shufflenet_v2, 224),
    "yolov8n": (YoloV8Nano, 320),
    "unet": (UNet, 256),
}
